"""Restore a checkpoint into any program of the same model and optimizer.

The state gets the program's own specs, tiers and dtypes. Each leaf stored in arrays is allocated in
its tier and filled layer by layer: a layer's shards are read from the records that hold them, moved
to the device, and put in place by a donated program. A leaf on disk is filled record by record,
from the checkpoint into the swap folder's buffers, and never passes through a device. So a process
holds its own shards and one record.

    saved [L, D_8, F] on 8 devices in float32
      ->  box of layer l  ->  here [L, D_4, F] on 4 devices, cast to bfloat16

In a pipeline, a device reads the box of the layer that its stage has in the record.

Frozen weights are never written again. So if the checkpoint holds a record of frozen weights in
exactly the form needed here, it is linked into the swap folder if both are on the same file system.
A link takes no space, and copies nothing.

A checkpoint may hold the gradients of an update in forward. A program with another `update` applies
that update to each record as it reads it (`zerojax.checkpoint.source`).

The program's own state is not changed before the checkpoint was compared with the model and found
intact.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.disk import Box, RecordFile, SavedStore
from host_offload.engine import DiskRecords, Engine
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.leaves import StateLeaf, state_arrays
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.source import LeafSource, find_sources
from zerojax.program import RecordSettler
from zerojax.progress import Advance, working
from zerojax.runtime import AllProcesses, RecordKey, SwapSession
from zerojax.sharding import explicit, named
from zerojax.state import Layout, OnDisk, Split, TrainState, allocate_all, as_leaves, is_away


class Restoring:
    """Restores checkpoints into states of one program."""

    def __init__(
        self,
        layout: Layout,
        swap: SwapSession | None,
        leaves: Sequence[StateLeaf],
        calling: Callable[[], AbstractContextManager[None]],
        settler: RecordSettler,
    ) -> None:
        """Restore into states of `layout`.

        Args:
          layout: layout of the program.
          swap: swap session of the program, or None if nothing is stored on disk.
          leaves: leaves of its states.
          calling: function that returns the context for a program with callbacks.
          settler: applies an update that a checkpoint holds and this program does not keep.
        """
        self._settler = settler
        self.layout = layout
        self.leaves = leaves
        self._swap = swap
        self._calling = calling
        self._together = AllProcesses(layout.mesh, "restoring the checkpoint", CheckpointError)
        # All processes skip the same checkpoint, and only if all report damage.
        self._checking = AllProcesses(
            layout.mesh, "reading the checkpoint", CheckpointError, DamagedError
        )

    def restore(self, saved: SavedState, *, verify: bool = True) -> TrainState:
        """Return the saved state as a state of the program.

        Args:
          saved: state saved by a program of the same model and optimizer.
          verify: compare all records' checksums first; otherwise only their sizes.

        Raises:
          CheckpointError: the state belongs to another model; the error names the first leaves that
            differ.
          DamagedError: the state is damaged.
          SwapError: the program's own disk is too small, or failed.
        """
        sources = find_sources(self.leaves, saved, self.layout.config.loss_scaling, self._settler)
        share = {"part": jax.process_index(), "num_parts": jax.process_count()}
        with working("verify"):
            self._checking.do(lambda: saved.check(checksums=verify, **share))
        work = "restore" if saved.has_opt_state else "import"
        with self._calling(), jax.set_mesh(self.layout.mesh):
            swap = self._swap
            linked: frozenset[RecordKey] = frozenset()
            if swap is not None:
                linked = swap.open(self._frozen_files(swap, sources, saved))
                # From here on the program's state on disk is overwritten, so this comes after all
                # checks of the checkpoint.
                swap.begin((), (), name="restore")
            arrays: list[Any] = []
            # These programs do not make processes wait for each other, so a process that fails to
            # read is reported here.
            self._together.do(lambda: arrays.extend(self._arrays(sources, work)))
            if swap is not None:
                self._together.do(lambda: self._fill_disk(swap, sources, linked, work))
                swap.finish()
                # The number marks this state as the one on disk, which is true only now.
                arrays = [self._numbered(array, swap.generation) for array in arrays]
            tree = jax.tree.structure(self.layout.abstract_state)
            return jax.block_until_ready(
                as_leaves(jax.tree.unflatten(tree, jax.tree.leaves(arrays)))
            )

    # --- arrays -----------------------------------------------------------------------------------

    def _arrays(self, sources: Sequence[LeafSource], work: str) -> list[Any]:
        """Return the leaves' arrays; leaves on disk have no generation number yet.

        `work` names the work for progress displays.
        """
        abstract = state_arrays(self.layout.abstract_state)
        arrays = list(abstract)
        stacked: list[int] = []
        for i, source in enumerate(sources):
            if isinstance(abstract[i], OnDisk):
                continue
            if source.leaf.lead:
                stacked.append(i)
            else:
                # Unstacked leaves are read in one piece.
                arrays[i] = source.array(abstract[i])
        # Stacks are allocated together, then filled one record at a time.
        empty = self._empty([abstract[i] for i in stacked])
        for i, array in zip(stacked, empty, strict=True):
            arrays[i] = array
        # Groups of leaves of one stack of layers, whose records have the same numbers.
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i in stacked:
            leaf = sources[i].leaf
            alike.setdefault((leaf.stack, leaf.first, *leaf.record_dims), []).append(i)
        for members in alike.values():
            stacks = self._fill([sources[i] for i in members], [arrays[i] for i in members], work)
            for i, array in zip(members, stacks, strict=True):
                arrays[i] = array
        return arrays

    def _empty(self, abstract: Sequence[Any]) -> list[Any]:
        """Return zeros in the leaves' tiers."""
        flat, tree = jax.tree.flatten(abstract, is_leaf=lambda node: isinstance(node, OnDisk))
        in_memory = [leaf for leaf in flat if not isinstance(leaf, OnDisk)]
        host = [a for a in in_memory if is_away(a)]
        device = [a for a in in_memory if not is_away(a)]
        zeros = {True: iter(allocate_all(host)), False: iter(_zeros(device))}  # by is_away
        arrays = [leaf if isinstance(leaf, OnDisk) else next(zeros[is_away(leaf)]) for leaf in flat]
        return jax.tree.unflatten(tree, arrays)

    def _fill(self, sources: Sequence[LeafSource], stacks: list[Any], work: str) -> list[Any]:
        """Fill stacks whose records have the same numbers, one layer after the other."""
        mesh = self.layout.mesh
        leaves = [source.leaf for source in sources]
        shardings = [leaf.record(mesh).sharding for leaf in leaves]
        first = leaves[0].first
        arrays = [_arrays_in(stack) for stack in stacks]
        # Two programs fill a Split, one per part.
        programs = {False: filler(mesh, leaves, arrays, False)}
        if first:
            programs[True] = filler(mesh, leaves, arrays, True)
        records = list(np.ndindex(*leaves[0].record_dims))
        if all(isinstance(_host_part(stack), OnDisk) for stack in stacks):
            # The remaining layers are on disk; `_fill_disk` fills them.
            records = [index for index in records if index[0] < first]
        with working(work, len(records)) as advance:
            for index in records:
                values = [
                    source.record(index, sharding)
                    for source, sharding in zip(sources, shardings, strict=True)
                ]
                arrays = programs[index[0] < first](arrays, values, np.asarray(index, np.int32))
                # Frees the buffers as soon as the program has read them.
                del values
                # Otherwise records pile up in memory if the device is slower than the disk.
                jax.block_until_ready(arrays)
                advance(1)
        return [_with_arrays(stack, filled) for stack, filled in zip(stacks, arrays, strict=True)]

    # --- the disk ---------------------------------------------------------------------------------

    def _frozen_files(
        self, swap: SwapSession, sources: Sequence[LeafSource], saved: SavedState
    ) -> dict[RecordKey, RecordFile]:
        """Return the checkpoint's files that equal the program's frozen records, byte for byte."""
        if not saved.has_opt_state:  # an import has no records
            return {}
        saved_files = {
            store.content(record): (store, record, path)
            for store, record, path in saved.records.files()
        }
        files: dict[RecordKey, RecordFile] = {}
        for records, members in _on_disk(sources):
            if not records.written_once or any(source.is_converted for source in members):
                continue
            for rank in swap.disk.ranks():
                program_store = self._described(records, [source.leaf for source in members], rank)
                for number in range(records.num_layers):
                    store, record, path = saved_files.get(
                        program_store.content(number), (None, 0, "")
                    )
                    if store is not None and store.checksums[record]:
                        files[records.kind, rank, number] = RecordFile(
                            path, store.checksums[record]
                        )
        return files

    def _described(
        self, records: DiskRecords, leaves: Sequence[StateLeaf], rank: int
    ) -> SavedStore:
        """Return the description that a save would write of a device's records of one kind."""
        mesh = self.layout.mesh
        first = leaves[0]
        device = mesh.devices.flat[rank]
        starts = list[list[int]]()
        for leaf in leaves:
            box = _box_on(leaf.record(mesh).sharding, leaf, device)
            starts.append([start for start, _ in box])
        names = [leaf.name for leaf in leaves]
        lead = first.shape[: first.lead]
        unknown = (0,) * records.num_layers
        return SavedStore.of_format(
            records.format, records.kind, names, starts, lead, first.first_record, unknown
        )

    def _fill_disk(
        self,
        swap: SwapSession,
        sources: Sequence[LeafSource],
        linked: frozenset[RecordKey],
        work: str,
    ) -> None:
        """Fill the swap folder's records one by one in the engine's buffers.

        Linked records are already complete.
        """
        kinds = _on_disk(sources)
        engine = swap.engine
        ranks = swap.disk.ranks()
        total = len(ranks) * sum(records.num_layers for records, _ in kinds)
        with working(work, total) as advance:
            for records, members in kinds:
                self._fill_kind(engine, ranks, records, members, linked, advance)
            # Buffers are written in the background, so the disk holds the state only after this.
            engine.flush()

    def _fill_kind(
        self,
        engine: Engine,
        ranks: Sequence[int],
        records: DiskRecords,
        members: Sequence[LeafSource],
        linked: frozenset[RecordKey],
        advance: Advance,
    ) -> None:
        """Fill the records of one kind, whose leaves are `members` in order.

        `advance` counts each record.
        """
        leaf = members[0].leaf
        dims = leaf.record_dims
        first = leaf.first_record
        for rank in ranks:
            device = self.layout.mesh.devices.flat[rank]
            boxes = [
                _box_on(s.leaf.record(self.layout.mesh).sharding, s.leaf, device) for s in members
            ]
            for number in range(records.num_layers):
                if (records.kind, rank, number) not in linked:
                    index = np.unravel_index(first + number, dims) if dims else ()
                    front = tuple((int(i), int(i) + 1) for i in index)
                    with engine.borrow(records.kind, rank, number, "write") as views:
                        targets = zip(views, boxes, strict=True)
                        for source, (view, box) in zip(members, targets, strict=True):
                            source.fill(front + box, view)
                advance(1)

    def _numbered(self, array: Any, generation: int) -> Any:
        """Return a leaf whose part on disk has the state's generation number."""
        if isinstance(array, Split):
            return Split(array.device, self._numbered(array.host, generation))
        if not isinstance(array, OnDisk):
            return array
        token = array.token
        number = np.full(1, generation, np.int32)
        return dataclasses.replace(
            array, token=jax.make_array_from_callback(token.shape, token.sharding, lambda _: number)
        )


