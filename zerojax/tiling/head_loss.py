"""The loss of a language model's head without its logits, split as the project splits everything
else.

    x[B_(data, fsdp), S, D], labels[B_(data, fsdp), S]      tokens as the batch is
    w[D, V] -> w[D, V_tensor]                               each device of a tensor group takes its columns of the vocabulary
    dw[D, V]{U_data, U_fsdp} -> dw[D_fsdp, V_tensor]        a reduce_scatter, then a psum over replicas, as for any parameter

The op itself, and what was compared, is `pallas_kernels.linear_cross_entropy`; this adds the mesh.
The mesh is that in scope, which is the program's inside a train step. In a step w arrives gathered,
as every parameter does, and its gradient leaves for the shards. Elsewhere w may rest on shards:
given as `w_spec`, it is gathered a tile at a time and never held whole.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from pallas_kernels import linear_cross_entropy as op
from zerojax.sharding import FSDP, TENSOR, batch_axes, leaf_spec, pad_spec


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    mesh: Any = None,
    w_spec: PartitionSpec | None = None,
    **options: Any,
) -> jax.Array:
    """Return the mean cross entropy of `x[..., D] @ w[D, V]` with the labels >= 0, never holding
    `[..., V]`.

        loss = zj.linear_cross_entropy(x, w, labels)
        loss = zj.linear_cross_entropy(x, embedding.T, labels, z_loss=1e-4, softcap=30.0)

    In nats and float32; differentiable in x and w. Tokens of negative labels count nothing; where
    none counts, the loss is 0.

    Args:
      x: float32, bfloat16 or float16. On a mesh its tokens, all dims but the last, divide by the
        devices of `data` x `fsdp`.
      w: of x's dtype.
      labels: integers below V, of x's leading dims. One of V or more makes the loss NaN; see
        `check_labels`.
      mesh: a mesh of `zj.make_mesh`; None is the one in scope, or none.
      w_spec: how w rests, such as P("fsdp", "tensor"), to be gathered a tile at a time. None:
        whole, V over `tensor` where it divides.
      **options: `reduction`, `ignore_index`, `label_smoothing`, `z_loss`, `softcap`,
        `check_labels`, `num_tiles`, `implementation` and `config` of
        `pallas_kernels.linear_cross_entropy.linear_cross_entropy`.

    Raises:
      ValueError: dims, dtypes, options or axes that do not fit.
      NotImplementedError: the named implementation does not serve this call.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    manual = getattr(mesh, "manual_axes", ())
    # Under shard_map (manual axes) the arrays are one device's already, so the op runs as it does
    # without a mesh.
    if mesh.empty or mesh.size == 1 or manual or options.get("implementation") == "reference":
        if w_spec is not None and (mesh.empty or manual):
            raise ValueError(
                f"linear_cross_entropy: w_spec={w_spec} needs a mesh, and outside of any jax.shard_map"
            )
        return op.linear_cross_entropy(x, w, labels, **options)
    tokens = batch_axes(mesh)
    if w_spec is not None or w.ndim != 2:
        split = op.Split(mesh, tokens, w_spec or PartitionSpec())
    else:
        tensor = mesh.shape.get(TENSOR, 1)
        whole = PartitionSpec(None, TENSOR if tensor > 1 and w.shape[1] % tensor == 0 else None)
        split = op.Split(mesh, tokens, whole, grad_spec(w.shape, whole, mesh))
    return op.linear_cross_entropy(x, w, labels, split=split, **options)


def grad_spec(shape: tuple[int, ...], whole: PartitionSpec, mesh: Any) -> PartitionSpec:
    """Return where the gradient of a gathered w[D, V] goes: to its shards, as leaves are split over
    `fsdp`.
    """
    if FSDP not in mesh.axis_names:
        return whole
    return PartitionSpec(*leaf_spec(shape, mesh, FSDP, pad_spec(whole, 2)).sharded)
