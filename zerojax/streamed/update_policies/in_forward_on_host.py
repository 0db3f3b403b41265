"""The update policy whose host updates a layer before the next step's forward asks for it.

    backward     stash g(l) in host memory; at the end the norm of all gradients is known
    next step    the host starts: embedding and head, then l = 0, 1, ...;
                 forward, for t:  w = install(l), which waits for layer l alone;
                                  x = block(all_gather(w), x)

It computes the same numbers as an update on the host after backward. Workers run only inside a
program, which ends after they have ended. So a state that is dropped, donated or saved between
steps has no worker.

Kernels overwrite parameters in host memory, which XLA takes for constant, and may read early: for
CPUs it casts full stacks of 16-bit parameters to float32 when the program begins. So forward takes
every parameter from the callback that waits for it, and backward reads stacks that depend on these
callbacks: on CPUs forward writes each layer to its stack, over the same numbers, and on GPUs it
passes the stacks through a barrier with the token.

A read of an unsettled state applies the pending update on the device, like `UpdateInForward`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.schedule import Phase
from zerojax.optim import DuplexResult, DuplexTransfer, HostUpdate, RecordUpdate
from zerojax.ordering import adds_order
from zerojax.state import (
    Index,
    Pending,
    TrainState,
)
from zerojax.streamed.phases import Tick
from zerojax.streamed.plan import RecordLeaves, StackPlan, StreamedPlan
from zerojax.streamed.update_policies.in_forward import (
    PendingUpdate,
    UpdateInForward,
    UpdatingParams,
    UpdatingState,
    split_grads,
)
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    Begun,
    HeadDone,
    ParamSource,
    RecordGrads,
)
from zerojax.streamed.update_policies.stored import GradStacks
from zerojax.trees import Params

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InstallingState:
    """The value that forward carries while it installs new parameters.

    Attributes:
      params: stacks of parameters, by leaf; layers that forward has passed have new parameters.
      token: i32[devices], orders the callbacks of a device.
    """

    params: dict[int, Array]
    token: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Installed:
    """A layer's new parameters, on their shards, and the next token."""

    params: list[Array]
    token: Array


