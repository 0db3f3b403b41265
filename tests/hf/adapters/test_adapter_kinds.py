"""Each kind of adapter computes and trains as in PEFT, and goes to PEFT's files and back."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import (
    batch_of,
    losses_of,
    need,
    program_of,
    torch_logits,
    torch_losses,
    write,
)
from safetensors.numpy import load_file

import zerojax as zj
from zerojax.hf import model_of, read_peft

need("torch", "transformers", "peft")
pytestmark = [
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning"),
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of adapter.

    Attributes:
      options: options of the Lora.
      case: model, one of `hf_models.CASES`.
      model: options of `model_of`.
      tiers: tiers of the program's config.
    """

    options: dict[str, Any]
    case: str = "llama"
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    tiers: dict[str, str] = dataclasses.field(default_factory=dict)


ENDS = ("q_proj", "embed_tokens", "lm_head")
KINDS = {
    "rslora": Kind({"use_rslora": True, "targets": "all"}),
    "dora": Kind(
        {"use_dora": True, "targets": ("q_proj", "down_proj")}, "qwen2", {}, {"frozen": "nvme"}
    ),
    "dora-all": Kind({"use_dora": True, "targets": "all", "use_rslora": True}, "llama-biases"),
    "pissa": Kind({"init": "pissa", "targets": "all"}),
    "pissa-iterated": Kind({"init": "pissa_niter_4", "targets": "all"}),
    "pissa-dora": Kind({"init": "pissa", "use_dora": True, "use_rslora": True}),
    "ends": Kind({"targets": ENDS}),
    "embedding-scaled": Kind({"targets": ("q_proj", "embed_tokens")}, "gemma2"),
    "saved": Kind({"modules_to_save": ("norm", "lm_head", "embed_tokens")}, "qwen3"),
    "tiles": Kind({"targets": "all"}, "llama-biases", {"mlp_tiles": 4}),
}


def lora_of(kind: Kind) -> zj.Lora:
    return zj.Lora(**{"rank": 2, "alpha": 5, **kind.options})


def checkpoint(program: zj.Program, state: zj.TrainState, folder: pathlib.Path) -> pathlib.Path:
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return folder


def peft_model(base: Any, folder: pathlib.Path, is_trainable: bool = False) -> Any:
    import peft

    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=is_trainable)
    return model if is_trainable else model.eval()


def load(folder: pathlib.Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", trust_remote_code=False
    ).eval()


def numpy_logits(model: Any) -> np.ndarray:
    return torch_logits(model, batch_of()).detach().numpy()


def params_of(program: zj.Program, state: zj.TrainState) -> list[np.ndarray]:
    pieces = list(program.iter_params(state))
    return [np.asarray(a) for _, tree in pieces for a in jax.tree.leaves(tree)]


@pytest.mark.by_default("dora")
@pytest.mark.parametrize("name", list(KINDS))
def test_kind_trains_and_exports_as_in_peft(tmp_path, name):
    kind = KINDS[name]
    like = tmp_path / "model"
    theirs = write(kind.case, like)
    model = model_of(like, lora=lora_of(kind), **kind.model)
    program = program_of(model, "device", tmp_path, 1, **kind.tiers)
    state = zj.import_hf(program, like, key=jax.random.key(1))
    np.testing.assert_allclose(
        program.apply(state, batch_of()), numpy_logits(theirs), rtol=0, atol=1e-4
    )  # adapters start without an effect
    zj.export_peft(checkpoint(program, state, tmp_path / "start"), tmp_path / "first", like=like)
    losses, state = losses_of(program, state, steps=3)
    ckpt = checkpoint(program, state, tmp_path / "ckpt")
    zj.export_peft(ckpt, tmp_path / "adapters", like=like)
    adapted = peft_model(load(like), tmp_path / "adapters")
    logits = numpy_logits(adapted)
    assert np.abs(logits - numpy_logits(theirs)).max() > 1e-3
    np.testing.assert_allclose(program.apply(state, batch_of()), logits, rtol=0, atol=1e-5)
    if kind.case == "gemma2":
        with pytest.raises(ValueError, match="the head is tied to the embedding, and the adapter"):
            zj.export_hf(ckpt, tmp_path / "merged", like=like, merge_lora=True)
    else:
        zj.export_hf(ckpt, tmp_path / "merged", like=like, merge_lora=True)
        np.testing.assert_allclose(
            numpy_logits(load(tmp_path / "merged")), logits, rtol=0, atol=1e-5
        )
    if "pissa" not in name:  # whose export has two adapters in one
        trained = peft_model(load(like), tmp_path / "first", is_trainable=True)
        parameters = [p for p in trained.parameters() if p.requires_grad]
        np.testing.assert_allclose(
            losses, torch_losses(trained, steps=3, parameters=parameters), rtol=0, atol=1e-4
        )


