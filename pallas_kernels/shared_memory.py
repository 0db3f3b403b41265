"""Shared memory of Hopper's kernels: its size, and TMA's layout of tiles in it.

TMA is the tensor memory accelerator.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import mosaic_gpu as plgpu

SHARED_BYTES = 226 << 10  # of the 227 KiB per block; the remainder holds barriers
# Rows of a swizzled tile; JAX only copies arrays whose number of rows is a multiple of it.
TILE_ROWS = 8


def swizzled(shape: tuple[int, ...], dtype: Any, width: int | None = None) -> Any:
    """Return shared memory in the layout of TMA and wgmma.

    It consists of tiles of 8 rows by up to 128 bytes, with their 16-byte parts permuted. `width` is
    the most columns that a tile may have; give it if columns are sliced, because a slice must
    consist of full tiles.
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
