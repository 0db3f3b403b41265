"""The loss of a language model's head without its logits, split over the program's mesh.

    x[B_(data, fsdp), S, D], labels[B_(data, fsdp), S]    tokens are split like the batch
    w[D, V] -> w[D, V_tensor]                             each device of a tensor group takes its
                                                          columns of the vocabulary
    dw[D, V]{U_data, U_fsdp} -> dw[D_fsdp, V_tensor]      a reduce_scatter, then a psum over
                                                          replicas, as for any parameter

`context`, and in a pipeline `pipe`, split tokens too, in dim 1 of x. The op takes a flat list of
tokens, so they are first brought into an order in which each device's tokens are neighbors:

    x[B_(data, fsdp), S_(context, pipe), D] -> x[T_(data, fsdp, context, pipe), D]

The op itself, and a comparison with other implementations, is in
`pallas_kernels.linear_cross_entropy`; this module adds the mesh. It uses the mesh in scope, which
inside of a train step is the program's. In a step w arrives gathered, like every parameter, and its
gradient is scattered to the shards. Elsewhere w may be stored in shards: given as `w_spec`, it is
gathered one tile at a time, and no device holds it in full.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels import linear_cross_entropy as op
from zerojax.sharding import (
    CONTEXT,
    FSDP,
    PIPE,
    TENSOR,
    batch_axes,
    context_size,
    leaf_spec,
    num_batch_shards,
    num_stages,
    pad_spec,
    zero_axes,
)


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    mesh: Any = None,
    w_spec: PartitionSpec | None = None,
    **options: Any,
) -> jax.Array:
    """Return the mean cross entropy of `x[..., D] @ w[D, V]` with the labels >= 0.

        loss = zj.linear_cross_entropy(x, w, labels)
        loss = zj.linear_cross_entropy(x, embedding.T, labels, z_loss=1e-4, softcap=30.0)

    The loss is in nats and float32, and differentiable in x and w. The logits `[..., V]` are never
    held in full. Tokens with negative labels are ignored; if no label counts, the loss is 0.

    Args:
      x: activations `[..., D]`: float32, bfloat16 or float16. On a mesh the number of its tokens,
        all dims but the last, must be divisible by the number of devices along `data` x `fsdp` x
        `expert` x `context`. In a pipeline the stages share the tokens if dim 1 divides by them.
      w: weight of the head, `[D, V]`, in x's dtype.
      labels: integers below V, with x's leading dims. A label >= V makes the loss NaN; see
        `check_labels`.
      mesh: mesh of `zj.make_mesh`; None takes the mesh in scope, if there is one.
      w_spec: spec of the shards in which w is stored, such as P("fsdp", "tensor"), to gather it one
        tile at a time. None: w is gathered, except that V is split over `tensor` if divisible.
      **options: `reduction`, `ignore_index`, `label_smoothing`, `z_loss`, `softcap`,
        `check_labels`, `num_tiles`, `implementation` and `config` of
        `pallas_kernels.linear_cross_entropy.linear_cross_entropy`.

    Raises:
      ValueError: dims, dtypes, options or axes do not fit.
      NotImplementedError: the named implementation does not support this call.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    manual = getattr(mesh, "manual_axes", ())
    # Under shard_map (manual axes) the arrays are already one device's, so the op runs as without a
    # mesh.
    if mesh.empty or mesh.size == 1 or manual or options.get("implementation") == "reference":
        if w_spec is not None and (mesh.empty or manual):
            raise ValueError(
                f"linear_cross_entropy: w_spec={w_spec} needs a mesh, and outside of any "
                "jax.shard_map"
            )
        return op.linear_cross_entropy(x, w, labels, **options)
    # These axes split tokens too, so they may gather and scatter w, like the batch's axes.
    sequence_axes = _list_sequence_axes(x.shape, mesh)
    tokens = (*batch_axes(mesh), *sequence_axes)
    if w_spec is not None or w.ndim != 2:
        split = op.Split(mesh, tokens, w_spec or PartitionSpec())
    else:
        tensor = mesh.shape.get(TENSOR, 1)
        columns = TENSOR if tensor > 1 and w.shape[1] % tensor == 0 else None
        gathered = PartitionSpec(None, columns)
        split = op.Split(mesh, tokens, gathered, grad_spec(w.shape, gathered, mesh, tokens))
    if not sequence_axes or not _divides(x.shape, mesh, sequence_axes):
        return op.linear_cross_entropy(x, w, labels, split=split, **options)
    order = _TokenOrder(num_batch_shards(mesh), _count(mesh, sequence_axes), labels.shape)
    losses = op.linear_cross_entropy(
        order.flatten(x), w, order.flatten(labels), split=split, **options
    )
    return order.restore(losses) if losses.ndim else losses


def _list_sequence_axes(shape: tuple[int, ...], mesh: Any) -> tuple[str, ...]:
    """Return the axes that split dim 1 of x besides those of the batch."""
    axes = (CONTEXT,) if context_size(mesh) > 1 else ()
    # Without this, all stages would compute the loss of all tokens.
    if num_stages(mesh) > 1 and _divides(shape, mesh, (*axes, PIPE)):
        axes = (*axes, PIPE)
    return axes


def _count(mesh: Any, axes: tuple[str, ...]) -> int:
    """Return the number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _divides(shape: tuple[int, ...], mesh: Any, axes: tuple[str, ...]) -> bool:
    """Return whether dims 0 and 1 of x[B, S, ..., D] divide by the batch's shards and by `axes`."""
    return (
        len(shape) >= 3
        and shape[0] % num_batch_shards(mesh) == 0
        and shape[1] % _count(mesh, axes) == 0
    )


@dataclasses.dataclass(frozen=True)
class _TokenOrder:
    """An order of tokens in which those of a device are neighbors.

    Attributes:
      rows: number of shards of dim 0.
      columns: number of shards of dim 1.
      shape: shape of the labels, [B, S, ...].
    """

    rows: int
    columns: int
    shape: tuple[int, ...]

    @property
    def _cut(self) -> tuple[int, ...]:
        batch, length, *_ = self.shape
        return (self.rows, batch // self.rows, self.columns, length // self.columns)

    def flatten(self, a: jax.Array) -> jax.Array:
        """Return the tokens of a[B, S, ..] as a flat list, a[T, ..], shard by shard."""
        rest = a.shape[2:]
        pieces = jnp.swapaxes(a.reshape(*self._cut, *rest), 1, 2)
        return pieces.reshape(-1, *a.shape[len(self.shape) :])

    def restore(self, losses: jax.Array) -> jax.Array:
        """Return a value of each token in the labels' shape, from those of a flat list."""
        rows, in_row, columns, in_column = self._cut
        pieces = losses.reshape(rows, columns, in_row, in_column, *self.shape[2:])
        return jnp.swapaxes(pieces, 1, 2).reshape(self.shape)


def grad_spec(
    shape: tuple[int, ...], gathered: PartitionSpec, mesh: Any, tokens: tuple[str, ...]
) -> PartitionSpec:
    """Return the spec of the gradient of a gathered w[D, V]: split over `fsdp` like any leaf.

    Args:
      shape: shape of w.
      gathered: spec of w.
      mesh: the mesh.
      tokens: axes that split the tokens, over which the gradient is summed.
    """
    if FSDP not in mesh.axis_names:
        return gathered
    axes = tuple(axis for axis in zero_axes(mesh) if axis in tokens)
    return PartitionSpec(*leaf_spec(shape, mesh, axes, pad_spec(gathered, 2)).sharded)
