"""The update policies that store gradients until all are known, and then update on the device."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.schedule import Phase
from zerojax.models import BLOCKS
from zerojax.optim import (
    DuplexTransfer,
    LateRecord,
    RecordUpdate,
    UnstoredRecords,
    build_update,
    clip_factor,
    kept_for_later,
)
from zerojax.ordering import adds_order, wait_for
from zerojax.state import (
    FlatState,
    Index,
    StateRecords,
    TileNumber,
    TrainState,
    is_stored,
    pick,
    read_layer,
    write_layer,
)
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.update_policies.beside_drain import end_beside_drain
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    HeadDone,
    PlainForward,
    RecordGrads,
    Result,
    closed,
)

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradStacks:
    """The value that backward carries if gradients are stored.

    Attributes:
      grads: a stack for each stacked leaf, on the device, in host memory or OnDisk; empty if
        callbacks stash gradients.
      squares: f32[], the sum of squares of the unscaled gradients so far.
      token: orders the callbacks of the host update.
      params: stacks of parameters on the device, by leaf, for a delayed update; layers that
        backward has passed have new parameters.
    """

    grads: list[Any]
    squares: Array
    token: Array
    params: dict[int, Array] = dataclasses.field(default_factory=dict)


class StoredGrads(PlainForward):
    """Base of the update policies that store gradients until all are known."""

    unstacked_first = False

    def __init__(self, plan: StreamedPlan) -> None:
        """Store gradients as `plan` says."""
        self.plan = plan
        self.config = plan.config

    def load_unstacked(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        """Load no records during the head."""
        del state
        return y, {}

    def split_unstacked(self, carried: GradStacks) -> tuple[GradStacks, dict[int, list[Array]]]:
        """Return no records to store in the first tick."""
        return carried, {}

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> GradStacks:
        """Return the value that backward carries, with empty stacks of gradients."""
        del state, head
        # Stacks in host memory are passed to the program, which writes them in place.
        return GradStacks(grads or self.plan.empty_grads(), jnp.float32(0), token)

    def params(self, state: TrainState, carried: GradStacks) -> list[Array]:
        """Return the stacks of parameters from before the step."""
        del carried
        return jax.tree.leaves(state.params[BLOCKS], is_leaf=is_stored)

    def use(
        self, state: TrainState, carried: GradStacks, record: RecordGrads
    ) -> tuple[GradStacks, Any]:
        """Store one record's gradients and add their squares."""
        # Squares are summed while the gradients are available, so no stack is read a second time
        # for the norm.
        squares = carried.squares + self.plan.squares(record.grads, record.leaf_ids, state)
        carried = self.store(carried, self.as_stored(record))
        return dataclasses.replace(carried, squares=squares), record.in_flight

    def as_stored(self, record: RecordGrads) -> RecordGrads:
        """Return a record with its gradients in the dtype in which they are stored."""
        grads = self.plan.stored(record.grads, record.leaf_ids)
        return dataclasses.replace(record, grads=grads)

    def store(self, carried: GradStacks, record: RecordGrads) -> GradStacks:
        """Write one record's gradients to their stacks."""
        plan = self.plan
        leaf_ids = record.leaf_ids
        after = write_layer(
            pick(plan.grads, leaf_ids),
            plan.pick(carried.grads, leaf_ids),
            record.now.layer,
            record.grads,
        )
        return dataclasses.replace(carried, grads=plan.put(carried.grads, leaf_ids, after))

    def build_transfer(
        self,
        carried: GradStacks,
        now: Tick,
        leaf_ids: Sequence[int],
        unstacked: Mapping[int, list[Array]],
    ) -> DuplexTransfer | None:
        """Return None: only the fetched record is in flight during a tick's products."""
        del carried, now, leaf_ids, unstacked
        return None

    def drain(self, stack: StackPlan, number: int, layer: Array, carried: GradStacks) -> GradStacks:
        """Raise AssertionError: gradients are never stored late."""
        raise AssertionError(f"gradients are never stored late: {stack.name}, {number}")

    def grads(self, carried: GradStacks) -> list[Array]:
        """Return the stacks of gradients in host memory, or none."""
        return carried.grads if self.plan.grads_in_memory else []

    def read_grads(self, carried: GradStacks, leaf_ids: Sequence[int], index: Index) -> list[Array]:
        """Return the stored gradients of one record, on the device."""
        return read_layer(
            pick(self.plan.grads, leaf_ids), self.plan.pick(carried.grads, leaf_ids), index
        )

    def stored_unstacked(self, result: BackwardResult[GradStacks]) -> list[Array]:
        """Return the gradients of the unstacked leaves in the dtype in which they are stored."""
        return self.plan.stored(result.unstacked, self.plan.unstacked)

    def norm(self, result: BackwardResult[GradStacks]) -> Array:
        """Return the global norm of the unscaled gradients, before they are stored."""
        # The squares of the unstacked leaves are added last: a tied embedding's gradient is
        # complete only after backward.
        return jnp.sqrt(
            result.carried.squares
            + self.plan.squares(result.unstacked, self.plan.unstacked, result.state)
        )


