"""Attention as a formula with all scores, for comparison."""

import jax
import jax.numpy as jnp


def plain_attention(
    q, k, v, *, causal=True, window=None, cap=None, segment_ids=None, scale=None, sinks=None
):
    """Return attention's outputs [B, T, N, D]; rows that see no key are zeros."""
    groups = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, groups, 2)
    v = jnp.repeat(v, groups, 2)
    s = jnp.einsum("btnd,bund->bntu", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    t = jnp.arange(q.shape[1])
    behind = t[:, None] - t
    visible = jnp.ones((1, 1, q.shape[1], q.shape[1]), bool)
    if causal:
        visible &= behind >= 0
    if window is not None:
        visible &= behind < window
    if segment_ids is not None:
        visible &= segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    s = jnp.where(visible, s, -1e30)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    weights = jax.nn.softmax(s, -1)[..., : q.shape[1]] * visible
    return jnp.einsum("bntu,bund->btnd", weights.astype(q.dtype), v)
