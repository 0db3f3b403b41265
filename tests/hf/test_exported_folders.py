"""Exported folders load in transformers, and untrained weights keep the source folder's bits."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import (
    CASES,
    DENSE,
    FAMILIES,
    adamw,
    batch_of,
    bits,
    losses_of,
    need,
    program_of,
    torch_logits,
    write,
)
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax import cli
from zerojax.hf import model_of

need("torch", "transformers")


def test_a_head_that_is_said_to_be_tied_and_is_another_is_refused(tmp_path):
    """transformers would use the other head; a copy of the embedding is read once."""
    write("llama-tied", tmp_path / "like", shard="1GB")
    (file,) = (tmp_path / "like").glob("*.safetensors")
    found = load_file(file)
    table = found["model.embed_tokens.weight"]
    with program_of(model_of(tmp_path / "like"), "device", tmp_path, 1) as program:
        save_file(found | {"lm_head.weight": table}, file, {"format": "pt"})
        assert zj.import_hf(program, tmp_path / "like", key=jax.random.key(0)).step == 0
        save_file(found | {"lm_head.weight": table * 2}, file, {"format": "pt"})
        with pytest.raises(
            ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
        ):
            zj.import_hf(program, tmp_path / "like", key=jax.random.key(0))


def save(program, state, folder):
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return folder


def loaded(folder):
    """Return a folder's model in transformers, without missing or unexpected keys."""
    import transformers

    found: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype="float32",
        trust_remote_code=False,
    )
    model, info = found
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def exported_logits(folder):
    return torch_logits(loaded(folder), batch_of()).detach().numpy()


UNTOUCHED = [
    *((case, tier) for case in (*FAMILIES, "llama-biases", "qwen2-tied") for tier in ("device", "nvme")),
    *((case, "device") for case in DENSE),
    ("phi4-mini", "nvme"),
    ("glm4", "nvme"),
]  # fmt: skip


@pytest.mark.by_default("gemma3-nvme")
@pytest.mark.parametrize(("case", "tier"), UNTOUCHED, ids=map("-".join, UNTOUCHED))
def test_untouched_weights_are_the_bits_of_the_file(tmp_path, case, tier):
    like = tmp_path / "model"
    write(case, like, dtype="bfloat16")
    for name in (
        "tokenizer.json",
        "more/templates/a.jinja",
        "more/.hidden",
        "original/consolidated.00.pth",
        ".cache/a",
    ):
        (like / name).parent.mkdir(parents=True, exist_ok=True)
        (like / name).write_text("{}")
    with program_of(model_of(like), tier, tmp_path) as program:
        save(program, zj.import_hf(program, like, key=jax.random.key(0)), tmp_path / "ckpt")
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like, shard_bytes=30_000)
    assert bits(tmp_path / "out") == bits(like)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "more/templates/a.jinja",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (like / name).read_bytes()
    # Folders without weights are copied too.
    assert not [
        name
        for name in ("more/.hidden", "original", ".cache")
        if (tmp_path / "out" / name).exists()
    ]
    loaded(tmp_path / "out")


TRAINED = [
    (case, tensor)
    for case in (*FAMILIES, *DENSE)
    for tensor in (1, 2)
    # each device has complete heads
    if CASES[case][1].get("num_key_value_heads", 2) % tensor == 0
]


