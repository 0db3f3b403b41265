"""Sizes of the Hopper kernels' blocks, by shape.

A block of the GPU works on ROWS tokens (for dw: columns of the vocabulary), half of them a
warpgroup, and takes D in parts of COLUMNS. Forward's tile of logits is as wide as the registers
allow. Backward's slopes are narrower, for their width times `num_slopes` is what a block adds up
before it reads and writes its float32 sums: per element of a gradient and group 8 bytes, and 2 of
the operand that it owns, for 4 * width * num_slopes operations. With 4 of 128, that is a byte of
memory for 205 operations, where an H200 (4.8 TB/s, 989 TFLOP/s) does 206 in the time of one: less
would be bound by memory.

Into how many parts forward's vocabulary is cut: at least as many as let the tokens of the blocks
that run together stay in half of the L2 cache, then the least of whole waves times tiles a part, a
closed form and not a measurement.
"""

import dataclasses

from pallas_kernels.shared_memory import SHARED_BYTES

ROWS = 128
"""Tokens, or columns for dw, of a block of the GPU."""
COLUMNS = 64
"""Part of D in a step, and what V and D are multiples of inside the kernels: the width of a
swizzled tile of 16-bit numbers.
"""
ITEMSIZE = 2
CACHE = 24 << 20
"""Bytes of x that the L2 cache of an H200, 50 MB, is to hold while columns of w pass through the
rest.
"""
MAX_PARTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Sizes of the kernels.

    Attributes:
      block_v: columns of forward's tile.
      num_stages: steps of forward that are in shared memory or on the way to it.
      num_parts: of the vocabulary in forward, each by itself and joined afterwards; None has it
        chosen.
      width: columns (for dw: tokens) of backward's tile of slopes.
      num_slopes: tiles of slopes in shared memory.
      num_backward_stages: as `num_stages`, of backward.
      num_cores: blocks that run at a time; None is those of the GPU.
      backward: whether backward is the kernels' too. By default it is XLA's loops, from forward's
        log-sum-exps: products of a gradient are 64 columns wide in the kernels, and their float32
        sums pass through memory.
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
        for name in ("block_v", "width"):
            if not 0 < getattr(self, name) <= 256 or getattr(self, name) % COLUMNS:
                raise ValueError(
                    f"{name}={getattr(self, name)}: a multiple of {COLUMNS}, at most 256, is needed"
                )
        counts = [self.num_slopes, *(n for n in (self.num_parts, self.num_cores) if n is not None)]
        if min(counts) < 1 or min(self.num_stages, self.num_backward_stages) < 2:
            raise ValueError(f"{self}: counts of 1 or more, and 2 stages or more, are needed")
        forward = self.num_stages * (ROWS + self.block_v) * COLUMNS * ITEMSIZE
        stage = (ROWS + self.width) * COLUMNS * ITEMSIZE
        backward = self.num_backward_stages * stage + self.num_slopes * ROWS * self.width * ITEMSIZE
        for name, size in (("forward", forward), ("backward", backward)):
            if size > SHARED_BYTES:
                raise ValueError(
                    f"{self} takes {size} bytes of shared memory {name}, and a block has {SHARED_BYTES}"
                )

    def parts_of(self, tokens: int, hidden: int, columns: int) -> int:
        """Return into how many parts forward cuts w[D, V], for x[T, D]; none is without a tile."""
        assert self.num_cores is not None
        num_blocks, num_tiles = -(-tokens // ROWS), -(-columns // self.block_v)
        together = min(num_blocks, self.num_cores) * ROWS * hidden * ITEMSIZE
        # Blocks that run together share tokens where they have different parts, so p parts divide
        # the tokens by p.
        least = min(-(-together // CACHE), num_tiles)

        def time_of(parts: int) -> int:
            return -(-num_blocks * parts // (self.num_cores or 1)) * -(-num_tiles // parts)

        # Ties go to fewer parts: each costs statistics of every token.
        parts = self.num_parts or min(
            range(least, max(least, min(num_tiles, MAX_PARTS)) + 1), key=time_of
        )
        # With as many tiles in each but the last, the last parts may be left without any: they are
        # dropped.
        return -(-num_tiles // -(-num_tiles // parts))
