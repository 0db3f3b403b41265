"""Layers with adapters: projections, the embedding and the head, tiled MLPs, and NEFTune's noise.

An adapter is a module `lora` with `lora_a` [in, r] and `lora_b` [r, out], and with DoRA `lora_m`
[out]. A tiled MLP stores its adapters as an untiled one does, so that checkpoints and exports have
the same names and shapes for both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.hf.adapters.lora import Lora
from zerojax.tiling import TiledMLP, tile_sum, wide_product

_INIT = nnx.initializers.normal(0.02)


class Adapter(nnx.LoRA):
    """The matrices A and B of one adapter, and DoRA's magnitudes."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        lora: Lora,
        *,
        kernel: jax.Array | None = None,
        is_embedding: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Create A [d_in, r] and B [r, d_out] with PEFT's initial values.

        Args:
          d_in: number of inputs; for an embedding, the size of the vocabulary.
          d_out: number of outputs.
          lora: options of the adapters.
          kernel: initial value of the adapted matrix [d_in, d_out], for DoRA's magnitudes.
          is_embedding: whether A is looked up; PEFT then starts with A = 0 instead of B = 0.
          rngs: random numbers of the initial values.
        """
        # torch's kaiming_uniform with a = sqrt(5), which is uniform in +-1 / sqrt(d_in).
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        zeros = nnx.initializers.zeros
        super().__init__(
            d_in,
            lora.rank,
            d_out,
            a_initializer=zeros if is_embedding else uniform,
            b_initializer=nnx.initializers.normal(1.0) if is_embedding else zeros,
            rngs=rngs,
        )
        self.scale = lora.scale
        self.lora_m: Any = nnx.data(None)
        if lora.use_dora and kernel is not None:
            # An import replaces them by the norms of the imported columns.
            self.lora_m = nnx.LoRAParam(jnp.linalg.norm(kernel, axis=0))
        self.drop: Any = nnx.data(nnx.Dropout(lora.dropout, rngs=rngs) if lora.dropout else None)

    @property
    def drops(self) -> bool:
        """Whether inputs are dropped in this call."""
        return self.drop is not None and not self.drop.deterministic

    def dropped(self, x: jax.Array) -> jax.Array:
        """Return x after dropout."""
        return x if self.drop is None else self.drop(x)

    def norms(self, kernel: jax.Array) -> jax.Array:
        """Return the norms f32[out] of the columns of W + s A B, given W [in, out].

            |w + s A b|^2 = |w|^2 + 2 s (w^T A) b + s^2 b^T (A^T A) b

        so no second matrix of W's size is needed. As in PEFT, no gradient flows through them.
        """
        wide = {"preferred_element_type": jnp.float32}
        kernel, a, b = jax.lax.stop_gradient((kernel, self.lora_a[...], self.lora_b[...]))
        b = b.astype(jnp.float32)
        squares = jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=0)
        cross = jnp.einsum("io,ir->ro", kernel, a, **wide)
        gram = jnp.einsum("ir,is->rs", a, a, **wide)
        total = squares + self.scale * jnp.sum(b * (2 * cross + self.scale * gram @ b), axis=0)
        return jnp.sqrt(jnp.maximum(total, 0))


class Projection(nnx.Linear):
    """A dense layer, with an adapter if `lora` targets its name."""

    def __init__(
        self, name: str, d_in: int, d_out: int, bias: bool, lora: Lora | None, *, rngs: nnx.Rngs
    ) -> None:
        """Create the matrix [d_in, d_out], its bias if any, and its adapter if any."""
        super().__init__(d_in, d_out, use_bias=bias, kernel_init=_INIT, rngs=rngs)
        self.lora: Any = nnx.data(None)
        if lora is not None and name in lora.targets:
            self.lora = Adapter(d_in, d_out, lora, kernel=self.kernel[...], rngs=rngs)

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Return x W + bias, plus the scaled output of the adapter."""
        y = super().__call__(x, out_sharding=out_sharding)
        lora = self.lora
        if lora is None:
            return y
        z = lora.dropped(x)
        added = lora(z) * lora.scale
        if lora.lora_m is None:
            return y + added
        factor = lora.lora_m[...] / lora.norms(self.kernel[...])
        factor = factor.astype(y.dtype)
        # PEFT adapts what dropout leaves of x, in addition to all of x W.
        base = z @ self.kernel[...] if lora.drops else y
        if self.bias is not None and not lora.drops:
            base = base - self.bias[...]
        return y + (factor - 1) * base + factor * added