@pytest.mark.by_default("gemma2-1")
@pytest.mark.parametrize(("case", "tensor"), TRAINED, ids=[f"{c}-{t}" for c, t in TRAINED])
def test_trained_weights_have_the_same_logits_in_transformers(tmp_path, case, tensor):
    like = tmp_path / "model"
    write(case, like)
    mesh = zj.make_mesh(fsdp=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    program = zj.build_train_step(model_of(like), adamw(), zj.ZeroConfig(stage=3), mesh)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    before = np.asarray(program.apply(state, batch_of()))
    _, state = losses_of(program, state, steps=3)
    save(program, state, tmp_path / "ckpt")
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    ours, theirs = np.asarray(program.apply(state, batch_of())), exported_logits(tmp_path / "out")
    assert np.abs(ours - before).max() > 1e-2
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.by_default("llama-biases-nvme")
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("case", ["llama", "llama-biases", "gemma3"])
def test_mlps_in_tiles_compute_and_export_the_same(tmp_path, case, tier):
    like = tmp_path / "model"
    theirs = write(case, like)
    model = model_of(like, mlp_tiles=4)
    assert any(jax.tree.leaves(model.tiles))
    with program_of(model, tier, tmp_path) as program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        ours = np.asarray(program.apply(state, batch_of()))
        save(program, state, tmp_path / "ckpt")
    assert np.abs(ours - torch_logits(theirs, batch_of()).detach().numpy()).max() < 1e-4
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    assert bits(tmp_path / "out") == bits(like)


def test_command_exports_in_another_dtype_which_the_config_tells(tmp_path, capsys):
    like = tmp_path / "model"
    write("qwen2", like, num_hidden_layers=1)
    program = program_of(model_of(like), "device", tmp_path)
    save(program, zj.import_hf(program, like, key=jax.random.key(0)), tmp_path / "ckpt")
    arguments = [
        "export",
        str(tmp_path / "ckpt"),
        str(tmp_path / "out"),
        "--format",
        "hf",
        "--like",
        str(like),
    ]
    cli.main([*arguments, "--dtype", "bfloat16"])
    there, here = bits(like), load_file(tmp_path / "out" / "model.safetensors")
    assert here.keys() == there.keys()
    assert {a.dtype.name for a in here.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded(tmp_path / "out")
    for wrong, told in (
        (["--format", "hf"], "needs --like"),
        (["--format", "peft", "--like", "x", "--merge-lora"], "needs --format hf"),
        (["--format", "orbax", "--like", "x"], "needs --format hf or peft"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "o"), *wrong])
        assert told in capsys.readouterr().err


@pytest.mark.exhaustive  # by default, one matrix of several projections is only imported
@pytest.mark.parametrize("frozen_dtype", [None, "nf4", "int8"])
@pytest.mark.parametrize("case", ["phi4-mini", "glm4"])
def test_adapters_of_joined_projections_are_merged(tmp_path, case, frozen_dtype):
    like = tmp_path / "model"
    write(case, like)
    lora = zj.Lora(rank=2, alpha=8, targets=("q_proj", "v_proj", "up_proj", "o_proj"))
    fields = {"frozen_dtype": frozen_dtype}
    program = program_of(model_of(like, lora=lora), "device", tmp_path, tx=adamw(1e-2), **fields)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    before = np.asarray(program.apply(state, batch_of()))
    _, state = losses_of(program, state, steps=3)
    ours = np.asarray(program.apply(state, batch_of()))
    save(program, state, tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"in one matrix, model\.layers.*merge_lora=True"):
        zj.export_peft(tmp_path / "ckpt", tmp_path / "out", like=like)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like, merge_lora=True)
    assert np.abs(ours - before).max() > 1e-2
    if frozen_dtype is None:
        assert np.abs(ours - exported_logits(tmp_path / "out")).max() < 1e-4
    # The other projections of a matrix keep the folder's bits, whatever the base was rounded to.
    there, here = bits(like), bits(tmp_path / "out")
    changed = {name.split(".")[-2] for name in there if there[name] != here[name]}
    assert (
        changed
        == {
            "phi4-mini": {"qkv_proj", "gate_up_proj", "o_proj"},
            "glm4": {"q_proj", "v_proj", "gate_up_proj", "o_proj"},
        }[case]
    )
    joined = "model.layers.0.mlp.gate_up_proj.weight"
    half = len(there[joined][2]) // 2
    assert there[joined][2][:half] == here[joined][2][:half]


def test_folders_of_other_models_are_told(tmp_path):
    like, other = tmp_path / "model", tmp_path / "other"
    write("qwen2", like, num_hidden_layers=2)
    write("llama", other, num_hidden_layers=2, intermediate_size=80)
    program = program_of(model_of(like), "device", tmp_path)
    save(program, zj.import_hf(program, like, key=jax.random.key(0)), tmp_path / "ckpt")
    with pytest.raises(
        zj.CheckpointError,
        match=r"holds another model.*mlp.*gate_proj.kernel \[2, 48, 64\].*q_proj.bias",
    ):
        zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=other)
    with pytest.raises(ValueError, match="holds no adapters"):
        zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like, merge_lora=True)
    with pytest.raises(zj.CheckpointError, match="holds no adapters"):
        zj.export_peft(tmp_path / "ckpt", tmp_path / "out", like=like)
    with pytest.raises(ValueError, match="shard_bytes=0"):
        zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like, shard_bytes=0)
    assert not (tmp_path / "out").exists()
