"""Sizes of the Hopper kernels, by the size of blocks and dtypes.

A tile is 64 blocks; one warpgroup has it to itself, from its loads to its stores. Shared memory
holds, for each of `num_warpgroups`, `num_stages` tiles that are loaded or on their way, and 2 tiles
of results, of which one may be on its way out.

Which sizes: 4 warpgroups or 3 where they fit with 2 stages, for they hide each other's waits and
arithmetic, then 2, then one with 2 stages; and as many stages as fit. With B the size of blocks,
what is on its way to a core is

    num_warpgroups * num_stages * 64 * B * itemsize      bytes

By Little's law an H200's 4.8 TB/s at a latency of about 1 us need 36 KB for each of 132 cores, of
which the loads' part is what is read over what is read and written: every choice has more. This is
arithmetic, not a measurement.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.shared_memory import SHARED_BYTES

ROWS = 64  # blocks of a tile: 16 a warp
COLUMNS = 64  # a kernel's blocks are multiples of it: the width of a swizzled tile of 8-bit numbers
SLOTS = 2  # tiles of results in shared memory, a warpgroup
MAX_WARPGROUPS = 4
MAX_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of a kernel.

    Attributes:
      num_warpgroups: of a thread block; each goes through tiles of its own until none is left.
      num_stages: tiles that a warpgroup has in shared memory or on the way to it.
      num_cores: thread blocks that run at a time.
    """

    num_warpgroups: int = 2
    num_stages: int = 2
    num_cores: int = 132

    def __post_init__(self):
        if (
            not 1 <= self.num_warpgroups <= MAX_WARPGROUPS
            or self.num_stages < 1
            or self.num_cores < 1
        ):
            raise ValueError(
                f"{self}: 1 to {MAX_WARPGROUPS} warpgroups, 1 stage or more and 1 core or more are needed"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What sizes depend on: G blocks of B, dtypes of what is read and written, and bytes read and
    written for each block.

    `packed` is how many elements a number of 8 bits holds.
    """

    num_blocks: int
    block_size: int
    in_dtype: jnp.dtype
    out_dtype: jnp.dtype
    in_block_bytes: int
    out_block_bytes: int
    packed: int = 1

    def row_bytes(self, dtype: jnp.dtype) -> int:
        """Return the bytes of a block's elements."""
        return self.block_size * dtype.itemsize // (self.packed if dtype.itemsize == 1 else 1)

    def shared_bytes(self, num_warpgroups: int, num_stages: int) -> int:
        """Return the shared memory that a thread block takes."""
        tile_in = ROWS * (self.row_bytes(self.in_dtype) + self.in_block_bytes)
        tile_out = ROWS * (self.row_bytes(self.out_dtype) + self.out_block_bytes)
        return num_warpgroups * (num_stages * tile_in + SLOTS * tile_out)

    def check(self, config: Config) -> None:
        """Raise ValueError where `config` does not fit."""
        if (size := self.shared_bytes(config.num_warpgroups, config.num_stages)) > SHARED_BYTES:
            raise ValueError(
                f"{config} takes {size} bytes of shared memory, and a thread block has {SHARED_BYTES}: "
                "lower num_stages or num_warpgroups"
            )


def choose(problem: Problem, num_cores: int) -> Config | None:
    """Return the first of the sizes above that fit, with as many stages as fit; None where no tile
    fits.
    """
    # Two warpgroups may do with one stage: one computes while the other's tile is on its way.
    for num_warpgroups, min_stages in ((4, 2), (3, 2), (2, 1), (1, 2)):
        for num_stages in range(MAX_STAGES, min_stages - 1, -1):
            if problem.shared_bytes(num_warpgroups, num_stages) <= SHARED_BYTES:
                return Config(
                    num_warpgroups=num_warpgroups, num_stages=num_stages, num_cores=num_cores
                )
    return None
