"""`linear_cross_entropy` for Hopper, in Pallas Mosaic GPU: logits in registers, slopes in shared
memory, and neither beyond.

    forward    one kernel    statistics of each token, 16 bytes a part of the vocabulary        1 product
    backward   dx, then dw   each computes the logits that it needs again, by tiles             4 products

`mosaic_forward` and `mosaic_backward` hold the kernels, `ring` the loads that both hide behind
products. Products are of the inputs' dtype, on tensor cores (wgmma), summed in float32; what is
done with the logits is the reference's own arithmetic.

What is traded. Logits are computed three times, where XLA's loops with one pass of backward compute
them twice; one kernel for both gradients would have to add to one of them from many blocks at once,
with atomic operations, in an order that changes from run to run. Sums of a gradient lie in global
memory in float32, 4 * 128 * D bytes a core (264 MiB on an H200 at D = 4096), and are read and
written once for 512 columns or tokens (`kernel_config` counts it). XLA's tiles are wider, 2048, and
cuBLAS multiplies them: whether the kernels are faster is for a GPU to say. Until those of backward
are wider than COLUMNS and keep their sums out of memory nobody takes them who does not ask
(`KernelConfig.backward`): backward is XLA's loops.

What there was, and whether it serves (read in 2026):

- tokamax's `linear_softmax_cross_entropy_loss` has a Hopper kernel forward: dims that its blocks
  divide, bfloat16 alone (others are cast to it), a log-sum-exp for each tile of columns instead of
  online, labels' columns gathered outside as float32[D, T]. Its backward kernel adds to both
  gradients with atomic operations and is not used: backward is XLA's, on float32 copies. No
  smoothing, z-loss, softcap, ignored labels or float16.
- jax ships no such op: of `jax.experimental.pallas.ops.gpu`, attention has the online softmax, and
  `hopper_matmul_mgpu` the product with an epilogue a tile, which sees one tile's columns.

Over a mesh (`split`) each device runs the kernels on its tokens and its columns of the vocabulary,
and what is joined is joined as XLA's loops have it. Where dw goes to shards of V it is transposed
for that, which is a copy. A matrix that rests on shards of D, or of V over axes of the tokens, is
gathered by XLA's loops alone.

Edges. T may be any multiple of 8, and D and V any of 64; others are padded with zeros before the
kernels, which copies the operand, and the gradient where 128 does not divide T or V, or 64 D.
Columns beyond V count nothing, tokens beyond T have weight 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.linear_cross_entropy import mosaic_backward, mosaic_forward
from pallas_kernels.linear_cross_entropy.kernel_config import COLUMNS, ROWS, KernelConfig
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.split import Split
from pallas_kernels.linear_cross_entropy.sweep import Sweep
from pallas_kernels.linear_cross_entropy.xla import Stats, scaled
from pallas_kernels.shared_memory import TILE_ROWS

Array = jax.Array
NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def refusal(dtype: Any, target: Target, split: Split | None, num_tiles: int | None) -> str | None:
    """Tell why the kernels cannot serve a call, or None."""
    if dtype not in NARROW:
        return f"it multiplies bfloat16 and float16, not {dtype}"
    if split is not None and split.gathered:
        return f"w rests split over {', '.join(split.gathered)}, and XLA's loops gather it, a tile at a time"
    if num_tiles is not None:
        return f"num_tiles={num_tiles} is of XLA's loops; a KernelConfig has the kernels' sizes"
    return target.without_hopper()


@functools.partial(jax.jit, static_argnames=("form", "config"))
def forward(form: Form, config: KernelConfig, x: Array, w: Array, labels: Array) -> Stats:
    """Return the statistics, float32[T] each, of the logits of x[T, D] and w[D, V]: columns of the
    vocabulary, or all of it.

    A label is a place among these columns, or none of theirs.
    """
    tokens, columns = len(x), w.shape[1]
    padded = -(-tokens // ROWS) * ROWS
    num_parts = config.parts_of(tokens, x.shape[1], columns)
    out_type = _typed((num_parts, mosaic_forward.STATS, padded), jnp.float32, x, w, labels)
    labels = _pad(labels, (padded - tokens,), -1)
    parts = mosaic_forward.stats(form, config, *_whole(x, w), columns, labels, out_type)[
        ..., :tokens
    ]  # [P, 4, T]
    stats = Stats(*(parts[:, n] for n in range(mosaic_forward.STATS)))  # [num_parts, T]
    # Parts are joined as tiles are: sums of exponentials are brought to the largest maximum.
    largest = stats.max.max(0)
    total = (stats.sum * jnp.exp(stats.max - largest)).sum(0)
    return Stats(largest, total, stats.of_label.sum(0), stats.total.sum(0))


@functools.partial(jax.jit, static_argnames=("form", "config"))
def backward(
    form: Form, config: KernelConfig, x: Array, w: Array, labels: Array, lse: Array, weight: Array
) -> tuple[Array, Array]:
    """Return dx[T, D], of these columns alone, and dw[D, V].

    Args:
      form: of the loss.
      config: sizes.
      x: `[T, D]`.
      w: `[D, V]`.
      labels: `[T]`, as forward's.
      lse: float32[T], of all columns.
      weight: float32[T], the cotangent of each token's loss; 0 where a token counts nothing.
    """
    weight, unit = scaled(weight, x.dtype)
    return (
        _gradient(form, config, True, x, w, (labels, lse, weight), unit),
        _gradient(form, config, False, x, w, (labels, lse, weight), unit),
    )


def _gradient(
    form: Form,
    config: KernelConfig,
    of_x: bool,
    x: Array,
    w: Array,
    tokens: tuple[Array, ...],
    unit: Array,
) -> Array:
    whole_x, whole_w = _whole(x, w)
    sweep = Sweep(config, of_x, whole_x.shape[0], whole_x.shape[1], whole_w.shape[1], w.shape[1])
    out_types = [_typed(sweep.out_shape, x.dtype, x, w, *tokens)]
    if sweep.num_groups > 1:
        out_types.append(_typed(sweep.sums_shape, jnp.float32, x, w, *tokens))
    # Tokens of padding have weight 0 and a finite log-sum-exp, 0: their slopes are 0 and not NaN.
    tokens = tuple(_pad(each, (sweep.num_tokens - len(x),)) for each in tokens)
    gradient = mosaic_backward.gradient(
        form, sweep, whole_x, whole_w, tokens, unit.reshape(1), out_types
    )
    rows, columns = (x if of_x else w).shape
    return gradient[:rows, :columns]


def _whole(x: Array, w: Array) -> tuple[Array, Array]:
    """Return x and w with dims as TMA and the swizzle of shared memory take them."""
    more_d = -x.shape[1] % COLUMNS
    return _pad(x, (-x.shape[0] % TILE_ROWS, more_d)), _pad(w, (more_d, -w.shape[1] % COLUMNS))


def _pad(array: Array, more: tuple[int, ...], value: int = 0) -> Array:
    return (
        jnp.pad(array, [(0, count) for count in more], constant_values=value)
        if any(more)
        else array
    )


def _typed(shape: tuple[int, ...], dtype: Any, *arrays: Array) -> Any:
    """Return the type of a kernel's result; in a `jax.shard_map` it tells over which axes the value
    varies: the arguments'.
    """

    def made_of(*arrays: Array) -> Array:
        # A sum of one element of each array varies over the axes of all of them.
        return functools.reduce(
            jnp.add, (a.ravel()[0].astype(dtype) for a in arrays), jnp.zeros(shape, dtype)
        )

    return jax.eval_shape(made_of, *arrays)
