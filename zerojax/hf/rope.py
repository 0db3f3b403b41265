"""Rotary position embeddings (arXiv:2104.09864) as in `config.json`: plain, or for longer contexts.

    f[i]  = theta^(-2 i / D)                          i = 0 .. D/2 - 1, radians per position
    x'    = x cos(p f) + rotate_half(x) sin(p f)      p: a token's position

    "linear"    f / factor
    "llama3"    f / factor for long waves, f for short ones, interpolated in between
    "yarn"      f / factor below a ramp over i, f above it; a factor for cos, sin (arXiv:2309.00071)

Frequencies are constants of the model, computed once in float64. Kinds whose frequencies depend on
a sequence's length ("dynamic", "longrope") are refused.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.fields import Field
from zerojax.hf.keys import is_same
from zerojax.hf.schema import THETA, Key, flag, integer, number, parse_value, read_object

_FACTOR = Key(number(least=1, most=1e6), is_needed=True)
_FREQUENCY_FACTOR = Key(number(above=0, most=1e6), is_needed=True)
_LENGTH = Key(integer(1, 2**53))
_BETA = Key(number(least=1e-3, most=1e6), null="none")
_MSCALE = Key(number(least=0, most=1e3), null="none")
_KEYS: Mapping[str, Mapping[str, Key]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _FREQUENCY_FACTOR,
        "high_freq_factor": _FREQUENCY_FACTOR,
        "original_max_position_embeddings": _LENGTH,
    },
    "yarn": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _LENGTH,
        "attention_factor": Key(number(above=0, most=1e3), null="none"),
        "beta_fast": _BETA,
        "beta_slow": _BETA,
        "mscale": _MSCALE,
        "mscale_all_dim": _MSCALE,
        "truncate": Key(flag),
    },
}
"""By type: the keys that are read, with their allowed values."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotations of one kind of layer.

    Attributes:
      frequencies: D / 2 frequencies, in radians per position.
      factor: factor of cos and sin.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def __hash__(self) -> int:
        """Return a hash of a few numbers: hashing thousands for each layer would be slow."""
        return hash((self.frequencies[:2], self.frequencies[-1], self.factor))


def parse_rope(field: Field, *, theta: float, head_dim: int, max_positions: int) -> Rope:
    """Return the rotations that an object of `config.json` describes.

    Args:
      field: `rope_scaling` or `rope_parameters`, or its part for one kind of layer; empty for plain
        rotations.
      theta: base of the frequencies, if the object has none.
      head_dim: D, the width of a head.
      max_positions: number of positions that the model was trained for, if the object does not give
        it.

    Raises:
      ValueError: the type is unknown, or a key is unknown to it, missing, of a wrong type, or out
        of range.
    """
    given = read_object(field)
    kind = _parse_type(field)
    if given.get("rope_theta") is not None:
        theta = THETA.read(Field(given["rope_theta"], f"{field.name}.rope_theta"))
    if (
        not is_same(given.get("partial_rotary_factor", 1), 1)
        and given["partial_rotary_factor"] is not None
    ):
        raise ValueError(
            f"{field.name}.partial_rotary_factor={reprlib.repr(given['partial_rotary_factor'])}: "
            "only 1 is allowed, because rotating a part of each head is not supported"
        )
    ignored = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    # The plain type ignores `factor`.
    ignored |= {"factor"} if kind == "default" else set()
    unknown = sorted(
        key for key in given if key not in ignored | set(_KEYS[kind]) and given[key] is not None
    )
    if unknown:
        raise ValueError(
            f"{field.name}: rope of type {kind!r} has the unknown keys {unknown}: it takes "
            f"{sorted(_KEYS[kind])}"
        )
    read = {
        name: parse_value(name, key, given, {}, field.name) for name, key in _KEYS[kind].items()
    }
    plain = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "default":
        return Rope(tuple(plain.tolist()))
    if kind == "linear":
        return Rope(tuple((plain / read["factor"]).tolist()))
    read["original_max_position_embeddings"] = (
        read["original_max_position_embeddings"] or max_positions
    )
    if kind == "llama3":
        return Rope(tuple(_llama3(plain, read, field.name).tolist()))
    return _yarn(plain, theta, head_dim, read, field.name)


def _parse_type(field: Field) -> str:
    """Return the type of rotations from `rope_type`, or from `type` in older files."""
    named = {
        key: field.value[key] for key in ("rope_type", "type") if field.value.get(key) is not None
    }
    for key, kind in named.items():
        if not isinstance(kind, str) or kind not in _KEYS:
            raise ValueError(
                f"{field.name}.{key}: rope of type {reprlib.repr(kind)} is not supported: choose "
                f"from {', '.join(_KEYS)}"
            )
    kinds = list(named.values())
    if len(set(kinds)) > 1:
        raise ValueError(
            f"{field.name} has rope_type={kinds[0]!r} and type={kinds[1]!r}: remove one of them"
        )
    return kinds[0] if kinds else "default"


def _llama3(plain: np.ndarray, read: Mapping[str, Any], where: str) -> np.ndarray:
    """Return the frequencies of Llama 3.1, whose original code also stretches long waves."""
    waves = 2 * math.pi / plain
    length = read["original_max_position_embeddings"]
    low = read["low_freq_factor"]
    high = read["high_freq_factor"]
    if low >= high:
        raise ValueError(f"{where}: low_freq_factor={low} is not below high_freq_factor={high}")
    # 0 where a wave is longer than length / low, 1 where it is shorter than length / high.
    kept = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / read["factor"] + kept * plain


def _yarn(
    plain: np.ndarray, theta: float, head_dim: int, read: Mapping[str, Any], where: str
) -> Rope:
    """Return the rotations of YaRN: "NTK by parts", with the temperature in cos and sin."""
    factor = read["factor"]
    length = read["original_max_position_embeddings"]
    fast = read["beta_fast"] or 32
    slow = read["beta_slow"] or 1
    if fast < slow:
        raise ValueError(f"{where}: beta_fast={fast} is below beta_slow={slow}")

    def find_dim(rotations: float) -> float:
        """Return the pair of dims that rotates this many times over the trained length."""
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = find_dim(fast)
    high = find_dim(slow)
    if read["truncate"] is not False:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    ramp = np.clip(
        (np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0
    )
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    temperature = read["attention_factor"]
    if temperature is None:
        mscale = read["mscale"]
        of_all = read["mscale_all_dim"]
        temperature = scale(mscale) / scale(of_all) if mscale and of_all else scale(1.0)
    return Rope(tuple(frequencies.tolist()), float(temperature))


def rotate(
    x: jax.Array, positions: jax.Array, frequencies: jax.Array, factor: jax.Array
) -> jax.Array:
    """Return x[B, T, heads, D] rotated; as in transformers, the two halves of D form the pairs.

    Args:
      x: queries or keys [B, T, heads, D].
      positions: integers [B, T].
      frequencies: f32[D / 2], radians per position.
      factor: f32[], factor of cos and sin.
    """
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies  # [B, T, 1, D / 2]
    cos, sin = ((f(angles) * factor).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
