"""Keep the records of stores as they are at one moment, while the stores are written further.

A record gets a second name in a folder next to its store, by a hard link, which copies no bytes.
The next write of the record uses another file, whose space is reserved when the link is made
(`Store.link`). The file with the second name is never written again, so it can be moved to the
checkpoint later: by another link if the checkpoint is on the same file system, else by a copy.

In both cases each record is read past the page cache, one record at a time, and compared with its
checksum. A record that was corrupted on the disk must not be confirmed as saved, because older
checkpoints are then removed.

If the file system cannot link, or has no room for a second record, the records are copied
immediately, and the step waits.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import stat
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from host_offload.device import allocate
from host_offload.disk.checksum import compute_checksum
from host_offload.disk.direct_file import read_file, write_file
from host_offload.disk.errors import ChecksumError, TruncatedError
from host_offload.disk.store import Store

logger = logging.getLogger(__name__)
_DESCRIPTION = "zarr.json"
_UNSYNCED: set[int] = set()
"""Device numbers of the file systems for which `sync` has logged a warning."""
_ROTTEN = (
    "it changed on the disk since it was written: check the disk (dmesg, smartctl), and restore "
    "the last checkpoint"
)


@dataclasses.dataclass(frozen=True)
class LinkedRecord:
    """The records of one store at the moment of a snapshot.

    Attributes:
      store: store of the records; it may have been written since.
      checksums: checksum of each record; 0 if unknown.
      folder: folder of the second names; None if the records were copied immediately.
    """

    store: Store
    checksums: tuple[int, ...]
    folder: str | None


class Snapshot:
    """The kept records of some stores; `close` removes their second names."""

    def __init__(self, folder: str) -> None:
        """Create the folder of the second names.

        Args:
          folder: path of a folder on the stores' file system, which must not exist yet.
        """
        self._folder = folder
        self._kept: list[LinkedRecord] = []
        self._closed = threading.Event()
        self._is_removed = False
        os.mkdir(folder, 0o700)

    def keep(self, store: Store, target: str) -> LinkedRecord:
        """Keep the records of a store; if they cannot be linked, copy them to `target` now.

        Args:
          store: store of the records, with no write in flight.
          target: future folder of the records in the checkpoint, as for `move`.

        Raises:
          SwapError: a record was never written.
          OSError: the records can neither be linked nor copied.
        """
        for record in range(store.num_layers):
            store.require(record)
        checksums = tuple(int(checksum) for checksum in store.checksums)
        folder = os.path.join(self._folder, f"{store.kind}-{store.rank}")
        os.mkdir(folder, 0o700)
        linked = []
        try:
            for record in range(store.num_layers):
                path = os.path.join(folder, str(record))
                store.link(record, path)
                linked.append((record, path))
        except OSError:
            # Undo the links, or the next write of a linked record would use its spare file.
            for record, path in linked:
                store.unlink(record, path)
            os.rmdir(folder)
            _make(store, target)
            copies = [
                _FileCopy(store.record_path(n), os.path.join(target, f"c.{n}.0"), checksum)
                for n, checksum in enumerate(checksums)
            ]
            _copy(copies, store)
            return LinkedRecord(store, checksums, None)
        records = LinkedRecord(store, checksums, folder)
        self._kept.append(records)
        return records

    def move(self, kept: LinkedRecord, target: str) -> None:
        """Link or copy kept records to a folder.

        On return all records are flushed to disk and compared with their checksums. Records that
        `keep` copied are already there.

        Args:
          kept: result of `keep`.
          target: folder of the records in the checkpoint, created if missing.

        Raises:
          OSError: a record cannot be read or written, or differs from what was written.
        """
        if kept.folder is None:
            return
        _make(kept.store, target)
        size = kept.store.format.padded_bytes
        copies = []
        buffer = allocate(size)
        for record, checksum in enumerate(kept.checksums):
            source = os.path.join(kept.folder, str(record))
            saved = os.path.join(target, f"c.{record}.0")
            try:
                os.link(source, saved)
            except OSError:
                # A link cannot cross file systems (EXDEV), and some file systems have no links.
                copies.append(_FileCopy(source, saved, checksum))
                continue
            # O_DIRECT bypasses the page cache, but not the cache of the drive: only fsync makes a
            # checkpoint durable.
            sync(saved)
            _read_checked(saved, buffer, size, checksum, kept.store.record_path(record))
        _copy(copies, kept.store)

    def close(self) -> None:
        """Remove the second names; a further call retries names that could not be removed."""
        kept = self._kept
        self._kept = []
        try:
            for records in kept:
                _unlink_all(records)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._folder)
            self._is_removed = True
        except OSError as error:
            # They take up space until the swap folder is removed, or the next snapshot removes
            # them.
            logger.info("%s was not removed: %s", self._folder, error)
        finally:
            self._closed.set()

    @property
    def is_removed(self) -> bool:
        """Whether nothing of this snapshot is left on disk."""
        return self._is_removed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def wait(self) -> None:
        """Wait until the snapshot is closed.

        Only then may the stores' folder or records be removed.
        """
        self._closed.wait()


class _FileCopy(NamedTuple):
    """A record to copy from one file to another; its checksum is 0 if unknown."""

    source: str
    target: str
    checksum: int


def _unlink_all(records: LinkedRecord) -> None:
    """Remove the second names of a store's records as far as possible."""
    if records.folder is None:
        return
    for record in range(records.store.num_layers):
        with contextlib.suppress(OSError):
            records.store.unlink(record, os.path.join(records.folder, str(record)))


