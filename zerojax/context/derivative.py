"""An attention as one equation with a derivative of its own, outside of the islands.

    o, kept      = forward(q, k, v)          an island, a shard_map over the mesh
    dq, dk, dv   = backward(kept, o, do)     another island

The rule is outside of the islands, so a traced layer has one equation for attention, which keeps o
and `kept`: log-sum-exp, and q, k and v as the method laid them out. Backward then does not repeat
forward's exchange (`zerojax.activations.split_vjp`). Inside of an island, `tensor` is left to the
partitioner only if key heads do not divide by it: it gathers some arrays in loops over blocks.

A sink is one more score of a head, whose value is 0. It changes the sum of the softmax alone, so
the loops over blocks do not know it:

    lse' = log(exp(lse) + exp(sink)),    o' = o exp(lse - lse')
    d sink = -sum over B, T of exp(sink - lse') delta',    delta' = sum over D of do o'

Backward over the blocks is as without sinks, with lse' and delta'.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.context.call import Call, Kept, Method, Operands, Saved, vary, varying_over
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
def attend(call: Call, operands: Operands, sinks: Array | None = None) -> Array:
    """Return attention's outputs [B, T, N, D], with the derivative that is spelt out here.

    Args:
      call: the static part.
      operands: the arrays.
      sinks: one more score of each head [N], for the method "local"; or None.
    """
    return _forward(call, operands, sinks)[0]


def _forward(call: Call, operands: Operands, sinks: Array | None) -> tuple[Array, Kept]:
    """Return the outputs, and what backward reads as the method laid it out."""
    method = _METHODS[call.method]
    if call.method == "local":
        o, kept = method.forward(call, None, operands)
        return (o, kept) if sinks is None else _with_sinks(o, kept, sinks)
    tokens = call.spec(2)
    in_specs = Operands(tokens, tokens, tokens, call.spec(), PartitionSpec())  # pyright: ignore[reportArgumentType]
    return _island(call, method.forward, operands, in_specs, (tokens, _spec_kept(call, Kept)))


def _with_sinks(o: Array, kept: Kept, sinks: Array) -> tuple[Array, Kept]:
    """Return outputs, and what backward reads, with one more score of each head."""
    # A query that sees no key has a log-sum-exp of 0 and an output of 0, which stays.
    lse = jnp.logaddexp(kept.lse, sinks.astype(jnp.float32))  # [B, T, N]
    share = jnp.exp(kept.lse - lse)
    return (o * share[..., None]).astype(o.dtype), kept._replace(lse=lse)


def _forward_rule(
    call: Call, operands: Operands, sinks: Array | None = None
) -> tuple[Array, tuple[Operands, Array, Kept, Array | None]]:
    o, kept = _forward(call, operands, sinks)
    return o, (kept.without_copies(operands), o, kept, sinks)


def _backward_rule(
    call: Call, residuals: tuple[Operands, Array, Kept, Array | None], do: Array
) -> tuple[Any, Any]:
    operands, o, kept, sinks = residuals
    method = _METHODS[call.method]

    def run(call: Call, place: Any, arrays: tuple[Saved, Array | None, Array, Array]) -> Any:
        saved, window, o, do = arrays
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
        return method.backward(call, place, saved, window, do, delta)

    arrays = (kept.filled(operands), operands.window, o, do)
    if call.method == "local":
        dq, dk, dv = run(call, None, arrays)
    else:
        tokens = call.spec(2)
        in_specs = (_spec_kept(call, Saved), PartitionSpec(), tokens, tokens)
        dq, dk, dv = _island(call, run, arrays, in_specs, tokens)
    d_sinks = None
    if sinks is not None:
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)  # [B, T, N]
        weights = jnp.exp(sinks.astype(jnp.float32) - kept.lse)
        d_sinks = -jnp.sum(weights * delta, (0, 1)).astype(sinks.dtype)
    return Operands(dq, dk, dv, None, None), d_sinks


attend.defvjp(_forward_rule, _backward_rule)


def _spec_kept(call: Call, kind: Any) -> Any:
    """Return the specs of a `Kept` or `Saved`."""
    heads = call.spec(3 if call.method == "ulysses" else 2)
    return kind(lse=heads, q=heads, k=heads, v=heads, segment_ids=call.spec())


def _island(call: Call, function: Any, arrays: Any, in_specs: Any, out_specs: Any) -> Any:
    """Return `function(call, place, arrays)`, run by each device on its shards.

    `place` is the device's place along `context`.
    """
    manual = set[str](getattr(call.mesh, "manual_axes", ()))
    axes = set[str](call.mesh.axis_names) - manual
    if call.names_tensor:
        local_call = dataclasses.replace(call, tensor=1)  # its heads are one tensor shard's
    else:
        local_call = call
        axes -= {TENSOR}
    results = jax.shard_map(
        lambda place, shards: function(local_call, place[0], shards),
        mesh=call.mesh,
        in_specs=(PartitionSpec(CONTEXT), in_specs),
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )(jax.lax.iota(jnp.int32, call.size), arrays)
    # Without check_vma, their types have lost the axes of a caller's shard_map.
    return vary(results, varying_over(arrays))
