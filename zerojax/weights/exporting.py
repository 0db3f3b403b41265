"""What all exports share: they open a checkpoint, and write a file or folder that appears under its
name only when it is whole.

    zj.export_orbax("runs/gpt/checkpoints", "gpt")                      `zerojax.weights.orbax`
    zj.export_safetensors("runs/gpt/checkpoints/1200", "gpt.safetensors", dtype=jnp.bfloat16)    `zerojax.weights.safetensors`

Both need only the checkpoint's files, no program, model or device, and never hold a whole weight in
memory. The checkpoint's checksums are compared first, because the exported formats carry none. The
output is written to a hidden folder beside its destination, which is on the same file system, and
renamed once it is on disk. `zerojax.weights.rooms` removes the hidden folders of exports that were
killed.
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
"""Most bytes of a piece of a weight, in which it is read and written, unless an element is larger.
"""


@contextlib.contextmanager
def open_checkpoint(checkpoint: str | os.PathLike[str]) -> Iterator[SavedState]:
    """Open a step's folder, or the newest whole step of a directory, once its checksums were
    compared.

    Raises:
      CheckpointError: there is none.
      DamagedError: it is not whole, or none is.
    """
    with open_newest(os.path.expanduser(os.fspath(checkpoint)), _checked) as saved:
        yield saved


def _checked(folder: str) -> SavedState:
    """Open a state whose checksums are those that were saved."""
    saved = SavedState(folder)
    try:
        saved.check(checksums=True)
    except BaseException:
        saved.close()
        raise
    return saved


def export_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype to export in; None is float32.

    Raises:
      ValueError: weights are not exported in such a dtype, or it is no dtype.
    """
    if dtype is None:
        return numpy_dtype("float32")
    options = f"weights are exported as one of {', '.join(DTYPES)}"
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses a text
        raise ValueError(f"dtype={dtype!r}: {options}") from error
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: {options}")
    return numpy_dtype(name)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a name to write under; what was written is moved to `path` when the context ends
    without an error.

    Between the check and the rename another process may still put a file there, which the rename
    replaces; it fails over a folder that is not empty.

    Raises:
      ValueError: there is something already, or no folder to put it in.
      CheckpointError: it cannot be written.
    """
    target = os.path.abspath(os.path.expanduser(os.fspath(path)))
    parent, name = os.path.split(target)
    if "://" in os.fspath(path):
        raise ValueError(
            f"path={os.fspath(path)!r}: exports are files of a file system; mount the bucket"
        )
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: remove it, or give another path")
    with explaining(f"writing {target}"):
        has_parent = is_folder(parent)
    if not has_parent:
        raise ValueError(f"{parent} is no folder: make it first")
    with explaining(f"writing {target}"), own_room(parent, name) as room:
        output = os.path.join(room, name)
        yield output
        _sync_all(output)
        # Checked once more, since a rename replaces a file without a word.
        if os.path.lexists(target):
            raise ValueError(
                f"{target} was made by another process meanwhile: remove it, or give another path"
            )
        os.rename(output, target)
        sync(parent)


def _sync_all(output: str) -> None:
    """Flush a file, or all files in a folder and then the folder, so that what gets the name
    survives a power failure.
    """
    if not os.path.isdir(output):
        sync(output)
        return
    for folder, _, files in os.walk(output):
        for entry in [*(os.path.join(folder, file) for file in files), folder]:
            sync(entry)


def piece_shape(shape: Sequence[int], lead: int, itemsize: int) -> tuple[int, ...]:
    """Return the shape of the pieces of an array: one record of a stack, or as many rows of it as
    `PIECE_BYTES` hold.
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
    """Yield a weight in its pieces, as it lies in memory row by row: the box of each, and its
    numbers in that dtype.
    """
    leaf = saved.leaves[name]
    sizes = piece_shape(leaf.shape, leaf.lead, kind.itemsize)
    for corner in itertools.product(
        *(range(0, n, size) for n, size in zip(leaf.shape, sizes, strict=True))
    ):
        box = tuple(
            (a, min(a + size, n)) for a, size, n in zip(corner, sizes, leaf.shape, strict=True)
        )
        piece = np.empty([b - a for a, b in box], kind)
        read_part(saved, name, box, piece)
        yield box, piece


def read_part(saved: SavedState, name: str, box: Box, out: np.ndarray) -> None:
    """Fill `out` with a part of a weight, cast to its dtype."""
    try:
        # numpy casts what is too large for float16 to infinity, with a warning at most.
        with np.errstate(over="raise"):
            saved.records.read(name, box, out)
    except FloatingPointError as error:
        raise CheckpointError(
            f"{name} holds numbers that {out.dtype.name} does not reach: use bfloat16 or float32"
        ) from error
    except OSError as error:
        damage = f"the checkpoint {saved.folder} is damaged: {error}"
        raise unreadable(error, f"reading the checkpoint {saved.folder}", damage) from error
    except KeyError as error:
        raise DamagedError(f"the checkpoint {saved.folder} is damaged: {error}") from error
