"""Check whether a folder holds the base that a checkpoint's weights were trained on.

Shapes are not enough for this: models of one family share them.

    16 or 32 bits    |checkpoint - folder| <= 2^-8 |folder|    bound of rounding to bfloat16
    int8             int8(folder) = checkpoint (1)             bitwise, per block of 256
    nf4              nf4(folder) = checkpoint (2)              bitwise, per block of 64
                     |largest - largest'| <= step / 2          (3)

(1) values and scales; (2) codes; (3) `largest` is the largest magnitude of the folder's block,
`largest'` and `step` are the checkpoint's.

The folder's numbers are quantized from float32 by the code that an import uses
(`pallas_kernels.storage`). Values, codes and the int8 scales depend only on their block and have
the same bits on every device. A piece of a tensor can therefore be quantized alone, wherever it is
cut between two blocks, and whatever the mesh and stage of the checkpoint. nf4 scales are quantized
again in groups, relative to the group's mean. They are compared within the error of that rounding,
so the groups do not matter. A folder that passes rounds to the base that was used in training;
independently trained models do not pass.

Trained weights are not compared: they differ from any folder.
"""

import dataclasses
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
from zerojax.hf.sources import Source, cut_rows, read_weight
from zerojax.weights import DTYPES, Tensor, WeightFile, open_weights, read_part

ROUNDING = 2.0**-8
"""Relative error of rounding to bfloat16, the coarsest 16-bit dtype."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: smaller magnitudes may round to 0."""
_PIECE = 1 << 25
"""Number of elements compared at a time: 128 MiB in float32."""
_SAMPLE = 64
"""Rows and columns of a tensor's sample.

For a quantized tensor the sample is this many elements of one row, or a block.
"""
_FINGERPRINT = 64
"""Maximum number of elements per tensor in a fingerprint."""


def check_base(
    saved: SavedState,
    base: WeightFile,
    sources: Mapping[str, Source],
    like: str | os.PathLike[str],
    *,
    all_numbers: bool,
) -> None:
    """Compare the weights that training left unchanged with the weights of a folder.

    Args:
      saved: checkpoint.
      base: weights of the folder.
      sources: parameter of each tensor to compare; trained parameters are skipped.
      like: path of the folder.
      all_numbers: whether to compare all numbers. Otherwise a sample of some hundred or thousand
        numbers from the middle of each tensor is compared. This practically always distinguishes
        two models, but misses a single changed number.

    Raises:
      CheckpointError: the folder holds another base; the error names the first tensors that differ.
    """
    compared = [name for name, source in sources.items() if source.is_frozen]
    differ = [
        name for name in compared if not _is_same(saved, base, name, sources[name], all_numbers)
    ]
    if differ:
        raise other_base(like, saved, differ)


def other_base(
    like: str | os.PathLike[str], saved: SavedState, differ: Sequence[str]
) -> CheckpointError:
    """Return the error for a folder whose tensors `differ` from the base of a checkpoint."""
    return CheckpointError(
        f"{os.fspath(like)} is not the base that {saved.folder} was trained on, although the "
        f"shapes are the same. Frozen tensors that differ: {first_few(differ)}. Pass the folder "
        "that the base was imported from as `like`"
    )


def _is_same(
    saved: SavedState, base: WeightFile, name: str, source: Source, all_numbers: bool
) -> bool:
    shape = base.tensors[name].shape
    if source.layout is not None:
        return _is_encoded_same(saved, base, name, source, all_numbers)
    if all_numbers:
        columns = tuple((0, n) for n in shape[1:])
        boxes = [(rows, *columns) for rows in cut_rows(shape, _PIECE)]
    else:
        boxes = [tuple(_middle(n, _SAMPLE) for n in shape)]
    return all(
        is_rounded(read_weight(saved, source, box), np.asarray(base.read(name, box)))
        for box in boxes
    )


def is_rounded(weight: np.ndarray, base_weight: np.ndarray) -> bool:
    """Return whether a checkpoint's numbers equal a folder's, up to rounding to 16 bits."""
    weight = weight.astype(np.float32)
    base_weight = base_weight.astype(np.float32)
    with np.errstate(invalid="ignore"):  # inf - inf
        # If the folder's number is infinite, so is the bound, and any number would pass it.
        is_near = np.isfinite(base_weight) & (
            np.abs(weight - base_weight) <= ROUNDING * np.abs(base_weight) + _SMALLEST
        )
    return bool(
        np.all(is_near | (weight == base_weight) | (np.isnan(weight) & np.isnan(base_weight)))
    )


