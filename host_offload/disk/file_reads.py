"""Read boxes of arrays from files with preadv.

    file    offset ..  an array of `shape`, in row-major order
    box     (start, stop) in each dim  ->  out[stop - start, ...]

A mapped file would need fewer lines of code. But if the disk cannot read a sector, touching a
mapping raises SIGBUS, which ends the process without a message, whereas preadv raises an OSError:
EIO, with the file and the byte at which it happened.

The bytes from the first to the last element of a box are its span. A box without gaps is read
directly into the result, if the dtypes match. Any other box is halved along its outermost dim until
its span fits a block of BLOCK_BYTES, which is read completely and cut in memory. So only the gaps
are read in vain, and memory holds at most one block in addition to the result. Gaps are read only
if they are no larger than the box, or if the box's pieces are so small that one call per piece
would cost more.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import numpy as np

from host_offload.disk.errors import NotRegularError, TruncatedError
from host_offload.disk.regular_file import open_regular

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dim of an array."""
BLOCK_BYTES = 4 << 20
"""Maximum bytes held in addition to a result. Larger blocks are not read faster."""
PIECE_BYTES = 64 << 10
"""Pieces of at least this many bytes are read one by one if the gaps between them are larger."""


class ReadFile:
    """A file open for reading; it is closed when the last reference to this object is dropped.

    Several threads may read at the same time.

    Attributes:
      path: path of the file.
    """

    def __init__(self, path: str) -> None:
        """Open a file; a symbolic link to a regular file is followed.

        Raises:
          OSError: the file cannot be opened.
          NotRegularError: the path names a folder, a FIFO, a socket or a device.
        """
        self.path = path
        self._fd = -1
        try:
            self._fd = open_regular(path, os.O_RDONLY, follow=True)
        except NotRegularError as error:
            raise NotRegularError(f"{path}: {error}") from error

    def __del__(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
                os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        """Size of the file, in bytes."""
        return os.fstat(self._fd).st_size

    def read_bytes(self, offset: int, out: np.ndarray) -> None:
        """Fill an array with the file's bytes from `offset` on.

        Args:
          offset: offset in the file, in bytes.
          out: uint8[n], contiguous.

        Raises:
          OSError: the bytes cannot be read; the message says at which byte.
          TruncatedError: the file ends before the array is full.
        """
        view = out.data
        num_read = 0
        while num_read < len(view):
            position = offset + num_read
            try:
                count = os.preadv(self._fd, [view[num_read:]], position)
            except OSError as error:
                message = f"{error.strerror} at byte {position}"
                raise OSError(error.errno, message, self.path) from error
            # A signal or an unreadable sector may cut a read short: the next read shows which.
            if not count:
                missing = len(view) - num_read
                raise TruncatedError(
                    f"{self.path} ends at byte {position}, and {missing} more are needed"
                )
            num_read += count

    def read_all(self, most_bytes: int) -> bytes:
        """Return all bytes of a small file.

        Args:
          most_bytes: maximum size of the file, in bytes.

        Raises:
          OSError: the file cannot be read.
          TruncatedError: the file is larger than `most_bytes`.
        """
        if (num_bytes := self.num_bytes) > most_bytes:
            raise TruncatedError(
                f"{self.path} has {num_bytes} bytes, and at most {most_bytes} are expected"
            )
        contents = np.empty(num_bytes, np.uint8)
        self.read_bytes(0, contents)
        return contents.tobytes()

    def read_start(self, most_bytes: int) -> bytes:
        """Return the first `most_bytes` bytes of the file, or all bytes if there are fewer.

        Raises:
          OSError: the bytes cannot be read.
        """
        start = np.empty(min(self.num_bytes, most_bytes), np.uint8)
        self.read_bytes(0, start)
        return start.tobytes()

    def blocks(self, num_bytes: int) -> Iterator[np.ndarray]:
        """Yield the first `num_bytes` bytes of the file, in blocks uint8[BLOCK_BYTES] or shorter.

        Each block is a view of the same array, so it is valid only until the next one.

        Raises:
          OSError: the bytes cannot be read.
          TruncatedError: the file has fewer bytes.
        """
        block = np.empty(min(BLOCK_BYTES, num_bytes), np.uint8)
        for offset in range(0, num_bytes, BLOCK_BYTES):
            contents = block[: num_bytes - offset]
            self.read_bytes(offset, contents)
            yield contents

    def read_box(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype, box: Box, out: np.ndarray
    ) -> None:
        """Fill `out` with a box of an array in the file, cast to the dtype of `out`.

        Args:
          offset: offset of the array's first byte in the file, in bytes.
          shape: shape of the array.
          dtype: dtype of the array.
          box: (start, stop) in each dim of the array.
          out: array of the box's shape, with any strides and any dtype.

        Raises:
          OSError: the bytes cannot be read.
          TruncatedError: the file ends before the box does.
        """
        strides = tuple(math.prod(shape[dim + 1 :]) * dtype.itemsize for dim in range(len(shape)))
        self._read(offset, strides, dtype, box, out)

    def _read(
        self, offset: int, strides: tuple[int, ...], dtype: np.dtype, box: Box, out: np.ndarray
    ) -> None:
        sizes = tuple(stop - start for start, stop in box)
        num_bytes = math.prod(sizes) * dtype.itemsize
        if not num_bytes:
            return
        starts = [start * stride for (start, _), stride in zip(box, strides, strict=True)]
        lengths = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
        first = offset + sum(starts)
        span = sum(lengths) + dtype.itemsize
        reads_gaps = span <= 2 * num_bytes or _piece_bytes(sizes, strides, dtype) < PIECE_BYTES
        if span == num_bytes and out.dtype == dtype and out.flags.c_contiguous:
            self.read_bytes(first, out.reshape(-1).view(np.uint8))
        elif span <= BLOCK_BYTES and reads_gaps:
            block = np.empty(span, np.uint8)
            self.read_bytes(first, block)
            out[...] = np.ndarray(sizes, dtype, block, strides=strides)
        else:
            # Such a dim exists: a box of a single element has no gaps and is smaller than a block.
            dim = next(dim for dim, size in enumerate(sizes) if size > 1)
            start, stop = box[dim]
            middle = (start + stop) // 2
            for half in ((start, middle), (middle, stop)):
                half_box = (*box[:dim], half, *box[dim + 1 :])
                rows = (slice(None),) * dim + (slice(half[0] - start, half[1] - start),)
                self._read(offset, strides, dtype, half_box, out[rows])


def _piece_bytes(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of bytes in each contiguous piece of a box."""
    piece = dtype.itemsize
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != piece and size > 1:
            break
        piece *= size
    return piece
