"""Bytes of one program: what a step holds in each tier, sends over the mesh and moves over the host link.

`program_memory` counts, leaf by leaf and with the specs and tiers that were chosen, what `zerojax.memory` has in closed form:
leaves that do not divide, tensor parallelism and any optimizer's state are exact. Its `argument_bytes` are what a compiled step
takes as arguments on the device, its `host_argument_bytes` those in pinned host memory. Of a streamed step it counts what the
schedule moves:

    in flight    the most that a tick of `Schedule.in_flight` holds, over all phases
    host link    every fetch, read and write of every phase, once; unstacked leaves once a step

With `update_on="host"` gradients go down, and compute-dtype parameters up where they rest on the device: 2P + 2P bytes in 16
bits. Callbacks of the program move them, so the compiled program's own copies are the rest of `host_link`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from host_offload.schedule import Phase, Schedule
from host_offload.tile_schedule import TiledSchedule
from zerojax.born import is_away
from zerojax.disk import Disk
from zerojax.gather import without_axis
from zerojax.layout import Layout
from zerojax.memory import collective_elements
from zerojax.mesh import DATA, FSDP, num_batch_shards
from zerojax.model import BLOCKS, LayeredModel, Model
from zerojax.optim import stored_spec
from zerojax.partition import local_elements
from zerojax.parts import Parts
from zerojax.precision import PRECISIONS
from zerojax.records import Record
from zerojax.stages import STAGES
from zerojax.streamed_layout import StreamedLayout, record_bytes
from zerojax.streaming import StreamedStep


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of one step on each device, and in host memory for it.

    Attributes:
      tiers: {tier: {kind: bytes}}. Kinds "params", "master", "opt_state", "batch" and "scalars" (with the schedule's arrays, of
        which XLA may drop some) are arguments of the step. While it runs there are also

          - "grads": between backward and update.
          - "activations": between forward and backward; of a streamed step, those of all microbatches.
          - "gathered": the largest layer or leaf held whole; two layers with gather_ahead.
          - "in_flight": other records on their way between tiers, and a layer's gradient before it is stored, in the tick that
            holds the most. With "gathered" it is the peak of the schedule.
          - "slots": of the nvme tier on a GPU, where records are on their way beside the program.

        Gradients and activations of a streamed step in "pinned_host" are arguments too, as are the "pending" gradients of a
        delayed update. No argument are the gradients that callbacks keep for an update on the host, "stashed", the
        parameters that a delayed one makes beside the old ones, "made", and the "buffers" of the nvme tier. On disk the
        masters are part of "opt_state", and bytes are those of files.
      collectives: bytes that each device sends, by collective.
      host_link: bytes that cross each device's link to the host in a step: "to_device" and "to_host".
      callback_link: those of them that callbacks move, for an update on the host and for the nvme tier.
      num_params: P, tensor-parallel shards counted once.
    """

    tiers: Mapping[str, Mapping[str, int]]
    collectives: Mapping[str, int]
    host_link: Mapping[str, int]
    callback_link: Mapping[str, int]
    num_params: int

    @property
    def argument_bytes(self) -> int:
        """Bytes that a compiled step takes as device arguments."""
        return sum(self.tiers["device"][kind] for kind in (*_STATE, "batch", "scalars"))

    @property
    def host_argument_bytes(self) -> int:
        """Bytes that a compiled step takes as arguments in pinned host memory."""
        return sum(n for kind, n in self.tiers["pinned_host"].items() if kind not in ("stashed", "made", "buffers"))

    @property
    def device_bytes(self) -> int:
        """Bytes of every kind on the device. What a layer needs to compute, beside what is kept of it, is not part of it."""
        return sum(self.tiers["device"].values())

    @property
    def model_state_bytes(self) -> int:
        """Bytes of model states in every tier: parameters, gradients, master weights, optimizer state."""
        return sum(t.get(kind, 0) for t in self.tiers.values() for kind in (*_STATE, *_GRADS))

    def __str__(self) -> str:
        rows = [f"{self.num_params:,} parameters; bytes on each device"]
        for tier, kinds in self.tiers.items():
            rows += [f"  {tier:<12} {kind:<12} {n:>20,}" for kind, n in kinds.items() if n]
        rows += [f"  {'sent a step':<12} {name:<14} {n:>18,}" for name, n in self.collectives.items() if n]
        rows += [f"  {'host link':<12} {name:<14} {n:>18,}" for name, n in self.host_link.items() if n]
        return "\n".join(rows)


