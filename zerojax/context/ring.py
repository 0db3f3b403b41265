"""Attention over a ring of devices: keys and values visit every device, and queries stay.

    turn n of c:   device i has the keys, values and segment ids of device i - n
                   it sends them to device i + 1 while it computes with them

(arXiv:2310.01889.) A device sends c - 1 times its keys, values and segment ids, of T / c tokens.
Causal attention is in zigzag order (`zerojax.context.zigzag`): in the first turn a device sees its
own chunks, and in each other turn half of the pairs of blocks, whichever device the keys are from.

In backward the gradients of keys and values follow them around, one turn behind: a device adds
its own part to the sum that arrived while it was computed. After c - 1 turns the sums are one step
from home, so c permutes bring back each of the two gradients, in float32 but for the last ones.

A permute never depends on the products of its turn. XLA for GPUs keeps one permute in flight, and
runs others alone. So the pairs of blocks of a turn are computed in parts, one beside each permute,
and a barrier ends both before the next permute begins.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.context.blocks import (
    Cut,
    Grads,
    Pairs,
    State,
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
from zerojax.context.scores import Tokens
from zerojax.context.zigzag import chunk_starts, from_zigzag, to_zigzag
from zerojax.sharding import CONTEXT

Array = jax.Array


class _Travelling(NamedTuple):
    """What goes around the ring, in blocks: keys, values, and segment ids if there are any."""

    k: Array
    v: Array
    segment_ids: Array | None


def forward(call: Call, place: Array, operands: Operands) -> tuple[Array, Kept]:
    """Return a device's outputs [B, T_context, N, D], and what backward reads."""
    q, k, v, segment_ids, window = operands
    if call.scores.causal:
        q, k, v = (to_zigzag(a, place, call.size) for a in (q, k, v))
        if segment_ids is not None:
            segment_ids = to_zigzag(segment_ids, place, call.size)
    ring = _Ring(call, place, q.shape[1], window)
    q_blocks = grouped(ring.cut.cut(q), k.shape[2])
    present = ring.cut_keys(k, v, segment_ids)
    q_tokens = ring.tokens(place, present.segment_ids)

    def run_turn(
        turn: Any, present: _Travelling, state: State, sends: bool = True
    ) -> tuple[_Travelling, State]:
        k_tokens = ring.tokens(ring.behind(turn), present.segment_ids)

        def compute(state: State, pairs: Pairs) -> State:
            return accumulate(
                call.scores, state, q_blocks, q_tokens, present.k, present.v, k_tokens, pairs
            )

        sent = present if sends else None
        following, state = ring.compute_beside(sent, compute, state, ring.pairs(turn))
        return following, state

    following, state = run_turn(0, present, start(q_blocks))
    if call.size > 2:
        following, state = jax.lax.fori_loop(
            1, call.size - 1, lambda turn, carry: run_turn(turn, *carry), (following, state)
        )
    _, state = run_turn(call.size - 1, following, state, sends=False)
    o, lse = finish(state, ring.cut, q.dtype)
    if not call.scores.causal:
        return o, Kept(lse)
    return from_zigzag(o, place, call.size), Kept(lse, q, k, v, segment_ids)


def backward(
    call: Call, place: Array, saved: Saved, window: Array | None, do: Array, delta: Array
) -> tuple[Array, Array, Array]:
    """Return a device's gradients of queries, keys and values.

    Args:
      call: the attention.
      place: i32[], the device's place in the ring.
      saved: what forward kept, in zigzag order if the attention is causal.
      window: i32[], or None.
      do: cotangents of the outputs, in the model's order.
      delta: f32[B, T_context, N], sums over D of do o, in the model's order.
    """
    q, k, v, segment_ids, lse = saved
    if call.scores.causal:
        do, delta = (to_zigzag(a, place, call.size) for a in (do, delta))
    ring = _Ring(call, place, q.shape[1], window)
    q_blocks = grouped(ring.cut.cut(q), k.shape[2])
    outputs = cut_outputs(ring.cut, do, lse, delta, k.shape[2])
    present = ring.cut_keys(k, v, segment_ids)
    q_tokens = ring.tokens(place, present.segment_ids)

    def run_turn(turn: Any, present: _Travelling, sums: Any, dq: Array, sends: bool = True) -> Any:
        """Return what arrived, the sums of dk and dv for the present keys, and dq."""
        k_tokens = ring.tokens(ring.behind(turn), present.segment_ids)

        def compute(grads: Grads, pairs: Pairs) -> Grads:
            operands = q_blocks, q_tokens, outputs, present.k, present.v, k_tokens
            return accumulate_grads(call.scores, grads, *operands, pairs)

        sent = (present if sends else None, sums)
        own = zero_grads(q_blocks, present.k)._replace(dq=dq)
        arrived, own = ring.compute_beside(sent, compute, own, ring.pairs(turn))
        following, sums = arrived
        added = own.dk, own.dv
        if sums is not None:
            added = jax.tree.map(jnp.add, sums, added)
        return following, added, own.dq

    carry = run_turn(0, present, None, jnp.zeros(q_blocks.shape, jnp.float32))
    if call.size > 2:
        carry = jax.lax.fori_loop(
            1, call.size - 1, lambda turn, carry: run_turn(turn, *carry), carry
        )
    _, sums, dq = run_turn(call.size - 1, *carry, sends=False)
    dk, dv = (ring.cut.join(ring.passed(a.astype(k.dtype))) for a in sums)
    dq = ring.cut.join(dq).reshape(q.shape)
    grads = [a.astype(q.dtype) for a in (dq, dk, dv)]
    if call.scores.causal:
        grads = [from_zigzag(a, place, call.size) for a in grads]
    return grads[0], grads[1], grads[2]


