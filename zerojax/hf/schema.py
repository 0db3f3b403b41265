"""A table of types and ranges against which every key read from a `config.json` is checked.

    values({"hidden_size": 3.0, ...}, ...)
    FieldError: hidden_size is 3.0, and an integer, from 1 to 1048576, is needed

Python accepts `true` as 1, `NaN` and `Infinity` as numbers, and 10^30 as a size, none of which is
meant. The bounds are far above published models. They turn a slip into an error instead of a huge
allocation, and prevent overflow in float32.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

from host_offload.fields import Field, FieldError

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Supported activations of MLPs."""
SLIDING = "sliding_attention"
FULL = "full_attention"
MOST_LAYERS = 2**12
"""Maximum number of layers: per-layer values are computed when a model is built."""


def read_number(
    field: Field,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return a finite number in a range.

    Args:
      field: value from JSON.
      least: inclusive lower bound.
      above: exclusive lower bound.
      most: inclusive upper bound.
      below: exclusive upper bound.

    Raises:
      FieldError: the value is not such a number.
    """
    value = field.value
    bounds = [f"from {least:g}"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"at most {most:g}"] if most < math.inf else []
    bounds += [f"below {below:g}"] if below < math.inf else []
    needed = f"a number, {', '.join(bounds)}," if bounds else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        field.refuse(needed)
    # No comparison with NaN is true. Python compares integers of any size with floats.
    if not (least <= value <= most and above < value < below and abs(value) < math.inf):
        field.refuse(needed)
    return float(value)


def number(
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> Callable[[Field], float]:
    """Return a reader of numbers in a range; `read_number` documents the arguments."""
    return lambda field: read_number(field, least=least, above=above, most=most, below=below)


def numbers(*, above: float, most: float) -> Callable[[Field], list[float]]:
    """Return a reader of lists of numbers in a range."""
    return lambda field: [read_number(item, above=above, most=most) for item in field.items()]


def integer(least: int, most: int) -> Callable[[Field], int]:
    """Return a reader of integers from `least` to `most`."""
    return lambda field: field.integer(least, most)


def one_option(*options: str) -> Callable[[Field], str]:
    """Return a reader of strings out of `options`."""

    def read(field: Field) -> str:
        if not isinstance(field.value, str) or field.value not in options:
            field.refuse(f"one of {', '.join(options)}")
        return field.value

    return read


def read_kinds(field: Field) -> list[str]:
    """Return the kinds of layers in a list."""
    return [one_option(SLIDING, FULL)(item) for item in field.items()]


def read_flags(field: Field) -> list[bool]:
    """Return the flags in a list of 0 and 1."""
    return [bool(item.integer(0, 1)) for item in field.items()]


def read_layers(field: Field) -> list[int]:
    """Return the numbers of layers in a list."""
    return [item.integer(0, MOST_LAYERS) for item in field.items()]


def read_pattern(field: Field) -> int:
    """Return the length of a pattern of layers whose last one is full.

    It is a number, or letters for local and global layers, such as "LLLG".
    """
    letters = field.value
    if not isinstance(letters, str):
        return field.integer(1, MOST_LAYERS)
    if letters != "L" * (len(letters) - 1) + "G":
        field.refuse('a number of layers, or letters such as "LLLG",')
    return len(letters)


def read_object(field: Field) -> dict[str, Any]:
    """Return an object; its keys are not checked here."""
    if not isinstance(field.value, dict):
        field.refuse("an object")
    return field.value


@dataclasses.dataclass(frozen=True)
class Key:
    """Allowed values of a key.

    Attributes:
      read: function that returns the value, or raises FieldError.
      null: meaning of null: "error"; "off", like false; "none", the value None; or "default", as if
        the key were absent.
      is_needed: whether the file or the family's defaults must have a value.
    """

    read: Callable[[Field], Any]
    null: Literal["error", "off", "none", "default"] = "error"
    is_needed: bool = False


def flag(field: Field) -> bool:
    """Return a boolean, or raise FieldError."""
    return field.flag()


THETA = Key(number(above=1, most=1e30), is_needed=True)
"""Base of the rotations' frequencies."""
_PART = Key(number(above=0, most=1), null="default")
_CAP = Key(number(above=0, most=1e6), null="off")
_MULTIPLIER = Key(number(above=0, most=1e6), null="none")
_EPS = Key(number(above=0, below=1))
_FLAG = Key(flag, null="off")
_COUNT = Key(integer(1, 2**20), null="none")
KEYS: Mapping[str, Key] = {
    "vocab_size": Key(integer(1, 2**31 - 1), is_needed=True),  # tokens are int32
    "hidden_size": Key(integer(1, 2**20), is_needed=True),
    "intermediate_size": Key(integer(1, 2**24)),
    "num_hidden_layers": Key(integer(1, MOST_LAYERS), is_needed=True),
    "num_attention_heads": Key(integer(1, 2**16), is_needed=True),
    "num_key_value_heads": Key(integer(1, 2**16), null="none"),
    "head_dim": Key(integer(1, 2**13), null="none"),
    "hidden_act": Key(one_option(*ACTIVATIONS), null="none"),
    "hidden_activation": Key(one_option(*ACTIVATIONS), null="default"),
    "max_position_embeddings": Key(integer(1, 2**53), is_needed=True),
    "rms_norm_eps": _EPS,
    "layer_norm_eps": _EPS,
    "norm_epsilon": _EPS,
    "rope_theta": THETA,
    "rope_local_base_freq": Key(THETA.read),
    "rope_scaling": Key(read_object, null="none"),
    "rope_parameters": Key(read_object, null="none"),
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "use_sliding_window": _FLAG,
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "query_pre_attn_scalar": Key(number(above=0, most=1e6)),
    "sliding_window": Key(integer(1, 2**31 - 1), null="off"),
    "sliding_window_pattern": Key(read_pattern, null="none"),
    "max_window_layers": Key(integer(0, 2**31 - 1)),
    "layer_types": Key(read_kinds, null="none"),
    "pad_token_id": Key(integer(-(2**31), 2**31 - 1), null="none"),
    "use_bias": _FLAG,
    "attention_out_bias": _FLAG,
    "partial_rotary_factor": _PART,
    "original_max_position_embeddings": Key(integer(1, 2**53), null="none"),
    "no_rope_layers": Key(read_flags, null="none"),
    "no_rope_layer_interval": Key(integer(1, MOST_LAYERS)),
    "cross_attention_layers": Key(read_layers, null="default"),
    "embedding_multiplier": _MULTIPLIER,
    "attention_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
    "logit_scale": _MULTIPLIER,
    "shared_intermediate_size": Key(integer(1, 2**24)),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _COUNT),
    "num_experts_per_tok": _COUNT,
    "moe_intermediate_size": Key(integer(1, 2**24), null="none"),
    "norm_topk_prob": _FLAG,
    "output_router_logits": _FLAG,
    "router_aux_loss_coef": Key(number(least=0, most=1e6), null="off"),
    "swiglu_limit": Key(number(above=0, most=1e6)),
    "swiglu_alpha": Key(number(above=0, most=1e6)),
    "n_shared_experts": Key(integer(0, 2**20), null="none"),
    "first_k_dense_replace": Key(integer(0, MOST_LAYERS), null="none"),
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "routed_scaling_factor": Key(number(above=0, most=1e6), null="none"),
    "scoring_func": Key(one_option("softmax", "sigmoid"), null="none"),
    "topk_method": Key(one_option("greedy", "group_limited_greedy", "noaux_tc"), null="none"),
    "use_qk_norm": _FLAG,
    # attention in chunks
    "attention_chunk_size": Key(integer(1, 2**31 - 1), null="off"),
    "attn_temperature_tuning": _FLAG,
    "attn_scale": Key(number(least=0, most=1e3)),
    "floor_scale": Key(integer(1, 2**31 - 1)),
    "intermediate_size_mlp": Key(integer(1, 2**24)),
    "interleave_moe_layer_step": Key(integer(1, MOST_LAYERS)),
    "moe_layers": Key(read_layers, null="none"),
    # latent attention
    "q_lora_rank": _COUNT,
    "kv_lora_rank": _COUNT,
    "qk_nope_head_dim": _COUNT,
    "qk_rope_head_dim": _COUNT,
    "v_head_dim": _COUNT,
    "rope_interleave": _FLAG,
    "decoder_sparse_step": Key(integer(1, MOST_LAYERS), null="none"),
    "mlp_only_layers": Key(read_layers, null="none"),
    "position_embedding_type": Key(one_option("rope", "nope", "rope_gptj"), null="none"),
}
"""Allowed values by key. Each family reads some of these keys."""


