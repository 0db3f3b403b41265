"""What a streamed step does with gradients: the interface of its endings, and what backward hands to them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from zerojax.optim import RecordUpdate, finish
from zerojax.state import FlatState, Pending, Plan, TrainState
from zerojax.streamed.phases import Tick

Array = jax.Array

Result = tuple[TrainState, dict[str, Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardResult:
    """What is known when backward is over.

    Attributes:
      state: before the step.
      loss: f32[], the mean over microbatches.
      carried: by backward.
      ends: summed gradients of the leaves that are no stack of layers.
      plans: the schedule's arrays.
      one: i32[] holding 1.
    """

    state: TrainState
    loss: Array
    carried: dict[str, Any]
    ends: list[Array]
    plans: Mapping[str, Plan]
    one: Array


@dataclasses.dataclass(frozen=True)
class RecordGrads:
    """What a tick of backward makes of a record, a layer or a tile of one.

    Attributes:
      now: the tick; `now.layer` and `now.write` are the record's index.
      part: indices of the record's leaves.
      grads: summed over microbatches, on their shards.
      params: gathered.
      landing: what this tick fetches.
    """

    now: Tick
    part: Sequence[int]
    grads: list[Array]
    params: list[Array]
    landing: Any


class Ending(Protocol):
    """How a step uses gradients."""

    ends_first: bool
    """Whether the leaves that are no stack of layers are updated before the layers."""

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        """Return what backward carries; `grads` are the stacks in host memory, if any."""
        ...

    def params(self, state: TrainState, carried: dict[str, Any]) -> list[Array]:
        """Return the stacks of parameters that backward reads, of all stacked leaves."""
        ...

    def use(self, state: TrainState, carried: dict[str, Any], made: RecordGrads) -> tuple[dict[str, Any], Any]:
        """Take one record's gradients; returns what is carried on, and `landing`."""
        ...

    def end(self, sums: BackwardResult) -> Result:
        """Finish the step."""
        ...


def closed(
    update: RecordUpdate, sums: BackwardResult, states: FlatState, norm: Array, pending: Pending | None = None
) -> Result:
    """Move the shared scalars on and finish the step."""
    ok, state = jnp.isfinite(norm), sums.state
    records = update.records
    states = records.with_shared(states, update.shared(states, sums.loss, ok))
    return finish(state, *records.trees(state, states), sums.loss, norm, ok, update.layout.config.loss_scaling, pending)


def loss_scale(state: TrainState) -> Array:
    """Return the scale of the loss: 1 where there is none."""
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
