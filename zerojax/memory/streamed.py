"""Bytes that a streamed step takes beside its arguments, and moves over the link.

Both follow from its schedule. A tick holds the records that are on their way in it, so the most that any tick holds is what the
step needs beside its arguments. Each fetch, read and write of each phase crosses the link once. Records count by kind:
parameters, gradients, optimizer state, activations. Unstacked leaves are loaded once, and updated after all layers.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from host_offload.schedule import Phase, Schedule, TiledSchedule
from zerojax.memory.leaves import compute_itemsize, gathered_bytes, grad_elements, grad_itemsize, local_record_bytes
from zerojax.memory.link import LinkBytes, both_ways, moved_by_updates, summed, swapped_by_updates
from zerojax.memory.report import RunningBytes
from zerojax.state import Layout
from zerojax.streamed import StreamedPlan, StreamedStep, record_bytes


def streamed_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any) -> RunningBytes:
    """Return what a streamed step takes beside its arguments, and what it moves over the link."""
    plan, num_layers = streamed.plan, streamed.model.num_layers
    residuals = _residual_bytes(layout, streamed, abstract_batch)
    gathered = gathered_bytes(layout, num_layers, 1 + layout.config.gather_ahead, any(r.is_away for r in plan.params))
    records = _record_bytes(layout, streamed, residuals, gathered)
    loaded = _loaded_bytes(layout, plan)
    grads, host_grads = _resting_grads(layout, streamed)
    device = {
        "grads": grads,
        "gathered": gathered,
        "activations": residuals["device"] * num_layers,
        # The schedule's peak includes what is gathered, which has a line of its own here.
        "in_flight": loaded + max(0, _peak_bytes(streamed, records) - gathered),
    }
    host = {"grads": 0, "activations": residuals["pinned_host"] * num_layers} | host_grads
    link, called = _link_bytes(streamed, records, residuals["nvme"], loaded)
    return RunningBytes(device, host, link, called)


def _residual_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any) -> dict[str, int]:
    """Return the bytes that one layer keeps from forward to backward, by tier."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_batch)
    residuals = streamed.abstract_residuals(shapes)
    tiers = {"device": 0, "pinned_host": 0, "nvme": 0}
    for record, a in zip(residuals.records, residuals.shapes, strict=True):
        tiers[record.tier] += local_record_bytes(record, a.shape, a.dtype)
    return tiers


@dataclasses.dataclass(frozen=True)
class _RecordBytes:
    """Bytes by kind of a layer's record, and after it of a tile of each group, on one device.

    Attributes:
      sizes: as the schedule counts them; "gathered" is what backward and forward hold whole.
      shards: bytes of the gradient of each, at rest.
      is_host_update: whether kernels on the host write the new parameters where they rest.
    """

    sizes: list[dict[str, int]]
    shards: list[int]
    is_host_update: bool

    @property
    def read(self) -> list[dict[str, int]]:
        """What a tick that reads moves of each kind: gradients are shards."""
        return [size | {"grads": shard} for size, shard in zip(self.sizes, self.shards, strict=True)]

    @property
    def written(self) -> list[dict[str, int]]:
        """What a tick that writes moves of each kind."""
        return [size | {"params": 0} for size in self.read] if self.is_host_update else self.read

    @property
    def in_backward(self) -> list[dict[str, int]]:
        """What a tick of backward holds of each kind: a gradient is reduced to a shard that is there beside it."""
        return [size | {"grads": size["grads"] + shard} for size, shard in zip(self.sizes, self.shards, strict=True)]


def _record_bytes(layout: Layout, streamed: StreamedStep, residuals: Mapping[str, int], gathered: int) -> _RecordBytes:
    plan = streamed.plan
    parts = zip(layout.record_parts, layout.frozen_parts, strict=True)
    sizes = [record_bytes(plan.state_records, part, frozen) for part, frozen in parts]
    # Those saved on the device do not move.
    sizes[0] |= {"activations": residuals["pinned_host"] + residuals["nvme"]}
    if not gathered:
        sizes = [size | {"gathered": 0} for size in sizes]
    return _RecordBytes(sizes, [_grad_shard_bytes(plan, part) for part in layout.record_parts], streamed.host is not None)


def _grad_shard_bytes(plan: StreamedPlan, part: Iterable[int]) -> int:
    """Return the bytes of the gradient of one record of some leaves."""
    shapes = [(i, plan.grad_shape(i)) for i in part]
    return sum(local_record_bytes(plan.grads[i], a.shape, a.dtype) for i, a in shapes)


def _resting_grads(layout: Layout, streamed: StreamedStep) -> tuple[int, dict[str, int]]:
    """Return the bytes of gradients between backward and update: on the device, and by kind in host memory."""
    config = layout.config
    ends = grad_elements(layout, blocks=False) * grad_itemsize(layout)
    layers = 0 if config.update == "in_backward" else grad_elements(layout, blocks=True) * grad_itemsize(layout)
    tier = config.grads
    if streamed.host is not None:  # callbacks keep what waits off the device
        tier = "device" if not streamed.host.stashes else "nvme" if streamed.host.on_disk is not None else "stashed"
    host: dict[str, int] = {"grads": layers} if tier == "pinned_host" else {"stashed": layers} if tier == "stashed" else {}
    if config.delayed_update:  # of every leaf, and the new parameters beside the old ones
        host |= {"stashed": layers + ends, "made": grad_elements(layout) * compute_itemsize(layout)}
    return ends + (layers if tier == "device" else 0), host


