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
from zerojax.memory.leaves import (
    compute_itemsize,
    gathered_bytes,
    grad_elements,
    grad_itemsize,
    local_record_bytes,
    unreduced_bytes,
)
from zerojax.memory.link import LinkBytes, both_ways, moved_by_updates, summed, swapped_by_updates, updated_alone
from zerojax.memory.report import RunningBytes
from zerojax.sharding import ActivationSpec
from zerojax.state import Layout, RecordSpec
from zerojax.streamed import ResidualPlan, StackLoops, StreamedPlan, StreamedStep, record_bytes


def streamed_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any) -> RunningBytes:
    """Return what a streamed step takes beside its arguments, and what it moves over the link."""
    plan = streamed.plan
    gathered = gathered_bytes(layout, 1 + layout.config.gather_ahead, any(r.is_away for r in plan.params))
    stacks, between = _stack_bytes(layout, streamed, abstract_batch, gathered)
    loaded = _loaded_bytes(layout, plan)
    grads, host_grads = _resting_grads(layout, streamed)

    def saved(tier: str) -> int:
        return sum(stack.saved[tier] * stack.loops.stack.num_layers for stack in stacks)

    device = {
        "grads": grads,
        # Those of embedding and head live through backward; a layer's are in flight in its tick.
        "unreduced": unreduced_bytes(layout, blocks=False),
        "gathered": gathered,
        "activations": saved("device") + between,
        # The schedule's peak includes what is gathered, which has a line of its own here.
        "in_flight": loaded + max(0, _peak_bytes(streamed, stacks) - gathered),
    }
    host = {"grads": 0, "activations": saved("pinned_host")} | host_grads
    link, called = _link_bytes(streamed, stacks, loaded)
    return RunningBytes(device, host, link, called)


def _saved_bytes(residuals: ResidualPlan) -> dict[str, int]:
    """Return the bytes that one layer keeps from forward to backward, by tier."""
    tiers = {"device": 0, "pinned_host": 0, "nvme": 0}
    for record, a in zip(residuals.records, residuals.shapes, strict=True):
        tiers[record.tier] += local_record_bytes(record, a.shape, a.dtype)
    return tiers


@dataclasses.dataclass(frozen=True)
class _StackBytes:
    """Bytes by kind of a layer's record of one stack, and after it of a tile of each group, on one device.

    Attributes:
      loops: over the stack.
      saved: what one layer keeps from forward to backward, by tier.
      sizes: as the schedule counts them; "gathered" is what backward and forward hold whole.
      shards: bytes of the gradient of each, at rest.
      is_host_update: whether kernels on the host write the new parameters where they rest.
    """

    loops: StackLoops
    saved: dict[str, int]
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


def _stack_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any, gathered: int) -> tuple[list[_StackBytes], int]:
    """Return the bytes of each stack, and those of activations that are kept between stacks until backward."""
    plan = streamed.plan
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_batch)
    stacks: list[_StackBytes] = []
    for loops, residuals in zip(streamed.loops, streamed.abstract_residuals(shapes), strict=True):
        leaves, saved = loops.stack.leaves, _saved_bytes(residuals)
        parts = zip(leaves.parts, leaves.frozen_parts, strict=True)
        sizes = [record_bytes(plan.state_records, part, frozen) for part, frozen in parts]
        # Those saved on the device do not move.
        sizes[0] |= {"activations": saved["pinned_host"] + saved["nvme"]}
        if not gathered:
            sizes = [size | {"gathered": 0} for size in sizes]
        shards = [_grad_shard_bytes(plan, part) for part in leaves.parts]
        stacks.append(_StackBytes(loops, saved, sizes, shards, streamed.host is not None))
    return stacks, _entered_bytes(streamed, shapes)


def _entered_bytes(streamed: StreamedStep, abstract_batch: Any) -> int:
    """Return the bytes of what the `enter` of stacks is given, and of the contexts that it makes, kept for backward."""
    spec, lead = ActivationSpec(streamed.mesh, streamed.microbatches.count), int(streamed.microbatches.count > 1)
    total = 0
    for a in jax.tree.leaves(streamed.abstract_entered(abstract_batch)):
        of_one = a.shape[lead:]
        record = RecordSpec(streamed.mesh, spec.saved(of_one, of_one[0] if of_one else 0, "device"), "device")
        total += local_record_bytes(record, a.shape, a.dtype)
    return total


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
        tier = "device" if not streamed.host.stashes else "nvme" if streamed.host.on_disk else "stashed"
    host: dict[str, int] = {"grads": layers} if tier == "pinned_host" else {"stashed": layers} if tier == "stashed" else {}
    if config.delayed_update:  # of every leaf, and the new parameters beside the old ones
        host |= {"stashed": layers + ends, "made": grad_elements(layout) * compute_itemsize(layout)}
    return ends + (layers if tier == "device" else 0), host


def _loaded_bytes(layout: Layout, plan: StreamedPlan, tiers: Sequence[str] = ("pinned_host", "nvme")) -> int:
    """Return the bytes of parameters that are not stacked, where they rest elsewhere: they are loaded once a step."""
    ends = [i for i in (*layout.ends, *layout.frozen_ends) if plan.params[i].tier in tiers]
    leaves = layout.all_leaves
    return sum(local_record_bytes(plan.params[i], leaves[i].shape, leaves[i].dtype) for i in ends)


