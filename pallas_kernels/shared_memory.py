"""Shared memory of Hopper's kernels: how much there is, and how the tensor memory accelerator (TMA)
lays out tiles in it.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import mosaic_gpu as plgpu

SHARED_BYTES = 226 << 10  # of 227 KiB that a block may have: the rest holds barriers
TILE_ROWS = (
    8  # of a swizzled tile; JAX copies from and to arrays alone whose rows are a multiple of it
)


def swizzled(shape: tuple[int, ...], dtype: Any, width: int | None = None) -> Any:
    """Return shared memory as TMA and wgmma share it: tiles of 8 rows by up to 128 bytes, their
    16-byte parts permuted.

    `width` is the most columns that a tile may have: of those that are sliced, for a slice is of
    whole tiles.
    """
    size = jnp.dtype(dtype).itemsize
    # The widest of 128, 64, 32 and 16 bytes that divides a row; the argument is in bits.
    swizzle = plgpu.find_swizzle((width or shape[-1]) * size * 8)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((TILE_ROWS, swizzle // size)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )
