"""Write a Hugging Face folder as one GGUF file.

    names       gguf.get_tensor_name_map: model.layers.3.self_attn.q_proj -> blk.3.attn_q
    matrices    in the folder's dtype, 16 or 32 bits; vectors in float32, as llama.cpp needs them
    q_proj, k_proj of `llama` and `mistral`
                rows of a head in the order 0, D/2, 1, D/2 + 1, ..: llama.cpp rotates neighbors,
                where transformers rotates the two halves of a head
    rotations   a base; for scaled ones the tensor rope_freqs, by which llama.cpp divides

llama.cpp's architectures leave out what some configs have (windows, factors of yarn). Such a config
is an error: the file would compute something else.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.disk import numpy_dtype
from host_offload.fields import parse_json
from zerojax.checkpoint import CheckpointError, explaining
from zerojax.hf.config import CONFIG, DecoderConfig
from zerojax.hf.gguf_files.tokenizer import ADVICE, GGUFTokens, read_tokens
from zerojax.hf.model import config_of
from zerojax.weights import WeightFile, open_weights, write_atomically

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""llama.cpp's architecture by `model_type`."""
_ROTATES_NEIGHBORS = frozenset({"llama"})
"""Architectures that rotate neighbors, and read `rope_freqs`."""


def check_gguf(folder: str | os.PathLike[str]) -> None:
    """Check that `export_gguf` can write a folder's model, without reading its weights.

    Args:
      folder: path of the folder.

    Raises:
      ModuleNotFoundError: gguf is not installed.
      ValueError: the family, a setting of the config, or the tokenizer is not supported; the error
        names it.
    """
    folder = os.path.expanduser(os.fspath(folder))
    _gguf()
    _architecture(folder)
    config = config_of(folder)
    _check_config(folder, config, _theta(folder))
    read_tokens(folder, config.vocab)


def export_gguf(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a Hugging Face folder as one GGUF file, for llama.cpp and tools that use it.

        zj.export_hf("runs/llama", "llama-tuned", like="Llama-3.2-1B")
        zj.hf.export_gguf("llama-tuned", "llama-tuned.gguf")

    Holds one tensor at a time. The file has the tokenizer, the chat template and the weights in the
    folder's dtype; llama.cpp's `llama-quantize` makes smaller ones of it.

    Args:
      folder: path of the folder, such as one that `zerojax.export_hf` wrote.
      path: path of the file; it must not exist.

    Raises:
      ModuleNotFoundError: gguf is not installed.
      ValueError: `path` exists, or the family, a setting of the config, or the tokenizer is not
        supported; the error names it.
      CheckpointError: the folder's weights cannot be read, or the file cannot be written.
    """
    folder = os.path.expanduser(os.fspath(folder))
    gguf = _gguf()
    arch = _architecture(folder)
    config = config_of(folder)
    theta = _theta(folder)
    _check_config(folder, config, theta)
    tokens = read_tokens(folder, config.vocab)
    weights = open_weights(folder)
    names = _names(gguf, arch, config, weights)
    factors = _rope_factors(config, theta)
    with write_atomically(path) as output, explaining(f"writing {output}"):
        writer = gguf.GGUFWriter(output, arch)
        _add_config(gguf, writer, folder, config, theta, weights)
        _add_tokens(gguf, writer, folder, tokens)
        if factors is not None:
            writer.add_tensor_info(
                "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
            )
        for name, target in names.items():
            _add_info(gguf, writer, target, weights.tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name in names:
            writer.write_tensor_data(_tensor(name, arch, config, weights))
        writer.close()


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModuleNotFoundError("writing GGUF needs gguf: pip install 'zerojax[gguf]'") from error
    return gguf


def _architecture(folder: str) -> str:
    """Return llama.cpp's architecture of a folder's model.

    Raises:
      ValueError: its family is not written.
    """
    kind = _raw_config(folder).get("model_type")
    arch = ARCHITECTURES.get(str(kind))
    if arch is None:
        raise ValueError(
            f"{os.path.join(folder, CONFIG)}: model_type {kind!r} is not written to GGUF, only "
            f"{', '.join(ARCHITECTURES)} are: {ADVICE}"
        )
    return arch


def _raw_config(folder: str) -> Mapping[str, Any]:
    config_of(folder)  # checks the file
    with open(os.path.join(folder, CONFIG), encoding="utf-8") as file:
        return parse_json(file.read())


def _theta(folder: str) -> float:
    """Return the base of the rotations."""
    raw = _raw_config(folder)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    return float(theta)


def _check_config(folder: str, config: DecoderConfig, theta: float) -> None:
    """Raise ValueError if llama.cpp would compute something else from a config."""
    path = os.path.join(folder, CONFIG)
    arch = _architecture(folder)
    faults = {
        "a window of attention": any(config.windows),
        "rotations that differ from layer to layer": len({*config.ropes}) > 1,
        "a factor of rotated queries and keys, as in yarn": config.ropes[0].factor != 1,
        "scaled rotations": arch not in _ROTATES_NEIGHBORS
        and _rope_factors(config, theta) is not None,
        "biases of the MLP or after attention": arch not in _ROTATES_NEIGHBORS
        and (config.mlp_bias or config.output_bias),
        "biases of queries, keys and values": arch == "qwen3" and config.qkv_bias,
        f"the activation {config.activation}": config.activation != "silu",
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(
                f"{path}: {fault}, which llama.cpp's architecture {arch!r} leaves out: the GGUF "
                f"file would be another model; {ADVICE}"
            )


def _rope_factors(config: DecoderConfig, theta: float) -> np.ndarray | None:
    """Return by what llama.cpp divides the plain frequencies, f32[D / 2]; None if by 1."""
    half = config.head_dim // 2
    plain = theta ** (-np.arange(half) / half)
    factors = (plain / np.asarray(config.ropes[0].frequencies)).astype(np.float32)
    return None if np.allclose(factors, 1, rtol=1e-6, atol=0) else factors


def _names(gguf: Any, arch: str, config: DecoderConfig, weights: WeightFile) -> dict[str, str]:
    """Return the name in GGUF of each of a folder's tensors.

    Raises:
      CheckpointError: a tensor has no name there.
    """
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(kind, config.layers)
    names: dict[str, str] = {}
    for name in weights.tensors:
        if name == "lm_head.weight" and config.tied:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise CheckpointError(
                f"{weights.path}: {name} has no name in GGUF's architecture {arch!r}"
            )
        names[name] = target
    return names


def _stored_dtype(name: str, ndim: int) -> np.dtype[Any]:
    """Return the dtype in which a tensor is written."""
    return numpy_dtype("float32" if ndim < 2 or name == "float64" else name)


def _add_info(gguf: Any, writer: Any, target: str, tensor: Any) -> None:
    """Add a tensor's name, shape and dtype."""
    dtype = _stored_dtype(tensor.dtype, len(tensor.shape))
    num_bytes = int(np.prod(tensor.shape)) * dtype.itemsize
    if dtype.name != "bfloat16":
        writer.add_tensor_info(target, tensor.shape, dtype, num_bytes)
        return
    # The writer takes bfloat16 as bytes.
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 2)
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor_info(target, shape, np.dtype(np.uint8), num_bytes, raw_dtype=kind)


