"""Make the first state in its tiers; no device or host ever holds more of it than its own shards.

If the full state is stored on the device, one program makes the full tree, each device its own
shards. Otherwise it is made one layer or one leaf at a time, and each is moved to its tier. A tick
makes and writes a layer's parameters, masters and optimizer state:

    for each layer l:   w = init_block(key[l])
                        params[l], masters[l], opt_state[l] = cast(w), w, tx.init(w)

Host stacks are allocated empty outside that program and donated to it. If the program itself
allocated them, XLA would make them on the device first. Both ways use the same keys in the same
order, and give the same numbers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.device import one_trip, run_loop
from zerojax.models import (
    LayeredModel,
    Model,
    StackModel,
    block_path,
    init_layered,
    init_state,
    layer_keys,
    list_stacks,
)
from zerojax.optim import RecordUpdate
from zerojax.precision import PRECISIONS, init_loss_scale
from zerojax.sharding import STAGES, explicit, named
from zerojax.state import (
    DiskArgument,
    FlatState,
    Index,
    Layout,
    OnDevice,
    OnDisk,
    Pending,
    StackLeaves,
    StateRecords,
    Tile,
    TileGroup,
    TileNumber,
    TrainState,
    allocate_all,
    check_host_reads,
    is_away,
    is_stored,
    pick,
    split_frozen,
    state_key,
    write_layer,
)
from zerojax.trees import OptState, Params, Tree

Array = jax.Array


class StateInit:
    """Make the first state of a program.

    Attributes:
      jitted: jitted function that makes the state; takes the result of `arguments`.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        records: StateRecords,
        update: RecordUpdate | None,
    ) -> None:
        """Prepare the program.

        Args:
          model: model of the program.
          tx: optimizer of the program.
          records: how the state is stored.
          update: update by record, or None if full trees are updated on the device.
        """
        self._layout = layout = records.layout
        # Frozen weights off the device are made record by record, even if the full tree is updated
        # together.
        self._by_records = layout.updates_by_record or any(
            record.is_away for record in records.frozen
        )
        if not self._by_records:
            self.jitted = jax.jit(_whole_init(model, tx, layout), out_shardings=layout.shardings)
            return
        unsharded = explicit(named(layout.mesh, ()))
        self.jitted = jax.jit(
            _init_by_records(model, tx, records, update),
            donate_argnums=1,
            in_shardings=(unsharded, [a.sharding for a in self._stacks()], unsharded),
            out_shardings=explicit(layout.shardings),
        )

    def _stacks(self) -> list[Any]:
        """Return the abstract state's leaves in host memory."""
        return [a for a in jax.tree.leaves(self._layout.abstract_state) if is_away(a)]

    def arguments(self, key: Array, number: int) -> tuple[Any, ...]:
        """Return the arguments of `jitted`, allocating host memory for them.

        Args:
          key: random key.
          number: number of the state on disk, or 0.

        Raises:
          RuntimeError: host memory is too small, or this device and jaxlib read wrong records of
            it.
        """
        if not self._by_records:
            return (key,)
        check_host_reads(self._layout.mesh)
        return key, allocate_all(self._stacks()), jnp.int32(number)


def _first_state(
    model: Model | LayeredModel,
    layout: Layout,
    key: Array,
    params: Params,
    master: Any,
    opt_state: OptState,
    pending: Any = None,
    frozen: Any = None,
) -> TrainState:
    """Return the state before the first step, given its large parts."""
    config = layout.config
    scales_loss = PRECISIONS[config.precision].scales_loss
    return TrainState(
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        key=state_key(key),
        params=params,
        master=master,
        opt_state=opt_state,
        loss_scale=init_loss_scale(config.loss_scaling) if scales_loss else None,
        pending=pending,
        frozen=frozen,
        model_state=init_state(model, key),
    )


def _whole_init(
    model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout
) -> Callable[[jax.Array], TrainState]:
    """Return `init(key) -> state`, to be jitted with `layout.shardings` as its output."""

    def init(key: jax.Array) -> TrainState:
        if isinstance(model, LayeredModel):
            # Encoded one layer at a time: all layers' float32 weights never exist together.
            params = init_layered(model, key, lambda path, tree: layout.encode(tree, *path))
        else:
            params = layout.encode(model.init(key))
        trained, frozen = split_frozen(layout.flags, params)
        if frozen is not None:
            frozen = jax.tree.map(
                lambda p, a: jnp.asarray(p, a.dtype), frozen, layout.abstract_arrays.frozen
            )
            frozen = jax.lax.with_sharding_constraint(frozen, layout.shardings.frozen)
        return _first_state(model, layout, key, *_whole_trained(tx, layout, trained), frozen=frozen)

    return init


