"""Microbatches of a streamed step, and the random keys of its layers."""

from typing import Any

import jax

Array = jax.Array


def key_of(key: Any, layer: int | Array) -> Any:
    """Return the key of one layer, or None."""
    return None if key is None else jax.random.fold_in(key, layer)
