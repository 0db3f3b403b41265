"""Bytes of single leaves and records: at rest, gathered, and moved by an update."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.memory.closed_forms import collective_elements
from zerojax.precision import PRECISIONS
from zerojax.sharding import DATA, FSDP, STAGES, local_elements, stored_spec, without_axis
from zerojax.state import Layout, RecordSpec, StateRecords, is_away
from zerojax.streamed import StreamedStep


def compute_itemsize(layout: Layout) -> int:
    """Return the bytes of one element in the compute dtype."""
    return jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize


def grad_itemsize(layout: Layout) -> int:
    """Return the bytes of an element of a gradient at rest: microbatches are summed in float32."""
    return compute_itemsize(layout) if layout.config.num_microbatches == 1 else 4


def grad_elements(layout: Layout, blocks: bool | None = None) -> int:
    """Return the elements of the gradients on one device: of all leaves, of the stacked layers, or of the other leaves."""
    sharded = STAGES[layout.config.stage].opt_state
    return sum(
        local_elements(leaf.shape, stored_spec(leaf.spec, sharded), layout.mesh)
        for leaf in layout.leaves
        if blocks is None or leaf.is_stacked == blocks
    )


def gathered_bytes(layout: Layout, num_layers: int | None, layers: int = 1, fetched: bool = False) -> int:
    """Return the bytes of the largest unit held whole beside its shards.

    Args:
      layout: of the program.
      num_layers: None for a Model, whose units are its leaves; else they are the embedding, the head and `layers` layers.
      layers: layers held at once.
      fetched: parameters come from another tier, so that a layer takes its bytes even where nothing is split.
    """
    if not STAGES[layout.config.stage].params or (layout.mesh.shape[FSDP] == 1 and not fetched):
        return 0
    num_tiles = {group.name: group.num_tiles for group in layout.groups}
    of_units: dict[Any, int] = {}
    of_tiles: dict[str, int] = {}
    for leaf in layout.leaves:
        size = local_elements(leaf.shape, without_axis(leaf.spec.sharded, FSDP), layout.mesh) * compute_itemsize(layout)
        if num_layers is not None and leaf.is_stacked:
            size = size // num_layers * layers
        if leaf.role == "tile":
            of_tiles[leaf.group] = of_tiles.get(leaf.group, 0) + size // num_tiles[leaf.group]
        else:
            unit = leaf.name if num_layers is None else leaf.path[0]
            of_units[unit] = of_units.get(unit, 0) + size
    if of_tiles:  # tiles are gathered one by one, beside what else a layer has
        blocks = next(leaf.path[0] for leaf in layout.leaves if leaf.is_stacked)
        of_units[blocks] = of_units.get(blocks, 0) + max(of_tiles.values())
    return max(of_units.values())


def local_record_bytes(record: RecordSpec, shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of one device's part of a record. What XLA may split as it likes counts as whole."""
    spec = tuple(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in record.spec)
    return local_elements(shape, spec, record.mesh) * jnp.dtype(dtype).itemsize


LinkBytes = dict[str, int]
"""Bytes over the link: "to_device" and "to_host", 0 where missing."""


def moved_by_updates(records: StateRecords, indices: Iterable[int]) -> tuple[list[LinkBytes], list[LinkBytes]]:
    """Return what the updates of some leaves move, of one layer where they are stacked: by copies, and by callbacks."""
    if records.layout.config.update_on == "host":
        return [], [_host_update(records, i) for i in indices]
    return [_device_update(records, i) for i in indices], []


def swapped_by_updates(records: StateRecords, indices: Iterable[int]) -> list[LinkBytes]:
    """Return what of that is moved by callbacks of the nvme tier."""
    if records.layout.config.update_on == "host":
        return []
    return [_device_update(records, i, on_disk=True) for i in indices]


