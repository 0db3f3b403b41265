"""The records of a checkpoint: their metadata, and their bytes, read slice by slice.

A store of a checkpoint is a `host_offload.disk.Store`: a zarr array with one file per record as its
chunks. It holds one device's shards of some leaves, for a range of layers (or tiles), or a single
record for unstacked leaves. In addition to the array, metadata give the position of each shard in
the unsharded leaf, so any box of a leaf can be found among the stores:

    unsharded leaf  [L, D, F]
    store           layers first .. first + n, the shard [start : start + shape] of each layer
    box             (l0:l1, d0:d1, f0:f1): for each store and record that overlaps the box, the
                    common part is copied

Only the part of a file that overlaps the box is read (`host_offload.disk.file_reads`). Checksums
are computed by `host_offload.disk.checksum`.
"""

import collections
import dataclasses
import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.disk.checksum import checksum_of_blocks
from host_offload.disk.errors import ChecksumError, TruncatedError
from host_offload.disk.file_reads import Box, ReadFile
from host_offload.disk.record_format import LeafFormat, RecordFormat, described_array, numpy_dtype
from host_offload.disk.store import Store
from host_offload.fields import Field, FieldError

MOST_OPEN = 64
"""Number of files that stay open to be read again."""
_CHECKSUM = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class SavedShard:
    """One leaf of a store's records.

    Attributes:
      name: name of the leaf in the checkpoint.
      shape: shape of the shard in a record.
      dtype: name of a numpy or ml_dtypes dtype.
      offset: offset of the shard's first byte in the record.
      start: index of the shard's first element in the leaf, without the leading dims that number
        the records.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    start: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SavedStore:
    """Metadata of the records that one device saved for some leaves.

    Attributes:
      folder: folder of the zarr array, relative to the checkpoint.
      lead: sizes of the leaves' leading dims, which number the records in row-major order: () for
        a single record, (L,), or (L, T).
      first: number of the first record.
      num_records: number of records.
      record_bytes: bytes of each record's file.
      leaves: leaves of a record.
      checksums: checksum of each record; 0 if unknown.
    """

    folder: str
    lead: tuple[int, ...]
    first: int
    num_records: int
    record_bytes: int
    leaves: tuple[SavedShard, ...]
    checksums: tuple[int, ...]

    @staticmethod
    def of(
        store: Store,
        folder: str,
        names: Sequence[str],
        starts: Sequence[Sequence[int]],
        lead: Sequence[int],
        first: int = 0,
    ) -> "SavedStore":
        """Return the metadata of a store whose records are all written.

        Args:
          store: the store.
          folder: folder of the zarr array, relative to the checkpoint.
          names: name of each leaf in the checkpoint.
          starts: for each leaf, index of the shard's first element, without the leading dims.
          lead: sizes of the leading dims, which number the records.
          first: number of the first record.
        """
        sums = tuple(int(c) for c in store.checksums)
        return SavedStore.of_format(store.format, folder, names, starts, lead, first, sums)

    @staticmethod
    def of_format(
        format: RecordFormat,
        folder: str,
        names: Sequence[str],
        starts: Sequence[Sequence[int]],
        lead: Sequence[int],
        first: int,
        checksums: Sequence[int],
    ) -> "SavedStore":
        """Return the metadata of records of a format, one record per checksum.

        Args:
          format: format of the records.
          folder: folder of the zarr array, relative to the checkpoint.
          names: name of each leaf in the checkpoint.
          starts: for each leaf, index of the shard's first element, without the leading dims.
          lead: sizes of the leading dims, which number the records.
          first: number of the first record.
          checksums: checksum of each record; 0 if unknown.
        """
        places = zip(names, starts, strict=True)
        leaves = list[SavedShard]()
        for (leaf, offset), (name, start) in zip(format.leaves_with_offsets(), places, strict=True):
            leaves.append(SavedShard(name, leaf.shape, leaf.dtype, offset, tuple(start)))
        return SavedStore(
            folder=folder,
            lead=tuple(lead),
            first=first,
            num_records=len(checksums),
            record_bytes=format.padded_bytes,
            leaves=tuple(leaves),
            checksums=tuple(checksums),
        )

    def record_file(self, record: int) -> str:
        """Return the path of a record's file, relative to the checkpoint.

        Args:
          record: index of the record in this store; 0 is the record with number `first`.
        """
        return os.path.join(self.folder, f"c.{record}.0")

    def content(self, record: int) -> tuple[object, ...]:
        """Return a key for a record's content: which part of which leaves, and where in the file.

        Records with equal keys have files with the same layout of the same parts.

        Args:
          record: index of the record in this store.
        """
        return self.leaves, self.lead, self.first + record, self.record_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the metadata in a form that JSON can hold; checksums are hexadecimal digits."""
        metadata = dataclasses.asdict(self)
        return metadata | {"checksums": [f"{c:016x}" for c in self.checksums]}

    @staticmethod
    def from_json(metadata: Field) -> "SavedStore":
        """Return the metadata that `to_json` described.

        Args:
          metadata: result of `to_json`, read back from a description.

        Raises:
          FieldError: a field is missing, has a wrong type, or contradicts the other fields.
        """
        lead = metadata["lead"].integers(least=1)
        metadata["lead"].num_bytes(1)
        total = math.prod(lead)
        first = metadata["first"].integer(most=total - 1)
        num_records = metadata["num_records"].integer(least=1, most=total - first)
        record_bytes = metadata["record_bytes"].integer(least=1)
        checksums = metadata["checksums"].items()
        if len(checksums) != num_records:
            raise FieldError(
                f"{metadata.name}.checksums are {len(checksums)}, and num_records is {num_records}"
            )
        return SavedStore(
            folder=metadata["folder"].inner_path(),
            lead=lead,
            first=first,
            num_records=num_records,
            record_bytes=record_bytes,
            leaves=tuple(_shard(leaf, record_bytes) for leaf in metadata["leaves"].items()),
            checksums=tuple(_checksum(checksum) for checksum in checksums),
        )


