"""Code that all exports share: open a checkpoint, and write an output that appears atomically.

    # `zerojax.weights.orbax`
    zj.export_orbax("runs/gpt/checkpoints", "gpt")
    # `zerojax.weights.safetensors`
    zj.export_safetensors("runs/gpt/checkpoints/1200", "gpt.safetensors", dtype=jnp.bfloat16)

Both exports need only the checkpoint's files, not a program, model or device, and never hold a full
weight in memory. The checkpoint's checksums are compared first, because the exported formats have
none. The output is written to a hidden folder next to its destination, on the same file system, and
renamed once it is on disk. `zerojax.weights.rooms` removes the hidden folders of killed exports.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype, sync
from zerojax.checkpoint import (
    CheckpointError,
    DamagedError,
    SavedState,
    explaining,
    is_folder,
    open_newest,
    unreadable,
)
from zerojax.weights.names import DTYPES
from zerojax.weights.rooms import own_room

PIECE_BYTES = 32 * 2**20
"""Most bytes of a piece in which a weight is read and written, unless an element is larger."""


@contextlib.contextmanager
def open_checkpoint(checkpoint: str | os.PathLike[str]) -> Iterator[SavedState]:
    """Open a step's folder, or the newest intact step of a directory, and compare its checksums.

    Args:
      checkpoint: folder of a step, or directory of steps.

    Raises:
      CheckpointError: there is no checkpoint, or an update of its weights is still to be applied.
      DamagedError: the step is damaged, or all steps are.
    """
    with open_newest(os.path.expanduser(os.fspath(checkpoint)), _checked) as saved:
        saved.check_settled()
        yield saved


def _checked(folder: str) -> SavedState:
    """Open a state, and compare its checksums with the saved ones."""
    saved = SavedState(folder)
    try:
        saved.check(checksums=True)
    except BaseException:
        saved.close()
        raise
    return saved


def export_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype in which to export; None is float32.

    Raises:
      ValueError: `dtype` is not a dtype, or weights are not exported in it.
    """
    if dtype is None:
        return numpy_dtype("float32")
    options = f"weights are exported as one of {', '.join(DTYPES)}"
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses text
        raise ValueError(f"dtype={dtype!r}: {options}") from error
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: {options}")
    return numpy_dtype(name)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path to write to; if the context ends without an error, the output moves to `path`.

    Between the check and the rename another process may still put a file at `path`, which the
    rename replaces; the rename fails over a folder that is not empty.

    Args:
      path: path of the output, a file or folder that does not exist yet.

    Raises:
      ValueError: `path` exists, or its parent folder does not.
      CheckpointError: the output cannot be written.
    """
    target = os.path.abspath(os.path.expanduser(os.fspath(path)))
    parent, name = os.path.split(target)
    if "://" in os.fspath(path):
        raise ValueError(f"path={os.fspath(path)!r}: exports need a file system: mount the bucket")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: remove it, or use another path")
    with explaining(f"writing {target}"):
        has_parent = is_folder(parent)
    if not has_parent:
        raise ValueError(f"{parent} is not a folder: create it first")
    with explaining(f"writing {target}"), own_room(parent, name) as room:
        output = os.path.join(room, name)
        yield output
        _sync_all(output)
        # Checked again, since a rename silently replaces a file.
        if os.path.lexists(target):
            raise ValueError(
                f"{target} was created by another process meanwhile: remove it, or use another path"
            )
        os.rename(output, target)
        sync(parent)


def _sync_all(output: str) -> None:
    """Flush a file, or a folder and all files in it, so that they survive a power failure."""
    if not os.path.isdir(output):
        sync(output)
        return
    for folder, _, files in os.walk(output):
        for entry in [*(os.path.join(folder, file) for file in files), folder]:
            sync(entry)


def piece_shape(shape: Sequence[int], lead: int, itemsize: int) -> tuple[int, ...]:
    """Return the shape of an array's pieces: one record of a stack, or rows of it.

    A record of more than `PIECE_BYTES` is split into as many rows as fit.

    Args:
      shape: shape of the array.
      lead: number of dims that number records.
      itemsize: bytes per element.
    """
    pieces = [1] * len(shape)
    for dim in range(lead, len(shape)):
        row = math.prod(shape[dim + 1 :]) * itemsize
        if row <= PIECE_BYTES:
            pieces[dim:] = shape[dim:]
            pieces[dim] = min(shape[dim], PIECE_BYTES // max(1, row))
            break
    return tuple(max(1, n) for n in pieces)


def read_pieces(
    saved: SavedState, name: str, kind: np.dtype[Any]
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield the pieces of a weight in row-major order: the box of each, and its numbers.

    Args:
      saved: the checkpoint.
      name: name of the weight.
      kind: dtype of the numbers.

    Raises:
      CheckpointError: a file cannot be read, or numbers do not fit the dtype.
    """
    leaf = saved.leaves[name]
    sizes = piece_shape(leaf.shape, leaf.lead, kind.itemsize)
    intervals = []
    for n, size in zip(leaf.shape, sizes, strict=True):
        intervals.append([(start, min(start + size, n)) for start in range(0, n, size)])
    for box in itertools.product(*intervals):
        piece = np.empty([b - a for a, b in box], kind)
        read_part(saved, name, box, piece)
        yield box, piece


def read_part(saved: SavedState, name: str, box: Box, out: np.ndarray) -> None:
    """Fill `out` with a part of a weight, cast to the dtype of `out`.

    Raises:
      DamagedError: a file is missing, or its bytes are lost.
      CheckpointError: a file cannot be read now, or numbers do not fit the dtype.
    """
    try:
        # numpy casts numbers beyond float16 to infinity, with a warning at most.
        with np.errstate(over="raise"):
            saved.records.read(name, box, out)
    except FloatingPointError as error:
        raise CheckpointError(
            f"{name} holds numbers beyond the range of {out.dtype.name}: use bfloat16 or float32"
        ) from error
    except OSError as error:
        damage = f"the checkpoint {saved.folder} is damaged: {error}"
        raise unreadable(error, f"reading the checkpoint {saved.folder}", damage) from error
    except KeyError as error:
        raise DamagedError(f"the checkpoint {saved.folder} is damaged: {error}") from error
