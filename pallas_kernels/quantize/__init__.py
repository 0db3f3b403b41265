"""Quantize arrays to 8 bits with a scale per block: `quantize` and `dequantize`.

The format is for arrays that are sent or stored.

    q = quantize(x, jnp.int8, block_size=256, key=key)      # 1 byte per element and 4 per block
    y = dequantize(q, jnp.bfloat16)

Comparison with existing implementations (jax 0.10.2, tokamax, qwix, DeepSpeed and bitsandbytes of
2025 and 2026):

- jax quantises only inside of `jax.nn.scaled_dot_general`: blocks of 32 or 16 with 8-bit scales,
  for products.
- qwix is jnp: scales for tiles that must divide the dim, a cast to fp8 by the compiler, stochastic
  rounding by added noise. tokamax's `quantize_as` is jnp too: tiles that must divide, integers
  truncated instead of rounded.
- ZeRO++ in DeepSpeed is CUDA: float16 to int8 and int4, rounded to nearest. Its scale is max / 128,
  so that a positive largest element is cut to 127 / 128 of itself.
- bitsandbytes is CUDA: blocks of the flattened array, with each element looked up in a table of 256
  values.

None of them converts bfloat16 to int8 or fp8 on a GPU in one pass in JAX, and none documents its
treatment of NaN and infinity. Here blocks lie along the last dim, so a shard along any other dim
has the same blocks as the full array, and the last block of a row may be shorter. Values that are
not finite are not hidden: the scale of such a block is NaN, and the full block is decoded as NaN.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, find_target, resolve
from pallas_kernels.quantize import mosaic, reference, xla
from pallas_kernels.quantize.config import Config as Config
from pallas_kernels.quantize.config import Problem, choose
from pallas_kernels.quantize.reference import FORMATS
from pallas_kernels.quantize.vjp import without_derivative

UNMEASURED = "no measurement on a GPU says yet that it is faster"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["block_size"]
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in blocks of 8-bit values.

    Attributes:
      values: `[..., K]`, int8, float8_e4m3fn or float8_e5m2.
      scales: `[..., ceil(K / block_size)]`, float32; an element is about its value times its
        block's scale.
      block_size: elements per block along the last dim; the last block of a row may have fewer.
    """

    values: jax.Array
    scales: jax.Array
    block_size: int