def _tensor(name: str, arch: str, config: DecoderConfig, weights: WeightFile) -> np.ndarray:
    """Return a tensor's numbers as they are written."""
    tensor = weights.tensors[name]
    value = np.asarray(weights.read(name, tuple((0, n) for n in tensor.shape)))
    if arch in _ROTATES_NEIGHBORS:
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if f".{part}." in name:
                halves = value.reshape(heads, 2, config.head_dim // 2, *value.shape[1:])
                value = halves.swapaxes(1, 2).reshape(value.shape)
    value = np.ascontiguousarray(value, _stored_dtype(tensor.dtype, len(tensor.shape)))
    return value.view(np.uint8) if value.dtype.name == "bfloat16" else value


def _add_config(
    gguf: Any,
    writer: Any,
    folder: str,
    config: DecoderConfig,
    theta: float,
    weights: WeightFile,
) -> None:
    """Add the sizes and options of the model."""
    writer.add_name(os.path.basename(os.path.abspath(folder)))
    writer.add_context_length(int(_raw_config(folder).get("max_position_embeddings") or 2048))
    writer.add_vocab_size(config.vocab)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(theta)
    dtypes = {tensor.dtype for tensor in weights.tensors.values() if len(tensor.shape) > 1}
    file_types = {"float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
    file_type = file_types.get(next(iter(dtypes)), "ALL_F32") if len(dtypes) == 1 else "ALL_F32"
    writer.add_file_type(getattr(gguf.LlamaFileType, file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokens(gguf: Any, writer: Any, folder: str, tokens: GGUFTokens) -> None:
    """Add the tokenizer, its special tokens and the chat template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.split)
    writer.add_token_list(tokens.tokens)
    writer.add_token_types(tokens.types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens.tokens))
    special.add_special_token.setdefault("bos", False)  # llama.cpp's default depends on `split`
    special.add_to_gguf(writer, quiet=True)
