"""`quantize_nf4` and `dequantize_nf4` for Hopper, in Pallas Mosaic GPU.

Each element is read once and written once.

Tiles of 64 blocks pass through shared memory as in `quantize` (`quantize.mosaic`, `stream`). A byte
holds an element of a block's first half and one of its second, so that a tile of codes makes two
tiles of elements side by side, and no element changes its thread:

    dequantize:  codes[64, 32] -> y[64, 0:32] of the low bits, y[64, 32:64] of the high ones
    quantize:    x[64, 0:32], x[64, 32:64] -> largest[64], codes[64, 32]

Threads cannot look up a value in registers, so dequantizing chooses among the 16 values by selects,
10 per element as compiled. By arithmetic, at 64 per cycle and core, the selects take longer than
the memory traffic; a lookup by bytes (PTX prmt) would take less.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.nf4 import reference
from pallas_kernels.nf4.reference import BLOCK
from pallas_kernels.quantize.config import Config
from pallas_kernels.quantize.mosaic import load, spread, stream

HALVES = (slice(0, BLOCK // 2), slice(BLOCK // 2, BLOCK))


@functools.partial(jax.jit, static_argnames="config")
def quantize(config: Config, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (codes int8[G, 32] as bits, largest float32[G]) for x[G, 64]."""

    def compute(x_smem: Any, code_smem: Any, largest_smem: Any) -> None:
        halves = [load(x_smem, half) for half in HALVES]  # [64, 32] each
        largest = functools.reduce(
            jnp.maximum, (reference.magnitudes(half).max(1) for half in halves)
        )
        scale, inverse, mask = reference.scales(largest)
        largest_smem[...] = scale
        v = [
            reference.normalized(half, spread(inverse, half.shape), spread(mask, half.shape))
            for half in halves
        ]
        code_smem[...] = reference.pack(*map(reference.nearest, v))

    out_types = jax.eval_shape(reference.quantize, x)
    codes, largest = stream("quantize_nf4", config, compute, [x], out_types, BLOCK // 2)
    return codes, largest


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def dequantize(config: Config, codes: jax.Array, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return y[G, 64] for codes int8[G, 32] and largest float32[G]."""

    def compute(code_smem: Any, largest_smem: Any, y_smem: Any) -> None:
        scale = largest_smem[...]
        pairs = load(code_smem, HALVES[0], jnp.int32)
        for shift, half in enumerate(HALVES):
            value = reference.select_levels(pairs >> (4 * shift))
            y_smem[:, half] = (value * spread(scale, value.shape)).astype(dtype)

    out_type = jax.eval_shape(functools.partial(reference.dequantize, dtype=dtype), codes, largest)
    [y] = stream("dequantize_nf4", config, compute, [codes, largest], [out_type], BLOCK // 2)
    return y
