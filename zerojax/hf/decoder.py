"""A decoder in Flax NNX: embedding, block and head of the dense models in `zerojax.hf.names`.

    x[0]   = E[tokens]                                      times sqrt(H) in Gemma
    x      = x + norm(attention(norm(x)))                   one of both norms, or both
    x[l+1] = x + norm(W_down (f(W_gate z) * (W_up z)))      z = norm(x); or W_down f(W_up z)
    logits = norm(x[L]) E'^T                                E' = E if tied; capped in Gemma 2

`DecoderConfig` has an option for each difference between families: norms before or after, by root
mean squares or with a mean, attention and MLP one after the other or in parallel, and factors of
embeddings, outputs and logits.

One block serves all layers: windows and rotations, which differ between layers, are arrays over the
layers (`per_layer`), so the layers form a single loop. Modules have the names that transformers
uses. The head's matrix is stored as [V, H], like an embedding. Norms and rotations are computed in
float32, products in the dtype of the parameters that are passed in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zerojax.hf.adapters.layers import AdaptedMLP, Noise, Projection, Table
from zerojax.hf.adapters.lora import Lora
from zerojax.hf.attention import Implementation, attend, attend_to_cache
from zerojax.hf.batches import check_targets, faults, wide
from zerojax.hf.config import DecoderConfig
from zerojax.hf.rope import find_frequencies, rotate
from zerojax.models import Loss
from zerojax.tiling import linear_cross_entropy, over_tokens
from zerojax.trees import Context

Batch = dict[str, jax.Array]
Cached = dict[str, jax.Array]
"""Keys and values of one layer: `k` and `v`, [B, S, kv_heads, D]."""
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}
TENSOR = "tensor"
"""Mesh axis that splits heads, MLP width and vocabulary."""
_INIT = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a decoder that do not change what it computes, except for adapters and noise.

    Attributes:
      lora: adapters, or None.
      attention: "auto", "xla", "cudnn" or "blocks" (`zerojax.hf.attention`).
      mlp_tiles: number of tiles in which the weights of an MLP are stored and used, one at a time;
        0: untiled.
      seq_tiles: number of tiles of a row's tokens in which MLPs are computed, one after another.
      loss_tiles: number of vocabulary tiles in which the loss is computed; None: chosen by size.
      neftune_noise_alpha: size of the noise that training adds to embeddings; 0: none.
      capacity_factor: cells of an expert, as in `zerojax.moe`; None: no token is dropped.
      expert_groups: number of groups in which a layer's experts are stored and used, one at a time.
    """

    lora: Lora | None = None
    attention: Implementation = "auto"
    mlp_tiles: int = 0
    seq_tiles: int = 1
    loss_tiles: int | None = None
    neftune_noise_alpha: float = 0.0
    capacity_factor: float | None = None
    expert_groups: int = 1


