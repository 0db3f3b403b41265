"""What a streamed step does with a layer's gradient, and how it ends: five endings of one backward.

    ending          backward, at layer l                          after backward
    WholeTree       store g[l] on the device                      norm, clip, one update of the whole tree
    ByLayers        store g[l] in its tier                        norm; for each layer: fetch, scale, update, write back
      stores late                                                 the same; store s[l-1] while s[l] is fetched
    InBackward      fetch w[l], s[l]; update; write back          the leaves that are no stack of layers
      stores late   store s[l+1] while s[l] is fetched; update    the record of layer 0; fetch, update, write back the others
    OnHost          store g[l], on the device or on the host      norm; the host updates each layer
      in backward   the host updates layer l                      the other leaves
    Delayed         store g[l] on the host; take over what it     the other leaves
                    made of layer l's gradient of the last step

An ending carries values through the loop of backward. All carry the sum of squares of the gradients so far. `StoredGrads` also
carries the stacks of gradients, and `InBackward` the state that it is updating. Clipping is exact: gradients are scaled when
those of all layers are known. An update in backward comes before that, and so it cannot clip.

The endings whose optimizer runs on the host are in `zerojax.streamed.host_endings`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.device import one_trip
from host_offload.schedule import Phase
from zerojax.models import BLOCKS
from zerojax.optim import Handed, Pieces, RecordUpdate, build_update, clip_factor
from zerojax.state import FlatState, Index, StateRecords, Tile, TrainState, is_stored, pick, read_layer, write_layer
from zerojax.streamed.ending import (
    BackwardResult,
    Crossing,
    HeadDone,
    LateRecord,
    RecordGrads,
    Result,
    closed,
    record_specs,
    with_ends,
)
from zerojax.streamed.phases import PhaseArrays, Tick, run_phase
from zerojax.streamed.plan import StackPlan, StreamedPlan

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradStacks:
    """What backward carries where gradients are stored.

    Attributes:
      grads: a stack of each stacked leaf, on the device, in host memory or OnDisk; none where callbacks stash them.
      squares: f32[], the sum of squares of the unscaled gradients so far.
      token: orders the callbacks of the host's update.
      params: of a delayed update, the stacks of parameters on the device, by leaf; new where a layer's backward is over.
    """

    grads: list[Any]
    squares: Array
    token: Array
    params: dict[int, Array] = dataclasses.field(default_factory=dict)


class StoredGrads:
    """Gradients are stored until all are known."""

    ends_first = False

    def __init__(self, plan: StreamedPlan) -> None:
        self.plan, self.config = plan, plan.config

    def load_ends(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        del state
        return y, {}

    def split_ends(self, carried: GradStacks) -> tuple[GradStacks, dict[int, list[Array]]]:
        return carried, {}

    def begin(self, state: TrainState, head: HeadDone, grads: list[Array], token: Array) -> GradStacks:
        del state, head
        # Stacks in host memory come from outside of the program, which writes them in place; the others are made here.
        return GradStacks(grads if self.plan.grads_in_memory else self.plan.empty_grads(), jnp.float32(0), token)

    def params(self, state: TrainState, carried: GradStacks) -> list[Array]:
        del carried
        return jax.tree.leaves(state.params[BLOCKS], is_leaf=is_stored)

    def use(self, state: TrainState, carried: GradStacks, record: RecordGrads) -> tuple[GradStacks, Any]:
        # Squares are summed while the gradients are at hand, so no stack is read a second time for the norm.
        squares = carried.squares + self.plan.squares(record.grads, record.part, state)
        return dataclasses.replace(self.store(carried, record), squares=squares), record.landing

    def store(self, carried: GradStacks, record: RecordGrads) -> GradStacks:
        plan, part = self.plan, record.part
        after = write_layer(pick(plan.grads, part), plan.pick(carried.grads, part), record.now.write, record.grads)
        return dataclasses.replace(carried, grads=plan.put(carried.grads, part, after))

    def crossing(self, carried: GradStacks, now: Tick, part: Sequence[int], ends: Mapping[int, list[Array]]) -> Crossing | None:
        del carried, now, part, ends
        return None

    def drain(self, stack: StackPlan, layer: Array, carried: GradStacks) -> GradStacks:
        raise AssertionError(f"gradients are not stored late: {stack.name}, {layer}")

    def grads(self, carried: GradStacks) -> list[Array]:
        return carried.grads if self.plan.grads_in_memory else []

    def read_grads(self, carried: GradStacks, part: Sequence[int], index: Index) -> list[Array]:
        return read_layer(pick(self.plan.grads, part), self.plan.pick(carried.grads, part), index)

    def norm(self, result: BackwardResult[GradStacks]) -> Array:
        """Return the global norm of the unscaled gradients."""
        # The squares of the ends come last: a tied embedding's gradient is complete only when backward is over.
        return jnp.sqrt(result.carried.squares + self.plan.squares(result.ends, self.plan.ends, result.state))


class GradsAlone(StoredGrads):
    """Nothing is updated: the stored gradients are what is wanted. They are on the device."""

    def use(self, state: TrainState, carried: GradStacks, record: RecordGrads) -> tuple[GradStacks, Any]:
        del state
        return self.store(carried, record), record.landing

    def tree(self, result: BackwardResult[GradStacks]) -> Any:
        """Return the unscaled mean gradients, float32, like the trained parameters."""
        plan = self.plan
        grads = dict(zip((*plan.stacked, *plan.ends), [*result.carried.grads, *result.ends], strict=True))
        mean = [plan.unscaled(grads[i], result.state) for i in range(len(grads))]
        return jax.tree.unflatten(jax.tree.structure(plan.layout.abstract_params), mean)


class WholeTree(StoredGrads):
    """Everything that the optimizer reads is on the device: any optimizer runs, once, on whole trees."""

    def __init__(self, plan: StreamedPlan, tx: optax.GradientTransformation) -> None:
        super().__init__(plan)
        self.update = build_update(tx, plan.layout)

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        plan = self.plan
        # By index, because the update takes the leaves in the order of the parameter tree.
        grads = dict(zip((*plan.stacked, *plan.ends), [*result.carried.grads, *result.ends], strict=True))
        tree = jax.tree.structure(result.state.params)
        # Still scaled: the update of whole trees divides by the loss scale itself, then takes the norm and clips.
        mean = [plan.mean(grads[i]) for i in range(len(grads))]
        return self.update(result.state, result.loss, jax.tree.unflatten(tree, mean))


class ByLayers(StoredGrads):
    """The update is a loop over layers, and over each group's tiles, whose records come from where they rest and go back."""

    def __init__(self, plan: StreamedPlan, update: RecordUpdate) -> None:
        super().__init__(plan)
        self.record_update, self.records = update, update.records
        # The layer updated first is the one whose gradient was stored last: on disk that write is done meanwhile.
        self.ends_first = plan.layout.disk is not None

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        plan, update, records, state = self.plan, self.record_update, self.records, result.state
        # What the update fetches first comes after backward, not before it.
        arrays, squares = result.arrays.after(result.carried.squares, plan.mesh)
        result = dataclasses.replace(result, carried=dataclasses.replace(result.carried, squares=squares))
        norm = self.norm(result)
        ok, factor = jnp.isfinite(norm), clip_factor(norm, self.config.clip_norm)

        def ready(grad: Array) -> Array:
            # Unscale first, then clip: `factor` is made of the norm of unscaled gradients.
            grad = plan.unscaled(grad, state)
            return grad if self.config.clip_norm is None else grad * factor

        states = records.flat(state)
        # Every record is updated with the scalars of before the step; `closed` moves them on, once.
        shared = records.shared_of(states)
        ends = dict(zip(plan.ends, result.ends, strict=True))
        if self.ends_first:
            states = update.update_ends(states, ends, shared, result.loss, ok, arrays.one, ready)
            # The engine was told that the layers' records come after those of the ends (`step_moves`).
            if (token := records.end_token(states)) is not None:
                arrays, _ = arrays.after(token, plan.mesh)
        # Of each run the layers' records, then all L T tiles of each group: as the engine reads ahead (`moves_of`).
        loops = []
        for stack in plan.of_stacks:
            mine, on_device = arrays.of_run(stack.run.name), stack.run.device_layers
            phase, is_last = stack.schedule.phase("update"), stack is plan.drained
            follows = bool(loops) and not stack.run.starts_stack
            loops.append(UpdateLoop(phase, mine.phase("update"), stack.blocks, on_device, is_last=is_last, follows=follows))
            for group, tiles in stack.loops:
                at = partial(Tile.numbered, of=group.num_tiles)
                # A record's number makes two indices, of which neither is linear in it.
                of_tiles = dataclasses.replace(mine.phase(tiles.plan("update")), linear=None)
                loops.append(UpdateLoop(tiles.phase("update"), of_tiles, group.leaves, 0, at))
        tokens, pending = list[Array](), dict[int, list[Array]]()
        for number, loop in enumerate(loops):
            if tokens:  # the engine reads and writes records in one order, so loops over them may not be exchanged
                loop = dataclasses.replace(loop, arrays=loop.arrays.after(tokens, plan.mesh))
            elif loop.follows and plan.grads_away and loops[number - 1].part:
                loop, states = self._after(loop, loops[number - 1], states)
            if loop.phase.stores_late:
                states, pending = self.update_records_late(result, states, loop, ready, ok)
            else:
                states = self.update_records(result, states, loop, ready, ok)
            # A loop with nothing on disk has no tokens: the next one waits for those of the loop before it.
            tokens = records.tokens(states, loop.part) or tokens
        if plan.drained is not None:
            part = plan.drained.blocks
            values = dict(enumerate(pending[part[0]]))

            def drain(layer: Array, states: FlatState) -> FlatState:
                return LateRecord(records, part).store(states, layer, values)

            states = _end_beside_drain(plan, update, states, drain, ends, ready, result.loss, ok, arrays.one)
        elif not self.ends_first:
            states = update.update_ends(states, ends, shared, result.loss, ok, arrays.one, ready)
        return closed(update, result, states, norm)

    def _after(self, loop: "UpdateLoop", before: "UpdateLoop", states: FlatState) -> tuple["UpdateLoop", FlatState]:
        """Return a loop over layers of the stack of the loop before it: what it fetches first comes after that one.

        What it fetches of the state does, since the loop before it returns the state. Gradients are only read.
        """
        mesh, arrays = self.plan.mesh, loop.arrays
        if mesh.devices.flat[0].platform != "cpu":
            columns, states = jax.lax.optimization_barrier((arrays.columns, states))
            return dataclasses.replace(loop, arrays=dataclasses.replace(arrays, columns=columns)), states
        # XLA for CPUs drops barriers (`wait_for`): there the least of what the loop before it wrote last is read.
        least = min(before.part, key=lambda i: math.prod(self.plan.leaves[i].record_shape))
        written = self.records.params[least].read(states.params[least], before.at(jnp.int32(before.phase.layer[-1])))
        return dataclasses.replace(loop, arrays=arrays.after(written, mesh)), states

    def update_records(
        self,
        result: BackwardResult[GradStacks],
        states: FlatState,
        loop: "UpdateLoop",
        ready: Callable[[Array], Array],
        ok: Array,
    ) -> FlatState:
        """Update the records of one loop.

        Args:
          result: of backward.
          states: all leaves.
          loop: over the records.
          ready: a stored gradient -> the one to update with.
          ok: bool[], whether to update at all.
        """
        plan, records, part, at = self.plan, self.records, loop.part, loop.at
        shared = records.shared_of(states)
        old_away = states.master is None and plan.params_away
        opt_away = self.config.opt_state != "device"
        # A ring holds records of one form. Where some layers fetch gradients or parameters, and their state is on the device,
        # no layer's optimizer state is part of the record.
        opt_ahead = opt_away and not (loop.on_device and (old_away or plan.grads_away))
        num = len(part)

        def fetch(states: FlatState, layer: Array) -> list[Array]:
            record = self.read_grads(result.carried, part, at(layer)) if plan.grads_away else []
            record += records.read_params(states, part, at(layer)) if old_away else []
            return record + (records.read_opt(states, part, at(layer)) if opt_ahead else [])

        def tick(states: FlatState, now: Tick) -> tuple[FlatState, Any]:
            # What was fetched ahead is taken apart in the order of `fetch`: gradients, parameters, masters and optimizer state.
            # What was not fetched ahead is read here.
            record, here, there = list(now.record or []), now.index(at), now.write_index(at)
            grads = self.read_grads(result.carried, part, here) if not plan.grads_away else record[:num]
            record = record[num:] if plan.grads_away else record
            old: list[Array] = []
            if states.master is None:
                old, record = (record[:num], record[num:]) if old_away else (records.read_params(states, part, here), record)
            opt = record if opt_ahead and not now.on_device else records.read_opt(states, part, here)
            mean = [ready(g) for g in grads]
            return self.record_update.update_layer(states, part, there, mean, old + opt, shared, result.loss, ok, now.landing)

        return run_phase(loop.phase, loop.arrays, states, tick, fetch=fetch, device_layers=loop.on_device)

    def update_records_late(
        self,
        result: BackwardResult[GradStacks],
        states: FlatState,
        loop: "UpdateLoop",
        ready: Callable[[Array], Array],
        ok: Array,
    ) -> tuple[FlatState, dict[int, list[Array]]]:
        """Update the records of one loop, each stored while the next one is loaded.

        Args are those of `update_records`. Returns the states, and the last record where it is stored with the ends.
        """
        records, part, shared = self.records, loop.part, self.records.shared_of(states)
        late = LateRecord(records, part)

        def tick(carry: Any, now: Tick) -> tuple[Any, None]:
            states, pending = carry
            grads, old = self.read_grads(result.carried, part, now.layer), list[Array]()
            crossing = Crossing(late, self.plan.update_groups(), now, pending, states)
            crossed = crossing.begin()
            for number in range(1, crossing.num_turns):
                crossed = crossing.turn(number, jax.lax.optimization_barrier(crossed))
            states, (opt, _) = crossing.states_of(crossed), crossing.loaded(crossed)
            if states.master is None:
                old = records.read_params(states, part, now.layer)
            mean = [ready(g) for g in grads]
            moved = self.record_update.updated_layer(part, mean, old + opt, shared, result.loss, ok)
            return _kept(records, states, part, now.layer, *moved), None

        def drain(layer: Array, carry: Any) -> Any:
            states, pending = carry
            return late.store(states, layer, dict(enumerate(pending))), pending

        carry = states, late.empty(states)
        states, pending = run_phase(
            loop.phase, loop.arrays, carry, tick, fetch=lambda carry, layer: [], drain=None if loop.is_last else drain
        )
        return states, {part[0]: pending}


