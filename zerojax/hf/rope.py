"""Rotary position embeddings (arXiv:2104.09864), as `config.json` describes them: plain, and scaled for longer contexts.

    f[i]  = theta^(-2 i / D)                          i = 0 .. D/2 - 1, radians a position
    x'    = x cos(p f) + rotate_half(x) sin(p f)      p: a token's position

    "linear"    f / factor
    "llama3"    f / factor for long waves, f for short ones, and what lies between is interpolated
    "yarn"      f / factor below a ramp over i, f above it; cos and sin times a factor (arXiv:2309.00071)

Frequencies are numbers of the model, computed once in float64. Kinds whose frequencies depend on a sequence's length
("dynamic", "longrope") are refused.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip
"""By type, the keys that are read."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotations of one kind of layer.

    Attributes:
      frequencies: D / 2 of them, in radians a position.
      factor: of cos and sin.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0


def rope_of(parameters: Mapping[str, Any], *, theta: float, head_dim: int, max_positions: int) -> Rope:
    """Return the rotations that a dict of `config.json` describes.

    Args:
      parameters: of `rope_scaling` or `rope_parameters`; empty for plain rotations.
      theta: the base, where the dict has none.
      head_dim: D.
      max_positions: positions that the model was trained for, where the dict does not say it.

    Raises:
      ValueError: an unknown type, or a key that is unknown to it or missing.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.pop("rope_type", given.get("type", "default"))
    given.pop("type", None)
    theta = float(given.pop("rope_theta", theta))
    if kind not in _KEYS:
        raise ValueError(f"rope of type {kind!r} is not built: {', '.join(_KEYS)} are")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope with a partial_rotary_factor other than 1, which rotates a part of each head, is not built")
    if kind == "default":
        given.pop("factor", None)  # which this type does not read
    if unknown := sorted(set(given) - set(_KEYS[kind])):
        raise ValueError(f"rope of type {kind!r} has the keys {unknown}, which are unknown: it takes {list(_KEYS[kind])}")
    given.setdefault("original_max_position_embeddings", max_positions)
    needed = {"linear": ("factor",), "llama3": _KEYS["llama3"], "yarn": ("factor",)}.get(kind, ())
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"rope of type {kind!r} lacks {missing}")
    plain = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "yarn":
        return _yarn(plain, theta, head_dim, given)
    scaled = {"default": lambda: plain, "linear": lambda: plain / given["factor"], "llama3": lambda: _llama3(plain, given)}
    return Rope(tuple(scaled[kind]().tolist()))


def _llama3(plain: np.ndarray, given: Mapping[str, Any]) -> np.ndarray:
    """Return frequencies of Llama 3.1: long waves are stretched, as they are in its own code."""
    waves, length = 2 * math.pi / plain, given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    # 0 where a wave is longer than length / low, 1 where it is shorter than length / high.
    kept = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / given["factor"] + kept * plain


def _yarn(plain: np.ndarray, theta: float, head_dim: int, given: Mapping[str, Any]) -> Rope:
    """Return the rotations of YaRN: "NTK by parts", with its temperature in cos and sin."""
    factor, length = given["factor"], given["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        """Return the pair of dims whose wave turns so often over the trained length."""
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(given.get("beta_fast") or 32), dim_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    temperature = given.get("attention_factor")
    if temperature is None:
        mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
        temperature = scale(mscale) / scale(of_all) if mscale and of_all else scale(1.0)
    return Rope(tuple(frequencies.tolist()), float(temperature))


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x[B, T, heads, D] rotated; the halves of D are the pairs, as in transformers.

    Args:
      x: queries or keys.
      positions: integers [B, T].
      frequencies: f32[D / 2].
      factor: f32[], of cos and sin.
    """
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies  # [B, T, 1, D / 2]
    cos, sin = ((f(angles) * factor).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
