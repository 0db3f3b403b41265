"""Attention of a device's queries over the keys and values of all devices.

    k[B, T_context, K, D] -> k[B, T, K, D]                     all_gather, as v and segment ids
    dk[B, T, K, D]{U_context} -> dk[B, T_context, K, D]        reduce_scatter, as dv; float32

Backward gathers keys and values a second time, so that no layer keeps them whole. With a static
window, only blocks in the windows of a device's queries are computed. Otherwise all blocks are, and
scores of invisible keys are masked, which for causal attention is half of the work.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.context.blocks import (
    Cut,
    Pairs,
    accumulate,
    accumulate_grads,
    cut_outputs,
    finish,
    grouped,
    start,
    zero_grads,
)
from zerojax.context.call import Call, Kept, Method, Operands, Saved
from zerojax.context.scores import Tokens
from zerojax.sharding import CONTEXT

Array = jax.Array


def forward(call: Call, place: Array, operands: Operands) -> tuple[Array, Kept]:
    """Return a device's outputs [B, T_context, N, D], and what backward reads."""
    q, k, v, segment_ids, window = operands
    device = _Device(call, place, q.shape[1], segment_ids, window)
    q_blocks = grouped(device.q_cut.cut(q), k.shape[2])
    state = accumulate(
        call.scores,
        start(q_blocks),
        q_blocks,
        device.q_tokens,
        *device.gather_blocks(k, v),
        device.k_tokens,
        device.pairs(),
    )
    o, lse = finish(state, device.q_cut, q.dtype)
    return o, Kept(lse)


def backward(
    call: Call, place: Array, saved: Saved, window: Array | None, do: Array, delta: Array
) -> tuple[Array, Array, Array]:
    """Return a device's gradients of queries, keys and values; see `Method`."""
    q, k, v, segment_ids, lse = saved
    device = _Device(call, place, q.shape[1], segment_ids, window)
    q_blocks = grouped(device.q_cut.cut(q), k.shape[2])
    k_blocks, v_blocks = device.gather_blocks(k, v)
    grads = accumulate_grads(
        call.scores,
        zero_grads(q_blocks, k_blocks),
        q_blocks,
        device.q_tokens,
        cut_outputs(device.q_cut, do, lse, delta, k.shape[2]),
        k_blocks,
        v_blocks,
        device.k_tokens,
        device.pairs(),
    )
    dq = device.q_cut.join(grads.dq).reshape(q.shape)
    dk, dv = (
        jax.lax.psum_scatter(device.k_cut.join(a), CONTEXT, scatter_dimension=1, tiled=True)
        for a in (grads.dk, grads.dv)
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


class _Device:
    """One device's queries, and all keys, in blocks."""

    def __init__(
        self,
        call: Call,
        place: Array,
        length: int,
        segment_ids: Array | None,
        window: Array | None,
    ) -> None:
        self.call = call
        self.place = place
        self.q_cut = Cut(1, length, call.block)
        self.k_cut = Cut(call.size, length, call.block)
        q_ids = k_ids = None
        if segment_ids is not None:
            q_ids = self.q_cut.cut(segment_ids)
            k_ids = self.k_cut.cut(_gather(segment_ids))
        self.q_tokens: Tokens = self.q_cut.tokens(place[None] * length, q_ids, window)
        self.k_tokens: Tokens = self.k_cut.tokens(jnp.arange(call.size) * length, k_ids)

    def gather_blocks(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return all devices' keys and values, in blocks."""
        return self.k_cut.cut(_gather(k)), self.k_cut.cut(_gather(v))

    def pairs(self) -> Pairs:
        """Return the pairs of blocks to compute."""
        count = self.q_cut.count
        total = count * self.call.size
        window = self.call.scores.window
        reach = total - 1
        if window is not None:
            # The oldest visible key is window - 1 tokens before the first query of a block, among
            # whose blocks of keys some are shorter, since each run is padded.
            shortest = self.q_cut.size - self.q_cut.padding
            reach = min(reach, 1 + (window - 1) // max(shortest, 1))
        if window is None or reach == total - 1:
            queries, keys = np.divmod(np.arange(count * total, dtype=np.int32), np.int32(total))
            return Pairs(queries, keys)
        width = reach + 1
        queries, back = np.divmod(np.arange(count * width, dtype=np.int32), np.int32(width))
        keys = self.place * count + queries - back
        return Pairs(queries, jnp.maximum(keys, 0), keys >= 0)


def _gather(a: Array) -> Array:
    return jax.lax.all_gather(a, CONTEXT, axis=1, tiled=True)


GATHER = Method(forward, backward)
"""Attention of a device over gathered keys and values."""
