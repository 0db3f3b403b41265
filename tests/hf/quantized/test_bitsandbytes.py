"""Folders that bitsandbytes quantized are decoded as they are read, and exported decoded."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import batch_of, bits, need, program_of, torch_logits, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.hf import model_of
from zerojax.hf.config import open_folder

need("torch", "transformers")

NF4 = np.asarray(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
BLOCK, NESTED_BLOCK = 64, 16


def in_4_bits(name: str, weight: np.ndarray, is_nested: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Return the tensors of a weight in 4 bits, and the weight that they stand for."""
    flat = weight.astype(np.float32).reshape(-1)
    count = flat.size
    blocks = np.pad(flat, (0, -count % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "float32",
        "shape": weight.shape,
    }
    tensors: dict[str, np.ndarray] = {}
    if is_nested:
        offset = float(scales.mean())
        nested_map = np.linspace(-1, 1, 256, dtype=np.float32)
        groups = np.pad(scales - offset, (0, -scales.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
        nested = np.abs(groups).max(axis=1).astype(np.float32)
        codes = np.abs((groups / nested[:, None])[..., None] - nested_map).argmin(axis=-1)
        tensors["absmax"] = codes.reshape(-1)[: scales.size].astype(np.uint8)
        tensors |= {"nested_absmax": nested, "nested_quant_map": nested_map}
        state |= {
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        scales = (nested_map[codes] * nested[:, None]).reshape(-1)[: scales.size] + np.float32(
            offset
        )
    else:
        tensors["absmax"] = scales
    codes = np.abs((blocks / scales[:, None])[..., None] - NF4).argmin(axis=-1)
    decoded = (NF4[codes] * scales[:, None]).reshape(-1)[:count].reshape(weight.shape)
    pairs = np.pad(codes.reshape(-1)[:count], (0, count % 2)).reshape(-1, 2).astype(np.uint8)
    tensors |= {"quant_map": NF4, "quant_state.bitsandbytes__nf4": text(state)}
    found = {f"{name}.{key}": value for key, value in tensors.items()}
    return found | {name: (pairs[:, :1] << 4) | pairs[:, 1:]}, decoded.astype(np.float32)


def text(state: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def in_8_bits(name: str, weight: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Return the tensors of a weight in 8 bits, and the weight that they stand for."""
    scales = np.abs(weight).max(axis=1).astype(np.float32)
    codes = np.round(weight / scales[:, None] * 127).astype(np.int8)
    module = name.removesuffix("weight")
    tensors = {name: codes, f"{module}SCB": scales, f"{module}weight_format": np.uint8(0)}
    decoded = codes.astype(np.float32) * scales[:, None] * np.float32(1 / 127)
    return {key: np.asarray(value) for key, value in tensors.items()}, decoded


def quantize(folder: pathlib.Path, kind: str) -> dict[str, np.ndarray]:
    """Quantize the projections of a folder, and return the weights that it now stands for."""
    tensors: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    (file,) = folder.glob("*.safetensors")
    for name, weight in load_file(file).items():
        if "_proj" not in name:
            tensors[name] = expected[name] = weight
        elif kind == "int8":
            found, expected[name] = in_8_bits(name, weight)
            tensors |= found
        else:
            found, expected[name] = in_4_bits(name, weight, kind == "nested")
            tensors |= found
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("kind", ["nested", "plain", "int8"])
def test_any_box_is_decoded_from_the_arrays_that_hold_it(tmp_path, kind):
    write("llama", tmp_path, shard="1GB", num_hidden_layers=1, intermediate_size=61, hidden_size=56)
    expected = quantize(tmp_path, kind)
    file = open_folder(tmp_path)
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        name: weight.shape for name, weight in expected.items()
    }
    rng = np.random.default_rng(0)
    for name, weight in expected.items():
        for _ in range(6):
            box = tuple(tuple(sorted(rng.choice(n + 1, 2, replace=False))) for n in weight.shape)
            part = weight[tuple(slice(a, b) for a, b in box)]
            np.testing.assert_array_equal(file.read(name, box), part)


@pytest.mark.by_default("nested-nvme")
@pytest.mark.parametrize("tier", ["device", "nvme"])
@pytest.mark.parametrize("kind", ["nested", "int8"])
def test_a_quantized_folder_is_imported_and_exported_decoded(tmp_path, kind, tier):
    import transformers

    like = tmp_path / "model"
    write("llama", like, shard="1GB")
    expected = quantize(like, kind)
    with program_of(model_of(like), tier, tmp_path) as program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        ours = np.asarray(program.apply(state, batch_of()))
        with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
            ckpt.save(program, state)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    found = bits(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name][2] == weight.tobytes(), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="float32", trust_remote_code=False
    )
    assert np.abs(ours - torch_logits(loaded, batch_of()).detach().numpy()).max() < 1e-4


REFUSED = {
    "absmax": ({"absmax": None}, "absmax is missing"),
    "codes": ({"": np.zeros((3, 1), np.uint8)}, r"U8\[3, 1\], and 1152 numbers of U8"),
    "map": ({"quant_map": np.zeros(15, np.float32)}, r"float32\[15\], and 16 numbers"),
    "dtype": (
        {"quant_state.bitsandbytes__nf4": text({"shape": [48, 48], "dtype": "int8"})},
        "dtype is 'int8', and one of",
    ),
    "state": ({"quant_state.bitsandbytes__nf4": np.zeros(3, np.uint8)}, "not in the format of"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_arrays_that_do_not_fit_are_named(tmp_path, name):
    changes, message = REFUSED[name]
    write("llama", tmp_path, shard="1GB", num_hidden_layers=1)
    quantize(tmp_path, "nested")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for key, value in changes.items():
        tensor = f"model.layers.0.self_attn.q_proj.weight{key and '.'}{key}"
        tensors.pop(tensor)
        if value is not None:
            tensors[tensor] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(zj.CheckpointError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "hqq"])
def test_other_methods_are_refused_by_name(tmp_path, method):
    config = {"model_type": "llama", "quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"'{method}' in quantization_config.*original checkpoint"):
        model_of(tmp_path)
