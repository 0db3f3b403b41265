"""An encoder and a decoder as two stacks with different block shapes, and the plain loop.

The decoder's blocks attend to the encoder's output, which is their context, so the encoder trains
through it. The names put the decoder first in the tree. Both stacks add to the loss and share a
metric name. The decoder has slices of `per_layer`, a frozen leaf, integers in its context, and
matrices annotated for `tensor`. The two stacks also differ in sequence length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from toys import draw

import zerojax as zj

ENCODER, DECODER, HIDDEN, INNER, VOCAB, FROM, TO, BATCH = 2, 3, 8, 24, 16, 6, 4, 16
TEMPERATURES = np.asarray([1.0, 0.5, 2.0], np.float32)


def init_embed(key: jax.Array) -> Any:
    return {"table": 0.5 * draw(key, (VOCAB, HIDDEN))}


def embed(p: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return p["table"][batch["source"]]  # [B, S, H]


def init_encoder(key: jax.Array) -> Any:
    return {"w": draw(key, (HIDDEN, HIDDEN)) / 3, "b": jnp.zeros(HIDDEN)}


def dropped(x: jax.Array, key: Any) -> jax.Array:
    return x if key is None else x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def encode(p: Any, x: jax.Array, key: Any, context: Any = None, layer: Any = None) -> Any:
    # If one stack has `per_layer`, the model may call the other stacks without it.
    del context, layer
    y = x + dropped(jnp.tanh(x @ p["w"] + p["b"]), key)
    return y, zj.Loss(0.01 * jnp.mean(y**2), metrics={"square": jnp.mean(y**2)})


def enter(p: Any, x: jax.Array, batch: Any, key: Any) -> Any:
    memory = dropped(x * (1 + p["table"][0]), key)
    return p["table"][batch["inputs"]], {"memory": memory, "mask": batch["source"] > 0}


def init_decoder(key: jax.Array) -> Any:
    return {
        "query": draw(key, (HIDDEN, HIDDEN)) / 3,
        "up": draw(key, (HIDDEN, INNER), 1) / 3,
        "down": draw(key, (INNER, HIDDEN), 2) / 5,
        "scale": jnp.full(HIDDEN, 0.9),
    }


def decode(p: Any, x: jax.Array, key: Any, context: Any, layer: Any) -> Any:
    scores = jnp.einsum("bth,bsh->bts", (x * p["scale"]) @ p["query"], context["memory"]) / layer
    scores = jnp.where(context["mask"][:, None, :], scores, -1e9)
    y = x + jnp.einsum(
        "bts,bsh->bth",
        jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype),
        context["memory"],
    )
    y = y + dropped(jax.nn.gelu(y @ p["up"]) @ p["down"], key)
    return y.astype(x.dtype), zj.Loss(
        0.0, metrics={"square": jnp.mean(y**2), "memory": jnp.mean(context["memory"] ** 2)}
    )


def init_head(key: jax.Array) -> Any:
    return {"bias": 0.1 * draw(key, (VOCAB,))}


def predict(p: Any, p_embed: Any, x: jax.Array, batch: Any) -> jax.Array:
    del batch
    return x @ p_embed["table"].T + p["bias"]


def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    del key
    logits = predict(p, p_embed, x, batch).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def model(**fields: Any) -> zj.LayeredModel:
    given: dict[str, Any] = {
        "init_embed": init_embed,
        "embed": embed,
        "init_head": init_head,
        "head": head,
        "predict": predict,
        "stacks": (
            zj.Stack("encoder", ENCODER, init_encoder, encode),
            zj.Stack("decoder", DECODER, init_decoder, decode, enter),
        ),
        "specs": {
            "block": {
                "decoder": {
                    "query": None,
                    "up": P(None, "tensor"),
                    "down": P("tensor", None),
                    "scale": None,
                }
            }
        },
        "per_layer": {"decoder": TEMPERATURES},
        "frozen": {
            "block": {"decoder": {"query": False, "up": False, "down": False, "scale": True}}
        },
    }
    return zj.LayeredModel(**given | fields)


def batches(count: int, size: int = BATCH) -> list[Any]:
    random = np.random.default_rng(0)
    lengths = {"source": FROM, "inputs": TO, "targets": TO}
    return [
        {name: random.integers(0, VOCAB, (size, n)) for name, n in lengths.items()}
        for _ in range(count)
    ]


def plain_loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Return the loss and metrics of one batch: layers in Python loops, no keys."""
    blocks, added = params["blocks"], []
    x = embed(params["embed"], batch, None)
    for i in range(ENCODER):
        x, loss = encode(jax.tree.map(lambda a, i=i: a[i], blocks["encoder"]), x, None)
        added.append(loss)
    x, context = enter(params["embed"], x, batch, None)
    for i in range(DECODER):
        x, loss = decode(
            jax.tree.map(lambda a, i=i: a[i], blocks["decoder"]), x, None, context, TEMPERATURES[i]
        )
        added.append(loss)
    metrics = {
        "square": sum(a.metrics["square"] for a in added) / len(added),
        "memory": sum(a.metrics["memory"] for a in added[ENCODER:]) / DECODER,
    }
    return head(params["head"], params["embed"], x, batch, None) + sum(
        a.total for a in added
    ), metrics


@functools.cache
def plain_step(count: int, tx: optax.GradientTransformation) -> Any:
    """Return a plain optax step on one device with `count` microbatches and averaged metrics."""

    def loss(params: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)
        values = [
            plain_loss(params, jax.tree.map(lambda a, m=m: a[m], pieces)) for m in range(count)
        ]
        return jax.tree.map(lambda *a: sum(a) / count, *values)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        grads["blocks"]["decoder"]["scale"] = jnp.zeros_like(params["blocks"]["decoder"]["scale"])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics | {"loss": value}

    return step
