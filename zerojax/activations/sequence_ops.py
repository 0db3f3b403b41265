"""The two operations of sequence parallelism, and how their equations are recognized.

    gather     z[B, T_tensor, H] -> z[B, T, H]               an all_gather; transposed, a
                                                             reduce_scatter
    scatter    y[B, T, H]{U_tensor} -> y[B, T_tensor, H]     a reduce_scatter; transposed, an
                                                             all_gather

Both define their transposes explicitly: from forward constraints alone, the partitioner would
gather cotangents once per product that reads them. A gather's result is never saved for backward,
while a scatter's result is: `is_gather` and `is_scatter` identify them for the code that chooses
the values to save.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding import TENSOR, Spec, without_axes

Array = jax.Array
GATHER = "zerojax_gather_sequence"
SCATTER = "zerojax_scatter_sequence"
"""Names inside of the equations that identify them."""


def gather_sequence(x: Array, spec: Spec, mesh: Mesh, copies: bool = False) -> Array:
    """All-gather over `tensor`, x[B, T_t, H] -> x[B, T, H]; its transpose is one reduce_scatter.

    Args:
      x: array split by `spec`.
      spec: spec with `tensor` in the gathered dim.
      mesh: the device mesh.
      copies: whether to return [t_tensor, B, T, H], the copies of the devices of a tensor group as
        entries of an array. Cotangents that a loop sums are then summed on each device and reduced
        after the loop, instead of in each iteration.
    """
    gathered = without_axes(spec, TENSOR)

    def forward(x: Array) -> Array:
        y = constrain(constrain(x, spec, mesh), gathered, mesh)
        return checkpoint_name(_repeated(y, gathered, mesh) if copies else y, GATHER)

    op = jax.custom_jvp(forward)

    @op.defjvp
    def op_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        # The transpose of a constraint is the same constraint on the cotangent; the transpose of a
        # repetition is a sum.
        tangent = constrain(tangents[0], spec, mesh)
        return op(*primals), _repeated(tangent, gathered, mesh) if copies else tangent

    return op(x)


def scatter_sequence(y: Array, spec: Spec, mesh: Mesh, copies: int | None = None) -> Array:
    """Reduce-scatter over `tensor`, y[B, T, H]{U_t} -> y[B, T_t, H]; transposed, one all_gather.

    Args:
      y: product of which each device of a tensor group has a partial sum, or a complete value.
      spec: spec of the result.
      mesh: the device mesh.
      copies: dim, of size t, that holds the partial sums as entries; None if y is a single value.
    """
    gathered = without_axes(spec, TENSOR)

    def total(y: Array) -> Array:
        if copies is None:
            return y
        # lax.reduce, since jnp.sum would widen 16 bits and send twice the bytes. JAX can transpose
        # it because the initial value is a known zero.
        return jax.lax.reduce(y, np.zeros((), y.dtype), jax.lax.add, (copies,))

    op = jax.custom_jvp(lambda y: checkpoint_name(constrain(total(y), spec, mesh), SCATTER))

    @op.defjvp
    def op_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        # Transposed from its end: the cotangent is constrained to the shard, then to the full
        # value. Without the barrier, the partitioner would take the residual's cotangent, which is
        # the same value, as a slice of the gathered value. XLA for GPUs may compile such a slice to
        # a collective-permute that names no devices, which would return zeros.
        tangent = jax.lax.optimization_barrier(constrain(total(tangents[0]), gathered, mesh))
        return op(*primals), constrain(tangent, spec, mesh)

    return op(y)


def _repeated(y: Array, spec: Spec, mesh: Mesh) -> Array:
    """Return y, split by `spec`, as entries [t_tensor, ...]; no device holds more than before."""
    entries = jnp.broadcast_to(y, (mesh.shape[TENSOR], *y.shape))
    return constrain(entries, (TENSOR, *spec), mesh)


def constrain(x: Array, spec: Sequence[Any], mesh: Mesh) -> Array:
    """Return x with a spec as its sharding."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def is_gather(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a `gather_sequence`, whose result is never kept."""
    return is_gather_call(eqn.primitive.name, eqn.params)


def is_scatter(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a `scatter_sequence`, saved instead of its operand."""
    return eqn.primitive.name == "custom_jvp_call" and _holds_name(eqn.params, SCATTER)


def is_gather_call(name: str, params: dict[str, Any]) -> bool:
    """Return `is_gather` for a primitive's name and params, as passed to a checkpoint's policy."""
    return name == "custom_jvp_call" and _holds_name(params, GATHER)


def _holds_name(params: dict[str, Any], name: str) -> bool:
    for jaxpr in jex.jaxprs_in_params(params):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name" and eqn.params["name"] == name:
                return True
    return False
