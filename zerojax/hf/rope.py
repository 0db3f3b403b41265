"""Rotary position embeddings (arXiv:2104.09864) as in `config.json`: plain, or for longer contexts.

    f[i]  = theta^(-2 i / D)                          i = 0 .. D/2 - 1, radians per position
    x'    = x cos(p f) + rotate_half(x) sin(p f)      p: a token's position

    "linear"    f / factor
    "llama3"    f / factor for long waves, f for short ones, interpolated in between
    "yarn"      f / factor below a ramp over i, f above it; a factor for cos, sin (arXiv:2309.00071)
    "longrope"  f / short[i] if a row has at most `length` positions, else f / long[i]; a factor for
                cos, sin (arXiv:2402.13753)
    "dynamic"   f[i] r^(-2 i / (D - 2)), r = factor s / length - (factor - 1), s: positions of a row

Frequencies are constants of the model, computed once in float64. With "longrope" and "dynamic" they
also depend on a row's largest position, so a row of packed sequences is rotated as its longest one.
Models that rotate only a part of each head have a smaller D, and layers without rotations have
f = 0.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.fields import Field
from zerojax.hf.keys import is_same
from zerojax.hf.schema import (
    THETA,
    Key,
    flag,
    integer,
    number,
    numbers,
    parse_value,
    read_number,
    read_object,
)

_FACTOR = Key(number(least=1, most=1e6), is_needed=True)
_FREQUENCY_FACTOR = Key(number(above=0, most=1e6), is_needed=True)
_LENGTH = Key(integer(1, 2**53))
_BETA = Key(number(least=1e-3, most=1e6), null="none")
_MSCALE = Key(number(least=0, most=1e3), null="none")
_FACTORS = Key(numbers(above=0, most=1e6), is_needed=True)
_TEMPERATURE = Key(number(above=0, most=1e3), null="none")
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
        "attention_factor": _TEMPERATURE,
        "beta_fast": _BETA,
        "beta_slow": _BETA,
        "mscale": _MSCALE,
        "mscale_all_dim": _MSCALE,
        "truncate": Key(flag),
    },
    "longrope": {
        "factor": Key(number(above=0, most=1e6), null="none"),
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        "original_max_position_embeddings": _LENGTH,
        "attention_factor": _TEMPERATURE,
    },
    "dynamic": {"factor": _FACTOR},
}
"""By type: the keys that are read, with their allowed values."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotations of one kind of layer.

    Attributes:
      frequencies: D / 2 frequencies, in radians per position.
      factor: factor of cos and sin.
      long_frequencies: frequencies for rows of more than `length` positions; empty: the same.
      length: number of positions up to which rows have `frequencies`, or 0 if all have them.
      growth: factor by which "dynamic" rotations stretch longer rows, or 0.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    long_frequencies: tuple[float, ...] = ()
    length: int = 0
    growth: float = 0.0

    def __hash__(self) -> int:
        """Return a hash of a few numbers: hashing thousands for each layer would be slow."""
        return hash((self.frequencies[:2], self.frequencies[-1], self.factor))


def no_rope(width: int) -> Rope:
    """Return the rotations of a layer without rotations, as wide as those of the other layers."""
    return Rope((0.0,) * width)


def parse_rope(
    field: Field,
    *,
    theta: float,
    head_dim: int,
    max_positions: int,
    original_positions: int | None = None,
    part: float | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
    ignored: Set[str] = frozenset(),
) -> Rope:
    """Return the rotations that an object of `config.json` describes.

    Args:
      field: `rope_scaling` or `rope_parameters`, or its part for one kind of layer; empty for plain
        rotations.
      theta: base of the frequencies, if the object has none.
      head_dim: D, the width of a head.
      max_positions: number of positions that the model was trained for, if neither the object nor
        `original_positions` gives it.
      original_positions: that number, if `config.json` gives it outside of the object.
      part: part of each head that is rotated, if the object does not give it; None: the family
        rotates whole heads.
      aliases: other names of types.
      ignored: keys of the object that are read elsewhere.

    Raises:
      ValueError: the type is unknown, or a key is unknown to it, missing, of a wrong type, or out
        of range.
    """
    given = read_object(field)
    kind = _parse_type(field, aliases)
    if given.get("rope_theta") is not None:
        theta = THETA.read(Field(given["rope_theta"], f"{field.name}.rope_theta"))
    dim = _rotated_dim(given.get("partial_rotary_factor"), part, head_dim, field.name)
    ignored = ignored | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
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
    plain = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if kind == "default":
        return Rope(tuple(plain.tolist()))
    if kind == "linear":
        return Rope(tuple((plain / read["factor"]).tolist()))
    if kind == "dynamic":
        if dim == 2:
            raise ValueError(f"{field.name}: rope of type 'dynamic' needs more than 2 rotated dims")
        return Rope(tuple(plain.tolist()), length=max_positions, growth=read["factor"])
    read["original_max_position_embeddings"] = (
        original_positions or read["original_max_position_embeddings"] or max_positions
    )
    if kind == "llama3":
        return Rope(tuple(_llama3(plain, read, field.name).tolist()))
    if kind == "longrope":
        return _longrope(plain, read, max_positions, field.name)
    return _yarn(plain, theta, dim, read, field.name)


