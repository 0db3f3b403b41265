"""Attention with heads split over `context` in place of tokens (Ulysses, arXiv:2309.14509).

    q[B, T_context, N_tensor, D] -> q[B, T, N_(tensor, context), D]       all_to_all, as k and v
    o[B, T, N_(tensor, context), D] -> o[B, T_context, N_tensor, D]       all_to_all

Between the two, each device attends over the whole sequence with its own heads. An all_to_all sends
(c - 1) / c of a device's array. Segment ids are all_gathered, 4 bytes a token. Backward exchanges
do, delta and the three gradients, and reads q, k, v and segment ids as they arrived in forward.

If key heads do not divide by tensor x context, each is repeated, so that every device has the key
heads of its query heads. The gradients of the copies are summed in float32.

Kept arrays have dim 1 split over `context`, like all that a layer keeps:
q[B, c_context, T, N / c, D].
"""

import jax
import jax.numpy as jnp

from zerojax.context.call import Call, Kept, Method, Operands, Saved
from zerojax.context.local import LOCAL
from zerojax.sharding import CONTEXT

Array = jax.Array


def forward(call: Call, place: Array, operands: Operands) -> tuple[Array, Kept]:
    """Return a device's outputs [B, T_context, N, D], and what backward reads."""
    del place
    q, k, v, segment_ids, window = operands
    q = to_heads(call, q)
    k, v = (to_heads(call, _repeat(call, a)) for a in (k, v))
    if segment_ids is not None:
        segment_ids = jax.lax.all_gather(segment_ids, CONTEXT, axis=1, tiled=True)
    o, kept = LOCAL.forward(call, None, Operands(q, k, v, segment_ids, window))
    whole = kept._replace(q=q, k=k, v=v, segment_ids=segment_ids)
    return to_tokens(call, o), jax.tree.map(lambda a: a[:, None], whole)


def backward(
    call: Call, place: Array, saved: Saved, window: Array | None, do: Array, delta: Array
) -> tuple[Array, Array, Array]:
    """Return a device's gradients of queries, keys and values; see `Method`."""
    del place
    whole = jax.tree.map(lambda a: a[:, 0], saved)
    do = to_heads(call, do)
    delta = to_heads(call, delta[..., None])[..., 0]
    dq, dk, dv = (to_tokens(call, a) for a in LOCAL.backward(call, None, whole, window, do, delta))
    return dq, _sum_repeated(call, dk), _sum_repeated(call, dv)


def to_heads(call: Call, a: Array) -> Array:
    """Return a[B, T_context, N, D] as [B, T, N_context, D].

    `tensor` splits the heads before `context` does, so that its shards stay where they are.
    """
    batch, length, heads, width = a.shape
    a = a.reshape(batch, length, call.tensor, call.size, -1, width)
    a = jax.lax.all_to_all(a, CONTEXT, 3, 1, tiled=True)
    return a.reshape(batch, length * call.size, heads // call.size, width)


def to_tokens(call: Call, a: Array) -> Array:
    """Return a[B, T, N_context, D] as [B, T_context, N, D]."""
    batch, length, heads, width = a.shape
    a = a.reshape(batch, length, call.tensor, 1, -1, width)
    a = jax.lax.all_to_all(a, CONTEXT, 1, 3, tiled=True)
    return a.reshape(batch, length // call.size, heads * call.size, width)


def _repeat(call: Call, a: Array) -> Array:
    return jnp.repeat(a, call.repeats, 2) if call.repeats > 1 else a


def _sum_repeated(call: Call, a: Array) -> Array:
    """Return the sum of the gradients of each head's copies."""
    if call.repeats == 1:
        return a
    batch, length, heads, width = a.shape
    copies = a.reshape(batch, length, heads // call.repeats, call.repeats, width)
    return copies.astype(jnp.float32).sum(3).astype(a.dtype)


ULYSSES = Method(forward, backward)
"""Attention of a device with some of the heads."""
