"""Find numbers that no step can use while a file is read: NaN, infinity, beyond the compute dtype.

    |x| as an integer  =  the bits of x without its sign; infinity and NaN have the largest ones
    x is usable       <->  |x| <= the largest number that is finite in the compute dtype

One integer comparison finds all three faults, at memory speed, in the pieces that an import reads
anyway. Only a tensor with a fault is read again, to count its faults.

A non-finite weight makes every gradient non-finite, so each step would be skipped. A weight beyond
float16 does the same under `precision="fp16"`, whose compute copy is cast from it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.weights.names import DTYPES, WeightFile

_BLOCK = 1 << 18
"""Elements per comparison, so few that they stay in a core's cache."""
_PIECE = 1 << 24
"""Elements per read while faults are counted."""


class FiniteWeights:
    """A file of weights whose numbers are checked as they are read.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes, by name.
      tiled: names of tensors that are known to be stacks of tiles.
    """

    def __init__(self, file: WeightFile, compute_dtype: str, error: type[Exception]) -> None:
        """Check all numbers read from `file`.

        Args:
          file: file of weights.
          compute_dtype: name of the dtype into which weights are cast for a step.
          error: type of the error that reports a fault.
        """
        self.path = file.path
        self.tensors = file.tensors
        self.tiled = file.tiled
        self._file = file
        self._compute_dtype = compute_dtype
        self._error = error

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read.
          Exception: numbers of the tensor are not finite, or beyond the compute dtype; its type is
            `error`.
        """
        piece = self._file.read(name, box)
        dtype = self.tensors[name].dtype
        if dtype in DTYPES and _has_fault(piece, dtype, self._compute_dtype):
            raise self._error(self._described(name))
        return piece

    def _described(self, name: str) -> str:
        """Return a description of a tensor's faults, for which the full tensor is read."""
        tensor = self.tensors[name]
        faults = _Faults()
        for box in _pieces(tensor.shape):
            faults = faults.plus(self._file.read(name, box), box, tensor.dtype, self._compute_dtype)
        return (
            f"{self.path}: {name} {tensor.dtype}{list(tensor.shape)} holds "
            f"{faults.text(self._compute_dtype)}: every step would be skipped. "
            f"{faults.remedy(self._compute_dtype)}"
        )


@dataclasses.dataclass(frozen=True)
class _Faults:
    """Numbers of one tensor that no step can use.

    Attributes:
      nans: number of NaNs.
      infinite: number of infinities.
      beyond: number of finite numbers that are infinite in the compute dtype.
      first: the first fault and its index in the tensor; None if there is no fault.
    """

    nans: int = 0
    infinite: int = 0
    beyond: int = 0
    first: tuple[float, tuple[int, ...]] | None = None

    def plus(self, piece: np.ndarray, box: Box, dtype: str, compute_dtype: str) -> "_Faults":
        """Return these faults plus the faults of a piece, whose box in the tensor is `box`."""
        values = np.asarray(piece).reshape(-1)
        fault_indices = np.flatnonzero(
            _magnitudes(values, dtype) > largest_bits(dtype, compute_dtype)
        )
        if not fault_indices.size:
            return self
        faults = values[fault_indices].astype(np.float64)
        nans = int(np.isnan(faults).sum())
        infinite = int(np.isinf(faults).sum())
        first = self.first
        if first is None:
            shape = [stop - start for start, stop in box]
            inside = np.unravel_index(fault_indices[0], shape) if box else ()
            index = tuple(start + int(i) for (start, _), i in zip(box, inside, strict=True))
            first = float(faults[0]), index
        beyond = self.beyond + fault_indices.size - nans - infinite
        return _Faults(self.nans + nans, self.infinite + infinite, beyond, first)

    def text(self, compute_dtype: str) -> str:
        """Return the number of faults of each kind, and the first fault."""
        most = float(_largest(compute_dtype, compute_dtype))
        counts = [
            (self.nans, "NaN", "NaN"),
            (self.infinite, "infinite number", "infinite numbers"),
            (
                self.beyond,
                f"number beyond {compute_dtype}'s {most:.6g}",
                f"numbers beyond {compute_dtype}'s {most:.6g}",
            ),
        ]
        kinds = list[str]()
        for count, singular, plural in counts:
            if count:
                kinds.append(f"{count} {singular if count == 1 else plural}")
        text = "".join(kinds)
        if len(kinds) > 1:
            text = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        if self.first is None or not self.first[1]:
            return text
        value, index = self.first
        # A single NaN needs no value.
        shown = "" if kinds == ["1 NaN"] else f", {value},"
        return f"{text}, the first{shown} at {list(index)}"

    def remedy(self, compute_dtype: str) -> str:
        """Return the remedy."""
        if self.nans or self.infinite:
            return (
                "Copy or download the weights again, or use an earlier step of the run that "
                "produced them"
            )
        if compute_dtype == "float16":
            return (
                "precision='fp16' computes in float16: use precision='bf16' or 'fp32', which have "
                "the range of float32"
            )
        return "Weights are stored in float32: scale these"


def _pieces(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes that cover a tensor in order, each with some of its rows."""
    if not shape:
        yield ()
        return
    rows = max(1, _PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *((0, n) for n in shape[1:]))


def _has_fault(piece: np.ndarray, dtype: str, compute_dtype: str) -> bool:
    """Return whether a piece of a tensor holds a number that no step can use."""
    flat = np.asarray(piece).reshape(-1)
    most = largest_bits(dtype, compute_dtype)
    blocks = (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))
    return any(_magnitudes(block, dtype).max() > most for block in blocks)


def _magnitudes(flat: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of numbers without their signs, as integers."""
    kind = numpy_dtype(dtype)
    bits = 8 * kind.itemsize
    # Also converts another byte order.
    unsigned = np.ascontiguousarray(flat, kind).view(np.dtype(f"u{kind.itemsize}"))
    return unsigned & unsigned.dtype.type(2 ** (bits - 1) - 1)


@functools.cache
def largest_bits(dtype: str, compute_dtype: str) -> int:
    """Return the largest magnitude that stays finite, as the integer of its bits.

    Args:
      dtype: dtype of the number.
      compute_dtype: dtype into which the number is cast, by way of float32, in which weights are
        stored.
    """
    kind = numpy_dtype(dtype)
    compute = numpy_dtype(compute_dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    # Bisect between 0, which is finite, and all bits but the sign, which are a NaN.
    finite = 0
    not_finite = 2 ** (8 * kind.itemsize - 1) - 1
    while not_finite - finite > 1:
        middle = (finite + not_finite) // 2
        number = np.asarray([middle], unsigned).view(kind)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = number.astype(np.float32).astype(compute).astype(np.float32)
        if np.isfinite(cast[0]):
            finite = middle
        else:
            not_finite = middle
    return finite


def _largest(dtype: str, compute_dtype: str) -> np.floating:
    """Return the largest number of a dtype that is finite in the compute dtype."""
    kind = numpy_dtype(dtype)
    return np.asarray([largest_bits(dtype, compute_dtype)], np.dtype(f"u{kind.itemsize}")).view(
        kind
    )[0]
