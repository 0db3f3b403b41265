"""The specification of `quantize_nf4` and `dequantize_nf4`, on blocks `x[..., 64]`.

It is plain jnp, which is also XLA's form.

    largest[...]    = max |x|                              over a block
    code[..., 64]   = the n with LEVELS[n] nearest to x / largest; the lower n on a tie
    y[..., 64]      = LEVELS[code] * largest'

LEVELS are quantiles of the normal distribution, as many on each side of 0 as 4 bits allow, divided
by the largest one (QLoRA, arXiv:2305.14314, equation 4 and appendix E): with q the inverse of its
distribution function and d = 1 - (1/30 + 1/32) / 2, they are

    q(p) for 8 values p from d to 1/2, its end left out, -q(p) for 7 of them, and 0;  all over q(d)

They are written here as in that appendix, so that the codes match weights quantised elsewhere;
computed in float64 they agree to 2e-7. largest' is the decoded value of `largest`, which is stored
in 8 bits, by groups of blocks:

    mean  = sum of largest / blocks of the group
    step  = max |largest - mean| / 127                      in 16 significant bits
    scale = round((largest - mean) * inverse)               -127 .. 127; -128: not a finite block
    largest' = max(0, mean + scale * step)

Every implementation returns the same bits on every device, for the reasons given in
`quantize.reference` and for two more:

- A sum depends on the order of its terms. Halves are added to halves, which fixes the order.
- A compiler may fuse a product and the sum that uses it into one instruction that rounds once.
  Steps have 16 significant bits, so that their products with 8-bit scales are exact in both cases.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize.reference import (
    EXPONENT,
    FORMATS,
    MAGNITUDE,
    Format,
    magnitudes,
    normalized,
)

Group = tuple[int, int]
BLOCK = 64  # elements per block
GROUP = 256  # most blocks per group
NOT_FINITE = -128  # the scale of a block that holds NaN or an infinity
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MIDPOINTS = tuple(float(np.float32((low + high) / 2)) for low, high in itertools.pairwise(LEVELS))
# The inverse scales the largest magnitude to at most 128: a factor that scales it to 1 may be
# subnormal, which is zero on some processors.
UNIT = 128.0
FORM = Format(jnp.dtype(jnp.int8), UNIT)
INT8 = FORMATS[jnp.dtype(jnp.int8)]


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (codes int8[..., 32] as bits, largest float32[...]) for x[..., 64].

    `largest` is NaN for blocks that are not finite.
    """
    x = x.astype(jnp.float32)
    largest, inverse, mask = scales(magnitudes(x).max(-1))
    codes = nearest(normalized(x, inverse[..., None], mask[..., None]))
    return pack(codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]), largest


