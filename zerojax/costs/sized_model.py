"""A compilable transformer of given `Sizes`.

It has pre-norm blocks without biases, grouped-query attention, a GELU or gated MLP, and a tied
head.

A plan from numbers alone has no model. To compare its figures with a compiler's, `zerojax plan
--validate` builds this one, with the parameters that `Sizes` counts plus norms: 2 h per layer and h
at the end. Its block marks the values that a plan chooses among
(`jax.ad_checkpoint.checkpoint_name`): "qkv", "attention", "projection" and "mlp_hidden".
"""

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
    h = sizes.hidden
    width = sizes.mlp_width
    heads = sizes.heads
    kv = sizes.num_kv_heads
    head = h // heads

    def init_block(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, 4)
        shapes = {
            "qkv": (h, sizes.qkv_width),
            "out": (h, h),
            "up": (h, (1 + sizes.gated) * width),
            "down": (width, h),
        }
        pairs = zip(shapes.items(), keys, strict=True)
        weights = {
            name: jax.random.normal(k, shape) * shape[0] ** -0.5 for (name, shape), k in pairs
        }
        if mlp_tiles > 1:  # up[t, h, f/t], down[t, f/t, h]
            up = weights["up"].reshape(h, 1 + sizes.gated, mlp_tiles, width // mlp_tiles)
            weights["up"] = jnp.moveaxis(up, 2, 0).reshape(mlp_tiles, h, -1)
            weights["down"] = weights["down"].reshape(mlp_tiles, width // mlp_tiles, h)
        return weights | {"norm1": jnp.ones(h), "norm2": jnp.ones(h)}

    def mlp(p: dict[str, Array], x: Array) -> Array:
        up = checkpoint_name(x @ p["up"], "mlp_hidden") if mlp_tiles == 1 else x @ p["up"]
        if not sizes.gated:
            return jax.nn.gelu(up) @ p["down"]
        gate, up = jnp.split(up, 2, -1)
        return (jax.nn.silu(gate) * up) @ p["down"]

    def block(p: dict[str, Array], x: Array, key: Any) -> Array:
        del key
        qkv = checkpoint_name(_norm(x, p["norm1"]) @ p["qkv"], "qkv")  # [B, T, h (1 + 2 k/a)]
        q, k, v = jnp.split(qkv, [h, h + kv * head], -1)
        split = lambda a, n: a.reshape(*a.shape[:2], n, head)  # noqa: E731
        y = jax.nn.dot_product_attention(
            split(q, heads),
            split(k, kv),
            split(v, kv),
            is_causal=True,
            implementation="cudnn" if cudnn else None,
        )
        y = checkpoint_name(y.reshape(x.shape), "attention")
        x = x + checkpoint_name(y @ p["out"], "projection")
        weights = {"up": p["up"], "down": p["down"]}
        y = _norm(x, p["norm2"])
        if mlp_tiles == 1:
            return x + mlp(weights, y)
        return x + tile_sum(lambda tile, y, _: mlp(tile, y), weights, y).astype(x.dtype)

    def embed(p: dict[str, Array], batch: Batch, key: Any) -> Array:
        del key
        return p["table"][batch["tokens"]].astype(dtype)

    def loss(
        p: dict[str, Array], p_embed: dict[str, Array], x: Array, batch: Batch, key: Any
    ) -> Array:
        del key
        rows = _norm(x, p["norm"]).reshape(-1, h)
        return linear_cross_entropy(rows, p_embed["table"].T, batch["targets"].reshape(-1))

    over = TENSOR if tensor > 1 else None
    lead = (None,) * (mlp_tiles > 1)
    specs = {
        "embed": {"table": P()},
        "block": {
            "qkv": P(None, over),
            "out": P(over, None),
            "norm1": P(),
            "norm2": P(),
            "up": P(*lead, None, over),
            "down": P(*lead, over, None),
        },
        "head": {"norm": P()},
    }
    return LayeredModel(
        num_layers=sizes.layers,
        init_embed=lambda key: {"table": jax.random.normal(key, (sizes.vocab, h)) * 0.02},
        embed=embed,
        init_block=init_block,
        block=block,
        init_head=lambda key: {"norm": jnp.ones(h)},
        head=loss,
        specs=specs if over else None,
        tiles={name: mlp_tiles > 1 and name in ("up", "down") for name in specs["block"]}
        if mlp_tiles > 1
        else False,
    )


def sized_batch(sizes: Sizes) -> dict[str, Any]:
    """Return the shapes of a step's batch: tokens and targets, int32 [batch, seq]."""
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def _norm(x: Array, scale: Array) -> Array:
    """Return RMSNorm of x, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)
