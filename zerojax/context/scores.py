"""Scores of queries and keys, and which keys a query sees.

    s[t, u] = q[t] . k[u] scale                     raw scores
    s -> cap tanh(s / cap)                          if they are capped
    t sees u:  u <= t,  t - u < window,  segment[t] = segment[u]

Scores are float32, and -inf where a query does not see a key.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
PAST = 1 << 30
"""Position of a token that only fills a block: later than all others."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores follow from queries and keys.

    Attributes:
      scale: factor of the raw scores.
      causal: whether a query sees no later keys.
      window: number of latest keys that a query sees, including its own; None: all, or as many as
        an array says (`Tokens.window`).
      cap: soft cap of the scores, or None.
    """

    scale: float
    causal: bool
    window: int | None
    cap: float | None

    def compute(self, q: Array, k: Array) -> Array:
        """Return the scores f32[B, K, G, t, u] of q[B, t, K, G, D] and k[B, u, K, D]."""
        s = product("btkgd,bukd->bkgtu", q, k) * self.scale
        return s if self.cap is None else self.cap * jnp.tanh(s / self.cap)

    def slope(self, s: Array) -> Array | float:
        """Return the derivative of scores with respect to q . k."""
        if self.cap is None:
            return self.scale
        return self.scale * (1 - jnp.square(s / self.cap))

    def find_visible(self, q: "Tokens", k: "Tokens") -> Array | None:
        """Return which keys each query sees, bool[B or 1, 1, 1, t, u]; None: all."""
        behind = q.at[:, None] - k.at  # [t, u]
        conditions: list[Array] = []
        if self.causal:
            conditions.append(behind >= 0)
        elif k.is_padded:
            conditions.append(jnp.broadcast_to(k.at < PAST, behind.shape))
        if self.window is not None:
            conditions.append(behind < self.window)
        if q.window is not None:
            conditions.append((q.window == 0) | (behind < q.window))
        visible = None
        for condition in conditions:
            visible = condition if visible is None else visible & condition
        if q.segment_ids is None:
            return None if visible is None else visible[None, None, None]
        assert k.segment_ids is not None
        same = (q.segment_ids[:, :, None] == k.segment_ids[:, None, :])[:, None, None]
        return same if visible is None else same & visible


class Tokens(NamedTuple):
    """What decides which of some tokens see each other.

    The arrays have a leading dim of blocks outside of loops over blocks.

    Attributes:
      at: i32[t], positions in the whole sequence.
      segment_ids: i32[B, t], or None.
      window: i32[], number of latest keys that a query sees, 0 for all; or None.
      is_padded: whether some positions are `PAST`.
    """

    at: Array
    segment_ids: Array | None
    window: Array | None
    is_padded: bool

    def block(self, n: Any) -> "Tokens":
        """Return block n."""
        ids = None if self.segment_ids is None else self.segment_ids[n]
        return self._replace(at=self.at[n], segment_ids=ids)


def product(subscripts: str, a: Array, b: Array) -> Array:
    """Return an einsum of two arrays of one dtype, summed in float32."""

    def run(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    if a.dtype != jnp.float16:
        return run(a, b)

    def widened(a: Array, b: Array) -> Array:
        return run(a.astype(jnp.float32), b.astype(jnp.float32))

    # XLA on CPU lacks float16 products.
    return jax.lax.platform_dependent(a, b, cpu=widened, default=run)
