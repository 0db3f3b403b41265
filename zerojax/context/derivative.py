"""An attention as one equation with a derivative of its own, outside of the islands.

    o, kept      = forward(q, k, v)          an island: a shard_map over all axes but `tensor`
    dq, dk, dv   = backward(kept, o, do)     another island

The rule is outside of the islands, so a traced layer has one equation for attention, which keeps o
and `kept`: what each device received, and log-sum-exp. Backward then sends nothing again that
forward sent (`zerojax.activations.split_vjp`). Inside of an island `tensor` is left to the
partitioner, which splits heads as the model's specs do.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.context.call import Call, Kept, Method, Operands, Saved
from zerojax.context.gathered import GATHER
from zerojax.context.local import LOCAL
from zerojax.context.ring import RING
from zerojax.context.ulysses import ULYSSES
from zerojax.sharding import CONTEXT, TENSOR

Array = jax.Array
_METHODS: dict[str, Method] = {
    "local": LOCAL,
    "ring": RING,
    "ulysses": ULYSSES,
    "gather": GATHER,
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, operands: Operands) -> Array:
    """Return attention's outputs [B, T, N, D], with the derivative that is spelt out here."""
    return _forward(call, operands)[0]


def _forward(call: Call, operands: Operands) -> tuple[Array, Kept]:
    """Return the outputs, and what backward reads as the method laid it out."""
    method = _METHODS[call.method]
    if call.method == "local":
        return method.forward(call, None, operands)
    return _island(call, partial(method.forward, call), operands)


def _forward_rule(call: Call, operands: Operands) -> tuple[Array, tuple[Operands, Array, Kept]]:
    o, kept = _forward(call, operands)
    return o, (kept.without_copies(operands), o, kept)


def _backward_rule(call: Call, residuals: tuple[Operands, Array, Kept], do: Array) -> tuple[Any]:
    operands, o, kept = residuals
    method = _METHODS[call.method]

    def run(place: Any, arrays: tuple[Saved, Array | None, Array, Array]) -> Any:
        saved, window, o, do = arrays
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
        return method.backward(call, place, saved, window, do, delta)

    arrays = (kept.filled(operands), operands.window, o, do)
    if call.method == "local":
        dq, dk, dv = run(None, arrays)
    else:
        dq, dk, dv = _island(call, run, arrays)
    return (Operands(dq, dk, dv, None, None),)


attend.defvjp(_forward_rule, _backward_rule)


def _island(call: Call, function: Any, arrays: Any) -> Any:
    """Return `function(place, arrays)`, run by each device on its shards.

    Arrays and results have the batch in dim 0 and are split over `context` in dim 1; scalars are
    whole. `place` is the device's place along `context`.
    """
    leaves, tree = jax.tree.flatten(arrays)
    manual = set(getattr(call.mesh, "manual_axes", ()))
    axes = {axis for axis in call.mesh.axis_names if axis != TENSOR} - manual

    def run(place: Array, *shards: Array) -> Any:
        return function(place[0], jax.tree.unflatten(tree, shards))

    return jax.shard_map(
        run,
        mesh=call.mesh,
        in_specs=(PartitionSpec(CONTEXT), *(_spec(call, a) for a in leaves)),
        out_specs=call.spec(2),
        axis_names=axes,
        check_vma=False,
    )(jax.lax.iota(jnp.int32, call.size), *leaves)


def _spec(call: Call, a: Array) -> PartitionSpec:
    return call.spec(a.ndim) if a.ndim else PartitionSpec()
