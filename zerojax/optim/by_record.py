"""The optimizer run part by part: state comes to the device for one layer, or one leaf, is updated and goes back in place.

    for each layer l:   w, s = read(masters, l), read(opt_state, l)
                        w, s = update(g[l], w, s)                      elementwise: equal to updating the whole tree
                        write(masters, l, w); write(opt_state, l, s); write(params, l, cast(w))

Leaves that are not stacked (the embedding, the head, every leaf of a Model) are updated one at a time, each in a loop of one
trip whose bound is an argument of the program: XLA would otherwise start all their copies at the top of the step, and hold the
whole state on the device.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.schedule import Move
from zerojax.models import BLOCKS
from zerojax.optim.elementwise import ElementwiseUpdate, elementwise_update
from zerojax.optim.whole_tree import Update, finish, scale_grads
from zerojax.sharding import STAGES, LeafSpec, stored_spec
from zerojax.state import (
    DiskLayout,
    Index,
    Layout,
    OnDisk,
    RecordSpec,
    TrainState,
    init_opt_state_shape,
    is_stored,
    load_leaves,
    opaque,
    pick,
    read_layer,
    store_leaves,
    wait_for,
    write_layer,
)

Array = jax.Array
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """The leaves of a TrainState that an update reads and writes, as flat lists.

    Attributes:
      params: compute-dtype parameters.
      master: float32 masters, or None where the parameters are.
      opt: leaves of the optimizer state, Splits as one.
    """

    params: list[Any]
    master: list[Any] | None
    opt: list[Any]


jax.tree_util.register_dataclass(States, data_fields=["params", "master", "opt"], meta_fields=[])


class Parts:
    """How to update part of a program's state.

    Attributes:
      update: the elementwise optimizer.
      blocks: indices of the parameter leaves of which a layer's record holds one layer.
      groups: those of stacks of tiles, whose records are tiles.
      ends: the other indices.
    """

    def __init__(self, tx: optax.GradientTransformation, layout: Layout, why: str) -> None:
        """Check that the optimizer is elementwise; `why` is the setting that needs it."""
        self.layout, self.mesh = layout, layout.mesh
        stage = STAGES[layout.config.stage]
        leaves = jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]
        paths = [path for path, _ in leaves]
        specs: list[LeafSpec] = [layout.specs[jax.tree_util.keystr(path)] for path in paths]
        is_layered = isinstance(layout.abstract_params, dict) and BLOCKS in layout.abstract_params
        stacked = [is_layered and layout.num_layers is not None and path[0] == jax.tree_util.DictKey(BLOCKS) for path in paths]
        self.groups = layout.tiles
        self.lead = [layout.lead(i) if s else 0 for i, s in enumerate(stacked)]
        self.blocks = tuple(i for i, lead in enumerate(self.lead) if lead == 1)
        state_shape = init_opt_state_shape(tx, layout.abstract_params)
        self.update: ElementwiseUpdate = elementwise_update(tx, layout.abstract_params, state_shape, why, self.kept_together)
        self.ends = tuple(i for i, s in enumerate(stacked) if not s)

        def records(sharded: bool, tier: str) -> list[RecordSpec]:
            each = [stored_spec(s, sharded) for s in specs]
            return [RecordSpec(self.mesh, spec[lead:], tier) for spec, lead in zip(each, self.lead, strict=True)]

        names = [jax.tree_util.keystr(path) for path in paths]

        config = layout.config
        self.params = records(stage.params, config.params)
        self.master = records(stage.opt_state, config.opt_state if layout.abstract_state.master is not None else config.params)
        self.grads = records(stage.opt_state, "device")
        self.opt = [
            None if owner is None else RecordSpec(self.mesh, self.grads[owner].spec, config.opt_state)
            for owner in self.update.owners
        ]
        if config.opt_state != "device" and layout.abstract_state.master is None and len(self.update.shared) == len(self.opt):
            logger.warning(
                "opt_state=%r keeps nothing there: this optimizer has no state that mirrors a parameter, and with precision=%r "
                "the parameters are their own masters", config.opt_state, config.precision,
            )  # fmt: skip
        self.dtypes = [a.dtype for a in jax.tree.leaves(layout.abstract_arrays.params)]
        if layout.disk is not None:
            self._shelve(layout.disk, names)

    def _shelve(self, disk: DiskLayout, names: Sequence[str]) -> None:
        """Declare the records of the nvme tier: a kind for the stacked layers, for each group, and for each other leaf."""
        config, shapes = self.layout.config, [a.shape for a in jax.tree.leaves(self.layout.abstract_params)]
        has_master = self.layout.abstract_state.master is not None
        num_layers, state = self.layout.num_layers or 1, jax.tree_util.tree_flatten_with_path(self.update.opt_state)[0]
        on_host = config.update_on == "host"

        def shelve(
            kind: str, count: int, held: list[tuple[list[Any], int, str, Any]], updated: bool = True, in_turn: bool = False
        ) -> None:
            """Declare `kind`; `held` is (list that holds the Record, index, name, shape of one layer) of each leaf."""
            if not held:
                return
            rests = [records[i] for records, i, _, _ in held]
            names, shapes, specs = [name for *_, name, _ in held], [a for *_, a in held], [r.spec for r in rests]
            used_by = "program" if not on_host else "both" if kind.startswith("params") else "host"
            shelf = disk.declare(
                kind, count, names, shapes, specs, used_by=used_by, in_place=on_host and updated, in_turn=in_turn
            )
            for leaf, ((records, i, _, _), record) in enumerate(zip(held, rests, strict=True)):
                records[i] = dataclasses.replace(record, shelf=shelf, leaf=leaf)

        def weight(records: list[Any], i: int, dtype: Any) -> tuple[list[Any], int, str, Any]:
            return records, i, names[i], jax.ShapeDtypeStruct(shapes[i][self.lead[i] :], dtype)

        def moment(j: int) -> tuple[list[Any], int, str, Any]:
            path, leaf = state[j]
            shape = leaf.shape[self.lead[self.owner(j)] :]
            return self.opt, j, jax.tree_util.keystr(path), jax.ShapeDtypeStruct(shape, leaf.dtype)

        if config.params == "nvme":
            shelve("params", num_layers, [weight(self.params, i, self.dtypes[i]) for i in self.blocks], not has_master)
            for group in self.groups:
                held = [weight(self.params, i, self.dtypes[i]) for i in group.leaves]
                shelve(group.kind("params"), num_layers * group.num_tiles, held, not has_master)
            for i in self.ends:
                shelve(f"params.{i}", 1, [weight(self.params, i, self.dtypes[i])], not has_master)

        def states(part: Sequence[int]) -> list[tuple[list[Any], int, str, Any]]:
            masters = [weight(self.master, i, jnp.float32) for i in part] if has_master else []
            return masters + [moment(j) for j in self.update.states_of(part)]

        if config.opt_state == "nvme":
            shelve("opt_state", num_layers - self.layout.device_layers, states(self.blocks))
            for group in self.groups:
                shelve(group.kind("opt_state"), num_layers * group.num_tiles, states(group.leaves))
            for i in self.ends:
                shelve(f"opt_state.{i}", 1, states((i,)), in_turn=True)

    @property
    def kept_together(self) -> list[tuple[int, ...]]:
        """The stacked leaves, in the parts of which a record holds a layer or a tile."""
        return [self.blocks, *(group.leaves for group in self.groups)]

    def end_moves(self) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        """Return the moves of the leaves that are no stack of layers: those before the layers, and those of their update."""
        first: list[Move] = []
        last: list[Move] = []
        for i in self.ends:
            own = self.opt_records((i,))
            reads = own if self.layout.abstract_state.master is not None else [self.params[i], *own]
            writes = [self.params[i], *own]
            for moves, records, does_write in ((first, [self.params[i]], False), (last, reads, False), (last, writes, True)):
                kinds = dict.fromkeys(r.shelf.kind for r in records if r.shelf is not None)
                moves += [Move(kind, 0, does_write) for kind in kinds]
        return tuple(first), tuple(last)

    def flat(self, state: TrainState) -> States:
        """Return the state's leaves."""
        master = None if state.master is None else jax.tree.leaves(state.master, is_leaf=is_stored)
        params, opt = (jax.tree.leaves(tree, is_leaf=is_stored) for tree in (state.params, state.opt_state))
        return States(params, master, opt)

    def trees(self, state: TrainState, states: States) -> tuple[Any, Any, Any]:
        """Return params, master and opt_state as trees like those of `state`."""
        tree = jax.tree.structure(state.params, is_leaf=is_stored)
        master = None if states.master is None else jax.tree.unflatten(tree, states.master)
        opt_tree = jax.tree.structure(state.opt_state, is_leaf=is_stored)
        return jax.tree.unflatten(tree, states.params), master, jax.tree.unflatten(opt_tree, states.opt)

    def shared_of(self, states: States) -> list[Array]:
        """Return the scalars of the optimizer state."""
        return pick(states.opt, self.update.shared)

    def shared(self, states: States, loss: Array, ok: Array) -> list[Array]:
        """Return the scalars of the optimizer state after the step."""
        before = self.shared_of(states)
        *_, after = self.update((), (), (), (), before, loss)
        return [jnp.where(ok, a, b) for a, b in zip(after, before, strict=True)]

    def close(self, states: States, shared: Sequence[Array]) -> States:
        """Put the new shared scalars in place."""
        given = dict(zip(self.update.shared, shared, strict=True))
        return dataclasses.replace(states, opt=[given.get(i, leaf) for i, leaf in enumerate(states.opt)])

    # --- one layer ---------------------------------------------------------------------------------------------------------

    def read_opt(self, states: States, part: Sequence[int], layer: Index, on_device: bool) -> list[Array]:
        """Return one record's masters, where there are any, and optimizer state, on the device."""
        return read_layer(self.opt_records(part), self.opt_states(states, part), layer, on_device)

    def read_params(self, states: States, part: Sequence[int], layer: Index) -> list[Array]:
        """Return one record's parameters, sharded, on the device."""
        return read_layer(pick(self.params, part), pick(states.params, part), layer)

    def opt_records(self, part: Sequence[int]) -> list[RecordSpec]:
        """Return how the masters, where there are any, and the optimizer state of some leaves rest."""
        masters = pick(self.master, part) if self.layout.abstract_state.master is not None else []
        return masters + [self.opt_record(j) for j in self.update.states_of(part)]

    def opt_states(self, states: States, part: Sequence[int]) -> list[Any]:
        """Return those masters and that optimizer state, where they rest."""
        masters = [] if states.master is None else pick(states.master, part)
        return masters + pick(states.opt, self.update.states_of(part))

    def update_layer(
        self,
        states: States,
        part: Sequence[int],
        layer: Index,
        grads: Sequence[Array],
        read: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        on_device: bool,
        landing: Any = None,
    ) -> tuple[States, Any]:
        """Update one layer, or one tile, and write it back.

        Args:
          states: all leaves; those of the part are replaced.
          part: indices of the leaves of the record.
          layer: the index to write at.
          grads: float32, sharded.
          read: what `read_opt` returned, after the parameters where there are no masters.
          shared: the scalars of the optimizer state before the step.
          loss: f32[].
          ok: bool[], whether to update at all.
          on_device: whether a Split's first part is meant.
          landing: what this tick fetches from the same stacks, if anything: it is read before they are written.

        Returns:
          The states, and `landing`.
        """
        count = len(part)

        def move(values: Any) -> Any:
            grads, read, landing = values
            return *self._move(part, grads, read[:count], read[count:], shared, loss, ok), landing

        def keep(values: Any) -> Any:
            _, read, landing = values
            return list(read[:count]), list(read[count:]), landing

        # A stack is read, and then updated in place. XLA for GPUs keeps that order by barriers. XLA for CPUs drops them, and
        # merges slices of the stack into what uses them; then it cannot tell the order, and copies the stack in every tick. It
        # does not merge what goes through a branch.
        values = (list(grads), list(read), landing)
        if self.mesh.devices.flat[0].platform == "cpu":
            new, after, landing = jax.lax.cond(ok, lambda v: opaque(move(v)), lambda v: opaque(keep(v)), values)
        else:
            new, after, landing = jax.lax.optimization_barrier(move(jax.lax.optimization_barrier(values)))
        return self.write_layer(states, part, layer, new, after, on_device), landing

    def write_layer(
        self,
        states: States,
        part: Sequence[int],
        layer: Index,
        new: Sequence[Array],
        after: Sequence[Array],
        on_device: bool = False,
    ) -> States:
        """Write one layer or tile: float32 weights, and the leaves of its optimizer state."""
        params = list(states.params)
        cast = [self.cast(i, value) for i, value in zip(part, new, strict=True)]
        for i, stack in zip(part, write_layer(pick(self.params, part), pick(params, part), layer, cast), strict=True):
            params[i] = stack
        values = [*(new if states.master is not None else []), *after]
        stacks = write_layer(self.opt_records(part), self.opt_states(states, part), layer, values, on_device)
        return self.replace(dataclasses.replace(states, params=params), part, stacks)

    def replace(self, states: States, part: Sequence[int], opt: Sequence[Any]) -> States:
        """Put masters, where there are any, and optimizer state of some leaves in place: what `opt_states` returned."""
        own = self.update.states_of(part)
        master, state = states.master and list(states.master), list(states.opt)
        for i, value in zip(part if master is not None else (), opt, strict=False):
            assert master is not None
            master[i] = value
        for j, value in zip(own, opt[len(opt) - len(own) :], strict=True):
            state[j] = value
        return States(states.params, master, state)

    def owner(self, index: int) -> int:
        """Return the parameter leaf that a leaf of the optimizer state mirrors."""
        owner = self.update.owners[index]
        assert owner is not None
        return owner

    def opt_record(self, index: int) -> RecordSpec:
        """Return how a leaf of the optimizer state rests."""
        record = self.opt[index]
        assert record is not None
        return record

    def cast(self, index: int, value: Array) -> Array:
        """Return a weight in the compute dtype, on its shard."""
        value = jax.lax.with_sharding_constraint(value, self.grads[index].sharding)
        # The cast comes before the gather of stages 1 and 2.
        return jax.lax.with_sharding_constraint(value.astype(self.dtypes[index]), self.grads[index].sharding)

    def _move(
        self, part: Sequence[int], grads: Any, old: Any, opt: Any, shared: Any, loss: Array, ok: Array
    ) -> tuple[list[Array], list[Array]]:
        """Update slices of the leaves in `part`. Those of stacked leaves get dims of 1 in front: rules may count dims."""

        def grow(values: Sequence[Array], indices: Sequence[int]) -> list[Array]:
            return [self.grown(i, v) for v, i in zip(values, indices, strict=True)]

        own = self.update.states_of(part)
        owners = [self.owner(j) for j in own]
        new, after, _ = self.update(part, grow(grads, part), grow(old, part), grow(opt, owners), shared, loss)
        new = [v.reshape(o.shape) for v, o in zip(new, old, strict=True)]
        after = [v.reshape(o.shape) for v, o in zip(after, opt, strict=True)]
        keep = lambda a, b: [jnp.where(ok, x, y) for x, y in zip(a, b, strict=True)]  # noqa: E731
        return keep(new, old), keep(after, opt)

    def grown(self, index: int, value: Array) -> Array:
        """Return the slice of a parameter leaf, or of a state that mirrors it, as a stack of one."""
        return value.reshape((1,) * self.lead[index] + value.shape)

    # --- leaves that are not stacked ---------------------------------------------------------------------------------------

    def update_ends(
        self, states: States, grads: Sequence[Array], shared: Sequence[Array], loss: Array, ok: Array, one: Array
    ) -> States:
        """Update every leaf that is no stack of layers, one after the other.

        Args:
          states: all leaves.
          grads: float32, sharded; one for each of `ends`.
          shared: the scalars of the optimizer state before the step.
          loss: f32[].
          ok: bool[].
          one: i32[] holding 1, an argument of the program.
        """
        for index, grad in zip(self.ends, grads, strict=True):
            states, one = self._update_leaf(states, index, grad, shared, loss, ok, one)
        return states

    def tokens(self, states: States, part: Sequence[int]) -> list[Array]:
        """Return the tokens of those of some leaves, and of their state, that are on disk."""
        held = [*self.opt_states(states, part), *pick(states.params, part)]
        return [a.token for a in held if isinstance(a, OnDisk)]

    def end_token(self, states: States) -> Array | None:
        """Return the token of the last of these leaves of which something is on disk, if there is one."""
        return next((tokens[0] for i in reversed(self.ends) if (tokens := self.tokens(states, (i,)))), None)

    def _update_leaf(
        self, states: States, index: int, grad: Array, shared: Sequence[Array], loss: Array, ok: Array, one: Array
    ) -> tuple[States, Array]:
        records, masters = self.opt_records((index,)), int(states.master is not None)

        def new(param: Any, opt: list[Any]) -> tuple[Array, list[Array]]:
            read = load_leaves(records, opt)
            old = read[0] if masters else self.params[index].load(param)
            (value,), after = self._move((index,), (grad,), (old,), read[masters:], shared, loss, ok)
            return value, after

        return self.put_leaf(states, index, new, one)

    def put_leaf(
        self, states: States, index: int, new: Callable[[Any, list[Any]], tuple[Array, list[Array]]], one: Array
    ) -> tuple[States, Array]:
        """Write a leaf that is no stack of layers, and its state.

        Args:
          states: all leaves.
          index: of the leaf.
          new: (parameter, `opt_states`), where they rest -> (float32 weight, leaves of the optimizer state), on the device.
          one: i32[] holding 1, known when this may begin.

        Returns:
          The states, and 1 when it is done.
        """
        records, has_master = self.opt_records((index,)), states.master is not None

        def body(_: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            (param, opt), trips = carry
            value, after = new(param, opt)
            opt = store_leaves(records, [*([value] if has_master else []), *after], opt)
            return (self.params[index].store(self.cast(index, value), param), opt), trips

        carry = ((states.params[index], self.opt_states(states, (index,))), one)
        away = any(r.is_away for r in (self.params[index], *records))
        (param, opt), one = jax.lax.fori_loop(0, one, body, carry) if away else body(one, carry)
        params = [*states.params[:index], param, *states.params[index + 1 :]]
        if tokens := [a.token for a in (*opt, param) if isinstance(a, OnDisk)]:  # the next leaf waits for them, not for 1
            one, _ = wait_for(one, tokens, self.mesh)
        return self.replace(dataclasses.replace(states, params=params), (index,), opt), one


def update_in_parts(parts: Parts, one: Array) -> Update:
    """Return the update of a resident step whose optimizer state is off the device: one leaf after the other.

    Args:
      parts: of a program without stacked layers.
      one: i32[] holding 1, an argument of the program.
    """

    def update(state: TrainState, value: Array, grads: Any) -> tuple[TrainState, dict[str, Array]]:
        config = parts.layout.config
        grads, norm, finite = scale_grads(config, state, grads)
        states = parts.flat(state)
        states = parts.update_ends(states, jax.tree.leaves(grads), parts.shared_of(states), value, finite, one)
        states = parts.close(states, parts.shared(states, value, finite))
        return finish(state, *parts.trees(state, states), value, norm, finite, config.loss_scaling)

    return update
