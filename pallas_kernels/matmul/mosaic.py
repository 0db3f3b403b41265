"""`matmul` for Hopper, in Pallas Mosaic GPU, with overlapping loads, products and epilogue.

A block has three warpgroups. One loads: the tensor memory accelerator (TMA) copies `block_k`
columns of x and rows of each weight into one of `num_stages` slots of shared memory. Two multiply,
each `block_m / 2` rows: wgmma reads both operands from shared memory and sums in float32 registers.
Two barriers per slot order them: `full`, on which the copies arrive, and `empty`, on which each
multiplying warpgroup arrives when the product that read the slot has ended. It arrives one product
later, so that one product is always in flight.

    loader     s:  wait empty[s - num_stages];  x[tile, s], w[s, tile] -> slot
    multiplier s:  wait full[s];  acc += x @ w;  wait for product s - 1;  arrive empty[s - 1]

The grid is as large as the GPU (persistent): each block processes tiles of the result, in an order
that keeps neighbours together. Steps are numbered consecutively over all tiles, so while a tile
ends (activation, stores) the loader fills the slots with the first steps of the next one.

Two blocks may form a cluster (`cluster_m`, `cluster_n`): they have neighbouring tiles, process them
in step, and load shared operands only once. Each of the two loads half of a shared operand, and TMA
writes it to the memory of both (multicast). A slot is therefore filled from two sides: `empty`
counts the multiplying warpgroups of both blocks, in each of them, while `full` counts bytes from
either sender. Because each block waits for every last arrival, no block ends while the other still
writes to it. JAX's own `hopper_matmul_mgpu` does the same.

The end of a tile passes through shared memory in chunks of 64 rows and 128 bytes. Biases and
accumulated arrays arrive by TMA and are requested before the products start, so that they are
present when the products end. The result leaves by TMA, two chunks in flight.

Edges: M may be any multiple of 8, and N and K any multiple of 64. TMA reads zeros outside of an
array, and writes nothing there. Other sizes are padded with zeros before the kernel, which copies
the operand, and for M and N the result; JAX's transform for swizzled memory takes no other sizes.

If the accumulated array (the first of two) has the result's dtype, the result overwrites it: XLA
aliases both, and copies only if the old value is used again. Each chunk is read before it is
written, by the same warpgroup. JAX does this through a Ref, and a Ref cannot vary over axes of a
shard_map.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax._src.state.discharge import discharge_state  # pyright: ignore[reportPrivateImportUsage]  no public API
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as plgpu
from pallas_kernels.dispatch import Target
from pallas_kernels.matmul import xla
from pallas_kernels.matmul.config import (
    CHUNK_M,
    COLUMNS,
    SLOTS,
    WARPGROUPS,
    Config,
    Problem,
    chunk_columns,
)
from pallas_kernels.matmul.reference import Form
from pallas_kernels.shared_memory import TILE_ROWS, swizzled
from pallas_kernels.varying import varying_axes

# Per thread: 128 * (40 + 2 * 232) = 63 Ki of a core's 64 Ki.
LOADER_REGISTERS = 40
MULTIPLIER_REGISTERS = 232
NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def refusal(problem: Problem, target: Target) -> str | None:
    """Return why the kernel cannot serve a call, or None if it can."""
    if problem.dtype not in NARROW:
        return f"it multiplies bfloat16 and float16, not {problem.dtype}"
    for name, dtype in (
        ("result", problem.out_dtype),
        ("accumulate", problem.accumulate_dtype),
        ("bias", problem.bias_dtype),
    ):
        if dtype not in (None, problem.dtype, jnp.dtype(jnp.float32)):
            return (
                f"with {problem.dtype} inputs the {name} is {problem.dtype} or float32, not {dtype}"
            )
    if 0 in (problem.m, problem.n, problem.k):
        return f"dims of 0 have no tiles (M, N, K = {problem.m}, {problem.n}, {problem.k})"
    return target.without_hopper()


# Refs in GMEM exist only inside of a jit.
@functools.partial(jax.jit, static_argnames=("form", "config", "keeps_products"))
def matmul(
    form: Form,
    config: Config,
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    accumulates: Sequence[jax.Array],
    keeps_products: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return y[M, N] and, if `keeps_products`, the z_i[M, N], all in the result's dtype."""
    m, k = x.shape
    n = weights[0].shape[1]
    more_m = -m % TILE_ROWS
    more_k = -k % COLUMNS
    more_n = -n % COLUMNS
    results = _kernel(
        form,
        config,
        _pad(x, (more_m, more_k)),
        [_pad(w, (more_k, more_n)) for w in weights],
        [_pad(bias, (more_n,)) for bias in biases],
        [_pad(accumulate, (more_m, more_n)) for accumulate in accumulates],
        keeps_products,
    )
    y, *products = (result[:m, :n] for result in results)
    return y, tuple(products)


