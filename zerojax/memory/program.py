"""Bytes of one program: held in each tier, sent over the mesh, and moved over the host link.

`program_memory` counts leaf by leaf, with the chosen specs and tiers, the quantities that
`zerojax.formulas` has in closed form: leaves that are not divisible, tensor parallelism and any
optimizer's state are exact. Its `argument_bytes` are the bytes of a compiled step's arguments on
the device, and its `host_argument_bytes` the bytes of its arguments in pinned host memory. Moved
bytes are read from the list of the step's operations (`host_offload.schedule.StepPlan`):

    in flight    the largest number of bytes held in a tick, over all phases
    host link    every load and store, once

With `update_on="host"` gradients are stored to the host, and compute-dtype parameters are loaded if
they are stored on the device: 2P + 2P bytes in 16 bits. Callbacks of the program move them, so the
compiled program's own copies are the remainder of `host_link`.
"""

import dataclasses
from collections.abc import Sequence

from host_offload.host_update import LeafGroup
from host_offload.schedule import StepPlan
from zerojax.memory.collectives import collectives_of_step
from zerojax.memory.kept import (
    KeptValues,
    bytes_gathered,
    kept_values,
    pipeline_kept,
    resident_kept,
    streamed_kept,
)
from zerojax.memory.leaves import bytes_by_tier
from zerojax.memory.pipeline import PipelineBytes, microbatch_shapes
from zerojax.memory.report import MemoryReport
from zerojax.memory.resident import resident_bytes
from zerojax.memory.streamed import streamed_bytes, streamed_steps
from zerojax.memory.tensor import tensor_collectives
from zerojax.pipeline import PipelineStep
from zerojax.resident import ResidentStep
from zerojax.state import DiskLayout, StateRecords, TrainState, steps_of_leaves
from zerojax.streamed import StreamedStep
from zerojax.trees import Batch


def program_memory(records: StateRecords, step: object, abstract_batch: Batch) -> MemoryReport:
    """Count the bytes of a step, leaf by leaf.

    Args:
      records: how the states of the program are stored.
      step: the program's step. The activations that a resident step saves are counted by tracing
        its loss.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the bytes of this kind of step are not counted.
    """
    if not isinstance(step, StreamedStep | ResidentStep | PipelineStep):
        raise NotImplementedError(
            f"the bytes of a {type(step).__name__} are not counted in this version"
        )
    layout = records.layout
    streamed = step if isinstance(step, StreamedStep) else None
    pipeline = None
    if isinstance(step, StreamedStep):
        running = streamed_bytes(layout, step, abstract_batch)
    elif isinstance(step, PipelineStep):
        pipeline = PipelineBytes(step, abstract_batch)
        running = pipeline.running()
    else:
        pieces = {} if step.update is None else step.update.num_pieces()
        running = resident_bytes(records, pieces, step.objective, abstract_batch)

    device, host = _argument_bytes(layout.abstract_state, abstract_batch)
    on_disk = {} if layout.disk is None else _disk_bytes(layout.disk)
    leaf_groups = [] if step.host is None else step.host.leaf_groups()
    slots, buffers = _transfer_bytes(layout.disk, leaf_groups)
    if pipeline is not None:
        collectives = pipeline.collectives()
    else:
        collectives = collectives_of_step(layout, streamed)
        collectives |= tensor_collectives(layout, step.model, abstract_batch)
    if streamed is not None:
        gathered = bytes_gathered(streamed, abstract_batch)
        if gathered:
            collectives["tensor_all_gather"] = collectives.get("tensor_all_gather", 0) + gathered
    return MemoryReport(
        tiers={
            "device": device | running.device | slots,
            "pinned_host": host | running.host | buffers,
            "nvme": on_disk,
        },
        collectives=collectives,
        host_link={way: n + running.called[way] for way, n in running.link.items()},
        callback_link=running.called,
        num_params=layout.num_params,
    )


