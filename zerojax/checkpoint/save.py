"""A program's state written into a folder: what rests in memory is copied and written, what rests on disk is linked.

    while the step waits     arrays -> host memory, a piece at a time, within `max_host_bytes`
                             records on disk -> second names beside them (`host_offload.disk.snapshot`)
    beside the next steps    pieces -> records (aligned, O_DIRECT where it can be), their checksums; second names -> the folder

A piece is a run of layers of the leaves that one device holds and no other device before it. Without a bound, pieces are whole
shards, and the copies take the bytes of this process's shards; with one, what is not yet written may take no more than it, and
the step waits while the disk makes room. One record is always let through.
"""

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import LinkedRecord, SavedStore, Snapshot, Store, checksum, record_format, sync, write_file
from host_offload.engine import DiskRecords
from zerojax.checkpoint.contents import StateLeaf, arrays_of, leaves_of
from zerojax.checkpoint.errors import explaining
from zerojax.checkpoint.manifest import SavedLeaf, position_of, write_manifest
from zerojax.checkpoint.pieces import Piece, Room, copied
from zerojax.runtime import SwapSession
from zerojax.state import Layout, TrainState

NUM_THREADS = 2
PIECE_BYTES = 1 << 30
"""Records that are copied at once, if one is not larger: the whole shards of a model's layers would be there twice."""


