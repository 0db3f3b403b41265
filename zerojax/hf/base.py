"""Is a folder the base that a checkpoint's weights were trained over? Shapes do not tell: models of
one family share them.

    frozen in 16 or 32 bits    |checkpoint - folder| <= 2^-8 |folder|              what rounding to bfloat16 may change
    int8                       int8(folder) = the checkpoint's values and scales   bit for bit, block by block of 256
    nf4                        nf4(folder) = the checkpoint's codes                bit for bit, block by block of 64
                               |largest - largest'| <= step / 2                    largest of the folder's block, largest' and
                                                                                   step those of the
                                                                                   checkpoint

The folder's numbers are encoded by the code that an import uses (`pallas_kernels.storage`), from
float32 as it does. Values, codes and the scales of int8 depend on a block alone, and have the same
bits on every device; so a piece of a tensor may be encoded by itself, wherever it is cut between
two blocks, whatever mesh and stage the checkpoint was saved on. The scales of nf4 are quantised
again in groups, by the mean of a group: these are compared within what that rounding may change,
and so nothing hangs on groups. What passes rounds to the base that was trained over; two models
that were trained apart do not.

Weights that were trained are not compared: they differ from any folder.
"""

import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.disk import Box
from pallas_kernels import storage
from pallas_kernels.nf4 import NOT_FINITE
from zerojax.checkpoint import CheckpointError, SavedState, first_few
from zerojax.hf.sources import Source, front_of, pieces_of, read_weight
from zerojax.weights import DTYPES, WeightFile, open_weights, read_part

ROUNDING = 2.0**-8
"""Of a number that is rounded to bfloat16, the coarsest dtype of 16 bits, by its magnitude."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: what lies below may become 0."""
_PIECE = 1 << 25
"""Elements that are compared at once: 128 MiB in float32."""
_SAMPLE = 64
"""Rows and columns of a tensor that a sample has; of an encoded one a row of so many elements, or a
block.
"""
_FINGERPRINT = 64
"""Elements of each tensor that a fingerprint has."""


def check_base(
    saved: SavedState,
    base: WeightFile,
    sources: Mapping[str, Source],
    like: str | os.PathLike[str],
    *,
    whole: bool,
) -> None:
    """Compare the weights that a checkpoint's training left as they were with those of a folder.

    Args:
      saved: the checkpoint.
      base: the folder's weights.
      sources: the parameters of its tensors that are compared; those that were trained are passed
        over.
      like: the folder.
      whole: compare all numbers; else some hundreds from the middle of each tensor, which is as
        good as certain to tell one model from another and not to find a single number that was
        changed.

    Raises:
      CheckpointError: it is another base; the first tensors that differ are named.
    """
    compared = [name for name, source in sources.items() if source.is_frozen]
    differ = [name for name in compared if not _is_same(saved, base, name, sources[name], whole)]
    if differ:
        raise other_base(like, saved, differ)


def other_base(
    like: str | os.PathLike[str], saved: SavedState, differ: Sequence[str]
) -> CheckpointError:
    """Return the error of a folder whose tensors `differ` from the base in a checkpoint."""
    return CheckpointError(
        f"{os.fspath(like)} is not the base that {saved.folder} was trained over, though shapes are the same. Frozen tensors "
        f"that differ: {first_few(differ)}. Give the folder that the base was imported from as `like`"
    )


def _is_same(saved: SavedState, base: WeightFile, name: str, source: Source, whole: bool) -> bool:
    shape = base.tensors[name].shape
    if source.layout is not None:
        return _is_encoded_same(saved, base, name, source, whole)
    if whole:
        boxes = [
            ((start, stop), *((0, n) for n in shape[1:]))
            for start, stop in pieces_of(shape, _PIECE)
        ]
    else:
        boxes = [tuple(_middle(n, _SAMPLE) for n in shape)]
    return all(
        is_rounded(read_weight(saved, source, box), np.asarray(base.read(name, box)))
        for box in boxes
    )


def is_rounded(weight: np.ndarray, there: np.ndarray) -> bool:
    """Tell whether the numbers of a checkpoint are those of a folder, up to rounding to 16 bits."""
    weight, there = weight.astype(np.float32), there.astype(np.float32)
    with np.errstate(invalid="ignore"):  # of infinities
        # Of an infinity there the bound is one, too, and every number within it.
        is_near = np.isfinite(there) & (
            np.abs(weight - there) <= ROUNDING * np.abs(there) + _SMALLEST
        )
    return bool(np.all(is_near | (weight == there) | (np.isnan(weight) & np.isnan(there))))


def _middle(size: int, most: int) -> tuple[int, int]:
    """Return a range of at most `most` in the middle of `size`."""
    start = max(0, size - most) // 2
    return start, min(start + most, size)


# --- weights in 8 or 4 bits -----------------------------------------------------------------------


