"""Products of tiles by `pallas_kernels.matmul`, on the mesh in scope.

    up      h[B_(data, fsdp), S, H_t/t] = f(x up + b)    one kernel: product, bias, activation, gate
    down    y[B_(data, fsdp), S, D]    += h down         one kernel, which adds to y in place

The partitioner cannot see into a kernel, so each kernel has a `jax.shard_map` of its own: rows of x
are split like batches, and columns over `tensor` if divisible. If `tensor` splits the summed dim,
each device adds up its own part over all tiles, in place, y[t_tensor, B, S, D]; the parts are added
after the loop, in one all_reduce in the dtype of x. The shard_map holds only forward. Backward uses
XLA's products and the partitioner's collectives, like a dense layer.
"""

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import matmul as op
from pallas_kernels.dispatch import Implementation
from zerojax.sharding import TENSOR, batch_axes, num_batch_shards

Array = jax.Array


def check_implementation(implementation: str | None, what: str) -> None:
    """Raise ValueError unless `implementation` is a name in `pallas_kernels` or None.

    `what` is the caller's name, for the message.
    """
    names = get_args(Implementation)
    if implementation is not None and implementation not in names:
        raise ValueError(
            f"{what}: implementation={implementation!r} is unknown: choose from "
            f"{', '.join(names)}, or None"
        )


def check_activation(activation: Any, what: str) -> None:
    """Raise ValueError unless `activation` is a function; `what` is the caller's name."""
    if not callable(activation):
        raise ValueError(
            f"{what}: activation={activation!r}: a function is needed, such as jax.nn.gelu"
        )


def find_kernel_name(activation: Callable[[Array], Array]) -> str | None:
    """Return the kernel's name of an activation, or None if the kernel does not have it.

    An activation without a name is applied after the kernel.
    """
    is_partial = isinstance(activation, functools.partial)
    if is_partial and activation.func is jax.nn.gelu and not activation.args:
        return "gelu" if activation.keywords == {"approximate": True} else None
    return {jax.nn.gelu: "gelu", jax.nn.silu: "silu"}.get(activation)


def product(
    x: Array,
    w: Array | tuple[Array, Array],
    bias: Any = None,
    activation: str | None = None,
    accumulate: Array | None = None,
    *,
    implementation: Implementation | None,
    columns: str | None = None,
    summed: str | None = None,
    preferred_element_type: Any = None,
) -> Array:
    """Return `pallas_kernels.matmul.matmul` of x[..., K] and w[K, N], split over the mesh in scope.

    Args:
      x: activations `[..., K]`. Dim 0 is split over `data` and `fsdp` if divisible; otherwise every
        device has all rows.
      w: weight `[K, N]`, cast to x's dtype. A pair makes a gated product.
      bias: `[N]`; one per weight.
      activation: name of the activation, or None.
      accumulate: float32 array to which the product is added, or None.
      implementation: "mosaic", "xla", "reference" or None, as for `pallas_kernels.matmul.matmul`.
      columns: mesh axis that splits N if divisible, or None.
      summed: mesh axis that splits K if divisible, or None. If it does, the result and `accumulate`
        are the parts of the sum, [t_tensor, ..., N].
      preferred_element_type: dtype of the result.

    Raises:
      NotImplementedError: the named implementation does not support this call.
    """
    w, split = _cast_and_split(x, w, columns, summed)
    options = {"preferred_element_type": preferred_element_type, "split": split}
    return op.matmul(x, w, bias, activation, accumulate, implementation, **options)


def measured_faster(use: Callable[..., Any], *args: Any) -> bool:
    """Return whether, by measurement on this device, the kernel is faster for a product of `use`.

    `use(run, *args)` computes its products by `run`, which is `product` without an implementation.
    It is only traced; nothing is computed.
    """
    if not op.is_measured(*jax.tree.leaves(args)):
        return False
    answers = []

    def run(
        x: Array,
        w: Any,
        *terms: Any,
        columns: str | None = None,
        summed: str | None = None,
        **options: Any,
    ) -> Array:
        cast_w, split = _cast_and_split(x, w, columns, summed)
        answers.append(op.is_faster(x, cast_w, *terms, **options, split=split))
        return product(
            x, w, *terms, implementation="xla", columns=columns, summed=summed, **options
        )

    jax.eval_shape(functools.partial(use, run), *args)
    return any(answers)


