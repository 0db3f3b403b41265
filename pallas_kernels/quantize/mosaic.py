"""`quantize` and `dequantize` for Hopper, in Pallas Mosaic GPU.

Each element is read once and written once.

Blocks of the last dim, consecutive in memory, are the rows of `x[G, B]`, so that neither kernel
depends on the array's shape. A tile is 64 rows. Each warpgroup has its own tiles: the tensor memory
accelerator (TMA) copies them to shared memory, `num_stages` ahead, and the results back, while
other warpgroups of the core, and the warpgroup's own copies, continue.

    tile i:  wait for its copy;  results -> slot;  start their copy out;  copy tile i + num_stages

Results are written to shared memory after every thread has read the tile. `commit_smem`, which the
copies out need, waits for all threads: only then is the tile's memory given to the next copy. The
grid is as large as the GPU (persistent).

To quantize, a tile is read twice from shared memory, 128 columns at a time, so that only a small
part of it is in registers: once for the largest magnitude of each row, which 4 threads hold and
exchange, and once for the codes. The arithmetic is the reference's own code.

Edges: G may be any multiple of 8. TMA reads zeros outside of an array, and writes nothing there.
Other G are padded with zeros before the kernel, which copies the array, and so does removing the
padding from the result; JAX's transform for swizzled memory takes no other sizes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as plgpu
from pallas_kernels.dispatch import Target
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.config import COLUMNS, ROWS, SLOTS, Config, Problem, choose
from pallas_kernels.quantize.reference import Format
from pallas_kernels.shared_memory import TILE_ROWS, swizzled

FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


def _layout() -> Any:
    """Return the layout with a row on 4 threads, 4 columns (one word of codes) at a time."""
    return plgpu.Layout.WGMMA_8BIT


def refusal(problem: Problem, target: Target) -> str | None:
    """Return why the kernels cannot serve a call, or None if they can."""
    for dtype in (problem.in_dtype, problem.out_dtype):
        if dtype.itemsize > 1 and dtype not in FLOATS:
            return f"it has code for bfloat16, float16 and float32, not {dtype}"
    if problem.block_size % COLUMNS:
        return f"block_size={problem.block_size} is no multiple of {COLUMNS}"
    if choose(problem, target.num_cores) is None:
        return f"{ROWS} blocks of {problem.block_size} do not fit the shared memory"
    if not problem.num_blocks:
        return "an array without elements has no blocks"
    return target.without_hopper()


@functools.partial(jax.jit, static_argnames=("form", "config"))
def quantize(
    form: Format, config: Config, x: jax.Array, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return (codes int8[G, B], scales float32[G]) for x[G, B].

    To round stochastically, `words` are the uint32[G] of `block_words`; otherwise None.
    """
    chunks = _chunks(x.shape[1])

    def compute(x_smem: Any, *refs: Any) -> None:
        *word_smems, code_smem, scale_smem = refs
        # First pass over the tile: the scales of its rows.
        row_maxima = (reference.magnitudes(load(x_smem, columns)).max(1) for columns in chunks)
        largest = functools.reduce(jnp.maximum, row_maxima)
        scale, inverse, mask = form.scales(largest)
        scale_smem[...] = scale
        for columns in chunks:
            # Second pass: the codes.
            chunk = load(x_smem, columns)  # [64, 128], or [64, 64]
            shape = chunk.shape
            r = None
            if word_smems:
                iota = plgpu.layout_cast(lax.broadcasted_iota(jnp.uint32, shape, 1), _layout())
                column_ids = iota + jnp.uint32(columns.start)
                r = reference.random_bits(spread(word_smems[0][...], shape), column_ids)
            v = reference.normalized(chunk, spread(inverse, shape), spread(mask, shape))
            code_smem[:, columns] = form.encode(v, r)

    arrays = [x] if words is None else [x, words]
    # The reference determines the types of the results, including the axes of a shard_map over
    # which they vary.
    out_types = jax.eval_shape(functools.partial(reference.quantize, form), x, words)
    codes, scales = stream("quantize", config, compute, arrays, out_types)
    return codes, scales


