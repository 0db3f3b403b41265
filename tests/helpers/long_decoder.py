"""A small decoder with grouped heads, packed rows and experts, for meshes with every axis.

Its attention is any function of q, k, v and the segment ids. Its weights have specs for `tensor`,
and its experts for `expert`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj

LAYERS, WIDTH, HEADS, KV_HEADS, DEPTH, INNER, VOCAB = 3, 16, 8, 4, 4, 48, 32
SEQ, BATCH, EXPERTS = 16, 16, 8
SPECS = {
    "q": P(None, "tensor", None),
    "k": P(None, "tensor", None),
    "v": P(None, "tensor", None),
    "out": P("tensor", None, None),
    "up": P(None, "tensor"),
    "down": P("tensor", None),
}
EXPERT_SPECS = {
    **SPECS,
    "router": P(),
    "up": P("expert", None, "tensor"),
    "down": P("expert", "tensor", None),
}


def plain_attention(q: Any, k: Any, v: Any, segment_ids: Any) -> jax.Array:
    """Return causal attention within segments, by its formula."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, 2) for a in (k, v))
    scores = jnp.einsum("btnd,bsnd->bnts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    position = jnp.arange(q.shape[1])
    seen = (position[:, None] >= position) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1).astype(q.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, v)


def split_attention(method: Any, q: Any, k: Any, v: Any, segment_ids: Any) -> jax.Array:
    """Return the same by `zj.attention`, in small blocks."""
    return zj.attention(q, k, v, segment_ids=segment_ids, method=method, block=4)


def every_expert(x: Any, p: Any) -> jax.Array:
    """Return the sum of all experts' results, weighted by the router's probabilities."""
    shares = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), -1).astype(x.dtype)
    hidden = jax.nn.gelu(jnp.einsum("bth,ehf->betf", x, p["up"]))
    return jnp.einsum("betf,efh,bte->bth", hidden, p["down"], shares)


def init_embed(key: jax.Array) -> Any:
    return {
        "token": toys.draw(key, (VOCAB, WIDTH)) / 2,
        "position": toys.draw(key, (SEQ, WIDTH), 1) / 2,
    }


def embed(p: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return p["token"][batch["tokens"]] + p["position"][batch["positions"]]


def init_block(key: jax.Array, has_experts: bool) -> Any:
    lead = (EXPERTS,) if has_experts else ()
    shapes = {
        "q": (WIDTH, HEADS, DEPTH),
        "k": (WIDTH, KV_HEADS, DEPTH),
        "v": (WIDTH, KV_HEADS, DEPTH),
        "out": (HEADS, DEPTH, WIDTH),
        "up": (*lead, WIDTH, INNER),
        "down": (*lead, INNER, WIDTH),
    }
    if has_experts:
        shapes["router"] = (WIDTH, EXPERTS)
    return {
        name: toys.draw(key, shape, leaf) / 4 for leaf, (name, shape) in enumerate(shapes.items())
    }


def block(
    attend: Callable[..., Any], dropout: float, p: Any, x: Any, key: Any, segment_ids: Any
) -> jax.Array:
    def norm(x: Any) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    q, k, v = (jnp.einsum("bth,hnd->btnd", norm(x), p[name]) for name in ("q", "k", "v"))
    x = x + jnp.einsum("btnd,ndh->bth", attend(q, k, v, segment_ids), p["out"])
    y = every_expert(norm(x), p) if "router" in p else jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    if dropout and key is not None:  # no key in an evaluation
        y = jnp.where(jax.random.bernoulli(key, 1 - dropout, y.shape), y / (1 - dropout), 0)
    return (x + y).astype(x.dtype)


def init_head(key: jax.Array) -> Any:
    return {"out": toys.draw(key, (WIDTH, VOCAB)) / 2}


def head(p: Any, p_embed: Any, x: Any, batch: Any, key: Any) -> zj.Loss:
    del p_embed, key
    losses = optax.softmax_cross_entropy_with_integer_labels(
        (x @ p["out"]).astype(jnp.float32), jnp.maximum(batch["targets"], 0)
    )
    counts = (batch["targets"] >= 0).astype(jnp.float32)
    weight = jnp.sum(counts)
    loss = jnp.sum(losses * counts) / jnp.maximum(weight, 1)
    return zj.Loss(loss, weight=weight, metrics={"counted": weight})


def model(
    attend: Callable[..., Any] = plain_attention,
    experts: bool = False,
    dropout: float = 0.0,
    layers: int = LAYERS,
) -> zj.LayeredModel:
    """Return the decoder; its batches are those of `batches`."""
    run = functools.partial(block, attend, dropout)
    return zj.LayeredModel(
        layers,
        init_embed,
        embed,
        lambda key: init_block(key, experts),
        lambda p, x, key, segment_ids, layer: run(p, x, key, segment_ids),
        init_head,
        head,
        context=lambda batch: batch["segment_ids"],
        specs={"block": EXPERT_SPECS if experts else SPECS},
        stochastic=dropout > 0,
    )


def batches(count: int, size: int = BATCH) -> list[dict[str, np.ndarray]]:
    """Return batches of packed rows; some targets do not count."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = random.integers(0, VOCAB, (size, SEQ + 1)).astype(np.int32)
        is_first = random.random((size, SEQ)) < 0.15
        is_first[:, 0] = True
        segment_ids = np.cumsum(is_first, 1).astype(np.int32)
        starts = np.maximum.accumulate(np.where(is_first, np.arange(SEQ), 0), 1)
        targets = np.where(random.random((size, SEQ)) < 0.3, -1, tokens[:, 1:])
        found.append(
            {
                "tokens": tokens[:, :-1].copy(),
                "targets": targets.astype(np.int32),
                "segment_ids": segment_ids,
                "positions": (np.arange(SEQ) - starts).astype(np.int32),
            }
        )
    return found