def _on_disk(sources: Sequence[LeafSource]) -> list[tuple[DiskRecords, list[LeafSource]]]:
    """Return each kind of records on disk, with its leaves in their order within a record."""
    kinds: dict[str, tuple[DiskRecords, list[LeafSource]]] = {}
    for source in sorted(sources, key=lambda source: source.leaf.disk_leaf):
        records = source.leaf.disk_records
        if records is not None:
            kinds.setdefault(records.kind, (records, []))[1].append(source)
    return list(kinds.values())


def filler(
    mesh: Mesh, leaves: Sequence[StateLeaf], arrays: Sequence[Sequence[Any]], on_device: bool
) -> Any:
    """Return a jitted `put(arrays, values, index) -> arrays`, which puts one record in place.

    The record holds one value per leaf. `arrays` are donated. `index` is i32[lead], an argument,
    since XLA would derive wrong host memory addresses from a constant index.

    Args:
      mesh: the device mesh.
      leaves: leaves whose records have the same numbers.
      arrays: for each leaf, its array in memory, or the parts of a Split in memory; or their shapes
        and shardings.
      on_device: for Splits, whether the record belongs to the first part.
    """
    records = [leaf.record(mesh) for leaf in leaves]
    lead = leaves[0].lead
    first = leaves[0].first
    shardings = explicit([[array.sharding for array in leaf_arrays] for leaf_arrays in arrays])

    def put(
        arrays: list[list[jax.Array]], values: list[jax.Array], index: jax.Array
    ) -> list[list[jax.Array]]:
        results = []
        writes = zip(arrays, values, strict=True)
        for record, (leaf_arrays, value) in zip(records, writes, strict=True):
            place = 0 if on_device or len(leaf_arrays) == 1 else 1
            # A Split's second part numbers its layers from `first`.
            start = (
                index[0] - (0 if on_device else first),
                *(index[k] for k in range(1, lead)),
                *(0,) * value.ndim,
            )
            # The record's own tier is the tier of the second part.
            tier = "device" if on_device and first else record.tier
            stack = dataclasses.replace(record, tier=tier, spec=(*(None,) * lead, *record.spec))
            stored = stack.store(value.reshape((1,) * lead + value.shape))
            filled = jax.lax.dynamic_update_slice(leaf_arrays[place], stored, start)
            results.append([*leaf_arrays[:place], filled, *leaf_arrays[place + 1 :]])
        return results

    values = explicit([record.sharding for record in records])
    in_shardings = (shardings, values, explicit(named(mesh, ())))
    return jax.jit(put, donate_argnums=0, in_shardings=in_shardings, out_shardings=shardings)


def _host_part(stack: Any) -> Any:
    return stack.host if isinstance(stack, Split) else stack


def _arrays_in(stack: Any) -> list[jax.Array]:
    arrays = [stack.device, stack.host] if isinstance(stack, Split) else [stack]
    return [array for array in arrays if not isinstance(array, OnDisk)]


def _with_arrays(stack: Any, arrays: Sequence[jax.Array]) -> Any:
    if not isinstance(stack, Split):
        return arrays[0]
    return Split(arrays[0], arrays[1] if len(arrays) > 1 else stack.host)


def _zeros(abstract: Sequence[Any]) -> list[jax.Array]:
    if not abstract:
        return []
    make = jax.jit(
        lambda: [jnp.zeros(a.shape, a.dtype) for a in abstract],
        out_shardings=[a.sharding for a in abstract],
    )
    return make()


def _box_on(sharding: jax.sharding.Sharding, leaf: StateLeaf, device: Any) -> Box:
    """Return the box of one record of a leaf that a device holds."""
    shape = tuple(leaf.shape[leaf.lead :])
    index = sharding.devices_indices_map(shape)[device]
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