def _whole_trained(
    tx: optax.GradientTransformation, layout: Layout, trained: Any
) -> tuple[Any, Any, Any]:
    """Return params, master and opt_state for trainable parameters, on the device."""
    precision = PRECISIONS[layout.config.precision]
    stage = STAGES[layout.config.stage]
    master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), trained)
    # Sharded from the start: a device draws only the random numbers of its own elements.
    master = jax.lax.with_sharding_constraint(master, layout.param_shardings(stage.opt_state))
    params = jax.tree.map(lambda p: p.astype(precision.compute_dtype), master)
    return params, master if precision.has_master else None, tx.init(master)


def _init_by_records(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    records: StateRecords,
    update: RecordUpdate | None,
) -> Callable[[Array, list[Array], Array], TrainState]:
    """Return `init(key, empty, number) -> state`.

    Its arguments are a random key; a donated empty array for each leaf of the abstract state in
    host memory, in order; and i32[], the number of the state, which leaves on disk carry.
    """
    layout = records.layout
    abstract = records.layout.abstract_state

    def init(key: Array, empty: list[Array], number: Array) -> TrainState:
        # In the order of the state's leaves, which `_stacks` uses too.
        stacks = iter(empty)

        def room(leaf: Any) -> Any:
            if isinstance(leaf, OnDisk):
                return DiskArgument(jnp.full(leaf.token.shape, number), leaf.shape, leaf.dtype)
            return next(stacks) if is_away(leaf) else jnp.zeros(leaf.shape, leaf.dtype)

        def rooms(tree: Tree) -> Any:
            return jax.tree.map(room, tree, is_leaf=lambda node: isinstance(node, OnDisk))

        weights = _unstacked(model, layout, key)
        # The same keys as in `init_params`: the tier of a state does not change its numbers.
        keys = layer_keys(model, key) if isinstance(model, LayeredModel) else key
        if update is None:
            # the weights of a Model are stored on the device
            assert isinstance(model, LayeredModel)
            trained = init_layered(
                model, key, lambda path, tree: split_frozen(_below(layout.flags, path), tree)[0]
            )
            params, master, opt_state = _whole_trained(tx, layout, trained)
        else:
            states = records.flatten_state(
                *rooms((abstract.params, abstract.master, abstract.opt_state))
            )
            states = records.with_shared(states, update.first_shared())
            states = _fill_unstacked(update, states, weights)
            for stack, leaves in _stacks(model, layout):
                states = _fill_blocks(stack, leaves, update, states, keys)
            params, master, opt_state = records.trees(abstract, states)
        # Zeros, so `ready` is False: the first step has no pending update to apply.
        pending = rooms(abstract.pending)
        if pending is not None:
            pending = _fill_pending(records, pending)
        frozen = rooms(abstract.frozen)
        if frozen is not None:
            leaves, tree = jax.tree.flatten(frozen, is_leaf=is_stored)
            frozen = jax.tree.unflatten(tree, _fill_frozen(model, records, leaves, weights, keys))
        return _first_state(model, layout, key, params, master, opt_state, pending, frozen)

    return init


def _fill_pending(records: StateRecords, pending: Pending) -> Pending:
    """Write zeros as the pending gradients that are on disk, which the first step reads."""
    layout = records.layout
    grads = list(pending.grads)
    places = {leaf: place for place, leaf in enumerate((*layout.stacked, *layout.unstacked))}

    def write(leaf_ids: Sequence[int], num_records: int, at: Callable[[Array], Index]) -> None:
        specs = [records.stored_grads[i] for i in leaf_ids]
        if not any(spec.disk_records is not None for spec in specs):
            return
        zeros = [
            jnp.zeros(records.leaves[i].record_shape, grads[places[i]].dtype) for i in leaf_ids
        ]

        def body(number: Array, stacks: list[Any]) -> list[Any]:
            return write_layer(specs, stacks, at(number), zeros)

        stacks = [grads[places[i]] for i in leaf_ids]
        filled = run_loop(0, num_records, body, stacks, records.mesh)
        for i, stack in zip(leaf_ids, filled, strict=True):
            grads[places[i]] = stack

    for stack in layout.stacks:
        write(stack.blocks, stack.num_layers, lambda layer: layer)
        for group in stack.groups:
            write(group.leaves, stack.num_layers * group.num_tiles, TileNumber)
    return dataclasses.replace(pending, grads=grads)


