"""`linear_cross_entropy` for Hopper in Pallas Mosaic GPU.

Logits stay in registers and slopes in shared memory.

    forward    one kernel    statistics of each token, 16 bytes per vocabulary part   1 product
    backward   dx, then dw   each recomputes the logits it needs, by tiles            4 products

`mosaic_forward` and `mosaic_backward` hold the kernels; `ring` holds the loads, which both hide
behind products. Products are in the inputs' dtype, on tensor cores (wgmma), summed in float32. The
arithmetic on the logits is the reference's own code.

Trade-offs. Logits are computed three times, where XLA's loops with one backward pass compute them
twice. One kernel for both gradients would have to add to one of them from many blocks at the same
time with atomic operations, in an order that changes from run to run. A gradient's sums live in
global memory in float32, 4 * 128 * D bytes per core (264 MiB on an H200 at D = 4096), and are read
and written once per 512 columns or tokens (`kernel_config` counts it). XLA's tiles are wider, 2048,
and multiplied by cuBLAS; only a measurement on a GPU can show whether the kernels are faster. Until
backward's products are wider than COLUMNS and keep their sums out of memory, backward uses XLA's
loops unless `KernelConfig.backward` asks for the kernels.

Existing kernels (read in 2026):

- tokamax's `linear_softmax_cross_entropy_loss` has a Hopper kernel for forward. It needs dims that
  its blocks divide, supports only bfloat16 (other dtypes are cast to it), returns a log-sum-exp per
  tile of columns instead of an online one, and gathers the labels' columns outside as float32[D,
  T]. Its backward kernel adds to both gradients with atomic operations and is not used: backward
  runs in XLA, on float32 copies. It has no smoothing, z-loss, softcap, ignored labels or float16.
- jax ships no such op. In `jax.experimental.pallas.ops.gpu`, attention has the online softmax, and
  `hopper_matmul_mgpu` has the product with an epilogue per tile, which sees only one tile's
  columns.

Over a mesh (`split`) each device runs the kernels on its tokens and its columns of the vocabulary,
and the results are joined in the same way as for XLA's loops. If dw is sent to shards of V, it is
transposed first, which is a copy. A matrix stored in shards of D, or of V over axes of the tokens,
can only be gathered by XLA's loops.

Edges. T may be any multiple of 8, and D and V any multiple of 64. Other sizes are padded with zeros
before the kernels, which copies the operand. The gradient is copied too if 128 does not divide T or
V, or 64 does not divide D. Columns beyond V are ignored, and tokens beyond T have weight 0.
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
from pallas_kernels.linear_cross_entropy.xla import Stats, scale_weight
from pallas_kernels.shared_memory import TILE_ROWS

Array = jax.Array
NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def refusal(dtype: Any, target: Target, split: Split | None, num_tiles: int | None) -> str | None:
    """Return why the kernels cannot serve a call, or None if they can."""
    if dtype not in NARROW:
        return f"it multiplies bfloat16 and float16, not {dtype}"
    if split is not None and split.gathered:
        return (
            f"w is stored split over {', '.join(split.gathered)}, and only XLA's loops gather it, "
            "one tile at a time"
        )
    if num_tiles is not None:
        return f"num_tiles={num_tiles} is for XLA's loops; pass a KernelConfig to size the kernels"
    return target.without_hopper()


@functools.partial(jax.jit, static_argnames=("form", "config"))
def forward(form: Form, config: KernelConfig, x: Array, w: Array, labels: Array) -> Stats:
    """Return the statistics, float32[T] each, of the logits x[T, D] @ w[D, V].

    w holds some or all columns of the vocabulary. Labels are indices into these columns; any other
    number matches none of them.
    """
    tokens = len(x)
    columns = w.shape[1]
    padded = -(-tokens // ROWS) * ROWS
    num_parts = config.count_parts(tokens, x.shape[1], columns)
    out_type = _result_type((num_parts, mosaic_forward.STATS, padded), jnp.float32, x, w, labels)
    labels = _pad(labels, (padded - tokens,), -1)
    x, w = _pad_operands(x, w)
    by_part = mosaic_forward.stats(form, config, x, w, columns, labels, out_type)  # [P, 4, T']
    by_part = by_part[..., :tokens]
    stats = Stats(*(by_part[:, n] for n in range(mosaic_forward.STATS)))  # [num_parts, T]
    # Join parts like tiles: rescale their sums of exponentials to the largest maximum.
    largest = stats.max.max(0)
    total = (stats.sum * jnp.exp(stats.max - largest)).sum(0)
    return Stats(largest, total, stats.label_logit.sum(0), stats.logit_sum.sum(0))


@functools.partial(jax.jit, static_argnames=("form", "config"))
def backward(
    form: Form, config: KernelConfig, x: Array, w: Array, labels: Array, lse: Array, weight: Array
) -> tuple[Array, Array]:
    """Return dx[T, D], which covers only these columns of the vocabulary, and dw[D, V].

    Args:
      form: options of the loss.
      config: sizes of the kernels.
      x: activations `[T, D]`.
      w: weight `[D, V]`.
      labels: `[T]`, indices into w's columns.
      lse: float32[T], each token's log-sum-exp over the full vocabulary.
      weight: float32[T], the cotangent of each token's loss; 0 for ignored tokens.
    """
    weight, unit = scale_weight(weight, x.dtype)
    per_token = (labels, lse, weight)
    dx = _gradient(form, config, True, x, w, per_token, unit)
    dw = _gradient(form, config, False, x, w, per_token, unit)
    return dx, dw


def _gradient(
    form: Form,
    config: KernelConfig,
    is_dx: bool,
    x: Array,
    w: Array,
    per_token: tuple[Array, ...],
    unit: Array,
) -> Array:
    """Return dx[T, D] or dw[D, V]."""
    rows, columns = (x if is_dx else w).shape
    padded_x, padded_w = _pad_operands(x, w)
    sweep = Sweep(
        config,
        is_dx=is_dx,
        tokens=padded_x.shape[0],
        hidden=padded_x.shape[1],
        vocab=padded_w.shape[1],
        columns=w.shape[1],
    )
    out_types = [_result_type(sweep.out_shape, x.dtype, x, w, *per_token)]
    if sweep.num_groups > 1:
        out_types.append(_result_type(sweep.sums_shape, jnp.float32, x, w, *per_token))
    # Padding tokens have weight 0 and a finite log-sum-exp of 0, so their slopes are 0 and not NaN.
    padded_tokens = tuple(_pad(array, (sweep.num_tokens - len(x),)) for array in per_token)
    gradient = mosaic_backward.gradient(
        form, sweep, padded_x, padded_w, padded_tokens, unit.reshape(1), out_types
    )
    return gradient[:rows, :columns]


def _pad_operands(x: Array, w: Array) -> tuple[Array, Array]:
    """Return x and w padded to dims that TMA and the swizzle of shared memory accept."""
    more_d = -x.shape[1] % COLUMNS
    return _pad(x, (-x.shape[0] % TILE_ROWS, more_d)), _pad(w, (more_d, -w.shape[1] % COLUMNS))


def _pad(array: Array, more: tuple[int, ...], value: int = 0) -> Array:
    """Return an array with `more` elements behind each dim, all equal to `value`."""
    if not any(more):
        return array
    return jnp.pad(array, [(0, count) for count in more], constant_values=value)


def _result_type(shape: tuple[int, ...], dtype: Any, *arrays: Array) -> Any:
    """Return the type of a kernel's result.

    In a `jax.shard_map` the type includes the axes over which the value varies: all axes over which
    any of `arrays` varies.
    """

    def sum_elements(*arrays: Array) -> Array:
        # A sum of one element per array varies over the axes of all arrays.
        total = jnp.zeros(shape, dtype)
        for array in arrays:
            total = total + array.ravel()[0].astype(dtype)
        return total

    return jax.eval_shape(sum_elements, *arrays)
