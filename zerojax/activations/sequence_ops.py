"""The two operations of sequence parallelism, and how an equation is known to be one of them.

    gather     z[B, T_tensor, H] -> z[B, T, H]               an all_gather; of a cotangent a reduce_scatter
    scatter    y[B, T, H]{U_tensor} -> y[B, T_tensor, H]     a reduce_scatter; of a cotangent an all_gather

Both spell out their transposes: from forward constraints alone the partitioner would gather
cotangents anew for each product that reads them. A gathered value is never kept for backward, and
of a scatter the result is: `is_gather` and `is_scatter` tell whoever chooses what is kept.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding import TENSOR, Spec, without_axis

Array = jax.Array
GATHER, SCATTER = "zerojax_gather_sequence", "zerojax_scatter_sequence"
"""Names inside of the equations, by which they are known."""


def gather_sequence(x: Array, spec: Spec, mesh: Mesh, copies: bool = False) -> Array:
    """All_gather over `tensor`: x[B, T_t, H] -> x[B, T, H]. Its transpose is one reduce_scatter.

    Args:
      x: split as `spec` says.
      spec: names `tensor` in the dim that is gathered.
      mesh: the device mesh.
      copies: return [t_tensor, B, T, H]: what each device of a tensor group holds, as entries of an
        array. Cotangents that a loop sums are then summed on each device, and reduced after the
        loop; of one value they would be in each iteration.
    """
    whole = without_axis(spec, TENSOR)

    def forward(x: Array) -> Array:
        y = constrain(constrain(x, spec, mesh), whole, mesh)
        return checkpoint_name(_repeated(y, whole, mesh) if copies else y, GATHER)

    op = jax.custom_jvp(forward)

    @op.defjvp
    def op_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        # The transpose of a constraint is the same one, on the cotangent; that of a repetition is a
        # sum.
        tangent = constrain(tangents[0], spec, mesh)
        return op(*primals), _repeated(tangent, whole, mesh) if copies else tangent

    return op(x)


def scatter_sequence(y: Array, spec: Spec, mesh: Mesh, copies: int | None = None) -> Array:
    """Reduce_scatter over `tensor`: y[B, T, H]{U_t} -> y[B, T_t, H]. Its transpose is one
    all_gather.

    Args:
      y: a product, of which each device of a tensor group has a part of the sum; or a whole value.
      spec: of the result.
      mesh: the device mesh.
      copies: the dim, of size t, that holds the parts of the sum as entries; None where y is one
        value.
    """
    whole = without_axis(spec, TENSOR)

    def total(y: Array) -> Array:
        if copies is None:
            return y
        # lax.reduce, since jnp.sum would widen 16 bits, and send twice the bytes. With a known zero
        # JAX can transpose it.
        return jax.lax.reduce(y, np.zeros((), y.dtype), jax.lax.add, (copies,))

    op = jax.custom_jvp(lambda y: checkpoint_name(constrain(total(y), spec, mesh), SCATTER))

    @op.defjvp
    def op_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        # Transposed from its end: the cotangent is pinned to the shard, then to the whole value.
        # Without the barrier the partitioner would take the residual's cotangent, which is the same
        # value, as a slice of the gathered one. Of such a slice XLA for GPUs may make a
        # collective-permute that names no devices, and so would give zeros.
        tangent = jax.lax.optimization_barrier(constrain(total(tangents[0]), whole, mesh))
        return op(*primals), constrain(tangent, spec, mesh)

    return op(y)


def _repeated(y: Array, whole: Spec, mesh: Mesh) -> Array:
    """Return [t_tensor, ...]: no device holds more than before."""
    return constrain(jnp.broadcast_to(y, (mesh.shape[TENSOR], *y.shape)), (TENSOR, *whole), mesh)


def constrain(x: Array, spec: Sequence[Any], mesh: Mesh) -> Array:
    """Return x with a spec as its sharding."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def is_gather(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a `gather_sequence`, whose result is never kept."""
    return is_gather_call(eqn.primitive.name, eqn.params)


def is_scatter(eqn: jex.JaxprEqn) -> bool:
    """Tell whether an equation is a `scatter_sequence`, whose result is kept in the place of its
    operand.
    """
    return eqn.primitive.name == "custom_jvp_call" and _holds_name(eqn.params, SCATTER)


def is_gather_call(name: str, params: dict[str, Any]) -> bool:
    """Return `is_gather` for what a checkpoint's policy is given of an equation."""
    return name == "custom_jvp_call" and _holds_name(params, GATHER)


def _holds_name(params: dict[str, Any], name: str) -> bool:
    inner = [eqn for jaxpr in jex.jaxprs_in_params(params) for eqn in jaxpr.eqns]
    return any(eqn.primitive.name == "name" and eqn.params["name"] == name for eqn in inner)