class Saving:
    """One state on its way into a folder.

    Made while the step waits; `finish` does the rest, in any thread.

    Attributes:
      peak_host_bytes: most bytes of copies at one time so far.
    """

    def __init__(
        self,
        layout: Layout,
        swap: SwapSession | None,
        contents: Sequence[StateLeaf],
        state: TrainState,
        root: str,
        max_host_bytes: int | None,
        data: Any = None,
    ) -> None:
        """Copy what rests in memory, and keep what rests on disk.

        Args:
          layout: of the state's program.
          swap: of the program, where something rests on disk.
          contents: likewise.
          state: not donated yet; its steps are over.
          root: folder to write into; it is there and empty.
          max_host_bytes: that copies which are not written may take; None: as much as there is.
          data: this process's iterator, whose `get_state()` is kept; or None.

        Raises:
          ValueError: the state is not the one on disk.
          CheckpointError: the folder cannot be written to, or is full.
          SwapError: the state on disk is lost.
        """
        self.layout, self.contents, self.root = layout, contents, root
        self._room, self._pool = Room(max_host_bytes), concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "zerojax-save")
        self._rank = {device: rank for rank, device in enumerate(layout.mesh.devices.flat)}
        self._writes: list[concurrent.futures.Future[None]] = []
        self._stores: list[tuple[Store, str, list[str], list[tuple[int, ...]], tuple[int, ...], int]] = []
        self._kept: list[tuple[LinkedRecord, SavedStore]] = []
        self._snapshot: Snapshot | None = None
        self._values: dict[str, np.ndarray] = {}
        self._keys: dict[str, str] = {}
        self._data = None if data is None else position_of(data)
        try:
            with explaining(f"writing the checkpoint {root}", root):
                self._copy(leaves_of(state))
                if swap is not None:
                    self._keep(swap, state)
        except BaseException:
            self.abandon()
            raise

    @property
    def peak_host_bytes(self) -> int:
        return self._room.peak

    # --- while the step waits ----------------------------------------------------------------------------------------------

    def _copy(self, leaves: Sequence[Any]) -> None:
        groups: dict[tuple[str, int, int], list[Piece]] = {}  # by label, first layer and device
        for number, (content, leaf) in enumerate(zip(self.contents, leaves, strict=True)):
            if content.is_derived:
                continue
            if content.is_inline:
                value = leaf
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    value = jax.random.key_data(leaf)
                    self._keys[content.name] = str(jax.random.key_impl(leaf))
                self._values[content.name] = np.array(value.addressable_data(0))
                continue
            for array, first in arrays_of(content, leaf):
                label = {0: f"leaf.{number}", 1: "layers", 2: f"tiles.{content.group}"}[content.lead]
                if content.lead and array.shape[0] < content.shape[0]:
                    label += f".{first}"
                for shard in array.addressable_shards:
                    if shard.replica_id == 0:
                        start = tuple(s.start or 0 for s in shard.index[content.lead :])
                        piece = Piece(content, shard.data, start)
                        groups.setdefault((label, first, self._rank[shard.device]), []).append(piece)
        for (label, first, rank), pieces in groups.items():
            self._copy_group(label, first, rank, pieces)

    def _copy_group(self, label: str, first: int, rank: int, pieces: Sequence[Piece]) -> None:
        """Copy and write the leaves whose records are numbered alike on one device."""
        lead = pieces[0].content.lead
        form = record_format([(p.content.name, p.shape, p.data.dtype) for p in pieces])
        dims = tuple(pieces[0].data.shape[:lead])
        count = math.prod(dims)
        store = Store(self.root, label, rank, count, form)
        scale = math.prod(dims[1:])
        names, starts = [p.content.name for p in pieces], [p.start for p in pieces]
        whole = tuple(pieces[0].content.shape[:lead])
        self._stores.append((store, os.path.join(label, str(rank)), names, starts, whole, first * scale))
        rows = dims[0] if lead else 1
        row_bytes = form.padded_bytes * scale
        most = PIECE_BYTES if self._room.most is None else min(PIECE_BYTES, self._room.most // 2)
        step = max(1, min(rows, most // row_bytes))
        for low in range(0, rows, step):
            high = min(rows, low + step)
            num_bytes = (high - low) * row_bytes
            self._room.take(num_bytes)
            self._check()
            copies = copied(pieces, low, high, form)
            self._writes.append(self._pool.submit(self._write, store, low * scale, copies))
            del copies

    def _check(self) -> None:
        """Raise the error of a write that failed."""
        for write in self._writes:
            if write.done():
                write.result()

    def _keep(self, swap: SwapSession, state: TrainState) -> None:
        held = [c for c in self.contents if c.shelf is not None and not c.is_derived]
        kinds: dict[str, list[StateLeaf]] = {}
        for content in held:
            assert content.shelf is not None
            kinds.setdefault(content.shelf.kind, []).append(content)
        wanted = [own[0].shelf for own in kinds.values() if own[0].shelf is not None]
        with swap.snapshot(state, wanted) as (snapshot, stores):
            self._snapshot = snapshot
            for records, store in stores:
                own = sorted(kinds[records.kind], key=lambda c: c.shelf_leaf)
                told = self._told(records, store, own)
                if told is not None:
                    kept = snapshot.keep(store, os.path.join(self.root, told.folder))
                    self._kept.append((kept, dataclasses.replace(told, checksums=kept.checksums)))

    def _told(self, records: DiskRecords, store: Store, own: Sequence[StateLeaf]) -> SavedStore | None:
        """Return what is told of a store on disk; None if another device holds all of it too."""
        mesh, device = self.layout.mesh, self.layout.mesh.devices.flat[store.rank]
        starts, is_first = [], False
        for content in own:
            sharding, shape = content.record(mesh).sharding, tuple(content.shape[content.lead :])
            indices = sharding.devices_indices_map(shape)
            mine = indices[device]
            starts.append(tuple(s.start or 0 for s in mine))
            is_first |= next(d for d in mesh.devices.flat if indices[d] == mine) == device
        if not is_first:
            return None
        lead, scale = own[0].lead, math.prod(own[0].shape[1 : own[0].lead])
        folder = os.path.join(f"disk.{records.kind}", str(store.rank))
        return SavedStore.of(store, folder, [c.name for c in own], starts, own[0].shape[:lead], own[0].first * scale)

    # --- beside the next steps ---------------------------------------------------------------------------------------------

    def _write(self, store: Store, first: int, records: np.ndarray) -> None:
        """Write records, uint8[n, padded_bytes], from number `first` on."""
        try:
            for number, record in enumerate(records, first):
                path = store.record_path(number)
                write_file(path, record, record.nbytes)
                store.end_write(number, checksum(record))
                sync(path)
        finally:
            self._room.give(records.nbytes)

    def finish(self) -> None:
        """Write what is left, and describe it all.

        Raises:
          CheckpointError: something could not be written.
        """
        try:
            with explaining(f"writing the checkpoint {self.root}", self.root):
                for write in self._writes:
                    write.result()
                stores = [
                    SavedStore.of(store, folder, names, starts, lead, first)
                    for store, folder, names, starts, lead, first in self._stores
                ]
                for kept, told in self._kept:
                    assert self._snapshot is not None
                    self._snapshot.move(kept, os.path.join(self.root, told.folder))
                    stores.append(told)
                saved = {
                    c.name: SavedLeaf(c.shape, np.dtype(c.saved_dtype).name, c.lead, bool(c.tiles), str(c.spec))
                    for c in self.contents
                    if not c.is_derived and not c.is_inline
                }
                for store in stores:
                    sync(os.path.join(self.root, store.folder))
                write_manifest(
                    self.root, jax.process_index(), jax.process_count(), saved, self._values, stores, self._keys, self._data
                )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for what is under way, and let go of what is held; once done, do nothing."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