def values(
    given: Mapping[str, Any], defaults: Mapping[str, Any], reads: Set[str]
) -> dict[str, Any]:
    """Return the checked value of every key of the table, or None if there is no value.

    Args:
      given: object in `config.json`.
      defaults: values of keys that the file leaves out.
      reads: keys that are read from the file. All other keys have their default, whatever the file
        says.

    Raises:
      FieldError: a value is missing, has a wrong type, or is out of range.
    """
    return {
        name: parse_value(name, key, given if name in reads else {}, defaults)
        for name, key in KEYS.items()
    }


def parse_value(
    name: str, key: Key, given: Mapping[str, Any], defaults: Mapping[str, Any], where: str = ""
) -> Any:
    """Return the checked value of one key, or None if there is no value.

    Args:
      name: name of the key.
      key: allowed values.
      given: object in the file.
      defaults: values of keys that the file leaves out.
      where: name of the inner object that contains the key, or empty.

    Raises:
      FieldError: the value is missing, has a wrong type, or is out of range.
    """
    is_there = name in given and not (given[name] is None and key.null == "default")
    value = given[name] if is_there else defaults.get(name)
    if value is False and key.null == "off":
        value = None
    path = f"{where}.{name}" if where else name
    if value is not None or (is_there and key.null == "error"):
        return key.read(Field(value, path))
    if key.is_needed:
        raise FieldError(f"{path} is missing")
    return False if key.read is flag and key.null == "off" else None
