"""Bytes of one program: what a step holds in each tier, sends over the mesh and moves over the host link.

`program_memory` counts, leaf by leaf and with the specs and tiers that were chosen, what `closed_forms` has in closed form:
leaves that do not divide, tensor parallelism and any optimizer's state are exact. Its `argument_bytes` are what a compiled step
takes as arguments on the device, its `host_argument_bytes` those in pinned host memory. Of a streamed step it counts what the
schedule moves:

    in flight    the most that a tick of `Schedule.in_flight` holds, over all phases
    host link    every fetch, read and write of every phase, once; unstacked leaves once a step

With `update_on="host"` gradients go down, and compute-dtype parameters up where they rest on the device: 2P + 2P bytes in 16
bits. Callbacks of the program move them, so the compiled program's own copies are the rest of `host_link`.
"""

import math
from typing import Any

import jax
import jax.extend.core as jex

from zerojax.memory.leaves import (
    both_ways,
    bytes_by_tier,
    collectives_of_step,
    gathered_bytes,
    grad_elements,
    grad_itemsize,
    moved_by_updates,
    summed,
    swapped_by_updates,
)
from zerojax.memory.report import MemoryReport, RunningBytes
from zerojax.memory.streamed import streamed_bytes
from zerojax.models import LayeredModel, Model
from zerojax.sharding import num_batch_shards
from zerojax.state import DiskLayout, Layout, StateRecords
from zerojax.streamed import StreamedStep


def program_memory(
    records: StateRecords,
    loss: Any,
    abstract_batch: Any,
    model: Model | LayeredModel,
    *,
    streamed: StreamedStep | None = None,
) -> MemoryReport:
    """Count the bytes of a step, leaf by leaf.

    Args:
      records: how the states of the program rest.
      loss: the plain loss, which is traced for its residuals unless the step is streamed.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
      model: of the program.
      streamed: the streamed step, where the program runs one.
    """
    layout, state = records.layout, records.layout.abstract_state
    pending = bytes_by_tier(state.pending)
    small = bytes_by_tier((state.step, state.skipped, state.key, state.loss_scale))["device"] + pending["device"]
    if streamed is not None:
        running = streamed_bytes(layout, streamed, abstract_batch)
        small += 4 + 4 * sum(a.size for arrays in streamed.schedule.arrays().values() for a in arrays.values())
    else:
        running = _resident_bytes(records, loss, abstract_batch, model)
        small += 4 if layout.updates_by_record else 0
    kinds = {
        "params": bytes_by_tier(state.params),
        "master": bytes_by_tier(state.master),
        "opt_state": bytes_by_tier(state.opt_state),
    }
    device = {kind: held["device"] for kind, held in kinds.items()} | {
        "batch": bytes_by_tier(abstract_batch)["device"],
        "scalars": small,
    }
    host = {kind: held["pinned_host"] for kind, held in kinds.items()} | {"pending": pending["pinned_host"]}
    on_disk, buffers, slots = ({}, {}, {}) if layout.disk is None else _disk_bytes(layout.disk)
    return MemoryReport(
        tiers={"device": device | running.device | slots, "pinned_host": host | running.host | buffers, "nvme": on_disk},
        collectives=collectives_of_step(layout, streamed),
        host_link=summed([running.link, running.called]),
        callback_link=running.called,
        num_params=sum(math.prod(leaf.shape) for leaf in layout.leaves),
    )


def _disk_bytes(disk: DiskLayout) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the bytes of a device's records by kind of state, of the buffers in host memory, and of a GPU's slots."""
    held: dict[str, int] = {}
    slots = 0
    for kind, records in disk.kinds.items():
        name = kind.split(".")[0]
        held[name] = held.get(name, 0) + records.num_layers * records.num_bytes
        slots += records.slot_bytes
    return held, {"buffers": disk.buffer_bytes(disk.kinds.values())}, {"slots": slots}


def _resident_bytes(records: StateRecords, loss: Any, abstract_batch: Any, model: Model | LayeredModel) -> RunningBytes:
    layout = records.layout
    num_layers = model.num_layers if isinstance(model, LayeredModel) else None
    updates, called = moved_by_updates(records, layout.ends)
    device = {
        "grads": grad_elements(layout) * grad_itemsize(layout),
        "gathered": gathered_bytes(layout, num_layers),
        "activations": _residual_bytes(layout, loss, abstract_batch),
        "in_flight": max(max(map(both_ways, updates), default=0), summed(called)["to_device"]),
    }
    swapped, link = summed(swapped_by_updates(records, layout.ends)), summed(updates)
    link = {way: link[way] - swapped[way] for way in link}
    return RunningBytes(device, {"grads": 0, "activations": 0}, link, summed([*called, swapped]))


def _residual_bytes(layout: Layout, loss: Any, abstract_batch: Any) -> int:
    """Return the bytes that a microbatch keeps from forward to backward on each device, parameters excluded.

    The loss is traced, not run. Residuals that are arguments are not counted; the rest is split as the batch is.
    """
    config = layout.config
    count = config.num_microbatches
    micro = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]) if len(a.shape) else a.shape, a.dtype),
        abstract_batch,
    )
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), layout.abstract_arrays.params)

    def residuals(params: Any, batch: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch, None), params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, micro).jaxpr
    kept: Any = {v for v in jaxpr.outvars if isinstance(v, jex.Var)} - set(jaxpr.invars)
    total = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in kept)
    return total // num_batch_shards(layout.mesh)