class GradsAlone(StoredGrads):
    """Update policy that updates nothing and returns the gradients, stored on the device."""

    def use(
        self, state: TrainState, carried: GradStacks, record: RecordGrads
    ) -> tuple[GradStacks, Any]:
        """Store one record's gradients."""
        del state
        return self.store(carried, self.as_stored(record)), record.in_flight

    def tree(self, result: BackwardResult[GradStacks]) -> Any:
        """Return the unscaled mean gradients, float32, as a tree like the trainable parameters."""
        plan = self.plan
        leaf_ids = (*plan.stacked, *plan.unstacked)
        unstacked = self.stored_unstacked(result)
        grads = dict(zip(leaf_ids, [*result.carried.grads, *unstacked], strict=True))
        mean = [plan.unscaled(grads[i], result.state) for i in range(len(grads))]
        return jax.tree.unflatten(jax.tree.structure(plan.layout.abstract_params), mean)


class UpdateWholeTree(StoredGrads):
    """Update policy that runs any optimizer once, on full trees.

    Everything that the optimizer reads is on the device.
    """

    def __init__(self, plan: StreamedPlan, tx: optax.GradientTransformation) -> None:
        """Build the update of the full tree with `tx`."""
        super().__init__(plan)
        self.update = build_update(tx, plan.layout)

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        """Update the full tree and finish the step."""
        plan = self.plan
        # By index, because the update takes the leaves in the order of the parameter tree.
        leaf_ids = (*plan.stacked, *plan.unstacked)
        unstacked = self.stored_unstacked(result)
        grads = dict(zip(leaf_ids, [*result.carried.grads, *unstacked], strict=True))
        tree = jax.tree.structure(result.state.params)
        # Still scaled: the update of full trees divides by the loss scale itself, then computes the
        # norm and clips.
        mean = jax.tree.unflatten(tree, [plan.mean(grads[i]) for i in range(len(grads))])
        if self.config.grads_dtype is None:
            return self.update(result.state, result.loss, mean)
        return self.update(result.state, result.loss, mean, self.norm(result))


