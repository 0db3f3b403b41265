"""Attention over the whole sequence on one device."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from zerojax.compat import varying_axes
from zerojax.context.blocks import (
    Cut,
    accumulate,
    accumulate_grads,
    cut_outputs,
    finish,
    grouped,
    list_pairs,
    start,
    zero_grads,
)
from zerojax.context.call import Call, Kept, Method, Operands, Saved
from zerojax.context.cudnn import cudnn_backward, cudnn_forward

Array = jax.Array
T = TypeVar("T")


def forward(call: Call, place: Any, operands: Operands) -> tuple[Array, Kept]:
    """Return the outputs [B, T, N, D], and what backward reads besides q, k, v and segment ids."""
    del place
    q, k, v, segment_ids, window = operands
    if call.kernel == "cudnn":
        o, lse = cudnn_forward(call.scores, q, k, v)
        return o, Kept(lse)
    cut = Cut(1, q.shape[1], call.block)
    q_blocks = grouped(cut.cut(q), k.shape[2])
    ids = None if segment_ids is None else cut.cut(segment_ids)
    tokens = cut.tokens(jnp.zeros(1, jnp.int32), ids, window)
    pairs = list_pairs(call.scores, cut)
    blocks = q_blocks, tokens, cut.cut(k), cut.cut(v), tokens
    state = accumulate(call.scores, _varying_like(q, start(q_blocks)), *blocks, pairs)
    o, lse = finish(state, cut, q.dtype)
    return o, Kept(lse)


def backward(
    call: Call, place: Any, saved: Saved, window: Array | None, do: Array, delta: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values; see `Method`."""
    del place
    q, k, v, segment_ids, lse = saved
    if call.kernel == "cudnn":
        return cudnn_backward(call.scores, q, k, v, do)
    cut = Cut(1, q.shape[1], call.block)
    q_blocks = grouped(cut.cut(q), k.shape[2])
    k_blocks = cut.cut(k)
    ids = None if segment_ids is None else cut.cut(segment_ids)
    tokens = cut.tokens(jnp.zeros(1, jnp.int32), ids, window)
    grads = accumulate_grads(
        call.scores,
        _varying_like(q, zero_grads(q_blocks, k_blocks)),
        q_blocks,
        tokens,
        cut_outputs(cut, do, lse, delta, k.shape[2]),
        k_blocks,
        cut.cut(v),
        tokens,
        list_pairs(call.scores, cut),
    )
    dq, dk, dv = (cut.join(a).astype(q.dtype) for a in grads)
    return dq.reshape(q.shape), dk, dv


def _varying_like(q: Array, sums: T) -> T:
    """Return the first sums of a loop, varying over the axes of a caller's shard_map as q does."""
    axes = tuple(sorted(varying_axes(jax.typeof(q))))
    if not axes:
        return sums
    return jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), sums)


LOCAL = Method(forward, backward)
"""Attention of a device that holds the whole sequence."""
