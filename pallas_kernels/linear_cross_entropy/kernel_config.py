"""Choose the sizes of the Hopper kernels' blocks, by shape.

A GPU block works on ROWS tokens (for dw: columns of the vocabulary), half of them per warpgroup,
and processes D in parts of COLUMNS. Forward's tile of logits is as wide as the registers allow.
Backward's slopes are narrower, because a block accumulates `width * num_slopes` of them before it
reads and writes its float32 sums. Per element of a gradient and group it moves 8 bytes, and 2 bytes
of the operand that it owns, for 4 * width * num_slopes operations. With 4 tiles of 128 this is one
byte of memory per 205 operations. An H200 (4.8 TB/s, 989 TFLOP/s) does 206 operations in the time
of one byte, so fewer would be bound by memory.

Forward's vocabulary is cut into at least as many parts as needed for the tokens of concurrently
running blocks to fit half of the L2 cache. Above that minimum, the number of parts with the least
(full waves) x (tiles per part) is taken, a closed form and not a measurement.
"""

import dataclasses

from pallas_kernels.shared_memory import SHARED_BYTES

ROWS = 128
"""Tokens, or columns for dw, per GPU block."""
COLUMNS = 64
"""Columns of D per step; the kernels need V and D to be multiples of it.

It is the width of a swizzled tile of 16-bit numbers.
"""
ITEMSIZE = 2
CACHE = 24 << 20
"""Bytes of x to keep in an H200's L2 cache (50 MB) while columns of w stream through the rest."""
MAX_PARTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Sizes of the kernels.

    Attributes:
      block_v: columns of forward's tile.
      num_stages: steps of forward that are in shared memory or in flight to it.
      num_parts: number of parts of the vocabulary in forward, which are computed independently and
        joined afterwards; None chooses it.
      width: columns (for dw: tokens) of backward's tile of slopes.
      num_slopes: tiles of slopes in shared memory.
      num_backward_stages: steps of backward that are in shared memory or in flight to it.
      num_cores: blocks that run at a time; None takes the GPU's number of cores.
      backward: whether backward uses the kernels too. By default it uses XLA's loops, starting from
        forward's log-sum-exps: in the kernels a gradient's products are only 64 columns wide, and
        their float32 sums pass through memory.
    """

    block_v: int = 256
    num_stages: int = 4
    num_parts: int | None = None
    width: int = 128
    num_slopes: int = 4
    num_backward_stages: int = 3
    num_cores: int | None = None
    backward: bool = False

    def __post_init__(self):
        """Raise ValueError if a size is out of range or shared memory does not suffice."""
        for name in ("block_v", "width"):
            size = getattr(self, name)
            if not 0 < size <= 256 or size % COLUMNS:
                raise ValueError(f"{name}={size}: a multiple of {COLUMNS}, at most 256, is needed")
        counts = [self.num_slopes]
        if self.num_parts is not None:
            counts.append(self.num_parts)
        if self.num_cores is not None:
            counts.append(self.num_cores)
        if min(counts) < 1 or min(self.num_stages, self.num_backward_stages) < 2:
            raise ValueError(f"{self}: counts of 1 or more, and 2 stages or more, are needed")
        forward = self.num_stages * (ROWS + self.block_v) * COLUMNS * ITEMSIZE
        stage = (ROWS + self.width) * COLUMNS * ITEMSIZE
        backward = self.num_backward_stages * stage + self.num_slopes * ROWS * self.width * ITEMSIZE
        for name, size in (("forward", forward), ("backward", backward)):
            if size > SHARED_BYTES:
                raise ValueError(
                    f"{self} takes {size} bytes of shared memory {name}, and a block has "
                    f"{SHARED_BYTES}"
                )

    def count_parts(self, tokens: int, hidden: int, columns: int) -> int:
        """Return the number of nonempty parts into which forward cuts w[D, V] for x[T, D].

        Args:
          tokens: number of tokens T.
          hidden: width D.
          columns: number of columns V.
        """
        num_cores = self.num_cores
        assert num_cores is not None
        num_blocks = -(-tokens // ROWS)
        num_tiles = -(-columns // self.block_v)
        concurrent_bytes = min(num_blocks, num_cores) * ROWS * hidden * ITEMSIZE
        # Concurrent blocks share tokens if they have different parts, so p parts divide the number
        # of tokens in use by p.
        least = min(-(-concurrent_bytes // CACHE), num_tiles)
        most = max(least, min(num_tiles, MAX_PARTS))

        def estimate_time(parts: int) -> int:
            num_waves = -(-num_blocks * parts // num_cores)
            tiles_per_part = -(-num_tiles // parts)
            return num_waves * tiles_per_part

        # On a tie take fewer parts, because each part costs statistics for every token.
        parts = self.num_parts or min(range(least, most + 1), key=estimate_time)
        # All parts but the last have the same number of tiles, which may leave the last parts
        # without any: drop them.
        tiles_per_part = -(-num_tiles // parts)
        return -(-num_tiles // tiles_per_part)
