"""Write a program's state into a folder: arrays in memory are copied, records on disk are linked.

    while the step waits     arrays -> host memory, piece by piece, within `max_host_bytes`
                             records on disk -> hard links next to them
                             (`host_offload.disk.snapshot`)
    during the next steps    pieces -> records (aligned, O_DIRECT if possible) and their checksums
                             hard links -> the folder
                             frozen weights -> hard links to the records of the last checkpoint, if
                             these hold the same bytes

A state with update="in_forward" holds the gradients of an update that the next step applies. Its
checkpoint has the updated records in place of the old records and the gradients: fewer bytes, and
any program continues from it. They are computed one at a time (`zerojax.program.updated_records`),
as the caller keeps the state. If some records are on disk, or the optimizer is not elementwise, the
state is saved as it is, gradients included.

A `Piece` is one leaf's shard on one device, and is copied one run of layers at a time. On a mesh
with `pipe`, a shard holds the layers of one stage, and has a piece for each chunk of them. Only the
first replica is saved. Without a bound, the copies may take as many bytes as this process's shards.
Then several threads copy, and nothing is written before everything is copied: writes would take
cores and bandwidth from the copies, and the step would wait longer. With a bound, the unwritten
copies stay within it (`Room`), and the step waits until the disk has caught up. A single run of
layers is always let through.

Frozen weights are the same bytes in each checkpoint of a run, in separate records. A record is
identified by the leaves and the part of them that it holds, and by the checksum of the weights in
memory now. It is hard-linked only if both match a record of the last checkpoint whose file still
has that checksum; otherwise it is written. So another base, another mesh, a damaged file, or a file
system without links costs a write, and never a wrong weight.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.device import allocate
from host_offload.disk import (
    LinkedRecord,
    RecordFormat,
    SavedStore,
    Snapshot,
    Store,
    build_format,
    compute_checksum,
    sync,
    write_file,
)
from host_offload.engine import DiskRecords
from host_offload.schedule import layers_kind
from zerojax.checkpoint.errors import CheckpointError, explaining
from zerojax.checkpoint.iterators import encoded_position
from zerojax.checkpoint.leaves import StateLeaf, arrays_in_memory, is_weight, state_arrays
from zerojax.checkpoint.manifest import SavedLeaf, SavedState, write_manifest
from zerojax.program import RecordSettler, UpdatedRecord
from zerojax.runtime import SwapSession
from zerojax.state import Layout, TrainState

logger = logging.getLogger("zerojax")
NUM_THREADS = 2
PIECE_BYTES = 1 << 29
"""Most bytes that a thread copies at a time, unless one layer's records are larger.

Copying full shards of a model's layers would double their memory.
"""
SHARED_BYTES = 1 << 25
"""Most bytes of a copy from memory that numpy reads in place.

The pieces are so small that all threads get some.
"""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighboring layers of one leaf's shard on one device, or an unstacked leaf's shard.

    Attributes:
      leaf: leaf of the state.
      data: the shard, [records.., *shape], on the device or in its host memory; with stages,
        [records, stages, *shape].
      start: start of the shard along the dims after those that number layers and tiles.
      first: number of the first layer.
      rows: the piece's part of dim 0 of `data`.
      stage: the piece's index in the dim of stages of `data`; None if there is no such dim.
    """

    leaf: StateLeaf
    data: jax.Array
    start: tuple[int, ...]
    first: int = 0
    rows: range = range(1)
    stage: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part of the shard in one record."""
        return tuple(self.data.shape[self.leaf.lead + (self.stage is not None) :])

    @property
    def dims(self) -> tuple[int, ...]:
        """Numbers of layers, and of tiles in a layer; () for an unstacked leaf."""
        lead = self.leaf.lead
        return (len(self.rows), *self.data.shape[1:lead]) if lead else ()


class NewStore:
    """A store that its first writer creates, in its own thread, so that the step does not wait."""

    def __init__(self, create: Callable[[], Store]) -> None:
        """Store `create`, which is called once."""
        self._create = create
        self._lock = threading.Lock()
        self._store = None

    def __call__(self) -> Store:
        """Return the store, and create it at the first call."""
        with self._lock:
            if self._store is None:
                self._store = self._create()
            return self._store


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers of pieces that are copied and written together.

    Attributes:
      pieces: pieces on one device, whose records have the same numbers.
      low: first layer, counted from the pieces' first layer.
      high: last layer plus one.
      form: format of the records.
      store: store to which the records are written.
      first: number of the first record in the store.
      base: description of the store for frozen weights, otherwise None.
    """

    pieces: Sequence[Piece]
    low: int
    high: int
    form: RecordFormat
    store: NewStore
    first: int
    base: SavedStore | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        records_per_layer = math.prod(self.pieces[0].dims[1:])
        return (self.high - self.low) * records_per_layer * self.form.padded_bytes

    def copied(self) -> np.ndarray:
        """Return the records, uint8[n, padded_bytes], in new memory that no device writes to."""
        leaves = [on_host(piece, self.low, self.high) for piece in self.pieces]
        count = len(leaves[0])
        # Zeros between the leaves.
        records = allocate(count * self.form.padded_bytes).reshape(count, self.form.padded_bytes)
        for number, record in enumerate(records):
            for view, values in zip(self.form.views(record), leaves, strict=True):
                np.copyto(view, values[number])
        return records


