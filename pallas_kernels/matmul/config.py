"""Choose the block sizes of the Hopper kernel, by shape and dtype.

A tile of the result, `block_m x block_n`, is one block's work at a time. Its float32 sums live in
the registers of two warpgroups, at most 128 per thread, which is 128 x 256. K passes through shared
memory `block_k` at a time, `num_stages` steps ahead, as many as fit. With two weights, each has
half of `block_n`.

The tile is chosen by the least value of a closed form in cycles, not by a measurement. In each step
a tile multiplies for `m * n * k / 2048` cycles (4096 floating point operations per cycle and core)
and loads for `(m + n) * k * 2 / 64` cycles (64 bytes per cycle and core from the L2 cache). The
longer of the two counts, times the number of full waves of tiles over all cores. Large tiles are
therefore preferred until the last wave becomes too empty. A smaller tile must save 5 %, because
each tile also begins and ends, which the form does not count.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp

from pallas_kernels.shared_memory import SHARED_BYTES

WARPGROUPS = 2  # multiplying warpgroups; one more warpgroup loads
CHUNK_M = 64  # rows of the result that pass through shared memory at a time, per warpgroup
CHUNK_BYTES = 128  # and bytes of each row in the widest dtype: the widest swizzle
SLOTS = 2  # chunks in flight per warpgroup
# The kernel needs K and N to be multiples of it: the width of a swizzled tile of 16-bit numbers.
COLUMNS = 64
MAX_STAGES = 6
BLOCKS = ((128, 256), (256, 128), (128, 128), (128, 64))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      block_m, block_n: rows and columns of a tile, over all weights.
      block_k: part of K per stage.
      num_stages: steps of K that are in shared memory or in flight to it.
      num_cores: blocks that run at a time; each processes tiles until none is left.
      raster: number of tiles along N before the next row of tiles, so that concurrent blocks share
        loads in the L2 cache; a cluster's tiles count as one.
      cluster_m, cluster_n: blocks per cluster, side by side along M or N. Two blocks of a cluster
        have neighbouring tiles and share what both read: columns of the weights along M, rows of x
        along N. Each loads half of it, into the memory of both.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    num_cores: int = 132
    raster: int = 8
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def cluster(self) -> int:
        """Number of blocks per cluster."""
        return self.cluster_m * self.cluster_n

    def __post_init__(self):
        """Raise ValueError if the sizes do not fit the hardware."""
        if (
            self.block_m % (WARPGROUPS * CHUNK_M)
            or self.block_n % COLUMNS
            or self.block_k % COLUMNS
        ):
            raise ValueError(
                f"block_m={self.block_m}, block_n={self.block_n}, block_k={self.block_k}: "
                f"multiples of {WARPGROUPS * CHUNK_M}, {COLUMNS} and {COLUMNS} are needed"
            )
        if self.block_m * self.block_n > 128 * 256:
            raise ValueError(
                f"block_m * block_n = {self.block_m} * {self.block_n}: the sums of more than 128 "
                "* 256 do not fit the registers"
            )
        least = min(self.block_m, self.block_n, self.block_k, self.num_cores, self.raster)
        if least < 1 or self.num_stages < 2:
            raise ValueError(f"{self}: sizes of 1 or more, and 2 stages or more, are needed")
        if (
            min(self.cluster_m, self.cluster_n) < 1
            or self.cluster > 2
            or self.num_cores % self.cluster
        ):
            raise ValueError(
                f"cluster_m={self.cluster_m}, cluster_n={self.cluster_n}, "
                f"num_cores={self.num_cores}: a cluster is of one block or of two, along M or "
                "along N, and num_cores is a multiple of its blocks"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Dims, number of weights and dtypes that the choice of tiles depends on.

    A dtype of None means that the term is absent.
    """

    m: int
    n: int
    k: int
    num_weights: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    bias_dtype: jnp.dtype | None
    accumulate_dtype: jnp.dtype | None

    def columns(self, config: Config) -> int:
        """Return the columns that each weight has in a tile."""
        return config.block_n // self.num_weights

    def stage_bytes(self, block_m: int, block_n: int, block_k: int) -> int:
        """Return the bytes of shared memory per stage."""
        return (block_m + block_n) * block_k * self.dtype.itemsize

    def epilogue_bytes(self, block_n: int) -> int:
        """Return the bytes of shared memory that the end of a tile takes.

        They hold chunks of the result and of the accumulated arrays, and the biases.
        """
        # Result and accumulated arrays pass in chunks of one shape, which the wider dtype limits.
        dtypes = [dtype for dtype in (self.out_dtype, self.accumulate_dtype) if dtype is not None]
        chunk = WARPGROUPS * SLOTS * CHUNK_M * chunk_columns(dtypes, block_n // self.num_weights)
        size = chunk * self.out_dtype.itemsize
        if self.accumulate_dtype is not None:
            size += chunk * self.num_weights * self.accumulate_dtype.itemsize
        # Each warpgroup has a copy of the biases, so that neither waits for the other.
        if self.bias_dtype is not None:
            size += WARPGROUPS * block_n * self.bias_dtype.itemsize
        return size

    def shared_bytes(self, config: Config) -> int:
        """Return the bytes of shared memory that a block takes."""
        stages = config.num_stages * self.stage_bytes(
            config.block_m, config.block_n, config.block_k
        )
        return stages + self.epilogue_bytes(config.block_n)

    def check(self, config: Config) -> None:
        """Raise ValueError if `config` does not fit this problem."""
        columns = self.columns(config)
        if columns % COLUMNS or columns > 256:
            raise ValueError(
                f"block_n={config.block_n} gives each of {self.num_weights} weights {columns} "
                f"columns: a multiple of {COLUMNS}, at most 256, is needed"
            )
        size = self.shared_bytes(config)
        if size > SHARED_BYTES:
            raise ValueError(
                f"{config} takes {size} bytes of shared memory, and a block has {SHARED_BYTES}: "
                "lower num_stages"
            )


def chunk_columns(dtypes: Iterable[jnp.dtype], columns: int) -> int:
    """Return the columns that pass through shared memory at a time, for arrays of these dtypes."""
    return min(columns, CHUNK_BYTES // max(dtype.itemsize for dtype in dtypes))


def choose(problem: Problem, num_cores: int) -> Config:
    """Return the sizes that the closed form prefers, with as many stages as fit shared memory."""
    block_k = COLUMNS
    best = None
    best_cycles = math.inf
    for block_m, block_n in BLOCKS:
        columns = block_n // problem.num_weights
        room = SHARED_BYTES - problem.epilogue_bytes(block_n)
        num_stages = min(room // problem.stage_bytes(block_m, block_n, block_k), MAX_STAGES)
        # With one slot nothing could be loaded during the products.
        if columns % COLUMNS or num_stages < 2:
            continue
        tiles = -(-problem.m // block_m) * -(-problem.n // columns)
        # Cycles of one step of K: every tile has the same number of steps.
        multiply = block_m * block_n * block_k / 2048
        load = problem.stage_bytes(block_m, block_n, block_k) / 64
        cycles = -(-tiles // num_cores) * max(multiply, load)
        # The largest tiles are tried first, so a smaller one has to save 5 %.
        if cycles < 0.95 * best_cycles:
            best_cycles = cycles
            best = Config(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_stages=num_stages,
                num_cores=num_cores,
            )
    assert best is not None  # 128 x 128 fits whatever the dtypes
    return best
