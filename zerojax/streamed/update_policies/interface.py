"""The interface of a streamed step's update policies, and the inputs that backward gives them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from host_offload.schedule import Phase
from zerojax.models import BLOCKS
from zerojax.optim import DuplexResult, DuplexTransfer, RecordUpdate, finish
from zerojax.state import FlatState, Index, Pending, TrainState
from zerojax.streamed.phases import Tick
from zerojax.streamed.plan import RecordLeaves, StackPlan, StreamedPlan
from zerojax.trees import Params

Array = jax.Array

Result = tuple[TrainState, dict[str, Array]]
Carried = TypeVar("Carried")
"""The value that backward carries for an update policy: a pytree."""


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardResult(Generic[Carried]):
    """Results of backward.

    Attributes:
      state: the state before the step.
      loss: f32[], the mean over microbatches.
      carried: the value that backward carried for the update policy.
      unstacked: summed gradients of the unstacked leaves.
      begin: i32[] zero, known when backward may begin; the update must not start before it either.
    """

    state: TrainState
    loss: Array
    carried: Carried
    unstacked: list[Array]
    begin: Array


class Begun(NamedTuple):
    """What a step has before its forward.

    Attributes:
      state: the state, with unstacked leaves that are up to date.
      params: the tree of parameters from which embedding and head are loaded.
      token: token that orders the callbacks of the host update.
      begin: i32[] zero, known when forward may begin.
    """

    state: TrainState
    params: Params
    token: Array
    begin: Array


@dataclasses.dataclass(frozen=True)
class HeadDone:
    """Values known after the head, when the layers' backward begins.

    Attributes:
      loss: f32[], the mean over microbatches.
      grads: the head's contribution to the gradients of the unstacked leaves.
      loaded: records that `GradientSink.load_unstacked` loaded, by leaf.
    """

    loss: Array
    grads: list[Array]
    loaded: dict[int, list[Array]]


@dataclasses.dataclass(frozen=True)
class RecordGrads:
    """Results of a backward tick for one record (a layer, or a tile of a layer).

    Attributes:
      now: the tick; `now.layer` is the record's index.
      leaf_ids: indices of the record's leaves.
      grads: gradients summed over microbatches, on their shards.
      params: parameters of these leaves, gathered.
      in_flight: the record that this tick fetches.
      transfer: transfers over the host link during the tick's products, if records are stored late;
        else None.
      transferred: result of these transfers, or None.
    """

    now: Tick
    leaf_ids: Sequence[int]
    grads: list[Array]
    params: list[Array]
    in_flight: Any
    transfer: DuplexTransfer | None = None
    transferred: DuplexResult | None = None


class ParamSource(Protocol[Carried]):
    """Provider of the layers' parameters, which may update them first.

    Attributes:
      updates: whether `take` updates a record, so that the carried value changes.
    """

    updates: bool

    def phase(self, stack: StackPlan) -> Phase:
        """Return the schedule's phase of a forward that takes its parameters from this source."""
        ...

    def device_layers(self, stack: StackPlan) -> int:
        """Return the number of layers whose optimizer state, which is read, stays on the device."""
        ...

    def fetch(self, carried: Carried, leaves: RecordLeaves, index: Index) -> list[Array]:
        """Return the arrays of a layer or tile that forward fetches ahead.

        Args:
          carried: the value that forward carries for this source.
          leaves: the leaves of the record.
          index: index of the record.
        """
        ...

    def take(
        self,
        carried: Carried,
        leaves: RecordLeaves,
        record: Sequence[Array],
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[list[Array], Any, list[Array] | None]:
        """Return the shards of a record's parameters, and what `put` writes once they are used.

        Args:
          carried: the value that forward carries for this source.
          leaves: the leaves of the record.
          record: the arrays that `fetch` returned; empty if nothing was fetched.
          index: index of the record.
          in_flight: a record that is fetched from the stacks that `put` writes, or None. It is the
            third result, which may depend on the update.
        """
        ...

    def stores_beside(self, stack: StackPlan) -> bool:
        """Return whether a tick stores its updated record while it fetches a later one.

        The tick then fetches that record itself, beside its products (`build_transfer`).
        """
        ...

    def build_transfer(
        self, carried: Carried, stack: StackPlan, updated: Any, now: Tick
    ) -> tuple[DuplexTransfer, list[Array] | None] | None:
        """Return what crosses the host link during a tick's products, if `stores_beside`.

        Args:
          carried: the value that forward carries for this source.
          stack: the run of layers.
          updated: the second result of `take`.
          now: the tick.

        Returns:
          The transfers, and the arrays of the fetched record that are not part of them; None if
          the tick updates nothing.
        """
        ...

    def end_transfer(
        self,
        carried: Carried,
        stack: StackPlan,
        transfer: DuplexTransfer,
        transferred: DuplexResult,
        in_flight: list[Array] | None,
    ) -> tuple[Carried, list[Array] | None]:
        """Return the next carried value and the fetched record, after all transfers of a tick.

        Args:
          carried: the value that forward carries for this source.
          stack: the run of layers.
          transfer: the transfers.
          transferred: their result.
          in_flight: the second result of `build_transfer`.
        """
        ...

    def put(
        self,
        carried: Carried,
        leaves: RecordLeaves,
        updated: Any,
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[Carried, list[Array] | None]:
        """Write what `take` updated, after its products; return the next carried value.

        Args:
          carried: the value that forward carries for this source.
          leaves: the leaves of the record.
          updated: the second result of `take`.
          index: index of the record.
          in_flight: a record that is fetched from the stacks that are written, or None.

        Returns:
          The carried value, and `in_flight`, which is read before the stacks are written.
        """
        ...


class StoredParams:
    """The layers' parameters as they are stored, which are only read."""

    updates = False

    def __init__(self, plan: StreamedPlan, stacks: Callable[[Any], Sequence[Any]]) -> None:
        """Read the stacks of parameters as `plan` says.

        Args:
          plan: plan of the step.
          stacks: function from the value that the loops carry to the stacks, in the order of
            `StreamedPlan.stacks`.
        """
        self.plan = plan
        self.stacks = stacks

    @classmethod
    def of_blocks(cls, plan: StreamedPlan, blocks: Params) -> "StoredParams":
        """Read `blocks`, the tree of all layers' parameters, whose stacks no loop carries."""
        stacks = plan.weight_stacks(blocks)
        return cls(plan, lambda carried: stacks)

    def phase(self, stack: StackPlan) -> Phase:
        """Return the phase of a forward that only reads."""
        return stack.reading

    def device_layers(self, stack: StackPlan) -> int:
        """Return 0: no optimizer state is read."""
        del stack
        return 0

    def fetch(self, carried: Any, leaves: RecordLeaves, index: Index) -> list[Array]:
        """Return the parameters of a record that are off the device."""
        return self.plan.read_params(self.stacks(carried), self.plan.away(leaves.all), index)

    def take(
        self,
        carried: Any,
        leaves: RecordLeaves,
        record: Sequence[Array],
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[list[Array], None, list[Array] | None]:
        """Return the shards of a record's parameters."""
        shards = self.plan.take_params(self.stacks(carried), leaves.all, record, index)
        return shards, None, in_flight

    def stores_beside(self, stack: StackPlan) -> bool:
        """Return False: nothing is stored."""
        del stack
        return False

    def build_transfer(self, carried: None, stack: StackPlan, updated: None, now: Tick) -> None:
        """Return None: nothing is stored."""
        del carried, stack, updated, now

    def end_transfer(
        self,
        carried: None,
        stack: StackPlan,
        transfer: DuplexTransfer,
        transferred: DuplexResult,
        in_flight: list[Array] | None,
    ) -> tuple[None, list[Array] | None]:
        """Raise AssertionError: nothing is stored."""
        raise AssertionError(f"nothing is stored in forward: {stack.name}")

    def put(
        self,
        carried: Any,
        leaves: RecordLeaves,
        updated: None,
        index: Index,
        in_flight: list[Array] | None,
    ) -> tuple[Any, list[Array] | None]:
        """Write nothing."""
        del leaves, updated, index
        return carried, in_flight


class GradientSink(Protocol[Carried]):
    """Consumer of the gradients as backward computes them."""

    def load_unstacked(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        """Return the head's input, and records loaded during the head, by leaf.

        These are records of leaves whose gradients the head completes.

        Args:
          state: the state before the step.
          y: the head's input.
        """
        ...

    def begin(self, state: TrainState, head: HeadDone, grads: list[Array], token: Array) -> Carried:
        """Return the value that backward carries.

        Args:
          state: the state before the step.
          head: results of the head.
          grads: stacks of gradients in host memory, if any.
          token: token that orders the callbacks of the host update.
        """
        ...

    def split_unstacked(self, carried: Carried) -> tuple[Carried, dict[int, list[Array]]]:
        """Return the carried value, and the updated records that backward's first tick stores."""
        ...

    def params(self, state: TrainState, carried: Carried) -> list[Array]:
        """Return the stacks of parameters that backward reads, of all stacked leaves."""
        ...

    def use(self, state: TrainState, carried: Carried, record: RecordGrads) -> tuple[Carried, Any]:
        """Use one record's gradients; return the carried value and `in_flight`.

        Args:
          state: the state before the step.
          carried: the value that backward carries.
          record: the record's gradients and parameters.
        """
        ...

    def build_transfer(
        self,
        carried: Carried,
        now: Tick,
        leaf_ids: Sequence[int],
        unstacked: Mapping[int, list[Array]],
    ) -> DuplexTransfer | None:
        """Return the transfers during a tick's products, or None if there are none.

        Args:
          carried: the value that backward carries.
          now: the tick.
          leaf_ids: indices of the leaves of the tick's record.
          unstacked: records of unstacked leaves that the tick stores, by leaf.
        """
        ...

    def drain(self, stack: StackPlan, number: int, layer: Array, carried: Carried) -> Carried:
        """Store a record after the last tick of a run of layers, if records are stored late.

        Args:
          stack: the run of layers.
          number: number of the layer, as an int.
          layer: i32[], the same number.
          carried: the value that backward carries.
        """
        ...

    def grads(self, carried: Carried) -> list[Array]:
        """Return the stacks in host memory that `begin` took, as backward left them."""
        ...


class UpdatePolicy(GradientSink[Carried], Protocol[Carried]):
    """A consumer of gradients that also finishes the step."""

    unstacked_first: bool
    """Whether the unstacked leaves are updated before the layers."""

    def begin_step(self, state: TrainState, token: Array) -> Begun:
        """Bring the unstacked leaves that forward reads up to date.

        Args:
          state: the state before the step.
          token: token that orders the callbacks of the host update.
        """
        ...

    def source(self, begun: Begun) -> tuple[ParamSource[Any], Any]:
        """Return the source of forward's parameters, and the value that forward carries for it.

        Args:
          begun: the result of `begin_step`.
        """
        ...

    def end_forward(self, begun: Begun, carried: Any) -> tuple[TrainState, Array]:
        """Return the state after forward, and the next token.

        Args:
          begun: the result of `begin_step`.
          carried: the value that forward carried for the source.
        """
        ...

    def end(self, result: BackwardResult[Carried]) -> Result:
        """Finish the step; return the state after it and the metrics."""
        ...


class PlainForward:
    """Base of the update policies whose forward only reads the parameters."""

    plan: StreamedPlan

    def begin_step(self, state: TrainState, token: Array) -> Begun:
        """Return the state unchanged."""
        return Begun(state, self.plan.layout.join(state), token, jnp.int32(0))

    def source(self, begun: Begun) -> tuple[StoredParams, None]:
        """Return a source of the parameters as they are stored."""
        return StoredParams.of_blocks(self.plan, begun.params[BLOCKS]), None

    def end_forward(self, begun: Begun, carried: None) -> tuple[TrainState, Array]:
        """Return the state unchanged."""
        del carried
        return begun.state, begun.token


def closed(
    update: RecordUpdate,
    result: BackwardResult[Any],
    states: FlatState,
    norm: Array,
    pending: Pending | None = None,
) -> Result:
    """Advance the shared scalars and finish the step.

    Args:
      update: the update by records.
      result: results of backward.
      states: all leaves of the state after the update.
      norm: f32[], global norm of the gradients; the step is skipped if it is not finite.
      pending: gradients of a delayed update that the next step applies, or None.

    Returns:
      The state after the step, and the metrics.
    """
    ok = jnp.isfinite(norm)
    state = result.state
    records = update.records
    # The step count and other shared scalars advance once per step, regardless of the number of
    # records.
    states = records.with_shared(states, update.shared(states, result.loss, ok))
    return finish(
        state,
        *records.trees(state, states),
        result.loss,
        norm,
        ok,
        update.layout.config.loss_scaling,
        pending,
    )


def loss_scale(state: TrainState) -> Array:
    """Return the scale of the loss, f32[]; 1 if there is none."""
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
