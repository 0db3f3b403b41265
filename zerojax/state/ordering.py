"""Orders that XLA must keep: what waits for what inside a program."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array


def opaque(moved: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return the result of a branch, what only passes through it computed in a way that XLA does not see through."""
    *values, landing = moved

    def same(a: Array) -> Array:
        if not a.size:
            return a
        first = jnp.ravel(a)[0]
        return jnp.where((first != first) & (first == first), jnp.zeros_like(a), a)

    return *values, jax.tree.map(same, landing)  # pyright: ignore[reportReturnType]


Plan = Mapping[str, Array]
"""The int32 arrays of one phase."""
PlanT = TypeVar("PlanT", bound=Plan | Mapping[str, Plan] | Array)


def wait_for(plan: PlanT, values: Any, mesh: Mesh) -> tuple[PlanT, Any]:
    """Return i32 arrays, such as a phase's, known only when `values` are, and `values`: what reads them comes after those.

    XLA for CPUs drops barriers. There the arrays are computed from a value, in a way that it does not see through.
    """
    plan, values = jax.lax.optimization_barrier((plan, values))
    if mesh.devices.flat[0].platform != "cpu":
        return plan, values
    held = next((a for a in jax.tree.leaves(values) if a.size), None)
    if held is None:
        return plan, values
    first = jnp.ravel(held)[0]
    if jnp.issubdtype(held.dtype, jnp.floating):
        never = (first != first) & (first == first)
    else:  # of integers XLA knows the above; a token is the number of a state, or 0
        never = first == jnp.iinfo(held.dtype).min
    return jax.tree.map(lambda a: a + never.astype(a.dtype), plan), values
