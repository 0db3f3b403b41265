"""Orders of operations that XLA must keep inside of a program.

On GPUs an `optimization_barrier` states the order. XLA for CPUs removes barriers before it
schedules. There an operation is made to depend on a value of what comes before it: this costs a
scalar operation, and changes no number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array


def wait_for(begin: Array, values: Any, mesh: Mesh) -> tuple[Array, Any]:
    """Return `begin` and `values`. What depends on the returned `begin` comes after `values`.

    XLA for CPUs drops barriers. There a zero is added to `begin` that is computed from one of the
    values in a way that XLA does not see through: it does not simplify `x != x`, which holds for
    NaN, nor what is made of it.

    Args:
      begin: i32, such as the i32[] zero that says when a loop may begin, or the token of a
        callback.
      values: a tree of arrays.
      mesh: of the program.
    """
    begin, values = jax.lax.optimization_barrier((begin, values))
    if not adds_order(mesh):
        return begin, values
    array = next((a for a in jax.tree.leaves(values) if a.size), None)
    if array is None:
        return begin, values
    # One element will do: an array is there as a whole.
    never = is_never(jnp.ravel(array)[0])
    return begin + never.astype(begin.dtype), values


def adds_order(mesh: Mesh) -> bool:
    """Return whether an index has to depend on what comes before it, since XLA keeps no barriers:
    on CPUs.
    """
    return mesh.devices.flat[0].platform == "cpu"


@jax.jit
def is_never(value: Array) -> Array:
    """Return False, computed from a number in a way that XLA for CPUs does not see through.

    A function of its own, by whose name `zerojax.program.call_order` knows the result.
    """
    if jnp.issubdtype(value.dtype, jnp.floating):
        return (value != value) & (value == value)
    # Of integers XLA knows the above; a token is the number of a state, or 0.
    return value == jnp.iinfo(value.dtype).min


def order_read_before_write(
    ok: Array, update: Callable[[Any], Any], keep: Callable[[Any], Any], values: Any, mesh: Mesh
) -> tuple[Any, Any, Any]:
    """Return `update(values)` if `ok`, else `keep(values)`, between the reads that made `values`
    and the writes of the result.

    Where a stack is read and then updated in place, XLA must know that order, or it copies the
    stack in every tick. XLA for GPUs keeps it by barriers. XLA for CPUs drops them, and merges
    slices of the stack into what uses them; but it does not merge what goes through a branch.

    Args:
      ok: bool[].
      update: values -> (weights, optimizer state, landing), of which `landing` only passes through.
      keep: values -> the same without an update.
      values: what was read.
      mesh: the device mesh.
    """
    if adds_order(mesh):
        return jax.lax.cond(ok, lambda v: _opaque(update(v)), lambda v: _opaque(keep(v)), values)
    # One barrier after the reads, one before the writes.
    values = jax.lax.optimization_barrier(values)
    *updated, landing = update(values)
    *kept, _ = keep(values)
    chosen = jax.tree.map(lambda a, b: jnp.where(ok, a, b), updated, kept)
    return jax.lax.optimization_barrier((*chosen, landing))


def _opaque(results: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return the results of a branch, of which `landing` only passes through it.

    XLA moves what both branches compute alike out of them. So `landing` goes through a select that
    XLA cannot simplify.
    """
    *values, landing = results

    def same(a: Array) -> Array:
        if not a.size:
            return a
        first = jnp.ravel(a)[0]
        return jnp.where((first != first) & (first == first), jnp.zeros_like(a), a)

    return *values, jax.tree.map(same, landing)  # pyright: ignore[reportReturnType]