def _pad(array: jax.Array, more: tuple[int, ...]) -> jax.Array:
    return jnp.pad(array, [(0, count) for count in more]) if any(more) else array


def _kernel(
    form: Form,
    config: Config,
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    accumulates: Sequence[jax.Array],
    keeps_products: bool,
) -> list[jax.Array]:
    """Return y and, if `keeps_products`, the products, of dims that need no padding."""
    # In shard_map a result's type includes the axes over which it varies: take it from XLA's form.
    xla_form = functools.partial(xla.matmul, form, keeps_products=keeps_products)
    out_types = jax.tree.leaves(jax.eval_shape(xla_form, x, weights, biases, accumulates))
    operands = (x, list(weights), list(biases), list(accumulates))
    # Writing in place needs a Ref, and a Ref cannot vary over axes.
    in_place = (
        bool(accumulates)
        and accumulates[0].dtype == form.dtype
        and not varying_axes(accumulates[0])
    )
    if not in_place:
        return list(_build_call(form, config, operands, out_types, in_place)(*operands))
    call = _build_call(form, config, operands, out_types[1:], in_place)

    def run(
        x: jax.Array, weights: Any, biases: Any, accumulates: Sequence[jax.Array]
    ) -> list[jax.Array]:
        # XLA gives the Ref the array's memory, and copies only if the old value is used again.
        y_ref = jax.new_ref(accumulates[0], memory_space=plgpu.GMEM)
        products = call(x, weights, biases, [y_ref, *accumulates[1:]])
        return [jax.freeze(y_ref), *products]

    # The Ref begins and ends here. Discharging it now keeps its effect out of the surrounding
    # program.
    pure = discharge_state(jax.make_jaxpr(run)(*operands))
    return jex.jaxpr_as_fun(pure)(*jax.tree.leaves(operands))