def _cast_and_split(
    x: Array, w: Any, columns: str | None, summed: str | None
) -> tuple[Any, op.Split | None]:
    """Return w in x's dtype, and how the mesh in scope splits the product; see `product`."""
    w = jax.tree.map(lambda a: a.astype(x.dtype), w)
    first = w[0] if isinstance(w, tuple) else w
    return w, _split(x, first.shape, columns, summed)


def _split(
    x: Array, shape: tuple[int, ...], columns: str | None, summed: str | None
) -> op.Split | None:
    """Return how the mesh in scope splits a product of x and a weight of this shape."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    # Under shard_map (manual axes) the arrays are already one device's.
    if mesh.empty or mesh.size == 1 or getattr(mesh, "manual_axes", ()):
        return None
    has_rows = x.ndim > 1 and x.shape[0] % num_batch_shards(mesh) == 0

    def axes(axis: str | None, size: int) -> tuple[str, ...]:
        count = 1 if axis is None else mesh.shape.get(axis, 1)
        return (axis,) if axis is not None and count > 1 and size % count == 0 else ()

    rows = batch_axes(mesh) if has_rows else ()
    return op.Split(mesh, rows, axes(columns, shape[1]), axes(summed, shape[0]))


def joined(y: Array, ndim: int, dtype: Any) -> Array:
    """Return a product with `ndim` dims in `dtype`.

    If y is the parts of a sum, [t_tensor, ..., N], add them.
    """
    y = y.astype(dtype)
    # lax.reduce, since jnp.sum would widen 16 bits and send twice the bytes. JAX can transpose it
    # because the initial value is a known zero.
    return y if y.ndim == ndim else jax.lax.reduce(y, np.zeros((), dtype), jax.lax.add, (0,))


def tensor_dims(spec: Any) -> tuple[str | None, str | None]:
    """Return the axes that split the columns and the summed dim of W[D, F], given its annotation.

    Only `tensor` counts: shards of other axes are gathered before a tile is used.
    """
    summed, columns = (*(spec or ()), None, None)[:2]
    return TENSOR if columns == TENSOR else None, TENSOR if summed == TENSOR else None


def use_mlp(
    run: Callable[..., Array],
    tile: Any,
    x: Array,
    activation: Callable[[Array], Array],
    total: Array | None = None,
) -> Array:
    """Return the result of one tile of an MLP's hidden dim, added to `total`.

    It is float32 [..., S, D], or the parts of a sum over `tensor`.

    Args:
      run: `product`, with an implementation bound.
      tile: "up"[D, h], "down"[h, D], and optionally "gate", "up_bias" and "gate_bias".
      x: activations [..., S, D].
      activation: activation function of the hidden layer.
      total: sum so far, shaped like the result; a kernel overwrites it. None if there is no sum
        yet.
    """
    name = find_kernel_name(activation)

    def bias(*names: str) -> tuple[Array, ...] | None:
        return tuple(tile[n] for n in names) if names[0] in tile else None

    if "gate" in tile and name is not None:
        hidden = run(
            x, (tile["gate"], tile["up"]), bias("gate_bias", "up_bias"), name, columns=TENSOR
        )
    elif "gate" in tile:
        gate = run(x, tile["gate"], bias("gate_bias"), columns=TENSOR)
        hidden = activation(gate) * run(x, tile["up"], bias("up_bias"), columns=TENSOR)
    else:
        hidden = run(x, tile["up"], bias("up_bias"), name, columns=TENSOR)
        hidden = hidden if name is not None else activation(hidden)
    return run(
        hidden, tile["down"], None, None, total, summed=TENSOR, preferred_element_type=jnp.float32
    )
