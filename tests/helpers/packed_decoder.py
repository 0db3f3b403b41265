"""A small decoder of packed rows.

It has attention within a segment, learned positions, and a loss over the targets that count.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import toys

import zerojax as zj

VOCAB, WIDTH, HEADS, LAYERS, SEQ = 32, 16, 2, 2, 16


def init_embed(key: jax.Array) -> Any:
    return {
        "token": toys.draw(key, (VOCAB, WIDTH)) / 2,
        "position": toys.draw(key, (SEQ, WIDTH), 1) / 2,
    }


def embed(p: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return p["token"][batch["tokens"]] + p["position"][batch["positions"]]  # [B, T, D]


def init_block(key: jax.Array) -> Any:
    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 32),
        "down": (32, WIDTH),
    }
    return {
        name: toys.draw(key, shape, leaf) / 5 for leaf, (name, shape) in enumerate(shapes.items())
    }


def block(p: Any, x: jax.Array, key: Any, segment_ids: jax.Array, layer: Any) -> jax.Array:
    del key, layer
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchw->btchw", x, p["qkv"]), 2, 0)  # [B, T, heads, width]
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # [B, 1, T, T]
    a = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    x = x + a.reshape(x.shape) @ p["out"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def init_head(key: jax.Array) -> Any:
    return {"out": toys.draw(key, (WIDTH, VOCAB)) / 2}


def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> zj.Loss:
    del p_embed, key
    counts = batch["targets"] >= 0
    logits = (x @ p["out"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.maximum(batch["targets"], 0)
    )
    return zj.Loss(jnp.sum(losses * counts), jnp.sum(counts))


def model() -> zj.LayeredModel:
    """Return the decoder."""
    return zj.LayeredModel(
        LAYERS,
        init_embed,
        embed,
        init_block,
        block,
        init_head,
        head,
        context=lambda batch: batch["segment_ids"],
    )


def predict(p: Any, p_embed: Any, x: Any, batch: Any) -> jax.Array:
    del p_embed, batch
    return x @ p["out"]  # [B, T, V]


def init_cache(rows: int, length: int, dtype: Any) -> Any:
    return dict.fromkeys(("k", "v"), jnp.zeros((rows, length, HEADS, WIDTH // HEADS), dtype))


def cached_block(
    p: Any, x: jax.Array, cache: Any, positions: jax.Array, layer: Any
) -> tuple[jax.Array, Any]:
    del layer
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchw->btchw", x, p["qkv"]), 2, 0)
    rows = jnp.arange(x.shape[0])[:, None]
    cache = {name: cache[name].at[rows, positions].set(a) for name, a in (("k", k), ("v", v))}
    mask = jnp.arange(cache["k"].shape[1]) <= positions[:, None, :, None]  # [B, 1, T, S]
    a = jax.nn.dot_product_attention(q, cache["k"], cache["v"], mask=mask)
    x = x + a.reshape(x.shape) @ p["out"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"], cache


def generator() -> zj.LayeredModel:
    """Return the decoder with logits and a cache, for rows of one sequence each."""

    def causal(p: Any, x: jax.Array, key: Any, positions: jax.Array, layer: Any) -> jax.Array:
        return block(p, x, key, jnp.zeros_like(positions), layer)

    return dataclasses.replace(
        model(),
        block=causal,
        context=lambda b: b["positions"],
        predict=predict,
        cache=zj.Cache(init_cache, cached_block),
    )
