"""The interface between a program and its step, common to every way to run a model's layers.

    resident    every layer is on the device                                  zerojax.resident
    streamed    layers are loaded to the device one after another             zerojax.streamed
    pipelined   each device has the layers of its stage                       zerojax.pipeline

A step is a set of equations in order: pure functions that `Program` compiles, runs and accounts
for. It holds no arrays. A new kind of step implements the protocol below, and
`zerojax.program.build` chooses it. Steps do not import this module.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move, Schedule
from zerojax.optim import HostUpdate, RecordUpdate
from zerojax.pipeline import PipelineSchedule
from zerojax.state import Index, TrainState
from zerojax.trees import Batch, ModelState

Scratch = dict[str, list[Any]]
"""Stacks in host memory that live inside a step, by use; empty if all of it is on the device."""
Metrics = Mapping[str, jax.Array | float]


class Step(Protocol):
    """The equations of one train step over a model, an optimizer and a layout."""

    @property
    def host(self) -> HostUpdate | None:
        """The part of the update that runs on the host, or None."""
        ...

    @property
    def update(self) -> RecordUpdate | None:
        """The update by record, or None if full trees are updated on the device."""
        ...

    @property
    def schedule(self) -> Schedule | PipelineSchedule:
        """The order in which layers are gathered, computed and released.

        In a pipeline it is the order of microbatches in every stage.
        """
        ...

    def step(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, jax.Array]]:
        """Run one step; to be jitted with `state` and `scratch` donated.

        Args:
          state: train state in the program's layout.
          batch: global batch.
          scratch: host stacks like `abstract_scratch`; their contents are overwritten.

        Returns:
          ((new state, scratch), metrics of the step).
        """
        ...

    def settle(self, state: TrainState) -> TrainState:
        """Return the state with its pending update applied; to be jitted with `state` donated.

        It is called only if the config leaves an update to the next step's forward.
        """
        ...

    def updated_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return a record's float32 weights and optimizer state after its pending update.

        It is called only if the config leaves an update to the next step's forward.

        Args:
          state: a state with a pending update, which is only read.
          leaf_ids: indices of the record's leaves.
          index: index of the record.
        """
        ...

    def readable(self, state: TrainState) -> Any:
        """Return what `eval` and `apply` read of a state: all parameters, or more."""
        ...

    def eval(self, params: Any, model_state: ModelState, batch: Batch) -> Any:
        """Return the loss of a batch without random keys, f32[]; to be jitted.

        If the model has metrics, return a dict of the loss and the metrics.
        """
        ...

    def apply(self, params: Any, model_state: ModelState, batch: Batch) -> Any:
        """Return the outputs of the model's `predict` for a batch, without keys; to be jitted."""
        ...

    def grads(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[Any, Any], Scratch]:
        """Differentiate the loss as `step` does, with its keys; jitted with `scratch` donated.

        Args:
          state: train state without masters, optimizer state and pending update.
          batch: global batch.
          scratch: host stacks like `abstract_scratch`.

        Returns:
          ((loss as `eval` returns it, gradients), scratch). Gradients are float32, in the tree of
          the trainable parameters.
        """
        ...

    def check_grads(self) -> None:
        """Raise NotImplementedError if the step does not keep its gradients on the device."""
        ...

    def abstract_scratch(self, abstract_batch: Batch) -> Scratch:
        """Return the shapes and shardings of `scratch` for batches of one shape."""
        ...

    def records_written(self, abstract_batch: Batch) -> Sequence[DiskRecords]:
        """Return the records on disk that a step writes before it reads them."""
        ...

    def moves(self) -> tuple[Move, ...]:
        """Return the records that a step reads from disk and writes to disk, in order.

        The result is exact once the step has been traced.
        """
        ...

    def eval_moves(self, skips: bool = False) -> tuple[Move, ...]:
        """Return the records that `eval` or `apply` reads from disk and writes, in order.

        Args:
          skips: whether to leave out records that `apply` may skip, such as experts.
        """
        ...

    def unsettled_eval_moves(self) -> tuple[Move, ...]:
        """Return the records that they read of a state with a pending update, in order."""
        ...

    def settle_moves(self) -> tuple[Move, ...]:
        """Return the records that `settle` reads from disk and writes to disk, in order."""
        ...

    def grads_moves(self) -> tuple[Move, ...]:
        """Return the records that `grads` reads from disk and writes to disk, in order."""
        ...
