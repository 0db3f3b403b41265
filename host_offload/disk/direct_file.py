"""One file's bytes, moved past the page cache where alignment allows (O_DIRECT), and through it
where not.

O_DIRECT needs the address in memory, the offset in the file and the length to be multiples of the
disk's sector; 4096 serves every disk. A span that is not aligned is moved in parts,

    head (to the next multiple of 4096, buffered) | body (direct) | tail (shorter than 4096,
    buffered)

and all is buffered where no head aligns both the offset and the address. A signal's interruption is
retried (PEP 475). A transfer that moved less than was asked for is continued from there.
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
    """An open file; a context manager. Several threads may transfer at once.

    Attributes:
      direct: whether the file system takes O_DIRECT.
    """

    def __init__(self, path: str, *, writes: bool, direct: bool = True) -> None:
        """Open a regular file, to read it or to write it; one to write is created if it does not
        exist, for this user alone.

        Args:
          path: of the file.
          writes: whether to write it.
          direct: try O_DIRECT.

        Raises:
          NotRegularError: something else has that name.
          OSError: as os.open.
        """
        flags = os.O_RDWR if writes else os.O_RDONLY
        # Two descriptors of one file: O_DIRECT refuses what is not aligned, and that goes through
        # the buffered one.
        self._buffered = open_regular(path, flags | (os.O_CREAT if writes else 0))
        self._direct, self._writes = -1, writes
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
        """Bytes of the file."""
        return os.fstat(self._buffered).st_size

    def resize(self, num_bytes: int) -> None:
        """Cut the file, or make it longer with a hole."""
        os.ftruncate(self._buffered, num_bytes)

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a buffer, uint8[n], from an offset on.

        Raises:
          TruncatedError: the file ends before.
          OSError: as os.preadv.
        """
        self._transfer(lambda fd, part, at: os.preadv(fd, [part], at), buffer, offset)

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write a buffer, uint8[n], from an offset on.

        Raises:
          OSError: as os.pwritev.
        """
        self._transfer(lambda fd, part, at: os.pwritev(fd, [part], at), buffer, offset)

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], buffer: np.ndarray, offset: int
    ) -> None:
        memory, address, done = buffer.data, buffer.ctypes.data, 0
        while done < len(memory):
            is_direct, length = self._part(address + done, offset + done, len(memory) - done)
            fd = self._direct if is_direct else self._buffered
            try:
                count = call(fd, memory[done : done + length], offset + done)
            except OSError as error:
                if not is_direct or error.errno not in _NO_DIRECT:
                    raise
                self.direct = False  # it opens such files and does not serve them
                continue
            # preadv returns 0 at the end of a file: to try again would never end.
            if count <= 0:
                raise TruncatedError(
                    f"the file ends at byte {offset + done}, and {len(memory) - done} bytes more are needed"
                )
            done += count

    def _part(self, address: int, offset: int, length: int) -> tuple[bool, int]:
        """Return how the next part is moved, and its length."""
        head = -offset % BLOCK_BYTES
        # Address and offset must become multiples of the block after the same head, or no part can
        # be direct.
        if not self.direct or (address + head) % BLOCK_BYTES or length - head < BLOCK_BYTES:
            return False, length
        return (False, head) if head else (True, length // BLOCK_BYTES * BLOCK_BYTES)

    def close(self) -> None:
        """Close the file; once closed, do nothing."""
        fds, self._buffered, self._direct = (self._buffered, self._direct), -1, -1
        # Both are closed, also where the first raises. A file that was only read has nothing that a
        # close could lose.
        with (
            contextlib.suppress(*(() if self._writes else (OSError,))),
            contextlib.ExitStack() as closing,
        ):
            for fd in fds:
                if fd >= 0:
                    closing.callback(os.close, fd)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_file(
    path: str, buffer: np.ndarray, num_bytes: int, *, offset: int = 0, direct: bool = True
) -> None:
    """Read a span of a file, of any length and offset, to the start of a buffer.

    Args:
      path: of the file.
      buffer: uint8[n], contiguous, n >= num_bytes; its page alignment decides how much is direct.
      num_bytes: to read.
      offset: in the file.
      direct: use O_DIRECT where it can be.

    Raises:
      ValueError: the buffer is of another form.
      OSError: as os.open and os.preadv; a TruncatedError if the file ends before.
    """
    check_buffer(buffer, num_bytes)
    with DirectFile(path, writes=False, direct=direct) as file:
        file.read(buffer[:num_bytes], offset)


def write_file(
    path: str, buffer: np.ndarray, num_bytes: int, *, offset: int = 0, direct: bool = True
) -> None:
    """Write the start of a buffer to a span of a file, of any length and offset; the file is made
    if it is not there.

    Arguments and errors are those of `read_file`.
    """
    check_buffer(buffer, num_bytes)
    with DirectFile(path, writes=True, direct=direct) as file:
        file.write(buffer[:num_bytes], offset)
