"""What a streamed step does with gradients: the interface of its endings, and what backward hands
to them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from zerojax.optim import Crossed, Crossing, RecordUpdate, finish
from zerojax.state import FlatState, Pending, TrainState
from zerojax.streamed.phases import Tick
from zerojax.streamed.plan import StackPlan

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
      begin: i32[] zero, known when backward may begin: the update, too, comes after what it waits
        for.
    """

    state: TrainState
    loss: Array
    carried: Carried
    ends: list[Array]
    begin: Array


@dataclasses.dataclass(frozen=True)
class HeadDone:
    """What is known when the head is done and backward of the layers begins.

    Attributes:
      loss: f32[], the mean over microbatches.
      grads: of the leaves that are no stack of layers, as far as the head made them.
      loaded: what `GradsTaker.load_ends` loaded.
    """

    loss: Array
    grads: list[Array]
    loaded: dict[int, list[Array]]


@dataclasses.dataclass(frozen=True)
class RecordGrads:
    """What a tick of backward makes of a record, a layer or a tile of one.

    Attributes:
      now: the tick; `now.layer` is the record's index.
      part: indices of the record's leaves.
      grads: summed over microbatches, on their shards.
      params: of these leaves, gathered.
      landing: what this tick fetches.
      crossing: what crosses the link beside the tick's products, where stores are late.
      crossed: what came of it.
    """

    now: Tick
    part: Sequence[int]
    grads: list[Array]
    params: list[Array]
    landing: Any
    crossing: "Crossing | None" = None
    crossed: "Crossed | None" = None


class GradsTaker(Protocol[Carried]):
    """What takes the gradients as backward makes them."""

    def load_ends(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        """Return the head's input, and the records of leaves whose gradients the head completes,
        loaded beside it.
        """
        ...

    def begin(self, state: TrainState, head: HeadDone, grads: list[Array], token: Array) -> Carried:
        """Return what backward carries; `grads` are the stacks in host memory, if any."""
        ...

    def split_ends(self, carried: Carried) -> tuple[Carried, dict[int, list[Array]]]:
        """Return what backward carries, and apart from it the updated records that its first tick
        stores.
        """
        ...

    def params(self, state: TrainState, carried: Carried) -> list[Array]:
        """Return the stacks of parameters that backward reads, of all stacked leaves."""
        ...

    def use(self, state: TrainState, carried: Carried, record: RecordGrads) -> tuple[Carried, Any]:
        """Take one record's gradients; returns what is carried on, and `landing`."""
        ...

    def crossing(
        self, carried: Carried, now: Tick, part: Sequence[int], ends: Mapping[int, list[Array]]
    ) -> Crossing | None:
        """Return what crosses the link beside the products of a tick, if it is more than the record
        that lands.

        `ends` are records of leaves that are no stack of layers, which the tick stores.
        """
        ...

    def drain(self, stack: StackPlan, number: int, layer: Array, carried: Carried) -> Carried:
        """Store a record after the last tick of a run of layers, if stores are late; the layer as
        an int and as an i32[].
        """
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
    update: RecordUpdate,
    result: BackwardResult[Any],
    states: FlatState,
    norm: Array,
    pending: Pending | None = None,
) -> Result:
    """Move the shared scalars on and finish the step."""
    ok, state = jnp.isfinite(norm), result.state
    records = update.records
    # The count of steps and other shared scalars advance once a step, however many records it
    # updated.
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
    """Return the scale of the loss: 1 where there is none."""
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
