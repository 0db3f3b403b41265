"""Attention over the whole sequence on one device."""

from typing import Any

import jax
import jax.numpy as jnp

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
from zerojax.context.call import Call, Kept, Method, Operands, Saved, vary, varying_over
from zerojax.context.cudnn import cudnn_backward, cudnn_forward

Array = jax.Array


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
    state = accumulate(call.scores, vary(start(q_blocks), varying_over(q)), *blocks, pairs)
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
        vary(zero_grads(q_blocks, k_blocks), varying_over(q)),
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


LOCAL = Method(forward, backward)
"""Attention of a device that holds the whole sequence."""
