"""A saved state: the manifests that describe it, and the records that hold its bytes.

    manifest.{process}.json     what this process saved: leaves, small values, stores
                                (`host_offload.disk.saved_records`)
    {kind}/{device}/            zarr arrays of records

Each process describes its own files, so no process waits for another's description; together the
descriptions are the checkpoint. A description ends with the checksum of its contents.

A wrong checksum means damage: the description is not the one that was written, and a restore may
use an older step instead. If the checksum is right but the contents make no sense, something other
than zerojax wrote them. Then a CheckpointError names the faulty field before any code relies on it;
`host_offload.fields` checks types and ranges.
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
    compute_checksum,
    described_array,
    numpy_dtype,
    sync,
)
from host_offload.fields import Field, FieldError, parse_json
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explained, unreadable
from zerojax.checkpoint.iterators import decoded_position
from zerojax.state import IN_FORWARD

FORMAT = 1
MOST_BYTES = 1 << 30
"""Largest size of a description, far above that of the largest models."""
_NAME = re.compile(r"manifest\.(0|[1-9][0-9]*)\.json")


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """One leaf of a saved state.

    Attributes:
      shape: shape over all layers.
      dtype: name of the saved dtype.
      lead: number of leading dims that number records.
      is_tiled: whether the leaf is a stack of tiles.
      spec: how the leaf was split, as text.
    """

    shape: tuple[int, ...]
    dtype: str
    lead: int
    is_tiled: bool
    spec: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded leaf."""
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
    """Describe what one process saved in `folder`, once all of it is on disk.

    Args:
      folder: folder of the state.
      process: index of the process that saved it.
      num_processes: number of processes that save together.
      leaves: leaves of all processes whose bytes are in records, by name.
      values: small leaves, by name.
      stores: stores of this process's records.
      keys: implementations of the random keys among the values, by name.
      data: encoded position of the process's iterator (`zerojax.checkpoint.iterators`), or None.
      about: settings that the model reports (`zerojax.Model.about`), or None.
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
    # Orbax's rename makes the step appear. All files that it names must be on disk before.
    sync(path)
    sync(folder)  # for its name


def _checksum(manifest: Mapping[str, Any]) -> str:
    # Sorted, so that a manifest that was read back produces the same text.
    text = json.dumps(manifest, sort_keys=True).encode()
    return f"{compute_checksum(np.frombuffer(text, np.uint8)):016x}"


def _encoded(value: np.ndarray) -> dict[str, Any]:
    """Return a small leaf as JSON; `text` is for people, and is never read."""
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "data": data,
        "text": str(value.tolist()),
    }


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """The description that one process wrote.

    `data` is None without an iterator; `about` is empty if the model reports no settings.
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
        """Return a parsed description.

        Raises:
          FieldError: a field is missing, has another type, or contradicts other fields or the file
            name.
        """
        num_processes = field["num_processes"].integer(least=1)
        field["process"].integer(least=process, most=process)
        if process >= num_processes:
            field["num_processes"].refuse(f"more than process {process}")
        leaves = {name: _leaf(entry) for name, entry in field["leaves"].fields()}
        values = {name: _value(entry) for name, entry in field["values"].fields()}
        twice = sorted(leaves.keys() & values.keys())
        if twice:
            raise FieldError(f"{twice[0]!r} is both in leaves and in values")
        stores = [_store(entry, leaves) for entry in field["stores"].items()]
        keys = {name: key.text() for name, key in field["keys"].fields()}
        unknown = sorted(keys.keys() - values.keys())
        if unknown:
            raise FieldError(f"keys[{unknown[0]!r}] belongs to no leaf in values")
        position = field.get("data")
        data = None if position is None else decoded_position(position)
        settings = field.get("about")
        about = {} if settings is None else {name: s.value for name, s in settings.fields()}
        return _Manifest(num_processes, leaves, values, stores, keys, data, about)


def _leaf(field: Field) -> SavedLeaf:
    shape, dtype, _ = described_array(field)
    lead = field["lead"].integer(most=len(shape))
    return SavedLeaf(shape, dtype, lead, field["is_tiled"].flag(), field["spec"].text())


def _value(field: Field) -> np.ndarray:
    shape, dtype, num_bytes = described_array(field)
    data = field["data"].data()
    if len(data) != num_bytes:
        field["data"].refuse(f"the base64 of {num_bytes} bytes, for {dtype}{list(shape)}")
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)


def _store(field: Field, leaves: Mapping[str, SavedLeaf]) -> SavedStore:
    """Return a store whose shards are within the leaves.

    Raises:
      FieldError: a shard is outside its leaf.
    """
    store = SavedStore.from_json(field)
    for shard, entry in zip(store.leaves, field["leaves"].items(), strict=True):
        leaf = leaves.get(shard.name)
        if leaf is None:
            entry["name"].refuse("a name in leaves")
        if store.lead != leaf.shape[: leaf.lead]:
            field["lead"].refuse(f"{list(leaf.shape[: leaf.lead])} of {shard.name}")
        record = leaf.shape[leaf.lead :]
        stops = [start + size for start, size in zip(shard.start, shard.shape, strict=True)]
        if len(stops) != len(record) or any(
            stop > size for stop, size in zip(stops, record, strict=True)
        ):
            raise FieldError(
                f"{entry.name} is the part {list(shard.shape)} of {shard.name} that starts at "
                f"{list(shard.start)}, but its records are {list(record)}"
            )
    return store


