"""Adapters over a frozen base train like PEFT's, write nothing of the base, and are exported."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from hf_models import batch_of, losses_of, need, program_of, torch_logits, torch_losses, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
import zerojax.hf.base as base_of_hf
from zerojax.hf import FAMILIES, model_of
from zerojax.weights import renaming

need("torch", "transformers", "peft")
# peft reads an attribute that transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

LORA = zj.Lora(rank=3, alpha=12, targets="all")
SIZES = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 96}
"""Sizes wide enough for blocks of 64 and 256 numbers."""


def save(program, state, folder):
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return folder


def set_base(theirs, program, state):
    """Give a torch model the base that a program computes with, decoded."""
    import torch

    pieces = dict(program.iter_params(state))
    place = renaming(FAMILIES[theirs.config.model_type].names)
    largest = 0.0
    for name, parameter in theirs.named_parameters():
        if (found := place(name)) is None:
            continue
        part, *path = found.name.split(".")
        tree = pieces[part if found.layer is None else f"blocks/{found.layer}"]
        for key in path:
            tree = tree[key]
        value = np.asarray(tree, np.float32)
        value = value if found.axes is None else value.transpose(found.axes)
        with torch.no_grad():
            largest = max(largest, float((parameter - torch.tensor(value)).abs().max()))
            parameter.copy_(torch.tensor(value))
    return largest


BASES = {"bf16": {}, "int8": {"frozen_dtype": "int8"}, "nf4": {"frozen_dtype": "nf4"}}


@pytest.mark.by_default("qwen3-nf4-nvme")
@pytest.mark.parametrize("tier", ["device", "nvme"])
@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma3"])
def test_adapters_over_a_base_on_disk_track_peft(tmp_path, case, base, tier):
    """The base is a folder's, in bfloat16, and computed with in float32.

    The adapters are stored on the device.
    """
    import peft

    like = tmp_path / "model"
    theirs = write(case, like, dtype="bfloat16", **SIZES)
    program = program_of(
        model_of(like, lora=LORA), "device", tmp_path, devices=1, frozen=tier, **BASES[base]
    )
    with program:
        state = zj.import_hf(program, like, key=jax.random.key(1))
        error = set_base(theirs, program, state)
        assert (error > 1e-3) == (base != "bf16")
        zj.export_peft(save(program, state, tmp_path / "ckpt"), tmp_path / "adapters", like=like)
        losses, written, read = [], [], []
        for step in range(5):
            state, metrics = program.step(state, batch_of(step))
            losses.append(float(jax.block_until_ready(metrics["loss"])))
            written.append(metrics.get("swap_write_bytes", 0.0))
            read.append(metrics.get("swap_read_bytes", 0.0))
        assert all(read) == (tier == "nvme")
        assert not any(written)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    trained = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(trained) == 2 * 7 * 3
    np.testing.assert_allclose(
        losses, torch_losses(adapted, rate=1e-3, parameters=trained), rtol=0, atol=1e-4
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == sum(
        p.numel() for p in trained
    )


@pytest.mark.exhaustive  # by default test_adapter_kinds.py exports adapters
@pytest.mark.parametrize("base", list(BASES))
def test_exported_adapters_are_those_that_trained_merged_or_not(tmp_path, base):
    import peft
    import transformers

    like = tmp_path / "model"
    write("qwen2", like, **SIZES)
    program = program_of(model_of(like, lora=LORA), "device", tmp_path, devices=1, **BASES[base])
    state = zj.import_hf(program, like, key=jax.random.key(1))
    _, state = losses_of(program, state, steps=3)
    ckpt = save(program, state, tmp_path / "ckpt")
    zj.export_peft(ckpt, tmp_path / "adapters", like=like)
    zj.export_hf(ckpt, tmp_path / "merged", like=like, merge_lora=True)
    with pytest.raises(ValueError, match="holds adapters for 7 projections: merge them"):
        zj.export_hf(ckpt, tmp_path / "out", like=like)
    kinds = {"attn_implementation": "eager", "dtype": "float32", "trust_remote_code": False}
    original = transformers.AutoModelForCausalLM.from_pretrained(like, **kinds).eval()
    untrained = torch_logits(original, batch_of()).detach().numpy()
    adapted = peft.PeftModel.from_pretrained(original, tmp_path / "adapters").eval()
    beside = torch_logits(adapted, batch_of()).detach().numpy()
    merged = (
        torch_logits(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **kinds).eval(),
            batch_of(),
        )
        .detach()
        .numpy()
    )
    assert np.abs(beside - untrained).max() > 1e-2
    np.testing.assert_allclose(merged, beside, rtol=0, atol=1e-5)
    if (
        base == "bf16"
    ):  # otherwise the program computes with a rounded base, and the folder has the original
        np.testing.assert_allclose(program.apply(state, batch_of()), beside, rtol=0, atol=1e-4)


@pytest.mark.exhaustive  # by default test_frozen_encoded.py moves a frozen base from tier to tier
@pytest.mark.parametrize("there", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("here", ["device", "pinned_host", "nvme"])
def test_adapters_are_restored_from_any_tier_onto_any(tmp_path, here, there):
    like = tmp_path / "model"
    write("llama", like)
    found = []
    for tier in (here, there):
        with (
            program_of(model_of(like, lora=LORA), tier, tmp_path) as program,
            zj.Checkpointer(tmp_path / "ckpt") as ckpt,
        ):
            if not found:
                state = zj.import_hf(program, like, key=jax.random.key(1))
                _, state = losses_of(program, state, steps=2)
                ckpt.save(program, state)
                ckpt.wait()
            else:
                state = ckpt.restore(program)
            found.append(
                [
                    np.asarray(a)
                    for _, tree in program.iter_params(state)
                    for a in jax.tree.leaves(tree)
                ]
            )
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_adapters_of_another_scale_or_config_are_not_restored_and_dropout_may_change(tmp_path):
    write("llama", tmp_path / "like")

    def program(**fields):
        lora = zj.Lora(**({"rank": 2, "alpha": 4} | fields))
        return program_of(model_of(tmp_path / "like", lora=lora), "device", tmp_path, 1)

    with program() as first, zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(first, zj.import_hf(first, tmp_path / "like", key=jax.random.key(0)))
        with (
            program(alpha=8) as other,
            pytest.raises(zj.CheckpointError, match=r"saved from a model with lora=.*'alpha': 4"),
        ):
            ckpt.restore(other)
        with program(dropout=0.1) as other:
            assert ckpt.restore(other).step == 0
        # Heads of another width have weights of the same shapes.
        write(
            "llama",
            tmp_path / "other",
            rms_norm_eps=1e-3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        model = model_of(tmp_path / "other", lora=zj.Lora(rank=2, alpha=4))
        told = r"from a model with decoder=\{.*'heads': 4,.*'norm_eps': 1e-06.* program's model has .*'norm_eps': 0.001"
        with (
            program_of(model, "device", tmp_path, 1) as other,
            pytest.raises(zj.CheckpointError, match=told),
        ):
            ckpt.restore(other)
        about = first.model.about
        assert about is not None
        # What only one checkpoint records is not compared: older checkpoints record less.
        model = dataclasses.replace(model, about={"lora": about["lora"]})
        with program_of(model, "device", tmp_path, 1) as other:
            assert ckpt.restore(other).step == 0


def test_adapters_alone_are_not_exported_where_more_was_trained(tmp_path):
    write("llama", tmp_path / "like")
    model = model_of(
        tmp_path / "like",
        lora=zj.Lora(rank=2, alpha=4),
        trainable=lambda path, _: "lora" in path or path[-1] == "scale",
    )
    with program_of(model, "device", tmp_path, 1) as program:
        ckpt = save(
            program,
            zj.import_hf(program, tmp_path / "like", key=jax.random.key(0)),
            tmp_path / "ckpt",
        )
    with pytest.raises(
        ValueError,
        match=r"trained weights in addition to the adapters: blocks.input_layernorm.scale; .*merge_lora=True",
    ):
        zj.export_peft(ckpt, tmp_path / "adapters", like=tmp_path / "like")
    assert not (tmp_path / "adapters").exists()
    zj.export_hf(ckpt, tmp_path / "merged", like=tmp_path / "like", merge_lora=True)


def test_adapters_are_exported_for_their_own_base(tmp_path):
    write("llama", tmp_path / "like")
    write("llama", tmp_path / "wider", hidden_size=64)
    write("llama", tmp_path / "shallow", num_hidden_layers=2)
    write("llama", tmp_path / "long", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    with program_of(
        model_of(tmp_path / "like", lora=zj.Lora(rank=2, alpha=4)), "device", tmp_path, 1
    ) as program:
        ckpt = save(
            program,
            zj.import_hf(program, tmp_path / "like", key=jax.random.key(0)),
            tmp_path / "ckpt",
        )
    with pytest.raises(
        zj.CheckpointError, match=r"holds another model than .*wider: lora_A \[2, 48\] for"
    ):
        zj.export_peft(ckpt, tmp_path / "adapters", like=tmp_path / "wider")
    with pytest.raises(
        zj.CheckpointError, match=r"layers.2.self_attn.q_proj.weight which does not exist"
    ):
        zj.export_peft(ckpt, tmp_path / "adapters", like=tmp_path / "shallow")
    with pytest.raises(
        zj.CheckpointError, match=r"was trained with decoder=\{'ropes'.*long/config.json has"
    ):
        zj.export_peft(ckpt, tmp_path / "adapters", like=tmp_path / "long")


def change(folder, tensor, times, part=...):
    """Multiply part of a tensor of a folder."""
    (path,) = folder.glob("*.safetensors")
    found = load_file(path)
    found[tensor][part] *= times
    save_file(found, path, {"format": "pt"})


@pytest.mark.by_default("nf4-2-2")
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("base", list(BASES))
def test_another_base_of_the_same_shapes_is_not_merged_onto(
    tmp_path, monkeypatch, base, fsdp, tensor
):
    """On a mesh with `tensor`, blocks are along other dims, and scales are in groups of rows."""
    for name, seed in (("like", 0), ("sibling", 1)):
        write("qwen2", tmp_path / name, shard="1GB", seed=seed, num_hidden_layers=2, **SIZES)
    like, sibling, out = tmp_path / "like", tmp_path / "sibling", tmp_path / "out"
    mesh = zj.make_mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor])
    config = zj.ZeroConfig(stage=3, precision="bf16", **BASES[base])
    program = zj.build_train_step(model_of(like, lora=LORA), optax.adamw(1e-3), config, mesh)
    ckpt = save(program, zj.import_hf(program, like, key=jax.random.key(1)), tmp_path / "ckpt")
    zj.export_peft(ckpt, tmp_path / "adapters", like=like)
    zj.export_hf(ckpt, tmp_path / "merged", like=like, merge_lora=True)
    for export in (
        zj.export_peft,
        lambda *args, like: zj.export_hf(*args, like=like, merge_lora=True),
    ):
        with pytest.raises(
            zj.CheckpointError,
            match=r"sibling is not the base .* differ: lm_head\.weight; model\..*; and \d+ more",
        ):
            export(ckpt, out, like=sibling)
    # The same codes, with different scales.
    change(like, "model.layers.0.mlp.up_proj.weight", 2)
    with pytest.raises(
        zj.CheckpointError, match=r"that differ: model.layers.0.mlp.up_proj.weight. Pass"
    ):
        zj.export_peft(ckpt, out, like=like)
    change(like, "model.layers.0.mlp.up_proj.weight", 0.5)
    # Numbers outside every sample: where the base is written, all are compared, in pieces.
    monkeypatch.setattr(base_of_hf, "_PIECE", 1 << 12)
    zj.export_hf(ckpt, tmp_path / "again", like=like, merge_lora=True)
    change(
        like,
        name := "model.layers.1.mlp.up_proj.weight",
        np.linspace(1, 2, 16, dtype=np.float32),
        (3, slice(16)),
    )
    zj.export_peft(ckpt, tmp_path / "others", like=like)
    with pytest.raises(zj.CheckpointError, match=f"that differ: {name}. Pass"):
        zj.export_hf(ckpt, out, like=like, merge_lora=True)
    assert not out.exists()


def test_numbers_that_are_not_finite_are_the_bases_where_both_are():
    inf, nan = np.inf, np.nan
    for weight, there, same in (
        ([1, 2], [1, inf], False),
        ([1, inf], [1, 2], False),
        ([inf, -inf], [inf, inf], False),
        ([inf, -inf, nan, 1], [inf, -inf, nan, 1.003], True),
        ([1, nan], [1, 2], False),
        ([1, 2], [1, nan], False),
        ([1.0], [1.005], False),
    ):
        assert base_of_hf.is_rounded(np.asarray(weight), np.asarray(there)) == same, (weight, there)


def test_dropout_of_adapters_is_in_training_alone(tmp_path):
    write("llama", tmp_path)
    losses = []
    for dropout in (0.0, 0.5):
        lora = zj.Lora(rank=2, alpha=64, targets=("v_proj", "down_proj"), dropout=dropout)
        program = program_of(model_of(tmp_path, lora=lora), "device", tmp_path)
        state = zj.import_hf(program, tmp_path, key=jax.random.key(1))
        trained, state = losses_of(program, state, steps=2)
        losses.append(
            (
                trained[-1],
                float(program.eval(state, batch_of())),
                float(program.eval(state, batch_of())),
            )
        )
    assert losses[0][0] != losses[1][0]
    assert losses[1][1] == losses[1][2]
    names = [
        re.sub(r"\W+", ".", jax.tree_util.keystr(path))
        for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
    ]
    assert len(names) == 4
    assert all("v_proj.lora" in name or "down_proj.lora" in name for name in names)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": -1}, "alpha=-1"),
        ({"targets": ("q_proj", "wq")}, "wq unknown"),
        ({"targets": "q_proj"}, "a tuple of names"),
        ({"dropout": 1.0}, r"dropout=1.0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        zj.Lora(**{"rank": 4, "alpha": 8, **fields})


def test_a_base_that_lacks_a_weight_is_not_completed(tmp_path):
    write("llama", tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    program = program_of(model_of(tmp_path, lora=LORA), "device", tmp_path)
    with pytest.raises(
        zj.CheckpointError,
        match=r"no head.lm_head.embedding \(in the file lm_head.weight\) \[96, 48\]",
    ):
        zj.import_hf(program, tmp_path, key=jax.random.key(0))
