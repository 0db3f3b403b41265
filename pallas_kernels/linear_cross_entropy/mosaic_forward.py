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

from typing import Any

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
    num_tokens = padded // ROWS
    hidden = x.shape[1]
    num_steps = pl.cdiv(hidden, COLUMNS)
    num_tiles = pl.cdiv(columns, config.block_v)
    tiles_a_part = pl.cdiv(num_tiles, num_parts)
    num_items = num_tokens * num_parts
    assert config.num_cores is not None
    num_blocks = min(config.num_cores, num_items)

    def body(x_gmem: Any, w_gmem: Any, labels_gmem: Any, stats_gmem: Any) -> None:
        block = lax.axis_index("block")
        count = (num_items - block + num_blocks - 1) // num_blocks

        def place(item: Any) -> tuple[Any, Any, Any, Any]:
            """Return an item's first token, its part, its first tile and its number of tiles."""
            index = block + item * num_blocks
            part = lax.rem(index, num_parts)
            first = part * tiles_a_part
            return (
                lax.div(index, num_parts) * ROWS,
                part,
                first,
                jnp.minimum(num_tiles - first, tiles_a_part),
            )

        def fill(ring: Ring) -> None:
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def load_item(item: Any, done: Any) -> Any:
                row, _, first, tiles = place(item)

                def load_tile(tile: Any) -> None:
                    column = (first + tile) * config.block_v

                    def load_step(k: Any) -> None:
                        ks = pl.ds(k * COLUMNS, COLUMNS)
                        ring.fill(
                            done + tile * num_steps + k,
                            lambda slot: [
                                (x_gmem.at[pl.ds(row, ROWS), ks], ring.x.at[slot]),
                                (w_gmem.at[ks, pl.ds(column, config.block_v)], ring.w.at[slot]),
                            ],
                        )

                    loop(0, num_steps, load_step)

                loop(0, tiles, load_tile)
                # Carried instead of computed from the item, because the last part may have fewer
                # tiles than the other parts.
                return done + tiles * num_steps

            ring.drain(lax.fori_loop(0, count, load_item, jnp.int32(0)))

        def multiply(ring: Ring) -> None:
            plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
            start = lax.axis_index("warpgroup") * HALF

            def multiply_item(item: Any, done: Any) -> Any:
                row, part, first, tiles = place(item)
                tokens = pl.ds(row + start, HALF)
                label = registers.load(labels_gmem.at[tokens], registers.row_layout())

                def of_tile(tile: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    sums = ring.products(
                        done + tile * num_steps,
                        num_steps,
                        (HALF, config.block_v),
                        lambda _, slot: (ring.x.at[slot, pl.ds(start, HALF)], ring.w.at[slot]),
                    )
                    return _join(
                        form, sums, label, columns, (first + tile) * config.block_v, *carry
                    )

                zero = plgpu.layout_cast(
                    jnp.full((HALF,), 0.0, jnp.float32), registers.row_layout()
                )
                lowest = plgpu.layout_cast(
                    jnp.full((HALF,), -jnp.inf, jnp.float32), registers.row_layout()
                )
                statistics = lax.fori_loop(0, tiles, of_tile, (lowest, zero, zero, zero))
                for n, each in enumerate(statistics):
                    stats_gmem[part, n, tokens] = each
                return done + tiles * num_steps

            lax.fori_loop(0, count, multiply_item, jnp.int32(0))

        def scope(x_smem: Any, w_smem: Any, full: Any, empty: Any) -> None:
            ring = Ring(config.num_stages, x_smem, w_smem, full, empty)
            lax.cond(
                lax.axis_index("warpgroup") == WARPGROUPS,
                lambda: fill(ring),
                lambda: multiply(ring),
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
    total: jax.Array,
    label_logit: jax.Array,
    plain: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the statistics joined with logits z; columns from `stop` on do not exist."""

    def spread(row: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(row, z.shape, (0,))

    there = column < stop
    # A part begins with a column that exists, so `largest` is finite from the first chunk on, and
    # inf - inf never occurs.
    inside = jnp.where(there, z, -jnp.inf)
    before = largest
    largest = jnp.maximum(largest, inside.max(1))
    total = total * jnp.exp(before - largest) + jnp.exp(inside - spread(largest)).sum(1)
    label_logit = label_logit + jnp.where(column == spread(label), z, 0.0).sum(1)
    # Only label smoothing reads the sum of logits.
    if form.label_smoothing:
        plain = plain + jnp.where(there, z, 0.0).sum(1)
    return largest, total, label_logit, plain