def _make(store: Store, target: str) -> None:
    """Create the folder of a store's records, with the description of the array."""
    os.makedirs(target, exist_ok=True)
    shutil.copyfile(os.path.join(store.path, _DESCRIPTION), os.path.join(target, _DESCRIPTION))


def _copy(files: Sequence[_FileCopy], store: Store) -> None:
    """Copy records, one after the other."""
    if not files:
        return
    size = store.format.padded_bytes
    buffer = allocate(size)
    for file in files:
        _read_checked(file.source, buffer, size, file.checksum, file.source)
        write_file(file.target, buffer, size)
        sync(file.target)


def _read_checked(path: str, buffer: np.ndarray, size: int, expected: int, name: str) -> None:
    """Read a record into `buffer`, and compare its size and its checksum.

    `name` is the file to which the record was written, for messages.

    Raises:
      OSError: the record cannot be read, or differs from what was written.
    """
    num_bytes = os.stat(path).st_size
    if num_bytes != size:
        raise TruncatedError(f"{name} has {num_bytes} bytes, and the record {size}: {_ROTTEN}")
    read_file(path, buffer, size)
    if not expected:
        return
    checksum = compute_checksum(buffer[:size])
    if checksum != expected:
        raise ChecksumError(
            f"{name}: its checksum is {checksum:016x}, and {expected:016x} was written: {_ROTTEN}"
        )


def sync(path: str) -> None:
    """Flush a file's bytes, or a folder's names, to disk.

    Some file systems refuse to flush a folder. This is logged once per file system, and the names
    are then written whenever the file system does so.

    Args:
      path: path of the file or folder.

    Raises:
      OSError: the bytes or names cannot be written.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            os.fsync(fd)
        except OSError as error:
            status = os.fstat(fd)
            is_unsupported = error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
            if not is_unsupported or not stat.S_ISDIR(status.st_mode):
                raise
            if status.st_dev not in _UNSYNCED:
                _UNSYNCED.add(status.st_dev)
                logger.warning(
                    "%s: its file system does not flush folders (fsync: %s), so the last save may "
                    "be missing after a power failure: save to another file system if that matters",
                    path,
                    error.strerror,
                )
    finally:
        os.close(fd)
