"""A state made from a checkpoint, in the specs, tiers and dtypes of any program of the same model and optimizer.

Each leaf that rests in arrays is allocated where it rests and filled layer by layer: a layer's shards are read from the records
that hold them, moved to the device and put in place by a donated program. What rests on disk is filled record by record, from
the checkpoint into the swap folder's buffers, and never passes a device. So a process holds its own shards and one record.

    saved [L, D_8, F] on 8 devices in float32   ->   box of layer l  ->   here [L, D_4, F] on 4, cast to bfloat16

Nothing of the program's own is touched before the checkpoint was compared with the model, and found whole.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.disk import Box
from host_offload.engine import DiskRecords
from zerojax.checkpoint.contents import ROUNDING_STEP, StateLeaf, leaves_of
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.manifest import SavedLeaf, SavedState
from zerojax.checkpoint.retile import Retiled, of_mlp, retiled
from zerojax.checkpoint.source import MOST_NAMED, LeafSource, may_be_left, unconverted
from zerojax.precision import init_loss_scale
from zerojax.runtime import AllProcesses, SwapSession
from zerojax.sharding import explicit, named
from zerojax.state import Layout, OnDisk, Split, TrainState, allocate_all, is_away

logger = logging.getLogger("zerojax")


class Restoring:
    """Makes states of one program from checkpoints."""

    def __init__(
        self,
        layout: Layout,
        swap: SwapSession | None,
        contents: Sequence[StateLeaf],
        calling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Restore into states of `layout`.

        Args:
          layout: of the program.
          swap: of the program, where something rests on disk.
          contents: what each leaf of its states holds.
          calling: returns the context for a program that calls back.
        """
        self.layout, self.contents, self._swap, self._calling = layout, contents, swap, calling
        self._together = AllProcesses(layout.mesh, "restoring the checkpoint", CheckpointError)
        self._checking = AllProcesses(layout.mesh, "reading the checkpoint", DamagedError)  # all pass the same one over

    def restore(self, saved: SavedState, *, verify: bool = True) -> TrainState:
        """Return the saved state.

        Args:
          saved: of a program of the same model and optimizer.
          verify: compare all records' checksums first; else their sizes alone.

        Raises:
          CheckpointError: it is another model's; the first leaves that differ are named.
          DamagedError: it is not whole.
          SwapError: the program's own disk is too small, or failed.
        """
        sources = self._compare(saved)
        part = {"part": jax.process_index(), "num_parts": jax.process_count()}
        self._checking.do(lambda: saved.check(checksums=verify, **part))
        with self._calling(), jax.set_mesh(self.layout.mesh):
            swap = self._swap
            if swap is not None:
                swap.open()
                swap.begin((), (), name="restore")
            leaves = self._arrays(sources)
            if swap is not None:
                self._together.do(lambda: self._fill_disk(swap, sources))
                swap.finish()
                leaves = [self._numbered(leaf, swap.generation) for leaf in leaves]
            tree = jax.tree.structure(self.layout.abstract_state)
            return jax.block_until_ready(jax.tree.unflatten(tree, jax.tree.leaves(leaves)))

    # --- what is where -----------------------------------------------------------------------------------------------------

    def _compare(self, saved: SavedState) -> list["LeafSource"]:
        """Return what to read for each leaf.

        Raises:
          CheckpointError: leaves that differ.
        """
        differ: list[str] = []
        found = [self._source(content, saved, differ) for content in self.contents]
        if saved.has_opt_state:
            differ += unconverted(found)
        here = {content.name for content in self.contents}
        unread = sorted(name for name in [*saved.contents, *saved.values] if name not in here and not may_be_left(name, saved))
        differ += [f"{name}, which this program's state has not" for name in unread]
        if differ:
            more = f"; and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
            raise CheckpointError(
                f"the checkpoint {saved.folder} is of another model, optimizer or setting. It holds: "
                f"{'; '.join(differ[:MOST_NAMED])}{more}"
            )
        return found

    def _source(self, content: StateLeaf, saved: SavedState, differ: list[str]) -> "LeafSource":
        name = content.name
        if name in saved.values:
            value = saved.values[name]
            if value.shape != content.shape and not jnp.issubdtype(content.dtype, jax.dtypes.prng_key):
                differ.append(f"{name} {value.dtype}{list(value.shape)}, and here it is {list(content.shape)}")
            return LeafSource(content, saved, value=value)
        if name in saved.contents:
            told = saved.contents[name]
            if told.shape == content.shape:
                return LeafSource(content, saved)
            try:
                return LeafSource(content, saved, tiles=self._retiled(content, told, saved))
            except ValueError as error:
                differ.append(f"{name} {list(told.shape)}, and here it is {list(content.shape)}{error}")
            return LeafSource(content, saved)
        value = self._missing(name, saved)
        if value is None and not name.startswith("pending.grads"):
            differ.append(f"no {name} {list(content.shape)}")
        return LeafSource(content, saved, value=np.zeros((), content.dtype) if value is None else value)

    def _retiled(self, content: StateLeaf, told: SavedLeaf, saved: SavedState) -> Retiled:
        here = {one.name: one.shape for one in self.contents}
        there = {name: one.shape for name, one in saved.contents.items()}
        return retiled(
            told.shape, content.shape, stacked=told.lead > 0 and content.lead > 0, tiled=(told.is_tiled, content.tiles),
            is_mlp=of_mlp(content.name, here) and of_mlp(content.name, there),
        )  # fmt: skip

    def _missing(self, name: str, saved: SavedState) -> np.ndarray | None:
        """Return the value of a leaf that states of another config do not have."""
        if name.startswith("loss_scale."):
            logger.info("the checkpoint holds no loss scale: it starts as the config says")
            return np.asarray(getattr(init_loss_scale(self.layout.config.loss_scaling), name.partition(".")[2]))
        if name == ROUNDING_STEP:
            return saved.values["step"]
        if name.startswith("pending.") and not name.startswith("pending.grads"):
            return np.zeros((), np.float32)  # no update is pending
        return None

    # --- arrays ------------------------------------------------------------------------------------------------------------

    def _arrays(self, sources: Sequence["LeafSource"]) -> list[Any]:
        """Return the leaves; what is on disk has no number yet."""
        abstract = leaves_of(self.layout.abstract_state)
        stacked = [i for i, s in enumerate(sources) if s.content.lead and not isinstance(abstract[i], OnDisk)]
        leaves = [
            leaf if i in stacked or isinstance(leaf, OnDisk) else sources[i].array(leaf) for i, leaf in enumerate(abstract)
        ]
        empty = self._empty([abstract[i] for i in stacked])
        for i, leaf in zip(stacked, empty, strict=True):
            leaves[i] = leaf
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in stacked:
            groups.setdefault((sources[i].content.first, *_dims(sources[i].content)), []).append(i)
        for members in groups.values():
            filled = self._fill([sources[i] for i in members], [leaves[i] for i in members])
            for i, leaf in zip(members, filled, strict=True):
                leaves[i] = leaf
        return leaves

    def _empty(self, abstract: Sequence[Any]) -> list[Any]:
        """Return zeros where the leaves rest."""
        flat, tree = jax.tree.flatten(abstract, is_leaf=lambda node: isinstance(node, OnDisk))
        arrays = [leaf for leaf in flat if not isinstance(leaf, OnDisk)]
        away, here = [a for a in arrays if is_away(a)], [a for a in arrays if not is_away(a)]
        made = {"away": iter(allocate_all(away)), "here": iter(_zeros(here))}
        filled = [leaf if isinstance(leaf, OnDisk) else next(made["away" if is_away(leaf) else "here"]) for leaf in flat]
        return jax.tree.unflatten(tree, filled)

    def _fill(self, sources: Sequence["LeafSource"], stacks: list[Any]) -> list[Any]:
        """Fill stacks whose records are numbered alike, one layer after the other."""
        mesh, contents = self.layout.mesh, [source.content for source in sources]
        shardings = [content.record(mesh).sharding for content in contents]
        first, arrays = contents[0].first, [_arrays_in(stack) for stack in stacks]
        programs = {flag: filler(mesh, contents, arrays, flag) for flag in ((True, False) if first else (False,))}
        for index in np.ndindex(*_dims(contents[0])):
            on_device = index[0] < first
            if not on_device and all(isinstance(_rest(stack), OnDisk) for stack in stacks):
                continue
            values = [source.record(index, sharding) for source, sharding in zip(sources, shardings, strict=True)]
            arrays = programs[on_device](arrays, values, np.asarray(index, np.int32))
            del values
            jax.block_until_ready(arrays)  # or records wait in memory for a device that is slower than the disk
        return [_with_arrays(stack, own) for stack, own in zip(stacks, arrays, strict=True)]

    # --- the disk ----------------------------------------------------------------------------------------------------------

    def _fill_disk(self, swap: SwapSession, sources: Sequence["LeafSource"]) -> None:
        kinds: dict[str, tuple[DiskRecords, list[LeafSource]]] = {}
        for source in sources:
            if (shelf := source.content.shelf) is not None:
                kinds.setdefault(shelf.kind, (shelf, []))[1].append(source)
        engine = swap.engine
        for records, held in kinds.values():
            held.sort(key=lambda source: source.content.shelf_leaf)
            content = held[0].content
            dims = _dims(content)
            for rank in swap.disk.ranks():
                device = self.layout.mesh.devices.flat[rank]
                boxes = [_box_on(s.content.record(self.layout.mesh).sharding, s.content, device) for s in held]
                for number in range(records.num_layers):
                    index = np.unravel_index(number + content.first * int(np.prod(dims[1:])), dims) if dims else ()
                    with engine.borrow(records.kind, rank, number, "write") as views:
                        for source, view, box in zip(held, views, boxes, strict=True):
                            source.fill(tuple((int(i), int(i) + 1) for i in index) + box, view)
        engine.flush()

    def _numbered(self, leaf: Any, generation: int) -> Any:
        """Return a leaf whose part on disk has the state's number."""
        if isinstance(leaf, Split):
            return Split(leaf.device, self._numbered(leaf.host, generation))
        if not isinstance(leaf, OnDisk):
            return leaf
        token = leaf.token
        number = np.full(1, generation, np.int32)
        return dataclasses.replace(leaf, token=jax.make_array_from_callback(token.shape, token.sharding, lambda _: number))


