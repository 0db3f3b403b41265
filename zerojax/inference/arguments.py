"""Checks of the arguments of `generate`, by type and range, before anything is computed.

numpy's numbers are accepted like Python's.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.user_values import as_flag, as_integer, as_number

MOST = 2**31 - 1
"""Largest token and position: both are i32."""


def checked_prompts(prompts: Any) -> list[np.ndarray]:
    """Return each prompt's tokens, i32[T].

    Raises:
      ValueError: there are no prompts, or one is not a list of tokens, is empty, or has a token out
        of range.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: a list of lists of tokens is needed")
    rows = []
    for i, prompt in enumerate(prompts):
        row = _array(prompt)
        if row is None or row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                f"prompt {i} is {prompt!r}: a list of at least one token is needed, each an integer"
            )
        for token in (row.min(), row.max()):
            if not 0 <= token <= MOST:
                raise ValueError(
                    f"prompt {i} has token {token}: tokens are integers from 0 to {MOST}"
                )
        rows.append(row.astype(np.int32))
    if not rows:
        raise ValueError("no prompts: a list of lists of tokens is needed")
    return rows


def _array(prompt: Any) -> np.ndarray | None:
    """Return a prompt as an array, or None if it is not one, such as lists of different lengths."""
    try:
        return np.asarray(prompt)
    except (ValueError, OverflowError):
        return None


def checked_count(max_new_tokens: Any, longest: int) -> int:
    """Return the number of tokens to generate after a prompt of the length `longest`.

    Raises:
      ValueError: `max_new_tokens` is not an integer, or is out of range.
    """
    most = MOST - longest
    count = as_integer(max_new_tokens)
    if count is None or not 1 <= count <= most:
        raise ValueError(
            f"max_new_tokens={max_new_tokens!r}: an integer of at least 1 is needed, and at most "
            f"{MOST} positions"
        )
    return count


def checked_ends(eos: Any) -> np.ndarray:
    """Return the tokens that end a row, i32[E]; empty if `eos` is None.

    A tokenizer without such a token has None.

    Raises:
      ValueError: `eos` is neither a token, nor a collection of tokens, nor None.
    """
    if eos is None:
        return np.zeros(0, np.int32)
    refused = ValueError(f"eos={eos!r}: a token, a collection of tokens, or None is needed")
    is_several = isinstance(eos, Iterable) and not (
        isinstance(eos, jax.Array | np.ndarray) and eos.ndim == 0
    )
    if isinstance(eos, str | bytes):
        raise refused
    tokens: list[int] = []
    for entry in eos if is_several else [eos]:
        token = as_integer(entry)
        if token is None:
            raise refused
        if not 0 <= token <= MOST:
            raise ValueError(f"eos={eos!r}: tokens are integers from 0 to {MOST}")
        tokens.append(token)
    return np.asarray(sorted(tokens), np.int32)


def checked_temperature(temperature: Any) -> float:
    """Return the temperature.

    Raises:
      ValueError: `temperature` is not a finite number of at least 0.
    """
    number = as_number(temperature)
    if number is None or number < 0:
        raise ValueError(f"temperature={temperature!r}: a finite number of at least 0 is needed")
    return number


def checked_top_p(top_p: Any) -> float:
    """Return the probability mass of the tokens to draw from.

    Raises:
      ValueError: `top_p` is not a number above 0 and at most 1.
    """
    number = as_number(top_p)
    if number is None or not 0 < number <= 1:
        raise ValueError(f"top_p={top_p!r}: a number above 0 and at most 1 is needed")
    return number


def checked_key(key: Any, temperature: float) -> jax.Array | None:
    """Return the random key, or None if nothing is drawn.

    Raises:
      ValueError: `key` is not a random key, or is missing although the temperature is above 0.
    """
    if key is not None and not _is_key(key):
        raise ValueError(f"key={key!r}: a random key, such as jax.random.key(0), or None is needed")
    if temperature == 0:
        return None
    if key is None:
        raise ValueError(
            f"temperature={temperature} draws at random: pass key=jax.random.key(..), or use "
            "temperature=0"
        )
    return key


def checked_use_cache(use_cache: Any) -> bool | None:
    """Return whether to use a cache; None leaves the choice to `generate`.

    Raises:
      ValueError: `use_cache` is neither a bool nor None.
    """
    if use_cache is None:
        return None
    flag = as_flag(use_cache)
    if flag is None:
        raise ValueError(f"use_cache={use_cache!r}: None, True or False is needed")
    return flag


def _is_key(key: Any) -> bool:
    """Return whether `key` is a single key from `jax.random.key` or `jax.random.PRNGKey`."""
    if not isinstance(key, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == np.uint32 and key.ndim == 1
