"""A saved state: the manifests that describe it, and the records that hold its bytes.

    manifest.{process}.json     what this process saved: leaves, small values, stores (`host_offload.disk.saved_records`)
    {kind}/{device}/            zarr arrays of records

Each process describes its own files, so that none waits for another to describe them; together they
are the checkpoint. A description ends with the checksum of what it says.

A checksum tells damage: where it is not right, a description is not what was written, and a restore
  may pass over to an older
step. Where it is right and the contents make no sense, something else wrote them. Then each field
is told by its name, in a CheckpointError, before anything relies on it; `host_offload.fields` holds
the types and ranges.
"""

import base64
import dataclasses
import itertools
import json
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from host_offload.disk import (
    ReadFile,
    SavedRecords,
    SavedStore,
    checksum_of,
    described_array,
    numpy_dtype,
    sync,
)
from host_offload.fields import Field, FieldError, parse_json
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explained, unreadable
from zerojax.checkpoint.iterators import decoded_position

FORMAT = 1
MOST_BYTES = 1 << 30
"""Of a description: far more than those of the largest models."""
_NAME = re.compile(r"manifest\.(0|[1-9][0-9]*)\.json")


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """One leaf of a saved state.

    Attributes:
      shape: of all layers.
      dtype: as saved.
      lead: leading dims that number records.
      is_tiled: it is a stack of tiles.
      spec: how it was split, as text.
    """

    shape: tuple[int, ...]
    dtype: str
    lead: int
    is_tiled: bool
    spec: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def write_manifest(
    folder: str,
    process: int,
    num_processes: int,
    leaves: Mapping[str, SavedLeaf],
    values: Mapping[str, np.ndarray],
    stores: Sequence[SavedStore],
    keys: Mapping[str, str],
    data: Any = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Describe what one process saved below `folder`, once all of it is on disk.

    Args:
      folder: of the state.
      process: that saved it.
      num_processes: that save together.
      leaves: whose bytes are in records, of all processes.
      values: the small leaves.
      stores: of this process's records.
      keys: implementations of the random keys among the values.
      data: the encoded position of its iterator (`zerojax.checkpoint.iterators`), or None.
      about: what the model tells of itself, or None.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "process": process,
        "num_processes": num_processes,
        "leaves": {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()},
        "values": {name: _encoded(value) for name, value in values.items()},
        "stores": [store.to_json() for store in stores],
        "keys": dict(keys),
        "data": data,
    }
    if about is not None:
        manifest["about"] = dict(about)
    path = os.path.join(folder, f"manifest.{process}.json")
    with open(path, "w") as file:
        json.dump(manifest | {"checksum": _checksum(manifest)}, file)
    # Orbax's rename makes the step appear. All that it names must be on disk before.
    sync(path)
    sync(folder)  # for its name


def _checksum(manifest: Mapping[str, Any]) -> str:
    # Sorted, so that a manifest that was read back gives the same text.
    text = json.dumps(manifest, sort_keys=True).encode()
    return f"{checksum_of(np.frombuffer(text, np.uint8)):016x}"


def _encoded(value: np.ndarray) -> dict[str, Any]:
    """Return a small leaf as JSON; `text` is for people, and is not read."""
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "data": data,
        "text": str(value.tolist()),
    }


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """What one process wrote; `data` is None without an iterator, `about` empty where the model
    tells nothing.
    """

    num_processes: int
    leaves: dict[str, SavedLeaf]
    values: dict[str, np.ndarray]
    stores: list[SavedStore]
    keys: dict[str, str]
    data: Any
    about: dict[str, Any]

    @staticmethod
    def of(field: Field, process: int) -> "_Manifest":
        """Return what a description says.

        Raises:
          FieldError: a field is missing, of another type, or fits neither the others nor a file.
        """
        num_processes = field["num_processes"].integer(least=1)
        field["process"].integer(least=process, most=process)
        if process >= num_processes:
            field["num_processes"].refuse(f"more than process {process}")
        leaves = {name: _leaf(entry) for name, entry in field["leaves"].fields()}
        values = {name: _value(entry) for name, entry in field["values"].fields()}
        if twice := sorted(leaves.keys() & values.keys()):
            raise FieldError(f"{twice[0]!r} is both in leaves and in values")
        stores = [_store(entry, leaves) for entry in field["stores"].items()]
        keys = {name: key.text() for name, key in field["keys"].fields()}
        if unknown := sorted(keys.keys() - values.keys()):
            raise FieldError(f"keys[{unknown[0]!r}] is of no leaf in values")
        data = None if (position := field.get("data")) is None else decoded_position(position)
        told = field.get("about")
        about = {} if told is None else {name: entry.value for name, entry in told.fields()}
        return _Manifest(num_processes, leaves, values, stores, keys, data, about)