def _middle(size: int, most: int) -> tuple[int, int]:
    """Return a range of at most `most` elements in the middle of `size`."""
    start = max(0, size - most) // 2
    return start, min(start + most, size)


# --- quantized weights ----------------------------------------------------------------------------


def _is_encoded_same(
    saved: SavedState, base: WeightFile, name: str, source: Source, all_numbers: bool
) -> bool:
    """Return whether a quantized weight M[A, B], or one layer or expert of it, equals the folder's.

    Its rows are the rows of the quantized arrays, or are concatenated in them.
    """
    layout = source.layout
    assert layout is not None
    if len(base.tensors[name].shape) == 3:
        return _are_experts_same(saved, base, name, source, all_numbers)
    if source.num_groups > 1 and source.place.expert is None:
        return _are_groups_same(saved, base, name, source, all_numbers)
    axes = source.place.axes or (0, 1)
    # The dims in the order of the quantized arrays, as indices into the file's dims.
    order = axes[::-1] if layout.moved == -2 else axes
    shape = tuple(base.tensors[name].shape[axis] for axis in order)
    block = storage.BLOCKS[layout.format]
    # Smallest number of rows that consists of complete blocks.
    unit = block // math.gcd(block, shape[1])
    row_range = (0, shape[1])
    if all_numbers:
        boxes = [(rows, row_range) for rows in cut_rows(shape, _PIECE, unit)]
    elif unit == 1:  # a part of one row, because a full row of a transposed tensor reads all of it
        length = max(block, _SAMPLE)
        start = (shape[1] - length) // 2 // block * block
        boxes = [((shape[0] // 2, shape[0] // 2 + 1), (start, start + length))]
    else:
        start = shape[0] // 2 // unit * unit
        boxes = [((start, start + unit), row_range)]
    for box in boxes:
        file_box = tuple(box[order.index(axis)] for axis in range(2))
        numbers = np.asarray(base.read(name, file_box), np.float32)
        if order != (0, 1):
            numbers = numbers.T
        if not _has_codes(numbers, _find_codes(saved, source, box, shape)):
            return False
    return True


def _are_experts_same(
    saved: SavedState, base: WeightFile, name: str, source: Source, all_numbers: bool
) -> bool:
    """Return whether a tensor of all experts [E, A, B] equals a quantized weight, one by one."""
    axes = source.place.axes or (0, 1, 2)
    count = base.tensors[name].shape[0]
    if axes[0] != 0:
        raise CheckpointError(f"{name}: dim 0 must be its experts, but axes are {axes}")
    inner = tuple(axis - 1 for axis in axes[1:])
    experts = range(count) if all_numbers else [count // 2]
    for expert in experts:
        place = source.place._replace(axes=inner, expert=expert)
        one = _OneExpert(base, name, expert)
        of_one = dataclasses.replace(source, place=place)
        if not _is_encoded_same(saved, one, name, of_one, all_numbers):
            return False
    return True


def _are_groups_same(
    saved: SavedState, base: WeightFile, name: str, source: Source, all_numbers: bool
) -> bool:
    """Return whether a tensor with a row for each expert, M[E, B], equals a quantized weight.

    Groups of rows were quantized by themselves.
    """
    numbers = range(source.num_groups) if all_numbers else [source.num_groups // 2]
    for number in numbers:
        one = _OneGroup(base, name, number, source.num_groups)
        if not _is_encoded_same(saved, one, name, _of_group(source, number), all_numbers):
            return False
    return True


def _of_group(source: Source, number: int) -> Source:
    """Return the part of a quantized weight that holds one group of experts."""
    lead = int(source.place.layer is not None)
    size = source.shape[lead] // source.num_groups
    shape = (*source.shape[:lead], size, *source.shape[lead + 1 :])
    return dataclasses.replace(source, shape=shape, num_groups=1, group=number)


class _OneGroup:
    """One group of rows of a tensor M[E, B], used like a file that holds only them."""

    def __init__(self, base: WeightFile, name: str, number: int, count: int) -> None:
        """Take the file, the tensor's name, and the number of the group, of `count`."""
        self.path = base.path
        self.tiled = frozenset[str]()
        tensor = base.tensors[name]
        rows = tensor.shape[0] // count
        self.tensors = {name: Tensor((rows, *tensor.shape[1:]), tensor.dtype)}
        self._base = base
        self._first = number * rows

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of the group."""
        (start, stop), *rest = box
        return self._base.read(name, ((self._first + start, self._first + stop), *rest))


class _OneExpert:
    """One expert of a tensor of all experts, used like a file that holds only it."""

    def __init__(self, base: WeightFile, name: str, expert: int) -> None:
        """Take the file, the tensor's name, and the number of the expert."""
        self.path = base.path
        self.tiled = frozenset[str]()
        tensor = base.tensors[name]
        self.tensors = {name: Tensor(tensor.shape[1:], tensor.dtype)}
        self._base = base
        self._expert = expert

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of the expert."""
        return self._base.read(name, ((self._expert, self._expert + 1), *box))[0]


def _find_codes(saved: SavedState, source: Source, box: Box, shape: tuple[int, ...]) -> "_Codes":
    """Return the quantized arrays of a part of a weight M[A, B], or of one expert of M[E, A, B].

    Experts are a dim of the arrays; or rows, each an expert's rows one after the other; or all of
    their rows are concatenated.
    """
    layout = source.layout
    assert layout is not None
    layer = source.place.layer
    expert = source.place.expert
    if source.num_groups > 1:
        assert expert is not None
        size = source.shape[layer is not None] // source.num_groups
        source = _of_group(source, expert // size)
        expert %= size
    front: Box = () if layer is None else ((layer, layer + 1),)
    count = source.shape[len(front)]
    if source.group is not None:
        front = (*front, (source.group, source.group + 1))
    if expert is None:
        return _Codes(saved, source, box, shape, front, is_flat=bool(layout.inner))
    (a, b), (c, d) = box
    rows, columns = shape
    if layout.moved == -3 or rows * columns % storage.BLOCKS[layout.format]:
        raise CheckpointError(
            f"{saved.folder}: experts share blocks of {source.leaf} in {layout.format}, so a "
            "folder with one tensor per expert cannot be compared with it: use frozen_dtype=None"
        )
    if len(layout.inner) == 2:
        first = expert * rows
        box = ((first + a, first + b), (c, d))
        return _Codes(saved, source, box, (count * rows, columns), front, is_flat=True)
    if len(layout.inner) == 1:
        box = ((expert, expert + 1), (a * columns + c, (b - 1) * columns + d))
        return _Codes(saved, source, box, (count, rows * columns), front, is_flat=False)
    front = (*front, (expert, expert + 1))
    return _Codes(saved, source, box, shape, front, is_flat=False)


class _Codes:
    """A checkpoint's quantized arrays for rows, or part of a row, of a weight M[A, B]."""

    def __init__(
        self,
        saved: SavedState,
        source: Source,
        box: Box,
        shape: tuple[int, ...],
        front: Box,
        *,
        is_flat: bool,
    ) -> None:
        """Take the weight `source` with dims `shape`, and the part `box` of it.

        `front` is the box of the arrays' dims before M's. If `is_flat`, M is concatenated rows.
        """
        self._saved = saved
        self._front = front
        self._source = source
        self._box = box
        self._shape = shape
        layout = source.layout
        assert layout is not None
        self.format: storage.Format = layout.format
        self._group = layout.group
        self._is_flat = is_flat

    def read(self, name: str) -> np.ndarray:
        """Return an array's numbers for the blocks, in order, as a vector.

        For an array with one number per group, the group's number is repeated for each block.
        """
        leaf = self._source.arrays[name]
        array = self._saved.leaves[leaf]
        (a, b), (c, d) = self._box
        rows, columns = self._shape
        # A row of the array, and the number of elements of M per element of the array.
        length = array.shape[-1]
        per = (rows * columns if self._is_flat else columns) // length
        groups = np.zeros((), np.int64)
        if name in ("steps", "means"):
            # Blocks by rows: row and column of each block's group.
            block = storage.BLOCKS[self.format]
            first = (a * columns + c) // block
            last = ((b - 1) * columns + d) // block
            blocks = np.arange(first, last)
            if self._is_flat:
                column = blocks // self._group[1]
                box = ((column[0], column[-1] + 1),)
                groups = column - column[0]
            else:
                row, column = np.divmod(blocks, columns // block)
                row = row // self._group[0]
                column = column // self._group[1]
                box = ((row[0], row[-1] + 1), (0, length))
                groups = (row - row[0]) * length + column
        elif self._is_flat:
            box = (((a * columns + c) // per, ((b - 1) * columns + d) // per),)
        else:
            box = ((a, b), (c // per, d // per))
        inner_box = tuple((int(start), int(stop)) for start, stop in box)
        leaf_box = self._front + inner_box
        out = np.empty([stop - start for start, stop in leaf_box], np.dtype(array.dtype))
        read_part(self._saved, leaf, leaf_box, out)
        return out.reshape(-1)[groups] if groups.shape else out.reshape(-1)


def _has_codes(numbers: np.ndarray, codes: _Codes) -> bool:
    """Return whether a folder's numbers quantize to a checkpoint's."""
    encoded = _encoded(np.ascontiguousarray(numbers).reshape(-1), codes.format)
    if codes.format == "int8":
        return np.array_equal(encoded["values"], codes.read("values")) and np.array_equal(
            encoded["scales"], codes.read("scales"), equal_nan=True
        )
    if not np.array_equal(encoded["codes"], codes.read("codes")):
        return False
    scales, steps, means = (codes.read(name) for name in ("scales", "steps", "means"))
    # Each block was quantized as a group of one block. The group's mean is then the block's
    # largest magnitude, and its scale shows whether the block is finite.
    largest = encoded["means"]
    is_finite = encoded["scales"] != NOT_FINITE
    if not np.array_equal(is_finite, scales != NOT_FINITE):
        return False
    error = np.abs(np.maximum(scales * steps + means, 0) - largest)
    # A step is rounded to 16 bits and multiplied by at most 127. Codes identify blocks of zeros.
    is_near = error <= 0.51 * steps + 1e-6 * largest
    return bool(np.all(is_near | (largest == 0) | ~is_finite))


def _encoded(flat: np.ndarray, format: storage.Format) -> dict[str, np.ndarray]:
    """Quantize a vector block by block, on a CPU if JAX has one, and return the arrays by name."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        device = jax.local_devices()[0]
    # The current mesh may be a program's, which need not contain this device.
    with jax.set_mesh(Mesh(np.asarray([device]), ("device",))):
        arrays = _encode(jax.device_put(flat, device), format=format)
        flat_arrays, _ = jax.tree_util.tree_flatten_with_path(arrays)
        return {
            jax.tree_util.keystr(path, simple=True): np.asarray(array)
            for path, array in flat_arrays
        }


@functools.partial(jax.jit, static_argnames="format")
def _encode(flat: jax.Array, format: storage.Format) -> Any:
    return storage.encode(flat.astype(jnp.float32), storage.Layout(format=format), "xla").q


# --- a fingerprint --------------------------------------------------------------------------------


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return a fingerprint of a folder's weights, independent of its path and number of files.

    The fingerprint is the SHA-256, in hexadecimal digits, of each tensor's name, dtype and shape,
    and of at most 64 numbers from its middle. It is cheap and distinguishes models whose tensors
    differ widely, but it may miss a change of a few numbers.

    Args:
      folder: path of a folder with safetensors weights.

    Raises:
      CheckpointError: the folder has no weights, or a file that its index names is missing or
        cannot be read.
    """
    file = open_weights(folder)
    digest = hashlib.sha256()
    for name, tensor in sorted(file.tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        if tensor.dtype in DTYPES and math.prod(tensor.shape):
            most = [*(1,) * (len(tensor.shape) - 1), _FINGERPRINT]
            box = tuple(_middle(n, length) for n, length in zip(tensor.shape, most, strict=False))
            digest.update(np.ascontiguousarray(file.read(name, box)).tobytes())
    return digest.hexdigest()
