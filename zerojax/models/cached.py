"""A model with a cache for earlier tokens, expressed as another model with the same parameters.

Its activations are {"x": x, "cache": the caches of all layers}, passed from block to block:

    embed      x = embed(batch), cache = the batch's cache, or an empty one
    block l    x, cache[:, l] = cache_block(x, cache[:, l])
    predict    outputs, cache

So it runs like any other model: parameters are gathered and dequantized where a block uses them.
Caches are [B, L, ..], batch first, so they are sharded like activations.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.model import LayeredModel, Stack, list_stacks
from zerojax.trees import Batch, Context, Params

CACHE = "cache"
LAST = "last"
"""Keys of a batch: cache of earlier tokens; and position per row of the wanted outputs, i32[B]."""


def at_last(x: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """Return x[B, T, H] at the position `batch["last"]` of each row, [B, H].

    Without such a key, x is returned unchanged. A row whose position is not in 0 .. T - 1 is NaN.

    Args:
      x: outputs at all positions, [B, T, H].
      batch: batch that may have the key "last", integers [B].
    """
    if LAST not in batch:
        return x
    last = batch[LAST].astype(jnp.int32)
    last = jnp.where(last < 0, x.shape[1], last)  # a negative index would count from the end
    return jnp.take_along_axis(x, last[:, None, None], 1, mode="fill")[:, 0]


def with_cache(model: LayeredModel, length: int) -> LayeredModel:
    """Return a model whose `predict` returns (outputs, cache).

    The batch may hold the cache of earlier tokens.

    Args:
      model: model with a `cache` and a `predict`.
      length: number of tokens per row that a cache has room for.
    """
    cache = model.cache
    context = model.context
    predict = model.predict
    assert cache is not None
    assert predict is not None

    def without_cache(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: a for name, a in batch.items() if name != CACHE}

    def embed(p_embed: Params, batch: Batch, key: Any) -> Any:
        x = model.embed(p_embed, without_cache(batch), key)
        return {"x": x, CACHE: batch[CACHE] if CACHE in batch else empty(x)}

    def empty(x: Any) -> Any:
        first = jax.tree.leaves(x)[0]
        layer = cache.init(first.shape[0], length, first.dtype)
        return jax.tree.map(
            lambda a: jnp.repeat(a[:, None], model.num_layers, 1), layer
        )  # [B, ...] -> [B, L, ...]

    def run(p_head: Params, p_embed: Params, x: Any, batch: Batch) -> Any:
        return predict(p_head, p_embed, x["x"], without_cache(batch)), x[CACHE]

    cached = dataclasses.replace(
        model,
        embed=embed,
        predict=run,
        context=None if context is None else lambda batch: context(without_cache(batch)),
        cache=None,
    )
    if not model.stacks:
        return dataclasses.replace(
            cached,
            block=_build_block(cache.block),
            per_layer={"number": np.arange(model.num_layers), "given": model.per_layer},
        )
    stacks: list[Stack] = []
    per_layer: dict[str, Any] = {}
    for part, stack in zip(list_stacks(model), model.stacks, strict=True):
        assert isinstance(cache.block, Mapping)
        stacks.append(dataclasses.replace(stack, block=_build_block(cache.block[part.name])))
        numbers = np.arange(part.first, part.first + stack.num_layers)
        per_layer[part.name] = {"number": numbers, "given": part.model.per_layer}
    return dataclasses.replace(cached, stacks=stacks, per_layer=per_layer)


def _build_block(cache_block: Any) -> Callable[..., Any]:
    """Return the block of a model with a cache, given a block that reads and returns a cache."""

    def block(p: Params, x: Any, key: Any, context: Context, layer: Any) -> Any:
        del key
        number = layer["number"]
        layer_cache = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, number, 1, keepdims=False), x[CACHE]
        )
        y, layer_cache = cache_block(p, x["x"], layer_cache, context, layer["given"])
        stacks = jax.tree.map(
            lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, number, 1),
            x[CACHE],
            layer_cache,
        )
        return {"x": y, CACHE: stacks}

    return block