def _build_call(
    form: Form,
    config: Config,
    operands: tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]],
    out_types: list[Any],
    in_place: bool,
) -> Callable[..., Any]:
    """Return the kernel as a function of `operands`.

    Args:
      form: operations after the products.
      config: sizes of the kernel.
      operands: x, the weights, the biases and the accumulated arrays.
      out_types: types of the results that the kernel does not write in place.
      in_place: whether y overwrites the first accumulated array.
    """
    x, weights, biases, accumulates = operands
    m = x.shape[0]
    n = weights[0].shape[1]
    columns = config.block_n // len(weights)
    chunk_n = chunk_columns(
        [form.dtype, *(accumulate.dtype for accumulate in accumulates)], columns
    )
    # A cluster takes one tile per block at a time; tiles outside of the array are zeros.
    grid = (pl.cdiv(m, config.block_m * config.cluster_m), pl.cdiv(n, columns * config.cluster_n))
    num_clusters = min(config.num_cores // config.cluster, grid[0] * grid[1])

    def body(
        x_gmem: Any, w_gmems: Any, bias_gmems: Any, accumulate_gmems: Any, *out_gmems: Any
    ) -> None:
        # The overwritten array is an input, and replaces the first output.
        results = [accumulate_gmems[0], *out_gmems] if in_place else list(out_gmems)

        def scope(x_smem: Any, w_smems: Any, full: Any, empty: Any, *ends: Any) -> None:
            tiles = _Tiles(config, grid, pl.cdiv(x.shape[1], config.block_k), columns, num_clusters)
            end = _End(form, tiles, chunk_n, bias_gmems, accumulate_gmems, results, *ends)
            lax.cond(
                # Warpgroups 0 and 1 multiply; the last one loads.
                lax.axis_index("warpgroup") == WARPGROUPS,
                lambda: _load(tiles, x_gmem, w_gmems, x_smem, w_smems, full, empty),
                lambda: _multiply(tiles, end, x_smem, w_smems, full, empty),
            )

        pl.run_scoped(
            scope,
            # The ring of operands. `full` counts the copies of a step, `empty` the warpgroups that
            # have used it.
            swizzled((config.num_stages, config.block_m, config.block_k), x.dtype),
            [swizzled((config.num_stages, config.block_k, columns), w.dtype) for w in weights],
            plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=config.num_stages),
            _empty_barriers(config),
            # For the end of a tile, one part per warpgroup. A barrier must count at least 1, even
            # if nothing waits on it.
            [plgpu.SMEM((WARPGROUPS, columns), bias.dtype) for bias in biases],
            [
                swizzled((WARPGROUPS, SLOTS, CHUNK_M, chunk_n), accumulate.dtype)
                for accumulate in accumulates
            ],
            swizzled((WARPGROUPS, SLOTS, CHUNK_M, chunk_n), form.dtype),
            plgpu.Barrier(num_arrivals=max(len(biases), 1), num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=max(len(accumulates), 1), num_barriers=WARPGROUPS * SLOTS),
            collective_axes="warpgroup",
        )

    return pl.kernel(
        body,
        out_type=out_types,
        mesh=plgpu.Mesh(
            grid=(num_clusters,),
            grid_names=("cluster",),
            cluster=() if config.cluster == 1 else (config.cluster,),
            cluster_names=() if config.cluster == 1 else ("block",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="matmul",
    )


def _empty_barriers(config: Config) -> Any:
    """Return the barriers on which multiplying warpgroups arrive.

    In a cluster each block's barriers count the warpgroups of all its blocks.
    """
    if config.cluster == 1:
        return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.num_stages)
    return plgpu.ClusterBarrier(
        collective_axes=("block",), num_arrivals=WARPGROUPS, num_barriers=config.num_stages
    )


class _Tiles:
    """The tiles of the result that a block processes, in order, and the steps of K in each."""

    def __init__(
        self, config: Config, grid: tuple[int, int], num_steps: int, columns: int, num_clusters: int
    ):
        self.config = config
        self.grid = grid
        self.num_steps = num_steps
        self.columns = columns
        self.num_clusters = num_clusters
        self.cluster = lax.axis_index("cluster")
        block = lax.axis_index("block") if config.cluster > 1 else 0
        # The block's position in the cluster.
        self.block_m = block if config.cluster_m > 1 else 0
        self.block_n = 0 if config.cluster_m > 1 else block
        # This cluster processes the groups of tiles cluster, cluster + num_clusters, ...
        self.count = (grid[0] * grid[1] - self.cluster + num_clusters - 1) // num_clusters

    def start(self, tile: Any) -> tuple[Any, Any]:
        """Return the first row and column of a block's tile."""
        # Bands of `raster` tiles along N are walked down M, and every second band back up.
        m, n = plgpu.planar_snake(
            self.cluster + tile * self.num_clusters, self.grid, 1, self.config.raster
        )
        config = self.config
        row = (m * config.cluster_m + self.block_m) * config.block_m
        column = (n * config.cluster_n + self.block_n) * self.columns
        return row, column

    def slot(self, step: Any) -> Any:
        """Return the slot of a step; steps are counted from the first step of the first tile."""
        return lax.rem(step, self.config.num_stages)


def _loop(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
    def step(i: Any, _: tuple[()]) -> tuple[()]:
        body(i)
        return ()

    lax.fori_loop(start, stop, step, ())


def _load(
    tiles: _Tiles, x_gmem: Any, w_gmems: Any, x_smem: Any, w_smems: Any, full: Any, empty: Any
) -> None:
    """Copy the operands of every step to its slot: the loop of the loading warpgroup."""
    config = tiles.config
    # TMA needs few registers: leave the others to the warpgroups that multiply.
    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

    def load_tile(tile: Any) -> None:
        row, column = tiles.start(tile)

        def load_step(k: Any) -> None:
            step = tile * tiles.num_steps + k
            slot = tiles.slot(step)
            ks = pl.ds(k * config.block_k, config.block_k)

            # In the first round every slot is empty, and nothing has arrived on its barrier.
            @pl.when(step >= config.num_stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            # Blocks side by side along N share rows of x, and blocks along M share columns of the
            # weights.
            x_shared = "block" if config.cluster_n > 1 else None
            w_shared = "block" if config.cluster_m > 1 else None
            rows = pl.ds(row, config.block_m)
            columns = pl.ds(column, tiles.columns)
            plgpu.copy_gmem_to_smem(
                x_gmem.at[rows, ks], x_smem.at[slot], full.at[slot], collective_axes=x_shared
            )
            for w_gmem, w_smem in zip(w_gmems, w_smems, strict=True):
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[ks, columns], w_smem.at[slot], full.at[slot], collective_axes=w_shared
                )

        _loop(0, tiles.num_steps, load_step)

    _loop(0, tiles.count, load_tile)
    # Wait for every arrival, which leaves the barriers in their initial state.
    steps = tiles.count * tiles.num_steps
    _loop(
        jnp.maximum(steps - config.num_stages, 0),
        steps,
        lambda step: plgpu.barrier_wait(empty.at[tiles.slot(step)]),
    )


def _multiply(tiles: _Tiles, end: "_End", x_smem: Any, w_smems: Any, full: Any, empty: Any) -> None:
    """Multiply and end every tile: the loop of the two multiplying warpgroups.

    Each warpgroup handles half of the rows.
    """
    rows = tiles.config.block_m // WARPGROUPS
    warpgroup = lax.axis_index("warpgroup")
    half = pl.ds(warpgroup * rows, rows)
    plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")

    def multiply_tile(tile: Any) -> None:
        row, column = tiles.start(tile)
        # The memory for the terms is free: the last `commit_smem` of the previous tile was a
        # barrier, so all threads have read that tile's terms.
        end.request(row + warpgroup * rows, column)

        def sums(*acc_refs: Any) -> tuple[jax.Array, ...]:
            def multiply_step(k: Any) -> None:
                step = tile * tiles.num_steps + k
                slot = tiles.slot(step)
                plgpu.barrier_wait(full.at[slot])
                for acc_ref, w_smem in zip(acc_refs, w_smems, strict=True):
                    plgpu.wgmma(acc_ref, x_smem.at[slot, half], w_smem.at[slot])
                plgpu.wgmma_wait(len(acc_refs))  # the products of the step before have ended

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[tiles.slot(step - 1)])

            _loop(0, tiles.num_steps, multiply_step)
            plgpu.wgmma_wait(0)
            # Arrive now, and not after the tile's epilogue, so that the loader fills the slot for
            # the next tile in the meantime.
            plgpu.barrier_arrive(empty.at[tiles.slot((tile + 1) * tiles.num_steps - 1)])
            return tuple(acc_ref[...] for acc_ref in acc_refs)

        # Accumulators exist only in a scope; their values leave it as arrays in registers.
        accumulators = [
            plgpu.WGMMAAccumulatorRef((rows, tiles.columns), jnp.float32) for _ in w_smems
        ]
        end.finish(row + warpgroup * rows, column, pl.run_scoped(sums, *accumulators))

    _loop(0, tiles.count, multiply_tile)
    # The last stores read this block's shared memory, which ends with it.
    plgpu.wait_smem_to_gmem(0)


class _End:
    """The epilogue of a tile, for one warpgroup's rows.

    It adds biases and accumulated arrays, applies the activation, and writes to global memory.
    """

    def __init__(
        self,
        form: Form,
        tiles: _Tiles,
        chunk_n: int,
        bias_gmems: Any,
        accumulate_gmems: Any,
        result_gmems: Any,
        bias_smems: Any,
        accumulate_smems: Any,
        result_smem: Any,
        bias_barrier: Any,
        accumulate_barrier: Any,
    ):
        self.form = form
        self.chunk_n = chunk_n
        self.columns = tiles.columns
        self.biases = list(zip(bias_gmems, bias_smems, strict=True))
        self.accumulates = list(zip(accumulate_gmems, accumulate_smems, strict=True))
        self.result_gmems = result_gmems
        self.result_smem = result_smem
        self.bias_barrier = bias_barrier
        self.accumulate_barrier = accumulate_barrier
        rows = tiles.config.block_m // WARPGROUPS
        self.chunks = [
            (r, c) for r in range(0, rows, CHUNK_M) for c in range(0, tiles.columns, chunk_n)
        ]
        self.warpgroup = lax.axis_index("warpgroup")

    def request(self, row: Any, column: Any) -> None:
        """Start the copies of the biases and of the first chunks of the accumulated arrays."""
        for bias_gmem, bias_smem in self.biases:
            source = bias_gmem.at[pl.ds(column, self.columns)]
            plgpu.copy_gmem_to_smem(
                source, bias_smem.at[self.warpgroup], self.bias_barrier.at[self.warpgroup]
            )
        for index in range(min(SLOTS, len(self.chunks))):
            self._request_chunk(index, row, column)

    def finish(self, row: Any, column: Any, sums: Sequence[jax.Array]) -> None:
        """Turn the sums of products, float32 in registers, into the result."""
        if self.biases:
            plgpu.barrier_wait(self.bias_barrier.at[self.warpgroup])
        # The previous tile's stores, whose last ones may be in either slot.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        num_stores = 0
        for index, (r, c) in enumerate(self.chunks):
            columns = slice(c, c + self.chunk_n)
            products = [z[r : r + CHUNK_M, columns] for z in sums]  # [CHUNK_M, chunk_n] each
            products = self._add_biases(products, columns)
            products = self._add_accumulates(products, index)
            # y is first. The products follow if the derivative needs them; otherwise y is the only
            # result.
            values = [self.form.join(products), *products][: len(self.result_gmems)]
            for value, result_gmem in zip(values, self.result_gmems, strict=True):
                slot = num_stores % SLOTS
                # The store that last used this slot.
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                self.result_smem[self.warpgroup, slot] = value.astype(self.form.dtype)
                # TMA sees the threads' writes to shared memory only after this commit, which is
                # also a barrier of the warpgroup.
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    self.result_smem.at[self.warpgroup, slot],
                    self._chunk(result_gmem, index, row, column),
                )
                num_stores += 1
            # Every thread has read this chunk (the barrier above), so its slot may be refilled.
            if index + SLOTS < len(self.chunks):
                self._request_chunk(index + SLOTS, row, column)

    def _add_biases(self, products: list[jax.Array], columns: slice) -> list[jax.Array]:
        if not self.biases:
            return products
        biases = [smem[self.warpgroup, columns].astype(jnp.float32) for _, smem in self.biases]
        sums = []
        for z, bias in zip(products, biases, strict=True):
            sums.append(z + lax.broadcast_in_dim(bias, z.shape, (1,)))
        return sums

    def _add_accumulates(self, products: list[jax.Array], index: int) -> list[jax.Array]:
        if not self.accumulates:
            return products
        plgpu.barrier_wait(self._accumulate_barrier(index))
        slot = index % SLOTS
        chunks = [smem[self.warpgroup, slot].astype(jnp.float32) for _, smem in self.accumulates]
        return [z + chunk for z, chunk in zip(products, chunks, strict=True)]

    def _chunk(self, gmem: Any, index: int, row: Any, column: Any) -> Any:
        r, c = self.chunks[index]
        return gmem.at[pl.ds(row + r, CHUNK_M), pl.ds(column + c, self.chunk_n)]

    def _accumulate_barrier(self, index: int) -> Any:
        return self.accumulate_barrier.at[self.warpgroup * SLOTS + index % SLOTS]

    def _request_chunk(self, index: int, row: Any, column: Any) -> None:
        for gmem, smem in self.accumulates:
            source = self._chunk(gmem, index, row, column)
            plgpu.copy_gmem_to_smem(
                source, smem.at[self.warpgroup, index % SLOTS], self._accumulate_barrier(index)
            )