_STATE = ("params", "master", "opt_state")
_GRADS = ("grads", "pending", "stashed")


def program_memory(
    layout: Layout,
    loss: Any,
    abstract_batch: Any,
    model: Model | LayeredModel,
    *,
    streamed: StreamedStep | None = None,
    parts: Parts | None = None,
) -> MemoryReport:
    """Count the bytes of a step, leaf by leaf.

    Args:
      layout: of the program.
      loss: the plain loss, which is traced for its residuals unless the step is streamed.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
      model: of the program.
      streamed: the streamed step, where the program runs one.
      parts: how the optimizer is applied, where it is by parts.
    """
    state, leaves = layout.abstract_state, _leaves(layout)
    pending = _held(state.pending)
    small = _held((state.step, state.skipped, state.key, state.loss_scale))["device"] + pending["device"]
    if streamed is not None:
        running = _streamed_bytes(layout, streamed, abstract_batch)
        small += 4 + 4 * sum(a.size for arrays in streamed.schedule.arrays().values() for a in arrays.values())
    else:
        running = _resident_bytes(layout, loss, abstract_batch, model, parts)
        small += 0 if parts is None else 4
    kinds = {"params": _held(state.params), "master": _held(state.master), "opt_state": _held(state.opt_state)}
    device = {kind: held["device"] for kind, held in kinds.items()} | {
        "batch": _held(abstract_batch)["device"],
        "scalars": small,
    }
    host = {kind: held["pinned_host"] for kind, held in kinds.items()} | {"pending": pending["pinned_host"]}
    on_disk, buffers, slots = ({}, {}, {}) if layout.disk is None else _disk_bytes(layout.disk)
    return MemoryReport(
        tiers={"device": device | running.device | slots, "pinned_host": host | running.host | buffers, "nvme": on_disk},
        collectives=_collectives(layout, leaves, streamed),
        host_link=_sum([running.link, running.called]),
        callback_link=running.called,
        num_params=sum(math.prod(leaf.shape) for leaf in leaves.values()),
    )