def _loaded_bytes(layout: Layout, plan: StreamedPlan, tiers: Sequence[str] = ("pinned_host", "nvme")) -> int:
    """Return the bytes of parameters that are not stacked, where they rest elsewhere: they are loaded once a step."""
    ends = [i for i in (*layout.ends, *layout.frozen_ends) if plan.params[i].tier in tiers]
    leaves = layout.all_leaves
    return sum(local_record_bytes(plan.params[i], leaves[i].shape, leaves[i].dtype) for i in ends)


def _peak_bytes(streamed: StreamedStep, records: _RecordBytes) -> int:
    """Return the most bytes that are on their way at once, with those gathered.

    Leaves that are not stacked are updated after all layers: one at a time by the device, all at once by callbacks.
    """
    copied, called = moved_by_updates(streamed.plan.state_records, streamed.plan.ends)
    _, layer_called = moved_by_updates(streamed.plan.state_records, streamed.plan.blocks)
    # The loops, and what their ticks do not count: updates by callbacks, and of leaves that are no stack of layers.
    peaks = [
        _peak(streamed.schedule, records.sizes, "forward"),
        _peak(streamed.schedule, records.in_backward, "backward"),
        both_ways(summed(layer_called)),
        max(map(both_ways, copied), default=0),
        summed(called)["to_device"],
    ]
    if streamed.layout.config.update != "in_backward":
        peaks.append(_peak(streamed.schedule, records.written, "update"))
    return max(peaks)


def _link_bytes(streamed: StreamedStep, records: _RecordBytes, on_disk: int, loaded: int) -> tuple[LinkBytes, LinkBytes]:
    """Return what the compiled program copies over the link in a step, and what its callbacks move.

    Args:
      streamed: the step.
      records: bytes of its records.
      on_disk: bytes that a layer keeps on nvme from forward to backward.
      loaded: bytes of parameters that are not stacked.
    """
    plan, tiers = streamed.plan, streamed.schedule.tiers
    copied, called = moved_by_updates(plan.state_records, plan.ends)
    _, layer_called = moved_by_updates(plan.state_records, plan.blocks)
    read = records.read
    swapped_read = [{kind: n if tiers[kind] == "nvme" else 0 for kind, n in size.items() if kind in tiers} for size in read]
    # Activations on nvme move with callbacks; those in host memory are copies of the program.
    swapped_read[0]["activations"] = on_disk
    swapped_written = [size | {"params": 0} for size in swapped_read] if records.is_host_update else swapped_read
    swaps = swapped_by_updates(plan.state_records, plan.ends)
    swapped = summed([_schedule_link(streamed, swapped_read, swapped_written), *swaps])
    swapped["to_device"] += _loaded_bytes(streamed.layout, plan, ("nvme",))
    moved = summed([_schedule_link(streamed, read, records.written), {"to_device": loaded}, *copied])
    # Callbacks move what rests on nvme, so it is no copy of the compiled program.
    link = {way: moved[way] - swapped[way] for way in moved}
    return link, summed([*called, *layer_called * streamed.model.num_layers, swapped])


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
    schedule, runs = streamed.schedule, streamed.tracer.tile_loops()
    groups = {loops.name: n for n, (_, loops) in enumerate(streamed.plan.loops, 1)}
    moved: list[LinkBytes] = []
    for phase in schedule.phases:
        moved.append(_phase_link(phase, read[0], written[0]))
        # Forward and backward run their loops over tiles in each tick.
        for loops, name in runs.get(phase.name, ()):
            n = groups[loops.name]
            moved += [_phase_link(loops.phase(name), read[n], written[n])] * schedule.num_layers
        # After the layers, update runs one loop over the tiles of all of them.
        if phase.name == "update":
            moved += [_phase_link(loops.phase("update"), read[n], written[n]) for n, (_, loops) in
                      enumerate(streamed.plan.loops, 1)]  # fmt: skip
    return summed(moved)


def _phase_link(phase: Phase, read: Mapping[str, int], written: Mapping[str, int]) -> LinkBytes:
    """Return what one loop moves, given the bytes of a record by kind."""

    def moved(size: Mapping[str, int], kinds: Iterable[str], layers: Iterable[int]) -> int:
        # The optimizer state of the first layers may stay on the device.
        away = {kind: phase.device_layers if kind == "opt_state" else 0 for kind in kinds}
        return sum(size[kind] for layer in layers for kind in kinds if layer >= away[kind])

    fetched = [phase.first, *phase.preload.tolist(), *phase.fetch.tolist()]
    # -1 means that a tick fetches nothing.
    to_device = moved(read, phase.fetches, (layer for layer in fetched if layer >= 0))
    to_device += moved(read, phase.reads, phase.layer.tolist())
    return {"to_device": to_device, "to_host": moved(written, phase.writes, phase.layer.tolist())}