class UpdateByLayer(StoredGrads):
    """Update policy that updates in a loop over layers, and over each group's tiles.

    Each record is loaded from its tier and stored back.
    """

    def __init__(self, plan: StreamedPlan, update: RecordUpdate) -> None:
        """Update with `update` by the records of `plan`."""
        super().__init__(plan)
        self.record_update = update
        self.records = update.records
        # The layer updated first is the layer whose gradient was stored last. On disk, that write
        # finishes while the unstacked leaves are updated.
        self.unstacked_first = plan.layout.disk is not None

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        """Update the records of all layers and the unstacked leaves, and finish the step."""
        plan = self.plan
        update = self.record_update
        records = self.records
        state = result.state
        # The update's first fetches must come after backward.
        begin, squares = wait_for(result.begin, result.carried.squares, plan.mesh)
        result = dataclasses.replace(
            result, carried=dataclasses.replace(result.carried, squares=squares)
        )
        norm = self.norm(result)
        ok = jnp.isfinite(norm)
        factor = clip_factor(norm, self.config.clip_norm)

        def ready(grad: Array) -> Array:
            # Unscale first, then clip: `factor` is computed from the norm of unscaled gradients.
            grad = plan.unscaled(grad, state)
            return grad if self.config.clip_norm is None else grad * factor

        states = records.flat(state)
        # Every record is updated with the scalars from before the step; `closed` advances them
        # once.
        shared = records.list_shared(states)
        unstacked = dict(zip(plan.unstacked, self.stored_unstacked(result), strict=True))
        if self.unstacked_first:
            states = update.update_unstacked(states, unstacked, shared, result.loss, ok, ready)
            # The engine's read-ahead expects the layers' records after the unstacked leaves
            # (`zerojax.streamed.plan.moves`).
            if (token := records.end_token(states)) is not None:
                begin, _ = wait_for(begin, token, plan.mesh)
        states, pending = self._update_layers(result, states, begin, ready, ok)
        if plan.drained is not None:
            late = LateRecord(records, plan.drained.blocks)
            states = end_beside_drain(
                plan, update, states, late, pending, unstacked, ready, result.loss, ok
            )
        elif not self.unstacked_first:
            states = update.update_unstacked(states, unstacked, shared, result.loss, ok, ready)
        return closed(update, result, states, norm)

    def _list_loops(self, begin: Array) -> list["UpdateLoop"]:
        """Return the loops of the update, in order.

        For each run, these are the layers' records, then all L T tiles of each group, in the order
        in which the engine reads ahead (`list_moves`).
        """
        loops = list[UpdateLoop]()
        for stack in self.plan.of_stacks:
            layers = UpdateLoop(
                stack.schedule.phase("update"),
                begin,
                stack.blocks,
                on_device=stack.run.device_layers,
                is_last=stack is self.plan.drained,
                follows=bool(loops) and not stack.run.starts_stack,
            )
            loops.append(layers)
            for group, tiles in stack.loops:
                if group.leaves:  # otherwise all of the group is frozen
                    phase = tiles.phase("update")
                    loops.append(UpdateLoop(phase, begin, group.leaves, 0, TileNumber))
        return loops

    def _update_layers(
        self,
        result: BackwardResult[GradStacks],
        states: FlatState,
        begin: Array,
        ready: Callable[[Array], Array],
        ok: Array,
    ) -> tuple[FlatState, UnstoredRecords]:
        """Update the records of all layers, one loop after another.

        Args:
          result: results of backward.
          states: all leaves of the state.
          begin: i32[] zero, known when the first loop may begin.
          ready: function from a stored gradient to the gradient to update with.
          ok: bool[], whether to update at all.

        Returns:
          The states, and the last loop's last record if it is stored late, together with the
          unstacked leaves.
        """
        plan = self.plan
        loops = self._list_loops(begin)
        tokens = list[Array]()
        pending = UnstoredRecords()
        for number, loop in enumerate(loops):
            # The engine reads and writes records in one order, so loops over records on disk must
            # not be reordered.
            if tokens:
                loop = dataclasses.replace(loop, begin=wait_for(loop.begin, tokens, plan.mesh)[0])
            elif loop.follows and plan.grads_away and loops[number - 1].leaf_ids:
                loop, states = self._after(loop, loops[number - 1], states)
            states, pending = self.update_records(result, states, loop, ready, ok)
            # A loop with nothing on disk has no tokens: the next loop waits for the tokens of the
            # loop before it.
            tokens = self.records.tokens(states, loop.leaf_ids) or tokens
        return states, pending

    def _after(
        self, loop: "UpdateLoop", before: "UpdateLoop", states: FlatState
    ) -> tuple["UpdateLoop", FlatState]:
        """Order a loop's first fetches after the loop before it, over layers of the same stack.

        Fetches of the state are already ordered, since the loop before it returns the state.
        Gradients are only read.
        """
        mesh = self.plan.mesh
        if not adds_order(mesh):
            begin, states = jax.lax.optimization_barrier((loop.begin, states))
            return dataclasses.replace(loop, begin=begin), states
        # XLA for CPUs drops barriers (`wait_for`), so the smallest array that the loop before it
        # wrote last is read.
        least = min(before.leaf_ids, key=lambda i: math.prod(self.plan.leaves[i].record_shape))
        written = self.records.params[least].read(
            states.params[least], before.at(jnp.int32(before.phase.layer[-1]))
        )
        return dataclasses.replace(loop, begin=wait_for(loop.begin, written, mesh)[0]), states

    def update_records(
        self,
        result: BackwardResult[GradStacks],
        states: FlatState,
        loop: "UpdateLoop",
        ready: Callable[[Array], Array],
        ok: Array,
    ) -> tuple[FlatState, UnstoredRecords]:
        """Update the records of one loop.

        Args:
          result: results of backward.
          states: all leaves of the state.
          loop: the loop over the records.
          ready: function from a stored gradient to the gradient to update with.
          ok: bool[], whether to update at all.

        Returns:
          The states, and the last record if it is stored late, together with the unstacked leaves.
        """
        ticks = _UpdateTicks(self, result, loop, states, ready, ok)
        return run_phase(
            loop.phase,
            loop.begin,
            (states, ticks.first_pending(states)),
            ticks.update if ticks.late is None else ticks.update_late,
            mesh=self.plan.mesh,
            slices_host=self.records.slices_host,
            fetch=lambda carry, layer: ticks.ring.fetch(carry[0], layer),
            device_layers=loop.on_device,
            drain=ticks.drain,
            drains_last=not loop.is_last,
        )