def _shard(metadata: Field, record_bytes: int) -> SavedShard:
    shape, dtype, num_bytes = described_array(metadata)
    start = metadata["start"].integers()
    if len(start) != len(shape):
        metadata["start"].refuse(f"one integer for each of {len(shape)} dims")
    if num_bytes > record_bytes:
        metadata["shape"].refuse(f"a shard of {dtype} in a record of {record_bytes} bytes")
    offset = metadata["offset"].integer(most=record_bytes - num_bytes)
    return SavedShard(metadata["name"].text(), shape, dtype, offset, start)


def _checksum(digits: Field) -> int:
    if not _CHECKSUM.fullmatch(digits.text()):
        digits.refuse("16 hexadecimal digits")
    return int(digits.value, 16)


def build_format(leaves: Sequence[tuple[str, Sequence[int], Any]]) -> RecordFormat:
    """Return the format of records that hold the given leaves.

    Args:
      leaves: (name, shape, dtype) of each leaf.
    """
    return RecordFormat(
        tuple(LeafFormat(name, tuple(shape), np.dtype(dtype).name) for name, shape, dtype in leaves)
    )


class SavedRecords:
    """The records of a checkpoint; a context manager. Several threads may read at the same time.

    Attributes:
      root: folder of the checkpoint.
      stores: stores of the checkpoint.
    """

    def __init__(self, root: str, stores: Sequence[SavedStore]) -> None:
        """Index the stores by leaf, without opening a file.

        Args:
          root: folder of the checkpoint, to which the folders of the stores are relative.
          stores: stores of the checkpoint.
        """
        self.root = root
        self.stores = tuple(stores)
        self._shards: dict[str, list[tuple[SavedStore, SavedShard]]] = collections.defaultdict(list)
        for store in stores:
            for leaf in store.leaves:
                self._shards[leaf.name].append((store, leaf))
        self._open: collections.OrderedDict[str, ReadFile] = collections.OrderedDict()
        self._lock = threading.Lock()

    def files(self) -> Iterator[tuple[SavedStore, int, str]]:
        """Yield (store, index of the record in the store, path) of every record."""
        for store in self.stores:
            for record in range(store.num_records):
                yield store, record, os.path.join(self.root, store.record_file(record))

    def check_size(self, store: SavedStore, record: int) -> None:
        """Check that the size of a record's file matches the metadata.

        Args:
          store: store of the record.
          record: index of the record in the store.

        Raises:
          OSError: the file does not exist or cannot be looked up.
          TruncatedError: the file has another size.
        """
        path = os.path.join(self.root, store.record_file(record))
        num_bytes = os.stat(path).st_size
        if num_bytes != store.record_bytes:
            raise TruncatedError(
                f"{path} has {num_bytes} bytes, and the record {store.record_bytes}"
            )

    def check(self, store: SavedStore, record: int) -> None:
        """Check that the size and the checksum of a record's file match the metadata.

        Args:
          store: store of the record.
          record: index of the record in the store.

        Raises:
          OSError: the file cannot be read.
          TruncatedError: the file has another size.
          ChecksumError: the file has another checksum.
        """
        self.check_size(store, record)
        expected = store.checksums[record]
        blocks = self._read_file(store, record).blocks(store.record_bytes)
        if expected and (checksum := checksum_of_blocks(blocks)) != expected:
            path = os.path.join(self.root, store.record_file(record))
            raise ChecksumError(
                f"{path}: its checksum is {checksum:016x}, and {expected:016x} was saved"
            )

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of a leaf, cast to the dtype of `out`.

        Args:
          name: name of the leaf in the checkpoint.
          box: (start, stop) in each dim of the unsharded leaf.
          out: array of the box's shape.

        Raises:
          KeyError: the leaf does not exist, or the stores do not hold the full box.
          OSError: a file cannot be read, or has not the size of its record.
        """
        missing = _count_elements(box)
        copied: set[Box] = set()
        for store, shard in self._shards[name]:
            for record in _records(store, box):
                extent = _find_extent(store, shard, record)
                common = tuple(
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(extent, box, strict=True)
                )
                if any(start >= stop for start, stop in common) or common in copied:
                    continue  # a replica holds the same
                copied.add(common)
                source = _shift(common, extent)
                target = tuple(slice(start, stop) for start, stop in _shift(common, box))
                shape = (1,) * len(store.lead) + shard.shape
                dtype = numpy_dtype(shard.dtype)
                file = self._read_file(store, record)
                file.read_box(shard.offset, shape, dtype, source, out[(*target, ...)])
                missing -= _count_elements(common)
                if not missing:
                    return
        if missing:
            raise KeyError(f"{name}: {missing} elements of {box} are in no record")

    def _read_file(self, store: SavedStore, record: int) -> ReadFile:
        """Return the open file of a record."""
        name = store.record_file(record)
        with self._lock:
            if (file := self._open.get(name)) is not None:
                self._open.move_to_end(name)
                return file
        self.check_size(store, record)
        file = ReadFile(os.path.join(self.root, name))
        with self._lock:
            # Two threads may have opened the same file: the later one is kept. A file is closed
            # when its last reader drops it.
            self._open[name] = file
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return file

    def close(self) -> None:
        """Drop the open files; each is closed when its last reader drops it."""
        with self._lock:
            self._open.clear()

    def __enter__(self) -> "SavedRecords":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the open files."""
        self.close()


def _count_elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _shift(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of another one."""
    return tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def _find_extent(store: SavedStore, shard: SavedShard, record: int) -> Box:
    """Return the part of a leaf that a record holds.

    It has one index in each dim that numbers records, then the extent of the shard.
    """
    index = np.unravel_index(store.first + record, store.lead) if store.lead else ()
    numbers = tuple((int(i), int(i) + 1) for i in index)
    extent = tuple(
        (start, start + size) for start, size in zip(shard.start, shard.shape, strict=True)
    )
    return numbers + extent


def _records(store: SavedStore, box: Box) -> Iterator[int]:
    """Yield the records of a store that may overlap a box, by their indices in the store."""
    if not store.lead:
        yield 0
        return
    # Go through all layers (or tiles) in the box, and keep the ones that this store holds.
    lead_box = box[: len(store.lead)]
    for offsets in np.ndindex(*(stop - start for start, stop in lead_box)):
        index = [start + n for n, (start, _) in zip(offsets, lead_box, strict=True)]
        number = int(np.ravel_multi_index(index, store.lead)) - store.first
        if 0 <= number < store.num_records:
            yield number