class Norm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467) or layer norm, over the last dim."""

    def __init__(self, width: int, c: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        """Create the scale, and the bias if any, for a last dim of `width`."""
        del rngs
        self.eps = c.norm_eps
        self.is_unit = c.unit_norm
        self.has_mean = c.layer_norm
        self.scale = nnx.Param(jnp.zeros(width) if c.unit_norm else jnp.ones(width))
        self.bias: Any = nnx.data(nnx.Param(jnp.zeros(width)) if c.norm_bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x, normalized over its last dim in float32."""
        wide = x.astype(jnp.float32)
        scale = self.scale[...]
        if self.has_mean:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.is_unit:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        if not self.has_mean:
            return scale * wide.astype(x.dtype)
        wide = wide * scale.astype(jnp.float32)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245): x[B, T, H] -> [B, T, H]."""

    def __init__(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> None:
        """Create the four projections, and norms of queries and keys if the model has them."""
        self.c = c
        self.implementation: Implementation = o.attention
        q = c.heads * c.head_dim
        kv = c.kv_heads * c.head_dim
        self.q_proj = Projection("q_proj", c.hidden, q, c.qkv_bias, o.lora, rngs=rngs)
        self.k_proj = Projection("k_proj", c.hidden, kv, c.qkv_bias, o.lora, rngs=rngs)
        self.v_proj = Projection("v_proj", c.hidden, kv, c.qkv_bias, o.lora, rngs=rngs)
        self.o_proj = Projection("o_proj", q, c.hidden, c.output_bias, o.lora, rngs=rngs)
        self.sinks: Any = nnx.data(nnx.Param(_INIT(rngs.params(), (c.heads,))) if c.sinks else None)
        widths = (q, kv) if c.qk_norm_joint else (c.head_dim, c.head_dim)
        self.q_norm: Any = nnx.data(Norm(widths[0], c, rngs=rngs) if c.qk_norm else None)
        self.k_norm: Any = nnx.data(Norm(widths[1], c, rngs=rngs) if c.qk_norm else None)

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> jax.Array:
        """Return attention's output for the rows of a batch."""
        a = attend(
            *self._projected(x, context, layer),
            **self._scores(layer),
            segment_ids=context.get("segment_ids"),
            implementation=self.implementation,
        )
        return self._output(a)

    def cached(
        self, x: jax.Array, cache: Cached, context: Context, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """Return attention's output for the next tokens of each row, and the updated cache.

        A token's slot in the cache is its position.
        """
        q, k, v = self._projected(x, context, layer)
        positions = context["positions"]
        rows = jnp.arange(x.shape[0])[:, None]
        cache = {
            "k": cache["k"].at[rows, positions].set(k),
            "v": cache["v"].at[rows, positions].set(v),
        }
        return self._output(
            attend_to_cache(q, cache["k"], cache["v"], positions, **self._scores(layer))
        ), cache

    def _projected(
        self, x: jax.Array, context: Context, layer: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q[B, T, heads, D], and k and v[B, T, kv_heads, D]."""
        c = self.c
        check_heads(c, jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1))
        heads = (*x.shape[:2], -1, c.head_dim)
        q, k, v = (
            checkpoint_name(project(x), "qkv")
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if c.qk_norm_joint:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = (a.reshape(heads) for a in (q, k, v))  # [B, T, heads or kv_heads, D]
        if c.qk_norm and not c.qk_norm_joint:
            q = self.q_norm(q)
            k = self.k_norm(k)
        positions = context["positions"]
        rotation = positions, find_frequencies(layer, context), layer["factor"], c.adjacent_pairs
        q = rotate(q, *rotation)
        k = rotate(k, *rotation)
        if c.query_growth is not None:
            beta, length = c.query_growth
            growth = 1 + beta * jnp.log1p((positions // length).astype(jnp.float32))
            q = q * growth.astype(q.dtype)[:, :, None, None]
        return q, k, v

    def _scores(self, layer: Any) -> dict[str, Any]:
        c = self.c
        return {
            "scale": c.attention_scale,
            "cap": c.attention_cap,
            "window": layer.get("window", c.windows[0] or None),
            "sinks": None if self.sinks is None else self.sinks[...],
        }

    def _output(self, a: jax.Array) -> jax.Array:
        return checkpoint_name(
            self.o_proj(checkpoint_name(a.reshape(*a.shape[:2], -1), "attention")), "projection"
        )


def check_heads(c: DecoderConfig, tensor: int) -> None:
    """Raise ValueError unless each of the `tensor` devices has complete heads.

    Otherwise XLA would communicate scores.
    """
    if c.kv_heads % tensor:
        raise ValueError(
            f"num_key_value_heads={c.kv_heads} is not divisible by tensor={tensor}, but each "
            f"device needs complete heads: choose a tensor axis that divides {c.kv_heads}"
        )


class MLP(nnx.Module):
    """An MLP with a gate (arXiv:2002.05202) or without: x[B, T, H] -> [B, T, H]."""

    def __init__(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> None:
        """Create the projections."""
        self.activation = ACTIVATIONS[c.activation]
        self.gate_proj: Any = nnx.data(
            Projection("gate_proj", c.hidden, c.intermediate, c.mlp_bias, o.lora, rngs=rngs)
            if c.gated
            else None
        )
        self.up_proj = Projection(
            "up_proj", c.hidden, c.intermediate, c.mlp_bias, o.lora, rngs=rngs
        )
        self.down_proj = Projection(
            "down_proj", c.intermediate, c.hidden, c.mlp_bias, o.lora, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return W_down (f(W_gate x) * (W_up x)), or W_down f(W_up x) without a gate."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(checkpoint_name(self.up_proj(x), "mlp_hidden")))
        gate = checkpoint_name(self.gate_proj(x), "mlp_hidden")
        up = checkpoint_name(self.up_proj(x), "mlp_hidden")
        return self.down_proj(self.activation(gate) * up)


class Block(nnx.Module):
    """One layer: x[B, T, H] -> x[B, T, H].

    A subclass may have another MLP (`build_mlp`).
    """

    def __init__(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> None:
        """Create attention, MLP and their norms."""

        def norm(name: str) -> Any:
            return nnx.data(Norm(c.hidden, c, rngs=rngs) if name in c.norms else None)

        self.c = c
        self.seq_tiles = o.seq_tiles
        self.input_layernorm = norm("input_layernorm")
        self.self_attn: Any = self.build_attention(c, o, rngs=rngs)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.mlp: Any = self.build_mlp(c, o, rngs=rngs)

    def build_attention(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return attention, a module that maps x[B, T, H] to [B, T, H], with the same `cached`.

        Args:
          c: sizes and options of the decoder.
          o: options of `zerojax.hf.model_of`, such as adapters.
          rngs: random numbers of its initial values.
        """
        return Attention(c, o, rngs=rngs)

    def build_mlp(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return the MLP, a module that maps x[B, T, H] to [B, T, H].

        Args:
          c: sizes and options of the decoder.
          o: options of `zerojax.hf.model_of`, such as adapters.
          rngs: random numbers of its initial values.
        """
        if not o.mlp_tiles:
            return MLP(c, o, rngs=rngs)
        return AdaptedMLP(
            c.hidden,
            c.intermediate,
            num_tiles=o.mlp_tiles,
            activation=ACTIVATIONS[c.activation],
            gated=c.gated,
            use_bias=c.mlp_bias,
            up_init=_INIT,
            down_init=_INIT,
            lora=o.lora,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> jax.Array:
        """Return the output of the layer."""
        z = self._normed(self.input_layernorm, x)
        return self._added(x, z, self.self_attn(z, context, layer), self.seq_tiles)

    def cached(
        self, x: jax.Array, cache: Cached, context: Context, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """Return the layer's output for the next tokens of each row, and the updated cache.

        Args:
          x: [B, T, H], the next tokens, which also attend to the tokens in the cache.
          cache: keys and values of earlier tokens.
          context: arrays of the batch that all layers read, such as positions.
          layer: arrays of this layer, such as the frequencies of its rotations.
        """
        z = self._normed(self.input_layernorm, x)
        a, cache = self.self_attn.cached(z, cache, context, layer)
        return self._added(x, z, a, 1), cache

    def _added(self, x: jax.Array, z: jax.Array, a: jax.Array, tiles: int) -> jax.Array:
        """Return x plus the outputs of attention and of the MLP.

        Args:
          x: input of the layer.
          z: input of attention.
          a: output of attention.
          tiles: number of tiles of the tokens in which the MLP is computed.
        """
        c = self.c
        if c.parallel:
            m = checkpoint_name(self.compute_mlp(None, z, tiles), "mlp")
            return x + self._scaled(a) + self._scaled(m)
        # With norms before only, this name is the norm of the MLP's input, as in the files.
        before = self.pre_feedforward_layernorm
        if c.post_norms:
            a = self.post_attention_layernorm(a)
        else:
            before = self.post_attention_layernorm
        x = x + self._scaled(a)
        m = checkpoint_name(self.compute_mlp(before, x, tiles), "mlp")
        return x + self._scaled(self._normed(self.post_feedforward_layernorm, m))

    def compute_mlp(self, norm: Norm | None, x: jax.Array, tiles: int) -> jax.Array:
        """Return the MLP's output, over tiles of the tokens.

        Args:
          norm: norm of the MLP's input, or None.
          x: [B, T, H], input of the norm.
          tiles: number of tiles.
        """
        return over_tokens(lambda x: self.mlp(self._normed(norm, x)), x, num_tiles=tiles)

    def _normed(self, norm: Norm | None, x: jax.Array) -> jax.Array:
        return x if norm is None else norm(x)

    def _scaled(self, a: jax.Array) -> jax.Array:
        """Return an output of attention or MLP times the factor of the residual stream."""
        return a if self.c.residual_factor == 1 else a * self.c.residual_factor


class Embed(nnx.Module):
    """The embedding: tokens[B, T] -> x[B, T, H]."""

    def __init__(self, c: DecoderConfig, o: Options | None = None, *, rngs: nnx.Rngs) -> None:
        """Create the embedding [V, H], and its adapter if any."""
        o = Options() if o is None else o
        rows = c.vocab + c.extra_tokens
        self.embed_tokens = Table("embed_tokens", rows, c.hidden, o.lora, rngs=rngs)
        alpha = o.neftune_noise_alpha
        self.noise: Any = nnx.data(Noise(alpha, rngs=rngs) if alpha else None)
        factor = c.embedding_factor * (c.hidden**0.5 if c.scales_embedding else 1)
        self.factor = None if factor == 1 else factor
        self.pad_token = c.pad_token

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the embeddings of a batch's tokens; NaN for tokens out of range."""
        tokens = wide(batch["tokens"])
        # Negative tokens become NaN too, instead of indexing rows from the end.
        tokens = jnp.where(tokens < 0, self.embed_tokens.num_embeddings, tokens)
        x = self.embed_tokens.rows(tokens, self.pad_token)
        # The factor is rounded to the dtype of x first, as in Gemma's training.
        x = x if self.factor is None else x * jnp.asarray(self.factor, x.dtype)
        return x if self.noise is None else self.noise(x)


class Head(nnx.Module):
    """The last norm, and a matrix [V, H] unless it is tied to the embedding."""

    def __init__(self, c: DecoderConfig, o: Options | None = None, *, rngs: nnx.Rngs) -> None:
        """Create the norm, and the matrix with its adapter if any, unless it is tied."""
        lora = None if o is None else o.lora
        self.cap = c.logits_cap
        self.factor = c.logits_factor
        self.vocab = c.vocab
        self.norm = Norm(c.hidden, c, rngs=rngs)
        self.lm_head = nnx.data(
            None if c.tied else Table("lm_head", c.vocab, c.hidden, lora, rngs=rngs)
        )

    def _joined(self, embed: Embed, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return two factors of the uncapped logits: [..., H + r] and [H + r, V].

        r is the rank of the head's adapter, or 0.

        Args:
          embed: embedding, used if the head is tied.
          x: [..., H], output of the last layer.
        """
        z = self.norm(x)
        z = z if self.factor == 1 else z * self.factor
        if self.lm_head is not None:
            return self.lm_head.joined(z)
        return z, embed.embed_tokens.embedding[...].astype(z.dtype).T

    def logits(self, embed: Embed, x: jax.Array) -> jax.Array:
        """Return logits f32[B, T, V] for x[B, T, H], or f32[B, V] for x[B, H]."""
        z = jnp.matmul(*self._joined(embed, x), preferred_element_type=jnp.float32)
        return z if self.cap is None else self.cap * jnp.tanh(z / self.cap)

    def loss(self, embed: Embed, x: jax.Array, batch: Batch, tiles: int | None) -> Loss:
        """Return the summed cross entropy in nats, the number of counted targets, and faults.

        Args:
          embed: embedding, used if the head is tied.
          x: [B, T, H], output of the last layer.
          batch: batch with targets.
          tiles: number of vocabulary tiles; None: chosen by size.
        """
        check_targets(batch)
        z, w = self._joined(embed, x)
        targets = wide(batch["targets"])
        total = linear_cross_entropy(
            z, w, targets, reduction="sum", softcap=self.cap, num_tiles=tiles
        )
        count = jnp.sum(targets >= 0).astype(jnp.float32)
        return Loss(total, count, faults(batch, self.vocab))

    def log_probs(
        self, embed: Embed, x: jax.Array, targets: jax.Array, tiles: int | None
    ) -> jax.Array:
        """Return the log-probability of each target, in the targets' shape; 0 for negative ones.

        Args:
          embed: embedding, used if the head is tied.
          x: [B, T, H], output of the last layer.
          targets: integers [B, T], or [B, T, K] for K tokens at each position.
          tiles: number of vocabulary tiles; None: chosen by size.
        """
        z, w = self._joined(embed, x)
        targets = wide(targets)
        first = targets if targets.ndim == 2 else targets[..., 0]
        log_probs = -linear_cross_entropy(
            z, w, first, reduction="none", softcap=self.cap, num_tiles=tiles
        )
        if targets.ndim == 2:
            return log_probs
        rows = w.T

        @jax.checkpoint
        def logit(ids: jax.Array) -> jax.Array:
            products = z.astype(jnp.float32) * jnp.take(rows, jnp.maximum(ids, 0), axis=0)
            out = jnp.sum(products, axis=-1)
            return out if self.cap is None else self.cap * jnp.tanh(out / self.cap)

        # log p(k) = z(k) - lse, and lse = z(0) - log p(0). One token after the other, so that only
        # [B, T, H + r] of the matrix's rows are held.
        logits = jax.lax.map(logit, jnp.moveaxis(targets, -1, 0))  # [K, B, T]
        others = jnp.moveaxis(logits - logits[0] + log_probs, 0, -1)
        return jnp.where(targets >= 0, others, 0)
