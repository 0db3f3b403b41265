"""Latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1): keys and values from one vector.

    c[t]         = norm(W_kv_a z[t])                  R numbers that all heads share
    k[t], v[t]   = W_kv_b c[t]                        of each head, without rotation
    r[t]         = rotate(W_k_rope z[t])              part of the keys that all heads share
    q[t], q_r[t] = W_q_b norm(W_q_a z[t])             or W_q z[t]
    score[t, s]  = (q[t] . k[s] + rotate(q_r[t]) . r[s]) scale

A cache holds c and r, [S, R + D_r] for each layer, and keys and values are computed from it in each
pass. Values may be narrower than keys: they are padded by zeros, since `attend` takes one width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zerojax.hf.attention import Implementation, attend, attend_to_cache
from zerojax.hf.config import DecoderConfig
from zerojax.hf.decoder import TENSOR, Cached, Norm, Options, Projection, check_heads
from zerojax.hf.rope import find_frequencies, rotate
from zerojax.trees import Context


class LatentAttention(nnx.Module):
    """Latent attention: x[B, T, H] -> [B, T, H]."""

    def __init__(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> None:
        """Create the projections and the norms of the latent vectors."""
        assert c.latent is not None
        self.c = c
        self.m = c.latent
        self.implementation: Implementation = o.attention
        q = c.heads * c.latent.key_dim
        kv = c.heads * (c.latent.nope_dim + c.latent.value_dim)
        rank = c.latent.rank

        def project(name: str, d_in: int, d_out: int, bias: bool = False) -> Projection:
            return Projection(name, d_in, d_out, bias, o.lora, rngs=rngs)

        self.q_proj: Any = nnx.data(None)
        self.q_a_proj: Any = nnx.data(None)
        self.q_a_layernorm: Any = nnx.data(None)
        self.q_b_proj: Any = nnx.data(None)
        if c.latent.query_rank is None:
            self.q_proj = project("q_proj", c.hidden, q)
        else:
            self.q_a_proj = project("q_a_proj", c.hidden, c.latent.query_rank, c.qkv_bias)
            self.q_a_layernorm = _norm(c.latent.query_rank, c, rngs)
            self.q_b_proj = project("q_b_proj", c.latent.query_rank, q)
        self.kv_a_proj_with_mqa = project(
            "kv_a_proj_with_mqa", c.hidden, rank + c.latent.rope_dim, c.qkv_bias
        )
        self.kv_a_layernorm = _norm(rank, c, rngs)
        self.kv_b_proj = project("kv_b_proj", rank, kv)
        self.o_proj = project("o_proj", c.heads * c.latent.value_dim, c.hidden, c.output_bias)

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> jax.Array:
        """Return attention's output for the rows of a batch."""
        q, latent, rotated = self._projected(x, context, layer)
        k, v = self._expanded(latent, rotated)
        a = attend(
            q,
            k,
            v,
            scale=self.c.attention_scale,
            segment_ids=context.get("segment_ids"),
            implementation=self.implementation,
        )
        return self._output(a)

    def cached(
        self, x: jax.Array, cache: Cached, context: Context, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """Return attention's output for the next tokens of each row, and the updated cache."""
        q, latent, rotated = self._projected(x, context, layer)
        positions = context["positions"]
        rows = jnp.arange(x.shape[0])[:, None]
        cache = {
            "latent": cache["latent"].at[rows, positions].set(latent),
            "rotated": cache["rotated"].at[rows, positions].set(rotated),
        }
        k, v = self._expanded(cache["latent"], cache["rotated"])
        a = attend_to_cache(q, k, v, positions, scale=self.c.attention_scale)
        return self._output(a), cache

    def _projected(
        self, x: jax.Array, context: Context, layer: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q[B, T, heads, D], latent vectors [B, T, R], and rotated keys [B, T, D_r]."""
        m = self.m
        check_heads(self.c, jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1))
        if self.q_proj is None:
            q = self.q_b_proj(self.q_a_layernorm(checkpoint_name(self.q_a_proj(x), "qkv")))
        else:
            q = self.q_proj(x)
        q = checkpoint_name(q, "qkv").reshape(*x.shape[:2], -1, m.key_dim)
        together = checkpoint_name(self.kv_a_proj_with_mqa(x), "qkv")
        latent = self.kv_a_layernorm(together[..., : m.rank])
        frequencies = find_frequencies(layer, context)
        rotation = context["positions"], frequencies, layer["factor"], self.c.adjacent_pairs
        rotated = rotate(together[:, :, None, m.rank :], *rotation)[:, :, 0]
        rotated_q = rotate(q[..., m.nope_dim :], *rotation)
        return jnp.concatenate([q[..., : m.nope_dim], rotated_q], -1), latent, rotated

    def _expanded(self, latent: jax.Array, rotated: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [B, S, heads, D]."""
        m = self.m
        kv = self.kv_b_proj(latent)
        kv = checkpoint_name(kv, "qkv").reshape(*latent.shape[:2], -1, m.nope_dim + m.value_dim)
        shared = jnp.broadcast_to(rotated[:, :, None], (*kv.shape[:3], m.rope_dim))
        k = jnp.concatenate([kv[..., : m.nope_dim], shared], -1)
        v = kv[..., m.nope_dim :]
        missing = m.key_dim - m.value_dim
        return k, jnp.pad(v, [(0, 0)] * 3 + [(0, missing)]) if missing else v

    def _output(self, a: jax.Array) -> jax.Array:
        a = a[..., : self.m.value_dim]
        return checkpoint_name(
            self.o_proj(checkpoint_name(a.reshape(*a.shape[:2], -1), "attention")), "projection"
        )


def _norm(width: int, c: DecoderConfig, rngs: nnx.Rngs) -> Norm:
    """Return the norm of a latent vector, whose epsilon is fixed in these families."""
    norm = Norm(width, c, rngs=rngs)
    norm.eps = 1e-6
    return norm
