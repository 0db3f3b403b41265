"""The arguments of `generate`, checked by type and range before anything is computed.

Numbers of numpy are taken as Python's.
"""

import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST = 2**31 - 1
"""Tokens and positions are i32."""


def checked_prompts(prompts: Any) -> list[np.ndarray]:
    """Return each prompt's tokens, i32[T].

    Raises:
      ValueError: one is no list of tokens, is empty, or has a token out of range; or there is none.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: a list of lists of tokens is needed")
    rows = []
    for i, prompt in enumerate(prompts):
        row = _array(prompt)
        if row is None or row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompt {i} is {prompt!r}: a list of at least one token is needed, each an integer")
        for token in (row.min(), row.max()):
            if not 0 <= token <= MOST:
                raise ValueError(f"prompt {i} has token {token}: tokens are integers from 0 to {MOST}")
        rows.append(row.astype(np.int32))
    if not rows:
        raise ValueError("no prompts: a list of lists of tokens is needed")
    return rows


def _array(prompt: Any) -> np.ndarray | None:
    """Return a prompt as an array, or None where it is none, such as lists of different lengths."""
    try:
        return np.asarray(prompt)
    except (ValueError, OverflowError):
        return None


def checked_count(max_new_tokens: Any, longest: int) -> int:
    """Return how many tokens to generate after a prompt of the length `longest`.

    Raises:
      ValueError: it is no integer, or out of range.
    """
    most = MOST - longest
    if not _is_integer(max_new_tokens) or not 1 <= max_new_tokens <= most:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: an integer of at least 1 is needed, and at most {MOST} positions")
    return int(max_new_tokens)


def checked_ends(eos: Any) -> np.ndarray:
    """Return the tokens that end a row, i32[E]; none for None, as a tokenizer without such a token has it.

    Raises:
      ValueError: they are neither tokens nor None.
    """
    if eos is None:
        return np.zeros(0, np.int32)
    refused = ValueError(f"eos={eos!r}: a token, a collection of tokens, or None is needed")
    is_several = isinstance(eos, Iterable) and not (isinstance(eos, jax.Array | np.ndarray) and eos.ndim == 0)
    if isinstance(eos, str | bytes):
        raise refused
    # An element of an array of JAX is an array.
    tokens = [_scalar(token) for token in eos] if is_several else [_scalar(eos)]
    if not all(_is_integer(token) for token in tokens):
        raise refused
    if not all(0 <= token <= MOST for token in tokens):
        raise ValueError(f"eos={eos!r}: tokens are integers from 0 to {MOST}")
    return np.asarray(sorted(int(token) for token in tokens), np.int32)


def checked_temperature(temperature: Any) -> float:
    """Return the temperature.

    Raises:
      ValueError: it is no finite number of at least 0.
    """
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}: a finite number of at least 0 is needed")
    return float(temperature)


def checked_top_p(top_p: Any) -> float:
    """Return the probability from which tokens are drawn.

    Raises:
      ValueError: it is no number above 0 and at most 1.
    """
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r}: a number above 0 and at most 1 is needed")
    return float(top_p)


def checked_key(key: Any, temperature: float) -> jax.Array | None:
    """Return the key of what is drawn at random, or None where nothing is.

    Raises:
      ValueError: it is no key, or none is given with a temperature above 0.
    """
    if key is not None and not _is_key(key):
        raise ValueError(f"key={key!r}: a random key, such as jax.random.key(0), or None is needed")
    if temperature == 0:
        return None
    if key is None:
        raise ValueError(f"temperature={temperature} draws at random: give key=jax.random.key(..), or temperature=0")
    return key


def checked_use_cache(use_cache: Any) -> bool | None:
    """Return whether a cache is used; None chooses.

    Raises:
      ValueError: it is neither a bool nor None.
    """
    if use_cache is not None and not isinstance(use_cache, bool | np.bool_):
        raise ValueError(f"use_cache={use_cache!r}: None, True or False is needed")
    return None if use_cache is None else bool(use_cache)


def _scalar(value: Any) -> Any:
    """Return the number in an array without dims, and anything else as it is."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    return value.item() if is_array and value.ndim == 0 else value


def _is_key(key: Any) -> bool:
    """Return whether something is one key, of `jax.random.key` or of `jax.random.PRNGKey`."""
    if not isinstance(key, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == np.uint32 and key.ndim == 1


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.floating) and not isinstance(value, bool | np.bool_)
