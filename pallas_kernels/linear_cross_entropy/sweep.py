"""How the backward kernel of `linear_cross_entropy` goes through its arrays: what a block owns, and
what it sweeps.

    dx[T, D]   a block owns ROWS tokens, and sweeps the vocabulary      a tile of slopes is [ROWS, width]
    dw[D, V]   a block owns ROWS columns, and sweeps tokens             a tile of slopes is [width, ROWS]

Half of what a block owns is a warpgroup's. The grid is as large as the GPU (persistent).
"""

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.linear_cross_entropy.kernel_config import COLUMNS, ROWS, KernelConfig
from pallas_kernels.linear_cross_entropy.ring import WARPGROUPS

HALF = ROWS // WARPGROUPS


@dataclasses.dataclass(frozen=True)
class Sweep:
    """How a kernel goes through x[T, D] and w[D, V].

    Attributes:
      of_x: the gradient is dx; else it is dw.
      tokens, hidden, vocab: T, D and V, as the arrays are padded.
      columns: of w that count; those behind them are padding.
    """

    config: KernelConfig
    of_x: bool
    tokens: int
    hidden: int
    vocab: int
    columns: int

    @property
    def num_items(self) -> int:
        """Pieces of the gradient that a block owns at a time."""
        return pl.cdiv(self.tokens if self.of_x else self.vocab, ROWS)

    @property
    def num_blocks(self) -> int:
        assert self.config.num_cores is not None
        return min(self.config.num_cores, self.num_items)

    @property
    def num_groups(self) -> int:
        return pl.cdiv(
            self.vocab if self.of_x else self.tokens, self.config.width * self.config.num_slopes
        )

    @property
    def num_steps(self) -> int:
        """Parts of D."""
        return pl.cdiv(self.hidden, COLUMNS)

    @property
    def steps_a_group(self) -> int:
        # The same parts of D twice: for the logits, and for the gradient.
        return 2 * self.config.num_slopes * self.num_steps

    @property
    def num_tokens(self) -> int:
        """What the arrays of a number a token are padded to."""
        block = ROWS if self.of_x else self.config.width * self.config.num_slopes
        return pl.cdiv(self.tokens, block) * block

    @property
    def out_shape(self) -> tuple[int, int]:
        """Shape of the gradient, in whole pieces."""
        owned, hidden = self.num_items * ROWS, self.num_steps * COLUMNS
        return (owned, hidden) if self.of_x else (hidden, owned)

    @property
    def sums_shape(self) -> tuple[int, int, int]:
        """Shape of the sums that lie in global memory between groups."""
        hidden = self.num_steps * COLUMNS
        return (self.num_blocks, ROWS, hidden) if self.of_x else (self.num_blocks, hidden, ROWS)

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and columns of a tile of slopes, of both warpgroups."""
        return (ROWS, self.config.width) if self.of_x else (self.config.width, ROWS)

    @property
    def half_tile(self) -> tuple[int, int]:
        """Those of one warpgroup."""
        return (HALF, self.config.width) if self.of_x else (self.config.width, HALF)

    def start(self, item: Any, group: Any, i: Any) -> tuple[Any, Any]:
        """Return the first token and column of tile i of a group."""
        owned = (lax.axis_index("block") + item * self.num_blocks) * ROWS
        swept = (group * self.config.num_slopes + i) * self.config.width
        return (owned, swept) if self.of_x else (swept, owned)

    def own(self, start: Any, d: Any) -> tuple[Any, Any]:
        """Return where a warpgroup's 64 rows of the gradient are, from `start`, and part d of D."""
        owned = pl.ds(start + lax.axis_index("warpgroup") * HALF, HALF)
        part = pl.ds(d * COLUMNS, COLUMNS)
        return (owned, part) if self.of_x else (part, owned)