class Table(nnx.Embed):
    """An embedding [V, H], or the head's matrix, with an adapter if `lora` targets its name."""

    def __init__(
        self, name: str, vocab: int, hidden: int, lora: Lora | None, *, rngs: nnx.Rngs
    ) -> None:
        """Create the matrix [vocab, hidden], and its adapter if any."""
        super().__init__(vocab, hidden, embedding_init=_INIT, rngs=rngs)
        self.lora: Any = nnx.data(None)
        if lora is None or name not in lora.targets:
            return
        if name == "embed_tokens":
            self.lora = Adapter(vocab, hidden, lora, is_embedding=True, rngs=rngs)
        else:
            self.lora = Adapter(hidden, vocab, lora, rngs=rngs)

    def rows(self, tokens: jax.Array, pad_token: int | None) -> jax.Array:
        """Return E[tokens], plus s A[tokens] B with an adapter; NaN for tokens out of range.

        Args:
          tokens: integers [B, T].
          pad_token: token whose rows of E and A get no gradient, or None.
        """

        def take(table: jax.Array) -> jax.Array:
            x = jnp.take(table, tokens, axis=0)
            if pad_token is None:
                return x
            return jnp.where((tokens == pad_token)[..., None], jax.lax.stop_gradient(x), x)

        # Use the dtype of the parameters that are passed in; `nnx.Embed` would cast to its own.
        x = take(self.embedding[...])
        if self.lora is None:
            return x
        return x + take(self.lora.lora_a[...]) @ self.lora.lora_b[...] * self.lora.scale

    def joined(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return two factors of the logits z W^T + s dropout(z) A B, with A and B beside z and W.

        Args:
          z: [..., H], input of the head.

        Returns:
          [z, s dropout(z) A][..., H + r], and [W^T; B][H + r, V], in the dtype of z.
        """
        w = self.embedding[...].astype(z.dtype).T
        if self.lora is None:
            return z, w
        a = self.lora.lora_a[...].astype(z.dtype)
        b = self.lora.lora_b[...].astype(z.dtype)
        inner = self.lora.dropped(z) @ a * self.lora.scale
        return jnp.concatenate([z, inner], -1), jnp.concatenate([w, b])


class Noise(nnx.Module):
    """NEFTune's noise (arXiv:2310.05914): x + U(-1, 1) alpha / sqrt(T H), in training only."""

    def __init__(self, alpha: float, *, rngs: nnx.Rngs) -> None:
        """Take the size of the noise."""
        self.alpha = alpha
        self.deterministic = False
        self.rngs = rngs["dropout"].fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x[B, T, H] with its noise."""
        if self.deterministic:
            return x
        bound = self.alpha / (x.shape[-2] * x.shape[-1]) ** 0.5
        noise = jax.random.uniform(self.rngs(), x.shape, jnp.float32, -bound, bound)
        return x + noise.astype(x.dtype)


class Adapted(nnx.Module):
    """The adapter of a projection whose weights are stored in tiles elsewhere."""

    def __init__(self, d_in: int, d_out: int, lora: Lora, *, rngs: nnx.Rngs) -> None:
        """Create the adapter."""
        self.lora = Adapter(d_in, d_out, lora, rngs=rngs)


class AdaptedMLP(TiledMLP):
    """A `TiledMLP` with adapters for the projections that `lora` targets.

    Each tile k adds its part of the adapters:

        gate_k = x gate[k] + (s x A_gate) B_gate[:, k]        up_k alike
        y      = sum_k h_k down[k] + s (h_k A_down[k]) B_down    h_k = f(gate_k) * up_k
    """

    def __init__(
        self, features: int, hidden: int, *, lora: Lora | None, rngs: nnx.Rngs, **options: Any
    ) -> None:
        """Create the tiled MLP, and the adapters.

        Args:
          features: number of input and output features.
          hidden: number of hidden features.
          lora: options of the adapters, or None.
          rngs: random numbers of the initial values.
          **options: further options of `TiledMLP`.
        """
        super().__init__(features, hidden, rngs=rngs, **options)

        def adapted(name: str, d_in: int, d_out: int) -> Any:
            if lora is None or name not in lora.targets:
                return nnx.data(None)
            return Adapted(d_in, d_out, lora, rngs=rngs)

        is_gated = self.gate is not None
        self.gate_proj = adapted("gate_proj", features, hidden) if is_gated else nnx.data(None)
        self.up_proj = adapted("up_proj", features, hidden)
        self.down_proj = adapted("down_proj", hidden, features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the MLP's result: x[..., S, D] -> [..., S, D]."""
        modules = {"gate": self.gate_proj, "up": self.up_proj, "down": self.down_proj}
        adapters = {name: m.lora for name, m in modules.items() if m is not None}
        if not adapters:
            return super().__call__(x)
        names = ("up", "gate", "down", "up_bias", "gate_bias")
        params = {name: getattr(self, name) for name in names}
        tiles = {name: param[...] for name, param in params.items() if param is not None}
        shared = {"x": x}
        parts: dict[str, jax.Array] = {}
        for name, adapter in adapters.items():
            a = adapter.lora_a[...]
            b = adapter.lora_b[...]
            # The factors that are cut into tiles are scaled: a product's result is an ordinary
            # array, which gather on use does not have to slice as a stack of sharded tiles.
            if name == "down":
                rows = (a * adapter.scale).reshape(self.num_tiles, -1, a.shape[-1])
                parts["down"] = rows  # [t, H / t, r]
                shared["down"] = b
            else:
                columns = (b * adapter.scale).reshape(b.shape[0], self.num_tiles, -1)
                parts[name] = jnp.moveaxis(columns, 1, 0)  # [t, r, H / t]
                shared[name] = adapter.dropped(x) @ a

        def use(tile: Any, shared: Any, part: Any) -> jax.Array:
            def linear(name: str) -> jax.Array:
                y = shared["x"] @ tile[name].astype(x.dtype)
                if f"{name}_bias" in tile:
                    y = y + tile[f"{name}_bias"].astype(x.dtype)
                return y + shared[name] @ part[name] if name in part else y

            h = self.activation(linear("gate" if "gate" in tile else "up"))
            if "gate" in tile:
                h = h * linear("up")
            y = wide_product(h, tile["down"].astype(x.dtype))
            return y + wide_product(h @ part["down"], shared["down"]) if "down" in part else y

        y = tile_sum(use, tiles, shared, parts).astype(x.dtype)
        return y if self.down_bias is None else y + self.down_bias[...].astype(y.dtype)