def _leaf(field: Field) -> SavedLeaf:
    shape, dtype, _ = described_array(field)
    lead = field["lead"].integer(most=len(shape))
    return SavedLeaf(shape, dtype, lead, field["is_tiled"].flag(), field["spec"].text())


def _value(field: Field) -> np.ndarray:
    shape, dtype, num_bytes = described_array(field)
    if len(data := field["data"].data()) != num_bytes:
        field["data"].refuse(f"the base64 of {num_bytes} bytes, for {dtype}{list(shape)}")
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)


def _store(field: Field, leaves: Mapping[str, SavedLeaf]) -> SavedStore:
    """Return a store whose shards lie within the leaves."""
    store = SavedStore.from_json(field)
    for shard, entry in zip(store.leaves, field["leaves"].items(), strict=True):
        if (leaf := leaves.get(shard.name)) is None:
            entry["name"].refuse("a name in leaves")
        if store.lead != leaf.shape[: leaf.lead]:
            field["lead"].refuse(f"{list(leaf.shape[: leaf.lead])} of {shard.name}")
        rest = leaf.shape[leaf.lead :]
        if len(shard.shape) != len(rest) or any(
            a + n > m for a, n, m in zip(shard.start, shard.shape, rest, strict=True)
        ):
            raise FieldError(
                f"{entry.name} is the part {list(shard.shape)} from {list(shard.start)} on of {shard.name}, a record of which "
                f"is {list(rest)}"
            )
    return store


def _check_whole(leaves: Mapping[str, SavedLeaf], stores: Sequence[SavedStore]) -> None:
    """Raise FieldError unless the records have as many elements of each leaf as it has, or, of
    replicas, more.
    """
    found = dict.fromkeys(leaves, 0)
    for store in stores:
        for shard in store.leaves:
            found[shard.name] += store.num_records * math.prod(shard.shape)
    for name, leaf in leaves.items():
        if found[name] < math.prod(leaf.shape):
            raise FieldError(
                f"leaves[{name!r}].shape is {list(leaf.shape)}, and its records hold {found[name]} elements"
            )


