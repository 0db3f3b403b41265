"""Sizes of the tiles of logits, and how often backward computes them.

A tile is `block_t x block_v` logits in float32. Two ways through them lead to both gradients:

    one pass     dx[T, D] is summed in float32 over all vocabulary tiles: 4 T D bytes; logits are computed once more
    two passes   dx for a tile of tokens, then dw for a tile of the vocabulary; logits are computed twice more

Either sums each gradient in float32 and rounds it once. In products of 2 T D V operations, forward
and backward are 4 or 5, where the program that keeps its logits needs 3.

What is chosen: one pass, then the largest tiles, as long as the temporary arrays take less than a
twentieth of the whole logits in the inputs' dtype, or 128 MiB, less than which is not worth a
second pass. So the memory of logits is gone whatever the shape; in 16 bits one pass fits where D is
below about V / 50. It is not taken with tiles of 512 columns: each tile reads and writes dx, 8 T D
bytes for 6 T D v operations, which on an H200 (4.8 TB/s, 989 TFLOP/s) are 0.27 and 0.13 of the time
of its products for v of 1024 and 2048, and 0.54 for 512, where a second pass costs a third.
"""

import dataclasses
import math

BLOCKS = {1: (2048, 1024), 2: (2048, 1024, 512)}
"""Sizes of blocks by number of passes, in order of preference."""
SHARE = 20
ROOM = 128 << 20
"""Temporary arrays may take one part in SHARE of the logits, or ROOM bytes."""
WORKSPACE = 32 << 20
"""Bytes that cuBLAS takes on Hopper."""
LANES = 128
"""Blocks that are smaller than a dim are multiples of it: the tiles of tensor cores."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of the tiles.

    Attributes:
      block_t, block_v: tokens and columns of a tile, gathered if w is. A dim that they do not
        divide ends in a tile that overlaps the one before, and what was counted there is not
        counted again.
      passes: 1 or 2, of backward.
    """

    block_t: int = 2048
    block_v: int = 2048
    passes: int = 2

    def __post_init__(self):
        if min(self.block_t, self.block_v) < 1:
            raise ValueError(f"block_t={self.block_t}, block_v={self.block_v}: 1 or more is needed")
        if self.passes not in (1, 2):
            raise ValueError(f"passes={self.passes}: 1 or 2 is needed")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the tiles depend on: dims on one device, and the bytes of a number.

    Attributes:
      gathers: w arrives tile by tile from other devices, so that a second pass would gather it
        again.
    """

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    gathers: bool = False

    @property
    def logits_bytes(self) -> int:
        """Bytes of the whole logits in the inputs' dtype."""
        return self.tokens * self.vocab * self.itemsize

    def temp_bytes(self, config: Config) -> int:
        """Return the bytes of temporary arrays of backward, which has more of them than forward.

        A tile of logits in float32 and its slopes in the inputs' dtype; the tile of x and that of
        w; the float32 sums of a gradient's tile. One pass has those of both at once, and all of dx.
        """
        t, v = min(config.block_t, self.tokens), min(config.block_v, self.vocab)
        tile = t * v * (4 + self.itemsize) + (t + v) * self.hidden * self.itemsize + WORKSPACE
        if config.passes == 2:
            return tile + 4 * max(t, v) * self.hidden
        return tile + 4 * (t + v) * self.hidden + 4 * self.tokens * self.hidden


def choose(problem: Problem, num_tiles: int | None = None) -> Config:
    """Return the tiles that the rule above prefers; of the vocabulary `num_tiles`, if given."""
    width = None if num_tiles is None else -(-problem.vocab // num_tiles)
    configs = [
        Config(
            block_t=even(problem.tokens, block),
            block_v=width or even(problem.vocab, block),
            passes=passes,
        )
        for passes, blocks in BLOCKS.items()
        for block in blocks
        if passes == 1 or not problem.gathers
    ]
    budget = max(problem.logits_bytes // SHARE, ROOM)
    # Where nothing fits, the last one takes the least.
    return next((config for config in configs if problem.temp_bytes(config) <= budget), configs[-1])


def even(size: int, block: int) -> int:
    """Return the size of the fewest equal blocks, at most `block` wide, that cover `size`, as a
    multiple of LANES.
    """
    count = math.ceil(size / block)
    return min(size, math.ceil(math.ceil(size / count) / LANES) * LANES)
