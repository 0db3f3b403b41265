"""Boxes of arrays in files, read with pread.

    file    offset ..  an array of `shape`, row by row
    box     (start, stop) in each dim  ->  out[stop - start, ...]

A mapped file would cost fewer lines. But where the disk cannot read a sector, touching a mapping is
a SIGBUS, which ends the process without a word, and pread is an OSError: EIO, with the file and the
byte at which it happened.

The bytes between the first and the last element of a box are its span. A box without gaps is read
into the result itself, if that is of the same dtype. Any other is halved along its outermost dim
until its span fits a block of BLOCK_BYTES, which is read whole and cut in memory: what is read in
vain are the gaps, and what is held beside the result is one block. Gaps are read only where they
are no larger than the box, or its pieces are small: one call for each piece would cost more.
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
"""Most bytes held beside a result. Larger blocks are not read faster."""
PIECE_BYTES = 64 << 10
"""Pieces of at least so many bytes are read one by one, if the gaps between them are larger than
they are.
"""


class ReadFile:
    """A file open for reading, until the last reference to it goes.

    Several threads may read at once.
    """

    def __init__(self, path: str) -> None:
        """Open a file.

        Raises:
          OSError: it cannot be opened.
          NotRegularError: it is a folder, a FIFO, a socket or a device.
        """
        self.path = path
        self._fd = -1
        try:
            self._fd = open_regular(path, os.O_RDONLY, follow=True)
        except NotRegularError as error:
            raise NotRegularError(f"{path}: {error}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written that could be lost
                os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._fd).st_size

    def read_bytes(self, offset: int, out: np.ndarray) -> None:
        """Fill uint8[n] with the bytes from `offset`.

        Raises:
          OSError: they cannot be read; its text tells the byte.
          TruncatedError: the file ends before.
        """
        view, at = out.data, 0
        while at < len(view):
            try:
                count = os.preadv(self._fd, [view[at:]], offset + at)
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror} at byte {offset + at}", self.path
                ) from error
            # A read may be cut short, by a signal or before a sector that cannot be read: the next
            # one tells which.
            if not count:
                raise TruncatedError(
                    f"{self.path} ends at byte {offset + at}, and {len(view) - at} more are needed"
                )
            at += count

    def read_all(self, most_bytes: int) -> bytes:
        """Return the bytes of a file that is not large.

        Raises:
          OSError: they cannot be read.
          TruncatedError: there are more than `most_bytes`.
        """
        if (num_bytes := self.num_bytes) > most_bytes:
            raise TruncatedError(
                f"{self.path} has {num_bytes} bytes, and at most {most_bytes} are expected"
            )
        self.read_bytes(0, out := np.empty(num_bytes, np.uint8))
        return out.tobytes()

    def read_start(self, most_bytes: int) -> bytes:
        """Return the first bytes of a file, or all where there are fewer.

        Raises:
          OSError: they cannot be read.
        """
        self.read_bytes(0, out := np.empty(min(self.num_bytes, most_bytes), np.uint8))
        return out.tobytes()

    def blocks(self, num_bytes: int) -> Iterator[np.ndarray]:
        """Yield the first bytes of the file, block by block, in an array that is used again:
        uint8[BLOCK_BYTES] or fewer.

        Raises:
          OSError, TruncatedError: as `read_bytes` does.
        """
        block = np.empty(min(BLOCK_BYTES, num_bytes), np.uint8)
        for offset in range(0, num_bytes, BLOCK_BYTES):
            part = block[: num_bytes - offset]
            self.read_bytes(offset, part)
            yield part

    def read_box(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype, box: Box, out: np.ndarray
    ) -> None:
        """Fill `out`, of the box's shape, with a box of an array in the file, cast to its dtype.

        Args:
          offset: of the array's first byte.
          shape: of the array.
          dtype: of the array.
          box: to read.
          out: any strides, any dtype.

        Raises:
          OSError, TruncatedError: as `read_bytes` does.
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
        first = offset + sum(
            start * stride for (start, _), stride in zip(box, strides, strict=True)
        )
        span = (
            sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            + dtype.itemsize
        )
        if span == num_bytes and out.dtype == dtype and out.flags.c_contiguous:
            self.read_bytes(first, out.reshape(-1).view(np.uint8))
        elif span <= BLOCK_BYTES and (
            span <= 2 * num_bytes or _piece_bytes(sizes, strides, dtype) < PIECE_BYTES
        ):
            block = np.empty(span, np.uint8)
            self.read_bytes(first, block)
            out[...] = np.ndarray(sizes, dtype, block, strides=strides)
        else:
            # There is such a dim: a box of one element is one without gaps, and smaller than a
            # block.
            dim = next(dim for dim, size in enumerate(sizes) if size > 1)
            start, stop = box[dim]
            middle = (start + stop) // 2
            for part in ((start, middle), (middle, stop)):
                rows = (slice(None),) * dim + (slice(part[0] - start, part[1] - start),)
                self._read(offset, strides, dtype, (*box[:dim], part, *box[dim + 1 :]), out[rows])


def _piece_bytes(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> int:
    """Return how many bytes of a box follow each other without a gap."""
    piece = dtype.itemsize
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != piece and size > 1:
            break
        piece *= size
    return piece