class _UpdateTicks:
    """The ticks of one loop over records; the carry is the states and the records not yet stored.

    Attributes:
      ring: the arrays that are fetched ahead.
      late: how records are stored late; None if each record is stored in its own tick.
    """

    def __init__(
        self,
        policy: UpdateByLayer,
        result: BackwardResult[GradStacks],
        loop: "UpdateLoop",
        states: FlatState,
        ready: Callable[[Array], Array],
        ok: Array,
    ) -> None:
        self.policy = policy
        self.result = result
        self.loop = loop
        self.ready = ready
        self.ok = ok
        self.shared = policy.records.list_shared(states)
        self.ring = RecordRing(
            policy.plan,
            policy.records,
            result.carried.grads,
            loop.leaf_ids,
            at=loop.at,
            some_on_device=loop.on_device > 0,
        )
        self.late = LateRecord(policy.records, loop.leaf_ids) if loop.phase.stores_late else None

    def first_pending(self, states: FlatState) -> UnstoredRecords:
        """Return the records that are not yet stored before the first tick."""
        if self.late is None:
            return UnstoredRecords()
        return self.late.empty(states, self.loop.phase.stores_late)

    def update(self, carry: Any, now: Tick) -> tuple[Any, Any]:
        """Update a record and store it."""
        states, pending = carry
        index = now.index(self.loop.at)
        grads, old = self.ring.take(states, now.record or [], index, now.on_device)
        weights, opt, in_flight = self._updated(grads, old, now)
        states = self.policy.records.write_layer(states, self.loop.leaf_ids, index, weights, opt)
        return (states, pending), in_flight

    def update_late(self, carry: Any, now: Tick) -> tuple[Any, Any]:
        """Update a record, and store an earlier one while this one is loaded."""
        assert self.late is not None
        states, pending = carry
        leaf_ids = self.loop.leaf_ids
        states, old = self._cross(self.late, now, pending, states)
        grads = self.ring.read_grads(now.layer)
        weights, opt, _ = self._updated(grads, old, now)
        states, updated = kept_for_later(
            self.policy.records, states, leaf_ids, now.layer, weights, opt
        )
        return (states, [*pending[1:], updated]), None

    def drain(self, number: int, layer: Array, carry: Any) -> Any:
        """Store a record after the last tick."""
        assert self.late is not None
        states, pending = carry
        return self.late.drain(states, number, layer, pending)

    def _updated(
        self, grads: list[Array], old: list[Array], now: Tick
    ) -> tuple[list[Array], list[Array], Any]:
        """Return a record's new weights and optimizer state, and the record in flight."""
        mean = [self.ready(g) for g in grads]
        return self.policy.record_update.update(
            self.loop.leaf_ids, mean, old, self.shared, self.result.loss, self.ok, now.in_flight
        )

    def _cross(
        self, late: LateRecord, now: Tick, pending: UnstoredRecords, states: FlatState
    ) -> tuple[FlatState, list[Array]]:
        """Load a tick's record while an earlier one is stored.

        Returns the states, and the arrays that `update` reads.
        """
        transfer = DuplexTransfer(late, self.policy.plan.update_groups(), now, pending, states)
        transferred = transfer.cross()
        states = transfer.finish_states(transferred)
        (opt, _) = transfer.loaded(transferred)
        if states.master is None:
            old = self.policy.records.read_params(states, late.leaf_ids, now.layer)
        else:
            old = []
        return states, old + opt


