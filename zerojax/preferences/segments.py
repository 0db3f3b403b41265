"""Pairs of sequences in packed rows: checks of their arrays, and sums over each sequence.

Segments 2p - 1 and 2p of a row are pair p = 1 .. P. A sum over each segment is a masked sum over
the row,

    s[b, k] = sum_t [segment_ids[b, t] = k] v[b, t]        k = 1 .. 2 P

because a scatter adds in an order that changes from run to run on a GPU, and a difference of
cumulative sums cancels.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
LABELS = "labels"
REFERENCE = "reference"
_NEEDED = ("tokens", "targets", "segment_ids", LABELS)


def sum_segments(values: Array, segment_ids: Array, count: int) -> Array:
    """Return the sum of values[B, T] over each of the segments 1 .. count, f32[B, count]."""
    is_inside = segment_ids[..., None] == jnp.arange(1, count + 1)
    return jnp.sum(jnp.where(is_inside, values[..., None].astype(jnp.float32), 0), axis=1)


def count_segments(counted: Array, segment_ids: Array, count: int) -> Array:
    """Return the number of True values in each of the segments 1 .. count, f32[B, count]."""
    return sum_segments(counted.astype(jnp.float32), segment_ids, count)


def check_pairs(batch: Any) -> dict[str, Any]:
    """Check the arrays of pairs, and return the other arrays of the batch.

    Args:
      batch: dict of numpy, JAX or abstract arrays.

    Raises:
      ValueError: an array is missing, or has a wrong dtype or shape; the error names the key.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch of pairs is a dict of arrays, got {type(batch).__name__}")
    missing = [repr(name) for name in _NEEDED if name not in batch]
    if missing:
        raise ValueError(
            f"a batch of pairs needs {', '.join(missing)} too: zerojax.data.preferences.pack_pairs "
            "makes such rows"
        )
    labels = batch[LABELS]
    if (
        not hasattr(labels, "dtype")
        or not jnp.issubdtype(labels.dtype, jnp.signedinteger)
        or len(labels.shape) != 2
        or not labels.shape[1]
    ):
        shape = list(getattr(labels, "shape", ()))
        raise ValueError(
            f"batch['{LABELS}'] has shape {shape} and dtype {getattr(labels, 'dtype', None)}: "
            "signed integers [B, P] are needed, one per pair of the row, and 0 for no pair"
        )
    if REFERENCE in batch:
        reference = batch[REFERENCE]
        slots = 2 * labels.shape[1]
        if (
            not hasattr(reference, "dtype")
            or not jnp.issubdtype(reference.dtype, jnp.floating)
            or len(reference.shape) != 2
            or reference.shape[1] != slots
        ):
            shape = list(getattr(reference, "shape", ()))
            raise ValueError(
                f"batch['{REFERENCE}'] has shape {shape} and dtype "
                f"{getattr(reference, 'dtype', None)}: floats [B, {slots}] are needed, one for "
                f"each of 2 x {labels.shape[1]} sequences"
            )
    return {name: array for name, array in batch.items() if name not in (LABELS, REFERENCE)}
