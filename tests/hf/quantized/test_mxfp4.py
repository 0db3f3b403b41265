"""Experts in MXFP4, as gpt-oss has them, are decoded to what transformers decodes."""

import json
import pathlib

import jax
import numpy as np
import pytest
from hf_models import need, torch_logits
from mixture_models import batch_of, program_of, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.checkpoint import CheckpointError
from zerojax.hf import model_of
from zerojax.hf.quantized.mxfp4 import Mxfp4File
from zerojax.weights import open_weights

need("torch", "transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 32}
"""Sizes that groups of 32 numbers divide."""


def quantize(folder: pathlib.Path, theirs) -> None:
    """Replace a folder's experts by random codes, and the model's by what they mean."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    weights = dict(theirs.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, hidden, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, hidden // 32, 16), np.uint8)
        scales = rng.integers(121, 125, (experts, rows, hidden // 32), np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        decoded = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        with torch.no_grad():
            weights[name].copy_(decoded)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.exhaustive  # by default the numbers of the test below follow the format's equation
def test_experts_in_mxfp4_are_those_of_transformers(tmp_path):
    like = tmp_path / "model"
    theirs = write("gpt_oss", like, **SIZES)
    quantize(like, theirs)
    expected = torch_logits(theirs, batch_of()).detach().numpy()
    program = program_of(model_of(like), "device", tmp_path)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    assert np.abs(np.asarray(program.apply(state, batch_of())) - expected).max() < 1e-4
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, state)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    exported = open_weights(tmp_path / "out")
    for name, weight in theirs.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            box = tuple((0, n) for n in weight.shape)
            assert exported.tensors[name].dtype == "bfloat16"
            np.testing.assert_array_equal(exported.read(name, box), weight.detach().numpy(), name)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_a_box_of_experts_in_mxfp4_is_a_part_of_them(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 4, 16), np.uint8)
    scales = rng.integers(100, 140, (3, 5, 4), np.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "a.safetensors")
    file = Mxfp4File(open_weights(tmp_path / "a.safetensors"))
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"w": (3, 128, 5)}
    whole = file.read("w", ((0, 3), (0, 128), (0, 5)))
    code = int(blocks[2, 3, 1, 4]) >> 4  # the second code of a byte is in its high bits
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * 2.0 ** (int(scales[2, 3, 1]) - 127)
    assert float(whole[2, 32 + 9, 3]) == (-magnitude if code & 8 else magnitude)
    part = file.read("w", ((1, 3), (37, 70), (2, 4)))
    np.testing.assert_array_equal(part, whole[1:3, 37:70, 2:4])
    save_file({"w_blocks": blocks, "w_scales": scales[:2]}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="w is not in the format MXFP4"):
        Mxfp4File(open_weights(tmp_path / "b.safetensors"))