def _peak_bytes(streamed: StreamedStep, stacks: Sequence[_StackBytes]) -> int:
    """Return the most bytes that are on their way at once, with those gathered.

    Leaves that are not stacked are updated after all layers: one at a time by the device, large ones in pieces, all at once by
    callbacks. Where records are stored late, those that the head completes are updated at once before backward, and the others
    in groups, each of which is stored while the next one is loaded.
    """
    plan, records = streamed.plan, streamed.plan.state_records
    _, called = moved_by_updates(records, plan.ends)
    alone = {} if plan.update is None else plan.update.num_pieces()
    # The ticks of backward count the pieces of the head.
    alone = {i: count for i, count in alone.items() if i not in plan.head_pieces}
    peaks = [updated_alone(records, alone), summed(called)["to_device"]]
    if plan.early_ends:
        peaks.append(both_ways(summed(moved_by_updates(records, plan.early_ends)[0])))
    if plan.drained is not None:
        (phase,) = (phase for phase in plan.drained.schedule.phases if phase.stores_late)
        waits = sum(stacks[plan.of_stacks.index(plan.drained)].sizes[0][kind] for kind in phase.writes)
        for group in plan.end_groups():
            moved = summed(moved_by_updates(records, group)[0])
            peaks.append(waits + both_ways(moved))
            waits = moved["to_host"]
    for stack in stacks:
        schedule, blocks = stack.loops.stack.schedule, stack.loops.stack.blocks
        _, layer_called = moved_by_updates(records, blocks)
        # The loops, and what their ticks do not count: updates by callbacks, and of leaves that are no stack of layers.
        peaks += [
            _peak(schedule, stack.sizes, "forward"),
            _peak(schedule, stack.in_backward, "backward"),
            both_ways(summed(layer_called)),
        ]
        if any(phase.name == "update" for phase in schedule.phases):
            peaks.append(_peak(schedule, stack.written, "update"))
    return max(peaks)


def _link_bytes(streamed: StreamedStep, stacks: Sequence[_StackBytes], loaded: int) -> tuple[LinkBytes, LinkBytes]:
    """Return what the compiled program copies over the link in a step, and what its callbacks move.

    Args:
      streamed: the step.
      stacks: bytes of the records of each.
      loaded: bytes of parameters that are not stacked.
    """
    plan = streamed.plan
    copied, called = moved_by_updates(plan.state_records, plan.ends)
    swapped, moved = swapped_by_updates(plan.state_records, plan.ends), [{"to_device": loaded}, *copied]
    for stack in stacks:
        of_stack, tiers = stack.loops.stack, stack.loops.stack.schedule.tiers
        _, layer_called = moved_by_updates(plan.state_records, of_stack.blocks)
        called += layer_called * of_stack.num_layers
        read = stack.read
        on_disk = [{kind: n if tiers[kind] == "nvme" else 0 for kind, n in size.items() if kind in tiers} for size in read]
        # Activations on nvme move with callbacks; those in host memory are copies of the program.
        on_disk[0]["activations"] = stack.saved["nvme"]
        written = [size | {"params": 0} for size in on_disk] if stack.is_host_update else on_disk
        swapped.append(_schedule_link(stack.loops, on_disk, written))
        moved.append(_schedule_link(stack.loops, read, stack.written))
    by_callbacks, both = summed(swapped), summed(moved)
    by_callbacks["to_device"] += _loaded_bytes(streamed.layout, plan, ("nvme",))
    # Callbacks move what rests on nvme, so it is no copy of the compiled program.
    link = {way: both[way] - by_callbacks[way] for way in both}
    return link, summed([*called, by_callbacks])


def _peak(schedule: Schedule, sizes: Sequence[Mapping[str, int]], phase: str) -> int:
    """Return the most bytes in flight in a tick of a phase, with other sizes than the schedule was built with.

    Args:
      schedule: of the stack.
      sizes: of a layer's record, and of a tile of each group.
      phase: its name.
    """
    schedule = dataclasses.replace(schedule, record_bytes=sizes[0])
    if isinstance(schedule, TiledSchedule):
        pairs = zip(schedule.tiles, sizes[1:], strict=True)
        schedule = dataclasses.replace(schedule, tiles=tuple(loops.with_bytes(size) for loops, size in pairs))
    return max(int(total.max()) for name, total in schedule.in_flight().items() if name.split("/")[0] == phase)


def _schedule_link(loops: StackLoops, read: Sequence[Mapping[str, int]], written: Sequence[Mapping[str, int]]) -> LinkBytes:
    """Return what the phases of a stack move, given the bytes by kind of a layer's record, and of a tile of each group."""
    schedule, runs, of_groups = loops.stack.schedule, loops.tracer.tile_loops(), loops.stack.loops
    groups = {tiles.name: n for n, (_, tiles) in enumerate(of_groups, 1)}
    moved: list[LinkBytes] = []
    for phase in schedule.phases:
        moved.append(_phase_link(phase, read[0], written[0]))
        # Forward and backward run their loops over tiles in each tick.
        for tiles, name in runs.get(phase.name, ()):
            n = groups[tiles.name]
            moved += [_phase_link(tiles.phase(name), read[n], written[n])] * schedule.num_layers
        # After the layers, update runs one loop over the tiles of all of them.
        if phase.name == "update":
            moved += [_phase_link(tiles.phase("update"), read[n], written[n]) for n, (_, tiles) in enumerate(of_groups, 1)]
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