class _Ring:
    """One device's place in the ring, and its blocks."""

    def __init__(self, call: Call, place: Array, length: int, window: Array | None) -> None:
        self.call = call
        self.place = place
        self.window = window
        chunks = 2 if call.scores.causal else 1
        self.cut = Cut(chunks, length // chunks, call.block)

    def passed(self, a: Array) -> Array:
        """Pass an array to the next device, and return the array of the device behind."""
        size = self.call.size
        return jax.lax.ppermute(a, CONTEXT, [(n, (n + 1) % size) for n in range(size)])

    def compute_beside(
        self, sent: Any, compute: Callable[[Any, Pairs], Any], carry: Any, pairs: Pairs
    ) -> tuple[Any, Any]:
        """Pass a tree of arrays on, and compute with pairs of blocks at the same time.

        Args:
          sent: what is passed on.
          compute: function from a carry and some pairs to the next carry.
          carry: the first carry.
          pairs: pairs of blocks.

        Returns:
          What arrived, and the last carry.
        """
        waiting, tree = jax.tree.flatten(sent)
        if not waiting:
            return sent, compute(carry, pairs)
        parts = _split(pairs, [a.nbytes for a in waiting])
        arrived: list[Array] = []
        for part in parts:
            array, *waiting = waiting
            permuted = self.passed(array)
            if len(part.queries):
                carry = compute(carry, part)
            permuted, carry, waiting = jax.lax.optimization_barrier((permuted, carry, waiting))
            arrived.append(permuted)
        return jax.tree.unflatten(tree, arrived), carry

    def behind(self, turn: Any) -> Array:
        """Return the place of the device whose keys are here in a turn."""
        return (self.place - turn) % self.call.size

    def cut_keys(self, k: Array, v: Array, segment_ids: Array | None) -> _Travelling:
        """Return keys, values and segment ids in blocks."""
        ids = None if segment_ids is None else self.cut.cut(segment_ids)
        return _Travelling(self.cut.cut(k), self.cut.cut(v), ids)

    def tokens(self, place: Array, segment_ids: Array | None) -> Tokens:
        """Return the tokens that the device at `place` holds."""
        if self.call.scores.causal:
            starts = chunk_starts(place, self.call.size, self.cut.length)
        else:
            starts = place[None] * self.cut.length
        return self.cut.tokens(starts, segment_ids, self.window)

    def pairs(self, turn: Any) -> Pairs:
        """Return the pairs of blocks that a turn computes; turn 0 is a Python integer."""
        is_first = isinstance(turn, int) and turn == 0
        if is_first or not self.call.scores.causal:
            return list_pairs(self.call.scores, self.cut)
        # Late queries see the early chunk of any other device. The second pair of chunks is that of
        # the early ones if the keys are from a device before this one, else of the late ones.
        n = self.cut.count
        i, j = np.divmod(np.arange(n * n, dtype=np.int32), np.int32(n))
        shift = jnp.where(self.behind(turn) < self.place, 0, n).astype(jnp.int32)
        return Pairs(jnp.concatenate([i + n, i + shift]), jnp.concatenate([j, j + shift]))


def _split(pairs: Pairs, weights: Sequence[int]) -> list[Pairs]:
    """Return the pairs in parts proportional to the weights, none empty if there are enough."""
    total = len(pairs.queries)
    least = int(total >= len(weights))
    shares = np.cumsum(weights) / sum(weights) * (total - least * len(weights))
    ends = np.rint(shares).astype(int) + least * np.arange(1, len(weights) + 1)
    bounds = [0, *map(int, ends)]
    return [
        Pairs(pairs.queries[start:end], pairs.keys[start:end])
        for start, end in itertools.pairwise(bounds)
    ]


RING = Method(forward, backward)
"""Attention of a device in a ring."""
