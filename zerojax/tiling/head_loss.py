"""The loss of a language model's head without its logits, split over the program's mesh.

    x[B_(data, fsdp), S, D], labels[B_(data, fsdp), S]    tokens are split like the batch
    w[D, V] -> w[D, V_tensor]                             each device of a tensor group takes its
                                                          columns of the vocabulary
    dw[D, V]{U_data, U_fsdp} -> dw[D_fsdp, V_tensor]      a reduce_scatter, then a psum over
                                                          replicas, as for any parameter

The op itself, and a comparison with other implementations, is in
`pallas_kernels.linear_cross_entropy`; this module adds the mesh. It uses the mesh in scope, which
inside of a train step is the program's. In a step w arrives gathered, like every parameter, and its
gradient is scattered to the shards. Elsewhere w may be stored in shards: given as `w_spec`, it is
gathered one tile at a time, and no device holds it in full.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from pallas_kernels import linear_cross_entropy as op
from zerojax.sharding import (
    CONTEXT,
    FSDP,
    TENSOR,
    batch_axes,
    context_size,
    leaf_spec,
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
        `expert` x `context`.
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
    # `context` splits tokens too, so it may gather and scatter w, like the batch's axes.
    tokens = (*batch_axes(mesh), *((CONTEXT,) if context_size(mesh) > 1 else ()))
    if w_spec is not None or w.ndim != 2:
        split = op.Split(mesh, tokens, w_spec or PartitionSpec())
    else:
        tensor = mesh.shape.get(TENSOR, 1)
        columns = TENSOR if tensor > 1 and w.shape[1] % tensor == 0 else None
        gathered = PartitionSpec(None, columns)
        split = op.Split(mesh, tokens, gathered, grad_spec(w.shape, gathered, mesh))
    return op.linear_cross_entropy(x, w, labels, split=split, **options)


def grad_spec(shape: tuple[int, ...], gathered: PartitionSpec, mesh: Any) -> PartitionSpec:
    """Return the spec of the gradient of a gathered w[D, V]: split over `fsdp` like any leaf."""
    if FSDP not in mesh.axis_names:
        return gathered
    return PartitionSpec(*leaf_spec(shape, mesh, zero_axes(mesh), pad_spec(gathered, 2)).sharded)
