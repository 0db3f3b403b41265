"""Families that are refused, and what each has that is not built."""

from collections.abc import Mapping
from types import MappingProxyType

_GEMMA3N = "embeddings for each layer, several streams (AltUp, LAuReL), and layers that share keys and values"
_GEMMA4 = "norms of values, scales of layers, embeddings for each layer, and layers that share keys and values"
_QWEN3_5 = "layers of linear attention, gates of attention's output, and rotations of a part of each head"
_MLLAMA = "layers of cross attention to images"
_LLAMA4 = "mixtures of experts, attention in chunks, and layers without rotations"
_MROPE = "rotations over three axes (mrope)"
_DEEPSEEK = "latent attention and mixtures of experts"
_COHERE = "layer norms, attention and MLP side by side, and rotations of neighbouring pairs"

NOT_BUILT: Mapping[str, str] = MappingProxyType({
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4": "rotations of a part of each head, and one matrix for gate and up",
    "gpt_oss": "mixtures of experts, and sinks of attention",
    "granite": "multipliers of embeddings, scores, residuals and logits",
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "ministral3": "scores that are scaled by position",
    "mllama": _MLLAMA,
    "mllama_text_model": _MLLAMA,
    "olmo2": "norms over all heads at once, and of outputs alone",
    "phi3": "one matrix for queries, keys and values, and one for gate and up",
    "qwen2_5_vl": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": f"mixtures of experts, {_QWEN3_5}",
    "qwen3_vl": _MROPE,
    "qwen3_vl_text": _MROPE,
    "smollm3": "layers without rotations",
})  # fmt: skip
"""By `model_type`."""