def dequantize(codes: jax.Array, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return y[..., 64] for codes int8[..., 32], as bits, and largest float32[...]."""
    # An extra axis instead of two concatenated halves: XLA can fuse this elementwise.
    halves = codes.astype(jnp.int32)[..., None, :] >> jnp.array([0, 4])[:, None]  # [..., 2, 32]
    values = select_levels(halves, _pairs(halves)) * largest[..., None, None]
    return values.astype(dtype).reshape(*largest.shape, BLOCK)


def quantize_scales(largest: jax.Array, group: Group) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (scales int8[..., R, K], steps, means) for magnitudes [..., R, K].

    Steps and means are float32[..., R / r, K / c] for groups of r rows and c blocks.
    """
    is_finite = magnitudes(largest) < EXPONENT
    value = _grouped(jnp.where(is_finite, largest, 0.0), group)
    means = _means(value)
    # Blocks of zeros are identified by their codes, so their scale may be anything.
    deviation = jnp.where(value > 0, value - means[..., None], 0.0)
    steps, inverse, mask = INT8.scales(magnitudes(deviation).max(-1))
    scales = INT8.encode(normalized(deviation, inverse[..., None], mask[..., None]), None)
    scales = _ungrouped(scales, largest.shape, group)
    steps = _floats((_integers(steps) + 0x80) & ~0xFF)  # to 16 significant bits
    return jnp.where(is_finite, scales, jnp.int8(NOT_FINITE)), steps, means


def dequantize_scales(scales: jax.Array, steps: jax.Array, means: jax.Array) -> jax.Array:
    """Return the largest magnitude of each block, float32[..., R, K]."""
    if not scales.size:
        return scales.astype(jnp.float32)
    group = (scales.shape[-2] // steps.shape[-2], scales.shape[-1] // steps.shape[-1])
    steps, means = (_ungrouped(a[..., None], scales.shape, group) for a in (steps, means))
    value = jnp.maximum(scales.astype(jnp.float32) * steps + means, 0.0)
    return jnp.where(scales == NOT_FINITE, jnp.nan, value)


def _grouped(array: jax.Array, group: Group) -> jax.Array:
    """Return `[..., R / r, K / c, r c]` for `[..., R, K]`."""
    *outer, rows, blocks = array.shape
    r, c = group
    array = array.reshape(*outer, rows // r, r, blocks // c, c)
    return jnp.swapaxes(array, -3, -2).reshape(*outer, rows // r, blocks // c, r * c)


def _ungrouped(array: jax.Array, shape: tuple[int, ...], group: Group) -> jax.Array:
    """Return an array of `shape` `[..., R, K]` from `[..., R / r, K / c, r c]`.

    The last dim may also be 1, a value for the full group.
    """
    *outer, rows, blocks = shape
    r, c = group
    inner = (r, c) if array.shape[-1] == r * c else (1, 1)
    array = jnp.swapaxes(array.reshape(*outer, rows // r, blocks // c, *inner), -3, -2)
    return jnp.broadcast_to(array, (*outer, rows // r, r, blocks // c, c)).reshape(shape)


def scales(largest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (largest, inverse, mask) of each block, similar to `Format.scales`.

    The inverse scales elements for `nearest`.
    """
    scale, inverse, mask = FORM.scales(largest)
    return scale * UNIT, inverse, mask


def nearest(v: jax.Array) -> jax.Array:
    """Return the n int32 with LEVELS[n] nearest to v / 128, |v| <= 128."""
    count = jnp.zeros(v.shape, jnp.int32)
    for middle in MIDPOINTS:
        count = count + (v > middle * UNIT).astype(jnp.int32)
    return count


def pack(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return int8 bytes that each hold two 4-bit codes, given as int32."""
    return (low | (high << 4)).astype(jnp.int8)


def _pairs(codes: jax.Array) -> list[jax.Array]:
    """Return LEVELS[2 k + (codes & 1)] for k = 0 .. 7, float32, by bit operations.

    A select needs its numbers as arrays, 16 arrays as large as the result. XLA never materialises
    them, but JAX hoists values that depend on no argument out of a differentiated scan and passes
    them in as arrays.
    """
    mask = -(codes & 1)
    bits = [int(n) for n in np.asarray(LEVELS, np.float32).view(np.int32)]
    pairs = zip(bits[::2], bits[1::2], strict=True)
    return [_floats((mask & (low ^ high)) ^ low) for low, high in pairs]


def select_levels(codes: jax.Array, pairs: Sequence[jax.Array] = ()) -> jax.Array:
    """Return LEVELS[codes & 15], float32, chosen by one bit of the code at a time.

    It uses no table in memory: a kernel has no lookup in registers, and XLA's lookup, one element
    at a time from memory, is no faster on a CPU. `pairs` are the values already chosen by the first
    bit, if known.
    """
    values: list[jax.Array | float] = list(pairs or LEVELS)
    for bit in range(1 if pairs else 0, 4):
        is_odd = (codes & (1 << bit)) != 0
        values = [
            jnp.where(is_odd, jnp.float32(high), jnp.float32(low))
            for low, high in zip(values[::2], values[1::2], strict=True)
        ]
    [value] = values
    return jnp.asarray(value)


def _means(value: jax.Array) -> jax.Array:
    """Return the means float32[...] of value[..., group], which is not negative."""
    group = value.shape[-1]
    padded = 1 << (group - 1).bit_length()
    value = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, padded - group)])
    value = value * (1 / padded)  # exact, by a power of 2, so that no sum overflows
    while value.shape[-1] > 1:
        half = value.shape[-1] // 2
        value = value[..., :half] + value[..., half:]
    # Masking the sign prevents fusing the product with the difference that uses it.
    return _floats(_integers(value[..., 0] * (padded / group)) & MAGNITUDE)


def _integers(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)