def _below(tree: Tree, path: Sequence[str]) -> Any:
    """Return the subtree at a path of keys."""
    return functools.reduce(lambda node, key: node[key], path, tree)


def _stacks(model: Model | LayeredModel, layout: Layout) -> list[tuple[StackModel, StackLeaves]]:
    """Return the stacks of layers and their leaves; empty for a Model."""
    if not isinstance(model, LayeredModel):
        return []
    return list(zip(list_stacks(model), layout.stacks, strict=True))


def _unstacked(model: Model | LayeredModel, layout: Layout, key: Array) -> dict[int, Array]:
    """Return the unstacked parameters by index, in float32; frozen ones in their stored dtype."""
    if isinstance(model, Model):
        params = layout.encode(model.init(key))
    else:
        # The same split as in `init_params`; the second key is for the layers.
        k_embed, _, k_head = jax.random.split(key, 3)
        params = {"embed": model.init_embed(k_embed), "head": model.init_head(k_head)}
        params = {name: layout.encode(tree, name) for name, tree in params.items()}
    indices = [i for i in layout.in_tree if not layout.all_leaves[i].is_stacked]
    return _by_index(layout, indices, params)


def _by_index(layout: Layout, indices: Sequence[int], params: Params) -> dict[int, Array]:
    """Return the leaves of a part of the model by index, in float32; frozen ones in their dtype."""
    weights = dict[int, Array]()
    for i, a in zip(indices, jax.tree.leaves(params), strict=True):
        leaf = layout.all_leaves[i]
        weights[i] = jnp.asarray(a, leaf.dtype if leaf.frozen else jnp.float32)
    return weights


def _fill_unstacked(
    update: RecordUpdate, states: FlatState, weights: Mapping[int, Array]
) -> FlatState:
    """Store every trainable unstacked leaf and its optimizer state, one after another."""
    records = update.records
    begin = jnp.int32(0)
    for index in records.layout.unstacked:

        def new(
            _: Any, __: Any, index: int = index, value: Array = weights[index]
        ) -> tuple[Array, list[Array]]:
            value = jax.lax.with_sharding_constraint(value, records.grads[index].sharding)
            return value, update.first_states((index,), (value,))

        states, begin = records.put_leaf(states, index, new, begin)
    return states


def _fill_blocks(
    stack: StackModel,
    stack_leaves: StackLeaves,
    update: RecordUpdate,
    states: FlatState,
    keys: Array,
) -> FlatState:
    """Make the layers of a stack one by one, and each layer's tiles one by one.

    A tile is a slice of a full layer that is recomputed for it. XLA for GPUs makes random numbers
    element by element, and so makes no more than the slice. XLA for CPUs would make the full layer
    each time; there a layer is made once.
    """
    records = update.records

    def put(
        states: FlatState, leaf_ids: Sequence[int], index: Index, weights: Mapping[int, Array]
    ) -> FlatState:
        """Store weights as masters and parameters, and their optimizer states."""
        values = [
            jax.lax.with_sharding_constraint(weights[i], records.grads[i].sharding)
            for i in leaf_ids
        ]
        first_states = update.first_states(leaf_ids, values)
        return records.write_layer(states, leaf_ids, index, values, first_states)

    def body(on_device: bool) -> Callable[[Array, FlatState], FlatState]:
        def tick(layer: Array, states: FlatState) -> FlatState:
            key = keys[stack.first + layer]
            leaves = _block_leaves(stack, stack_leaves, records.layout, key)
            states = put(
                states, stack_leaves.blocks, OnDevice(layer) if on_device else layer, leaves
            )
            for group in stack_leaves.groups:

                def tile(k: Array, states: FlatState, group: TileGroup = group) -> FlatState:
                    index = Tile(layer, k, group.num_tiles)
                    values = _tile_values(
                        stack, stack_leaves, records, leaves, key, index, group.leaves
                    )
                    return put(states, group.leaves, index, values)

                # A loop inside the layers' loop, so that one tile at a time is made and written.
                states = run_loop(0, group.num_tiles, tile, states, records.mesh)
            return states

        return tick

    # Two loops, because a layer whose state stays on the device has an index of a different type.
    on_device = stack_leaves.device_layers
    if on_device:
        states = run_loop(0, on_device, body(True), states, records.mesh)
    return run_loop(on_device, stack_leaves.num_layers, body(False), states, records.mesh)