@functools.partial(jax.jit, static_argnames=("form", "config", "dtype"))
def dequantize(
    form: Format, config: Config, codes: jax.Array, scales: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return y[G, B] for codes int8[G, B] and scales float32[G]."""
    chunks = _chunks(codes.shape[1])

    def compute(code_smem: Any, scale_smem: Any, y_smem: Any) -> None:
        scale = scale_smem[...]
        for columns in chunks:
            values = form.decode(plgpu.layout_cast(code_smem[:, columns], _layout()))
            y_smem[:, columns] = (values * spread(scale, values.shape)).astype(dtype)

    out_type = jax.eval_shape(
        functools.partial(reference.dequantize, form, dtype=dtype), codes, scales
    )
    [y] = stream("dequantize", config, compute, [codes, scales], [out_type])
    return y


def _chunks(block_size: int) -> list[slice]:
    """Return the slices of columns that are in registers at a time."""
    width = 2 * COLUMNS if block_size % (2 * COLUMNS) == 0 else COLUMNS
    return [slice(start, start + width) for start in range(0, block_size, width)]


def load(x_smem: Any, columns: slice, dtype: Any = jnp.float32) -> jax.Array:
    """Return the given columns of a tile in registers."""
    return plgpu.layout_cast(x_smem[:, columns], _layout()).astype(dtype)


def spread(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a tile of this shape with `row[i]` in all of row i."""
    return lax.broadcast_in_dim(row, shape, (0,))


def stream(
    name: str,
    config: Config,
    compute: Callable[..., None],
    arrays: Sequence[jax.Array],
    out_types: Sequence[Any],
    width: int | None = None,
) -> list[jax.Array]:
    """Run `compute(*inputs, *outputs)` on each tile of 64 rows, in shared memory.

    The arrays are [G, B] or [G]. `width` is the number of columns that `compute` reads or writes at
    a time, if that is less than a swizzled tile's.
    """
    num_rows = arrays[0].shape[0]
    more = -num_rows % TILE_ROWS
    if more:
        arrays = [jnp.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1)) for array in arrays]
        padded = [out.update(shape=(num_rows + more, *out.shape[1:])) for out in out_types]
        results = stream(name, config, compute, arrays, padded, width)
        return [result[:num_rows] for result in results]
    num_tiles = pl.cdiv(num_rows, ROWS)
    num_blocks = min(config.num_cores, pl.cdiv(num_tiles, config.num_warpgroups))
    stride = num_blocks * config.num_warpgroups

    def body(*refs: Any) -> None:
        in_gmems = refs[: len(arrays)]
        out_gmems = refs[len(arrays) :]
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("block") * config.num_warpgroups + warpgroup
        count = (num_tiles - first + stride - 1) // stride

        def rows(tile: Any) -> Any:
            return pl.ds((first + tile * stride) * ROWS, ROWS)

        def scope(in_smems: Any, out_smems: Any, full: Any) -> None:
            def slot_barrier(slot: Any) -> Any:
                return full.at[warpgroup * config.num_stages + slot]

            def load(tile: Any, slot: Any) -> None:
                for gmem, smem in zip(in_gmems, in_smems, strict=True):
                    plgpu.copy_gmem_to_smem(
                        gmem.at[rows(tile)], smem.at[warpgroup, slot], slot_barrier(slot)
                    )

            # Fill every slot first; from then on a tile's slot is refilled when the tile is done.
            for slot in range(config.num_stages):

                @pl.when(slot < count)
                def _(slot: int = slot) -> None:
                    load(slot, slot)

            def step(tile: Any, _: tuple[()]) -> tuple[()]:
                slot = lax.rem(tile, config.num_stages)
                out_slot = lax.rem(tile, SLOTS)
                plgpu.barrier_wait(slot_barrier(slot))
                # The tile that last used these results' memory.
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                outs = [smem.at[warpgroup, out_slot] for smem in out_smems]
                compute(*(smem.at[warpgroup, slot] for smem in in_smems), *outs)
                plgpu.commit_smem()
                for n, (gmem, out) in enumerate(zip(out_gmems, outs, strict=True), 1):
                    # One commit group for all results of a tile, because waits count groups.
                    is_last = n == len(outs)
                    plgpu.copy_smem_to_gmem(out, gmem.at[rows(tile)], commit_group=is_last)

                # `commit_smem` was a barrier: every thread has read the tile, so its slot may be
                # overwritten.
                @pl.when(tile + config.num_stages < count)
                def _() -> None:
                    load(tile + config.num_stages, slot)

                return ()

            lax.fori_loop(0, count, step, ())
            # The last copies out read this block's shared memory, which ends with the block.
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            scope,
            [_shared((config.num_warpgroups, config.num_stages), array, width) for array in arrays],
            [_shared((config.num_warpgroups, SLOTS), out, width) for out in out_types],
            plgpu.Barrier(
                num_arrivals=len(arrays), num_barriers=config.num_warpgroups * config.num_stages
            ),
            collective_axes="warpgroup",
        )

    call: Any = pl.kernel(
        body,
        out_type=list(out_types),
        mesh=plgpu.Mesh(
            grid=(num_blocks,),
            grid_names=("block",),
            num_threads=config.num_warpgroups,
            thread_name="warpgroup",
        ),
        # A row is on four threads of one warp, so its maximum needs no scratch memory, which all
        # warpgroups would share.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=0
        ),
        name=name,
    )
    return list(call(*arrays))


def _shared(slots: tuple[int, int], array: Any, width: int | None) -> Any:
    """Return shared memory for tiles of an array."""
    if array.ndim == 1:
        return plgpu.SMEM((*slots, ROWS), array.dtype)
    return swizzled((*slots, ROWS, array.shape[1]), array.dtype, width)
