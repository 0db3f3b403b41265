"""Treatment of the keys of a `config.json` that the family does not read.

    read            by the family (`zerojax.hf.schema`)
    NO_CHANGE       about files, tokens, generation, tools and how transformers runs a model: any
                    value is allowed
    NEUTRAL         known but unsupported features: only values that switch them off are allowed
    unknown         null, false, 0, empty, or 1 for a factor: a warning that names the key, once;
                    any other value is an error

NOT_BUILT lists families that are refused by their `model_type`, with the reasons.

A model whose mathematics is not supported must not be trained as if it were. Even an unknown 0 or
false may have a meaning (`"is_causal": false` did), so these are reported.
"""

import functools
import logging
import reprlib
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

logger = logging.getLogger("zerojax")
_GENERATION = frozenset(
    {
        # transformers 4 wrote these into config.json; transformers 5 writes them into
        # generation_config.json
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "constraints",
        "continuous_batching_config",
        "disable_compile",
        "diversity_penalty",
        "do_sample",
        "dola_layers",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "penalty_alpha",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "speculation_type",
        "stop_strings",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "token_healing",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "use_mtp",
        "watermarking_config",
    }
)
NO_CHANGE = _GENERATION | {
    # files, tokens and tasks
    "_commit_hash",
    "_from_model_config",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "classifier_dropout",
    "custom_pipelines",
    "decoder_start_token_id",
    "dtype",
    "eos_token_id",
    "eos_token_ids",
    "finetuning_task",
    "id2label",
    "label2id",
    "max_sequence_length",
    "model_max_length",
    "model_type",
    "name_or_path",
    "num_labels",
    "prefix",
    "problem_type",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "torch_dtype",
    "transformers_version",
    # tools that converted or trained the model; "neftune_noise_alpha" is noise in training
    "is_llama_config",
    "neftune_noise_alpha",
    "transformers.js_config",
    # written by transformers in addition to layer_types, and never read
    "_sliding_window_pattern",
    # how transformers runs a model
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "chunk_size_feed_forward",
    "experts_implementation",
    "gradient_checkpointing",
    "is_decoder",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "return_dict",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
    "xla_device",
    # initialization; "pretraining_tp" splits products into parts with the same sum
    "init_method",
    "initializer_range",
    "pretraining_tp",
}
"""Keys that may hold any value."""
_NO_CHANGE_PREFIXES = ("unsloth_",)

_NO_DROPOUT = "dropout is not supported; set it to 0"
_OFF = (None, False)
_ZERO = (None, False, 0)
_ONE = (None, 1)
_EMPTY = (None, False, [], {})
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
    "residual_dropout",
)
_NO_EXPERTS = "mixtures of experts are not supported"
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS = (
    *NUMBERS_OF_EXPERTS,
    "moe_intermediate_size",
    "num_experts_per_tok",
)
_NOT_OF_THIS = "this model_type does not have it"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        **dict.fromkeys(_DROPOUTS, (_ZERO, _NO_DROPOUT)),
        **dict.fromkeys(EXPERTS, (_ZERO, _NO_EXPERTS)),
        "norm_topk_prob": (_OFF, "weights that add up to 1 are not supported for this model_type"),
        "moe_layer_freq": (_ONE, "experts in every n-th layer only are not supported"),
        "router_jitter_noise": (_ZERO, "noise of the router is not supported; set it to 0"),
        "clip_qkv": (_OFF, "clipped queries, keys and values are not supported"),
        "is_causal": ((True,), "a decoder does not attend to later tokens"),
        "use_bidirectional_attention": (_OFF, "a decoder does not attend to later tokens"),
        "is_encoder_decoder": (_OFF, "encoders are not supported"),
        "add_cross_attention": (_OFF, "cross attention is not supported"),
        "cross_attention_hidden_size": (_OFF, "cross attention is not supported"),
        "loss_type": ((None, "ForCausalLM"), "the loss is that of a causal language model"),
        "partial_rotary_factor": (_ONE, "this model_type rotates whole heads"),
        "rotary_pct": (_ONE, "this model_type rotates whole heads"),
        "rope_interleaved": (_OFF, "halves of a head are rotated, not adjacent pairs"),
        "use_mrope": (_OFF, "rotations over three axes are not supported"),
        "hidden_activation": (
            (None, "gelu_pytorch_tanh"),
            "this model_type reads hidden_act instead",
        ),
        "lm_head_bias": (_OFF, "a bias of logits is not supported"),
        "full_attn_mod": (_ONE, "this model_type does not have it"),
        "interpolate_factor": (_ONE, "this factor is not supported"),
        "no_rope_layers": (_EMPTY, _NOT_OF_THIS),
        "use_qk_norm": (_OFF, "layer norms of queries and keys are not supported"),
        "normalization_function": ((None, "rmsnorm"), "other norms are not supported"),
        "pruned_heads": (_EMPTY, "pruned heads are not supported"),
        "per_layer_config": (_EMPTY, "sizes that differ between layers are not supported"),
        "quantization": (_EMPTY, "quantized weights are not read"),
        "quantization_config": (_EMPTY, "quantized weights are not read"),
        **dict.fromkeys(
            ("audio_config", "text_config", "vision_config"),
            (_EMPTY, "models of images or sound are not supported"),
        ),
        **dict.fromkeys(
            ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"),
            (_ONE, "this model_type does not have this factor"),
        ),
        "attention_multiplier": (_OFF, _NOT_OF_THIS),
        # read by some families only
        **dict.fromkeys(
            (
                "attention_bias",
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "max_window_layers",
                "mlp_bias",
                "query_pre_attn_scalar",
                "rope_local_base_freq",
                "sliding_window",
                "sliding_window_pattern",
                "use_sliding_window",
            ),
            (_OFF, _NOT_OF_THIS),
        ),
    }
)
"""By key: the values that switch its feature off, and the reason why others are refused."""
_FACTORS = ("_factor", "_multiplier", "_scale", "_scaling")
"""Suffixes of keys for which 1 is neutral."""