def _block_leaves(
    stack: StackModel, stack_leaves: StackLeaves, layout: Layout, key: Array
) -> dict[int, Array]:
    """Return the leaves of one layer of a stack by index."""
    params = layout.encode(stack.model.init_block(key), *block_path(stack.name))
    return _by_index(layout, stack_leaves.in_tree, params)


def _tile_values(
    stack: StackModel,
    stack_leaves: StackLeaves,
    records: StateRecords,
    leaves: Mapping[int, Array],
    key: Array,
    index: Tile,
    leaf_ids: Sequence[int],
) -> dict[int, Array]:
    """Return a tile of some leaves, by the leaves' indices.

    Args:
      stack: stack of layers.
      stack_leaves: leaves of the stack.
      records: how the state is stored.
      leaves: leaves of the full layer, by index.
      key: random key of the layer.
      index: layer and tile.
      leaf_ids: indices of the leaves to return.
    """
    on_cpu = records.mesh.devices.flat[0].platform == "cpu"
    # Tied to the tile: otherwise the layer does not depend on the loop, and XLA makes all of it
    # before the loop.
    key = key if on_cpu else jax.lax.optimization_barrier((key, index.tile))[0]
    if not on_cpu:
        leaves = _block_leaves(stack, stack_leaves, records.layout, key)
    return {
        i: jax.lax.dynamic_index_in_dim(leaves[i], index.tile, keepdims=False) for i in leaf_ids
    }


def _fill_frozen(
    model: Model | LayeredModel,
    records: StateRecords,
    frozen: Sequence[Any],
    weights: Mapping[int, Array],
    keys: Array,
) -> list[Any]:
    """Store every frozen leaf; they are written only this once.

    Args:
      model: model that the leaves belong to.
      records: how the leaves are stored.
      frozen: empty arrays for the leaves, in the order of `Layout.frozen`.
      weights: unstacked leaves by index.
      keys: random keys of the layers.

    Returns:
      The filled arrays, in the same order.
    """
    layout = records.layout
    rooms = dict(enumerate(frozen, len(layout.leaves)))
    for i in layout.frozen_unstacked:

        def store(_: Any, room: Any, i: int = i) -> Any:
            return records.weight(i).store(weights[i], room)

        # One leaf after another, for the reason given in `StateRecords.put_leaf`.
        if records.weight(i).is_away:
            rooms[i] = one_trip(0, store, rooms[i], records.mesh)
        else:
            rooms[i] = store(0, rooms[i])

    for stack, stack_leaves in _stacks(model, layout):
        leaf_ids = list(itertools.chain(*stack_leaves.frozen_parts))
        if leaf_ids:
            stack_rooms = {i: rooms[i] for i in leaf_ids}
            rooms |= _fill_frozen_blocks(stack, stack_leaves, records, stack_rooms, keys)
    return list(rooms.values())


def _fill_frozen_blocks(
    stack: StackModel,
    stack_leaves: StackLeaves,
    records: StateRecords,
    rooms: dict[int, Any],
    keys: Array,
) -> dict[int, Any]:
    """Store the frozen leaves of a stack, layer by layer and tile by tile.

    Args:
      stack: stack of layers.
      stack_leaves: leaves of the stack.
      records: how the leaves are stored.
      rooms: empty arrays for the stack's frozen leaves, by index.
      keys: random keys of all layers.
    """

    def write(
        rooms: dict[int, Any], leaf_ids: Sequence[int], index: Index, weights: Mapping[int, Array]
    ) -> dict[int, Any]:
        stacks = write_layer(
            [records.weight(i) for i in leaf_ids],
            pick(rooms, leaf_ids),
            index,
            pick(weights, leaf_ids),
        )
        return rooms | dict(zip(leaf_ids, stacks, strict=True))

    def tick(layer: Array, rooms: dict[int, Any]) -> dict[int, Any]:
        key = keys[stack.first + layer]
        leaves = _block_leaves(stack, stack_leaves, records.layout, key)
        rooms = write(rooms, stack_leaves.frozen_blocks, layer, leaves)
        for group in stack_leaves.groups:

            def tile(k: Array, rooms: dict[int, Any], group: TileGroup = group) -> dict[int, Any]:
                index = Tile(layer, k, group.num_tiles)
                values = _tile_values(
                    stack, stack_leaves, records, leaves, key, index, group.frozen
                )
                return write(rooms, group.frozen, index, values)

            if group.frozen:
                rooms = run_loop(0, group.num_tiles, tile, rooms, records.mesh)
        return rooms

    return run_loop(0, stack_leaves.num_layers, tick, rooms, records.mesh)
