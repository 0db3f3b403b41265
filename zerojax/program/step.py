"""What a program asks of its step: one interface for every way to run a model's layers.

    resident    every layer on the device                             zerojax.resident
    streamed    layers come to the device one after the other         zerojax.streamed

A step is equations and their order: pure functions that `Program` compiles, runs and accounts for.
  It holds no arrays. A step
of a new kind offers what is here, and `zerojax.program.build` chooses it. Steps do not import this
module.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move, Schedule
from zerojax.optim import HostUpdate, RecordUpdate
from zerojax.state import TrainState

Scratch = dict[str, list[Any]]
"""Stacks in host memory that live inside a step, by use; empty where all of a step is on the
device.
"""
Metrics = Mapping[str, jax.Array | float]


class Step(Protocol):
    """The equations of one train step over a model, an optimizer and a layout."""

    @property
    def host(self) -> HostUpdate | None:
        """The part of the update that runs on the host."""
        ...

    @property
    def update(self) -> RecordUpdate | None:
        """The update by record, or None where whole trees are updated on the device."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The order in which layers are gathered, computed and released."""
        ...

    def step(
        self, state: TrainState, batch: Any, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, jax.Array]]:
        """Run one step; to be jitted with `state` and `scratch` donated.

        Args:
          state: as the layout has it.
          batch: global batch.
          scratch: like `abstract_scratch`; its contents are overwritten.

        Returns:
          The new state and the scratch, and the step's metrics.
        """
        ...

    def eval(self, params: Any, model_state: Any, batch: Any) -> Any:
        """Return the loss of a batch without keys, f32[]; where the model has metrics, a dict of
        both. To be jitted.
        """
        ...

    def apply(self, params: Any, model_state: Any, batch: Any) -> Any:
        """Return what the model's `predict` gives of a batch, without keys. To be jitted."""
        ...

    def grads(
        self, state: TrainState, batch: Any, scratch: Scratch
    ) -> tuple[tuple[Any, Any], Scratch]:
        """Differentiate the loss as `step` does, with its keys; to be jitted with `scratch`
        donated.

        Args:
          state: without masters, optimizer state and what is pending.
          batch: global batch.
          scratch: like `abstract_scratch`.

        Returns:
          (loss, as `eval` returns it, and gradients), and the scratch. Gradients are float32, like
          the trained parameters.
        """
        ...

    def check_grads(self) -> None:
        """Raise NotImplementedError where the step has no gradients on the device."""
        ...

    def abstract_scratch(self, abstract_batch: Any) -> Scratch:
        """Return shapes and shardings of `scratch` for batches of one shape."""
        ...

    def records_written(self, abstract_batch: Any) -> Sequence[DiskRecords]:
        """Return the records on disk that a step writes before it reads them."""
        ...

    def moves(self) -> tuple[Move, ...]:
        """Return what a step reads from disk and writes to it, in order.

        Of a step that was traced it is exact.
        """
        ...

    def eval_moves(self) -> tuple[Move, ...]:
        """Return the same of an evaluation, which are those of `apply`, too."""
        ...

    def grads_moves(self) -> tuple[Move, ...]:
        """Return the same of `grads`."""
        ...
