"""The backward kernel of `linear_cross_entropy` on Hopper, for dx or dw.

The slopes exist only in shared memory.

A block owns rows of the gradient and sweeps the dim that is summed over: for dx it owns tokens and
sweeps the vocabulary, for dw it owns columns of the vocabulary and sweeps tokens (`sweep`). It
proceeds in groups of `num_slopes` tiles, each `width` wide:

    for each group:
      for i in tiles:  z = sum_k x[t, k] w[k, v];  s_i = slope(z) -> shared memory, 16 bits
      for d in D / 64: dx[t, d] += sum_i s_i w[d, v_i]^T    or    dw[d, v] += sum_i x[t_i, d]^T s_i

Both loops take the same tiles of w (for dw, of x), 64 of D by `width`, through the same slots
(`ring`): the summed dim of the first product becomes the columns of the second. Each warpgroup
computes the slopes that it multiplies, so the two warpgroups share only the slots.

A gradient's rows over all of D do not fit a core's registers and shared memory. Between groups they
live in a float32 array of global memory that only this block touches, where each element is always
read and written by the same thread. Hence there are no atomic operations, sums are added in a fixed
order, and two runs give the same bits. The last group rounds and writes the result instead.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as plgpu
from pallas_kernels import registers
from pallas_kernels.linear_cross_entropy.kernel_config import COLUMNS
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.ring import (
    COPIES,
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    WARPGROUPS,
    Ring,
    loop,
)
from pallas_kernels.linear_cross_entropy.sweep import HALF, Sweep
from pallas_kernels.shared_memory import swizzled


def gradient(
    form: Form,
    sweep: Sweep,
    x: jax.Array,
    w: jax.Array,
    per_token: tuple[jax.Array, ...],
    unit: jax.Array,
    out_types: list[Any],
) -> jax.Array:
    """Return dx[T', D'] or dw[D', V'], padded to full blocks.

    Args:
      form: options of the loss.
      sweep: which gradient to compute, and its tiling.
      x: activations `[T, D]`.
      w: weight `[D, V]`.
      per_token: labels (int32), log-sum-exps and weights (float32), each `[num_tokens]`.
      unit: float32[1], a factor applied to the sums.
      out_types: type of the gradient and, if there are several groups, of the sums between them.
    """
    config = sweep.config

    def body(x_gmem: Any, w_gmem: Any, token_gmems: Any, unit_gmem: Any, *out_gmems: Any) -> None:
        block = lax.axis_index("block")
        num_own_items = (sweep.num_items - block + sweep.num_blocks - 1) // sweep.num_blocks
        grad_gmem, *sums_gmem = out_gmems

        def scope(x_smem: Any, w_smem: Any, slopes_smem: Any, full: Any, empty: Any) -> None:
            ring = Ring(config.num_backward_stages, x_smem, w_smem, full, empty)
            multiplier = _Multiplier(
                form=form,
                sweep=sweep,
                ring=ring,
                slopes_smem=slopes_smem,
                token_gmems=token_gmems,
                unit_gmem=unit_gmem,
                grad_gmem=grad_gmem,
                sums_gmem=sums_gmem[0] if sums_gmem else None,
            )
            lax.cond(
                lax.axis_index("warpgroup") == WARPGROUPS,
                lambda: _load(sweep, ring, num_own_items, x_gmem, w_gmem),
                lambda: multiplier.run(num_own_items),
            )

        rows, columns = sweep.tile
        pl.run_scoped(
            scope,
            swizzled((config.num_backward_stages, rows, COLUMNS), x.dtype),
            swizzled((config.num_backward_stages, COLUMNS, columns), w.dtype),
            swizzled((config.num_slopes, WARPGROUPS, *sweep.half_tile), x.dtype),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=config.num_backward_stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.num_backward_stages),
            collective_axes="warpgroup",
        )

    call: Any = pl.kernel(
        body,
        out_type=out_types,
        mesh=plgpu.Mesh(
            grid=(sweep.num_blocks,),
            grid_names=("block",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name=f"linear_cross_entropy_d{'x' if sweep.is_dx else 'w'}",
    )
    return call(x, w, per_token, unit)[0]


def _load(sweep: Sweep, ring: Ring, num_own_items: Any, x_gmem: Any, w_gmem: Any) -> None:
    """Copy the operands of every step: the loop of the loading warpgroup."""
    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
    rows, columns = sweep.tile
    num_slopes = sweep.config.num_slopes

    def load_group(item: Any, group: Any) -> None:
        first = (item * sweep.num_groups + group) * sweep.steps_per_group

        # All groups have the same number of steps: TMA returns zeros for tiles beyond an array.
        def load_logits(step: Any) -> None:
            row, column = sweep.start(item, group, lax.div(step, sweep.num_steps))
            hidden = pl.ds(lax.rem(step, sweep.num_steps) * COLUMNS, COLUMNS)
            ring.fill(
                first + step,
                lambda slot: [
                    (x_gmem.at[pl.ds(row, rows), hidden], ring.x.at[slot]),
                    (w_gmem.at[hidden, pl.ds(column, columns)], ring.w.at[slot]),
                ],
            )

        def load_swept(step: Any) -> None:
            """Copy a tile of the swept operand, in two copies like every step."""
            row, column = sweep.start(item, group, lax.rem(step, num_slopes))
            hidden_start = lax.div(step, num_slopes) * COLUMNS

            def copies(slot: Any) -> list[tuple[Any, Any]]:
                size = (COLUMNS if sweep.is_dx else rows) // COPIES
                pairs = []
                for start in range(0, COPIES * size, size):
                    if sweep.is_dx:
                        hidden = pl.ds(hidden_start + start, size)
                        source = w_gmem.at[hidden, pl.ds(column, columns)]
                        target = ring.w.at[slot, pl.ds(start, size)]
                    else:
                        tokens = pl.ds(row + start, size)
                        source = x_gmem.at[tokens, pl.ds(hidden_start, COLUMNS)]
                        target = ring.x.at[slot, pl.ds(start, size)]
                    pairs.append((source, target))
                return pairs

            ring.fill(first + num_slopes * sweep.num_steps + step, copies)

        # Load in the order in which the multiplying warpgroups read: tiles by parts of D, then
        # parts of D by tiles.
        loop(0, num_slopes * sweep.num_steps, load_logits)
        loop(0, num_slopes * sweep.num_steps, load_swept)

    def load_item(item: Any) -> None:
        loop(0, sweep.num_groups, lambda group: load_group(item, group))

    loop(0, num_own_items, load_item)
    ring.drain(num_own_items * sweep.num_groups * sweep.steps_per_group)


@dataclasses.dataclass(frozen=True)
class _Multiplier:
    """The loop of the two multiplying warpgroups, each of which handles half of a block's rows.

    Attributes:
      form: options of the loss.
      sweep: which gradient to compute, and its tiling.
      ring: slots of the operands.
      slopes_smem: slopes of a group, `[num_slopes, WARPGROUPS, *half_tile]`.
      token_gmems: labels, log-sum-exps and weights of the tokens.
      unit_gmem: factor of the sums.
      grad_gmem: the gradient.
      sums_gmem: sums between groups; None if there is one group.
    """

    form: Form
    sweep: Sweep
    ring: Ring
    slopes_smem: Any
    token_gmems: Any
    unit_gmem: Any
    grad_gmem: Any
    sums_gmem: Any

    def run(self, num_own_items: Any) -> None:
        sweep = self.sweep
        num_slopes = sweep.config.num_slopes
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")

        def multiply_group(item: Any, group: Any) -> None:
            first = (item * sweep.num_groups + group) * sweep.steps_per_group

            def write_slopes(i: Any) -> None:
                self._slopes(item, group, i, first + i * sweep.num_steps)

            loop(0, num_slopes, write_slopes)
            # The next products read the slopes by wgmma, which sees the threads' writes only after
            # this commit.
            plgpu.commit_smem()
            second = first + num_slopes * sweep.num_steps

            def add_products(d: Any) -> None:
                self._add(item, group, d, second + d * num_slopes)

            loop(0, sweep.num_steps, add_products)

        def multiply_item(item: Any) -> None:
            loop(0, sweep.num_groups, lambda group: multiply_group(item, group))

        loop(0, num_own_items, multiply_item)

    def _slopes(self, item: Any, group: Any, i: Any, first: Any) -> None:
        """Write this warpgroup's part of tile i of a group's slopes to shared memory."""
        sweep = self.sweep
        warpgroup = lax.axis_index("warpgroup")
        half = pl.ds(warpgroup * HALF, HALF)
        rows, columns = sweep.half_tile

        def operands(_: Any, slot: Any) -> tuple[Any, Any]:
            if sweep.is_dx:
                return self.ring.x.at[slot, half], self.ring.w.at[slot]
            return self.ring.x.at[slot], self.ring.w.at[slot, :, half]

        sums = self.ring.products(first, sweep.num_steps, (rows, columns), operands)
        row, column = sweep.start(item, group, i)
        if sweep.is_dx:
            row += warpgroup * HALF
        else:
            column += warpgroup * HALF
        # Process pieces of 64 x 64: the values between sums and slopes of more would not fit the
        # registers.
        for r in range(0, rows, HALF):
            label, lse, weight = (
                registers.load(gmem.at[pl.ds(row + r, HALF)], registers.row_layout())
                for gmem in self.token_gmems
            )
            for c in range(0, columns, COLUMNS):
                # [tokens, vocabulary], for dx and for dw
                chunk = sums[r : r + HALF, c : c + COLUMNS]

                def spread(row: jax.Array, shape: tuple[int, ...] = chunk.shape) -> jax.Array:
                    return lax.broadcast_in_dim(row, shape, (0,))

                iota = lax.broadcasted_iota(jnp.int32, chunk.shape, 1)
                column_ids = plgpu.layout_cast(iota, plgpu.Layout.WGMMA)
                slope = self.form.slope(
                    self.form.cap(chunk), spread(lse), column_ids == spread(label - (column + c))
                )
                # Padding columns have logits of 0, and so a nonzero probability.
                exists = column_ids < sweep.columns - (column + c)
                slope = jnp.where(exists, slope * spread(weight), 0.0)
                self.slopes_smem[i, warpgroup, r : r + HALF, c : c + COLUMNS] = slope.astype(
                    self.slopes_smem.dtype
                )

    def _add(self, item: Any, group: Any, d: Any, first: Any) -> None:
        """Add a group's products to part d of the gradient."""
        sweep = self.sweep
        warpgroup = lax.axis_index("warpgroup")

        def operands(i: Any, slot: Any) -> tuple[Any, Any]:
            slopes = self.slopes_smem.at[i, warpgroup]
            if sweep.is_dx:
                return slopes, plgpu.transpose_ref(self.ring.w.at[slot], (1, 0))
            return plgpu.transpose_ref(self.ring.x.at[slot], (1, 0)), slopes

        def products() -> jax.Array:
            return self.ring.products(first, sweep.config.num_slopes, (HALF, COLUMNS), operands)

        row, column = sweep.start(item, 0, 0)
        grad = self.grad_gmem.at[sweep.owned_slices(row if sweep.is_dx else column, d)]

        def finish(total: jax.Array) -> None:
            registers.store(grad, (total * self.unit_gmem[0]).astype(grad.dtype))

        # With a single group the sums never leave the registers.
        if self.sums_gmem is None:
            finish(products())
            return
        sums = self.sums_gmem.at[(lax.axis_index("block"), *sweep.owned_slices(0, d))]
        # Requested now, so that it is in flight during the products.
        before = registers.load(sums, plgpu.Layout.WGMMA)
        # The first group reads memory that was never written, or another item's sums: a select
        # drops them, even if they are NaN.
        is_first = lax.broadcast_in_dim(group == 0, before.shape, ())
        total = jnp.where(is_first, 0.0, before) + products()

        @pl.when(group < sweep.num_groups - 1)
        def _():
            registers.store(sums, total)

        @pl.when(group == sweep.num_groups - 1)
        def _():
            finish(total)