def _disk_bytes(disk: Disk) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the bytes of a device's records by kind of state, of the buffers in host memory, and of a GPU's slots."""
    held: dict[str, int] = {}
    slots = 0
    for kind, records in disk.kinds.items():
        name = kind.split(".")[0]
        held[name] = held.get(name, 0) + records.num_layers * records.num_bytes
        slots += records.slot_bytes
    return held, {"buffers": disk.buffer_bytes(disk.kinds.values())}, {"slots": slots}


@dataclasses.dataclass(frozen=True)
class _Running:
    """Bytes beside the arguments, while a step runs: by kind on the device and on the host, and over the link.

    `link` is what the compiled program copies, `called` what its callbacks do.
    """

    device: dict[str, int]
    host: dict[str, int]
    link: dict[str, int]
    called: dict[str, int]


def _leaves(layout: Layout) -> dict[str, Any]:
    """Return the abstract float32 parameters by path."""
    return {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]}


def _itemsize(layout: Layout) -> int:
    return jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize


def _grad_itemsize(layout: Layout) -> int:
    """Return the bytes of an element of a gradient at rest: microbatches are summed in float32."""
    return _itemsize(layout) if layout.config.num_microbatches == 1 else 4


def _grad_elements(layout: Layout, blocks: bool | None = None) -> int:
    """Return the elements of the gradients on one device: of all leaves, of the stacked layers, or of the other leaves."""
    sharded = STAGES[layout.config.stage].opt_state
    return sum(
        local_elements(leaf.shape, stored_spec(layout.specs[path], sharded), layout.mesh)
        for path, leaf in _leaves(layout).items()
        if blocks is None or path.startswith(f"['{BLOCKS}']") == blocks
    )


def _gathered_bytes(layout: Layout, num_layers: int | None, layers: int = 1, fetched: bool = False) -> int:
    """Return the bytes of the largest unit held whole beside its shards.

    Args:
      layout: of the program.
      num_layers: None for a Model, whose units are its leaves; else they are the embedding, the head and `layers` layers.
      layers: layers held at once.
      fetched: parameters come from another tier, so that a layer takes its bytes even where nothing is split.
    """
    if not STAGES[layout.config.stage].params or (layout.mesh.shape[FSDP] == 1 and not fetched):
        return 0
    whole: dict[str, int] = {}
    of_tile: dict[str, int] = {}
    names = list(_leaves(layout))
    tiles = {names[i]: group for group in layout.tiles for i in group.leaves}
    for path, leaf in _leaves(layout).items():
        size = local_elements(leaf.shape, without_axis(layout.specs[path].sharded, FSDP), layout.mesh) * _itemsize(layout)
        unit = path if num_layers is None else path.split("]")[0]
        if num_layers is not None and path.startswith(f"['{BLOCKS}']"):
            size = size // num_layers * layers
            if (group := tiles.get(path)) is not None:
                of_tile[group.name] = of_tile.get(group.name, 0) + size // group.num_tiles
                continue
        whole[unit] = whole.get(unit, 0) + size
    if of_tile:  # tiles are gathered one by one, beside what else a layer has
        whole[BLOCKS] = whole.pop(f"['{BLOCKS}'", 0) + max(of_tile.values())
    return max(whole.values())


def _resident_bytes(
    layout: Layout, loss: Any, abstract_batch: Any, model: Model | LayeredModel, parts: Parts | None
) -> _Running:
    num_layers = model.num_layers if isinstance(model, LayeredModel) else None
    updates, called = _updates(parts, parts.ends if parts is not None else ())
    device = {
        "grads": _grad_elements(layout) * _grad_itemsize(layout),
        "gathered": _gathered_bytes(layout, num_layers),
        "activations": _residual_bytes(layout, loss, abstract_batch),
        "in_flight": max(max(map(_both, updates), default=0), _sum(called)["to_device"]),
    }
    swapped, link = _sum(_swaps(parts, parts.ends if parts is not None else ())), _sum(updates)
    link = {way: link[way] - swapped[way] for way in link}
    return _Running(device, {"grads": 0, "activations": 0}, link, _sum([*called, swapped]))


# --- the streamed step -----------------------------------------------------------------------------------------------------


def _streamed_bytes(layout: Layout, streamed: StreamedStep, abstract_batch: Any) -> _Running:
    config, parts = layout.config, streamed.parts
    num_layers = streamed.model.num_layers
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_batch)
    whole = streamed.abstract_kept(layout.abstract_arrays.params, shapes)
    kept = {"device": 0, "pinned_host": 0, "nvme": 0}
    for record, a in zip(whole.records, whole.shapes, strict=True):
        kept[record.tier] += _record_bytes(record, a.shape, a.dtype)

    records = streamed.records
    held = [records.blocks, *(group.leaves for group in records.groups)]  # a layer's record, and a tile of each group
    shards = [sum(_record_bytes(records.grads[i], a.shape, a.dtype) for i, a in _grads(records, part)) for part in held]
    sizes = [record_bytes(layout, parts, part) for part in held]
    sizes[0] |= {"activations": kept["pinned_host"] + kept["nvme"]}
    ends = _grad_elements(layout, blocks=False) * _grad_itemsize(layout)
    stored = 0 if config.update == "in_backward" else _grad_elements(layout, blocks=True) * _grad_itemsize(layout)
    host = {"grads": 0, "activations": kept["pinned_host"] * num_layers}
    rests = config.grads
    if streamed.host is not None:  # callbacks keep what waits off the device
        rests = "device" if not streamed.host.stashes else "nvme" if streamed.host.on_disk is not None else "stashed"
    if rests == "pinned_host":
        host["grads"] = stored
    elif rests == "stashed":
        host["stashed"] = stored
    if config.delayed_update:  # every leaf's
        host |= {"stashed": stored + ends, "made": _grad_elements(layout) * _itemsize(layout)}

    # What is not stacked: loaded once, and updated after all layers, one leaf at a time (all at once by callbacks).
    loaded = sum(
        _record_bytes(streamed.records.params[i], streamed.records.abstract[i].shape, streamed.records.abstract[i].dtype)
        for i in streamed.records.ends
        if streamed.records.params_away
    )
    updates, called = _updates(parts, streamed.records.ends)
    _, layer_called = _updates(parts, streamed.records.blocks)
    gathered = _gathered_bytes(layout, num_layers, 1 + config.gather_ahead, streamed.records.params_away)
    if not gathered:
        sizes = [size | {"gathered": 0} for size in sizes]
    read = [size | {"grads": shard} for size, shard in zip(sizes, shards, strict=True)]
    written = read if streamed.host is None else [size | {"params": 0} for size in read]  # kernels write where they rest
    made = [size | {"grads": size["grads"] + shard} for size, shard in zip(sizes, shards, strict=True)]
    peaks = [
        _peak(streamed.schedule, sizes, "forward"),
        _peak(streamed.schedule, made, "backward"),
        _both(_sum(layer_called)),
        max(map(_both, updates), default=0),
        _sum(called)["to_device"],
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
    tiers, swaps = streamed.schedule.tiers, _swaps(parts, streamed.records.ends)
    by_disk = [{kind: n if tiers[kind] == "nvme" else 0 for kind, n in size.items() if kind in tiers} for size in read]
    by_disk[0]["activations"] = kept["nvme"]
    kept_up = {} if streamed.host is None else {"params": 0}
    swapped = _sum([_schedule_link(streamed, by_disk, [size | kept_up for size in by_disk]), *swaps])
    if config.params == "nvme":
        swapped["to_device"] += loaded
    link = _sum([moved, {"to_device": loaded}, *updates])
    link = {way: link[way] - swapped[way] for way in link}
    return _Running(device, host, link, _sum([*called, *layer_called * num_layers, swapped]))


def _record_bytes(record: Record, shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of one device's part of a record. What XLA may split as it likes counts as whole."""
    spec = tuple(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in record.spec)
    return local_elements(shape, spec, record.mesh) * jnp.dtype(dtype).itemsize