class RecordRing:
    """Splits a record's arrays into fetched-ahead arrays and arrays read in the record's tick."""

    def __init__(
        self,
        plan: StreamedPlan,
        records: StateRecords,
        grads: Sequence[Any],
        leaf_ids: Sequence[int],
        *,
        at: Callable[[Array], Index] = lambda layer: layer,
        some_on_device: bool = False,
        opt_ahead: bool = True,
    ) -> None:
        """Split the records of one loop.

        Args:
          plan: plan of the step.
          records: how the state is stored.
          grads: stacks of gradients, in the order of `StreamedPlan.stacked`.
          leaf_ids: indices of a record's leaves.
          at: function from a record's number to its index.
          some_on_device: whether some layers have their optimizer state on the device.
          opt_ahead: whether the optimizer state is fetched ahead, if it is off the device.
        """
        self.plan = plan
        self.records = records
        self.leaf_ids = leaf_ids
        self.at = at
        self._specs = pick(plan.grads, leaf_ids)
        self._grads = plan.pick(grads, leaf_ids)
        self._has_master = records.layout.has_master
        self.grads_away = plan.grads_away
        self.old_away = not self._has_master and plan.params_away
        # A ring holds records of one form. If some layers fetch gradients or parameters but have
        # their optimizer state on the device, the optimizer state is not part of any layer's
        # record.
        is_mixed = some_on_device and (self.old_away or plan.grads_away)
        self.opt_ahead = opt_ahead and plan.config.opt_state != "device" and not is_mixed

    def fetch(self, states: FlatState, number: Any) -> list[Array]:
        """Fetch the arrays of a record that are fetched ahead, by the record's number."""
        index = self.at(number)
        record = list[Array]()
        if self.grads_away:
            record += self.read_grads(index)
        if self.old_away:
            record += self.records.read_params(states, self.leaf_ids, index)
        if self.opt_ahead:
            record += self.records.read_opt(states, self.leaf_ids, index)
        return record

    def take(
        self, states: FlatState, record: Sequence[Array], index: Index, on_device: bool = False
    ) -> tuple[list[Array], list[Array]]:
        """Return a record's gradients, and the arrays that `RecordUpdate.update` reads.

        Args:
          states: all leaves of the state.
          record: the arrays that `fetch` returned.
          index: index of the record.
          on_device: whether the record's optimizer state is on the device.
        """
        leaf_ids = self.leaf_ids
        record = list(record)
        num = len(leaf_ids)
        old = list[Array]()
        if self.grads_away:
            grads = record[:num]
            record = record[num:]
        else:
            grads = self.read_grads(index)
        if self.old_away:
            old = record[:num]
            record = record[num:]
        elif not self._has_master:
            old = self.records.read_params(states, leaf_ids, index)
        if self.opt_ahead and not on_device:
            opt = record
        else:
            opt = self.records.read_opt(states, leaf_ids, index)
        return grads, old + opt

    def read_grads(self, index: Index) -> list[Array]:
        """Return a record's stored gradients, on the device."""
        return read_layer(self._specs, self._grads, index)


@dataclasses.dataclass(frozen=True)
class UpdateLoop:
    """A loop of the update over records.

    Attributes:
      phase: phase of the schedule.
      begin: i32[] zero, known when the loop may begin.
      leaf_ids: indices of a record's leaves.
      on_device: number of layers whose optimizer state stays on the device.
      at: function from a record's number to its index.
      is_last: whether the last record, if stored late, is stored with the unstacked leaves.
      follows: whether the previous loop is over layers of the same stack.
    """

    phase: Phase
    begin: Array
    leaf_ids: Sequence[int]
    on_device: int
    at: Callable[[Array], Index] = lambda layer: layer
    is_last: bool = False
    follows: bool = False
