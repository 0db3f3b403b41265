"""Attention of Llama 4: in chunks with rotations, or over all tokens without.

    rotated layers    q, k = norm(rotate(q)), norm(rotate(k));  p // size = p' // size
    other layers      q = q (1 + beta log(1 + floor((p + 1) / length)))

p and p' are the positions of a query and a key. A chunk is like a segment of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.hf.attention import attend
from zerojax.hf.decoder import Attention
from zerojax.trees import Context

_MOST_CHUNKS = 1 << 15


class ChunkedAttention(Attention):
    """Grouped-query attention, in chunks in layers with rotations: x[B, T, H] -> [B, T, H]."""

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> jax.Array:
        """Return attention's output for the rows of a batch."""
        segments = context.get("segment_ids")
        assert self.c.chunked is not None
        size = self.c.chunked.size
        if size:
            chunk = context["positions"] // size * layer["is_rotated"]
            # Positions restart in each segment, so neighboring segments differ in their number.
            segments = chunk if segments is None else segments * _MOST_CHUNKS + chunk
        a = attend(
            *self._projected(x, context, layer),
            scale=self.c.attention_scale,
            segment_ids=segments,
            implementation=self.implementation,
        )
        return self._output(a)

    def cached(
        self, x: jax.Array, cache: dict[str, jax.Array], context: Context, layer: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return attention's output for the next tokens of each row, and the updated cache."""
        assert self.c.chunked is not None
        size = self.c.chunked.size
        if size:
            # A chunk is a window that grows from 1 to its size.
            window = (context["positions"] % size + 1) * layer["is_rotated"]
            layer = {**layer, "window": window[:, None, :, None]}
        return super().cached(x, cache, context, layer)

    def _projected(
        self, x: jax.Array, context: Context, layer: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q[B, T, heads, D], and k and v[B, T, kv_heads, D]."""
        q, k, v = super()._projected(x, context, layer)
        c = self.c.chunked
        assert c is not None
        if c.normalizes:
            q = jnp.where(layer["is_rotated"], self._normed(q), q)
            k = jnp.where(layer["is_rotated"], self._normed(k), k)
        if c.growth is not None:
            beta, length = c.growth
            positions = context["positions"] + 1
            growth = 1 + beta * jnp.log1p((positions // length).astype(jnp.float32))
            grown = q * growth.astype(q.dtype)[:, :, None, None]
            q = jnp.where(layer["is_rotated"], q, grown)
        return q, k, v

    def _normed(self, x: jax.Array) -> jax.Array:
        """Return heads divided by their root mean square, in float32."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.c.norm_eps)).astype(x.dtype)
