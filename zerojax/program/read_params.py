"""Read float32 parameters, or their averages, from any tier, one piece at a time.

Export uses this when the full tree would not fit. The averages of `zerojax.Ema` can also be read in
the form in which a step has the parameters, with their dtype, shardings and tier, to evaluate with
them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.device import run_loop
from zerojax.models import LayeredModel, Model, block_path
from zerojax.optim import ema_of_each
from zerojax.program.runner import Runner
from zerojax.program.step import Step
from zerojax.state import (
    Index,
    OnDevice,
    OnDisk,
    StateRecords,
    Tile,
    TileGroup,
    TrainState,
    allocate_all,
    check_is_there,
    decoded,
    is_away,
    is_encoded,
    is_stored,
    load_leaves,
    masters,
    pick,
    pick_stage,
    read_layer,
    write_layer,
)
from zerojax.trees import Tree


class ParamReader:
    """Read the parameters that the optimizer updates, or their averages, onto the device."""

    def __init__(
        self,
        model: Model | LayeredModel,
        records: StateRecords,
        runner: Runner,
        step: Step,
    ) -> None:
        """Prepare to read states of a program.

        Args:
          model: model of the program.
          records: how its states are stored.
          runner: runner of the program.
          step: step of the program, which knows the update that a state leaves pending.
        """
        self.model = model
        self.layout = records.layout
        self.records = records
        self._runner = runner
        self._step = step
        self._updates = self.layout.config.update == "in_forward"
        self._unstacked_readers: dict[tuple[int, bool], Any] = {}

    def check_averages(self) -> None:
        """Raise ValueError if the optimizer keeps no average of each parameter."""
        _ = self._averages

    def pieces(self, state: TrainState, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield (name, tree) for each piece, with leaves on the device.

        A LayeredModel yields "embed", "blocks/0" .. "blocks/L-1" and "head". With several stacks it
        yields "blocks/<stack>/0" and so on, stack by stack. A Model yields each of its leaves.

        Args:
          state: state to read.
          ema: whether to yield the averages instead of the parameters.

        Raises:
          ValueError: there are no averages.
        """
        if ema:
            self.check_averages()  # before anything is read
        if not isinstance(self.model, LayeredModel):
            for path, index in jax.tree_util.tree_flatten_with_path(
                self._indices, is_leaf=is_encoded
            )[0]:
                yield jax.tree_util.keystr(path), self._leaf(state, index, ema)
            return
        unstacked = self._indices
        yield (
            "embed",
            jax.tree.map(
                lambda i: self._leaf(state, i, ema), unstacked["embed"], is_leaf=is_encoded
            ),
        )
        for number, stack in enumerate(self.layout.stacks):
            order = self.layout.order
            for layer in range(stack.num_layers if order is None else order.num_layers):
                check_is_there(state)
                record, stage = (layer, 0) if order is None else order.find(layer)
                # The numbers are arguments, so that one compiled program reads all layers of a
                # stack.
                on_device = record < stack.device_layers
                args = (jnp.int32(record), jnp.int32(stage), on_device, ema, number)
                yield (
                    "/".join((*block_path(stack.name), str(layer))),
                    self._read(self._layer, state, *args),
                )
        yield (
            "head",
            jax.tree.map(
                lambda i: self._leaf(state, i, ema), unstacked["head"], is_leaf=is_encoded
            ),
        )

    def _read(self, read: Any, tree: Tree, *args: Any) -> Any:
        """Call `read(tree, *args)`, which reads from any tier."""
        with self._runner.calling(), jax.set_mesh(self.layout.mesh):
            return self._runner.run("read", read, tree, *args, reads=tree)

    @cached_property
    def _averages(self) -> list[int]:
        """For each parameter leaf, the index of its average among the optimizer state's leaves."""
        return ema_of_each(self.layout)

    def _read_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index, ema: bool
    ) -> list[jax.Array]:
        """Return one record's float32 weights, or their averages, on the device.

        The state's pending update, if any, is applied to them.
        """
        states = self.records.flat(state)
        if self._updates and leaf_ids:
            weights, read = self._step.updated_record(state, leaf_ids, index)
            if not ema:
                return weights
        elif not ema or not leaf_ids:
            return self.records.read_weights(states, leaf_ids, index)
        else:
            # Masters and optimizer state are one record. Its unused parts are only read from disk.
            read = self.records.read_opt(states, leaf_ids, index)
        mirrors = self.layout.opt_map.list_state_leaves(leaf_ids)
        by_state = dict(zip(mirrors, read[len(read) - len(mirrors) :], strict=True))
        return [by_state[self._averages[i]] for i in leaf_ids]

    @cached_property
    def _indices(self) -> Any:
        """The full parameter tree, with the index of each leaf in its place."""
        return jax.tree.unflatten(
            jax.tree.structure(self.layout.abstract_whole), self.layout.in_tree
        )

    def _leaf(self, state: TrainState, index: Any, ema: bool) -> jax.Array:
        """Return an unstacked parameter, given its index, or the indices of arrays to decode."""
        if not is_encoded(index):
            return self._unstacked_leaf(state, index, ema)
        arrays = [self._unstacked_leaf(state, i, ema) for i in jax.tree.leaves(index)]
        return _widened(self._decode(jax.tree.unflatten(jax.tree.structure(index), arrays)))

    @cached_property
    def _decode(self) -> Any:
        return jax.jit(partial(decoded, dtype=self.layout.compute_dtype))

    def _unstacked_leaf(self, state: TrainState, index: int, ema: bool) -> jax.Array:
        """Return an unstacked parameter, or its average."""
        check_is_there(state)
        first_frozen = len(self.layout.leaves)
        if index >= first_frozen:
            return self._frozen_unstacked_leaf(state, index, index - first_frozen)
        if self._updates:
            if (index, ema) not in self._unstacked_readers:
                self._unstacked_readers[index, ema] = jax.jit(
                    lambda state: self._read_record(state, (index,), jnp.int32(0), ema)[0]
                )
            return self._read(self._unstacked_readers[index, ema], state)
        if ema:
            tree = state.opt_state
            place = self._averages[index]
        else:
            tree = masters(state)
            place = index
        leaf = jax.tree.leaves(tree, is_leaf=is_stored)[place]
        if not isinstance(leaf, OnDisk):
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        states = self.records.flat(state)
        if ema:
            specs = self.records.opt_records((index,))
            stacks = self.records.opt_states(states, (index,))
            mirrors = self.layout.opt_map.list_state_leaves((index,))
            position = len(specs) - len(mirrors) + mirrors.index(place)
        else:
            specs, stacks = self.records.weight_record(states, index)
            position = 0
        # Compiled once per leaf: its records on disk are part of the program.
        if (index, ema) not in self._unstacked_readers:
            self._unstacked_readers[index, ema] = jax.jit(
                lambda stacks: load_leaves(specs, stacks)[position]
            )
        return self._read(self._unstacked_readers[index, ema], stacks)

    def _frozen_unstacked_leaf(self, state: TrainState, index: int, place: int) -> jax.Array:
        """Return a frozen unstacked parameter; its average is the parameter itself."""
        leaf = jax.tree.leaves(state.frozen, is_leaf=is_stored)[place]
        record = self.records.weight(index)
        if not isinstance(leaf, OnDisk):
            return _widened(jax.device_put(leaf, leaf.sharding.with_memory_kind("device")))
        if (index, False) not in self._unstacked_readers:
            self._unstacked_readers[index, False] = jax.jit(
                lambda stacks: _widened(load_leaves([record], stacks)[0])
            )
        return self._read(self._unstacked_readers[index, False], [leaf])

    @cached_property
    def _layer(self) -> Any:
        """Function `read(state, layer, stage, on_device, ema, number)`: a layer of stack `number`.

        It reads from any tier. In a pipeline, `layer` is the number of a record, which holds one
        layer of every stage.
        """
        records = self.records
        layout = self.layout

        def read_frozen(
            state: TrainState, leaf_ids: Sequence[int], index: Index
        ) -> list[jax.Array]:
            frozen = jax.tree.leaves(state.frozen, is_leaf=is_stored)
            stacks = [frozen[i - len(layout.leaves)] for i in leaf_ids]
            specs = [records.weight(i) for i in leaf_ids]
            return [_widened(a) for a in read_layer(specs, stacks, index)]

        def read(
            state: TrainState,
            layer: jax.Array,
            stage: jax.Array,
            on_device: bool,
            ema: bool,
            number: int,
        ) -> Any:
            stack = layout.stacks[number]
            index = OnDevice(layer) if on_device else layer
            trained = self._read_record(state, stack.blocks, index, ema)
            frozen = read_frozen(state, stack.frozen_blocks, layer)
            leaves = dict(zip(stack.blocks, trained, strict=True))
            leaves |= zip(stack.frozen_blocks, frozen, strict=True)
            for group in stack.groups:

                def tile(k: jax.Array, group: TileGroup = group) -> list[jax.Array]:
                    index = Tile(layer, k, group.num_tiles)
                    trained = []
                    if group.leaves:
                        trained = self._read_record(state, group.leaves, index, ema)
                    return trained + read_frozen(state, group.frozen, index)

                # The full layer is needed here, so its tiles are stacked again.
                tiles = jax.lax.map(tile, jnp.arange(group.num_tiles))
                leaves |= zip(group.weights, tiles, strict=True)
            decode = lambda leaf: _widened(self._decode(leaf)) if is_encoded(leaf) else leaf  # noqa: E731
            tree = jax.tree.unflatten(
                layout.block_tree(stack.name), [leaves[i] for i in stack.in_tree]
            )
            tree = jax.tree.map(decode, tree, is_leaf=is_encoded)
            if layout.order is None:
                return tree
            return jax.tree.map(lambda record: pick_stage(record, stage), tree)

        return jax.jit(read, static_argnums=(3, 4, 5))

    # --- copies as a step has the parameters ------------------------------------------------------

    def copies(self, state: TrainState, ema: bool) -> Any:
        """Return copies in the dtype, shardings and tier of the parameters in a state.

        Args:
          state: state to read; its pending update, if any, is applied to the copies.
          ema: whether to return the averages instead of the parameters.

        Raises:
          ValueError: there are no averages, or the parameters are stored on disk.
        """
        layout = self.layout
        places = self._averages if ema else [*range(len(layout.leaves))]
        if layout.config.params == "nvme":
            raise ValueError(
                "params='nvme': averages of parameters on disk are read piece by piece, with "
                "program.iter_params(state, ema=True). To evaluate with them, save a checkpoint, "
                "export its averages with zerojax.export_safetensors(..., ema=True), and import "
                "these into a program with another swap_dir"
            )
        check_is_there(state)
        shardings = jax.tree.leaves(layout.shardings.params)
        tree = jax.tree.structure(layout.abstract_params)

        def cast(indices: Sequence[int]) -> Callable[[list[jax.Array]], list[jax.Array]]:
            dtypes = [layout.leaves[i].dtype for i in indices]

            # Copies, even if nothing is cast: the averages are not donated to a step, and may be
            # kept.
            def copy(leaves: list[jax.Array]) -> list[jax.Array]:
                return [jnp.array(a, dtype) for a, dtype in zip(leaves, dtypes, strict=True)]

            return jax.jit(copy, out_shardings=[shardings[i] for i in indices])

        with jax.set_mesh(layout.mesh):
            if not layout.updates_by_record:
                opt_leaves = jax.tree.leaves(state.opt_state)
                averages = cast(range(len(places)))([opt_leaves[j] for j in places])
                return jax.tree.unflatten(tree, averages)
            params: list[Any] = [None] * len(places)
            for i in layout.unstacked:
                (params[i],) = cast([i])([self._unstacked_leaf(state, i, ema)])
            for i, stack in zip(layout.stacked, self._copy_stacks(state, ema), strict=True):
                params[i] = stack
            return jax.block_until_ready(jax.tree.unflatten(tree, params))

    def _copy_stacks(self, state: TrainState, ema: bool) -> list[jax.Array]:
        """Return stacks like the parameters' stacks, filled layer by layer."""
        layout = self.layout
        leaves = jax.tree.leaves(layout.abstract_state.params)
        stacks = _empty([leaves[i] for i in layout.stacked])
        for number, stack in enumerate(layout.stacks):
            for layer in range(stack.num_layers):
                on_device = layer < stack.device_layers
                args = (state, stacks, jnp.int32(layer), on_device, number, ema)
                with self._runner.calling():
                    check_is_there(state)
                    stacks = self._runner.run("read", self._put_layer, *args, reads=state)
                # One layer's float32 values on the device at a time.
                jax.block_until_ready(stacks)
        return stacks

    @cached_property
    def _put_layer(self) -> Any:
        """Function `put(state, stacks, layer, on_device, number, ema)`.

        It returns `stacks`, which are donated, with one layer's parameters or averages stored.
        """
        layout = self.layout
        records = self.records

        def put(
            state: TrainState,
            stacks: list[Any],
            layer: jax.Array,
            on_device: bool,
            number: int,
            ema: bool,
        ) -> list[Any]:
            of_stack = layout.stacks[number]
            after = dict(zip(layout.stacked, stacks, strict=True))

            def write(
                after: dict[int, Any], leaf_ids: Sequence[int], source: Index, target: Index
            ) -> dict[int, Any]:
                values = self._read_record(state, leaf_ids, source, ema)
                values = [records.cast(i, value) for i, value in zip(leaf_ids, values, strict=True)]
                written = write_layer(
                    pick(records.params, leaf_ids), [after[i] for i in leaf_ids], target, values
                )
                return after | dict(zip(leaf_ids, written, strict=True))

            after = write(after, of_stack.blocks, OnDevice(layer) if on_device else layer, layer)
            for group in of_stack.groups:

                def tile(
                    k: jax.Array, after: dict[int, Any], group: TileGroup = group
                ) -> dict[int, Any]:
                    index = Tile(layer, k, group.num_tiles)
                    return write(after, group.leaves, index, index)

                after = run_loop(0, group.num_tiles, tile, after, layout.mesh)
            return [after[i] for i in layout.stacked]

        shardings = jax.tree.leaves(layout.shardings.params)
        return jax.jit(
            put,
            static_argnums=(3, 4, 5),
            donate_argnums=1,
            out_shardings=[shardings[i] for i in layout.stacked],
        )


def _empty(abstract: Sequence[Any]) -> list[Any]:
    """Return zeros in the tier of each leaf: host memory or the device."""
    host = iter(allocate_all([a for a in abstract if is_away(a)]))
    return [
        next(host) if is_away(a) else jnp.zeros(a.shape, a.dtype, device=a.sharding)
        for a in abstract
    ]


def _widened(value: jax.Array) -> jax.Array:
    """Return a weight in float32; integers and booleans, which are frozen, are unchanged."""
    return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
