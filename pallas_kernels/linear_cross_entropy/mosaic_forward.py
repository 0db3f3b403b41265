"""The forward kernel of `linear_cross_entropy` on Hopper: statistics of each token's logits.

No logit leaves a core.

    item (t, p):  m = -inf, l = y = u = 0            a block of tokens t, a part p of the vocabulary
      for v in p: z = cap(sum_k x[t, k] w[k, v])       float32, in registers
                  m' = max(m, max z),  l = l exp(m - m') + sum exp(z - m')
                  y += z[label],  u += sum z
      m, l, y, u -> stats[p, t]

A block has one loading warpgroup and two multiplying warpgroups, each with half of the tokens
(`ring`). A token's logits are in four threads of one warpgroup, so no statistic crosses warpgroups.
The parts are joined outside the kernel, at 16 bytes per token and part. The grid is as large as the
GPU, and parts vary fastest over it, so that concurrent blocks share some tokens and some columns in
the L2 cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as plgpu
from pallas_kernels import registers
from pallas_kernels.linear_cross_entropy.kernel_config import COLUMNS, ROWS, KernelConfig
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.ring import (
    COPIES,
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    WARPGROUPS,
    Ring,
    loop,
)
from pallas_kernels.shared_memory import swizzled

HALF = ROWS // WARPGROUPS

CHUNK = 16  # columns whose exponentials are in registers at a time
STATS = 4  # max, sum of exponentials, logit of the label, sum of logits


def stats(
    form: Form,
    config: KernelConfig,
    x: jax.Array,
    w: jax.Array,
    columns: int,
    labels: jax.Array,
    out_type: Any,
) -> jax.Array:
    """Return the statistics float32[num_parts, STATS, T'] of the logits x[T, D] @ w[D, V'].

    Labels are int32[T'], with T' a multiple of ROWS. Columns of w from index `columns` on are
    ignored.
    """
    num_parts, _, padded = out_type.shape
    assert config.num_cores is not None
    num_items = padded // ROWS * num_parts
    num_blocks = min(config.num_cores, num_items)

    def body(x_gmem: Any, w_gmem: Any, labels_gmem: Any, stats_gmem: Any) -> None:
        items = _Items(
            config=config,
            block=lax.axis_index("block"),
            num_blocks=num_blocks,
            num_items=num_items,
            num_parts=num_parts,
            num_steps=pl.cdiv(x.shape[1], COLUMNS),
            columns=columns,
        )
        num_own_items = items.count()

        def scope(x_smem: Any, w_smem: Any, full: Any, empty: Any) -> None:
            ring = Ring(config.num_stages, x_smem, w_smem, full, empty)
            lax.cond(
                lax.axis_index("warpgroup") == WARPGROUPS,
                lambda: _load(items, num_own_items, ring, x_gmem, w_gmem),
                lambda: _multiply(form, items, num_own_items, ring, labels_gmem, stats_gmem),
            )

        pl.run_scoped(
            scope,
            swizzled((config.num_stages, ROWS, COLUMNS), x.dtype),
            swizzled((config.num_stages, COLUMNS, config.block_v), w.dtype),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=config.num_stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.num_stages),
            collective_axes="warpgroup",
        )

    call: Any = pl.kernel(
        body,
        out_type=out_type,
        mesh=plgpu.Mesh(
            grid=(num_blocks,),
            grid_names=("block",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        # No reduction crosses warps: the scratch memory for that would be shared by both
        # warpgroups.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=0
        ),
        name="linear_cross_entropy",
    )
    return call(x, w, labels)


class _Item(NamedTuple):
    """A block of tokens and a part of the vocabulary."""

    row: Any  # first token
    part: Any
    first_tile: Any
    num_tiles: Any


@dataclasses.dataclass(frozen=True)
class _Items:
    """The items that a block processes.

    Attributes:
      config: sizes of the kernel.
      block: index of the block in the grid.
      num_blocks: number of blocks of the grid.
      num_items: number of items of all blocks.
      num_parts: number of parts of the vocabulary.
      num_steps: number of parts of D, the steps of a tile.
      columns: number of columns of w without padding.
    """

    config: KernelConfig
    block: Any
    num_blocks: int
    num_items: int
    num_parts: int
    num_steps: int
    columns: int

    def count(self) -> Any:
        """Return the number of this block's items."""
        return (self.num_items - self.block + self.num_blocks - 1) // self.num_blocks

    def find(self, number: Any) -> _Item:
        """Return this block's item of a number."""
        num_tiles = pl.cdiv(self.columns, self.config.block_v)
        tiles_per_part = pl.cdiv(num_tiles, self.num_parts)
        index = self.block + number * self.num_blocks
        part = lax.rem(index, self.num_parts)
        first_tile = part * tiles_per_part
        return _Item(
            row=lax.div(index, self.num_parts) * ROWS,
            part=part,
            first_tile=first_tile,
            num_tiles=jnp.minimum(num_tiles - first_tile, tiles_per_part),
        )


def _load(items: _Items, num_own_items: Any, ring: Ring, x_gmem: Any, w_gmem: Any) -> None:
    """Copy the operands of every step: the loop of the loading warpgroup."""
    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
    block_v = items.config.block_v

    def load_item(number: Any, num_steps_before: Any) -> Any:
        item = items.find(number)

        def load_tile(tile: Any) -> None:
            column = (item.first_tile + tile) * block_v

            def load_step(k: Any) -> None:
                hidden = pl.ds(k * COLUMNS, COLUMNS)
                ring.fill(
                    num_steps_before + tile * items.num_steps + k,
                    lambda slot: [
                        (x_gmem.at[pl.ds(item.row, ROWS), hidden], ring.x.at[slot]),
                        (w_gmem.at[hidden, pl.ds(column, block_v)], ring.w.at[slot]),
                    ],
                )

            loop(0, items.num_steps, load_step)

        loop(0, item.num_tiles, load_tile)
        # Carried instead of computed from the item, because the last part may have fewer tiles than
        # the other parts.
        return num_steps_before + item.num_tiles * items.num_steps

    ring.drain(lax.fori_loop(0, num_own_items, load_item, jnp.int32(0)))


def _multiply(
    form: Form, items: _Items, num_own_items: Any, ring: Ring, labels_gmem: Any, stats_gmem: Any
) -> None:
    """Multiply and join every tile: the loop of the two multiplying warpgroups.

    Each warpgroup handles half of the tokens.
    """
    plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
    block_v = items.config.block_v
    start = lax.axis_index("warpgroup") * HALF

    def multiply_item(number: Any, num_steps_before: Any) -> Any:
        item = items.find(number)
        tokens = pl.ds(item.row + start, HALF)
        label = registers.load(labels_gmem.at[tokens], registers.row_layout())

        def join_tile(tile: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            sums = ring.products(
                num_steps_before + tile * items.num_steps,
                items.num_steps,
                (HALF, block_v),
                lambda _, slot: (ring.x.at[slot, pl.ds(start, HALF)], ring.w.at[slot]),
            )
            column = (item.first_tile + tile) * block_v
            return _join(form, sums, label, items.columns, column, *carry)

        zero = _fill_rows(0.0)
        lowest = _fill_rows(-jnp.inf)
        statistics = lax.fori_loop(0, item.num_tiles, join_tile, (lowest, zero, zero, zero))
        for n, statistic in enumerate(statistics):
            stats_gmem[item.part, n, tokens] = statistic
        return num_steps_before + item.num_tiles * items.num_steps

    lax.fori_loop(0, num_own_items, multiply_item, jnp.int32(0))


def _fill_rows(value: float) -> jax.Array:
    """Return float32[HALF] in registers, all equal to `value`."""
    return plgpu.layout_cast(jnp.full((HALF,), value, jnp.float32), registers.row_layout())


def _join(
    form: Form, sums: jax.Array, label: jax.Array, columns: int, start: Any, *statistics: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the statistics joined with a tile of products, whose first column is `start`.

    Chunks of columns are joined one by one, because a full tile would not fit the registers.
    """
    for first in range(0, sums.shape[1], CHUNK):
        z = form.cap(sums[:, first : first + CHUNK])  # [HALF, CHUNK]
        column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, z.shape, 1), plgpu.Layout.WGMMA)
        statistics = _join_chunk(
            form, z, column, label - (start + first), columns - (start + first), *statistics
        )
    return statistics


def _join_chunk(
    form: Form,
    z: jax.Array,
    column: jax.Array,
    label: jax.Array,
    stop: Any,
    largest: jax.Array,
    exp_sum: jax.Array,
    label_logit: jax.Array,
    logit_sum: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the statistics joined with logits z; columns from `stop` on do not exist."""

    def spread(row: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(row, z.shape, (0,))

    exists = column < stop
    # A part begins with a column that exists, so `largest` is finite from the first chunk on, and
    # inf - inf never occurs.
    inside = jnp.where(exists, z, -jnp.inf)
    before = largest
    largest = jnp.maximum(largest, inside.max(1))
    exp_sum = exp_sum * jnp.exp(before - largest) + jnp.exp(inside - spread(largest)).sum(1)
    label_logit = label_logit + jnp.where(column == spread(label), z, 0.0).sum(1)
    # Only label smoothing reads the sum of logits.
    if form.label_smoothing:
        logit_sum = logit_sum + jnp.where(exists, z, 0.0).sum(1)
    return largest, exp_sum, label_logit, logit_sum
