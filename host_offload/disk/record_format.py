"""The layout of one layer's leaves in a record.

Leaves are stored one after the other, each aligned to a cache line; the record is padded to full
disk blocks:

    leaf 0 | pad to 64 bytes | leaf 1 | ... | pad to 4096 bytes

Sizes and offsets are computed once per format. Callbacks of a running program need them at every
transfer, while the GPU waits for Python.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from host_offload.device import Views
from host_offload.fields import Field

LEAF_BYTES = 64
"""Alignment of a leaf in a record: a cache line."""
BLOCK_BYTES = 4096
"""A record's size is a multiple of this, the largest disk sector, so O_DIRECT moves all of it."""


@dataclasses.dataclass(frozen=True)
class LeafFormat:
    """One leaf of a record.

    Attributes:
      name: path of the leaf in its pytree.
      shape: shape of one device's shard.
      dtype: name of a numpy dtype, or of an ml_dtypes dtype such as "bfloat16".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the leaf's shard, without padding."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Layout of one layer's leaves in its record.

    Attributes:
      leaves: leaves of the record, in order.
    """

    leaves: tuple[LeafFormat, ...]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each leaf in the record, in bytes."""
        offsets = []
        end = 0
        for leaf in self.leaves:
            start = _round_up(end, LEAF_BYTES)
            offsets.append(start)
            end = start + leaf.num_bytes
        return tuple(offsets)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes from the start of the record to the end of the last leaf."""
        return self.offsets[-1] + self.leaves[-1].num_bytes if self.leaves else 0

    @functools.cached_property
    def padded_bytes(self) -> int:
        """Bytes of the record's file, padding included."""
        # A record without leaves also has a file, of one block: an empty array has no chunks.
        return max(_round_up(self.num_bytes, BLOCK_BYTES), BLOCK_BYTES)

    def leaves_with_offsets(self) -> Iterator[tuple[LeafFormat, int]]:
        """Yield each leaf and the offset of its first byte in the record."""
        return zip(self.leaves, self.offsets, strict=True)

    @functools.cached_property
    def _places(self) -> tuple[tuple[slice, np.dtype, tuple[int, ...]], ...]:
        """Each leaf's bytes in the record, its dtype and its shape."""
        return tuple(
            (slice(start, start + leaf.num_bytes), numpy_dtype(leaf.dtype), leaf.shape)
            for leaf, start in self.leaves_with_offsets()
        )

    def views(self, buffer: np.ndarray) -> Views:
        """Return each leaf as an array in the buffer's own memory.

        Args:
          buffer: uint8[n], contiguous, n >= num_bytes.

        Raises:
          ValueError: the buffer has another dtype or rank, is too small, or is not contiguous.
        """
        check_buffer(buffer, self.num_bytes)
        return Views(
            buffer[place].view(dtype).reshape(shape) for place, dtype, shape in self._places
        )


def numpy_dtype(name: str) -> np.dtype:
    """Return the numeric dtype of a name, dtypes of ml_dtypes included.

    Raises:
      ValueError: neither numpy nor ml_dtypes has a numeric dtype of this name.
    """
    # Not np.dtype(name), which also accepts names of records, objects and times.
    scalar = vars(ml_dtypes).get(name) or vars(np).get(name)
    if isinstance(scalar, type) and issubclass(scalar, np.generic):
        dtype = np.dtype(scalar)
        if dtype.name == name and dtype.kind not in "OSUTMm" and dtype.itemsize:
            return dtype
    raise ValueError(f"dtype {name!r} is neither numpy's nor of ml_dtypes")


def described_array(field: Field) -> tuple[tuple[int, ...], str, int]:
    """Return the shape, dtype and number of bytes of an array that a description describes.

    Args:
      field: object with the fields `shape` and `dtype`.

    Raises:
      FieldError: a field is missing or invalid.
    """
    shape = field["shape"].integers()
    dtype = field["dtype"].text()
    try:
        itemsize = numpy_dtype(dtype).itemsize
    except ValueError:
        field["dtype"].refuse("a dtype of numpy or ml_dtypes")
    return shape, dtype, field["shape"].num_bytes(itemsize)


def check_buffer(buffer: np.ndarray, num_bytes: int) -> None:
    """Raise ValueError unless a buffer is uint8[n], contiguous, n >= num_bytes."""
    if (
        buffer.dtype != np.uint8
        or buffer.ndim != 1
        or not buffer.flags.c_contiguous
        or buffer.nbytes < num_bytes
    ):
        raise ValueError(
            f"{buffer.dtype}{list(buffer.shape)}, strides {buffer.strides}: a contiguous uint8[n], "
            f"n >= {num_bytes} is needed"
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
