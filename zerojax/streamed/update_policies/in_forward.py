"""The update policy that updates a layer in the next step's forward, before the layer computes.

    backward   for t:  ...;  store g(l);  at the end the norm of all gradients is known
    forward    for t:  g, w, s = take(l);  scale by the norm of the step that computed g;  update;
                       x = block(all_gather(w));  write back w, s

All gradients of a step are known before any of them is used, so clipping, loss scaling and skipped
steps are as exact as in an update after backward. The update has no phase of its own: its records
cross the link while forward's products run. Between steps the state holds the gradients
(`TrainState.pending`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.schedule import Phase
from zerojax.optim import (
    DuplexResult,
    DuplexTransfer,
    LateRecord,
    RecordUpdate,
    clip_factor,
    kept_for_later,
)
from zerojax.ordering import adds_order, wait_for
from zerojax.state import (
    FlatState,
    Index,
    OnDevice,
    OnDisk,
    Pending,
    TrainState,
    pick,
    read_layer,
)
from zerojax.streamed.phases import Tick
from zerojax.streamed.plan import RecordLeaves, StackPlan, StreamedPlan
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    Begun,
    HeadDone,
    ParamSource,
    Result,
    closed,
    loss_scale,
)
from zerojax.streamed.update_policies.stored import GradStacks, RecordRing, StoredGrads
from zerojax.trees import Params

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdatingState:
    """The value that forward carries while it updates.

    Attributes:
      states: all leaves of the state; layers that forward has passed are updated.
      grads: stacks of the pending gradients, in the order of `StreamedPlan.stacked`. Forward only
        reads them; it carries them so that backward can overwrite them in place.
    """

    states: FlatState
    grads: list[Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Updated:
    """A layer's record after its update, which is written after the layer's products.

    Attributes:
      weights: float32 weights.
      opt: optimizer state.
    """

    weights: list[Array]
    opt: list[Array]


class PendingUpdate:
    """The update that a step left to the next one, applied record by record.

    Attributes:
      plan: plan of the step.
      record_update: the update by records.
      pending: the gradients, and the scalars of the step that computed them.
    """

    def __init__(self, plan: StreamedPlan, update: RecordUpdate, pending: Pending) -> None:
        """Apply `pending` with `update` to the records of `plan`."""
        self.plan = plan
        self.record_update = update
        self.records = update.records
        self.pending = pending

    @property
    def _loss(self) -> Array:
        return self.pending.scalars[0]

    def ready(self, grad: Array) -> Array:
        """Return the gradient to update with: the mean over microbatches, unscaled and clipped."""
        return self.pending.mean_grad(grad)

    def update_unstacked(self, states: FlatState) -> FlatState:
        """Return the states with the unstacked leaves updated."""
        pending = self.pending
        _, grads = split_grads(self.plan, pending.grads)
        unstacked = dict(zip(self.plan.unstacked, grads, strict=True))
        return self.record_update.update_unstacked(
            states, unstacked, pending.shared, self._loss, pending.ready, self.ready
        )

    def read_unstacked(self, states: FlatState) -> FlatState:
        """Return the states with updated parameters of embedding and head, on the device.

        Nothing is stored, and each leaf is updated in one piece.
        """
        _, grads = split_grads(self.plan, self.pending.grads)
        params = list(states.params)
        for i, grad in zip(self.plan.unstacked, grads, strict=True):
            (weight,), _, _ = self.update_record(
                (i,), [grad], self.record_update.load_unstacked_leaf(states, i)
            )
            params[i] = self.records.cast(i, weight)
        return dataclasses.replace(states, params=params)

    def update_record(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[Array],
        read: Sequence[Array],
        landing: list[Array] | None = None,
    ) -> tuple[list[Array], list[Array], list[Array] | None]:
        """Update one record; return its float32 weights and optimizer state, and `landing`.

        Args:
          leaf_ids: indices of the record's leaves.
          grads: the pending gradients, on the device.
          read: the float32 weights followed by the optimizer state, on the device.
          landing: values that are read from the same stacks before the update is written, or None.
        """
        pending = self.pending
        mean = [self.ready(grad) for grad in grads]
        return self.record_update.update(
            leaf_ids, mean, read, pending.shared, self._loss, pending.ready, landing
        )


@dataclasses.dataclass(frozen=True)
class _LinkTick:
    """What a tick of forward moves over the host link: see `zerojax.optim.late_records.LateTick`.

    Attributes:
      layer: the layer whose optimizer state is loaded, i32[], or None.
      fetch: the layer whose parameters are loaded, i32[], or None.
      stored: the layer that is stored, i32[].
    """

    layer: Array | None
    fetch: Array | None
    stored: Array
    loads_pieces: bool = False
    stores_pieces: bool = False


class UpdatingParams:
    """The layers' parameters, each record updated just before it is used."""

    updates = True

    def __init__(
        self, update: PendingUpdate, frozen: list[Any] | None, stores: bool = True
    ) -> None:
        """Provide the parameters that `update` makes, and the `frozen` stacks of parameters.

        Args:
          update: the update that is pending.
          frozen: the frozen stacks of parameters; None if only updated parameters are wanted.
          stores: whether updated records are stored; an evaluation only reads.
        """
        self.update = update
        self.stores = stores
        self.plan = update.plan
        self.records = update.records
        self.frozen = frozen

    def phase(self, stack: StackPlan) -> Phase:
        """Return the phase of a forward that updates."""
        return stack.schedule.phase("forward")

    def device_layers(self, stack: StackPlan) -> int:
        """Return the number of layers whose optimizer state stays on the device."""
        return stack.run.device_layers

    def fetch(self, carried: UpdatingState, leaves: RecordLeaves, index: Index) -> list[Array]:
        """Return the arrays of a record that are off the device: gradients, weights, frozen ones.

        All records of a ring have the same arrays. So the optimizer state of a layer is among them
        even if it is on the device, unless all other arrays are there too.
        """
        states = carried.states
        frozen = self.plan.away(self._frozen_leaves(leaves))
        fetched = self._ring(carried, leaves, index).fetch(states, index)
        return fetched + self.plan.read_params(self._stacks(states), frozen, index)

    def take(
        self,
        carried: UpdatingState,
        leaves: RecordLeaves,
        record: Sequence[Array],
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[list[Array], _Updated, list[Array] | None]:
        """Update a record; return the shards of its parameters, the record, and `in_flight`."""
        leaf_ids = leaves.trained
        states = carried.states
        frozen_leaves = self._frozen_leaves(leaves)
        num_frozen = len(self.plan.away(frozen_leaves))
        num_trained = len(record) - num_frozen
        ring = self._ring(carried, leaves, index)
        grads, read = ring.take(states, record[:num_trained], index)
        if self._orders_writes(states, leaves):
            weights, opt, in_flight = self.update.update_record(leaf_ids, grads, read, in_flight)
        else:
            weights, opt, _ = self.update.update_record(leaf_ids, grads, read)
        params = [self.records.cast(i, w) for i, w in zip(leaf_ids, weights, strict=True)]
        frozen = self.plan.take_params(
            self._stacks(states), frozen_leaves, record[num_trained:], index
        )
        return params + frozen, _Updated(weights, opt), in_flight

    def _orders_writes(self, states: FlatState, leaves: RecordLeaves) -> bool:
        """Return whether the update itself orders the write of its record after other reads.

        On GPUs `put` does, after the products. XLA for CPUs drops its barrier. There the record in
        flight passes through the update, unless the engine reads and writes all records.
        """
        if not self.stores or not adds_order(self.plan.mesh):
            return False
        opt = self.records.opt_states(states, leaves.trained)
        return any(not isinstance(a, OnDisk) for a in (*opt, *pick(states.params, leaves.trained)))

    def stores_beside(self, stack: StackPlan) -> bool:
        """Return whether a tick stores its updated record while it fetches a later one."""
        config = self.plan.config
        return (
            self.stores
            and self.records.both_ways
            and config.opt_state == "pinned_host"
            and config.prefetch_distance > 0
            and not stack.run.device_layers
            and not stack.groups
            and stack.num_layers > 1
            and len(self.records.opt_records(stack.blocks)) > 1
        )

    def build_transfer(
        self, carried: UpdatingState, stack: StackPlan, updated: _Updated | None, now: Tick
    ) -> tuple[DuplexTransfer, list[Array] | None] | None:
        """Return the transfers of a tick's updated record and of the record that it fetches."""
        if updated is None:
            return None
        leaf_ids = stack.blocks
        states, record = kept_for_later(
            self.records, carried.states, leaf_ids, now.consume, updated.weights, updated.opt
        )
        # The weights are loaded with the optimizer state if they are masters.
        has_master = self.records.layout.has_master
        late_tick = _LinkTick(now.fetch, None if has_master else now.fetch, now.consume)
        transfer = DuplexTransfer(
            LateRecord(self.records, leaf_ids),
            self.plan.forward_groups(),
            late_tick,
            [record],
            states,
        )
        if now.fetch is None:
            return transfer, None
        others = list[Array]()
        if self.plan.grads_away:
            others += self._ring(carried, stack.record, now.fetch).read_grads(now.fetch)
        frozen = self.plan.away(self._frozen_leaves(stack.record))
        return transfer, others + self.plan.read_params(self._stacks(states), frozen, now.fetch)

    def end_transfer(
        self,
        carried: UpdatingState,
        stack: StackPlan,
        transfer: DuplexTransfer,
        transferred: DuplexResult,
        in_flight: list[Array] | None,
    ) -> tuple[UpdatingState, list[Array] | None]:
        """Return the state after all transfers, and the fetched record in the order of `fetch`."""
        carried = dataclasses.replace(carried, states=transfer.finish_states(transferred))
        if in_flight is None:
            return carried, None
        opt, params = transfer.loaded(transferred)
        num_grads = len(stack.blocks) if self.plan.grads_away else 0
        return carried, [*in_flight[:num_grads], *params, *opt, *in_flight[num_grads:]]

    def put(
        self,
        carried: UpdatingState,
        leaves: RecordLeaves,
        updated: _Updated | None,
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[UpdatingState, list[Array] | None]:
        """Write an updated record after the record in flight has been read from the same stacks."""
        if updated is None or not self.stores:
            return carried, in_flight
        # XLA copies a stack whose reads and writes it cannot order.
        weights, opt, in_flight = jax.lax.optimization_barrier(
            (updated.weights, updated.opt, in_flight)
        )
        states = self.records.write_layer(carried.states, leaves.trained, index, weights, opt)
        return dataclasses.replace(carried, states=states), in_flight

    def _ring(self, carried: UpdatingState, leaves: RecordLeaves, index: Index) -> RecordRing:
        plan = self.plan
        opt_ahead = not leaves.state_on_device
        if opt_ahead and isinstance(index, OnDevice):
            weights_away = plan.params_away and not self.records.layout.has_master
            frozen_away = bool(plan.away(leaves.frozen))
            opt_ahead = plan.grads_away or weights_away or frozen_away
        return RecordRing(plan, self.records, carried.grads, leaves.trained, opt_ahead=opt_ahead)

    def _frozen_leaves(self, leaves: RecordLeaves) -> tuple[int, ...]:
        """Return the indices of a record's frozen leaves that are provided."""
        return () if self.frozen is None else leaves.frozen

    def _stacks(self, states: FlatState) -> list[Any]:
        """Return the stacks of parameters in the order of `StreamedPlan.stacks`."""
        return [*(states.params[i] for i in self.plan.stacked), *(self.frozen or [])]


class UpdateInForward(StoredGrads):
    """Leaves its gradients to the next step, whose forward updates each layer."""

    unstacked_first = True

    def __init__(self, plan: StreamedPlan, update: RecordUpdate) -> None:
        """Update with `update` by the records of `plan`."""
        super().__init__(plan)
        self.record_update = update
        self.records = update.records

    def begin_step(self, state: TrainState, token: Array) -> Begun:
        """Update the unstacked leaves, which forward reads first."""
        states = self._pending(state).update_unstacked(self.records.flat(state))
        begin = jnp.int32(0)
        # The engine's read-ahead expects the layers' records after the unstacked leaves.
        if (end := self.records.end_token(states)) is not None:
            begin, _ = wait_for(begin, end, self.plan.mesh)
        state = self._with_states(state, states)
        return Begun(state, self.plan.layout.join(state), token, begin)

    def source(self, begun: Begun) -> tuple[ParamSource[Any], Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a source that updates each layer before it is used."""
        state = begun.state
        assert state.pending is not None
        grads, _ = split_grads(self.plan, state.pending.grads)
        source = UpdatingParams(self._pending(state), self.plan.frozen_stacks(state))
        return source, UpdatingState(self.records.flat(state), grads)

    def settling_source(self, begun: Begun) -> tuple[ParamSource[Any], Any]:
        """Return a source that updates each layer, and provides no frozen parameters."""
        state = begun.state
        assert state.pending is not None
        grads, _ = split_grads(self.plan, state.pending.grads)
        source = UpdatingParams(self._pending(state), frozen=None)
        return source, UpdatingState(self.records.flat(state), grads)

    def read_source(self, state: TrainState) -> tuple[Params, UpdatingParams, UpdatingState]:
        """Return what an evaluation reads: parameters, and a source that stores nothing.

        Args:
          state: a state with a pending update.

        Returns:
          The tree of parameters, of which embedding and head are updated; the source of the layers;
          and the value that forward carries for it.
        """
        assert state.pending is not None
        states = self._pending(state).read_unstacked(self.records.flat(state))
        params = self.plan.layout.join(self._with_states(state, states))
        grads, _ = split_grads(self.plan, state.pending.grads)
        frozen = self.plan.frozen_stacks(state)
        source = UpdatingParams(self._pending(state), frozen, stores=False)
        return params, source, UpdatingState(states, grads)

    def updated_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index
    ) -> tuple[list[Array], list[Array]]:
        """Return the float32 weights and the optimizer state of one record after its update.

        Args:
          state: a state with a pending update, which is only read.
          leaf_ids: indices of the record's leaves.
          index: index of the record; unused for an unstacked leaf, whose record is the leaf.
        """
        assert state.pending is not None
        pending = self._pending(state)
        states = self.records.flat(state)
        stacks, unstacked = split_grads(self.plan, pending.pending.grads)
        if leaf_ids[0] in self.plan.unstacked:
            (leaf,) = leaf_ids
            grads = [unstacked[self.plan.unstacked.index(leaf)]]
            read = self.record_update.load_unstacked_leaf(states, leaf)
            weights, opt, _ = pending.update_record(leaf_ids, grads, read)
            return weights, opt
        specs = pick(self.plan.grads, leaf_ids)
        grads = read_layer(specs, self.plan.pick(stacks, leaf_ids), index)
        read = list[Array]()
        if states.master is None:
            read = self.records.read_params(states, leaf_ids, index)
        read = read + self.records.read_opt(states, leaf_ids, index)
        weights, opt, _ = pending.update_record(leaf_ids, grads, read)
        return weights, opt

    def end_forward(self, begun: Begun, carried: Any) -> tuple[TrainState, Array]:
        """Return the updated state, whose pending gradients backward overwrites."""
        state = begun.state
        assert state.pending is not None
        _, unstacked = split_grads(self.plan, state.pending.grads)
        pending = dataclasses.replace(state.pending, grads=[*carried.grads, *unstacked])
        state = dataclasses.replace(self._with_states(state, carried.states), pending=pending)
        return state, begun.token

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> GradStacks:
        """Return the value that backward carries; it overwrites the gradients already applied."""
        del head, grads
        assert state.pending is not None
        stacks, _ = split_grads(self.plan, state.pending.grads)
        return GradStacks(stacks, jnp.float32(0), token)

    def grads(self, carried: GradStacks) -> list[Array]:
        """Return no stacks: the state holds the gradients."""
        del carried
        return []

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        """Leave the gradients to the next step, and finish the step."""
        state = result.state
        norm = self.norm(result)
        factor = clip_factor(norm, self.config.clip_norm)
        states = self.records.flat(state)
        # The next step needs this step's loss, factors of the gradients and shared scalars.
        # `closed` then advances the scalars in the state.
        pending = Pending(
            self.next_grads(result),
            self.records.list_shared(states),
            jnp.stack([result.loss, factor, loss_scale(state), jnp.float32(self.plan.count)]),
            jnp.isfinite(norm),
        )
        return closed(self.record_update, result, states, norm, pending)

    def next_grads(self, result: BackwardResult[GradStacks]) -> list[Any]:
        """Return the gradients of a step, stacked leaves first."""
        return [*result.carried.grads, *self.stored_unstacked(result)]

    def _pending(self, state: TrainState) -> PendingUpdate:
        assert state.pending is not None
        return PendingUpdate(self.plan, self.record_update, state.pending)

    def _with_states(self, state: TrainState, states: FlatState) -> TrainState:
        params, master, opt_state = self.records.trees(state, states)
        return dataclasses.replace(state, params=params, master=master, opt_state=opt_state)


def split_grads(plan: StreamedPlan, grads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return pending gradients of `plan.stacked` and of `plan.unstacked`.

    Args:
      plan: plan of the step.
      grads: the field `grads` of a `Pending`, which has stacked leaves first.
    """
    num_stacked = len(plan.stacked)
    return list(grads[:num_stacked]), list(grads[num_stacked:])
