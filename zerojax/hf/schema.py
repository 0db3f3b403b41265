"""What each key of a `config.json` may hold: one table of types and ranges, which every key that is
read goes through.

    values({"hidden_size": 3.0, ...}, ...)     FieldError: hidden_size is 3.0, and an integer, from 1 to 1048576, is needed

Python takes `true` for 1, `NaN` and `Infinity` for numbers, and 10^30 for a size; none of these is
meant. Bounds lie far above published models: they are there so that a slip is an error and not an
allocation, and so that no number overflows in float32.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

from host_offload.fields import Field, FieldError

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Activations of MLPs that are built."""
SLIDING, FULL = "sliding_attention", "full_attention"
MOST_LAYERS = 2**12
"""Most layers: what differs between layers is computed when a model is built."""


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
      field: what JSON gave.
      least: the smallest number that is allowed.
      above: a bound that is not allowed itself.
      most: the largest number that is allowed.
      below: a bound that is not allowed itself.

    Raises:
      FieldError: it is no such number.
    """
    value = field.value
    bounds = [f"from {least:g}"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"at most {most:g}"] if most < math.inf else []
    bounds += [f"below {below:g}"] if below < math.inf else []
    needed = f"a number, {', '.join(bounds)}," if bounds else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        field.refuse(needed)
    # NaN is in no range. Python compares integers of any size with floats.
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
    """Return the reader of a number in a range, see `read_number`."""
    return lambda field: read_number(field, least=least, above=above, most=most, below=below)


def integer(least: int, most: int) -> Callable[[Field], int]:
    """Return the reader of an integer in a range."""
    return lambda field: field.integer(least, most)


def one_of(*options: str) -> Callable[[Field], str]:
    """Return the reader of a text among `options`."""

    def read(field: Field) -> str:
        if not isinstance(field.value, str) or field.value not in options:
            field.refuse(f"one of {', '.join(options)}")
        return field.value

    return read


def read_kinds(field: Field) -> list[str]:
    """Return the kinds of layers of a list."""
    return [one_of(SLIDING, FULL)(item) for item in field.items()]


def read_object(field: Field) -> dict[str, Any]:
    """Return an object, whose own keys its reader checks."""
    if not isinstance(field.value, dict):
        field.refuse("an object")
    return field.value


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key may hold.

    Attributes:
      read: returns the value, or raises FieldError.
      null: what null means: "error"; "off", as false does; "none", the value None; or "default", as
        if the key were absent.
      is_needed: there must be a value, in the file or among a family's defaults.
    """

    read: Callable[[Field], Any]
    null: Literal["error", "off", "none", "default"] = "error"
    is_needed: bool = False


def flag(field: Field) -> bool:
    """Return true or false."""
    return field.flag()


THETA = Key(number(above=1, most=1e30), is_needed=True)
"""The base of rotations."""
_CAP = Key(number(above=0, most=1e6), null="off")
_FLAG = Key(flag, null="off")
KEYS: Mapping[str, Key] = {
    "vocab_size": Key(integer(1, 2**31 - 1), is_needed=True),  # tokens are int32
    "hidden_size": Key(integer(1, 2**20), is_needed=True),
    "intermediate_size": Key(integer(1, 2**24), is_needed=True),
    "num_hidden_layers": Key(integer(1, MOST_LAYERS), is_needed=True),
    "num_attention_heads": Key(integer(1, 2**16), is_needed=True),
    "num_key_value_heads": Key(integer(1, 2**16), null="none"),
    "head_dim": Key(integer(1, 2**13), null="none"),
    "hidden_act": Key(one_of(*ACTIVATIONS), null="none"),
    "hidden_activation": Key(one_of(*ACTIVATIONS), null="default"),
    "max_position_embeddings": Key(integer(1, 2**53), is_needed=True),
    "rms_norm_eps": Key(number(above=0, below=1), is_needed=True),
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
    "sliding_window_pattern": Key(integer(1, MOST_LAYERS)),
    "max_window_layers": Key(integer(0, 2**31 - 1)),
    "layer_types": Key(read_kinds, null="none"),
    "pad_token_id": Key(integer(-(2**31), 2**31 - 1), null="none"),
}
"""By key. A family reads some of them."""


def values(
    given: Mapping[str, Any], defaults: Mapping[str, Any], reads: Set[str]
) -> dict[str, Any]:
    """Return the value of every key of the table, checked; None where there is none.

    Args:
      given: the object of a `config.json`.
      defaults: the values of keys that the file leaves out.
      reads: keys that are read from the file. Others have the default, whatever the file says.

    Raises:
      FieldError: a value is missing, of another type or out of range.
    """
    return {
        name: value_of(name, key, given if name in reads else {}, defaults)
        for name, key in KEYS.items()
    }


def value_of(
    name: str, key: Key, given: Mapping[str, Any], defaults: Mapping[str, Any], where: str = ""
) -> Any:
    """Return the value of one key, checked; None where there is none.

    Args:
      name: of the key.
      key: what it may hold.
      given: the object of the file.
      defaults: values of keys that the file leaves out.
      where: the name of an inner object.

    Raises:
      FieldError: the value is missing, of another type or out of range.
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
