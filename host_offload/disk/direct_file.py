"""Read and write files past the page cache (O_DIRECT) as far as alignment allows, else through it.

O_DIRECT requires that the memory address, the file offset and the length are multiples of the
disk's sector; 4096 works for every disk. An unaligned span is moved in parts,

    head (to the next multiple of 4096, buffered) | body (direct) | tail (< 4096, buffered)

If no head aligns both the offset and the address, the full span is buffered. System calls that a
signal interrupts are retried (PEP 475). A partial transfer is continued where it stopped.
"""

import contextlib
import errno
import os
from collections.abc import Callable

import numpy as np

from host_offload.disk.errors import TruncatedError
from host_offload.disk.record_format import BLOCK_BYTES, check_buffer
from host_offload.disk.regular_file import open_regular

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """An open file; a context manager. Several threads may transfer at the same time.

    Attributes:
      direct: whether the file system supports O_DIRECT.
    """

    def __init__(self, path: str, *, writes: bool, direct: bool = True) -> None:
        """Open a regular file.

        Args:
          path: path of the file.
          writes: whether the file is opened for writing. A missing file is then created, with
            access for this user only.
          direct: whether to try O_DIRECT.

        Raises:
          NotRegularError: the path names something other than a regular file.
          OSError: os.open failed.
        """
        flags = os.O_RDWR if writes else os.O_RDONLY
        # Two descriptors of one file: O_DIRECT refuses unaligned parts, which use the buffered one.
        self._buffered = open_regular(path, flags | (os.O_CREAT if writes else 0))
        self._direct = -1
        self._writes = writes
        if direct and _DIRECT:
            try:
                self._direct = open_regular(path, flags | _DIRECT)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    os.close(self._buffered)
                    raise
        self.direct = self._direct >= 0

    @property
    def num_bytes(self) -> int:
        """Size of the file, in bytes."""
        return os.fstat(self._buffered).st_size

    def resize(self, num_bytes: int) -> None:
        """Truncate the file to `num_bytes`, or extend it to that size with a hole."""
        os.ftruncate(self._buffered, num_bytes)

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a buffer with the file's bytes from an offset on.

        Args:
          buffer: uint8[n], contiguous.
          offset: offset in the file, in bytes.

        Raises:
          TruncatedError: the file ends before the buffer is full.
          OSError: os.preadv failed.
        """
        self._transfer(lambda fd, part, at: os.preadv(fd, [part], at), buffer, offset)

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write a buffer to the file from an offset on.

        Args:
          buffer: uint8[n], contiguous.
          offset: offset in the file, in bytes.

        Raises:
          OSError: os.pwritev failed.
        """
        self._transfer(lambda fd, part, at: os.pwritev(fd, [part], at), buffer, offset)

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], buffer: np.ndarray, offset: int
    ) -> None:
        memory = buffer.data
        address = buffer.ctypes.data
        num_done = 0
        while num_done < len(memory):
            position = offset + num_done
            is_direct, length = self._next_part(
                address + num_done, position, len(memory) - num_done
            )
            fd = self._direct if is_direct else self._buffered
            try:
                count = call(fd, memory[num_done : num_done + length], position)
            except OSError as error:
                if not is_direct or error.errno not in _NO_DIRECT:
                    raise
                self.direct = False  # the file system opens files with O_DIRECT, but refuses I/O
                continue
            # preadv returns 0 at the end of a file, so retrying would never end.
            if count <= 0:
                raise TruncatedError(
                    f"the file ends at byte {position}, and {len(memory) - num_done} bytes more "
                    "are needed"
                )
            num_done += count

    def _next_part(self, address: int, offset: int, length: int) -> tuple[bool, int]:
        """Return whether the next part is moved with O_DIRECT, and its length in bytes."""
        head = -offset % BLOCK_BYTES
        # The same head must align both the address and the offset, or no part can be direct.
        if not self.direct or (address + head) % BLOCK_BYTES or length - head < BLOCK_BYTES:
            return False, length
        if head:
            return False, head
        return True, length // BLOCK_BYTES * BLOCK_BYTES

    def close(self) -> None:
        """Close the file; further calls do nothing.

        Raises:
          OSError: a file opened for writing could not be closed, and may have lost data.
        """
        fds = (self._buffered, self._direct)
        self._buffered = -1
        self._direct = -1
        # Close both descriptors even if the first close raises. Errors of a file that was only read
        # are ignored, because it has no data to lose.
        with (
            contextlib.suppress(*(() if self._writes else (OSError,))),
            contextlib.ExitStack() as closing,
        ):
            for fd in fds:
                if fd >= 0:
                    closing.callback(os.close, fd)

    def __enter__(self) -> "DirectFile":
        """Return this file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close this file."""
        self.close()


def read_file(
    path: str, buffer: np.ndarray, num_bytes: int, *, offset: int = 0, direct: bool = True
) -> None:
    """Read a span of a file, of any length and offset, into the start of a buffer.

    Args:
      path: path of the file.
      buffer: uint8[n], contiguous, n >= num_bytes; its alignment decides how much is read with
        O_DIRECT.
      num_bytes: number of bytes to read.
      offset: offset of the span in the file, in bytes.
      direct: whether to use O_DIRECT as far as possible.

    Raises:
      ValueError: the buffer has another dtype or rank, is too small, or is not contiguous.
      OSError: the file cannot be opened or read; TruncatedError if it ends before the span does.
    """
    check_buffer(buffer, num_bytes)
    with DirectFile(path, writes=False, direct=direct) as file:
        file.read(buffer[:num_bytes], offset)


def write_file(
    path: str, buffer: np.ndarray, num_bytes: int, *, offset: int = 0, direct: bool = True
) -> None:
    """Write the start of a buffer to a span of a file, of any length and offset.

    A missing file is created.

    Args:
      path: path of the file.
      buffer: uint8[n], contiguous, n >= num_bytes; its alignment decides how much is written with
        O_DIRECT.
      num_bytes: number of bytes to write.
      offset: offset of the span in the file, in bytes.
      direct: whether to use O_DIRECT as far as possible.

    Raises:
      ValueError: the buffer has another dtype or rank, is too small, or is not contiguous.
      OSError: the file cannot be opened or written.
    """
    check_buffer(buffer, num_bytes)
    with DirectFile(path, writes=True, direct=direct) as file:
        file.write(buffer[:num_bytes], offset)