def _argument_bytes(
    state: TrainState, abstract_batch: Batch
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a step's arguments on the device, and in host memory, by kind."""
    kinds = {
        "params": bytes_by_tier(state.params),
        "master": bytes_by_tier(state.master),
        "opt_state": bytes_by_tier(state.opt_state),
        "frozen": bytes_by_tier(state.frozen),
    }
    pending = bytes_by_tier(state.pending)
    scalars = bytes_by_tier((state.step, state.skipped, state.key, state.loss_scale))
    device = {kind: tiers["device"] for kind, tiers in kinds.items()}
    device["batch"] = bytes_by_tier(abstract_batch)["device"]
    pending_grads = bytes_by_tier(state.pending.grads)["device"] if state.pending else 0
    device["scalars"] = scalars["device"] + pending["device"] - pending_grads
    if pending_grads:
        device["pending"] = pending_grads
    if state.model_state is not None:
        device["model_state"] = bytes_by_tier(state.model_state)["device"]
    host = {kind: tiers["pinned_host"] for kind, tiers in kinds.items()}
    host["pending"] = pending["pinned_host"]
    return device, host


def steps_of_program(records: StateRecords, step: object, abstract_batch: Batch) -> StepPlan:
    """Return a step's operations on records, with the bytes of each.

    Args:
      records: how the states of the program are stored.
      step: the program's step.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the operations of this kind of step are not listed.
    """
    if isinstance(step, StreamedStep):
        return streamed_steps(step, abstract_batch)
    if isinstance(step, PipelineStep):
        return PipelineBytes(step, abstract_batch).operations
    if isinstance(step, ResidentStep):
        num_pieces = None if step.update is None else step.update.num_pieces()
        steps = steps_of_leaves(records, num_pieces)
        # The stacks are for forward and backward; the update is leaf by leaf.
        return dataclasses.replace(steps, stacks=step.stacks)
    raise NotImplementedError(
        f"the operations of a {type(step).__name__} are not listed in this version"
    )


def kept_by_program(records: StateRecords, step: object, abstract_batch: Batch) -> KeptValues:
    """Return the values that a step saves from forward to backward.

    Args:
      records: how the states of the program are stored.
      step: the program's step.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the saved values of this kind of step are not counted.
    """
    if isinstance(step, PipelineStep):
        return kept_values(pipeline_kept(step, microbatch_shapes(step, abstract_batch)))
    if isinstance(step, StreamedStep):
        return kept_values(streamed_kept(step, abstract_batch))
    if isinstance(step, ResidentStep):
        return kept_values(resident_kept(records.layout, step.objective, abstract_batch))
    raise NotImplementedError(
        f"the saved values of a {type(step).__name__} are not counted in this version"
    )


def _disk_bytes(disk: DiskLayout) -> dict[str, int]:
    """Return a device's bytes on disk, by kind."""
    on_disk: dict[str, int] = {}
    for kind, records in disk.kinds.items():
        name = kind.split(".")[0]
        on_disk[name] = on_disk.get(name, 0) + records.num_layers * records.num_bytes
    return on_disk


def _transfer_bytes(
    disk: DiskLayout | None, leaf_groups: Sequence[LeafGroup]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a GPU's slots, and of buffers in host memory, for callbacks.

    Args:
      disk: the records of the nvme tier, or None.
      leaf_groups: groups of leaves that an update on the host transfers together.
    """
    slots: dict[str, int] = {}
    buffers: dict[str, int] = {}
    if disk is not None:
        slots["slots"] = sum(records.slot_bytes for records in disk.kinds.values())
        buffers["buffers"] = disk.buffer_bytes(disk.kinds.values())
    if leaf_groups:
        group_slots = sum(group.slot_bytes for group in leaf_groups)
        group_buffers = sum(group.host_bytes for group in leaf_groups)
        slots["slots"] = slots.get("slots", 0) + group_slots
        buffers["buffers"] = buffers.get("buffers", 0) + group_buffers
    return slots, buffers
