"""A compilable transformer of given `Sizes`.

It has pre-norm blocks without biases, grouped-query attention, a GELU or gated MLP, and a tied
head.

A plan from numbers alone has no model. To compare its figures with a compiler's, `zerojax plan
--validate` builds this one, with the parameters that `Sizes` counts plus norms: 2 h per layer and h
at the end. Its block marks the values that a plan chooses among
(`jax.ad_checkpoint.checkpoint_name`): "qkv", "attention", "projection" and "mlp_hidden".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax.costs.sizes import Sizes
from zerojax.models import LayeredModel
from zerojax.sharding import TENSOR
from zerojax.tiling import linear_cross_entropy, tile_sum
from zerojax.trees import Batch

Array = jax.Array


def sized_model(
    sizes: Sizes,
    *,
    dtype: Any = jnp.bfloat16,
    tensor: int = 1,
    cudnn: bool = False,
    mlp_tiles: int = 1,
) -> LayeredModel:
    """Return a transformer of given sizes.

    Args:
      sizes: sizes of the transformer; vocab must not be 0.
      dtype: compute dtype.
      tensor: number of devices that share a layer's products.
      cudnn: whether attention is cuDNN's kernel, which saves no scores, instead of XLA's.
      mlp_tiles: number of tiles in which the MLP runs, one at a time; 1 means untiled.

    Raises:
      ValueError: there is no vocabulary, and so no loss.
    """
    if not sizes.vocab:
        raise ValueError(
            "vocab = 0: without a vocabulary there is no loss to compile; set vocab, such as 50304"
        )
    blocks = _Blocks(sizes, cudnn, mlp_tiles)
    embed_head = _EmbedHead(sizes, dtype)
    tiles = {name: name in ("up", "down") for name in _BLOCK_LEAVES} if mlp_tiles > 1 else False
    return LayeredModel(
        num_layers=sizes.layers,
        init_embed=embed_head.init_embed,
        embed=embed_head.embed,
        init_block=blocks.init,
        block=blocks.apply,
        init_head=embed_head.init_head,
        head=embed_head.loss,
        specs=_specs(mlp_tiles) if tensor > 1 else None,
        tiles=tiles,
    )


_BLOCK_LEAVES = ("qkv", "out", "norm1", "norm2", "up", "down")


def _specs(mlp_tiles: int) -> dict[str, dict[str, P]]:
    """Return how each weight is split over `tensor`."""
    tile_dim = (None,) if mlp_tiles > 1 else ()
    return {
        "embed": {"table": P()},
        "block": {
            "qkv": P(None, TENSOR),
            "out": P(TENSOR, None),
            "norm1": P(),
            "norm2": P(),
            "up": P(*tile_dim, None, TENSOR),
            "down": P(*tile_dim, TENSOR, None),
        },
        "head": {"norm": P()},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of a transformer.

    Attributes:
      sizes: sizes of the transformer.
      cudnn: whether attention is cuDNN's kernel.
      mlp_tiles: number of tiles in which the MLP runs.
    """

    sizes: Sizes
    cudnn: bool
    mlp_tiles: int

    def init(self, key: Array) -> dict[str, Array]:
        """Return the weights of one block."""
        sizes = self.sizes
        h = sizes.hidden
        width = sizes.mlp_width
        shapes = {
            "qkv": (h, sizes.qkv_width),
            "out": (h, h),
            "up": (h, (1 + sizes.gated) * width),
            "down": (width, h),
        }
        weights = dict[str, Array]()
        for (name, shape), k in zip(shapes.items(), jax.random.split(key, 4), strict=True):
            weights[name] = jax.random.normal(k, shape) * shape[0] ** -0.5
        t = self.mlp_tiles
        if t > 1:  # up[t, h, f/t], down[t, f/t, h]
            up = weights["up"].reshape(h, 1 + sizes.gated, t, width // t)
            weights["up"] = jnp.moveaxis(up, 2, 0).reshape(t, h, -1)
            weights["down"] = weights["down"].reshape(t, width // t, h)
        return weights | {"norm1": jnp.ones(h), "norm2": jnp.ones(h)}

    def apply(self, p: dict[str, Array], x: Array, key: Any) -> Array:
        """Return one block's output."""
        del key
        x = x + checkpoint_name(self._attention(p, x) @ p["out"], "projection")  # [B, T, h]
        weights = {"up": p["up"], "down": p["down"]}
        y = _norm(x, p["norm2"])
        if self.mlp_tiles == 1:
            return x + self._mlp(weights, y)
        return x + tile_sum(lambda tile, y, _: self._mlp(tile, y), weights, y).astype(x.dtype)

    def _attention(self, p: dict[str, Array], x: Array) -> Array:
        """Return the attention of all heads, before the projection."""
        sizes = self.sizes
        h = sizes.hidden
        head = h // sizes.heads
        kv = sizes.num_kv_heads

        def split_heads(a: Array, num_heads: int) -> Array:
            return a.reshape(*a.shape[:2], num_heads, head)

        qkv = checkpoint_name(_norm(x, p["norm1"]) @ p["qkv"], "qkv")  # [B, T, h (1 + 2 k/a)]
        q, k, v = jnp.split(qkv, [h, h + kv * head], -1)
        y = jax.nn.dot_product_attention(
            split_heads(q, sizes.heads),
            split_heads(k, kv),
            split_heads(v, kv),
            is_causal=True,
            implementation="cudnn" if self.cudnn else None,
        )
        return checkpoint_name(y.reshape(x.shape), "attention")

    def _mlp(self, p: dict[str, Array], x: Array) -> Array:
        """Return the MLP's output, or one tile's part of it."""
        up = x @ p["up"]
        if self.mlp_tiles == 1:
            up = checkpoint_name(up, "mlp_hidden")
        if not self.sizes.gated:
            return jax.nn.gelu(up) @ p["down"]
        gate, up = jnp.split(up, 2, -1)
        return (jax.nn.silu(gate) * up) @ p["down"]


@dataclasses.dataclass(frozen=True, slots=True)
class _EmbedHead:
    """Embedding and head of a transformer, which share the table of the vocabulary.

    Attributes:
      sizes: sizes of the transformer.
      dtype: compute dtype.
    """

    sizes: Sizes
    dtype: Any

    def init_embed(self, key: Array) -> dict[str, Array]:
        """Return the embedding's table."""
        shape = (self.sizes.vocab, self.sizes.hidden)
        return {"table": jax.random.normal(key, shape) * 0.02}

    def embed(self, p: dict[str, Array], batch: Batch, key: Any) -> Array:
        """Return the embedded tokens, [B, T, h]."""
        del key
        return p["table"][batch["tokens"]].astype(self.dtype)

    def init_head(self, key: Array) -> dict[str, Array]:
        """Return the head's norm."""
        del key
        return {"norm": jnp.ones(self.sizes.hidden)}

    def loss(
        self, p: dict[str, Array], p_embed: dict[str, Array], x: Array, batch: Batch, key: Any
    ) -> Array:
        """Return the mean cross entropy of the targets."""
        del key
        rows = _norm(x, p["norm"]).reshape(-1, self.sizes.hidden)
        return linear_cross_entropy(rows, p_embed["table"].T, batch["targets"].reshape(-1))


def sized_batch(sizes: Sizes) -> dict[str, Any]:
    """Return the shapes of a step's batch: tokens and targets, int32 [batch, seq]."""
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def _norm(x: Array, scale: Array) -> Array:
    """Return RMSNorm of x, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)