@dataclasses.dataclass(frozen=True)
class UpdateLoop:
    """A loop of the update over records.

    Attributes:
      phase: of the schedule.
      arrays: of the phase.
      part: the leaves of a record.
      on_device: layers whose optimizer state stays on the device.
      at: number of a record -> its index.
      is_last: whether the last record is stored with the leaves that are no stack of layers, where stores are late.
      follows: whether the loop before it is over layers of the same stack.
    """

    phase: Phase
    arrays: PhaseArrays
    part: Sequence[int]
    on_device: int
    at: Callable[[Array], Index] = lambda layer: layer
    is_last: bool = False
    follows: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdatedState:
    """What backward carries where it updates.

    Attributes:
      loss: f32[].
      scalars: of the host's kernels, or None.
      squares: f32[], the sum of squares of the unscaled gradients so far.
      states: of layers whose backward is over, after the step.
      token: orders the callbacks of the host's update.
      pending: of each stack whose stores are late, by the first of its leaves, what the tick before updated (`LateRecord`).
      handed: layers that the host updates, and whose parameters were not taken yet.
      ends: updated records of leaves whose gradients the head completed, by leaf, which the first tick stores.
      head: what of such leaves is updated in pieces, or None.
    """

    loss: Array
    scalars: Array | None
    squares: Array
    states: FlatState
    token: Array
    pending: dict[int, list[Array]]
    ends: dict[int, list[Array]]
    handed: dict[int, Handed] = dataclasses.field(default_factory=dict)
    head: "_HeadPieces | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _HeadPieces:
    """What leaves that the head completed are updated with, a piece in a tick.

    Attributes:
      grads: of them, by leaf, as `Pieces.split` returns them.
      ok: bool[], whether to update: the same for all pieces of a leaf.
    """

    grads: dict[int, Array]
    ok: Array


