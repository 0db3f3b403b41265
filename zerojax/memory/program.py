"""Bytes of one program: what a step holds in each tier, sends over the mesh and moves over the host
link.

`program_memory` counts, leaf by leaf and with the specs and tiers that were chosen, what
`zerojax.formulas` has in closed form: leaves that do not divide, tensor parallelism and any
optimizer's state are exact. Its `argument_bytes` are what a compiled step takes as arguments on the
device, its `host_argument_bytes` those in pinned host memory. What moves is read off the list of
the step's operations (`host_offload.schedule.StepPlan`):

    in flight    the most that a tick holds, over all phases
    host link    every load and store, once

With `update_on="host"` gradients go down, and compute-dtype parameters up where they rest on the
device: 2P + 2P bytes in 16 bits. Callbacks of the program move them, so the compiled program's own
copies are the rest of `host_link`.
"""

import dataclasses
from typing import Any

from host_offload.schedule import StepPlan
from zerojax.memory.collectives import collectives_of_step
from zerojax.memory.kept import (
    KeptValues,
    bytes_gathered,
    kept_values,
    resident_kept,
    streamed_kept,
)
from zerojax.memory.leaves import bytes_by_tier
from zerojax.memory.report import MemoryReport
from zerojax.memory.resident import resident_bytes
from zerojax.memory.streamed import streamed_bytes, streamed_steps
from zerojax.memory.tensor import tensor_collectives
from zerojax.resident import ResidentStep
from zerojax.state import DiskLayout, StateRecords, steps_of_leaves
from zerojax.streamed import StreamedStep


def program_memory(records: StateRecords, step: object, abstract_batch: Any) -> MemoryReport:
    """Count the bytes of a step, leaf by leaf.

    Args:
      records: how the states of the program rest.
      step: of the program. What a resident one keeps from forward to backward is counted by tracing
        its loss.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the step is of another kind.
    """
    if not isinstance(step, StreamedStep | ResidentStep):
        raise NotImplementedError(
            f"the bytes of a {type(step).__name__} are not counted in this version"
        )
    layout, state = records.layout, records.layout.abstract_state
    pending = bytes_by_tier(state.pending)
    scalars = (
        bytes_by_tier((state.step, state.skipped, state.key, state.loss_scale))["device"]
        + pending["device"]
    )
    model_state = (
        {}
        if state.model_state is None
        else {"model_state": bytes_by_tier(state.model_state)["device"]}
    )
    streamed = step if isinstance(step, StreamedStep) else None
    if streamed is not None:
        running = streamed_bytes(layout, streamed, abstract_batch)
    else:
        assert isinstance(step, ResidentStep)
        pieces = {} if step.update is None else step.update.num_pieces()
        running = resident_bytes(records, pieces, step.objective, abstract_batch)
    kinds = {
        "params": bytes_by_tier(state.params),
        "master": bytes_by_tier(state.master),
        "opt_state": bytes_by_tier(state.opt_state),
        "frozen": bytes_by_tier(state.frozen),
    }
    device = (
        {kind: tiers["device"] for kind, tiers in kinds.items()}
        | {
            "batch": bytes_by_tier(abstract_batch)["device"],
            "scalars": scalars,
        }
        | model_state
    )
    host = {kind: tiers["pinned_host"] for kind, tiers in kinds.items()} | {
        "pending": pending["pinned_host"]
    }
    on_disk, buffers, slots = ({}, {}, {}) if layout.disk is None else _disk_bytes(layout.disk)
    if parts := [] if step.host is None else step.host.parts():
        slots["slots"] = slots.get("slots", 0) + sum(part.slot_bytes for part in parts)
        buffers["buffers"] = buffers.get("buffers", 0) + sum(part.host_bytes for part in parts)
    over_tensor = tensor_collectives(layout, step.model, abstract_batch)
    if streamed is not None and (gathered := bytes_gathered(streamed, abstract_batch)):
        over_tensor["tensor_all_gather"] = over_tensor.get("tensor_all_gather", 0) + gathered
    return MemoryReport(
        tiers={
            "device": device | running.device | slots,
            "pinned_host": host | running.host | buffers,
            "nvme": on_disk,
        },
        collectives=collectives_of_step(layout, streamed) | over_tensor,
        host_link={way: n + running.called[way] for way, n in running.link.items()},
        callback_link=running.called,
        num_params=layout.num_params,
    )


def steps_of_program(records: StateRecords, step: object, abstract_batch: Any) -> StepPlan:
    """Return everything that a step does with records, with the bytes of each operation.

    Args:
      records: how the states of the program rest.
      step: of the program.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the step is of another kind.
    """
    if isinstance(step, StreamedStep):
        return streamed_steps(step, abstract_batch)
    if isinstance(step, ResidentStep):
        steps = steps_of_leaves(records, None if step.update is None else step.update.num_pieces())
        return dataclasses.replace(
            steps, stacks=step.stacks
        )  # forward and backward: the update is leaf by leaf
    raise NotImplementedError(
        f"the operations of a {type(step).__name__} are not listed in this version"
    )


def kept_by_program(records: StateRecords, step: object, abstract_batch: Any) -> KeptValues:
    """Return what a step keeps from forward to backward, value by value.

    Args:
      records: how the states of the program rest.
      step: of the program.
      abstract_batch: tree of ShapeDtypeStruct with shardings.

    Raises:
      NotImplementedError: the step is of another kind.
    """
    if isinstance(step, StreamedStep):
        return kept_values(streamed_kept(step, abstract_batch))
    if isinstance(step, ResidentStep):
        return kept_values(resident_kept(records.layout, step.objective, abstract_batch))
    raise NotImplementedError(f"what a {type(step).__name__} keeps is not counted in this version")


def _disk_bytes(disk: DiskLayout) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the bytes of a device's records by kind of state, of the buffers in host memory, and
    of a GPU's slots.
    """
    on_disk: dict[str, int] = {}
    slots = 0
    for kind, records in disk.kinds.items():
        name = kind.split(".")[0]
        on_disk[name] = on_disk.get(name, 0) + records.num_layers * records.num_bytes
        slots += records.slot_bytes
    return on_disk, {"buffers": disk.buffer_bytes(disk.kinds.values())}, {"slots": slots}
