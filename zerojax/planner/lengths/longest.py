"""Bisection over the lengths of sequences, and models and batches of a given length.

    fits(n), fits(2 n), fits(4 n), ..        until one does not fit
    then halve the interval between the last two, in multiples of the block n

A longer sequence never needs fewer bytes, so the last length that fits is the longest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.costs import Sizes
from zerojax.models import LayeredModel, Model
from zerojax.trees import Batch
from zerojax.user_values import as_integer, shown

BLOCK = 1024
"""Tokens whose multiples are tried, unless the user gives another number."""
_MOST = 2**26
"""Longest sequence that is tried."""


def block_of(longest: Any) -> int | None:
    """Return the tokens whose multiples are tried; None: the length is the given one.

    Args:
      longest: argument of `zerojax.plan`.

    Raises:
      ValueError: it is neither a bool nor an integer from 1 to 2^26.
    """
    if longest is False or longest is None:
        return None
    if longest is True:
        return BLOCK
    block = as_integer(longest)
    if block is None or not 1 <= block <= _MOST:
        raise ValueError(
            f"longest={shown(longest)}: pass True for multiples of {BLOCK:,} tokens, or a number "
            f"of tokens from 1 to {_MOST:,} whose multiples are tried, such as 65536"
        )
    return block


def find_longest(fits: Callable[[int], bool], block: int) -> int | None:
    """Return the largest multiple of `block` that fits, up to 2^26; None if `block` does not fit.

    Args:
      fits: function of a length that returns whether it fits. If a length fits, shorter ones do.
      block: smallest length, in tokens.
    """
    most = _MOST // block
    if not fits(block):
        return None
    good, bad = 1, 2
    while bad <= most and fits(bad * block):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle * block):
            good = middle
        else:
            bad = middle
    return good * block


def with_length(model: Any, batch: Batch, length: int) -> tuple[Any, Batch]:
    """Return a model and a batch of abstract arrays with `length` tokens a row.

    Args:
      model: `Sizes`; a model; or a function of the length that returns a model.
      batch: batch of the model, whose tokens are its first integer array [B, T]. Dim 1 is replaced
        in all arrays in which it is T. None for sizes.
      length: tokens of a row.

    Raises:
      ValueError: the batch has no integer array [B, T].
    """
    if isinstance(model, Sizes):
        return dataclasses.replace(model, seq=length), batch
    if callable(model) and not isinstance(model, Model | LayeredModel):
        model = model(length)
    leaves = jax.tree.leaves(batch)
    if not all(hasattr(a, "shape") and hasattr(a, "dtype") for a in leaves):
        return model, batch  # the planner says what is wrong
    tokens = [a.shape[1] for a in leaves if _is_tokens(a)]
    if not tokens:
        raise ValueError(
            "longest needs a batch with tokens, an integer array [B, T], such as "
            "{'tokens': jax.ShapeDtypeStruct((1, 1024), jnp.int32)}"
        )

    def resized(a: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(a.shape)
        if len(shape) > 1 and shape[1] == tokens[0]:
            shape = (shape[0], length, *shape[2:])
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return model, jax.tree.map(resized, batch)


def _is_tokens(a: Any) -> bool:
    return len(a.shape) == 2 and jnp.issubdtype(a.dtype, jnp.integer)
