"""Folders of Hugging Face hold layers: pipelines read them and write them like other programs."""

import jax
import numpy as np
import pytest
from hf_models import adamw, batch_of, need, write
from matrix_of_checkpoints import assert_same, numbers

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers", "safetensors")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "vocab_size": 96,
    "num_hidden_layers": 4,
}
LORA = zj.Lora(rank=2, alpha=4, targets="all")


def build(like, base, axes, **fields):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    model = model_of(like, lora=LORA if base else None)
    config = zj.ZeroConfig(stage=3, num_microbatches=4, frozen_dtype=base, **fields)
    return zj.build_train_step(model, adamw(), config, zj.make_mesh(**axes, devices=devices))


def save(program, state, folder):
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return folder


def read_folder(folder):
    from safetensors.numpy import load_file

    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.exhaustive  # by default test_pipeline_checkpoints.py has an encoded base
@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_a_pipeline_imports_and_exports_like_another_program(base, tmp_path):
    like = tmp_path / "like"
    write("llama", like, **SIZES)
    plain = build(like, base, {"fsdp": 2})
    program = build(like, base, {"pipe": 2, "fsdp": 2}, pipe_chunks=2)
    key = jax.random.key(1)
    states = [zj.import_hf(p, like, key=key) for p in (plain, program)]
    expected, actual = (
        numbers(save(p, state, tmp_path / name), 0)
        for p, state, name in zip((plain, program), states, ("plain", "pipe"), strict=True)
    )
    assert_same(actual, expected)
    export = zj.export_peft if base else zj.export_hf
    for name in ("plain", "pipe"):
        export(tmp_path / name, tmp_path / f"{name}_out", like=like)
    assert_same(read_folder(tmp_path / "pipe_out"), read_folder(tmp_path / "plain_out"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", [None, "nf4", "int8"])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_folder_trains_in_stages_unedited(base, case, tmp_path):
    layer_types = {}
    if case == "gemma3":
        layer_types["layer_types"] = ["sliding_attention", "full_attention"] * 2
    write(case, tmp_path, **SIZES, **layer_types)
    losses = []
    for axes in ({"fsdp": 2}, {"pipe": 2, "fsdp": 2}):
        with build(tmp_path, base, axes, pipe_chunks=2) as program:
            state = zj.import_hf(program, tmp_path, key=jax.random.key(1))
            of_mesh = []
            for step in range(3):
                batch = batch_of(step, rows=8, length=16)
                state, metrics = jax.block_until_ready(program.step(state, batch))
                of_mesh.append(float(metrics["loss"]))
            losses.append(of_mesh)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
