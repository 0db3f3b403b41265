"""Bytes that a streamed step takes beside its arguments, and moves over the link."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from host_offload.schedule import Phase, Schedule, TiledSchedule
from zerojax.memory.leaves import (
    LinkBytes,
    both_ways,
    compute_itemsize,
    gathered_bytes,
    grad_elements,
    grad_itemsize,
    local_record_bytes,
    moved_by_updates,
    summed,
    swapped_by_updates,
)
from zerojax.memory.report import RunningBytes
from zerojax.state import Layout
from zerojax.streamed import StreamedPlan, StreamedStep, record_bytes


def streamed_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any) -> RunningBytes:
    """Return what a streamed step takes beside its arguments, and what it moves over the link."""
    config, state_records = layout.config, streamed.plan.state_records
    num_layers = streamed.model.num_layers
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_batch)
    whole = streamed.abstract_residuals(layout.abstract_arrays.params, shapes)
    kept = {"device": 0, "pinned_host": 0, "nvme": 0}
    for record, a in zip(whole.records, whole.shapes, strict=True):
        kept[record.tier] += local_record_bytes(record, a.shape, a.dtype)

    records = streamed.plan
    parts = layout.record_parts  # a layer's record, and a tile of each group
    shards = [sum(local_record_bytes(records.grads[i], a.shape, a.dtype) for i, a in _grads(records, part)) for part in parts]
    sizes = [record_bytes(state_records, part) for part in parts]
    sizes[0] |= {"activations": kept["pinned_host"] + kept["nvme"]}
    ends = grad_elements(layout, blocks=False) * grad_itemsize(layout)
    stored = 0 if config.update == "in_backward" else grad_elements(layout, blocks=True) * grad_itemsize(layout)
    host = {"grads": 0, "activations": kept["pinned_host"] * num_layers}
    rests = config.grads
    if streamed.host is not None:  # callbacks keep what waits off the device
        rests = "device" if not streamed.host.stashes else "nvme" if streamed.host.on_disk is not None else "stashed"
    if rests == "pinned_host":
        host["grads"] = stored
    elif rests == "stashed":
        host["stashed"] = stored
    if config.delayed_update:  # every leaf's
        host |= {"stashed": stored + ends, "made": grad_elements(layout) * compute_itemsize(layout)}

    # What is not stacked: loaded once, and updated after all layers, one leaf at a time (all at once by callbacks).
    loaded = sum(
        local_record_bytes(streamed.plan.params[i], layout.leaves[i].shape, layout.leaves[i].dtype)
        for i in streamed.plan.ends
        if streamed.plan.params_away
    )
    updates, called = moved_by_updates(state_records, streamed.plan.ends)
    _, layer_called = moved_by_updates(state_records, streamed.plan.blocks)
    gathered = gathered_bytes(layout, num_layers, 1 + config.gather_ahead, streamed.plan.params_away)
    if not gathered:
        sizes = [size | {"gathered": 0} for size in sizes]
    read = [size | {"grads": shard} for size, shard in zip(sizes, shards, strict=True)]
    written = read if streamed.host is None else [size | {"params": 0} for size in read]  # kernels write where they rest
    made = [size | {"grads": size["grads"] + shard} for size, shard in zip(sizes, shards, strict=True)]
    peaks = [
        _peak(streamed.schedule, sizes, "forward"),
        _peak(streamed.schedule, made, "backward"),
        both_ways(summed(layer_called)),
        max(map(both_ways, updates), default=0),
        summed(called)["to_device"],
    ]
    if config.update != "in_backward":
        peaks.append(_peak(streamed.schedule, written, "update"))
    device = {
        "grads": ends + (stored if rests == "device" else 0),
        "gathered": gathered,
        "activations": kept["device"] * num_layers,
        "in_flight": loaded + max(0, max(peaks) - gathered),
    }
    moved = _schedule_link(streamed, read, written)
    tiers, swaps = streamed.schedule.tiers, swapped_by_updates(state_records, streamed.plan.ends)
    by_disk = [{kind: n if tiers[kind] == "nvme" else 0 for kind, n in size.items() if kind in tiers} for size in read]
    by_disk[0]["activations"] = kept["nvme"]
    kept_up = {} if streamed.host is None else {"params": 0}
    swapped = summed([_schedule_link(streamed, by_disk, [size | kept_up for size in by_disk]), *swaps])
    if config.params == "nvme":
        swapped["to_device"] += loaded
    link = summed([moved, {"to_device": loaded}, *updates])
    link = {way: link[way] - swapped[way] for way in link}
    return RunningBytes(device, host, link, summed([*called, *layer_called * num_layers, swapped]))


def _grads(records: StreamedPlan, part: Iterable[int]) -> list[tuple[int, jax.ShapeDtypeStruct]]:
    """Return the gradient of a record of some leaves, each with its index."""
    return [(i, records.grad_shape(i)) for i in part]


def _peak(schedule: Schedule, sizes: Sequence[Mapping[str, int]], phase: str) -> int:
    """Return the most bytes in flight in a tick of a phase, with other sizes than the schedule was built with.

    Args:
      schedule: of the step.
      sizes: of a layer's record, and of a tile of each group.
      phase: its name.
    """
    schedule = dataclasses.replace(schedule, record_bytes=sizes[0])
    if isinstance(schedule, TiledSchedule):
        pairs = zip(schedule.tiles, sizes[1:], strict=True)
        schedule = dataclasses.replace(schedule, tiles=tuple(loops.with_bytes(size) for loops, size in pairs))
    return max(int(total.max()) for name, total in schedule.in_flight().items() if name.split("/")[0] == phase)


def _schedule_link(
    streamed: StreamedStep, read: Sequence[Mapping[str, int]], written: Sequence[Mapping[str, int]]
) -> LinkBytes:
    """Return what the phases of a schedule move, given the bytes by kind of a layer's record, and of a tile of each group."""
    schedule, inside = streamed.schedule, streamed.tracer.tile_loops()
    groups = {loops.name: n for n, (_, loops) in enumerate(streamed.plan.loops, 1)}
    moved: list[LinkBytes] = []
    for phase in schedule.phases:
        moved.append(_phase_link(phase, read[0], written[0]))
        for loops, name in inside.get(phase.name, ()):
            n = groups[loops.name]
            moved += [_phase_link(loops.phase(name), read[n], written[n])] * schedule.num_layers
        if phase.name == "update":
            moved += [_phase_link(loops.phase("update"), read[n], written[n]) for n, (_, loops) in
                      enumerate(streamed.plan.loops, 1)]  # fmt: skip
    return summed(moved)


def _phase_link(phase: Phase, read: Mapping[str, int], written: Mapping[str, int]) -> LinkBytes:
    """Return what one loop moves, given the bytes of a record by kind."""

    def moved(size: Mapping[str, int], kinds: Iterable[str], layers: Iterable[int]) -> int:
        away = {kind: phase.device_layers if kind == "opt_state" else 0 for kind in kinds}
        return sum(size[kind] for layer in layers for kind in kinds if layer >= away[kind])

    fetched = [phase.first, *phase.preload.tolist(), *phase.fetch.tolist()]
    to_device = moved(read, phase.fetches, (layer for layer in fetched if layer >= 0))
    to_device += moved(read, phase.reads, phase.layer.tolist())
    return {"to_device": to_device, "to_host": moved(written, phase.writes, phase.layer.tolist())}
