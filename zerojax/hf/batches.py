"""Requirements on a decoder's batch, checked before or while the program runs.

    tokens        integers [B, T]            0 .. V - 1
    targets       signed integers [B, T]     below V; negative ones do not count
    segment_ids   integers [B, T]            any
    positions     integers [B, T]            0 .. 2^24, which float32 represents exactly
    adapters      a number []                0: without adapters, 1: with them

A wrong key, dtype or shape raises ValueError before anything runs. Arrays may be on the device, and
each of several processes may hold only a part of them, so the program itself checks the ranges:
`faults` are metrics of the loss, each the share of elements that are out of range. If any of them
is not 0, the loss is NaN and every process skips the step (`zerojax.models.loss`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models import CACHE, FAULT, LAST, Loss

Batch = Mapping[str, Any]
TOKENS = "tokens"
TARGETS = "targets"
SEGMENTS = "segment_ids"
POSITIONS = "positions"
ADAPTERS = "adapters"
"""Key of a number by which the outputs of adapters are multiplied."""
OF_TOKENS = (TOKENS, TARGETS, SEGMENTS, POSITIONS)
"""Keys whose arrays have one number per token."""
MOST_POSITIONS = 2**24
"""Largest position. Rotations are computed in float32, which is exact for integers up to 2^24."""


def check_batch(batch: Any) -> None:
    """Check the keys, dtypes and shapes of a batch.

    Args:
      batch: dict of numpy, JAX or abstract arrays.

    Raises:
      ValueError: `batch` is not a dict, `tokens` are missing, the model does not read a key, or an
        array does not hold integers, has other dims than [B, T], or has no token. The error names
        the key.
    """
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise ValueError(
            "a batch is a dict with 'tokens', and with 'targets' for a loss, but this one is a "
            f"{kind}"
        )
    known = (*OF_TOKENS, LAST, CACHE, ADAPTERS)
    if TOKENS not in batch:
        raise ValueError(
            f"a batch has {_listed(batch)}: 'tokens' are needed, and 'targets' for a loss, in "
            "which each target is the next token"
        )
    if unknown := [key for key in batch if key not in known]:
        raise ValueError(
            f"a batch has {_listed(unknown)}, which the model does not read: it reads "
            f"{_listed(OF_TOKENS)}; rename or remove the other keys. Mark padding by targets of "
            "-1, and by segment_ids of its own if tokens must not attend to it"
        )
    for name in OF_TOKENS:
        if name in batch:
            _check_array(name, batch[name], ("B", "T"))
    if LAST in batch:
        _check_array(LAST, batch[LAST], ("B",))
    if ADAPTERS in batch and jnp.ndim(batch[ADAPTERS]):
        raise ValueError(
            f"batch['{ADAPTERS}'] has shape {list(jnp.shape(batch[ADAPTERS]))}: one number for the "
            "whole batch is needed, 0 for the model without adapters"
        )
    shape = batch[TOKENS].shape
    if not shape[1]:
        raise ValueError(f"batch['tokens'] is {list(shape)}: each row needs at least one token")
    for name in OF_TOKENS:
        # Each process may hold only some of the rows, so the number of rows is not compared.
        if name in batch and batch[name].shape[1:] != shape[1:]:
            other = list(batch[name].shape)
            raise ValueError(
                f"batch['{name}'] is {other} but batch['tokens'] is {list(shape)}: give both the "
                "same shape"
            )


def check_targets(batch: Batch) -> None:
    """Raise ValueError if a batch has no targets."""
    if TARGETS not in batch:
        raise ValueError(
            f"a batch has {_listed(batch)}: a loss needs 'targets', integers [B, T], in which each "
            "target is the next token"
        )


def _listed(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "no keys"


def _check_array(name: str, array: Any, dims: tuple[str, ...]) -> None:
    shape = f"[{', '.join(dims)}]"
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        kind = "None" if array is None else f"of type {type(array).__name__}"
        raise ValueError(
            f"batch['{name}'] is {kind}: an array of integers {shape} is needed, such as "
            "np.asarray(.., np.int32)"
        )
    is_plain = isinstance(array.dtype, jnp.dtype)
    if not is_plain and callable(getattr(array, "numpy", None)):
        raise ValueError(
            f"batch['{name}'] is a {type(array).__name__} of {type(array).__module__} with dtype "
            f"{array.dtype}, but a numpy or JAX array of integers {shape} is needed: use "
            f"batch['{name}'].numpy()"
        )
    if not is_plain or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"batch['{name}'] has dtype {array.dtype}: integers {shape} are needed, such as int32"
        )
    if name == TARGETS and jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        raise ValueError(
            f"batch['targets'] has dtype {array.dtype}, which cannot hold -1, the target that does "
            "not count: a -1 cast to it would count. Build the array as int32 from the original "
            "numbers"
        )
    if len(array.shape) != len(dims):
        raise ValueError(
            f"batch['{name}'] has shape {list(array.shape)}: integers {shape} are needed"
        )


def wide(array: jax.Array) -> jax.Array:
    """Return integers in at least 32 bits, to compare them with the size of a vocabulary."""
    return array.astype(jnp.int32) if jnp.iinfo(array.dtype).bits < 32 else array


def faults(batch: Batch, vocab: int) -> dict[str, Loss]:
    """Return metrics that are 0 unless a batch is out of range; each names a key and its range.

    Args:
      batch: traced batch.
      vocab: V, size of the vocabulary.

    Returns:
      One Loss per checked key: its sum is the number of elements out of range, its count the number
      of elements.
    """
    bounds = {
        f"{TOKENS}_outside_0..{vocab - 1}": (TOKENS, 0, vocab - 1),
        f"{TARGETS}_above_{vocab - 1}": (TARGETS, None, vocab - 1),
        f"{POSITIONS}_outside_0..{MOST_POSITIONS}": (POSITIONS, 0, MOST_POSITIONS),
    }
    found = dict[str, Loss]()
    for what, (name, least, most) in bounds.items():
        if name not in batch:
            continue
        array = wide(batch[name])
        is_wrong = array > most
        if least is not None:
            is_wrong |= array < least
        found[FAULT + what] = Loss(jnp.sum(is_wrong).astype(jnp.float32), jnp.float32(array.size))
    return found