def check_keys(
    raw: Mapping[str, Any], reads: Set[str], defaults: Mapping[str, Any], where: str
) -> None:
    """Raise ValueError for unread keys that may change what is computed.

    Unknown keys that seem to be switched off only cause a warning.

    Args:
      raw: object in `config.json`.
      reads: keys that the family reads, or compares itself.
      defaults: the family's values of keys that it does not read; the file may repeat them.
      where: path of the file.

    Raises:
      ValueError: a key is unknown or enables an unsupported feature; the error names it.
    """
    unknown = []
    neutral = []
    for key, value in raw.items():
        if key in reads or key in NO_CHANGE or key.startswith(_NO_CHANGE_PREFIXES):
            continue
        if defaults.get(key) is not None and is_same(value, defaults[key]):
            continue
        if key in NEUTRAL:
            allowed, why = NEUTRAL[key]
            if not any(is_same(value, off) for off in allowed):
                raise ValueError(
                    f"{key}={reprlib.repr(value)}: {why}; allowed: "
                    f"{_shown(allowed, defaults.get(key))}"
                )
        elif _is_neutral(key, value):
            neutral.append(key)
        else:
            unknown.append(key)
    if unknown:
        shown = ", ".join(f"{key}={reprlib.repr(raw[key])}" for key in sorted(unknown))
        raise ValueError(
            f"{shown}: unknown, and may change what the model computes; if it does not for this "
            "model_type, remove it"
        )
    if neutral:
        _warn(where, ", ".join(f"{key}={raw[key]!r}" for key in sorted(neutral)))


def is_same(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; true and 1 are not, 1 and 1.0 are."""
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _is_neutral(key: str, value: Any) -> bool:
    if value is None or value is False or is_same(value, 0) or value in ("", [], {}):
        return True
    return key.endswith(_FACTORS) and is_same(value, 1)


def _shown(allowed: tuple[Any, ...], default: Any) -> str:
    names = {None: "null", False: "false", True: "true"}
    options = [*allowed, *([] if default is None else [default])]
    return ", ".join(names[v] if v is None or isinstance(v, bool) else repr(v) for v in options)


@functools.cache  # warns once for each file
def _warn(where: str, keys: str) -> None:
    logger.warning(
        "%s: %s: unknown keys, assumed to be features that are switched off; if they are not, this "
        "is another model",
        where,
        keys,
    )


# --- families that are refused by their model_type ------------------------------------------------

_GEMMA3N = (
    "per-layer embeddings, several streams (AltUp, LAuReL), and layers that share keys and values"
)
_GEMMA4 = (
    "norms of values, layer scales, per-layer embeddings, and layers that share keys and values"
)
_QWEN3_5 = "linear attention layers, gated attention outputs, and rotations of a part of each head"
_MROPE = "rotations over three axes (mrope)"

NOT_BUILT: Mapping[str, str] = MappingProxyType(
    {
        "gemma3n": _GEMMA3N,
        "gemma3n_text": _GEMMA3N,
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        "qwen2_5_vl": _MROPE,
        "qwen2_5_vl_text": _MROPE,
        "qwen2_vl": _MROPE,
        "qwen2_vl_text": _MROPE,
        "qwen3_5": _QWEN3_5,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_next": f"mixtures of experts, {_QWEN3_5}",
        "qwen3_vl": _MROPE,
        "qwen3_vl_text": _MROPE,
    }
)
"""By `model_type`: features of the family that are not supported."""