class InBackward:
    """A layer is updated in the tick that makes its gradient, which is never stored.

    A gradient that is not finite stops the updates from there on; those of later layers are done. Hence no loss scaling.
    """

    ends_first = False

    def __init__(self, plan: StreamedPlan, update: RecordUpdate) -> None:
        self.plan, self.record_update, self.records = plan, update, update.records

    def load_ends(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        states = self.records.flat(state)
        loaded = dict[int, list[Array]]()
        if self.plan.early_ends:
            # They cross the link beside the head, and not beside the layers before it.
            y, states = jax.lax.optimization_barrier((y, states))
            loaded = {i: self.record_update.load_end(states, i) for i in self.plan.early_ends}
        return y, loaded

    def begin(self, state: TrainState, head: HeadDone, grads: list[Array], token: Array) -> UpdatedState:
        del grads
        plan, states = self.plan, self.records.flat(state)
        complete = dict(zip(plan.ends, head.grads, strict=True))
        done = (*plan.early_ends, *plan.head_pieces)
        of_head = {i: _rounded(plan.reduced([complete[i]], [i])[0]) for i in done}
        squares, ends = plan.squares(list(of_head.values()), list(of_head), state), dict[int, list[Array]]()
        ok = jnp.isfinite(squares)
        for i in plan.early_ends:
            states, ends[i] = self.record_update.updated_end(states, i, plan.mean(of_head[i]), head.loaded[i], head.loss, ok)
        cut = {i: pieces.split(of_head[i]) for i, pieces in plan.head_pieces.items()}
        states = _with_pieces(self.records, states, plan.head_pieces, Pieces.split)
        late = {s.blocks for s in plan.of_stacks if s.schedule.phase("backward").stores_late}
        pending = {part[0]: self._late(part).empty(states) for part in late}
        pieces = _HeadPieces(cut, ok) if cut else None
        return UpdatedState(head.loss, None, squares, states, token, pending, ends, head=pieces)

    def _late(self, part: Sequence[int]) -> LateRecord:
        """Return what crosses the link in the ticks of the layers with some leaves."""
        plan, last = self.plan, self.plan.of_stacks[-1]
        if part != last.blocks or not plan.head_pieces:
            return LateRecord(self.records, part)
        count = next(iter(plan.head_pieces.values())).count
        return LateRecord(self.records, part, plan.head_pieces, last.run.stop - count)

    def split_ends(self, carried: UpdatedState) -> tuple[UpdatedState, dict[int, list[Array]]]:
        return dataclasses.replace(carried, ends={}), carried.ends

    def crossing(
        self, carried: UpdatedState, now: Tick, part: Sequence[int], ends: Mapping[int, list[Array]]
    ) -> Crossing | None:
        if not part or part[0] not in carried.pending:
            return None
        pending = carried.pending[part[0]]
        return Crossing(self._late(part), self.plan.link_groups(part), now, pending, carried.states, ends)

    def params(self, state: TrainState, carried: UpdatedState) -> list[Array]:
        del state
        # Those that are being updated. Reads of the stacks of before the step would make XLA keep a copy of them.
        return [carried.states.params[i] for i in self.plan.stacked]

    def use(self, state: TrainState, carried: UpdatedState, record: RecordGrads) -> tuple[UpdatedState, Any]:
        if record.crossing is not None:
            return self._use_late(state, carried, record)
        plan, records, states, now, part = self.plan, self.records, carried.states, record.now, record.part
        # The gathered layer is at hand: its shard is cut out of it, and not fetched again.
        old = plan.on_shards(record.params, part) if states.master is None else []
        arrays = old + records.read_opt(states, part, now.index())
        squares = carried.squares + plan.squares(record.grads, record.part, state)
        # Neither clipped nor checked against the layers that are still to come: the norm is known when all are updated.
        # A sum that is not finite stays so: no later layer of this step is updated either.
        shared, mean, ok = records.shared_of(states), [plan.mean(g) for g in record.grads], jnp.isfinite(squares)
        states, landing = self.record_update.update_layer(
            states, part, now.write_index(), mean, arrays, shared, carried.loss, ok, record.landing
        )
        return dataclasses.replace(carried, states=states, squares=squares), landing

    def _use_late(self, state: TrainState, carried: UpdatedState, record: RecordGrads) -> tuple[UpdatedState, Any]:
        """Update what was loaded beside the products, and leave it on the device: the next tick stores it."""
        plan, records, part, crossed = self.plan, self.records, record.part, record.crossed
        assert record.crossing is not None
        assert crossed is not None
        states, (opt, fetched) = record.crossing.states_of(crossed), record.crossing.loaded(crossed)
        old = plan.on_shards(record.params, part) if states.master is None else []
        squares = carried.squares + plan.squares(record.grads, part, state)
        # As in `use`.
        shared, mean, ok = records.shared_of(states), [plan.mean(g) for g in record.grads], jnp.isfinite(squares)
        moved = self.record_update.updated_layer(part, mean, old + opt, shared, carried.loss, ok)
        states, updated = _kept(records, states, part, record.now.layer, *moved)
        states, of_pieces = self._updated_pieces(carried, record, states, shared)
        pending = carried.pending | {part[0]: [*updated, *of_pieces]}
        landing = None if record.now.fetch is None else [*fetched, *(record.landing or ())]
        return dataclasses.replace(carried, states=states, squares=squares, pending=pending), landing

    def _updated_pieces(
        self, carried: UpdatedState, record: RecordGrads, states: FlatState, shared: Sequence[Array]
    ) -> tuple[FlatState, list[Array]]:
        """Update the tick's pieces of the head's leaves; returns the states, and what a later tick stores."""
        crossing, crossed, now, records = record.crossing, record.crossed, record.now, self.records
        assert crossing is not None
        assert crossed is not None
        late = crossing.record
        if not now.loads_pieces or carried.head is None:
            return states, carried.pending[record.part[0]][late.num_own :]
        piece, pending = late.piece(now.layer), list[Array]()
        for i, pieces in late.pieces.items():
            loaded, params = crossing.loaded_piece(crossed, i), list(states.params)
            num_opt, spec = len(records.opt_records((i,))), records.params[i]
            if states.master is None:  # the parameter is the weight
                weight = loaded[num_opt] if spec.is_away else pieces.read(spec, params[i], piece)
                loaded = [weight, *loaded[:num_opt]]
            grad = self.plan.mean(pieces.read(records.grads[i], carried.head.grads[i], piece))
            moved = self.record_update.updated_layer((i,), [grad], loaded, shared, carried.loss, carried.head.ok)
            (weight,), opt = moved
            pending += [*([weight] if states.master is not None else []), *opt]
            if spec.is_away:
                pending.append(records.cast(i, weight))
            else:  # on the device it is written in place
                params[i] = pieces.write(spec, params[i], piece, records.cast(i, weight))
                states = dataclasses.replace(states, params=params)
        return states, pending

    def drain(self, stack: StackPlan, layer: Array, carried: UpdatedState) -> UpdatedState:
        return dataclasses.replace(carried, states=self._drained(stack, carried.pending, layer, carried.states))

    def _drained(self, stack: StackPlan, pending: Mapping[int, Sequence[Array]], layer: Array, states: FlatState) -> FlatState:
        """Return the state with what the last tick of a run of layers updated."""
        late, values = self._late(stack.blocks), pending[stack.blocks[0]]
        # Of fewer pieces than layers the last one was stored by a tick.
        has_piece = stack is self.plan.of_stacks[-1] and late.lowest == stack.run.first
        return late.store(states, layer, dict(enumerate(values if has_piece else values[: late.num_own])))

    def grads(self, carried: UpdatedState) -> list[Array]:
        del carried
        return []

    def norm(self, result: BackwardResult[UpdatedState]) -> Array:
        """Return the global norm of the gradients."""
        ends = self._late_ends(result)
        return jnp.sqrt(result.carried.squares + self.plan.squares(list(ends.values()), list(ends), result.state))

    def _late_ends(self, result: BackwardResult[UpdatedState]) -> dict[int, Array]:
        """Return the gradients of the leaves that are no stack of layers, but for those that were updated before backward."""
        grads = dict(zip(self.plan.ends, result.ends, strict=True))
        return {i: grads[i] for i in self.plan.late_ends}

    def end(self, result: BackwardResult[UpdatedState]) -> Result:
        plan, update, states, norm = self.plan, self.record_update, result.carried.states, self.norm(result)
        ends, ok, one = self._late_ends(result), jnp.isfinite(norm), result.arrays.one
        if plan.drained is not None:
            drain = partial(self._drained, plan.drained, result.carried.pending)
            states = _end_beside_drain(plan, update, states, drain, ends, plan.mean, result.loss, ok, one)
        else:
            shared = self.records.shared_of(states)
            states = update.update_ends(states, ends, shared, result.loss, ok, one, plan.mean)
        states = _with_pieces(self.records, states, plan.head_pieces, Pieces.join)
        return closed(update, result, states, norm)


def _rounded(grad: Array) -> Array:
    """Return a gradient rounded to its dtype: XLA may leave that out where a gradient is used as soon as it is made."""
    if grad.dtype == jnp.float32:
        return grad
    bits = jnp.finfo(grad.dtype)
    return jax.lax.reduce_precision(grad, bits.nexp, bits.nmant)


def _with_pieces(
    records: StateRecords, states: FlatState, cut: Mapping[int, Pieces], change: Callable[[Pieces, Array], Array]
) -> FlatState:
    """Return the state with leaves cut into pieces, or joined again, by `Pieces.split` or `Pieces.join`."""
    for i, pieces in cut.items():
        params = list(states.params)
        params[i] = change(pieces, params[i])
        opt = [change(pieces, a) for a in records.opt_states(states, (i,))]
        states = records.replace(dataclasses.replace(states, params=params), (i,), opt)
    return states


def _kept(
    records: StateRecords, states: FlatState, part: Sequence[int], layer: Array, weights: list[Array], opt: list[Array]
) -> tuple[FlatState, list[Array]]:
    """Return the state with a layer's new parameters, where they rest on the device, and the record that is stored later."""
    params = [records.cast(i, w) for i, w in zip(part, weights, strict=True)]
    if not any(records.params[i].is_away for i in part):  # on the device they are written in place
        states, params = records.write_params(states, part, layer, params), []
    return states, [*(weights if states.master is not None else ()), *opt, *params]


def _end_beside_drain(
    plan: StreamedPlan,
    update: RecordUpdate,
    states: FlatState,
    drain: Callable[[Array, FlatState], FlatState],
    grads: Mapping[int, Array],
    ready: Callable[[Array], Array],
    loss: Array,
    ok: Array,
    one: Array,
) -> FlatState:
    """Update leaves while the record that was updated last is stored; each group is stored while the next one is loaded.

    Leaves that are larger than the record are updated after the others, in pieces.

    Args:
      plan: of the step.
      update: of records.
      states: all leaves.
      drain: (layer, states) -> the states with the record that was updated last.
      grads: by leaf.
      ready: a gradient -> the one to update with, float32.
      loss: f32[].
      ok: bool[], whether to update at all.
      one: i32[] holding 1, an argument of the program.
    """
    records, groups, last = update.records, plan.end_groups(), plan.drained
    assert last is not None

    def load(states: FlatState, group: Sequence[int]) -> dict[int, list[Array]]:
        return {i: update.load_end(states, i) for i in group}

    def body(layer: Array, states: FlatState) -> FlatState:
        states = drain(layer, states)
        loaded = load(states, groups[0])
        for number, group in enumerate(groups):
            stored = dict[int, list[Array]]()
            for i in group:
                states, stored[i] = update.updated_end(states, i, ready(grads[i]), loaded[i], loss, ok)
            if number + 1 < len(groups):
                stored, following = jax.lax.optimization_barrier((stored, states))
                loaded = load(following, groups[number + 1])
            for i, values in stored.items():
                specs = record_specs(records, (i,))
                states = with_ends(records, states, {i: [s.store(v) for s, v in zip(specs, values, strict=True)]})
        return states

    (layer,) = (n for phase in last.schedule.phases for n in phase.drain.tolist())
    states = one_trip(layer, body, states, plan.mesh)
    in_pieces = {i: grads[i] for i in plan.cut_ends}
    return update.update_ends(states, in_pieces, records.shared_of(states), loss, ok, one, ready)
