"""What a batch of a decoder has to be: keys, dtypes and shapes, known before anything runs, and
ranges, known to the device.

    tokens        integers [B, T]            0 .. V - 1
    targets       signed integers [B, T]     below V; negative ones do not count
    segment_ids   integers [B, T]            any
    positions     integers [B, T]            0 .. 2^24, which float32 holds exactly

A wrong key, dtype or shape raises ValueError. Arrays may be on the device, and each process of
several may hold a part of them, so ranges are checked by the program: `faults` are metrics of the
loss, each the share of elements that are out of range. Where one is not 0, the loss is NaN and the
step is skipped in every process alike (`zerojax.models.loss`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models import CACHE, FAULT, LAST, Loss

Batch = Mapping[str, Any]
TOKENS, TARGETS, SEGMENTS, POSITIONS = "tokens", "targets", "segment_ids", "positions"
OF_TOKENS = (TOKENS, TARGETS, SEGMENTS, POSITIONS)
"""Keys whose arrays have a number for each token."""
MOST_POSITIONS = 2**24
"""Rotations are computed in float32, which holds each integer up to this one."""


def check_batch(batch: Any) -> None:
    """Check keys, dtypes and shapes of a batch.

    Args:
      batch: of numpy, JAX or abstract arrays.

    Raises:
      ValueError: it is no dict, `tokens` are missing, a key is one that no model reads, or an array
        is not of integers, has other dims than [B, T] or no token. The key is named.
    """
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise ValueError(f"a batch is a dict with 'tokens', and 'targets' for a loss, got {kind}")
    known = (*OF_TOKENS, LAST, CACHE)
    if TOKENS not in batch:
        raise ValueError(
            f"a batch has {_listed(batch)}: 'tokens' are needed, and 'targets' for a loss; each is the next token"
        )
    if unknown := [key for key in batch if key not in known]:
        raise ValueError(
            f"a batch has {_listed(unknown)}, which the model does not read: it reads "
            f"{_listed(OF_TOKENS)}; rename the others, or leave them out. Padding is marked by targets of "
            "-1, and by segment_ids of its own where tokens must not see it"
        )
    for name in OF_TOKENS:
        if name in batch:
            _check_array(name, batch[name], ("B", "T"))
    if LAST in batch:
        _check_array(LAST, batch[LAST], ("B",))
    shape = batch[TOKENS].shape
    if not shape[1]:
        raise ValueError(f"batch['tokens'] is {list(shape)}: each row needs at least one token")
    for name in OF_TOKENS:
        # Rows are compared where all of them are known: of several processes each may hold a part.
        if name in batch and batch[name].shape[1:] != shape[1:]:
            other = list(batch[name].shape)
            raise ValueError(
                f"batch['{name}'] is {other} and batch['tokens'] {list(shape)}: one shape is needed"
            )


def check_targets(batch: Batch) -> None:
    """Raise ValueError for a batch without targets."""
    if TARGETS not in batch:
        raise ValueError(
            f"a batch has {_listed(batch)}: a loss needs 'targets', integers [B, T], each the next token"
        )


def _listed(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "no keys"


def _check_array(name: str, array: Any, dims: tuple[str, ...]) -> None:
    shape = f"[{', '.join(dims)}]"
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        kind = "None" if array is None else f"of type {type(array).__name__}"
        raise ValueError(
            f"batch['{name}'] is {kind}: an array of integers {shape} is needed, as by np.asarray(.., np.int32)"
        )
    is_plain = isinstance(array.dtype, jnp.dtype)
    if not is_plain and callable(getattr(array, "numpy", None)):
        raise ValueError(
            f"batch['{name}'] is a {type(array).__name__} of {type(array).__module__}, of {array.dtype}, and an array of numpy "
            f"or JAX is needed, integers {shape}: give batch['{name}'].numpy()"
        )
    if not is_plain or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"batch['{name}'] is an array of {array.dtype}: integers {shape} are needed, such as int32"
        )
    if name == TARGETS and jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        raise ValueError(
            f"batch['targets'] is {array.dtype}, which cannot hold the -1 of targets that do not count: "
            "a -1 that was cast to it would count. Make int32 of the numbers that it was made from"
        )
    if len(array.shape) != len(dims):
        raise ValueError(f"batch['{name}'] is {list(array.shape)}: integers {shape} are needed")


def wide(array: jax.Array) -> jax.Array:
    """Return integers in at least 32 bits, so that the bounds of a vocabulary can be compared with
    them.
    """
    return array.astype(jnp.int32) if jnp.iinfo(array.dtype).bits < 32 else array


def faults(batch: Batch, vocab: int) -> dict[str, Loss]:
    """Return metrics that are 0 unless a batch is out of range: each names a key and its range.

    Args:
      batch: traced.
      vocab: V.
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