def _rotated_dim(given: object, part: float | None, head_dim: int, where: str) -> int:
    """Return the number of dims of each head that are rotated: the first ones.

    Raises:
      ValueError: the family rotates whole heads, or the number is odd.
    """
    if part is None:
        if given is not None and not is_same(given, 1):
            raise ValueError(
                f"{where}.partial_rotary_factor={reprlib.repr(given)}: only 1 is allowed, because "
                "this model_type rotates whole heads"
            )
        return head_dim
    if given is not None:
        part = read_number(Field(given, f"{where}.partial_rotary_factor"), above=0, most=1)
    dim = int(head_dim * part)
    if dim % 2 or not dim:
        raise ValueError(
            f"partial_rotary_factor={part} of head_dim={head_dim} rotates {dim} dims: an even "
            "number is needed, because rotations act on pairs"
        )
    return dim


def _parse_type(field: Field, aliases: Mapping[str, str]) -> str:
    """Return the type of rotations from `rope_type`, or from `type` in older files."""
    named = {
        key: field.value[key] for key in ("rope_type", "type") if field.value.get(key) is not None
    }
    for key, kind in named.items():
        if isinstance(kind, str):
            named[key] = aliases.get(kind, kind)
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


def _longrope(plain: np.ndarray, read: Mapping[str, Any], max_positions: int, where: str) -> Rope:
    """Return the rotations of LongRoPE: a divisor for each frequency, in short and in long rows."""
    length = read["original_max_position_embeddings"]
    factors = {}
    for name in ("short_factor", "long_factor"):
        factors[name] = np.asarray(read[name], np.float64)
        if len(read[name]) != len(plain):
            raise ValueError(
                f"{where}.{name} has {len(read[name])} numbers, but {len(plain)} pairs of dims are "
                "rotated (head_dim times partial_rotary_factor): one number per pair is needed"
            )
    factor = max_positions / length if read["factor"] is None else read["factor"]
    temperature = read["attention_factor"]
    if temperature is None:
        is_long = factor > 1 and length > 1
        temperature = math.sqrt(1 + math.log(factor) / math.log(length)) if is_long else 1.0
    return Rope(
        tuple((plain / factors["short_factor"]).tolist()),
        float(temperature),
        long_frequencies=tuple((plain / factors["long_factor"]).tolist()),
        length=length,
    )


def find_frequencies(layer: Mapping[str, jax.Array], context: Mapping[str, Any]) -> jax.Array:
    """Return the frequencies of a layer, f32[D / 2], or for each row f32[B, 1, 1, D / 2].

    Args:
      layer: `frequencies` and, if they depend on a row's length, `long_frequencies`, `length` and
        `growth`, as `Rope` describes them.
      context: for such frequencies, `row_lengths`: number of positions of each row, i32[B].
    """
    frequencies = layer["frequencies"]
    if "length" not in layer:
        return frequencies
    length = layer["length"].astype(jnp.float32)
    row = context["row_lengths"].astype(jnp.float32)[:, None]  # [B, 1]
    ratio = layer["growth"] * jnp.maximum(row, length) / jnp.maximum(length, 1)
    ratio = ratio - (layer["growth"] - 1)
    width = frequencies.shape[0]
    powers = jnp.arange(width) / max(width - 1, 1)
    stretched = layer["long_frequencies"] * ratio**-powers
    return jnp.where(row > length, stretched, frequencies)[:, None, None, :]


def rotate(
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    factor: jax.Array,
    is_adjacent: bool = False,
) -> jax.Array:
    """Return x[B, T, heads, D'] with its first D dims rotated.

    Args:
      x: queries or keys [B, T, heads, D'], where D' is at least D.
      positions: integers [B, T].
      frequencies: f32[D / 2], or f32[B, 1, 1, D / 2]: radians per position.
      factor: f32[], factor of cos and sin.
      is_adjacent: whether dims 2 i and 2 i + 1 form a pair; otherwise i and i + D / 2 do.
    """
    dim = 2 * frequencies.shape[-1]
    if dim < x.shape[-1]:
        rotated = rotate(x[..., :dim], positions, frequencies, factor, is_adjacent)
        return jnp.concatenate([rotated, x[..., dim:]], axis=-1)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies  # [B, T, 1, D / 2]
    cos, sin = ((f(angles) * factor).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    if is_adjacent:
        first, second = x[..., ::2], x[..., 1::2]
        pairs = [first * cos - second * sin, second * cos + first * sin]
        return jnp.stack(pairs, axis=-1).reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