class Target(NamedTuple):
    """Where the records of one device are written.

    Attributes:
      form: format of the records.
      store: store of the records.
      saved: description of the store, without checksums.
    """

    form: RecordFormat
    store: NewStore
    saved: SavedStore


class Room:
    """Host memory for copies that are not written yet.

    Attributes:
      most: most bytes that the copies may take together; None: no limit. A larger copy is let
        through when no other is in use.
    """

    def __init__(self, most: int | None) -> None:
        """Start with nothing in use."""
        self.most = most
        self._used = 0
        self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak(self) -> int:
        """Largest number of bytes in use at any time."""
        return self._peak

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` are available, and take them."""
        with self._changed:
            # With nothing in use any size goes through; otherwise a copy above the bound would wait
            # forever.
            self._changed.wait_for(
                lambda: self.most is None or not self._used or self._used + num_bytes <= self.most
            )
            self._used += num_bytes
            self._peak = max(self._peak, self._used)

    def give(self, num_bytes: int) -> None:
        """Return `num_bytes`, from any thread."""
        with self._changed:
            self._used -= num_bytes
            self._changed.notify_all()


class SavedBase:
    """Records of frozen leaves in one earlier checkpoint, or in none.

    Several threads may link at the same time.
    """

    def __init__(self, folder: str | None, names: Collection[str]) -> None:
        """Index the records of the leaves `names` in the state in `folder`, if any."""
        self._saved: SavedState | None = None
        self._records: dict[tuple[object, ...], tuple[SavedStore, int]] = {}
        if folder is None or not names:
            return
        try:
            self._saved = SavedState(folder)
        except (CheckpointError, OSError) as error:
            logger.info(
                "frozen weights are written again, as the last checkpoint cannot be read: %s", error
            )
            return
        for store in self._saved.records.stores:
            if {leaf.name for leaf in store.leaves} <= set(names):
                self._records |= {
                    store.content(number): (store, number) for number in range(store.num_records)
                }

    def link(self, store: SavedStore, number: int, checksum: int, target: str) -> bool:
        """Hard-link an earlier record if it equals the given one, and return whether it was linked.

        Args:
          store: store of the record in the new checkpoint.
          number: number of the record in the store.
          checksum: checksum of the record's current contents.
          target: path of the link.
        """
        if self._saved is None:
            return False
        record = self._records.get(store.content(number))
        if record is None:
            return False
        saved_store, saved_number = record
        if saved_store.checksums[saved_number] != checksum:
            return False
        # A record that the file system refuses to link, or has lost, is written instead; that write
        # raises its own errors.
        with contextlib.suppress(OSError):
            self._saved.records.check(saved_store, saved_number)
            os.link(os.path.join(self._saved.folder, saved_store.record_file(saved_number)), target)
            return True
        return False

    def close(self) -> None:
        """Close the earlier checkpoint's files."""
        if self._saved is not None:
            self._saved.close()


class Saving:
    """One state that is being saved into a folder.

    The constructor runs while the step waits; `finish` does the remaining work, in any thread.

    Attributes:
      peak_host_bytes: largest number of bytes of copies at any time so far.
    """

    def __init__(
        self,
        layout: Layout,
        swap: SwapSession | None,
        leaves: Sequence[StateLeaf],
        state: TrainState,
        root: str,
        max_host_bytes: int | None,
        data: Any = None,
        last: str | None = None,
        about: Mapping[str, Any] | None = None,
        settler: RecordSettler | None = None,
    ) -> None:
        """Copy the arrays in memory, and link the records on disk.

        Args:
          layout: layout of the state's program.
          swap: swap session of the program, or None if nothing is stored on disk.
          leaves: leaves of its states.
          state: state, not donated yet, whose steps are over.
          root: existing, empty folder to write into.
          max_host_bytes: most bytes of copies that are not written yet; None: no limit.
          data: this process's iterator, whose `get_state()` is saved; or None.
          last: folder of the state that this run last saved or restored, whose records of frozen
            weights are linked; or None.
          about: settings that the model reports, as JSON; or None.
          settler: reads records with the state's pending update applied; None saves the state as
            it is.

        Raises:
          ValueError: the state is not the one on disk.
          CheckpointError: the folder cannot be written to, or is full.
          SwapError: the state on disk is lost.
        """
        self.layout = layout
        self.leaves = leaves
        self.root = root
        self._room = Room(max_host_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "zerojax-save")
        self._numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        self._rank = {device: rank for rank, device in enumerate(layout.mesh.devices.flat)}
        self._writes: list[concurrent.futures.Future[None]] = []
        # Stores of copies; their descriptions lack checksums until they are written.
        self._stores: list[tuple[NewStore, SavedStore]] = []
        self._links: list[tuple[LinkedRecord, SavedStore]] = []
        self._snapshot: Snapshot | None = None
        self._values: dict[str, np.ndarray] = {}
        self._keys: dict[str, str] = {}
        self._data = None if data is None else encoded_position(data)
        self._about = about
        self._base = SavedBase(last, {leaf.name for leaf in leaves if leaf.is_frozen})
        try:
            with explaining(f"writing the checkpoint {root}", root):
                if settler is not None and settler.settles(state):
                    self._copy_settled(settler, state)
                else:
                    self._copy(self.leaves, state_arrays(state))
                if swap is not None:
                    self._link(swap, state)
        except BaseException:
            self.abandon()
            raise

    @property
    def peak_host_bytes(self) -> int:
        """Largest number of bytes of copies at any time so far."""
        return self._room.peak

    # --- while the step waits ---------------------------------------------------------------------

    def _copy(self, leaves: Sequence[StateLeaf], arrays: Sequence[Any]) -> None:
        """Copy the arrays in memory; `arrays` are the arrays of `leaves`, in order."""
        groups: dict[tuple[str, int, int], list[Piece]] = {}  # by label, first layer and device
        for leaf, value in zip(leaves, arrays, strict=True):
            if leaf.is_derived:
                continue
            if leaf.is_inline:
                self._copy_inline(leaf, value)
                continue
            for array, first in arrays_in_memory(leaf, value):
                for rank, piece in self._pieces(leaf, array, first):
                    label = self._label(leaf)
                    # Each part of a Split, and each chunk of a stage, has its own store.
                    if leaf.lead and len(piece.rows) < leaf.shape[0]:
                        label += f".{piece.first}"
                    groups.setdefault((label, piece.first, rank), []).append(piece)
        # Lazy, since the stores of all runs need not exist before the first is copied.
        runs = itertools.chain.from_iterable(
            self._runs(*group, pieces) for group, pieces in groups.items()
        )
        if self._room.most is None:
            all_runs = list(runs)
            all_copies = list(self._pool.map(self._copied, all_runs))
            for run, copies in zip(all_runs, all_copies, strict=True):
                self._submit(run, copies)
            return
        self._copy_within_room(runs)

    def _copy_settled(self, settler: RecordSettler, state: TrainState) -> None:
        """Copy a state in memory with its pending update applied; the checkpoint has none."""
        has_update = settler.has_update(state)
        saved: list[StateLeaf] = []
        unchanged: list[StateLeaf] = []
        arrays: list[Any] = []
        for leaf, value in zip(self.leaves, state_arrays(state), strict=True):
            if leaf.name.startswith("pending."):
                continue
            saved.append(leaf)
            if not (has_update and is_updated(leaf)):
                unchanged.append(leaf)
                arrays.append(value)
        self.leaves = saved
        self._copy(unchanged, arrays)
        if not has_update:
            return
        runs = self._settled_runs(settler(state))
        if self._room.most is not None:
            self._copy_within_room(runs)
            return
        copied: list[tuple[Run, np.ndarray]] = []
        for run in runs:
            copies = self._copied(run)
            # Without its pieces, as the device has room for one record at a time.
            copied.append((dataclasses.replace(run, pieces=()), copies))
        for run, copies in copied:
            self._submit(run, copies)

    def _settled_runs(self, records: Iterator[UpdatedRecord]) -> Iterator[Run]:
        """Yield a run for each updated record and device."""
        weights = [leaf for leaf in self.leaves if is_weight(leaf)]
        opt = [leaf for leaf in self.leaves if leaf.path.startswith(".opt_state")]
        stores: dict[tuple[str, int], Target] = {}
        for record in records:
            leaves = [weights[i] for i in record.leaf_ids]
            leaves += [opt[i] for i in self.layout.opt_map.list_state_leaves(record.leaf_ids)]
            pieces: dict[int, list[Piece]] = {}  # by device
            for leaf, array in zip(leaves, [*record.weights, *record.opt], strict=True):
                for rank, piece in self._pieces(leaf, array, 0):
                    pieces.setdefault(rank, []).append(piece)
            number = 0
            for i, dim in zip(record.index, leaves[0].shape, strict=False):
                number = number * dim + i
            for rank, of_device in pieces.items():
                key = (self._label(leaves[0]), rank)
                if key not in stores:
                    dims = leaves[0].shape[: leaves[0].lead]
                    stores[key] = self._target(*key, of_device, 0, dims)
                target = stores[key]
                yield Run(of_device, 0, 1, target.form, target.store, number, None)

    def _label(self, leaf: StateLeaf) -> str:
        """Return the folder of a leaf's records."""
        label = {
            0: f"leaf.{self._numbers[leaf.path]}",
            1: layers_kind("layers", leaf.stack),
            2: f"tiles.{leaf.group}",
        }[leaf.lead]
        # Separate from trainable leaves, so that a record holds only frozen weights.
        return f"frozen.{label}" if leaf.is_frozen else label

    def _pieces(self, leaf: StateLeaf, array: jax.Array, first: int) -> Iterator[tuple[int, Piece]]:
        """Yield the rank of a device and a piece, for each piece that this process saves.

        Args:
          leaf: leaf of the state.
          array: its array, or a part of it.
          first: number of the array's first record.
        """
        for shard in array.addressable_shards:
            # Replicas hold the same bytes; only one is written.
            if shard.replica_id == 0:
                for piece in _shard_pieces(leaf, shard, first):
                    yield self._rank[shard.device], piece

    def _copy_within_room(self, runs: Iterator[Run]) -> None:
        """Copy runs while earlier ones are written, within the bound of the copies."""
        for run in runs:
            copies = self._copied(run)
            # A failed write ends the save here, before more is copied.
            self._check()
            self._submit(run, copies)
            del copies  # otherwise they stay in memory while the loop waits for room

    def _copied(self, run: Run) -> np.ndarray:
        """Return the copies of a run, once there is room for them."""
        self._room.take(run.num_bytes)
        return run.copied()

    def _submit(self, run: Run, copies: np.ndarray) -> None:
        """Let another thread write copies."""
        self._writes.append(self._pool.submit(self._write, run.store, run.first, copies, run.base))

    def _copy_inline(self, leaf: StateLeaf, value: jax.Array) -> None:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            self._keys[leaf.name] = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        # Unsharded, so every device has all of it; copied, since the next step donates it.
        self._values[leaf.name] = np.array(value.addressable_data(0))

    def _runs(self, label: str, first: int, rank: int, pieces: Sequence[Piece]) -> list[Run]:
        """Return the runs in which one device's pieces are copied.

        The records of all `pieces` have the same numbers.
        """
        dims = pieces[0].dims
        scale = math.prod(dims[1:])  # records per layer
        form, store, saved_store = self._target(label, rank, pieces, first * scale, dims)
        base = saved_store if pieces[0].leaf.is_frozen else None
        num_layers = len(pieces[0].rows)
        layer_bytes = form.padded_bytes * scale
        # Half of the room, so that one run of layers is copied while the previous one is written.
        most = PIECE_BYTES if self._room.most is None else min(PIECE_BYTES, self._room.most // 2)
        if all(is_host_memory(piece.data) for piece in pieces):
            most = min(most, SHARED_BYTES)
        step = max(1, min(num_layers, most // layer_bytes))
        return [
            Run(pieces, low, min(num_layers, low + step), form, store, low * scale, base)
            for low in range(0, num_layers, step)
        ]

    def _target(
        self, label: str, rank: int, pieces: Sequence[Piece], first: int, dims: Sequence[int]
    ) -> "Target":
        """Return a new store for the records of one device's pieces.

        Args:
          label: folder of the records.
          rank: rank of the device.
          pieces: pieces of one record.
          first: number of the first record among the leaves' records.
          dims: the store's numbers of layers, and of tiles in a layer; () for an unstacked leaf.
        """
        form = build_format([(p.leaf.name, p.shape, p.data.dtype) for p in pieces])
        count = math.prod(dims)
        store = NewStore(lambda: Store(self.root, label, rank, count, form))
        folder = os.path.join(label, str(rank))
        names = [p.leaf.name for p in pieces]
        starts = [p.start for p in pieces]
        leaf = pieces[0].leaf
        of_leaf = (folder, names, starts, leaf.shape[: leaf.lead], first)
        saved_store = SavedStore.of_format(form, *of_leaf, checksums=(0,) * count)
        self._stores.append((store, saved_store))
        return Target(form, store, saved_store)

    def _check(self) -> None:
        """Raise the error of a failed write."""
        for write in self._writes:
            if write.done():
                write.result()

    def _link(self, swap: SwapSession, state: TrainState) -> None:
        """Hard-link the records on disk; the next step's writes leave linked files unchanged."""
        kinds: dict[str, tuple[DiskRecords, list[StateLeaf]]] = {}
        for leaf in self.leaves:
            if leaf.disk_records is not None and not leaf.is_derived:
                kinds.setdefault(leaf.disk_records.kind, (leaf.disk_records, []))[1].append(leaf)
        with swap.snapshot(state, [records for records, _ in kinds.values()]) as (snapshot, stores):
            self._snapshot = snapshot
            for records, store in stores:
                leaves = sorted(kinds[records.kind][1], key=lambda leaf: leaf.disk_leaf)
                saved_store = self._saved_store(records, store, leaves)
                if saved_store is not None:
                    link = snapshot.keep(store, os.path.join(self.root, saved_store.folder))
                    self._links.append(
                        (link, dataclasses.replace(saved_store, checksums=link.checksums))
                    )

    def _saved_store(
        self, records: DiskRecords, store: Store, leaves: Sequence[StateLeaf]
    ) -> SavedStore | None:
        """Return the description of a store on disk; None if an earlier device holds all of it."""
        mesh = self.layout.mesh
        device = self.layout.mesh.devices.flat[store.rank]
        starts = []
        is_first = False
        for leaf in leaves:
            sharding = leaf.record(mesh).sharding
            shape = tuple(leaf.shape[leaf.lead :])
            indices = sharding.devices_indices_map(shape)
            index = indices[device]
            starts.append(tuple(s.start or 0 for s in index))
            # A store may be omitted only if, for each of its leaves, an earlier device holds the
            # same part.
            is_first |= next(d for d in mesh.devices.flat if indices[d] == index) == device
        if not is_first:
            return None
        folder = os.path.join(f"disk.{records.kind}", str(store.rank))
        names = [leaf.name for leaf in leaves]
        return SavedStore.of(
            store, folder, names, starts, leaves[0].shape[: leaves[0].lead], leaves[0].first_record
        )

    # --- during the next steps --------------------------------------------------------------------

    def _write(
        self, new_store: NewStore, first: int, records: np.ndarray, base: SavedStore | None = None
    ) -> None:
        """Write records, uint8[n, padded_bytes], from number `first` on.

        For frozen weights, `base` describes the records, which may then be linked instead.
        """
        try:
            store = new_store()
            for number, record in enumerate(records, first):
                path = store.record_path(number)
                checksum = compute_checksum(record)
                if base is None or not self._base.link(base, number, checksum, path):
                    write_file(path, record, record.nbytes)
                store.end_write(number, checksum)
                sync(path)
        finally:
            self._room.give(records.nbytes)

    def finish(self) -> None:
        """Write the remaining bytes, and describe the state.

        Raises:
          CheckpointError: something could not be written.
        """
        try:
            with explaining(f"writing the checkpoint {self.root}", self.root):
                for write in self._writes:
                    write.result()
                # Written by now, so the checksums are known.
                stores: list[SavedStore] = []
                for store, saved_store in self._stores:
                    checksums = tuple(int(checksum) for checksum in store().checksums)
                    stores.append(dataclasses.replace(saved_store, checksums=checksums))
                for link, saved_store in self._links:
                    assert self._snapshot is not None
                    self._snapshot.move(link, os.path.join(self.root, saved_store.folder))
                    stores.append(saved_store)
                # the names of their files must be on disk before the manifest lists them
                for store in stores:
                    sync(os.path.join(self.root, store.folder))
                self._write_manifest(stores)
        finally:
            self.abandon()

    def _write_manifest(self, stores: Sequence[SavedStore]) -> None:
        leaves: dict[str, SavedLeaf] = {}
        for leaf in self.leaves:
            if leaf.is_derived or leaf.is_inline:
                continue
            dtype = np.dtype(leaf.saved_dtype).name
            leaves[leaf.name] = SavedLeaf(
                leaf.shape, dtype, leaf.lead, bool(leaf.tiles), str(leaf.spec)
            )
        process = jax.process_index()
        num_processes = jax.process_count()
        write_manifest(
            self.root,
            process,
            num_processes,
            leaves,
            self._values,
            stores,
            self._keys,
            self._data,
            self._about,
        )

    def abandon(self) -> None:
        """Wait for writes in progress, and release the snapshot of the disk.

        A second call does nothing.
        """
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._base.close()
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None


def is_updated(leaf: StateLeaf) -> bool:
    """Return whether a leaf is part of the records that an update writes."""
    return is_weight(leaf) or (leaf.path.startswith(".opt_state") and leaf.mirrors)


def on_host(piece: Piece, low: int, high: int) -> np.ndarray:
    """Return layers low .. high - 1 of a shard on the host, [records, *shape].

    Read the result immediately: on a CPU it is a view of device memory.
    """
    data = piece.data
    count = (high - low) * math.prod(piece.dims[1:])
    if piece.leaf.lead:
        rows = slice(piece.rows[low], piece.rows[high - 1] + 1)
        index = rows if piece.stage is None else (rows, slice(piece.stage, piece.stage + 1))
        # In numpy the slice is a view. In JAX it would be a second copy in host memory.
        if is_host_memory(data):
            return np.asarray(data)[index].reshape(count, *piece.shape)
        if count * math.prod(piece.shape) < data.size:
            (device,) = data.devices()
            # The slice is a separate program, on the one device that holds this shard rather than
            # the mesh in scope.
            with jax.set_mesh(Mesh(np.array([device]), ("alone",))):
                data = data[index]
    return np.asarray(data).reshape(count, *piece.shape)


def _shard_pieces(leaf: StateLeaf, shard: jax.Shard, first: int) -> Iterator[Piece]:
    """Yield the pieces of a shard: one, or one for each chunk of each stage.

    Args:
      leaf: leaf of the state.
      shard: shard of its array, or of a part of it.
      first: number of the array's first record.
    """
    data = shard.data
    assert data is not None
    num_rows = data.shape[0] if leaf.lead else 1
    if leaf.order is None:
        # The index of an unsplit dim is slice(None).
        start = tuple(s.start or 0 for s in shard.index[leaf.lead :])
        yield Piece(leaf, data, start, first, range(num_rows))
        return
    start = tuple(s.start or 0 for s in shard.index[2:])
    first_stage = shard.index[1].start or 0
    for run in leaf.order.runs(first, first + num_rows):
        for stage in range(data.shape[1]):
            layer = int(leaf.order.layers[run.start, first_stage + stage])
            rows = range(run.start - first, run.stop - first)
            yield Piece(leaf, data, start, layer, rows, stage)


def is_host_memory(data: jax.Array) -> bool:
    """Return whether numpy can read an array of one device in place."""
    return next(iter(data.devices())).platform == "cpu"
