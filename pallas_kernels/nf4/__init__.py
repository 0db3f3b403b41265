"""Quantize weights to 4 bits with a scale per block of 64: `quantize_nf4` and `dequantize_nf4`.

The format is for weights that are stored and never trained.

    q = quantize_nf4(w)                        # 0.516 bytes per element
    y = dequantize_nf4(q, jnp.bfloat16)

The codes take 0.5 bytes, the scales 1/64, and the scales of the scales 1/2048.

NormalFloat (Dettmers et al., QLoRA, arXiv:2305.14314, section 3): an element becomes the nearest of
16 values, quantiles of a normal distribution, times the largest magnitude of its block. These
magnitudes are themselves stored in 8 bits (the paper's double quantisation). With a float32 scale
per block it would take 0.5625 bytes per element.

Comparison with existing implementations: bitsandbytes is CUDA for torch, with one mean for all
scales of an array, a table of 256 values for the scales, and blocks of the flattened array, which
cross the shards of a split array. qwix has the 16 values in jnp, without the second quantisation.
Here blocks and their groups lie along the last dim, so that a shard has the same blocks as the full
array, and every implementation returns the same bits on every device. The 16 values and the rule
for the nearest one are bitsandbytes'.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, find_target, resolve
from pallas_kernels.nf4 import mosaic, reference, xla
from pallas_kernels.nf4.reference import BLOCK, GROUP, Group
from pallas_kernels.nf4.reference import NOT_FINITE as NOT_FINITE
from pallas_kernels.quantize.config import Config as Config
from pallas_kernels.quantize.config import Problem, choose
from pallas_kernels.quantize.mosaic import FLOATS, refusal
from pallas_kernels.quantize.vjp import without_derivative

UNMEASURED = "no measurement on a GPU says yet that it is faster"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "steps", "means"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Nf4:
    """An array in blocks of 64 4-bit values, whose scales are in groups of 8-bit values.

    Attributes:
      codes: `[..., R, K / 2]`, uint8: byte j of a block's 32 bytes has element j in its low bits
        and element 32 + j in its high bits.
      scales: `[..., R, K / 64]`, int8: a block's largest magnitude is about its group's mean plus
        its scale times the group's step; -128 marks a block that holds NaN or an infinity.
      steps: `[..., R / r, K / 64 / c]`, float32, for groups of r rows and c blocks.
      means: `[..., R / r, K / 64 / c]`, float32, the mean magnitude of each group.
    """

    codes: jax.Array
    scales: jax.Array
    steps: jax.Array
    means: jax.Array


def choose_group(rows: int, blocks: int) -> Group:
    """Return the largest group (rows, blocks) of at most 256 blocks for an array.

    It takes as many blocks of a row as divide the row's `blocks`, then as many rows as divide
    `rows`.

    Args:
      rows: number of rows of the array.
      blocks: number of blocks per row.
    """
    group_blocks = _largest_divisor(blocks, GROUP)
    return _largest_divisor(rows, GROUP // group_blocks), group_blocks


def _largest_divisor(number: int, most: int) -> int:
    return next((n for n in range(min(most, number), 0, -1) if number % n == 0), 1)


def quantize_nf4(
    x: jax.Array,
    group: Group | None = None,
    implementation: Implementation | None = None,
    *,
    config: Config | None = None,
) -> Nf4:
    """Return x in 4 bits, with scales in 8 bits.

    An element is off by at most half the distance between two of the 16 values, times the largest
    magnitude of its block, which is at most 0.152 of that magnitude. In addition there is the error
    of the magnitude itself, at most 1 / 254 of the largest deviation from the mean in its group: a
    block with a weight a thousand times larger than the other weights of its group costs them their
    precision. 0 stays 0. A block that holds NaN or an infinity is decoded as all NaN; in the mean
    it counts as 0, and the error bound of the other blocks stays the same. A block whose largest
    magnitude is below 2^-72 counts as zeros. Nothing is random.

    `x[..., R, K] -> codes[..., R, K / 2], scales[..., R, K / 64], steps and means[..., R / r, K /
    64 / c]`; a vector has no R. Not differentiable: see `vjp` of `quantize`. On several devices
    call it in `jax.shard_map` on each device's own pieces.

    Args:
      x: array `[..., R, K]`: bfloat16, float16 or float32; K a multiple of 64.
      group: (r, c), the rows and the blocks per row whose scales share a step and a mean; divisors
        of R (1 for a vector) and K / 64. None takes `choose_group`. For pieces of an array, name a
        group that divides each piece; otherwise the pieces' groups differ from the full array's.
      implementation: "mosaic" (the Hopper kernel), "xla", "reference" (the same in jnp, fused only
        by a `jax.jit` around it), or None to choose and log one.
      config: sizes of the kernel; None chooses them.

    Raises:
      ValueError: x, group or implementation is not supported, the kernel's sizes do not fit, or a
        derivative is taken.
      NotImplementedError: the named implementation has no kernel for this device, or the kernel is
        under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    group = _check_array(x, group)
    problem = _problem(x.shape, x.dtype, jnp.int8)
    chosen, config = _choose("quantize_nf4", implementation, problem, config, x)
    # 1 / 64 of the elements, so XLA computes the scales of the kernel's blocks too.
    plain = reference if chosen == "reference" else xla

    def run(x: jax.Array) -> Nf4:
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
        if chosen == "mosaic":
            assert config is not None
            codes, largest = mosaic.quantize(config, blocks.reshape(-1, BLOCK))
            largest = largest.reshape(blocks.shape[:-1])
        else:
            codes, largest = plain.quantize(blocks)
        scales, steps, means = plain.quantize_scales(_as_rows(largest), group)
        # Every implementation returns the bits of a byte as int8.
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        codes = codes.reshape(*x.shape[:-1], x.shape[-1] // 2)
        if x.ndim == 1:
            return Nf4(codes, scales[0], steps[0], means[0])
        return Nf4(codes, scales, steps, means)

    return without_derivative("quantize_nf4", run, "dequantize_nf4(quantize_nf4(x), x.dtype)")(x)


def dequantize_nf4(
    q: Nf4,
    dtype: Any = jnp.float32,
    implementation: Implementation | None = None,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return `[..., K]`: values times scales, multiplied in float32 and rounded to nearest.

    XLA's form leaves the dims as they are, so that the partitioner may split any of them, the last
    one by blocks. For the kernel the scales are decoded first, 4 bytes per 64 elements. Not
    differentiable: see `vjp` of `quantize`.

    Args:
      q: result of `quantize_nf4`.
      dtype: dtype of the result: bfloat16, float16 or float32.
      implementation: "mosaic" (the Hopper kernel), "xla", "reference" (the same in jnp, fused only
        by a `jax.jit` around it), or None to choose and log one.
      config: sizes of the kernel; None chooses them.

    Raises:
      ValueError: q's arrays do not fit each other, dtype or implementation is not supported, the
        kernel's sizes do not fit, or a derivative is taken.
      NotImplementedError: the named implementation has no kernel for this device, or the kernel is
        under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in FLOATS:
        raise ValueError(
            f"dequantize_nf4: dtype={dtype}: choose from {', '.join(map(str, FLOATS))}"
        )
    _check_quantized(q)
    shape = (*q.codes.shape[:-1], 2 * q.codes.shape[-1])
    problem = _problem(shape, jnp.int8, dtype)
    chosen, config = _choose("dequantize_nf4", implementation, problem, config, q.codes, q.scales)
    plain = reference if chosen == "reference" else xla

    def run(q: Nf4) -> jax.Array:
        codes = jax.lax.bitcast_convert_type(q.codes, jnp.int8)
        codes = codes.reshape(*q.scales.shape, BLOCK // 2)
        largest = plain.dequantize_scales(_as_rows(q.scales), _as_rows(q.steps), _as_rows(q.means))
        largest = largest.reshape(q.scales.shape)
        if chosen == "mosaic":
            assert config is not None
            y = mosaic.dequantize(config, codes.reshape(-1, BLOCK // 2), largest.reshape(-1), dtype)
        else:
            y = plain.dequantize(codes, largest, dtype)
        return y.reshape(shape)

    return without_derivative("dequantize_nf4", run, "dequantize_nf4(quantize_nf4(x), x.dtype)")(q)


def _as_rows(array: jax.Array) -> jax.Array:
    """Return the array as it is, or a vector as a matrix of one row."""
    return array[None] if array.ndim == 1 else array


def _check_array(x: jax.Array, group: Group | None) -> Group:
    """Check x and the group, and return the group or the default one."""
    if not x.ndim or x.dtype not in FLOATS:
        raise ValueError(
            f"quantize_nf4: x is {x.dtype}{list(x.shape)}: [..., K] of bfloat16, float16 or "
            "float32 is needed"
        )
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"quantize_nf4: x is {list(x.shape)}: {x.shape[-1]} is no multiple of {BLOCK}, the "
            "size of a block"
        )
    rows = x.shape[-2] if x.ndim > 1 else 1
    blocks = x.shape[-1] // BLOCK
    if group is None:
        return choose_group(rows, blocks)
    for n, size in zip(group, (rows, blocks), strict=True):
        if not isinstance(n, int) or n <= 0 or size % n:
            raise ValueError(
                f"quantize_nf4: group={group}: divisors of {rows} rows and of the {blocks} blocks "
                "of a row are needed"
            )
    return group


def _check_quantized(q: Nf4) -> None:
    """Raise ValueError if the arrays do not have the shapes and dtypes of `quantize_nf4`."""
    if not _fits(q):
        arrays = {"codes": q.codes, "scales": q.scales, "steps": q.steps, "means": q.means}
        shapes = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
        raise ValueError(
            f"dequantize_nf4: {shapes}: codes uint8[..., R, K / 2], scales int8[..., R, K / "
            f"{BLOCK}], and steps and means float32[..., R / r, K / {BLOCK} / c] of one R and one "
            f"K, a multiple of {BLOCK}, are needed"
        )


def _fits(q: Nf4) -> bool:
    """Return whether the arrays fit each other."""
    arrays = (q.codes, q.scales, q.steps, q.means)
    if [a.dtype for a in arrays] != [jnp.uint8, jnp.int8, jnp.float32, jnp.float32]:
        return False
    if not q.codes.ndim or any(a.ndim != q.codes.ndim for a in arrays):
        return False
    blocks = (*q.codes.shape[:-1], 2 * q.codes.shape[-1] // BLOCK)
    groups = q.steps.shape
    if 2 * q.codes.shape[-1] != blocks[-1] * BLOCK or q.scales.shape != blocks:
        return False
    if q.means.shape != groups or groups[:-2] != blocks[:-2]:
        return False
    for size, n in zip(blocks[-2:], groups[-2:], strict=True):
        divides = size % n == 0 if n else size == 0
        if not divides:
            return False
    return True


def _problem(shape: tuple[int, ...], in_dtype: Any, out_dtype: Any) -> Problem:
    """Return the problem that a kernel's sizes depend on; codes have the dtype int8."""
    is_read = jnp.dtype(in_dtype) == jnp.int8
    return Problem(
        num_blocks=math.prod(shape) // BLOCK,
        block_size=BLOCK,
        in_dtype=jnp.dtype(in_dtype),
        out_dtype=jnp.dtype(out_dtype),
        in_block_bytes=4 * is_read,
        out_block_bytes=4 * (not is_read),
        packed=2,
    )


def _choose(
    op: str,
    implementation: Implementation | None,
    problem: Problem,
    config: Config | None,
    *arrays: Any,
) -> tuple[Implementation, Config | None]:
    """Return the implementation that runs, and the sizes of its kernel, or None."""
    target = find_target(*arrays)
    refusals: dict[Implementation, str | None] = {
        "mosaic": refusal(problem, target),
        "xla": None,
        "reference": None,
    }
    chosen = resolve(op, implementation, refusals, {"mosaic": UNMEASURED})
    if chosen != "mosaic":
        return chosen, None
    config = config or choose(problem, target.num_cores)
    assert config is not None, "refused where none fits"
    problem.check(config)
    return chosen, config
