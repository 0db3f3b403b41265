"""Names that the documentation's blocks use without defining them, such as a tiny model.

Every page gets fresh copies. Readers substitute their own `model`, `tx`, `mesh`, `batch` and
`data`.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from chat_tokenizers import byte_tokenizer
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax as zj

VOCAB, HIDDEN, LAYERS, BATCH, SEQ = 64, 32, 2, 64, 4


def init_embed(key: jax.Array) -> Any:
    return {"table": 0.3 * jax.random.normal(key, (VOCAB, HIDDEN))}


def embed(p_embed: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return p_embed["table"][batch["tokens"]]  # x[B, T, H]


def init_block(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (HIDDEN, HIDDEN)) / 8}


def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
    del key
    return x + jnp.tanh(x @ p["w"])


def init_head(key: jax.Array) -> Any:
    del key
    return {"bias": jnp.zeros(VOCAB)}


def head(p_head: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    del key
    logits = x @ p_embed["table"].T + p_head["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    ).mean()


class Data:
    """Data that yields three batches each time it is iterated.

    It has `get_state` and `set_state`, like grain's iterators.
    """

    def __init__(self, batch: Any) -> None:
        self.batch, self.position = batch, 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            self.position += 1
            yield self.batch

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


PRETRAINED = "Llama-3.1-8B"
"""The folder of a pretrained model that the pages name; here it is a tiny model."""


def write_pretrained() -> None:
    """Write a random Llama with the vocabulary of `batch` into the working folder."""
    h, f, heads = HIDDEN, 2 * HIDDEN, 4
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": h, "intermediate_size": f, "num_hidden_layers": LAYERS,
        "num_attention_heads": heads, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (VOCAB, h), "model.norm.weight": (h,)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (h, h) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (f, h) for p in ("gate", "up")} | {
            f"{layer}.mlp.down_proj.weight": (h, f)
        }
        shapes |= {f"{layer}.{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
    random = np.random.default_rng(0)
    folder = pathlib.Path(PRETRAINED)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def names() -> dict[str, Any]:
    """Return a namespace for one page."""
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int32)
        for name in ("tokens", "targets")
    }
    embedding = jnp.asarray(random.standard_normal((VOCAB, HIDDEN), dtype=np.float32))
    return {
        "__name__": "page",
        **{
            "jax": jax,
            "jnp": jnp,
            "np": np,
            "optax": optax,
            "nn": nn,
            "nnx": nnx,
            "P": P,
            "zj": zj,
        },
        **{
            "HIDDEN": HIDDEN,
            "init_embed": init_embed,
            "embed": embed,
            "init_block": init_block,
            "block": block,
        },
        **{"init_head": init_head, "head": head},
        "model": zj.LayeredModel(LAYERS, init_embed, embed, init_block, block, init_head, head),
        "tx": optax.adamw(1e-3),
        "config": zj.ZeroConfig(stage=3),
        "mesh": zj.make_mesh(fsdp=4, devices=jax.devices()[:4]),
        "batch": batch,
        "abstract_batch": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch),
        "data": Data(batch),
        # a loss without its logits
        "x": embedding[batch["tokens"]],  # [B, S, D]
        "w": embedding.T,  # [D, V]
        "embedding": embedding,
        "labels": jnp.asarray(batch["targets"]),
        # fine-tuning
        "tokenizer": byte_tokenizer(),
    }
