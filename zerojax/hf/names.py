"""Supported model families as data: properties of each, and the parameter for each of its tensors.

For example, the entry

    "model.layers.{layer}.self_attn.q_proj.weight": ("blocks.self_attn.q_proj.kernel", (1, 0))

means: layer l of the stack `blocks.self_attn.q_proj.kernel` [L, in, out] is this tensor [out, in],
with its dims in the order (1, 0). An import uses the table to map the file's names to parameters;
an export uses the same entries to write each tensor. To add your own family, pass a `Family` with
such a table:

    families = {
        **zerojax.hf.FAMILIES,
        "gemma": dataclasses.replace(zerojax.hf.FAMILIES["gemma2"], post_norms=False, ...),
    }
    model = zerojax.hf.model_of(folder, families=families)
"""

from collections.abc import Mapping
from typing import Any

from zerojax.hf.config import Family

PROJECTIONS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""Matrices of a layer, each with the module that contains it, both here and in the files."""
_ATTENTION_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def table(*norms: str) -> dict[str, Any]:
    """Return the names of a decoder in the form that transformers uses for most models.

    Args:
      *norms: names of a layer's norms.

    Returns:
      The table for `Family.names`.
    """
    names: dict[str, Any] = {
        "model.embed_tokens.weight": "embed.embed_tokens.embedding",
        "model.norm.weight": "head.norm.scale",
        "lm_head.weight": "head.lm_head.embedding",
        # Older files store these frequencies, which are computed from config.json here.
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq": None,
    }
    for name, module in PROJECTIONS.items():
        tensor = f"model.layers.{{layer}}.{module}.{name}"
        param = f"blocks.{module}.{name}"
        names[f"{tensor}.weight"] = (f"{param}.kernel", (1, 0))
        names[f"{tensor}.bias"] = f"{param}.bias"
    return names | {
        f"model.layers.{{layer}}.{norm}.weight": f"blocks.{norm}.scale" for norm in norms
    }


_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LLAMA = {**_COMMON, "max_position_embeddings": 2048}
_MISTRAL = {
    **_COMMON,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "num_key_value_heads": 8,
}
_QWEN = {
    **_COMMON,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "num_key_value_heads": 32,
}
_GEMMA = {
    **_COMMON,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "sliding_window": 4096,
    "pad_token_id": 0,
    "num_key_value_heads": 4,
}
_GEMMA2 = {
    **_GEMMA,
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_GEMMA,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

_OF_GEMMA: dict[str, Any] = {
    "unit_norm": True,
    "post_norms": True,
    "scales_embedding": True,
    "windows": "pattern",
}
_READS_WINDOWS = ("sliding_window", "layer_types")
_QWEN_READS = (*_READS_WINDOWS, "use_sliding_window", "max_window_layers")
_GEMMA_READS = (
    *_READS_WINDOWS,
    "attention_bias",
    "hidden_activation",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(names=table(*_TWO), defaults=_LLAMA, reads=("attention_bias", "mlp_bias")),
    "mistral": Family(
        names=table(*_TWO),
        defaults=_MISTRAL,
        reads=("sliding_window",),
        qkv_bias=False,
        output_bias=False,
        windows="all",
    ),
    "qwen2": Family(
        names=table(*_TWO),
        defaults=_QWEN,
        reads=_QWEN_READS,
        qkv_bias=True,
        output_bias=False,
        windows="last",
    ),
    "qwen3": Family(
        names=table(*_TWO, *_ATTENTION_NORMS),
        defaults={**_QWEN, "head_dim": 128},
        reads=(*_QWEN_READS, "attention_bias"),
        qk_norm=True,
        windows="last",
    ),
    "gemma2": Family(
        names=table(*_FOUR),
        defaults=_GEMMA2,
        reads=(*_GEMMA_READS, "attn_logit_softcapping"),
        **_OF_GEMMA,
    ),
    "gemma3_text": Family(
        names=table(*_FOUR, *_ATTENTION_NORMS),
        defaults=_GEMMA3,
        qk_norm=True,
        reads=(*_GEMMA_READS, "sliding_window_pattern", "rope_local_base_freq"),
        **_OF_GEMMA,
    ),
}
"""Families by `model_type`: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, Gemma 2 and 3 (text)."""
