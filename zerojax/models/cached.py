"""A model whose blocks keep what they made of earlier tokens, as another model of the same
parameters.

Its stream is {"x": x, "cache": all layers' caches}, which goes from block to block as x does:

    embed      x = embed(batch), cache = that of the batch, or empty
    block l    x, cache[:, l] = cache_block(x, cache[:, l])
    predict    outputs, cache

So it is run as every model is: parameters are gathered and decoded where a block uses them. Caches
  are [B, L, ..], batch first,
so that they are split as activations are.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.model import LayeredModel

CACHE, LAST = "cache", "last"
"""Keys of a batch: the cache of the tokens before, and the position of each row whose outputs are
wanted, i32[B].
"""


def at_last(x: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """Return [B, H], of x[B, T, H] the position `batch["last"]` of each row; x as it is where the
    batch names none.

    A row whose position is not one of 0 .. T - 1 is NaN.
    """
    if LAST not in batch:
        return x
    last = batch[LAST].astype(jnp.int32)
    last = jnp.where(last < 0, x.shape[1], last)  # a negative index would count from the end
    return jnp.take_along_axis(x, last[:, None, None], 1, mode="fill")[:, 0]


def with_cache(model: LayeredModel, length: int) -> LayeredModel:
    """Return a model whose `predict` gives (outputs, cache) of a batch that holds the cache of the
    tokens before, if any.

    Args:
      model: with a `cache` and a `predict`.
      length: tokens that a cache has room for.
    """
    cache, context, predict = model.cache, model.context, model.predict
    assert cache is not None
    assert predict is not None

    def given(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: a for name, a in batch.items() if name != CACHE}

    def embed(p_embed: Any, batch: Any, key: Any) -> Any:
        x = model.embed(p_embed, given(batch), key)
        return {"x": x, CACHE: batch[CACHE] if CACHE in batch else empty(x)}

    def empty(x: Any) -> Any:
        first = jax.tree.leaves(x)[0]
        layer = cache.init(first.shape[0], length, first.dtype)
        return jax.tree.map(
            lambda a: jnp.repeat(a[:, None], model.num_layers, 1), layer
        )  # [B, ...] -> [B, L, ...]

    def block(p: Any, x: Any, key: Any, context: Any, layer: Any) -> Any:
        del key
        number = layer["number"]
        own = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, number, 1, keepdims=False), x[CACHE]
        )
        y, own = cache.block(p, x["x"], own, context, layer["given"])
        stacks = jax.tree.map(
            lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, number, 1), x[CACHE], own
        )
        return {"x": y, CACHE: stacks}

    def run(p_head: Any, p_embed: Any, x: Any, batch: Any) -> Any:
        return predict(p_head, p_embed, x["x"], given(batch)), x[CACHE]

    return dataclasses.replace(
        model,
        embed=embed,
        block=block,
        predict=run,
        context=None if context is None else lambda batch: context(given(batch)),
        per_layer={"number": np.arange(model.num_layers), "given": model.per_layer},
        cache=None,
    )