_Moved = dict[str, int]
"""Bytes over the link: "to_device" and "to_host", 0 where missing."""


def _updates(parts: Parts | None, indices: Iterable[int]) -> tuple[list[_Moved], list[_Moved]]:
    """Return what the updates of some leaves move, of one layer where they are stacked: by copies, and by callbacks."""
    if parts is None:
        return [], []
    if parts.layout.config.update_on == "host":
        return [], [_host_update(parts, i) for i in indices]
    return [_device_update(parts, i) for i in indices], []


def _weights(parts: Parts, index: int) -> tuple[int, ...]:
    """Return the shape of a parameter leaf, of one layer where it is stacked."""
    shape = jax.tree.leaves(parts.layout.abstract_params)[index].shape
    return shape[1:] if index in parts.blocks else shape


def _swaps(parts: Parts | None, indices: Iterable[int]) -> list[_Moved]:
    """Return what of that is moved by callbacks of the nvme tier."""
    if parts is None or parts.layout.disk is None or parts.layout.config.update_on == "host":
        return []
    return [_device_update(parts, i, on_disk=True) for i in indices]


def _device_update(parts: Parts, index: int, on_disk: bool = False) -> _Moved:
    """Return what an update on the device moves: the leaf's state both ways, and its parameters where they rest.

    Args:
      parts: the optimizer by parts.
      index: of a parameter leaf.
      on_disk: count only what rests on disk.
    """
    master = parts.layout.abstract_state.master is not None
    opt = jax.tree.leaves(parts.update.opt_state)
    moved = {"to_device": 0, "to_host": 0}

    def add(record: Record, dtype: Any, read: bool = True) -> None:
        size = _record_bytes(record, _weights(parts, index), dtype) if record.is_away else 0
        size = 0 if on_disk and record.shelf is None else size
        moved["to_device"] += size if read else 0
        moved["to_host"] += size

    add(parts.params[index], parts.dtypes[index], read=not master)
    if master:
        add(parts.master[index], jnp.float32)
    for j in parts.update.states_of((index,)):
        add(parts.opt_record(j), opt[j].dtype)
    return moved


def _host_update(parts: Parts, index: int) -> _Moved:
    """Return what an update on the host moves: the gradient, and parameters that rest on the device."""
    elements = _record_bytes(parts.grads[index], _weights(parts, index), jnp.int8)
    on_device = not parts.params[index].is_away
    old = 4 if on_device and parts.layout.abstract_state.master is None else 0
    made = parts.dtypes[index].itemsize if on_device else 0
    return {"to_device": elements * made, "to_host": elements * (_grad_itemsize(parts.layout) + old)}


def _grads(records: StreamedLayout, part: Iterable[int]) -> list[tuple[int, jax.ShapeDtypeStruct]]:
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


