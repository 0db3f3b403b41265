"""Choose the sizes of the Hopper kernels, by block size and dtypes.

A tile is 64 blocks; one warpgroup handles it alone, from its loads to its stores. For each of
`num_warpgroups`, shared memory holds `num_stages` tiles that are loaded or in flight, and 2 tiles
of results, of which one may be in flight out.

Preferred are 4 warpgroups or 3 if they fit with 2 stages, because they hide each other's waits and
arithmetic, then 2, then one with 2 stages, each with as many stages as fit. With B the block size,
the bytes in flight to a core are

    num_warpgroups * num_stages * 64 * B * itemsize      bytes

By Little's law an H200's 4.8 TB/s at a latency of about 1 us need 36 KB in flight for each of 132
cores. The loads' part of that is the ratio of bytes read to bytes read and written. Every choice
has more. This is arithmetic, not a measurement.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.shared_memory import SHARED_BYTES

ROWS = 64  # blocks per tile: 16 per warp
COLUMNS = 64  # block sizes must be multiples of it: the width of a swizzled tile of 8-bit numbers
SLOTS = 2  # tiles of results in shared memory, per warpgroup
MAX_WARPGROUPS = 4
MAX_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of a kernel.

    Attributes:
      num_warpgroups: warpgroups per thread block; each processes tiles of its own until none is
        left.
      num_stages: tiles that a warpgroup has in shared memory or in flight to it.
      num_cores: thread blocks that run at a time.
    """

    num_warpgroups: int = 2
    num_stages: int = 2
    num_cores: int = 132

    def __post_init__(self):
        """Raise ValueError if a size is out of range."""
        if (
            not 1 <= self.num_warpgroups <= MAX_WARPGROUPS
            or self.num_stages < 1
            or self.num_cores < 1
        ):
            raise ValueError(
                f"{self}: 1 to {MAX_WARPGROUPS} warpgroups, 1 stage or more and 1 core or more are "
                "needed"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Dims and bytes that the sizes depend on.

    Attributes:
      num_blocks: number of blocks G.
      block_size: elements per block B.
      in_dtype, out_dtype: dtypes of the arrays that are read and written.
      in_block_bytes, out_block_bytes: further bytes read and written per block.
      packed: number of elements that an 8-bit number holds.
    """

    num_blocks: int
    block_size: int
    in_dtype: jnp.dtype
    out_dtype: jnp.dtype
    in_block_bytes: int
    out_block_bytes: int
    packed: int = 1

    def row_bytes(self, dtype: jnp.dtype) -> int:
        """Return the bytes of a block's elements in `dtype`."""
        if dtype.itemsize == 1:
            return self.block_size // self.packed
        return self.block_size * dtype.itemsize

    def shared_bytes(self, num_warpgroups: int, num_stages: int) -> int:
        """Return the bytes of shared memory that a thread block takes."""
        tile_in = ROWS * (self.row_bytes(self.in_dtype) + self.in_block_bytes)
        tile_out = ROWS * (self.row_bytes(self.out_dtype) + self.out_block_bytes)
        return num_warpgroups * (num_stages * tile_in + SLOTS * tile_out)

    def check(self, config: Config) -> None:
        """Raise ValueError if `config` does not fit this problem."""
        size = self.shared_bytes(config.num_warpgroups, config.num_stages)
        if size > SHARED_BYTES:
            raise ValueError(
                f"{config} takes {size} bytes of shared memory, and a thread block has "
                f"{SHARED_BYTES}: lower num_stages or num_warpgroups"
            )


def choose(problem: Problem, num_cores: int) -> Config | None:
    """Return the first of the preferred sizes that fits, with as many stages as fit.

    Return None if not even one tile fits.
    """
    # Two warpgroups can do with one stage: one computes while the other's tile is in flight.
    for num_warpgroups, min_stages in ((4, 2), (3, 2), (2, 1), (1, 2)):
        for num_stages in range(MAX_STAGES, min_stages - 1, -1):
            if problem.shared_bytes(num_warpgroups, num_stages) <= SHARED_BYTES:
                return Config(
                    num_warpgroups=num_warpgroups, num_stages=num_stages, num_cores=num_cores
                )
    return None
