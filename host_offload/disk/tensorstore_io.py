"""Move records between disk and buffers with tensorstore, the library of the file format.

The files are the same as those of `direct_io`. tensorstore is slower (a read is copied once; a
write uses the page cache and is flushed), but it needs nothing special from the file system, and a
write is atomic: another file is written, flushed and renamed, so the disk must have room for one
more record.

tensorstore opens files itself, and would wait forever on a FIFO in a file's place. So the types of
the files are checked before it opens them. A FIFO put there between the check and the opening still
blocks the transfer, but only this user can do that, because the folder is private.
"""

import concurrent.futures
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

from host_offload.disk.checksum import compute_checksum
from host_offload.disk.errors import explain, of_tensorstore
from host_offload.disk.record_format import check_buffer
from host_offload.disk.regular_file import check_regular
from host_offload.disk.store import Store
from host_offload.disk.tuning import IoSettings


class TensorstoreIo:
    """Reads and writes records of any store, like `direct_io.DirectIo`; a context manager.

    Attributes:
      settings: number of concurrent transfers; the block size is not used.
    """

    def __init__(self, settings: IoSettings) -> None:
        """Start the thread pool.

        Args:
          settings: number of concurrent transfers. The block size is not used: tensorstore moves a
            record as one block.
        """
        self.settings = settings
        self._pool = concurrent.futures.ThreadPoolExecutor(
            settings.num_threads, thread_name_prefix="zerojax-tensorstore"
        )
        self._arrays: weakref.WeakKeyDictionary[Store, ts.TensorStore] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def read(
        self, store: Store, layer: int, buffer: np.ndarray, *, verify: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to read a record; arguments, result and errors are as for `DirectIo.read`."""
        record = _cut_record(store, layer, buffer)
        if not buffer.flags.writeable:
            raise ValueError("a record is read into a writable buffer, and this one is not")

        def read() -> None:
            if verify:
                store.require(layer)
            check_regular(store.record_path(layer))
            np.copyto(record, self._array(store)[layer].read().result())
            if verify:
                store.verify(layer, record)

        return self._pool.submit(
            _timed, read, store, layer, f"reading {store.kind} of rank {store.rank}"
        )

    def write(
        self, store: Store, layer: int, buffer: np.ndarray, *, checksum: bool = True
    ) -> concurrent.futures.Future[float]:
        """Start to write a record; arguments, result and errors are as for `DirectIo.write`."""
        record = _cut_record(store, layer, buffer)

        def write() -> None:
            store.begin_write(layer)
            if not os.path.isdir(store.path):  # tensorstore would create it readable by everybody
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store.path)
            check_regular(path := store.record_path(layer))
            check_regular(f"{path}.__lock")  # tensorstore creates, writes and renames this file
            self._array(store)[layer].write(record).result()
            store.end_write(layer, compute_checksum(record) if checksum else 0)

        return self._pool.submit(
            _timed, write, store, layer, f"writing {store.kind} of rank {store.rank}"
        )

    def _array(self, store: Store) -> ts.TensorStore:
        with self._lock:
            # Open each store's array once: opening reads and parses its metadata file.
            if store not in self._arrays:
                self._arrays[store] = store.open_array(
                    {"file_io_concurrency": {"limit": self.settings.num_threads}}
                )
            return self._arrays[store]

    def close(self) -> None:
        """Wait for all transfers and end the threads.

        Further calls do nothing, and neither does a call in a forked child, which has no threads.
        """
        if os.getpid() != self._process:
            return
        self._pool.shutdown(wait=True)
        self._arrays.clear()

    def __enter__(self) -> "TensorstoreIo":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all transfers and end the threads."""
        self.close()


def _cut_record(store: Store, layer: int, buffer: np.ndarray) -> np.ndarray:
    store.record_path(layer)  # raises for a layer that does not exist
    check_buffer(buffer, store.format.padded_bytes)
    return buffer[: store.format.padded_bytes]


def _timed(work: Callable[[], None], store: Store, layer: int, doing: str) -> float:
    start = time.monotonic()
    try:
        work()
    except BaseException as error:
        # tensorstore raises ValueError for almost any disk error: the errno is only in the text.
        cause: Any = (
            of_tensorstore(error) if isinstance(error, ValueError | NotImplementedError) else error
        )
        raise explain(cause, doing=doing, file=store.record_path(layer), layer=layer) from error
    return time.monotonic() - start
