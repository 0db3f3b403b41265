"""Measure how fast records are read and written, with each reader, against the disk's own speed.

The ceiling is plain preadv and pwritev with O_DIRECT on the same files and buffers, in blocks on
several threads: no futures, no checksums, no files opened during the measurement, and the best of
several settings. Each measurement writes all records first, then drops the page cache and reads
them. A round measures each reader in turn; compare rates only within a round, so that a slow minute
affects all of them.
"""

import collections
import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from host_offload.device import Ring
from host_offload.disk.direct_io import DirectIo
from host_offload.disk.errors import SwapError
from host_offload.disk.record_format import LeafFormat, RecordFormat
from host_offload.disk.regular_file import open_regular
from host_offload.disk.store import Store
from host_offload.disk.tensorstore_io import TensorstoreIo
from host_offload.disk.tuning import DEFAULT, IoSettings

PLAIN = "plain preadv/pwritev"
DIRECT = 'io="direct"'
UNCHECKED = 'io="direct", unchecked'
TENSORSTORE = 'io="tensorstore"'
_Start = Callable[[Store, int, np.ndarray], concurrent.futures.Future[float]]
"""Function of a store, a record and a buffer that starts to read or write the record."""
_MIB = 1 << 20
_MORE_SETTINGS = (DEFAULT, IoSettings(8, 4 * _MIB), IoSettings(2, 16 * _MIB))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of reading and of writing, in bytes per second."""

    read: float
    write: float


class Reader(Protocol):
    """The interface of `DirectIo` and `TensorstoreIo`."""

    def read(
        self, store: Store, layer: int, buffer: np.ndarray, *, verify: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to read a record; see `DirectIo.read`."""
        ...

    def write(
        self, store: Store, layer: int, buffer: np.ndarray, *, checksum: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to write a record; see `DirectIo.write`."""
        ...


class Bench:
    """Records in a folder for measurements; a context manager that frees its buffers."""

    def __init__(
        self,
        folder_path: str,
        settings: IoSettings,
        *,
        num_records: int = 16,
        record_bytes: int = 64 * _MIB,
    ) -> None:
        """Reserve the disk space and fill the buffers.

        Args:
          folder_path: path of a `SwapFolder`.
          settings: threads and block size of both readers.
          num_records: number of records, at least 2.
          record_bytes: bytes per record; up to four buffers of this size are allocated.

        Raises:
          SwapError: the disk is too small.
        """
        self.settings = settings
        form = RecordFormat((LeafFormat("bytes", (record_bytes,), "uint8"),))
        self.store = Store(folder_path, "bench", 0, num_records, form)
        self.store.preallocate()
        self._ring = Ring(min(4, num_records), form.padded_bytes)
        self._buffers = [self._ring.take() for _ in range(self._ring.num_buffers)]
        random = np.random.default_rng(0)  # some disks compress data, or handle zeros specially
        for buffer in self._buffers:
            buffer.view(np.uint64)[:] = random.integers(0, 1 << 63, buffer.nbytes // 8, np.uint64)

    def round(self) -> dict[str, Rates]:
        """Measure the plain disk and both readers once, `DirectIo` also without checksums.

        Returns:
          Rates by name: PLAIN, DIRECT, UNCHECKED and TENSORSTORE.
        """
        all_settings = dict.fromkeys((self.settings, *_MORE_SETTINGS))
        plain = [self._plain(settings) for settings in all_settings]
        read = max(rates.read for rates in plain)
        write = max(rates.write for rates in plain)
        with DirectIo(self.settings) as direct, TensorstoreIo(self.settings) as tensorstore:
            return {
                PLAIN: Rates(read=read, write=write),
                DIRECT: self._records(direct),
                UNCHECKED: self._records(direct, checks=False),
                TENSORSTORE: self._records(tensorstore),
            }

    def records(self) -> Rates:
        """Write all records once, then read them, with checksums as in a step; return the rates."""
        with DirectIo(self.settings) as io:
            return self._records(io)

    def both(self) -> float:
        """Return the bytes per second of concurrent reads and writes, summed.

        Reads and writes have a pool of threads each, as in a step. The records must have been
        written before. One half of them is read while the other half is written, repeatedly, until
        as many bytes have moved as all records have; so both directions stay busy, whichever is
        faster.
        """
        half = self.store.num_layers // 2
        num_buffers = len(self._buffers) // 2  # per direction
        # Shared by both threads: its next() is atomic.
        remaining = iter(range(self.store.num_layers))
        self._drop_caches()

        def run(start: _Start, first_record: int, buffers: Sequence[np.ndarray]) -> None:
            pending: collections.deque[concurrent.futures.Future[float]] = collections.deque()
            for n, _ in enumerate(remaining):
                if len(pending) == num_buffers:
                    pending.popleft().result()
                buffer = buffers[n % num_buffers]
                pending.append(start(self.store, first_record + n % half, buffer))
            for future in pending:
                future.result()

        with (
            DirectIo(self.settings, name="reads") as reads,
            DirectIo(self.settings, name="writes") as writes,
            concurrent.futures.ThreadPoolExecutor(2) as pool,
        ):
            began = time.monotonic()
            jobs = [
                pool.submit(run, reads.read, 0, self._buffers[:num_buffers]),
                pool.submit(run, writes.write, half, self._buffers[num_buffers:]),
            ]
            for job in jobs:
                job.result()
            return self.store.num_bytes / (time.monotonic() - began)

    def _records(self, io: Reader, checks: bool = True) -> Rates:
        def run(start: _Start) -> float:
            began = time.monotonic()
            pending = collections.deque()
            for layer in range(self.store.num_layers):
                # At most one transfer per buffer: the oldest must end before its buffer is reused.
                if len(pending) == len(self._buffers):
                    pending.popleft().result()
                buffer = self._buffers[layer % len(self._buffers)]
                pending.append(start(self.store, layer, buffer))
            for future in pending:
                future.result()
            return self.store.num_bytes / (time.monotonic() - began)

        write = run(functools.partial(io.write, checksum=checks))
        self._drop_caches()
        return Rates(write=write, read=run(functools.partial(io.read, verify=checks)))

    def _plain(self, settings: IoSettings) -> Rates:
        write = self._run_plain(settings, writes=True)
        self._drop_caches()
        return Rates(write=write, read=self._run_plain(settings, writes=False))

    def _run_plain(self, settings: IoSettings, writes: bool) -> float:
        size = self.store.format.padded_bytes
        block = settings.block_bytes
        paths = [self.store.record_path(layer) for layer in range(self.store.num_layers)]
        files = [_open(path) for path in paths]
        # The threads share one iterator. Its next() is atomic under the GIL, so each block is
        # claimed exactly once.
        blocks = iter(list(itertools.product(range(len(files)), range(0, size, block))))
        transfer = os.pwritev if writes else os.preadv

        def work() -> None:
            for layer, start in blocks:
                memory = self._buffers[layer % len(self._buffers)][start : start + block]
                count = transfer(files[layer], [memory.data], start)
                if count != memory.nbytes:
                    path = paths[layer]
                    raise SwapError(f"{path}: {count} of {memory.nbytes} bytes moved", file=path)

        try:
            with concurrent.futures.ThreadPoolExecutor(settings.num_threads) as pool:
                began = time.monotonic()
                for job in [pool.submit(work) for _ in range(settings.num_threads)]:
                    job.result()
                return self.store.num_bytes / (time.monotonic() - began)
        finally:
            for fd in files:
                os.close(fd)

    def _drop_caches(self) -> None:
        drop_caches([self.store.record_path(layer) for layer in range(self.store.num_layers)])

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers:
            self._ring.give(buffer)
        self._buffers = []
        self._ring.close()

    def __enter__(self) -> "Bench":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the buffers."""
        self.close()


def _open(path: str) -> int:
    try:
        return open_regular(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file system without O_DIRECT: the page cache is its ceiling.
        return open_regular(path, os.O_RDWR)


def drop_caches(paths: Sequence[str]) -> None:
    """Flush files to disk, and drop their pages from the page cache."""
    for path in paths:
        fd = open_regular(path, os.O_RDONLY)
        try:
            # Dirty pages are not dropped: write them back first.
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