def _device_update(records: StateRecords, index: int, on_disk: bool = False) -> LinkBytes:
    """Return what an update on the device moves: the leaf's state both ways, and its parameters where they rest.

    Args:
      records: how the state rests.
      index: of a parameter leaf.
      on_disk: count only what rests on disk.
    """
    layout, leaf = records.layout, records.leaves[index]
    moved = {"to_device": 0, "to_host": 0}

    def add(record: RecordSpec, dtype: Any, read: bool = True) -> None:
        size = local_record_bytes(record, leaf.record_shape, dtype) if record.is_away else 0
        size = 0 if on_disk and record.disk_records is None else size
        moved["to_device"] += size if read else 0
        moved["to_host"] += size

    add(records.params[index], leaf.dtype, read=not layout.has_master)
    if layout.has_master:
        add(records.master[index], jnp.float32)
    for j in layout.opt_map.states_of((index,)):
        add(records.opt_record(j), layout.opt_map.leaves[j].dtype)
    return moved


def _host_update(records: StateRecords, index: int) -> LinkBytes:
    """Return what an update on the host moves: the gradient, and parameters that rest on the device."""
    layout, leaf = records.layout, records.leaves[index]
    elements = local_record_bytes(records.grads[index], leaf.record_shape, jnp.int8)
    on_device = not records.params[index].is_away
    weights = 4 if on_device and not layout.has_master else 0
    params = leaf.dtype.itemsize if on_device else 0
    return {"to_device": elements * params, "to_host": elements * (grad_itemsize(layout) + weights)}


def summed(moved: Iterable[LinkBytes]) -> LinkBytes:
    """Return the sums of bytes in both directions of the link."""
    moved = list(moved)
    return {way: sum(m.get(way, 0) for m in moved) for way in ("to_device", "to_host")}


def both_ways(moved: LinkBytes) -> int:
    """Return the bytes of both directions together."""
    return moved["to_device"] + moved["to_host"]


def bytes_by_tier(tree: Any) -> dict[str, int]:
    """Return the bytes of one device's part of a tree of ShapeDtypeStruct with shardings, by tier."""
    total = {"device": 0, "pinned_host": 0}
    for leaf in jax.tree.leaves(tree):
        tier = "pinned_host" if is_away(leaf) else "device"
        total[tier] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def collectives_of_step(layout: Layout, streamed: StreamedStep | None) -> dict[str, int]:
    """Return bytes sent by each device: the closed form over the leaves that `fsdp` splits, all_reduce for the rest.

    A streamed step gathers a layer once for all microbatches, and tiles once more where backward runs their loop again.
    """
    again = _gathered_again(streamed)
    mesh, config, itemsize = layout.mesh, layout.config, compute_itemsize(layout)
    shards, replicas, count = mesh.shape[FSDP], mesh.shape[DATA], config.num_microbatches
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for leaf in layout.leaves:
        elements = local_elements(leaf.shape, leaf.spec.base, mesh)
        split = STAGES[config.stage].opt_state and leaf.spec.sharded != leaf.spec.base
        own = collective_elements(elements, config.stage if split else 0, shards * (1 if split else replicas), count)
        if streamed and leaf.is_stacked:
            own["all_gather"] = collective_elements(elements, config.stage, shards)["all_gather"] if split else 0.0
            own["all_gather"] *= 1 + again.get(leaf.group, 0) / 2  # in forward and in backward, and again
        for name, n in own.items():
            sent[name] += n * itemsize
        if split and replicas > 1:
            sent["all_reduce"] += 2 * elements / shards * (replicas - 1) / replicas * itemsize * count
    return {name: int(n) for name, n in sent.items()}


def _gathered_again(streamed: StreamedStep | None) -> dict[str, int]:
    """Return how often backward runs a group's forward loop, by the group's name."""
    if streamed is None:
        return {}
    inside = streamed.tracer.tile_loops()["backward"]
    return {group.name: sum(g is loops and phase == "forward" for g, phase in inside) for group, loops in streamed.plan.loops}
