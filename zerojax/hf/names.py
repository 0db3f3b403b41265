"""Supported model families as data: properties of each, and the parameter for each of its tensors.

For example, the entry

    "model.layers.{layer}.self_attn.q_proj.weight": ("blocks.self_attn.q_proj.kernel", (1, 0))

means: layer l of the stack `blocks.self_attn.q_proj.kernel` [L, in, out] is this tensor [out, in],
with its dims in the order (1, 0). An import uses the table to map the file's names to parameters;
an export uses the same entries to write each tensor. To add your own family, pass a `Family` with
such a table:

    families = {
        **zerojax.hf.FAMILIES,
        "my_llama": dataclasses.replace(zerojax.hf.FAMILIES["llama"], qkv_bias=True),
    }
    model = zerojax.hf.model_of(folder, families=families)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.hf.config import DecoderConfig, Family
from zerojax.hf.mixtures.config import Mixture
from zerojax.hf.mixtures.names import (
    with_experts,
    with_first_layers,
    with_fused_experts,
    with_latents,
    with_llama4_experts,
)
from zerojax.user_values import as_int_or_float, as_integer, as_number
from zerojax.weights import Part, Place

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
        "model.norm.bias": "head.norm.bias",
        "lm_head.weight": "head.lm_head.embedding",
        # Older files store these frequencies, which are computed from config.json here.
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq": None,
    }
    for name, module in PROJECTIONS.items():
        tensor = f"model.layers.{{layer}}.{module}.{name}"
        param = f"blocks.{module}.{name}"
        names[f"{tensor}.weight"] = (f"{param}.kernel", (1, 0))
        names[f"{tensor}.bias"] = f"{param}.bias"
    for norm in norms:
        names |= norm_names(norm, norm)
    return names


def norm_names(name: str, norm: str) -> dict[str, Any]:
    """Return the entries of a layer's norm.

    Args:
      name: its name in the files, within a layer.
      norm: its name in a block.
    """
    tensor = f"model.layers.{{layer}}.{name}"
    return {f"{tensor}.weight": f"blocks.{norm}.scale", f"{tensor}.bias": f"blocks.{norm}.bias"}


def fused(names: Mapping[str, Any], tensor: str, widths: Mapping[str, int]) -> dict[str, Any]:
    """Return a table in which one matrix of the files holds several projections.

    Args:
      names: table with an entry for each projection.
      tensor: name of the matrix in the files.
      widths: number of the matrix's rows that each projection has, by its name in a block, in the
        order of the rows.
    """
    fused_names = dict(names)
    places = []
    start = 0
    for param, width in widths.items():
        for ending in ("kernel", "bias"):
            fused_names = {
                name: entry
                for name, entry in fused_names.items()
                if entry not in (f"{param}.{ending}", (f"{param}.{ending}", (1, 0)))
            }
        part = Part(0, start, start + width)
        places.append(Place(f"{param}.kernel", axes=(1, 0), part=part))
        start += width
    return fused_names | {tensor: places}


def with_fused_qkv(names: Mapping[str, Any], c: DecoderConfig) -> dict[str, Any]:
    """Return a table in which `qkv_proj` holds queries, keys and values (Phi-3)."""
    kv = c.kv_heads * c.head_dim
    widths = {"q_proj": c.heads * c.head_dim, "k_proj": kv, "v_proj": kv}
    return fused(
        names,
        "model.layers.{layer}.self_attn.qkv_proj.weight",
        {f"blocks.self_attn.{name}": width for name, width in widths.items()},
    )


def with_fused_gate(
    names: Mapping[str, Any], c: DecoderConfig, name: str = "mlp.gate_up_proj"
) -> dict[str, Any]:
    """Return a table in which one matrix of a layer holds gate and up (Phi-3, GLM-4)."""
    widths = {"blocks.mlp.gate_proj": c.intermediate, "blocks.mlp.up_proj": c.intermediate}
    return fused(names, f"model.layers.{{layer}}.{name}.weight", widths)


_TWO = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
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

_OLMO = {
    **_COMMON,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
}
_OF_OLMO: dict[str, Any] = {
    "names": table(*_AFTER, *_ATTENTION_NORMS),
    "qk_norm": True,
    "qk_norm_joint": True,
    "pre_norms": False,
    "post_norms": True,
}
_GRANITE = {**_COMMON, "max_position_embeddings": 2048, "attention_multiplier": 1.0}
_GRANITE_READS = (
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
_GLM = {
    **_COMMON,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "pad_token_id": 151_329,
}
_OF_GLM: dict[str, Any] = {
    "defaults": _GLM,
    "reads": ("attention_bias", "partial_rotary_factor"),
    "output_bias": False,
    "adjacent_pairs": True,
}
_COHERE = {
    **_COMMON,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_OF_COHERE: dict[str, Any] = {
    "names": table("input_layernorm"),
    "eps": "layer_norm_eps",
    "layer_norm": True,
    "parallel": True,
    "adjacent_pairs": True,
}
_MINISTRAL3 = {
    **_COMMON,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "pad_token_id": 11,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


_OF_DEEPSEEK_V3 = Mixture(
    score="sigmoid",
    has_balance=False,
    has_shared=True,
    has_first=True,
    has_groups=True,
    method="noaux_tc",
    of_group=2,
    correction=True,
)
# Layers that predict further tokens, and losses of the original training.
_IGNORED_OF_DEEPSEEK = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
)


_DEEPSEEK = {
    **_COMMON,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _deepseek_names(c: DecoderConfig) -> dict[str, Any]:
    return with_first_layers(with_latents(table(*_TWO)), c.layers)


def _llama4_names(c: DecoderConfig) -> dict[str, Any]:
    assert c.mixture is not None
    return with_llama4_experts(table(*_TWO), c.mixture.intermediate)


def _glm4_moe_names(c: DecoderConfig) -> dict[str, Any]:
    return with_first_layers(table(*_TWO, *_ATTENTION_NORMS), c.layers)


def _phi3_names(c: DecoderConfig) -> dict[str, Any]:
    return with_fused_gate(with_fused_qkv(table(*_TWO), c), c)


def _glm4_names(c: DecoderConfig) -> dict[str, Any]:
    names = table("input_layernorm")
    names |= norm_names("post_self_attn_layernorm", "post_attention_layernorm")
    names |= norm_names("post_attention_layernorm", "pre_feedforward_layernorm")
    names |= norm_names("post_mlp_layernorm", "post_feedforward_layernorm")
    return with_fused_gate(names, c)


def _glm_names(c: DecoderConfig) -> dict[str, Any]:
    return with_fused_gate(table(*_TWO), c)


def _granite_hybrid_names(c: DecoderConfig) -> dict[str, Any]:
    names = with_fused_gate(table(*_TWO), c, "shared_mlp.input_linear")
    del names["model.layers.{layer}.mlp.down_proj.weight"]
    down = "model.layers.{layer}.shared_mlp.output_linear.weight"
    return names | {down: ("blocks.mlp.down_proj.kernel", (1, 0))}


def _starcoder2_names() -> dict[str, Any]:
    names = table(*_TWO)
    for name, param in {"c_fc": "up_proj", "c_proj": "down_proj"}.items():
        for projection in (param, "gate_proj"):
            names.pop(f"model.layers.{{layer}}.mlp.{projection}.weight", None)
            names.pop(f"model.layers.{{layer}}.mlp.{projection}.bias", None)
        tensor = f"model.layers.{{layer}}.mlp.{name}"
        names[f"{tensor}.weight"] = (f"blocks.mlp.{param}.kernel", (1, 0))
        names[f"{tensor}.bias"] = f"blocks.mlp.{param}.bias"
    return names


_IN_MODELS_OF_IMAGES = (
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
    # as older versions of transformers named them, and the hub's files of Gemma 3
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
_OTHERS = tuple(
    f"{prefix}{part}."
    for prefix in ("model.", "")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
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
        ropes_by_kind=True,
        **_OF_GEMMA,
    ),
    "gemma": Family(
        names=table(*_TWO),
        defaults={
            **_COMMON,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "head_dim": 256,
            "num_key_value_heads": 16,
            "pad_token_id": 0,
        },
        reads=("attention_bias",),
        unit_norm=True,
        scales_embedding=True,
        # The released files mean the approximation by "gelu".
        activations={"gelu": "gelu_pytorch_tanh"},
    ),
    "phi3": Family(
        names=_phi3_names,
        defaults={
            **_COMMON,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "pad_token_id": 32_000,
        },
        reads=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        qkv_bias=False,
        output_bias=False,
        windows="all",
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "olmo2": Family(defaults=_OLMO, reads=("attention_bias",), **_OF_OLMO),
    "olmo3": Family(
        defaults={
            **_OLMO,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        reads=("attention_bias", *_READS_WINDOWS),
        windows="pattern",
        ropes_by_kind=True,
        **_OF_OLMO,
    ),
    "smollm3": Family(
        names=table(*_TWO),
        defaults={
            **_COMMON,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "pad_token_id": 128_004,
        },
        reads=(
            *_QWEN_READS,
            "attention_bias",
            "mlp_bias",
            "no_rope_layers",
            "no_rope_layer_interval",
        ),
        windows="unrotated",
        rotates="listed",
    ),
    "granite": Family(names=table(*_TWO), defaults=_GRANITE, reads=(*_GRANITE_READS, "mlp_bias")),
    "granitemoehybrid": Family(
        names=_granite_hybrid_names,
        defaults={**_GRANITE, "shared_intermediate_size": 1024},
        reads=(*_GRANITE_READS, "position_embedding_type"),
        mlp_bias=False,
        rotates="typed",
        width="shared_intermediate_size",
        kinds={"attention": "full_attention"},
        # By default, layers are state space layers with experts.
        needs={"num_local_experts": 0},
        ignores=(
            "intermediate_size",
            "mamba_",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
            "time_step_limit",
        ),
    ),
    "glm": Family(names=_glm_names, **_OF_GLM),
    "glm4": Family(names=_glm4_names, post_norms=True, **_OF_GLM),
    "seed_oss": Family(
        names=table(*_TWO),
        defaults={
            **_COMMON,
            "max_position_embeddings": 524_288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "pad_token_id": 1,
        },
        reads=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "ministral": Family(
        names=table(*_TWO),
        defaults=_MISTRAL,
        reads=_READS_WINDOWS,
        qkv_bias=False,
        output_bias=False,
        windows="all",
    ),
    "ministral3": Family(
        names=table(*_TWO),
        defaults=_MINISTRAL3,
        reads=("sliding_window",),
        qkv_bias=False,
        output_bias=False,
        windows="all",
        query_growth=True,
    ),
    "exaone4": Family(
        names=table(*_AFTER, *_ATTENTION_NORMS),
        defaults={
            **_COMMON,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        reads=(*_READS_WINDOWS, "sliding_window_pattern"),
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        windows="pattern",
        rotates="hybrid",
    ),
    "cohere": Family(
        defaults={**_COHERE, "rope_theta": 500_000.0},
        reads=("attention_bias", "logit_scale"),
        **_OF_COHERE,
    ),
    "cohere2": Family(
        defaults={
            **_COHERE,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            # what this family does, as its files say
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        reads=("attention_bias", "logit_scale", "sliding_window_pattern", *_READS_WINDOWS),
        windows="pattern",
        rotates="sliding",
        **_OF_COHERE,
    ),
    "starcoder2": Family(
        names=_starcoder2_names(),
        defaults={
            **_COMMON,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            # what this family does, as its files say
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "layer_norm_epsilon": 1e-5,
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
        reads=("use_bias", "sliding_window"),
        eps="norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        gated=False,
        windows="all",
    ),
    "mllama_text_model": Family(
        names=table(*_TWO),
        defaults={
            **_COMMON,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_key_value_heads": 8,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "pad_token_id": 128_004,
        },
        reads=("cross_attention_layers",),
        qkv_bias=False,
        output_bias=False,
        skips="cross_attention_layers",
        extra_tokens=8,
    ),
    "gemma3": Family(
        names={},
        defaults={
            "model_type": "gemma3_text",
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        inside=_IN_MODELS_OF_IMAGES,
        others=_OTHERS,
    ),
    "qwen3_moe": Family(
        names=with_experts(table(*_TWO, *_ATTENTION_NORMS)),
        defaults={
            **_QWEN,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        reads=(*_QWEN_READS, "attention_bias"),
        qk_norm=True,
        windows="switched",
        mixture=Mixture(),
    ),
    "mixtral": Family(
        names=with_experts(table(*_TWO), "block_sparse_moe", ("w1", "w3", "w2")),
        defaults={
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        reads=("sliding_window",),
        qkv_bias=False,
        output_bias=False,
        windows="all",
        mixture=Mixture(width="intermediate_size", normalizes=True),
    ),
    "gpt_oss": Family(
        names=with_fused_experts(
            table(*_TWO) | {"model.layers.{layer}.self_attn.sinks": "blocks.self_attn.sinks"}
        ),
        defaults={
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "router_aux_loss_coef": 0.001,
        },
        reads=("attention_bias", *_READS_WINDOWS),
        windows="pattern",
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        sinks=True,
        # as in the first released files, which repeat other keys by these names
        ignores=("initial_context_length", "experts_per_token"),
        mixture=Mixture(width="intermediate_size", normalizes=True, biases=True, is_clamped=True),
    ),
    "glm4_moe": Family(
        names=_glm4_moe_names,
        defaults={
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        reads=("attention_bias", "partial_rotary_factor", "use_qk_norm"),
        output_bias=False,
        qk_norm=None,
        ignores=_IGNORED_OF_DEEPSEEK,
        mixture=_OF_DEEPSEEK_V3,
    ),
    "deepseek_v2": Family(
        names=_deepseek_names,
        defaults={
            **_DEEPSEEK,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
        },
        reads=("attention_bias", "mlp_bias"),
        adjacent_pairs=True,
        ignores=_IGNORED_OF_DEEPSEEK,
        mixture=Mixture(
            normalizes=False,
            has_balance=False,
            has_shared=True,
            has_first=True,
            has_groups=True,
            method="group_limited_greedy",
        ),
        latent=True,
    ),
    "deepseek_v3": Family(
        names=_deepseek_names,
        defaults={
            **_DEEPSEEK,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        reads=("attention_bias",),
        ignores=_IGNORED_OF_DEEPSEEK,
        mixture=_OF_DEEPSEEK_V3,
        latent=True,
    ),
    "llama4_text": Family(
        names=_llama4_names,
        defaults={
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        reads=("attention_bias", "no_rope_layers", "no_rope_layer_interval"),
        rotates="listed",
        adjacent_pairs=True,
        width="intermediate_size_mlp",
        ignores=("for_llm_compressor", "output_router_logits", "router_aux_loss_coef"),
        mixture=Mixture(
            width="intermediate_size",
            normalizes=False,
            score="sigmoid",
            has_balance=False,
            is_listed=True,
            weighs_inputs=True,
        ),
        chunked=True,
    ),
    "olmoe": Family(
        names=with_experts(table(*_TWO, *_ATTENTION_NORMS)),
        defaults={
            **_COMMON,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "pad_token_id": 1,
        },
        reads=("attention_bias",),
        qk_norm=True,
        qk_norm_joint=True,
        mixture=Mixture(width="intermediate_size"),
    ),
    "mistral3": Family(
        names={},
        defaults={"model_type": "mistral"},
        inside=_IN_MODELS_OF_IMAGES,
        others=_OTHERS,
    ),
    "llama4": Family(
        names={},
        defaults={"model_type": "llama4_text"},
        inside=_IN_MODELS_OF_IMAGES,
        others=_OTHERS,
    ),
    "mllama": Family(
        names={},
        defaults={"model_type": "mllama_text_model"},
        inside=_IN_MODELS_OF_IMAGES,
        others=_OTHERS,
    ),
}
"""Families by `model_type`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters for projections (arXiv:2106.09685), with PEFT's scale and initial values.

        y = x W + (alpha / rank) dropout(x) A B        A[in, rank], uniform; B[rank, out], 0

    Attributes:
      rank: rank of A B.
      alpha: numerator of the scale.
      targets: names of the adapted projections, such as ("q_proj", "v_proj"); "all" for all seven
        of a layer.
      dropout: fraction of A's input that is dropped in training.

    Raises:
      ValueError: a number is out of range, or a target is unknown.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | str = ("q_proj", "v_proj")
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check and normalize the values."""
        rank = as_integer(self.rank)
        alpha = as_number(self.alpha)
        dropout = as_number(self.dropout)
        if rank is None or rank < 1:
            raise ValueError(f"rank={self.rank!r} of a Lora: an integer of at least 1 is needed")
        if alpha is None or alpha <= 0:
            raise ValueError(
                f"alpha={self.alpha!r} of a Lora: a positive number is needed; alpha / rank scales "
                "the adapters"
            )
        if dropout is None or not 0 <= dropout < 1:
            raise ValueError(
                f"dropout={self.dropout!r} of a Lora: a number from 0 to below 1 is needed"
            )
        # An integer alpha stays an int, so that adapter files show it as it was given.
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "alpha", as_int_or_float(self.alpha))
        object.__setattr__(self, "dropout", dropout)
        targets = tuple(PROJECTIONS) if self.targets == "all" else self.targets
        if (
            isinstance(targets, str)
            or not targets
            or not all(isinstance(name, str) for name in targets)
        ):
            raise ValueError(
                f"targets={self.targets!r} of a Lora: a tuple of names is needed, such as "
                "('q_proj',), or 'all'"
            )
        if unknown := sorted(set(targets) - set(PROJECTIONS)):
            raise ValueError(
                f"targets={self.targets!r} of a Lora: {', '.join(unknown)} unknown: choose from "
                f"{', '.join(PROJECTIONS)}"
            )
        object.__setattr__(self, "targets", tuple(name for name in PROJECTIONS if name in targets))

    @property
    def scale(self) -> float:
        """Factor of the adapters' output, alpha / rank."""
        return self.alpha / self.rank
