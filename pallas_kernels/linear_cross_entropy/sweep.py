"""Tiling of the backward kernel of `linear_cross_entropy`: what a block owns and what it sweeps.

    dx[T, D]   a block owns ROWS tokens and sweeps the vocabulary    slopes per tile: [ROWS, width]
    dw[D, V]   a block owns ROWS columns and sweeps tokens           slopes per tile: [width, ROWS]

Each warpgroup handles half of what a block owns. The grid is as large as the GPU (persistent).
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
    """Tiling of x[T, D] and w[D, V] in one backward kernel.

    Attributes:
      config: sizes of the kernels.
      is_dx: whether the gradient is dx; otherwise it is dw.
      tokens, hidden, vocab: T, D and V of the padded arrays.
      columns: number of columns of w without padding.
    """

    config: KernelConfig
    is_dx: bool
    tokens: int
    hidden: int
    vocab: int
    columns: int

    @property
    def num_items(self) -> int:
        """Number of pieces of ROWS tokens or columns into which the gradient is cut."""
        return pl.cdiv(self.tokens if self.is_dx else self.vocab, ROWS)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the grid."""
        assert self.config.num_cores is not None
        return min(self.config.num_cores, self.num_items)

    @property
    def num_groups(self) -> int:
        """Number of groups of `num_slopes` tiles into which the swept dim is cut."""
        swept = self.vocab if self.is_dx else self.tokens
        return pl.cdiv(swept, self.config.width * self.config.num_slopes)

    @property
    def num_steps(self) -> int:
        """Number of parts of D."""
        return pl.cdiv(self.hidden, COLUMNS)

    @property
    def steps_per_group(self) -> int:
        """Number of steps per group."""
        # The parts of D are needed twice: for the logits, and for the gradient.
        return 2 * self.config.num_slopes * self.num_steps

    @property
    def num_tokens(self) -> int:
        """Padded length of the per-token arrays."""
        block = ROWS if self.is_dx else self.config.width * self.config.num_slopes
        return pl.cdiv(self.tokens, block) * block

    @property
    def out_shape(self) -> tuple[int, int]:
        """Shape of the gradient, padded to full pieces."""
        owned = self.num_items * ROWS
        hidden = self.num_steps * COLUMNS
        return (owned, hidden) if self.is_dx else (hidden, owned)

    @property
    def sums_shape(self) -> tuple[int, int, int]:
        """Shape of the sums that live in global memory between groups."""
        hidden = self.num_steps * COLUMNS
        if self.is_dx:
            return (self.num_blocks, ROWS, hidden)
        return (self.num_blocks, hidden, ROWS)

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and columns of a tile of slopes, for both warpgroups together."""
        return (ROWS, self.config.width) if self.is_dx else (self.config.width, ROWS)

    @property
    def half_tile(self) -> tuple[int, int]:
        """Tokens and columns of one warpgroup's half of a tile of slopes."""
        return (HALF, self.config.width) if self.is_dx else (self.config.width, HALF)

    def start(self, item: Any, group: Any, i: Any) -> tuple[Any, Any]:
        """Return the first token and column of tile i of a group."""
        owned = (lax.axis_index("block") + item * self.num_blocks) * ROWS
        swept = (group * self.config.num_slopes + i) * self.config.width
        return (owned, swept) if self.is_dx else (swept, owned)

    def owned_slices(self, start: Any, d: Any) -> tuple[Any, Any]:
        """Return the slices of this warpgroup's 64 rows, from `start` on, and of part d of D."""
        owned = pl.ds(start + lax.axis_index("warpgroup") * HALF, HALF)
        hidden = pl.ds(d * COLUMNS, COLUMNS)
        return (owned, hidden) if self.is_dx else (hidden, owned)