def filler(mesh: Mesh, contents: Sequence[StateLeaf], arrays: Sequence[Sequence[Any]], on_device: bool) -> Any:
    """Return `put(arrays, values, index) -> arrays`, jitted: it puts one record of several leaves in place; arrays are donated.

    Args:
      mesh: the device mesh.
      contents: the leaves, whose records are numbered alike.
      arrays: of each leaf that array, or those two parts of a Split, that are in memory; or their shapes and shardings.
      on_device: of Splits, whether the record is in their first parts.

    `index` is i32[lead], an argument, since XLA would derive wrong addresses of host memory from one that it knows.
    """
    records, lead, first = [content.record(mesh) for content in contents], contents[0].lead, contents[0].first
    held = explicit([[a.sharding for a in own] for own in arrays])

    def put(arrays: list[list[jax.Array]], values: list[jax.Array], index: jax.Array) -> list[list[jax.Array]]:
        after = []
        for record, own, value in zip(records, arrays, values, strict=True):
            place = 0 if on_device or len(own) == 1 else 1
            start = (index[0] - (0 if on_device else first), *(index[k] for k in range(1, lead)), *(0,) * value.ndim)
            tier = "device" if on_device and first else record.tier
            moved = dataclasses.replace(record, tier=tier, spec=(*(None,) * lead, *record.spec))
            stored = moved.store(value.reshape((1,) * lead + value.shape))
            filled = jax.lax.dynamic_update_slice(own[place], stored, start)
            after.append([*own[:place], filled, *own[place + 1 :]])
        return after

    values = explicit([record.sharding for record in records])
    return jax.jit(put, donate_argnums=0, in_shardings=(held, values, explicit(named(mesh, ()))), out_shardings=held)


def _dims(content: StateLeaf) -> tuple[int, ...]:
    return tuple(content.shape[: content.lead])


def _rest(stack: Any) -> Any:
    return stack.host if isinstance(stack, Split) else stack


def _arrays_in(stack: Any) -> list[jax.Array]:
    parts = [stack.device, stack.host] if isinstance(stack, Split) else [stack]
    return [part for part in parts if not isinstance(part, OnDisk)]


def _with_arrays(stack: Any, arrays: Sequence[jax.Array]) -> Any:
    if not isinstance(stack, Split):
        return arrays[0]
    return Split(arrays[0], arrays[1] if len(arrays) > 1 else stack.host)


def _zeros(abstract: Sequence[Any]) -> list[jax.Array]:
    if not abstract:
        return []
    make = jax.jit(lambda: [jnp.zeros(a.shape, a.dtype) for a in abstract], out_shardings=[a.sharding for a in abstract])
    return make()


def _box_on(sharding: Any, content: StateLeaf, device: Any) -> Box:
    """Return what a device holds of one record of a leaf."""
    shape = tuple(content.shape[content.lead :])
    index = sharding.devices_indices_map(shape)[device]
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