def _is_encoded_same(
    saved: SavedState, base: WeightFile, name: str, source: Source, whole: bool
) -> bool:
    """Compare a weight M[A, B], a layer of it, whose rows are those of the encoded arrays, or
    follow each other in one.
    """
    layout, axes = source.layout, source.place.axes or (0, 1)
    assert layout is not None
    # Its dims as the encoded arrays have them, by those of the file.
    order = axes[::-1] if layout.moved == -2 else axes
    shape = tuple(base.tensors[name].shape[axis] for axis in order)
    block = storage.BLOCKS[layout.format]
    # So many rows are whole blocks.
    unit = block // math.gcd(block, shape[1])
    every = (0, shape[1])
    if whole:
        boxes = [(rows, every) for rows in pieces_of(shape, _PIECE, unit)]
    elif unit == 1:  # a part of a row, lest the whole of a transposed tensor be read
        length = max(block, _SAMPLE)
        start = (shape[1] - length) // 2 // block * block
        boxes = [((shape[0] // 2, shape[0] // 2 + 1), (start, start + length))]
    else:
        start = shape[0] // 2 // unit * unit
        boxes = [((start, start + unit), every)]
    for box in boxes:
        there = np.asarray(
            base.read(name, tuple(box[order.index(axis)] for axis in range(2))), np.float32
        )
        there = there if order == (0, 1) else there.T
        if not _has_codes(there, _Codes(saved, source, box, shape)):
            return False
    return True


class _Codes:
    """What a checkpoint has of some blocks of a weight M[A, B]: rows of it, or a part of one row."""

    def __init__(self, saved: SavedState, source: Source, box: Box, shape: tuple[int, ...]) -> None:
        self._saved, self._source, self._box, self._shape = saved, source, box, shape
        layout = source.layout
        assert layout is not None
        self.format: storage.Format = layout.format
        self._group, self._is_flat = layout.group, bool(layout.inner)

    def read(self, name: str) -> np.ndarray:
        """Return an array's numbers for the blocks, in order: [n, ..]; one for each block of an
        array of groups.
        """
        leaf = self._source.arrays[name]
        array = self._saved.leaves[leaf]
        (a, b), (c, d) = self._box
        rows, columns = self._shape
        # A row of the array, and how many elements of M are one of it.
        length = array.shape[-1]
        per = (rows * columns if self._is_flat else columns) // length
        groups = np.zeros((), np.int64)
        if name in ("steps", "means"):
            # Blocks by rows: of each the group's row and column.
            block = storage.BLOCKS[self.format]
            first, last = (a * columns + c) // block, ((b - 1) * columns + d) // block
            blocks = np.arange(first, last)
            row, column = (
                (np.zeros_like(blocks), blocks)
                if self._is_flat
                else np.divmod(blocks, columns // block)
            )
            row, column = row // self._group[0], column // self._group[1]
            box = (
                (column[0] if self._is_flat else 0, column[-1] + 1 if self._is_flat else length),
            )
            box = box if self._is_flat else ((row[0], row[-1] + 1), *box)
            width = box[-1][1] - box[-1][0]
            groups = (row - (0 if self._is_flat else row[0])) * width + column - box[-1][0]
        elif self._is_flat:
            box = (((a * columns + c) // per, ((b - 1) * columns + d) // per),)
        else:
            box = ((a, b), (c // per, d // per))
        whole = front_of(self._source) + tuple((int(start), int(stop)) for start, stop in box)
        out = np.empty([stop - start for start, stop in whole], np.dtype(array.dtype))
        read_part(self._saved, leaf, whole, out)
        return out.reshape(-1)[groups] if groups.shape else out.reshape(-1)


def _has_codes(there: np.ndarray, codes: _Codes) -> bool:
    """Tell whether a folder's numbers, encoded, are those of a checkpoint."""
    here = _encoded(np.ascontiguousarray(there).reshape(-1), codes.format)
    if codes.format == "int8":
        return np.array_equal(here["values"], codes.read("values")) and np.array_equal(
            here["scales"], codes.read("scales"), equal_nan=True
        )
    if not np.array_equal(here["codes"], codes.read("codes")):
        return False
    scales, steps, means = (codes.read(name) for name in ("scales", "steps", "means"))
    # Of a group of one block the mean is that block's largest magnitude, and its scale tells
    # whether it is finite.
    largest, is_finite = here["means"], here["scales"] != NOT_FINITE
    if not np.array_equal(is_finite, scales != NOT_FINITE):
        return False
    error = np.abs(np.maximum(scales * steps + means, 0) - largest)
    # A step is rounded to 16 bits, times 127 at most; blocks of zeros are told by their codes.
    is_near = error <= 0.51 * steps + 1e-6 * largest
    return bool(np.all(is_near | (largest == 0) | ~is_finite))


def _encoded(flat: np.ndarray, format: storage.Format) -> dict[str, np.ndarray]:
    """Return the arrays of a vector, each block by itself, encoded on a CPU where JAX has one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        device = jax.local_devices()[0]
    # A program's mesh may be set here, and need not have this device.
    with jax.set_mesh(Mesh(np.asarray([device]), ("device",))):
        found = _encode(jax.device_put(flat, device), format=format)
        return {
            jax.tree_util.keystr(p, simple=True): np.asarray(a)
            for p, a in jax.tree_util.tree_flatten_with_path(found)[0]
        }


@functools.partial(jax.jit, static_argnames="format")
def _encode(flat: jax.Array, format: storage.Format) -> Any:
    return storage.encode(flat.astype(jnp.float32), storage.Layout(format=format), "xla").q


# --- a fingerprint --------------------------------------------------------------------------------


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return what tells the weights of a folder from others, wherever the folder is and into how
    many files it is cut.

    It is the SHA-256, in hexadecimal digits, of each tensor's name, dtype and shape, and of 64 of
    its numbers at most, from its middle. So it is cheap, and tells models apart whose tensors are
    not all equal; a change of a few numbers it may miss.

    Raises:
      CheckpointError: the folder has no weights, or files that its index names are not there or
        cannot be read.
    """
    file, digest = open_weights(folder), hashlib.sha256()
    for name, tensor in sorted(file.tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        if tensor.dtype in DTYPES and math.prod(tensor.shape):
            most = [*(1,) * (len(tensor.shape) - 1), _FINGERPRINT]
            box = tuple(_middle(n, length) for n, length in zip(tensor.shape, most, strict=False))
            digest.update(np.ascontiguousarray(file.read(name, box)).tobytes())
    return digest.hexdigest()
