"""Bytes that a streamed step takes in addition to its arguments, and moves over the host link.

They are read from its list of operations. A tick holds the records that are in flight in it, so the
most that any tick holds is the step's need in addition to its arguments
(`host_offload.schedule.StepPlan`). Each load and store crosses the link once.
"""

from collections.abc import Mapping

import jax

from host_offload.schedule import StepPlan
from zerojax.memory.derivative import counts_working, layer_working_bytes
from zerojax.memory.leaves import (
    compute_itemsize,
    gathered_bytes,
    grad_elements,
    grad_itemsize,
    local_record_bytes,
    summed_itemsize,
    unreduced_bytes,
)
from zerojax.memory.report import RunningBytes
from zerojax.sharding import ActivationSpec
from zerojax.state import Layout, RecordSpec
from zerojax.streamed import ResidualPlan, StreamedStep
from zerojax.trees import Batch


def streamed_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Batch) -> RunningBytes:
    """Return the bytes of a streamed step in addition to its arguments, and over the host link."""
    plan = streamed.plan
    saved = _saved(streamed, abstract_batch)
    steps = streamed.steps(_bytes_off_device(saved))
    is_fetched = any(record.is_away for record in plan.params)
    gathered = gathered_bytes(layout, 1 + layout.config.gather_ahead, is_fetched)
    grads, host_grads = _stored_grads(layout, streamed)

    def kept(tier: str) -> int:
        return sum(stack.num_layers * saved[stack.run.name][tier] for stack in plan.of_stacks)

    device = {
        "grads": grads,
        # Gradients of embedding and head live through backward; a layer's are in flight in its
        # tick.
        "unreduced": unreduced_bytes(layout, blocks=False),
        "gathered": gathered,
        "activations": kept("device") + _entered_bytes(streamed, _shapes(abstract_batch)),
        # Gathered layers have a line of their own.
        "in_flight": max(0, steps.peak_bytes - gathered),
    }
    if counts_working(layout):
        layers_bytes = _layers_bytes(steps, layer_working_bytes(streamed, _shapes(abstract_batch)))
        device["working"] = max(0, layers_bytes - max(gathered, steps.peak_bytes))
    host = {"grads": 0, "activations": kept("pinned_host")} | host_grads
    link = {
        "to_device": steps.moved("up", called=False),
        "to_host": steps.moved("down", called=False),
    }
    called = {
        "to_device": steps.moved("up", called=True),
        "to_host": steps.moved("down", called=True),
    }
    return RunningBytes(device, host, link, called)


def _layers_bytes(steps: StepPlan, working: Mapping[str, int]) -> int:
    """Return the bytes of a tick that computes a layer's derivative, with working memory.

    It is the largest number of any run of layers.

    Args:
      steps: the step's operations.
      working: working memory of a layer's derivative, by run of layers.
    """
    ticks = [
        step_phase.phase.layers_peak_bytes + working[step_phase.stack]
        for step_phase in steps.phases
        if step_phase.name == "backward" and step_phase.stack is not None
    ]
    return max(ticks, default=0)


def streamed_steps(streamed: StreamedStep, abstract_batch: Batch) -> StepPlan:
    """Return a streamed step's operations, with their bytes for a batch."""
    return streamed.steps(_bytes_off_device(_saved(streamed, abstract_batch)))


def _shapes(abstract_batch: Batch) -> Batch:
    """Return shapes and dtypes of a batch, without shardings."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_batch)


def _saved(streamed: StreamedStep, abstract_batch: Batch) -> dict[str, dict[str, int]]:
    """Return the bytes of one layer's saved activations for each run, by run and tier."""
    plans = streamed.abstract_residuals(_shapes(abstract_batch))
    pairs = zip(streamed.plan.of_stacks, plans, strict=True)
    return {stack.run.name: _saved_bytes(residuals) for stack, residuals in pairs}


def _saved_bytes(residuals: ResidualPlan) -> dict[str, int]:
    """Return the bytes that one layer saves from forward to backward, by tier.

    The entry "on_disk" has the bytes of its record on the disk.
    """
    tiers = {"device": 0, "pinned_host": 0, "nvme": 0, "on_disk": 0}
    for array in residuals.arrays:
        record = array.record
        a = array.abstract
        tiers[record.tier] += local_record_bytes(record, a.shape, a.dtype)
        if record.disk_records is not None:
            # Everything that a layer saves on the disk is one padded record.
            tiers["on_disk"] = record.disk_records.num_bytes
    return tiers


def _bytes_off_device(saved: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the bytes that one layer of each run saves off the device, for its schedule."""
    off_device = {}
    for run, tiers in saved.items():
        off_device[run] = {
            "activations": tiers["pinned_host"] + tiers["nvme"],
            "activations_on_disk": tiers["on_disk"],
        }
    return off_device


def _entered_bytes(streamed: StreamedStep, abstract_batch: Batch) -> int:
    """Return the bytes of the inputs and contexts of the stacks' `enter`, saved for backward."""
    spec = ActivationSpec(streamed.mesh, streamed.microbatches.count)
    lead = int(streamed.microbatches.count > 1)
    total = 0
    for a in jax.tree.leaves(streamed.abstract_entered(abstract_batch)):
        shape = a.shape[lead:]  # of one microbatch
        saved_spec = spec.saved(shape, shape[0] if shape else 0, "device")
        record = RecordSpec(streamed.mesh, saved_spec, "device")
        total += local_record_bytes(record, a.shape, a.dtype)
    return total


def _stored_grads(layout: Layout, streamed: StreamedStep) -> tuple[int, dict[str, int]]:
    """Return the bytes of gradients between backward and update.

    The first result is on the device, the second in host memory by kind.
    """
    config = layout.config
    stored_size = grad_itemsize(layout)
    summed_size = summed_itemsize(layout)
    unstacked = grad_elements(layout, blocks=False)
    summed = unstacked * summed_size
    if config.update == "in_forward":
        # Backward overwrites the pending gradients, which are part of the state, unless it sums
        # the gradients of embedding and head in another dtype.
        if streamed.host is None:
            return summed if summed_size != stored_size else 0, {}
        made = 0
        if not streamed.host.params_away:
            made = grad_elements(layout) * compute_itemsize(layout)
        # Backward adds to the gradients of embedding and head on the device.
        return summed, {"made": made}
    layers = 0
    if config.update != "in_backward":
        layers = grad_elements(layout, blocks=True) * stored_size

    device = max(summed, unstacked * stored_size)
    host: dict[str, int] = {}
    if streamed.host is None:
        if config.grads == "device":
            device += layers
        elif config.grads == "pinned_host":
            host["grads"] = layers
    elif not streamed.host.stashes:
        device += layers
    elif not streamed.host.on_disk:
        # Callbacks keep the gradients that wait off the device.
        host["stashed"] = layers
    if config.delayed_update:  # every leaf's gradient, and new parameters next to the old ones
        host["stashed"] = layers + unstacked * stored_size
        host["made"] = grad_elements(layout) * compute_itemsize(layout)
    return device, host
