"""Choose the sizes of the tiles of logits, and the number of times backward computes them.

A tile is `block_t x block_v` logits in float32. Both gradients can be computed in two ways:

    one pass     dx[T, D] is summed in float32 over all vocabulary tiles, 4 T D bytes;
                 logits are computed once more
    two passes   dx for a tile of tokens, then dw for a tile of the vocabulary;
                 logits are computed twice more

Both ways sum each gradient in float32 and round it once. Counted in products of 2 T D V operations,
forward and backward take 4 or 5 products; a program that keeps its logits takes 3.

The choice prefers one pass, then the largest tiles, as long as the temporary arrays take less than
a twentieth of the full logits in the inputs' dtype, or less than 128 MiB, below which a second pass
is not worth it. The memory for logits therefore disappears for every shape; in 16 bits one pass
fits if D is below about V / 50. One pass is never used with tiles of 512 columns. Each tile reads
and writes dx, 8 T D bytes for 6 T D v operations, which on an H200 (4.8 TB/s, 989 TFLOP/s) takes
0.27 and 0.13 of the time of its products for v of 1024 and 2048. For v of 512 it is 0.54, while a
second pass costs a third.
"""

import dataclasses
import math

BLOCKS = {1: (2048, 1024), 2: (2048, 1024, 512)}
"""Block sizes by number of passes, in order of preference."""
SHARE = 20
ROOM = 128 << 20
"""Temporary arrays may take one SHARE-th of the logits' bytes, or ROOM bytes if that is more."""
WORKSPACE = 32 << 20
"""Bytes of workspace that cuBLAS takes on Hopper."""
LANES = 128
"""Blocks smaller than a dim are a multiple of LANES, the tile width of tensor cores."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of the tiles of XLA's loops.

    Attributes:
      block_t, block_v: tokens and columns per tile; `block_v` counts gathered columns if w is
        gathered. If a dim is not divisible by its block, the last tile overlaps the one before, and
        the overlap is not counted twice.
      passes: number of passes of backward, 1 or 2.
    """

    block_t: int = 2048
    block_v: int = 2048
    passes: int = 2

    def __post_init__(self):
        """Raise ValueError if a size is below 1 or `passes` is unknown."""
        if min(self.block_t, self.block_v) < 1:
            raise ValueError(f"block_t={self.block_t}, block_v={self.block_v}: 1 or more is needed")
        if self.passes not in (1, 2):
            raise ValueError(f"passes={self.passes}: 1 or 2 is needed")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Dims per device and number size that the choice of tiles depends on.

    Attributes:
      tokens: number of tokens T.
      hidden: number of features D.
      vocab: number of columns V.
      itemsize: bytes per number.
      gathers: whether w arrives tile by tile from other devices, so that a second pass would gather
        it again.
    """

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    gathers: bool = False

    @property
    def logits_bytes(self) -> int:
        """Bytes of the full logits in the inputs' dtype."""
        return self.tokens * self.vocab * self.itemsize

    def temp_bytes(self, config: Config) -> int:
        """Return the bytes of backward's temporary arrays; forward has fewer.

        They are a tile of logits in float32 and its slopes in the inputs' dtype, a tile of x and a
        tile of w, and the float32 sums of a gradient's tile. One pass holds the sums of both
        gradients at the same time, and all of dx.
        """
        t = min(config.block_t, self.tokens)
        v = min(config.block_v, self.vocab)
        tile = t * v * (4 + self.itemsize) + (t + v) * self.hidden * self.itemsize + WORKSPACE
        if config.passes == 2:
            return tile + 4 * max(t, v) * self.hidden
        return tile + 4 * (t + v) * self.hidden + 4 * self.tokens * self.hidden


def choose(problem: Problem, num_tiles: int | None = None) -> Config:
    """Return the preferred tiles; `num_tiles`, if given, sets the number for the vocabulary."""
    width = None if num_tiles is None else -(-problem.vocab // num_tiles)
    configs = []
    for passes, blocks in BLOCKS.items():
        if passes == 2 and problem.gathers:
            continue
        for block in blocks:
            block_t = choose_width(problem.tokens, block)
            block_v = width or choose_width(problem.vocab, block)
            configs.append(Config(block_t=block_t, block_v=block_v, passes=passes))
    budget = max(problem.logits_bytes // SHARE, ROOM)
    # If nothing fits, take the last one, which is the smallest.
    return next((config for config in configs if problem.temp_bytes(config) <= budget), configs[-1])


def choose_width(size: int, block: int) -> int:
    """Return the width of the fewest equal blocks of at most `block` that cover `size`.

    The result is a multiple of LANES, or `size` itself.
    """
    count = math.ceil(size / block)
    return min(size, math.ceil(math.ceil(size / count) / LANES) * LANES)