@pytest.mark.exhaustive  # by default, a folder of PEFT is exported again with its bits
@pytest.mark.parametrize("name", ["rslora", "dora", "ends", "embedding-scaled", "saved", "tiles"])
def test_training_goes_on_from_an_exported_folder_with_the_same_bits(tmp_path, name):
    kind = KINDS[name]
    like = tmp_path / "model"
    write(kind.case, like)
    lora = lora_of(kind)
    program = program_of(model_of(like, lora=lora, **kind.model), "device", tmp_path, 1)
    state = zj.import_hf(program, like, key=jax.random.key(1))
    _, state = losses_of(program, state, steps=1)
    first = tmp_path / "first"
    zj.export_peft(checkpoint(program, state, tmp_path / "ckpt"), first, like=like)
    assert read_peft(first) == dataclasses.replace(lora, targets=read_peft(first).targets)
    again = zj.import_hf(program, like, key=jax.random.key(2), adapters=first)
    for a, b in zip(params_of(program, state), params_of(program, again), strict=True):
        np.testing.assert_array_equal(a, b)
    zj.export_peft(checkpoint(program, again, tmp_path / "ckpt2"), tmp_path / "second", like=like)
    tensors = [load_file(tmp_path / f / "adapter_model.safetensors") for f in ("first", "second")]
    assert tensors[0].keys() == tensors[1].keys()
    for key, value in tensors[0].items():
        np.testing.assert_array_equal(value, tensors[1][key])


PEFTS = {
    "default": {"target_modules": "all-linear"},
    "dora": {"target_modules": r".*\.(q|up)_proj", "use_dora": True, "use_rslora": True},
    "pissa": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"},
    "ends": {"target_modules": list(ENDS), "modules_to_save": ["norm"]},
}


@pytest.mark.by_default("ends")
@pytest.mark.parametrize("name", list(PEFTS))
def test_training_goes_on_from_a_folder_of_peft(tmp_path, name):
    import peft
    import torch

    like = tmp_path / "model"
    theirs = write("llama", like)
    options = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM", **PEFTS[name]}
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**options))
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    torch_losses(adapted, steps=2, parameters=parameters)
    adapted.save_pretrained(tmp_path / "adapters")
    with torch.no_grad():
        logits = numpy_logits(adapted)
    lora = read_peft(tmp_path / "adapters")
    program = program_of(model_of(like, lora=lora), "device", tmp_path, 1)
    state = zj.import_hf(program, like, key=jax.random.key(1), adapters=tmp_path / "adapters")
    np.testing.assert_allclose(program.apply(state, batch_of()), logits, rtol=0, atol=1e-5)
    if name != "pissa":  # which is exported with twice the rank
        ckpt = checkpoint(program, state, tmp_path / "first")
        zj.export_peft(ckpt, tmp_path / "again", like=like)
        written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
        for key, value in load_file(tmp_path / "again" / "adapter_model.safetensors").items():
            np.testing.assert_array_equal(value, written[key])
    losses, state = losses_of(program, state, steps=3)
    np.testing.assert_allclose(
        losses, torch_losses(adapted, steps=3, parameters=parameters), rtol=0, atol=1e-4
    )
    if name == "ends":
        return  # its second export is read by `test_kind_trains_and_exports_as_in_peft`
    ckpt = checkpoint(program, state, tmp_path / "ckpt")
    zj.export_peft(ckpt, tmp_path / "out", like=like)
    np.testing.assert_allclose(
        numpy_logits(peft_model(load(like), tmp_path / "out")),
        numpy_logits(adapted),
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.exhaustive  # by default, test_lora.py merges adapters
@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("init", ["default", "pissa"])
def test_adapters_of_joined_projections_start_and_merge(tmp_path, init, base):
    """Phi-3's files hold queries, keys and values in one matrix, and gate and up in another."""
    like = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 256}
    theirs = write("phi3", like, shard="1GB", **sizes)
    lora = zj.Lora(rank=2, alpha=5, targets="all", use_dora=True, init=init)
    fields = {} if base == "float32" else {"frozen_dtype": "nf4"}
    program = program_of(model_of(like, lora=lora), "device", tmp_path, 1, **fields)
    state = zj.import_hf(program, like, key=jax.random.key(1))
    if base == "float32":
        np.testing.assert_allclose(
            program.apply(state, batch_of()), numpy_logits(theirs), rtol=0, atol=1e-4
        )
    _, state = losses_of(program, state, steps=2)
    ckpt = checkpoint(program, state, tmp_path / "ckpt")
    zj.export_hf(ckpt, tmp_path / "merged", like=like, merge_lora=True)
    merged = numpy_logits(load(tmp_path / "merged"))
    assert np.abs(merged - numpy_logits(theirs)).max() > 1e-3
    if base == "float32":
        np.testing.assert_allclose(program.apply(state, batch_of()), merged, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"in one matrix, .* for which PEFT has one adapter"):
        zj.export_peft(ckpt, tmp_path / "adapters", like=like)
