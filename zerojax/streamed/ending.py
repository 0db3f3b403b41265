"""What a streamed step does with gradients: the interface of its endings, and what backward hands to them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from zerojax.optim import RecordUpdate, finish
from zerojax.state import FlatState, Pending, TrainState
from zerojax.streamed.phases import ScheduleArrays, Tick

Array = jax.Array

Result = tuple[TrainState, dict[str, Array]]
Carried = TypeVar("Carried")
"""What backward carries for an ending: a pytree."""


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardResult(Generic[Carried]):
    """What is known when backward is over.

    Attributes:
      state: before the step.
      loss: f32[], the mean over microbatches.
      carried: by backward.
      ends: summed gradients of the leaves that are no stack of layers.
      arrays: of the schedule.
    """

    state: TrainState
    loss: Array
    carried: Carried
    ends: list[Array]
    arrays: ScheduleArrays


@dataclasses.dataclass(frozen=True)
class RecordGrads:
    """What a tick of backward makes of a record, a layer or a tile of one.

    Attributes:
      now: the tick; `now.layer` and `now.write` are the record's index.
      part: indices of the record's leaves.
      grads: summed over microbatches, on their shards.
      params: of these leaves, gathered.
      landing: what this tick fetches.
    """

    now: Tick
    part: Sequence[int]
    grads: list[Array]
    params: list[Array]
    landing: Any


class GradsTaker(Protocol[Carried]):
    """What takes the gradients as backward makes them."""

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> Carried:
        """Return what backward carries; `grads` are the stacks in host memory, if any."""
        ...

    def params(self, state: TrainState, carried: Carried) -> list[Array]:
        """Return the stacks of parameters that backward reads, of all stacked leaves."""
        ...

    def use(self, state: TrainState, carried: Carried, record: RecordGrads) -> tuple[Carried, Any]:
        """Take one record's gradients; returns what is carried on, and `landing`."""
        ...

    def grads(self, carried: Carried) -> list[Array]:
        """Return the stacks in host memory that `begin` took, as backward left them."""
        ...


class Ending(GradsTaker[Carried], Protocol[Carried]):
    """How a step uses gradients."""

    ends_first: bool
    """Whether the leaves that are no stack of layers are updated before the layers."""

    def end(self, result: BackwardResult[Carried]) -> Result:
        """Finish the step."""
        ...


def closed(
    update: RecordUpdate, result: BackwardResult[Any], states: FlatState, norm: Array, pending: Pending | None = None
) -> Result:
    """Move the shared scalars on and finish the step."""
    ok, state = jnp.isfinite(norm), result.state
    records = update.records
    # The count of steps and other shared scalars advance once a step, however many records it updated.
    states = records.with_shared(states, update.shared(states, result.loss, ok))
    return finish(state, *records.trees(state, states), result.loss, norm, ok, update.layout.config.loss_scaling, pending)


def loss_scale(state: TrainState) -> Array:
    """Return the scale of the loss: 1 where there is none."""
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