class InstalledParams:
    """The layers' parameters, each taken over from the host just before it is used."""

    updates = True

    def __init__(self, plan: StreamedPlan, host: HostUpdate, state: TrainState) -> None:
        """Provide the parameters that `host` makes from the pending gradients of `state`."""
        self.plan = plan
        self.host = host
        self.records = host.records
        assert state.pending is not None
        self.ready = state.pending.ready
        self.frozen = plan.frozen_stacks(state)

    def phase(self, stack: StackPlan) -> Phase:
        """Return the phase of a forward that takes over what the host has updated."""
        return stack.schedule.phase("forward")

    def device_layers(self, stack: StackPlan) -> int:
        """Return 0: the program reads no optimizer state."""
        del stack
        return 0

    def fetch(self, carried: InstallingState, leaves: RecordLeaves, index: Index) -> list[Array]:
        """Return a layer's frozen parameters that are off the device."""
        del carried
        return self.plan.read_params(self._stacks(), self.plan.away(leaves.frozen), index)

    def take(
        self,
        carried: InstallingState,
        leaves: RecordLeaves,
        record: Sequence[Array],
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[list[Array], _Installed, list[Array] | None]:
        """Wait for the host's update of a layer; return the shards of its parameters."""
        layer = _layer(index)
        new, token = self.host.receive(leaves.trained, layer, carried.token)
        params = list[Array]()
        for i, value in zip(leaves.trained, new, strict=True):
            spec = self.records.params[i]
            if not self.host.params_away:
                value = jnp.where(self.ready, value, spec.read(carried.params[i], layer))
            params.append(jax.lax.with_sharding_constraint(value, spec.sharding))
        frozen = self.plan.take_params(self._stacks(), leaves.frozen, record, layer)
        return params + frozen, _Installed(params, token), in_flight

    def stores_beside(self, stack: StackPlan) -> bool:
        """Return False: the program stores nothing over the host link."""
        del stack
        return False

    def build_transfer(
        self, carried: InstallingState, stack: StackPlan, updated: _Installed | None, now: Tick
    ) -> None:
        """Return None: the program stores nothing over the host link."""
        del carried, stack, updated, now

    def end_transfer(
        self,
        carried: InstallingState,
        stack: StackPlan,
        transfer: DuplexTransfer,
        transferred: DuplexResult,
        in_flight: list[Array] | None,
    ) -> tuple[InstallingState, list[Array] | None]:
        """Raise AssertionError: the program stores nothing over the host link."""
        raise AssertionError(f"nothing is stored over the host link in forward: {stack.name}")

    def put(
        self,
        carried: InstallingState,
        leaves: RecordLeaves,
        updated: _Installed | None,
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[InstallingState, list[Array] | None]:
        """Write the new parameters, unless kernels have written them and a barrier says so."""
        if updated is None:
            return carried, in_flight
        params = dict(carried.params)
        token = updated.token
        if self.host.params_away and not adds_order(self.plan.mesh):
            params, token = jax.lax.optimization_barrier((params, token))
            return InstallingState(params, token), in_flight
        for i, value in zip(leaves.trained, updated.params, strict=True):
            params[i] = self.records.params[i].write(params[i], index, value)
        return InstallingState(params, token), in_flight

    def _stacks(self) -> list[Any]:
        """Return stacks in the order of `StreamedPlan.stacks`, of which frozen ones are read."""
        return [*([None] * len(self.plan.stacked)), *self.frozen]


def _layer(index: Index) -> Array:
    """Return the number of a layer, whose index is the number itself: tiles are not updated."""
    assert isinstance(index, jax.Array)
    return index


class _UpdatingInTick(UpdatingParams):
    """Parameters for an evaluation of an unsettled state, updated on the device.

    An evaluation fetches ahead only if parameters are off the device. Otherwise the record that is
    updated is fetched in the tick that takes it.
    """

    def phase(self, stack: StackPlan) -> Phase:
        """Return the phase of a forward that only reads."""
        return stack.reading

    def take(
        self,
        carried: UpdatingState,
        leaves: RecordLeaves,
        record: Sequence[Array],
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[list[Array], Any, list[Array] | None]:
        """Update a layer; return the shards of its parameters."""
        record = record or self.fetch(carried, leaves, index)
        return super().take(carried, leaves, record, index, in_flight)


class HostUpdateInForward(UpdateInForward):
    """Leaves its gradients on the host, which updates each layer for the next step's forward."""

    def __init__(self, plan: StreamedPlan, update: RecordUpdate, host: HostUpdate) -> None:
        """Update on the host with `host`; `update` is for reads of an unsettled state."""
        super().__init__(plan, update)
        self.host = host

    def begin_step(self, state: TrainState, token: Array) -> Begun:
        """Start the host's update, and take over the unstacked leaves."""
        host = self.host
        pending = state.pending
        assert pending is not None
        states = self.records.flat(state)
        token = host.start(states, pending, token)
        new, token = host.receive(self.plan.unstacked, jnp.int32(0), token)
        params = list(states.params)
        for i, value in zip(self.plan.unstacked, new, strict=True):
            if not host.params_away:
                value = self.records.params[i].store(jnp.where(pending.ready, value, params[i]))
            params[i] = value
        read = self._with_states(state, dataclasses.replace(states, params=params))
        # Kernels have written parameters in host memory in place: the state's arrays stay.
        state = state if host.params_away else read
        return Begun(state, self.plan.layout.join(read), token, jnp.int32(0))

    def source(self, begun: Begun) -> tuple[ParamSource[Any], Any]:
        """Return a source that takes over each layer's parameters before it is used."""
        stored = self.records.flat(begun.state).params
        params = {i: stored[i] for i in self.plan.stacked}
        source = InstalledParams(self.plan, self.host, begun.state)
        return source, InstallingState(params, begun.token)

    def settling_source(self, begun: Begun) -> tuple[ParamSource[Any], Any]:
        """Return the source of `source`; it fetches frozen parameters that nothing uses."""
        return self.source(begun)

    def read_source(self, state: TrainState) -> tuple[Params, UpdatingParams, UpdatingState]:
        """Return what an evaluation reads; see `UpdateInForward.read_source`."""
        params, source, carried = super().read_source(state)
        return params, _UpdatingInTick(source.update, source.frozen, stores=False), carried

    def end_forward(self, begun: Begun, carried: Any) -> tuple[TrainState, Array]:
        """Return the updated state after the host's update has ended."""
        state = begun.state
        assert state.pending is not None
        states = self.records.flat(state)
        params = list(states.params)
        for i, stack in carried.params.items():
            params[i] = stack
        # The memory that kernels have worked on is an operand here, so that XLA for CPUs puts
        # nothing else there before they have ended.
        token = self.host.finish(states, state.pending, carried.token)
        return self._with_states(state, dataclasses.replace(states, params=params)), token

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> GradStacks:
        """Return the value that backward carries; callbacks overwrite the pending gradients."""
        del state, head, grads
        return GradStacks([], jnp.float32(0), token)

    def store(self, carried: GradStacks, record: RecordGrads) -> GradStacks:
        """Stash one layer's gradients on the host."""
        token = self.host.stash(record.leaf_ids, record.now.layer, record.grads, carried.token)
        return dataclasses.replace(carried, token=token)

    def next_grads(self, result: BackwardResult[GradStacks]) -> list[Any]:
        """Stash the gradients of the unstacked leaves; return the arrays that hold all of them."""
        self.host.stash_unstacked(self.stored_unstacked(result), result.carried.token)
        pending = result.state.pending
        assert pending is not None
        # The arrays are passed on unchanged: callbacks have written the gradients to their memory.
        return pending.grads

    def _pending(self, state: TrainState) -> PendingUpdate:
        """Return the pending update with the gradients of the unstacked leaves on the device."""
        pending = state.pending
        assert pending is not None
        stacks, unstacked = split_grads(self.plan, pending.grads)
        loaded = list[Array]()
        for i, grad in zip(self.plan.unstacked, unstacked, strict=True):
            spec = dataclasses.replace(self.plan.grads[i], tier=self.config.opt_state)
            loaded.append(spec.load(grad))
        on_device = Pending([*stacks, *loaded], pending.shared, pending.scalars, pending.ready)
        return PendingUpdate(self.plan, self.record_update, on_device)
