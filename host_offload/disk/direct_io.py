"""Move records between disk and buffers at the disk's own speed: O_DIRECT, in blocks, on threads.

    read    open the file; several threads read blocks (preadv); compare the checksum
    write   open the file; one thread computes the checksum while others write blocks (pwritev)

Any free thread claims the next block, and records are served in the order of the calls. So a record
has the full bandwidth of the disk until its last blocks, and the record that a step waits for is
first. The file is opened by its name each time. That costs about 20 microseconds, and detects a
record that was removed or truncated in the meantime. System calls and checksums release the GIL.

Errors are raised by the future, as SwapError. After a failed write the record counts as never
written, and reading such a record is an error too: a read only returns data of a successful write.
"""

import concurrent.futures
import logging
import os
import threading
import time

import numpy as np

from host_offload.disk.checksum import compute_checksum
from host_offload.disk.direct_file import DirectFile
from host_offload.disk.errors import TruncatedError, explain
from host_offload.disk.record_format import check_buffer
from host_offload.disk.store import Store
from host_offload.disk.tuning import IoSettings

logger = logging.getLogger(__name__)


class DirectIo:
    """Reads and writes records of any store; a context manager.

    Attributes:
      settings: number of threads, and size of a block.
    """

    def __init__(self, settings: IoSettings, *, name: str = "direct") -> None:
        """Start the thread pool.

        Args:
          settings: number of threads, and size of a block.
          name: name of the threads, for debuggers. Use one pool for reads and another for writes
            if they must not wait for each other.
        """
        self.settings = settings
        self._pool = concurrent.futures.ThreadPoolExecutor(
            settings.num_threads, thread_name_prefix=f"zerojax-{name}"
        )
        self._buffered: set[str] = set()  # folders without O_DIRECT
        self._lock = threading.Lock()
        self._process = os.getpid()

    def read(
        self, store: Store, layer: int, buffer: np.ndarray, *, verify: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to read a record.

        Args:
          store: store of the record. Wait for a pending write of the same record before the call.
          layer: index of the record.
          buffer: uint8[n], contiguous, writable, n >= padded_bytes; do not touch it until the
            future is done. If its address is not a multiple of 4096, the record is read through
            the page cache.
          verify: whether to refuse a record that was never written, and to compare the checksum,
            if one was stored.

        Returns:
          A future of the seconds from the start of the first block to the end, checksum included;
          the future raises SwapError if the read failed.

        Raises:
          ValueError: the buffer has a wrong form, or the layer does not exist.
          RuntimeError: this object is closed.
        """
        return self._start(_Transfer(self, store, layer, buffer, writes=False, checked=verify))

    def write(
        self, store: Store, layer: int, buffer: np.ndarray, *, checksum: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to write a record.

        Args:
          store: store of the record.
          layer: index of the record.
          buffer: uint8[n], contiguous, n >= padded_bytes. Its first padded_bytes are the record,
            and must not change until the future is done.
          checksum: whether to store the record's checksum, for reads to verify.

        Returns:
          A future of the seconds from the start of the first block to the end; the future raises
          SwapError if the write failed.

        Raises:
          ValueError: the buffer has a wrong form, or the layer does not exist.
          RuntimeError: this object is closed.
        """
        return self._start(_Transfer(self, store, layer, buffer, writes=True, checked=checksum))

    def _start(self, transfer: "_Transfer") -> concurrent.futures.Future[float]:
        # One job per thread that could help. A job that starts too late finds no block left and
        # returns immediately.
        for k in range(min(transfer.num_blocks, self.settings.num_threads)):
            try:
                self._pool.submit(self._run, transfer)
            except RuntimeError:  # closed, or the interpreter exits; one working thread is enough
                if k == 0:
                    raise
        return transfer.future

    def _run(self, transfer: "_Transfer") -> None:
        while transfer.move_block():
            pass

    def note_buffered(self, folder: str) -> None:
        """Log, once per folder, that a folder does not support O_DIRECT."""
        with self._lock:
            if folder in self._buffered:
                return
            self._buffered.add(folder)
        logger.warning(
            "%s has no O_DIRECT: its records go through the page cache, which is slower", folder
        )

    def close(self) -> None:
        """Wait for all transfers and end the threads.

        Further calls do nothing, and neither does a call in a forked child, which has no threads.
        """
        if os.getpid() != self._process:
            return
        self._pool.shutdown(wait=True)

    def __enter__(self) -> "DirectIo":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all transfers and end the threads."""
        self.close()


class _Transfer:
    """The transfer of one record, whose blocks several threads read or write."""

    def __init__(
        self,
        io: DirectIo,
        store: Store,
        layer: int,
        buffer: np.ndarray,
        *,
        writes: bool,
        checked: bool,
    ) -> None:
        size = store.format.padded_bytes
        check_buffer(buffer, size)
        if not writes and not buffer.flags.writeable:
            raise ValueError("a record is read into a writable buffer, and this one is not")
        self._io = io
        self._store = store
        self._layer = layer
        self._path = store.record_path(layer)
        self.future: concurrent.futures.Future[float] = concurrent.futures.Future()
        self.num_blocks = -(-size // io.settings.block_bytes)
        self._record = buffer[:size]
        self._writes = writes
        self._checked = checked
        self._lock = threading.Lock()
        self._file: DirectFile | None = None
        self._error: BaseException | None = None
        self._next = 0
        self._moving = 0
        self._checksum = 0
        self._start = 0.0

    def move_block(self) -> bool:
        """Move the next block, and return whether there was a block left.

        The last thread to end finishes the record.
        """
        with self._lock:
            block = self._next
            if block == self.num_blocks:
                return False
            # If the transfer was cancelled before its first block, it does not touch the record.
            if block == 0 and not self.future.set_running_or_notify_cancel():
                self._next = self.num_blocks
                return False
            self._next = block + 1
            self._moving = self._moving + 1
            # Under the lock, so that no other thread moves a block before the file is open.
            if block == 0 and (error := self._begin()) is not None:
                self._error = error
                self._next = self.num_blocks
        # Without the lock: the blocks of a record move in parallel.
        error = self._error or self._move(block)
        with self._lock:
            self._moving -= 1
            if error is not None:
                # Mark the remaining blocks as claimed, so that the active threads end the transfer.
                self._error = self._error or error
                self._next = self.num_blocks
            # Both are read under the lock: exactly one thread sees that nothing is moving and
            # nothing is left.
            is_last = self._moving == 0 and self._next == self.num_blocks
        if is_last:
            self._finish()
        return True

    def _begin(self) -> BaseException | None:
        self._start = time.monotonic()
        size = self._record.nbytes
        try:
            if self._writes:
                self._store.begin_write(self._layer)
            elif self._checked:
                self._store.require(self._layer)
            self._file = DirectFile(self._path, writes=self._writes)
            if (num_bytes := self._file.num_bytes) != size:
                if not self._writes:
                    raise TruncatedError(f"the file has {num_bytes} bytes, and the record {size}")
                # A read refuses a file of any other size, so a longer file is truncated here.
                self._file.resize(size)
        except BaseException as error:
            return error
        return None

    def _move(self, block: int) -> BaseException | None:
        length = self._io.settings.block_bytes
        start = block * length
        part = self._record[start : start + length]
        try:
            assert self._file is not None
            if not self._writes:
                self._file.read(part, start)
                return None
            if block == 0 and self._checked:  # other threads write blocks in the meantime
                self._checksum = compute_checksum(self._record)
            self._file.write(part, start)
        except BaseException as error:
            return error
        return None

    def _finish(self) -> None:
        error = self._error
        try:
            if self._file is not None:
                # Close before `end_write`: network file systems may report a lost write only when
                # the file is closed.
                self._file.close()
                if not self._file.direct:
                    self._io.note_buffered(os.path.dirname(os.path.dirname(self._store.path)))
            if error is None and self._writes:
                self._store.end_write(self._layer, self._checksum)
            elif error is None and self._checked:
                self._store.verify(self._layer, self._record)
        except BaseException as late:
            error = error or late
        if error is None:
            self.future.set_result(time.monotonic() - self._start)
            return
        doing = (
            f"{'writing' if self._writes else 'reading'} {self._store.kind} of rank "
            f"{self._store.rank}"
        )
        self.future.set_exception(explain(error, doing=doing, file=self._path, layer=self._layer))