def _schedule_link(streamed: StreamedStep, read: Sequence[Mapping[str, int]], written: Sequence[Mapping[str, int]]) -> _Moved:
    """Return what the phases of a schedule move, given the bytes by kind of a layer's record, and of a tile of each group."""
    schedule, inside = streamed.schedule, streamed.keeper.tile_loops()
    groups = {loops.name: n for n, (_, loops) in enumerate(streamed.records.loops, 1)}
    moved: list[_Moved] = []
    for phase in schedule.phases:
        moved.append(_phase_link(phase, read[0], written[0]))
        for loops, name in inside.get(phase.name, ()):
            n = groups[loops.name]
            moved += [_phase_link(loops.phase(name), read[n], written[n])] * schedule.num_layers
        if phase.name == "update":
            moved += [_phase_link(loops.phase("update"), read[n], written[n]) for n, (_, loops) in
                      enumerate(streamed.records.loops, 1)]  # fmt: skip
    return _sum(moved)


def _phase_link(phase: Phase, read: Mapping[str, int], written: Mapping[str, int]) -> _Moved:
    """Return what one loop moves, given the bytes of a record by kind."""

    def moved(size: Mapping[str, int], kinds: Iterable[str], layers: Iterable[int]) -> int:
        away = {kind: phase.device_layers if kind == "opt_state" else 0 for kind in kinds}
        return sum(size[kind] for layer in layers for kind in kinds if layer >= away[kind])

    fetched = [phase.first, *phase.preload.tolist(), *phase.fetch.tolist()]
    to_device = moved(read, phase.fetches, (layer for layer in fetched if layer >= 0))
    to_device += moved(read, phase.reads, phase.layer.tolist())
    return {"to_device": to_device, "to_host": moved(written, phase.writes, phase.layer.tolist())}


def _sum(moved: Iterable[_Moved]) -> _Moved:
    moved = list(moved)
    return {way: sum(m.get(way, 0) for m in moved) for way in ("to_device", "to_host")}


def _both(moved: _Moved) -> int:
    return moved["to_device"] + moved["to_host"]


# --- leaves ----------------------------------------------------------------------------------------------------------------


def _held(tree: Any) -> dict[str, int]:
    """Return the bytes of one device's part of a tree of ShapeDtypeStruct with shardings, by tier."""
    total = {"device": 0, "pinned_host": 0}
    for leaf in jax.tree.leaves(tree):
        tier = "pinned_host" if is_away(leaf) else "device"
        total[tier] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def _collectives(layout: Layout, leaves: Mapping[str, jax.ShapeDtypeStruct], streamed: StreamedStep | None) -> dict[str, int]:
    """Return bytes sent by each device: the closed form over the leaves that `fsdp` splits, all_reduce for the rest.

    A streamed step gathers a layer once for all microbatches, and tiles once more where backward runs their loop again.
    """
    again = _gathered_again(streamed)
    mesh, config, itemsize = layout.mesh, layout.config, _itemsize(layout)
    shards, replicas, count = mesh.shape[FSDP], mesh.shape[DATA], config.num_microbatches
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for path, leaf in leaves.items():
        spec = layout.specs[path]
        elements = local_elements(leaf.shape, spec.base, mesh)
        split = STAGES[config.stage].opt_state and spec.sharded != spec.base
        own = collective_elements(elements, config.stage if split else 0, shards * (1 if split else replicas), count)
        if streamed and path.startswith(f"['{BLOCKS}']"):
            own["all_gather"] = collective_elements(elements, config.stage, shards)["all_gather"] if split else 0.0
            own["all_gather"] *= 1 + again.get(path, 0) / 2  # in forward and in backward, and again
        for name, n in own.items():
            sent[name] += n * itemsize
        if split and replicas > 1:
            sent["all_reduce"] += 2 * elements / shards * (replicas - 1) / replicas * itemsize * count
    return {name: int(n) for name, n in sent.items()}


def _gathered_again(streamed: StreamedStep | None) -> dict[str, int]:
    """Return how often backward runs a group's forward loop, by path of its leaves."""
    if streamed is None:
        return {}
    paths = list(_leaves(streamed.layout))
    inside = streamed.keeper.tile_loops()["backward"]
    times = {loops.name: sum(g is loops and phase == "forward" for g, phase in inside) for _, loops in streamed.records.loops}
    return {paths[i]: times[loops.name] for group, loops in streamed.records.loops for i in group.leaves}


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
