"""Keep the order of operations that XLA must not change inside a program.

On GPUs an `optimization_barrier` states the order. XLA for CPUs removes barriers before it
schedules. There, an operation is made to depend on a value of the operation before it. This costs
one scalar operation and changes no number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array


def wait_for(begin: Array, values: Any, mesh: Mesh) -> tuple[Array, Any]:
    """Return `begin` and `values`; users of the returned `begin` run after `values` are computed.

    XLA for CPUs drops barriers. There, a zero is added to `begin`. The zero is computed from one of
    the values in a way that XLA cannot simplify: it does not simplify `x != x`, which is true for
    NaN, nor expressions made from it.

    Args:
      begin: i32 array, such as the i32[] zero that says when a loop may begin, or the token of a
        callback.
      values: a tree of arrays.
      mesh: the device mesh of the program.
    """
    begin, values = jax.lax.optimization_barrier((begin, values))
    if not adds_order(mesh):
        return begin, values
    array = next((a for a in jax.tree.leaves(values) if a.size), None)
    if array is None:
        return begin, values
    # One element suffices, because an array becomes available as a unit.
    never = is_never(jnp.ravel(array)[0])
    return begin + never.astype(begin.dtype), values


def adds_order(mesh: Mesh) -> bool:
    """Return whether an index must depend on the operations before it: on CPUs.

    XLA for CPUs does not keep barriers.
    """
    return mesh.devices.flat[0].platform == "cpu"


@jax.jit
def is_never(value: Array) -> Array:
    """Return False, computed from a number in a way that XLA for CPUs cannot simplify.

    It is a separate function because `zerojax.program.call_order` recognizes the result by its
    name.
    """
    if jnp.issubdtype(value.dtype, jnp.floating):
        return (value != value) & (value == value)
    # XLA simplifies the expression above for integers. A token is the number of a state, or 0, so
    # it is never this minimum.
    return value == jnp.iinfo(value.dtype).min


def order_read_before_write(
    ok: Array, update: Callable[[Any], Any], keep: Callable[[Any], Any], values: Any, mesh: Mesh
) -> tuple[Any, Any, Any]:
    """Return `update(values)` if `ok`, else `keep(values)`, ordered after reads and before writes.

    The reads made `values`, and the writes store the result. If a stack is read and then updated in
    place, XLA must know this order, or it copies the stack in every tick. XLA for GPUs keeps the
    order with barriers. XLA for CPUs drops them, and fuses slices of the stack into their users;
    but it does not fuse through a branch.

    Args:
      ok: bool[], whether to update.
      update: function values -> (weights, optimizer state, landing), where `landing` only passes
        through.
      keep: function like `update`, but without an update.
      values: the values that were read.
      mesh: the device mesh.
    """
    if adds_order(mesh):
        return jax.lax.cond(ok, lambda v: _opaque(update(v)), lambda v: _opaque(keep(v)), values)
    # One barrier after the reads, one before the writes.
    values = jax.lax.optimization_barrier(values)
    *updated, landing = update(values)
    *unchanged, _ = keep(values)
    chosen = jax.tree.map(lambda new, old: jnp.where(ok, new, old), updated, unchanged)
    return jax.lax.optimization_barrier((*chosen, landing))


def _opaque(results: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return the results of a branch; `landing` only passes through it.

    XLA moves computations that both branches share out of them. So `landing` passes through a
    select that XLA cannot simplify.
    """
    *values, landing = results

    def same(a: Array) -> Array:
        if not a.size:
            return a
        first = jnp.ravel(a)[0]
        return jnp.where((first != first) & (first == first), jnp.zeros_like(a), a)

    return *values, jax.tree.map(same, landing)  # pyright: ignore[reportReturnType]