class SavedState:
    """A state in a checkpoint; a context manager.

    Attributes:
      leaves: by name, those whose bytes are in records.
      values: the small ones, by name.
      records: the bytes.
      keys: implementations of the random keys among the values, by name.
      data: positions of the iterators, by process.
      about: what the model tells of itself (`zerojax.Model.about`).
      has_opt_state: it was saved; else it is made for the program that restores the weights.
    """

    has_opt_state = True

    def __init__(self, folder: str) -> None:
        """Read the descriptions.

        Raises:
          DamagedError: one is missing or is not what was written.
          CheckpointError: another version of zerojax wrote them, or something else, or they cannot
            be read now.
        """
        self.folder = folder
        try:
            names = {int(m[1]): name for name in os.listdir(folder) if (m := _NAME.fullmatch(name))}
        except OSError as error:
            action = f"reading the checkpoint {folder}"
            raise unreadable(error, action, str(explained(error, action))) from error
        if not names:
            raise DamagedError(f"{folder} is no state of zerojax, or lost its manifest.0.json")
        manifests = {process: self._read(name, process) for process, name in sorted(names.items())}
        # Leaves and small values are the same in all manifests. Stores and iterator positions are
        # each process's own.
        process, first = next(iter(manifests.items()))
        self.num_processes, self.leaves, self.values, self.keys = (
            first.num_processes,
            first.leaves,
            first.values,
            first.keys,
        )
        self.about = first.about
        for other, manifest in manifests.items():
            if (manifest.num_processes, manifest.leaves) != (first.num_processes, first.leaves):
                raise CheckpointError(
                    f"{folder}: manifest.{other}.json and manifest.{process}.json are not of one checkpoint: their "
                    "num_processes or leaves differ"
                )
        # The shards that a lost manifest describes are described nowhere else.
        if len(manifests) < self.num_processes:
            missing = next(number for number in itertools.count() if number not in manifests)
            raise DamagedError(
                f"{folder} was saved by {self.num_processes} processes, and lost manifest.{missing}.json"
            )
        self.data = {process: m.data for process, m in manifests.items() if m.data is not None}
        # One set of records over all processes' stores: a shard of the program that reads may be
        # cut from any of them.
        stores = [store for manifest in manifests.values() for store in manifest.stores]
        try:
            _check_whole(self.leaves, stores)
        except FieldError as error:
            raise _refused(folder, error) from error
        self.records = SavedRecords(folder, stores)

    def _read(self, name: str, process: int) -> _Manifest:
        path = os.path.join(self.folder, name)
        try:
            manifest = parse_json(ReadFile(path).read_all(MOST_BYTES))
            expected = manifest.pop("checksum")
            # Finds a manifest that is still JSON, but was edited or has a flipped bit.
            actual = _checksum(manifest)
        except OSError as error:
            # Where the error has a number, its text names the file.
            raise unreadable(
                error, f"reading the checkpoint {self.folder}", f"{path} cannot be read: {error}"
            ) from error
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"{path} cannot be read: {error}") from error
        if actual != expected:
            saved = reprlib.repr(expected).strip("'")
            raise DamagedError(
                f"{path}: its checksum is {actual}, and {saved} was saved: it was changed since"
            )
        # First of all: another format may have other fields.
        if (found := manifest.get("format")) != FORMAT:
            raise CheckpointError(
                f"{path} is of format {reprlib.repr(found)}, and this version of zerojax reads {FORMAT}"
            )
        try:
            return _Manifest.of(Field(manifest), process)
        except FieldError as error:
            raise _refused(path, error) from error

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the weights that were frozen: they are in records of their own, whose folders
        say so.
        """
        stores = [
            store
            for store in self.records.stores
            if store.folder.startswith(("frozen.", "disk.frozen"))
        ]
        return frozenset(leaf.name for store in stores for leaf in store.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records on disk."""
        return sum(store.num_records * store.record_bytes for store in self.records.stores)

    def check(self, *, checksums: bool, part: int = 0, num_parts: int = 1) -> None:
        """Compare the records' sizes, or checksums too, with those that were saved.

        Args:
          checksums: read all bytes.
          part: which part of the records to compare.
          num_parts: of how many.

        Raises:
          DamagedError: a record is missing, or is not what was saved; it is named.
          CheckpointError: a record cannot be read now.
        """
        for number, (store, record, path) in enumerate(self.records.files()):
            # The processes share the reading: each compares every num_parts-th record.
            if number % num_parts != part:
                continue
            try:
                if checksums:
                    self.records.check(store, record)
                else:
                    self.records.check_size(store, record)
            except OSError as error:
                names = ", ".join(leaf.name for leaf in store.leaves[:3])
                what = f"removed: {path}" if isinstance(error, FileNotFoundError) else str(error)
                damage = f"the checkpoint {self.folder} is damaged, in record {record} of {names}: {what}"
                raise unreadable(error, f"reading the checkpoint {self.folder}", damage) from error

    def close(self) -> None:
        """Close its files."""
        self.records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(path: str, error: FieldError) -> CheckpointError:
    return CheckpointError(
        f"{path}: {error}. Its checksum is right, so that no damage did this: zerojax did not write it"
    )