def quantize(
    x: jax.Array,
    dtype: Any = jnp.int8,
    block_size: int = 256,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    *,
    config: Config | None = None,
) -> Quantized:
    """Return x in 8 bits, with a scale for each block of its last dim.

    The largest magnitude of a block becomes the largest value of the dtype. Rounded to nearest
    even, an element is off by at most half a step; a step is largest / 127 for int8, and 2^-3
    (float8_e4m3fn) or 2^-2 (float8_e5m2) of the power of 2 below the element. Rounded
    stochastically, it is off by less than a step, and the expected error is 0. A block that holds
    NaN or an infinity has the scale NaN and zeros for values. A block whose largest magnitude is
    below 2^-72 has the scale 0. Every implementation returns the same bits, on every device.

    `x[..., K] -> values[..., K], scales[..., ceil(K / block_size)]`. Not differentiable: see `vjp`.
    On several devices, call it in `jax.shard_map` on each device's own pieces to use the kernel,
    which is opaque to the partitioner.

    Args:
      x: array `[..., K]`: bfloat16, float16 or float32.
      dtype: dtype of the values: int8, float8_e4m3fn or float8_e5m2.
      block_size: elements per block. The kernel takes multiples of 64. It copies x if K is not a
        multiple of `block_size`, or if the number of blocks is not a multiple of 8.
      key: key of `jax.random.key`, to round stochastically. The bits depend only on the key and an
        element's position in x: for pieces of an array, fold each piece's index into the key, or
        equal positions round alike.
      implementation: "mosaic" (the Hopper kernel), "xla", "reference" (the same in jnp, fused only
        by a `jax.jit` around it), or None to choose and log one.
      config: sizes of the kernel; None chooses them.

    Raises:
      ValueError: x, dtype, block_size, key or implementation is not supported, the kernel's sizes
        do not fit, or a derivative is taken.
      NotImplementedError: the named implementation has no kernel for this block size or this
        device, or the kernel is under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    form = FORMATS.get(jnp.dtype(dtype))
    if form is None:
        raise ValueError(
            f"quantize: dtype={jnp.dtype(dtype)}: choose from {', '.join(map(str, FORMATS))}"
        )
    _check_array(x)
    _check_block_size("quantize", block_size)
    _check_key(key)
    num_blocks = _num_blocks(x.shape, block_size)
    problem = Problem(
        num_blocks=num_blocks,
        block_size=block_size,
        in_dtype=x.dtype,
        out_dtype=jnp.dtype(jnp.int8),
        in_block_bytes=0 if key is None else 4,
        out_block_bytes=4,
    )
    chosen, config = _choose("quantize", implementation, problem, config, x)

    def run(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        # Only one word per block is stored: an element's bits are hashed from it where they are
        # used.
        words = None if key is None else reference.block_words(key, num_blocks)
        blocks = _in_blocks(x, block_size)
        if chosen == "mosaic":
            assert config is not None
            codes, scales = mosaic.quantize(form, config, blocks, words)
        else:
            codes, scales = (xla if chosen == "xla" else reference).quantize(form, blocks, words)
        # Every implementation returns the bits of a code as int8.
        codes = jax.lax.bitcast_convert_type(codes, form.dtype)
        values = _from_blocks(codes, x.shape)
        return values, scales.reshape(*x.shape[:-1], -(-x.shape[-1] // block_size))

    values, scales = without_derivative("quantize", run)(x, key)
    return Quantized(values, scales, block_size)


def dequantize(
    q: Quantized,
    dtype: Any = jnp.float32,
    implementation: Implementation | None = None,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return `values * scales`, `[..., K]`, multiplied in float32 and rounded to nearest.

    Values must be finite, like those that `quantize` writes. Not differentiable: see `vjp`.

    Args:
      q: result of `quantize`.
      dtype: dtype of the result: bfloat16, float16 or float32.
      implementation: "mosaic" (the Hopper kernel), "xla", "reference" (the same in jnp, fused only
        by a `jax.jit` around it), or None to choose and log one.
      config: sizes of the kernel; None chooses them.

    Raises:
      ValueError: q's arrays do not fit each other, dtype or implementation is not supported, the
        kernel's sizes do not fit, or a derivative is taken.
      NotImplementedError: the named implementation has no kernel for this block size or this
        device, or the kernel is under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in mosaic.FLOATS:
        raise ValueError(
            f"dequantize: dtype={dtype}: choose from {', '.join(map(str, mosaic.FLOATS))}"
        )
    _check_quantized(q)
    form = FORMATS[q.values.dtype]
    block_size = q.block_size
    problem = Problem(
        num_blocks=_num_blocks(q.values.shape, block_size),
        block_size=block_size,
        in_dtype=jnp.dtype(jnp.int8),
        out_dtype=dtype,
        in_block_bytes=4,
        out_block_bytes=0,
    )
    chosen, config = _choose("dequantize", implementation, problem, config, q.values, q.scales)

    def run(values: jax.Array, scales: jax.Array) -> jax.Array:
        codes = _in_blocks(jax.lax.bitcast_convert_type(values, jnp.int8), block_size)
        if chosen == "mosaic":
            assert config is not None
            y = mosaic.dequantize(form, config, codes, scales.reshape(-1), dtype)
        else:
            # Restore the dims: the partitioner may split any of them, but would gather a flattened
            # array.
            codes = codes.reshape(*scales.shape, block_size)
            y = (xla if chosen == "xla" else reference).dequantize(form, codes, scales, dtype)
        return _from_blocks(y, values.shape)

    return without_derivative("dequantize", run)(q.values, q.scales)


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
        "mosaic": mosaic.refusal(problem, target),
        "xla": None,
        "reference": None,
    }
    chosen = resolve(op, implementation, refusals, {"mosaic": UNMEASURED})
    if chosen != "mosaic":
        return chosen, None
    config = config or choose(problem, target.num_cores)
    assert config is not None  # the kernel refuses a problem that no sizes fit
    problem.check(config)
    return chosen, config


def _num_blocks(shape: tuple[int, ...], block_size: int) -> int:
    return math.prod(shape[:-1]) * -(-shape[-1] // block_size)


def _in_blocks(array: jax.Array, block_size: int) -> jax.Array:
    """Return `[G, block_size]` for `[..., K]`, with the last block of a row padded with zeros."""
    # Zeros do not change a block's largest magnitude.
    more = -array.shape[-1] % block_size
    if more:
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])
    return array.reshape(-1, block_size)


def _from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the array `[..., K]` of this shape from blocks.

    The blocks are `[G, block_size]` or `[..., block_size]`.
    """
    per_row = -(-shape[-1] // blocks.shape[-1])
    return blocks.reshape(*shape[:-1], per_row * blocks.shape[-1])[..., : shape[-1]]


def _check_array(x: jax.Array) -> None:
    if not x.ndim or x.dtype not in mosaic.FLOATS:
        raise ValueError(
            f"quantize: x is {x.dtype}{list(x.shape)}: [..., K] of bfloat16, float16 or float32 is "
            "needed"
        )


def _check_quantized(q: Quantized) -> None:
    """Raise ValueError if the arrays do not have the shapes and dtypes of `quantize`."""
    values = q.values
    scales = q.scales
    if values.dtype not in FORMATS or not values.ndim:
        raise ValueError(
            f"dequantize: values are {values.dtype}{list(values.shape)}: [..., K] of "
            f"{', '.join(map(str, FORMATS))} is needed"
        )
    _check_block_size("dequantize", q.block_size)
    shape = (*values.shape[:-1], -(-values.shape[-1] // q.block_size))
    if scales.shape != shape or scales.dtype != jnp.float32:
        raise ValueError(
            f"dequantize: scales are {scales.dtype}{list(scales.shape)}, and values "
            f"{list(values.shape)} in blocks of {q.block_size}: float32{list(shape)} is needed"
        )


def _check_block_size(op: str, block_size: Any) -> None:
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(
            f"{op}: block_size={block_size!r}: an integer of 1 or more is needed, such as 128 or "
            "256"
        )


def _check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and not key.shape
    is_raw_key = dtype == jnp.uint32 and key.ndim == 1  # from jax.random.PRNGKey
    if key is not None and not (is_key or is_raw_key):
        value = repr(key) if dtype is None else f"{dtype}{list(key.shape)}"
        raise ValueError(
            f"quantize: key is {value}: one key is needed, such as jax.random.key(0), or None to "
            "round to nearest"
        )