def _check_whole(leaves: Mapping[str, SavedLeaf], stores: Sequence[SavedStore]) -> None:
    """Raise FieldError if the records hold fewer elements of a leaf than it has.

    With replicas they may hold more.
    """
    num_elements = dict.fromkeys(leaves, 0)
    for store in stores:
        for shard in store.leaves:
            num_elements[shard.name] += store.num_records * math.prod(shard.shape)
    for name, leaf in leaves.items():
        if num_elements[name] < math.prod(leaf.shape):
            raise FieldError(
                f"leaves[{name!r}].shape is {list(leaf.shape)}, and its records hold "
                f"{num_elements[name]} elements"
            )


class SavedState:
    """A state in a checkpoint; a context manager that closes its files.

    Attributes:
      folder: folder of the state.
      num_processes: number of processes that saved it.
      leaves: leaves whose bytes are in records, by name.
      values: small leaves, by name.
      records: the bytes.
      keys: implementations of the random keys among the values, by name.
      data: positions of the iterators, by process.
      about: settings that the model reports (`zerojax.Model.about`).
      has_opt_state: whether the optimizer state was saved; if not, it is created for the program
        that restores the weights.
    """

    has_opt_state = True

    def __init__(self, folder: str) -> None:
        """Read the descriptions.

        Raises:
          DamagedError: a description is missing, or is not the one that was written.
          CheckpointError: another version of zerojax or another program wrote the descriptions, or
            they cannot be read now.
        """
        self.folder = folder
        try:
            matches = [_NAME.fullmatch(name) for name in os.listdir(folder)]
        except OSError as error:
            action = f"reading the checkpoint {folder}"
            raise unreadable(error, action, str(explained(error, action))) from error
        names = {int(match[1]): match[0] for match in matches if match is not None}
        if not names:
            raise DamagedError(f"{folder} is not a zerojax state, or lost its manifest.0.json")
        manifests = {process: self._read(name, process) for process, name in sorted(names.items())}
        # Leaves and small values are the same in all manifests. Stores and iterator positions
        # differ by process.
        process, first = next(iter(manifests.items()))
        self.num_processes = first.num_processes
        self.leaves = first.leaves
        self.values = first.values
        self.keys = first.keys
        self.about = first.about
        for number, manifest in manifests.items():
            if (manifest.num_processes, manifest.leaves) != (first.num_processes, first.leaves):
                raise CheckpointError(
                    f"{folder}: manifest.{number}.json and manifest.{process}.json are not from "
                    "the same checkpoint: their num_processes or leaves differ"
                )
        # No other manifest describes the shards of a lost one.
        if len(manifests) < self.num_processes:
            missing = next(number for number in itertools.count() if number not in manifests)
            raise DamagedError(
                f"{folder} was saved by {self.num_processes} processes, and lost "
                f"manifest.{missing}.json"
            )
        self.data = {process: m.data for process, m in manifests.items() if m.data is not None}
        # One set of records over all processes' stores: a shard of the reading program may be cut
        # from any of them.
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
            # Detects a manifest that is still JSON, but was edited or has a flipped bit.
            actual = _checksum(manifest)
        except OSError as error:
            # If the error has a number, its text names the file.
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
        # The format first: another format may have other fields.
        file_format = manifest.get("format")
        if file_format != FORMAT:
            raise CheckpointError(
                f"{path} has format {reprlib.repr(file_format)}, and this version of zerojax reads "
                f"{FORMAT}"
            )
        try:
            return _Manifest.of(Field(manifest), process)
        except FieldError as error:
            raise _refused(path, error) from error

    @property
    def pending_shape(self) -> tuple[int, ...] | None:
        """Shape of the scalars of an update that is kept for the next step; None if none is kept.

        An update in forward has one scalar more than a delayed update.
        """
        scalars = self.values.get("pending.scalars")
        return None if scalars is None else scalars.shape

    @property
    def holds_update(self) -> bool:
        """Whether the next step of the run that saved would have applied a saved update."""
        return bool(np.any(self.values.get("pending.ready", False)))

    @property
    def is_settled(self) -> bool:
        """Whether the saved weights are the newest ones.

        The weights of a delayed update are one update old by design.
        """
        return not self.holds_update or self.pending_shape != IN_FORWARD

    def check_settled(self) -> None:
        """Check that no update of the weights is pending.

        Raises:
          CheckpointError: the next step's forward would update the weights first.
        """
        if not self.is_settled:
            raise CheckpointError(
                f"the checkpoint {self.folder} was saved with update='in_forward' before its last "
                "update was applied: restore it, and save program.settle(state), which replaces "
                "this checkpoint"
            )

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the weights that were frozen.

        Their records are in separate folders, whose names mark them as frozen.
        """
        names: set[str] = set()
        for store in self.records.stores:
            if store.folder.startswith(("frozen.", "disk.frozen")):
                names |= {leaf.name for leaf in store.leaves}
        return frozenset(names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records on disk."""
        return sum(store.num_records * store.record_bytes for store in self.records.stores)

    def check(self, *, checksums: bool, part: int = 0, num_parts: int = 1) -> None:
        """Compare the records' sizes, and optionally checksums, with the saved ones.

        Args:
          checksums: whether to read all bytes and compare their checksums.
          part: index of the part of the records to compare.
          num_parts: number of parts.

        Raises:
          DamagedError: a record is missing, or differs from what was saved; the error names it.
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
                fault = f"removed: {path}" if isinstance(error, FileNotFoundError) else str(error)
                damage = (
                    f"the checkpoint {self.folder} is damaged, in record {record} of {names}: "
                    f"{fault}"
                )
                raise unreadable(error, f"reading the checkpoint {self.folder}", damage) from error

    def close(self) -> None:
        """Close the files of the state."""
        self.records.close()

    def __enter__(self) -> Self:
        """Return this state."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files of the state."""
        self.close()


def _refused(path: str, error: FieldError) -> CheckpointError:
    return CheckpointError(
        f"{path}: {error}. Its checksum is right, so this is not damage: zerojax did not write it"
    )
