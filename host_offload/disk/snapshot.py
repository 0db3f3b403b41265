"""The records of stores as they are at one moment, kept while the stores go on to be written.

A record gets a second name in a folder beside its store (a hard link: no byte is copied), and the
  next write of it goes to a
file of its own, whose space is reserved when the link is made (`Store.link`). The file with the
second name is never written again, so it can be moved away later: by a link once more, where the
checkpoint is on the same file system, else by a copy.

Either way it is read past the page cache, one record at a time, and compared with its checksum. A
record that rotted on the disk since it was written must not be confirmed as saved: older
checkpoints are removed for it.

Where a file system cannot link, or has no room for a second record, records are copied at once, and
the step waits.
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

import numpy as np

from host_offload.device import allocate
from host_offload.disk.checksum import checksum_of
from host_offload.disk.direct_file import read_file, write_file
from host_offload.disk.errors import ChecksumError, TruncatedError
from host_offload.disk.store import Store

logger = logging.getLogger(__name__)
_DESCRIPTION = "zarr.json"
_UNSYNCED: set[int] = set()
"""File systems that a warning has named, by their devices."""
_ROTTEN = "it changed on the disk since it was written: check the disk (dmesg, smartctl), and restore the last checkpoint"


@dataclasses.dataclass(frozen=True)
class LinkedRecord:
    """One store at the moment of a snapshot.

    Attributes:
      store: whose records they are; it may hold others by now.
      checksums: of each record; 0 where unknown.
      folder: of the second names, or None if the records were copied at once.
    """

    store: Store
    checksums: tuple[int, ...]
    folder: str | None


class Snapshot:
    """The kept records of some stores; `close` removes their second names."""

    def __init__(self, folder: str) -> None:
        """Use a folder that is not there yet, on the stores' file system."""
        self._folder = folder
        self._kept: list[LinkedRecord] = []
        self._closed, self._is_removed = threading.Event(), False
        os.mkdir(folder, 0o700)

    def keep(self, store: Store, target: str) -> LinkedRecord:
        """Keep the records of a store, no write of which is under way; where that needs a copy,
        make it now.

        Args:
          store: of the records.
          target: folder for `move`, not there yet.

        Raises:
          SwapError: a record was never written.
          OSError: they can neither be linked nor copied.
        """
        for record in range(store.num_layers):
            store.require(record)
        sums = tuple(int(c) for c in store.checksums)
        folder = os.path.join(self._folder, f"{store.kind}-{store.rank}")
        os.mkdir(folder, 0o700)
        links = []
        try:
            for record in range(store.num_layers):
                store.link(record, path := os.path.join(folder, str(record)))
                links.append((record, path))
        except OSError:
            # Undo the links that were made: the next write of a linked record would go to its spare
            # file.
            for record, path in links:
                store.unlink(record, path)
            os.rmdir(folder)
            result = LinkedRecord(store, sums, None)
            _make(store, target)
            _copy(
                [
                    (store.record_path(r), os.path.join(target, f"c.{r}.0"), sums[r])
                    for r in range(store.num_layers)
                ],
                store,
            )
            return result
        result = LinkedRecord(store, sums, folder)
        self._kept.append(result)
        return result

    def move(self, kept: LinkedRecord, target: str) -> None:
        """Put kept records into a folder, by links or copies, all on disk and compared with their
        checksums on return.

        Raises:
          OSError: they cannot be read or written, or a record is not what was written.
        """
        if kept.folder is None:
            return
        _make(kept.store, target)
        size, copies = kept.store.format.padded_bytes, []
        buffer = allocate(size)
        for record in range(kept.store.num_layers):
            source, wanted = (
                os.path.join(kept.folder, str(record)),
                os.path.join(target, f"c.{record}.0"),
            )
            try:
                os.link(source, wanted)
            except OSError:
                # A link cannot cross file systems (EXDEV), and some file systems have none.
                copies.append((source, wanted, kept.checksums[record]))
                continue
            # O_DIRECT goes past the page cache, but not past the cache of the drive: only fsync
            # makes a checkpoint durable.
            sync(wanted)
            _read_checked(
                wanted, buffer, size, kept.checksums[record], kept.store.record_path(record)
            )
        _copy(copies, kept.store)

    def close(self) -> None:
        """Remove the second names; once closed, remove what could not be removed then."""
        kept, self._kept = self._kept, []
        try:
            for each in kept:
                if each.folder is not None:
                    for record in range(each.store.num_layers):
                        with contextlib.suppress(OSError):
                            each.store.unlink(record, os.path.join(each.folder, str(record)))
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._folder)
            self._is_removed = True
        except OSError as error:
            # Their space is taken until the folder of the swap goes, or the next snapshot removes
            # them.
            logger.info("%s was not removed: %s", self._folder, error)
        finally:
            self._closed.set()

    @property
    def is_removed(self) -> bool:
        """Whether nothing of it is left on disk."""
        return self._is_removed

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def wait(self) -> None:
        """Wait until the snapshot is closed.

        Only then may the stores' folder or records be removed.
        """
        self._closed.wait()


def _make(store: Store, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    shutil.copyfile(os.path.join(store.path, _DESCRIPTION), os.path.join(target, _DESCRIPTION))


def _copy(files: Sequence[tuple[str, str, int]], store: Store) -> None:
    """Copy records (source, target, checksum), one after the other."""
    if not files:
        return
    size = store.format.padded_bytes
    buffer = allocate(size)
    for source, target, expected in files:
        _read_checked(source, buffer, size, expected, source)
        write_file(target, buffer, size)
        sync(target)


def _read_checked(path: str, buffer: np.ndarray, size: int, expected: int, name: str) -> None:
    """Read a record, and compare it with its size and checksum; `name` is the file in which it was
    written.

    Raises:
      OSError: it cannot be read, or is not what was written.
    """
    if (found := os.stat(path).st_size) != size:
        raise TruncatedError(f"{name} has {found} bytes, and the record {size}: {_ROTTEN}")
    read_file(path, buffer, size)
    if expected and (found := checksum_of(buffer[:size])) != expected:
        raise ChecksumError(
            f"{name}: its checksum is {found:016x}, and {expected:016x} was written: {_ROTTEN}"
        )


def sync(path: str) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk.

    Some file systems refuse to flush a folder. Then a warning says so, once, and it is left to the
    file system.

    Raises:
      OSError: they cannot be written.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            os.fsync(fd)
        except OSError as error:
            status = os.fstat(fd)
            if error.errno not in (
                errno.EINVAL,
                errno.ENOSYS,
                errno.EOPNOTSUPP,
            ) or not stat.S_ISDIR(status.st_mode):
                raise
            if status.st_dev not in _UNSYNCED:
                _UNSYNCED.add(status.st_dev)
                logger.warning(
                    "%s: its file system does not flush folders (fsync: %s), so what was saved last may not be there after a "
                    "power failure: save to another file system if that matters",
                    path,
                    error.strerror,
                )
    finally:
        os.close(fd)
