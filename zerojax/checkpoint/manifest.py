"""A saved state: the manifests that describe it, and the records that hold its bytes.

    manifest.{process}.json     what this process saved: leaves, small values, stores (`host_offload.disk.saved_records`)
    {kind}/{device}/            zarr arrays of records

Each process describes its own files, so that none waits for another to describe them; together they are the checkpoint. A
description ends with the checksum of what it says.
"""

import base64
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from host_offload.disk import SavedRecords, SavedStore, checksum_of, numpy_dtype, sync
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explained, unreadable
from zerojax.checkpoint.iterators import decoded_position

FORMAT = 1
_NAME = re.compile(r"manifest\.(\d+)\.json")


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
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


def write_manifest(
    folder: str,
    process: int,
    num_processes: int,
    leaves: Mapping[str, SavedLeaf],
    values: Mapping[str, np.ndarray],
    stores: Sequence[SavedStore],
    keys: Mapping[str, str],
    data: Any = None,
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
    """
    manifest = {
        "format": FORMAT,
        "process": process,
        "num_processes": num_processes,
        "leaves": {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()},
        "values": {name: _encoded(value) for name, value in values.items()},
        "stores": [store.to_json() for store in stores],
        "keys": dict(keys),
        "data": data,
    }
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
    return {"dtype": value.dtype.name, "shape": list(value.shape), "data": data, "text": str(value.tolist())}


def _decoded(entry: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry["data"]), numpy_dtype(entry["dtype"])).reshape(entry["shape"])


class SavedState:
    """A state in a checkpoint; a context manager.

    Attributes:
      leaves: by name, those whose bytes are in records.
      values: the small ones, by name.
      records: the bytes.
      keys: implementations of the random keys among the values, by name.
      data: positions of the iterators, by process.
      has_opt_state: it was saved; else it is made for the program that restores the weights.
    """

    has_opt_state = True

    def __init__(self, folder: str) -> None:
        """Read the descriptions.

        Raises:
          DamagedError: one is missing or is not what was written.
          CheckpointError: another version of zerojax wrote them, or they cannot be read now.
        """
        self.folder = folder
        try:
            names = {int(m[1]): name for name in os.listdir(folder) if (m := _NAME.fullmatch(name))}
        except OSError as error:
            action = f"reading the checkpoint {folder}"
            raise unreadable(error, action, str(explained(error, action))) from error
        if not names:
            raise DamagedError(f"{folder} is no state of zerojax, or lost its manifest.0.json")
        manifests = {process: self._read(name) for process, name in sorted(names.items())}
        # Leaves and small values are the same in all manifests. Stores and iterator positions are each process's own.
        first = next(iter(manifests.values()))
        self.num_processes = first["num_processes"]
        # The shards that a lost manifest describes are described nowhere else.
        if missing := sorted(set(range(self.num_processes)) - set(manifests)):
            raise DamagedError(f"{folder} was saved by {self.num_processes} processes, and lost manifest.{missing[0]}.json")
        self.leaves = {
            name: SavedLeaf(tuple(leaf["shape"]), leaf["dtype"], leaf["lead"], leaf["is_tiled"], leaf["spec"])
            for name, leaf in first["leaves"].items()
        }
        self.values = {name: _decoded(entry) for name, entry in first["values"].items()}
        self.keys = dict(first["keys"])
        self.data = {process: decoded_position(m["data"]) for process, m in manifests.items() if m["data"] is not None}
        # One set of records over all processes' stores: a shard of the program that reads may be cut from any of them.
        self.records = SavedRecords(folder, [SavedStore.from_json(s) for m in manifests.values() for s in m["stores"]])

    def _read(self, name: str) -> dict[str, Any]:
        path = os.path.join(self.folder, name)
        try:
            with open(path) as file:
                manifest = json.load(file)
            expected = manifest.pop("checksum")
        except OSError as error:
            raise unreadable(error, f"reading {path}", f"{path} cannot be read: {error}") from error
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} cannot be read: {error}") from error
        # Finds a manifest that is still JSON, but was edited or has a flipped bit.
        if (actual := _checksum(manifest)) != expected:
            raise DamagedError(f"{path}: its checksum is {actual}, and {expected} was saved: it was changed since")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {manifest['format']}, and this version of zerojax reads {FORMAT}")
        return manifest

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
