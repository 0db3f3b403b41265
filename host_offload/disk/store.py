"""Records on disk, in zarr format: one file per layer, which holds the layer's leaves.

A store is a zarr array `uint8[num_layers, padded_bytes]`, uncompressed, in chunks of one layer. So
a chunk is a file with exactly the record's bytes, which can be read by any tensorstore or zarr
client, and with O_DIRECT:

    {folder}/{kind}/{rank}/zarr.json     shape, chunks and, as attributes, the manifest: name,
                                         shape, dtype and offset of each leaf
    {folder}/{kind}/{rank}/c.{layer}.0   leaf 0 | pad to 64 bytes | leaf 1 | ... | pad to 4096 bytes

Checksums of records are kept in memory, not on disk: a swap folder does not outlive its process, so
no stale record can pass its own check.
"""

import contextlib
import dataclasses
import errno
import os
import stat
import threading
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from host_offload.disk.checksum import compute_checksum
from host_offload.disk.errors import ChecksumError, SwapError, explain, of_tensorstore
from host_offload.disk.record_format import RecordFormat
from host_offload.disk.regular_file import check_regular, open_regular


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file that holds one record, outside of a store.

    Attributes:
      path: path of the file.
      checksum: checksum of the record; 0 if unknown.
    """

    path: str
    checksum: int


class Store:
    """The records of one kind on one device.

    Attributes:
      path: folder of the zarr array.
      kind: name of the kind, such as "params", "grads", "opt_state" or "activations".
      rank: position of the device in the mesh.
      num_layers: number of records.
      format: format of a record.
      written_once: whether a state's records are never changed once written; only another state
        writes them again.
      checksums: uint64[num_layers], checksum of each record as last written; 0 if unknown.
      written: bool[num_layers], whether each record was written completely.
    """

    def __init__(
        self,
        folder_path: str,
        kind: str,
        rank: int,
        num_layers: int,
        format: RecordFormat,
        metadata: Mapping[str, Any] | None = None,
        *,
        written_once: bool = False,
    ) -> None:
        """Create the array, without records.

        Args:
          folder_path: path of a `SwapFolder`.
          kind: name of the kind, and of its folder.
          rank: position of the device in the mesh.
          num_layers: number of records.
          format: format of each record.
          metadata: values to store in the attributes unchanged (specs, mesh); JSON must be able to
            hold them.
          written_once: whether a state's records are never changed once written, such as frozen
            weights. Linking them then takes no space.

        Raises:
          ValueError: `kind` is not the name of a folder, `rank` is negative, or `num_layers` < 1.
          SwapError: the array exists, or cannot be created.
        """
        is_name = kind and kind == os.path.basename(kind) and kind not in (".", "..")
        if not is_name or rank < 0 or num_layers < 1:
            raise ValueError(
                f"kind={kind!r}, rank={rank}, num_layers={num_layers}: a folder's name, 0 or more "
                "and 1 or more are needed"
            )
        self.kind = kind
        self.rank = rank
        self.num_layers = num_layers
        self.format = format
        self.written_once = written_once
        self.path = os.path.join(folder_path, kind, str(rank))
        self.checksums = np.zeros(num_layers, np.uint64)
        self.written = np.zeros(num_layers, bool)
        self._metadata = dict(metadata or {})
        self._linking = threading.Lock()  # protects the three attributes below
        # Records with a second name, under which their files must not be changed.
        self._linked: set[int] = set()
        self._offered: dict[int, int] = {}  # records that `adopt` will replace -> their checksums
        # Records whose spare files `reserve_spares` created for the next state.
        self._reserved: list[int] = []
        self._create_array(folder_path)

    def _create_array(self, folder_path: str) -> None:
        doing = f"creating the records of {self.kind}"
        if not os.path.isdir(folder_path):  # tensorstore would create it readable by everybody
            raise explain(FileNotFoundError(errno.ENOENT, ""), doing=doing, file=folder_path)
        try:
            ts.open(self._spec(), create=True, open=False).result()
        except (ValueError, NotImplementedError) as error:
            raise explain(of_tensorstore(error), doing=doing, file=self.path) from error

    @property
    def num_bytes(self) -> int:
        """Bytes on disk once every record is written, padding included."""
        return self.num_layers * self.format.padded_bytes

    def record_path(self, layer: int) -> str:
        """Return the path of a layer's record.

        Raises:
          ValueError: the layer does not exist.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(
                f"layer {layer} of {self.kind}: there are {self.num_layers}, counted from 0"
            )
        return os.path.join(self.path, f"c.{layer}.0")

    def manifest(self) -> dict[str, Any]:
        """Return the zarr array's attributes: kind, rank, leaves and metadata."""
        leaves = [
            {
                "name": leaf.name,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "offset": offset,
                "num_bytes": leaf.num_bytes,
            }
            for leaf, offset in self.format.leaves_with_offsets()
        ]
        return {"kind": self.kind, "rank": self.rank, "leaves": leaves, "metadata": self._metadata}

    def open_array(self, context: Mapping[str, Any] | None = None) -> ts.TensorStore:
        """Open the array `uint8[num_layers, padded_bytes]` without a cache.

        Reads always return the data on disk. Reading a missing record is an error, and a record of
        zeros is a file like any other.

        Args:
          context: additional tensorstore resources, such as {"file_io_concurrency": {"limit": 4}}.

        Raises:
          SwapError: the array was removed, or was replaced by a different one.
        """
        doing = f"opening the records of {self.kind}"
        description = os.path.join(self.path, "zarr.json")
        try:
            check_regular(description)  # tensorstore would wait forever on a FIFO
        except OSError as error:
            raise explain(error, doing=doing, file=description) from error
        try:
            return ts.open(self._spec(context), open=True).result()
        except (ValueError, NotImplementedError) as error:
            raise explain(of_tensorstore(error), doing=doing, file=self.path) from error

    def preallocate(self) -> None:
        """Reserve disk space for every record, so that no write runs out of space during a step.

        Written records are not changed, and offered records need no space. If the file system
        cannot reserve space, only the free space is checked.

        Raises:
          SwapError: the disk is too small, or failed.
        """
        paths = {
            layer: self.record_path(layer)
            for layer in range(self.num_layers)
            if layer not in self._offered
        }
        try:
            missing = self._missing_bytes(paths.values())
        except OSError as error:
            doing = f"looking for room for {self.kind}"
            raise explain(error, doing=doing, file=self.path) from error
        if missing > 0:
            raise self._too_small(missing)
        for layer, path in paths.items():
            try:
                self._reserve_file(path)
            except OSError as error:
                # ENOSPC can also mean that the file system has no inodes left: report missing bytes
                # only if bytes are missing.
                with contextlib.suppress(OSError):  # the first error is reported
                    if error.errno == errno.ENOSPC:
                        missing = self._missing_bytes(paths.values())
                        if missing > 0:
                            raise self._too_small(missing, path, layer) from error
                doing = f"reserving {self.format.padded_bytes} bytes for {self.kind}"
                raise explain(error, doing=doing, file=path, layer=layer) from error

    def _reserve_file(self, path: str) -> None:
        """Reserve the space of a record in a file, which is created if it is missing."""
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT)
        try:
            reserve(fd, self.format.padded_bytes)
        finally:
            os.close(fd)

    def _missing_bytes(self, paths: Collection[str]) -> int:
        needed = len(paths) * self.format.padded_bytes
        allocated = sum(_allocated_bytes(path) for path in paths)
        return needed - allocated - _free_bytes(self.path)

    def link(self, layer: int, target: str) -> None:
        """Give a record a second name, under which it is never changed.

        The next write of the record uses another file (the spare file). Its space is reserved here,
        so that the write cannot run out of space. Records that are written once need no spare file
        yet: `reserve_spares` reserves it before another state is written.

        Args:
          layer: index of the record, with no write in flight.
          target: path of the second name, on the same file system.

        Raises:
          OSError: the file system is full, or cannot link.
        """
        path = self.record_path(layer)
        spare = self._spare_path(layer)
        with self._linking:
            if layer in self._linked:
                os.link(path, target)
                return
            try:
                # Reserve space before linking: if the disk is full, the record must not be left
                # linked without a spare file.
                if not self.written_once:
                    self._make_spare(layer)
                os.link(path, target)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(spare)
                raise
            self._linked.add(layer)

    def reserve_spares(self) -> None:
        """Reserve space for another state's records if snapshots or checkpoints hold the last ones.

        This is for records that are written once. An offered record needs no space.

        Raises:
          SwapError: the disk is full, or failed; nothing is reserved.
        """
        with self._linking:
            for layer in sorted(self._linked - self._offered.keys()):
                try:
                    if self._needs_spare(layer):
                        self._make_spare(layer)
                        self._reserved.append(layer)
                except OSError as error:
                    self._remove_reserved()
                    doing = (
                        f"reserving {self.format.padded_bytes} bytes for {self.kind}, in addition "
                        "to a record that checkpoints hold"
                    )
                    raise explain(error, doing=doing, file=self.path, layer=layer) from error

    def offer(self, layer: int, file: RecordFile) -> bool:
        """Offer an existing file as a record; `adopt` puts it in the record's place, uncopied.

        The file is linked next to the record now, so that its space is certain. It is never written
        through this store's names: the next write of the record uses another file.

        Args:
          layer: index of the record.
          file: file with the record's future content, which must never be written again.

        Returns:
          Whether the file was accepted. It is refused if it is on another file system, cannot be
          linked, or is not a regular file of the record's size. It is also refused if the store's
          records are written more than once, because each write would need another file.
        """
        if not self.written_once:
            return False
        offered = self._offered_path(layer)
        with self._linking:
            try:
                os.link(file.path, offered)
                status = os.lstat(offered)
            except OSError:
                return False
            if not stat.S_ISREG(status.st_mode) or status.st_size != self.format.padded_bytes:
                os.unlink(offered)
                return False
            self._offered[layer] = file.checksum
        return True

    def adopt(self) -> set[int]:
        """Put the offered files in the place of their records, and return the records' indices.

        Raises:
          SwapError: a file could not be renamed; its record is unchanged.
        """
        adopted = set(self._offered)
        with self._linking:
            for layer in sorted(adopted):
                offered = self._offered_path(layer)
                path = self.record_path(layer)
                try:
                    os.replace(offered, path)
                except OSError as error:
                    raise explain(
                        error, doing=f"linking {self.kind}", file=path, layer=layer
                    ) from error
                for unused in (offered, self._spare_path(layer)):
                    # A rename between two names of one file leaves both names. A spare file may be
                    # left from the last state.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(unused)
                self._linked.add(layer)
                self.end_write(layer, self._offered.pop(layer))
            self._reserved = []  # the reserved files now belong to the new state
        return adopted

    def give_back(self) -> None:
        """Undo each `offer` and `reserve_spares` since the last `adopt`, and free their space.

        Call this if no new state is created after all.
        """
        with self._linking:
            self._remove_reserved()
            for layer in self._offered:
                with contextlib.suppress(OSError):
                    os.unlink(self._offered_path(layer))
            self._offered.clear()

    def _remove_reserved(self) -> None:
        for layer in self._reserved:
            with contextlib.suppress(OSError):
                os.unlink(self._spare_path(layer))
        self._reserved = []

    def _offered_path(self, layer: int) -> str:
        return os.path.join(self.path, f"offered.{layer}")

    def unlink(self, layer: int, target: str) -> None:
        """Remove the second name of a record.

        If the record was not written since, and has no further name, its file can be written in
        place again.

        Args:
          layer: index of the record.
          target: path of the second name.

        Raises:
          OSError: the name cannot be removed.
        """
        os.unlink(target)
        with self._linking, contextlib.suppress(OSError):
            # If a single name is left, no other snapshot holds the record. If the record is still
            # in `_linked`, no write has moved it to the spare file.
            if layer in self._linked and os.stat(self.record_path(layer)).st_nlink == 1:
                self._linked.discard(layer)
                os.unlink(self._spare_path(layer))

    def _needs_spare(self, layer: int) -> bool:
        """Return whether a linked record has another name but no spare file."""
        if not self.written_once or os.path.exists(self._spare_path(layer)):
            return False
        return os.stat(self.record_path(layer)).st_nlink > 1

    def _make_spare(self, layer: int) -> None:
        """Create a record's spare file with reserved space; on an error leave no file."""
        path = self._spare_path(layer)
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT)
        try:
            reserve(fd, self.format.padded_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def _spare_path(self, layer: int) -> str:
        return os.path.join(self.path, f"spare.{layer}")

    def begin_write(self, layer: int) -> None:
        """Mark a record as not written until `end_write`, so that no partial record is read.

        Raises:
          OSError: a spare file is needed, and cannot be created or renamed.
        """
        self.written[layer] = False
        self.checksums[layer] = 0
        with self._linking:
            if layer in self._linked:
                # A snapshot holds the old file under its second name. The spare file takes the
                # record's name, and is written.
                if self._needs_spare(layer):
                    self._make_spare(layer)
                # A write-once record whose other names are gone has no spare file, and is written
                # in place.
                if not self.written_once or os.path.exists(self._spare_path(layer)):
                    os.replace(self._spare_path(layer), self.record_path(layer))
                self._linked.discard(layer)

    def end_write(self, layer: int, checksum: int = 0) -> None:
        """Mark a record as written completely.

        Args:
          layer: index of the record.
          checksum: checksum of the record; 0 if unknown.
        """
        self.checksums[layer] = checksum
        self.written[layer] = True

    def require(self, layer: int) -> None:
        """Check that a record was written completely.

        Raises:
          SwapError: the record was never written, or its last write failed.
        """
        if not self.written[layer]:
            path = self.record_path(layer)
            raise SwapError(
                f"{self.kind} of layer {layer}, {path}, was never written completely",
                file=path,
                layer=layer,
            )

    def verify(self, layer: int, record: np.ndarray) -> None:
        """Compare a record with its checksum, if the checksum is known.

        Args:
          layer: index of the record.
          record: uint8[padded_bytes], the record as read.

        Raises:
          ChecksumError: the record differs from what was written.
        """
        expected = int(self.checksums[layer])
        if not expected:
            return
        checksum = compute_checksum(record)
        if checksum != expected:
            raise ChecksumError(f"its checksum is {checksum:016x}, and {expected:016x} was written")

    def _too_small(
        self, missing: int, file: str | None = None, layer: int | None = None
    ) -> SwapError:
        return SwapError(
            f"{self.kind} of rank {self.rank} takes {self.num_layers} records x "
            f"{self.format.padded_bytes} bytes = {self.num_bytes} bytes, and {self.path} has "
            f"{missing} bytes too few: ENOSPC ({errno.ENOSPC}); free space on that file system, "
            "set swap_dir to a folder of a larger disk, or use more devices",
            file=file or self.path,
            layer=layer,
            errno=errno.ENOSPC,
        )

    def _spec(self, context: Mapping[str, Any] | None = None) -> dict[str, Any]:
        size = self.format.padded_bytes
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": self.path + "/"},
            "metadata": {
                "shape": [self.num_layers, size],
                "data_type": "uint8",
                "fill_value": 0,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, size]}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "codecs": [{"name": "bytes"}],
                "attributes": self.manifest(),
            },
            "store_data_equal_to_fill_value": True,  # else a record of zeros would have no file
            "fill_missing_data_reads": False,  # else a removed record would read as zeros
            "recheck_cached_data": True,
            "context": {"cache_pool": {"total_bytes_limit": 0}, **(context or {})},
        }


def _allocated_bytes(path: str) -> int:
    try:
        # Not st_size, which includes holes. st_blocks is in units of 512 bytes everywhere.
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _free_bytes(path: str) -> int:
    space = os.statvfs(path)
    # f_bavail, not f_bfree: part of the free space is reserved for root.
    return space.f_bavail * space.f_frsize


def reserve(fd: int, size: int) -> None:
    """Reserve disk space for a file; if the file system cannot, only set the file's size.

    Args:
      fd: descriptor of the file, open for writing.
      size: bytes to reserve.

    Raises:
      OSError: the disk is full, or failed.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
            return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    # The file has its size, but its space is only allocated by the first write.
    os.ftruncate(fd, max(size, os.fstat(fd).st_size))
