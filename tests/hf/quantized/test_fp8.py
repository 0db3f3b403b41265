"""Weights in float8 with a scale per square block are decoded as they are read."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_models import need, torch_logits
from mixture_models import batch_of, program_of, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.checkpoint import CheckpointError
from zerojax.hf import model_of
from zerojax.hf.quantized.fp8 import Fp8File
from zerojax.weights import open_weights

need("torch", "transformers")

BLOCK = 16


def quantize(folder, theirs):
    """Round a folder's projections to float8, and the model's weights to what they then are."""
    import torch

    path = folder / "model.safetensors"
    tensors = load_file(path)
    module = dict(theirs.named_parameters())
    for name in [n for n in tensors if "_proj.weight" in n and ".experts." not in n]:
        weight = tensors[name]
        rows, columns = weight.shape
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        scales = np.random.default_rng(rows).uniform(0.5, 2, grid).astype(np.float32)
        whole = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))[:rows, :columns]
        codes = (weight / whole).astype(ml_dtypes.float8_e4m3fn)
        tensors[name] = codes
        tensors[f"{name}_scale_inv"] = scales
        with torch.no_grad():
            module[name].copy_(torch.tensor(codes.astype(np.float32) * whole))
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.exhaustive  # by default the test below compares boxes with the equation
def test_weights_in_float8_are_computed_with(tmp_path):
    like = tmp_path / "model"
    theirs = write("deepseek_v3", like)
    quantize(like, theirs)
    expected = torch_logits(theirs, batch_of()).detach().numpy()
    program = program_of(model_of(like), "device", tmp_path)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    assert np.abs(np.asarray(program.apply(state, batch_of())) - expected).max() < 1e-4
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, state)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    assert not [name for name in open_weights(tmp_path / "out").tensors if "scale_inv" in name]


def test_a_box_in_float8_follows_the_equation(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.normal(0, 3, (40, 35)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 4, (3, 3)).astype(np.float32)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "b": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = Fp8File(
        open_weights(tmp_path / "a.safetensors"), {"weight_block_size": [16, 16]}, "float32"
    )
    assert {name: tensor.dtype for name, tensor in file.tensors.items()} == {
        "a.weight": "float32",
        "b": "float32",
    }
    part = file.read("a.weight", ((10, 37), (15, 35)))
    for i, j in ((10, 15), (15, 16), (16, 31), (36, 34)):
        assert part[i - 10, j - 15] == np.float32(codes[i, j]) * scales[i // 16, j // 16]
    for sizes in ({"weight_block_size": [8, 16]}, {}):
        with pytest.raises(CheckpointError, match=r"weight_block_size|needs scales for blocks"):
            Fp8File(open_weights(tmp_path / "a.safetensors"), sizes, "float32")
