"""Attention by blocks of queries and keys with a running softmax, and its derivative.

    for each pair (i, j) of a block of queries and a block of keys:
        s = scores(q[i], k[j]),  m' = max(m[i], max s),  p = exp(s - m')
        l[i] = l[i] exp(m[i] - m') + sum p
        o[i] = o[i] exp(m[i] - m') + p v[j],  m[i] = m'
    o = o / l,  lse = m + log l

    p  = exp(s - lse)                        delta = sum over D of do o
    dv[j] += p^T do[i],  dp = do[i] v[j]^T,  ds = p (dp - delta) slope(s)
    dq[i] += ds k[j],    dk[j] += ds^T q[i]

These are the recurrences of FlashAttention-2 (arXiv:2307.08691, section 3.1), here over a list of
pairs. Scores are held for one pair at a time, block x block elements for each head. Pairs in which
no query can see a key are left out. A query that sees no key has an output and a gradient of zeros.

The state of the recurrence is an argument, so that a ring continues it with each device's keys.
Products are in the dtype of the operands, with sums, softmax and gradients in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.context.scores import PAST, Scores, Tokens, product

Array = jax.Array
_LOW = -1e30
"""Maximum of no scores. It is finite, so that no difference of two of them is NaN."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How tokens are cut into blocks.

    Attributes:
      chunks: number of runs of consecutive tokens.
      length: tokens of a run.
      block: largest number of tokens of a block.
    """

    chunks: int
    length: int
    block: int

    @property
    def count(self) -> int:
        """Number of blocks of a run."""
        return -(-self.length // self.block)

    @property
    def size(self) -> int:
        """Tokens of a block, the last ones of a run's last block being padding."""
        return -(-self.length // self.count)

    @property
    def padding(self) -> int:
        """Tokens that a run's last block lacks."""
        return self.count * self.size - self.length

    def cut(self, a: Array, fill: float = 0) -> Array:
        """Return a[B, tokens, ...] as blocks [n, B, size, ...]."""
        batch = a.shape[0]
        rest = a.shape[2:]
        runs = a.reshape(batch, self.chunks, self.length, *rest)
        if self.padding:
            widths = [(0, 0), (0, 0), (0, self.padding), *((0, 0) for _ in rest)]
            runs = jnp.pad(runs, widths, constant_values=fill)
        blocks = runs.reshape(batch, self.chunks * self.count, self.size, *rest)
        return jnp.moveaxis(blocks, 1, 0)

    def join(self, blocks: Array) -> Array:
        """Return blocks [n, B, size, ...] as tokens [B, tokens, ...]."""
        batch = blocks.shape[1]
        rest = blocks.shape[3:]
        runs = jnp.moveaxis(blocks, 0, 1)
        runs = runs.reshape(batch, self.chunks, self.count * self.size, *rest)
        return runs[:, :, : self.length].reshape(batch, self.chunks * self.length, *rest)

    def tokens(
        self, starts: Array, segment_ids: Array | None = None, window: Array | None = None
    ) -> Tokens:
        """Return the blocks' tokens.

        Args:
          starts: i32[chunks], positions of the first token of each run.
          segment_ids: i32[B, tokens], already in blocks, or None.
          window: i32[], or None.
        """
        offsets = jnp.arange(self.count * self.size)
        at = jnp.where(offsets < self.length, starts[:, None] + offsets, PAST)
        return Tokens(
            at.reshape(-1, self.size).astype(jnp.int32), segment_ids, window, self.padding > 0
        )


class Pairs(NamedTuple):
    """Pairs of blocks, in the order in which they are computed.

    Attributes:
      queries: i32[pairs], blocks of queries.
      keys: i32[pairs], blocks of keys.
      exist: bool[pairs], whether a pair exists; None: all do.
    """

    queries: Any
    keys: Any
    exist: Any = None


def list_pairs(scores: Scores, cut: Cut) -> Pairs:
    """Return the pairs of blocks of one run of tokens in which a query may see a key."""
    count = cut.chunks * cut.count
    queries, keys = np.divmod(np.arange(count * count, dtype=np.int32), np.int32(count))
    may_see = np.ones(count * count, bool)
    if scores.causal:
        may_see &= queries >= keys
    if scores.window is not None and cut.chunks == 1:
        nearest = queries * cut.size - ((keys + 1) * cut.size - 1)
        may_see &= nearest < scores.window
    return Pairs(queries[may_see], keys[may_see])


class State(NamedTuple):
    """State of the running softmax, in blocks.

    Attributes:
      m: f32[n, B, K, G, size], maxima of the scores so far.
      l: f32[n, B, K, G, size], sums of exp(s - m).
      o: f32[n, B, K, G, size, D], sums of exp(s - m) v.
    """

    m: Array
    l: Array  # noqa: E741  # as in the paper
    o: Array


def start(q: Array) -> State:
    """Return the state before any key, for queries q[n, B, size, K, G, D]."""
    count, batch, size, kv_heads, groups, width = q.shape
    shape = (count, batch, kv_heads, groups, size)
    zeros = jnp.zeros(shape, jnp.float32)
    return State(zeros + _LOW, zeros, jnp.zeros((*shape, width), jnp.float32))


def grouped(q: Array, kv_heads: int) -> Array:
    """Return q[..., N, D] as [..., K, G, D]: the G query heads of each key head."""
    return q.reshape(*q.shape[:-2], kv_heads, -1, q.shape[-1])


def accumulate(
    scores: Scores,
    state: State,
    q: Array,
    q_tokens: Tokens,
    k: Array,
    v: Array,
    k_tokens: Tokens,
    pairs: Pairs,
) -> State:
    """Return the state after some pairs of blocks.

    Args:
      scores: how scores are computed.
      state: the state before.
      q: queries [n, B, size, K, G, D].
      q_tokens: the tokens of the queries.
      k: keys [n', B, size', K, D].
      v: values, like the keys.
      k_tokens: the tokens of the keys.
      pairs: pairs of blocks.
    """

    def step(state: State, pair: Pairs) -> tuple[State, None]:
        i, j = pair.queries, pair.keys
        s = _seen_scores(scores, q[i], q_tokens.block(i), k[j], k_tokens.block(j), pair.exist)[0]
        m, l, o = (a[i] for a in state)  # noqa: E741
        m_new = jnp.maximum(m, s.max(-1))
        p = jnp.exp(s - m_new[..., None])
        shrink = jnp.exp(m - m_new)
        pv = product("bkgtu,bukd->bkgtd", p.astype(v.dtype), v[j])
        updated = State(m_new, l * shrink + p.sum(-1), o * shrink[..., None] + pv)
        return State(*(a.at[i].set(b) for a, b in zip(state, updated, strict=True))), None

    return jax.lax.scan(step, state, _as_arrays(pairs))[0]


def finish(state: State, cut: Cut, dtype: Any) -> tuple[Array, Array]:
    """Return attention's outputs [B, tokens, N, D] and log-sum-exp f32[B, tokens, N]."""
    sees_some = state.l > 0
    total = jnp.where(sees_some, state.l, 1)
    o = _heads_last((state.o / total[..., None]).astype(dtype), cut)
    lse = _heads_last(jnp.where(sees_some, state.m + jnp.log(total), 0)[..., None], cut)
    return o, lse[..., 0]


class Grads(NamedTuple):
    """Sums of gradients, in blocks, float32.

    Attributes:
      dq: [n, B, size, K, G, D].
      dk: [n', B, size', K, D].
      dv: [n', B, size', K, D].
    """

    dq: Array
    dk: Array
    dv: Array


class Outputs(NamedTuple):
    """What the derivative reads of the outputs, in blocks.

    Attributes:
      do: cotangents of the outputs [n, B, size, K, G, D].
      lse: f32[n, B, K, G, size].
      delta: f32[n, B, K, G, size], sums over D of do o.
    """

    do: Array
    lse: Array
    delta: Array


def cut_outputs(cut: Cut, do: Array, lse: Array, delta: Array, kv_heads: int) -> Outputs:
    """Return do[B, tokens, N, D], lse and delta f32[B, tokens, N] in blocks."""

    def of_rows(a: Array, fill: float = 0) -> Array:
        return jnp.moveaxis(grouped(cut.cut(a[..., None], fill), kv_heads)[..., 0], 2, -1)

    # Padded rows have probabilities of exp(s - PAST) = 0.
    return Outputs(grouped(cut.cut(do), kv_heads), of_rows(lse, PAST), of_rows(delta))


def accumulate_grads(
    scores: Scores,
    grads: Grads,
    q: Array,
    q_tokens: Tokens,
    outputs: Outputs,
    k: Array,
    v: Array,
    k_tokens: Tokens,
    pairs: Pairs,
) -> Grads:
    """Return the gradients after some pairs of blocks; the arguments are as in `accumulate`."""

    def step(grads: Grads, pair: Pairs) -> tuple[Grads, None]:
        i, j = pair.queries, pair.keys
        do, lse, delta = (a[i] for a in outputs)
        seen, s = _seen_scores(scores, q[i], q_tokens.block(i), k[j], k_tokens.block(j), pair.exist)
        p = jnp.exp(seen - lse[..., None])
        dp = product("btkgd,bukd->bkgtu", do, v[j])
        ds = (p * (dp - delta[..., None]) * scores.slope(s)).astype(q.dtype)
        dq = product("bkgtu,bukd->btkgd", ds, k[j])
        dk = product("bkgtu,btkgd->bukd", ds, q[i])
        dv = product("bkgtu,btkgd->bukd", p.astype(q.dtype), do)
        return Grads(grads.dq.at[i].add(dq), grads.dk.at[j].add(dk), grads.dv.at[j].add(dv)), None

    return jax.lax.scan(step, grads, _as_arrays(pairs))[0]


def zero_grads(q: Array, k: Array) -> Grads:
    """Return gradients of zeros for q[n, B, size, K, G, D] and k[n', B, size', K, D]."""
    dk = jnp.zeros(k.shape, jnp.float32)
    return Grads(jnp.zeros(q.shape, jnp.float32), dk, dk)


def _seen_scores(
    scores: Scores, q: Array, q_tokens: Tokens, k: Array, k_tokens: Tokens, exists: Any
) -> tuple[Array, Array]:
    """Return the scores of one pair, with -inf where a query does not see a key, and without."""
    s = scores.compute(q, k)
    visible = scores.find_visible(q_tokens, k_tokens)
    if exists is not None:
        visible = exists if visible is None else visible & exists
    return (s if visible is None else jnp.where(visible, s, -jnp.inf)), s


def _heads_last(a: Array, cut: Cut) -> Array:
    """Return a[n, B, K, G, size, D] as [B, tokens, N, D]."""
    joined = cut.join(jnp.moveaxis(a, 4, 2))
    return joined.reshape(*joined.shape[:2], -1, a.shape[-1])


def _as_arrays(pairs: Pairs) -> Pairs:
    return jax.tree.map(jnp.asarray, pairs)
