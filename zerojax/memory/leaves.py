"""Bytes of single leaves and records: at rest, gathered, and moved by an update."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.memory.closed_forms import collective_elements
from zerojax.models import BLOCKS
from zerojax.optim import Parts
from zerojax.precision import PRECISIONS
from zerojax.sharding import DATA, FSDP, STAGES, local_elements, stored_spec, without_axis
from zerojax.state import Layout, RecordSpec, is_away
from zerojax.streamed import StreamedStep


def leaves_by_path(layout: Layout) -> dict[str, Any]:
    """Return the abstract float32 parameters by path."""
    return {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]}


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
        local_elements(leaf.shape, stored_spec(layout.specs[path], sharded), layout.mesh)
        for path, leaf in leaves_by_path(layout).items()
        if blocks is None or path.startswith(f"['{BLOCKS}']") == blocks
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
    whole: dict[str, int] = {}
    of_tile: dict[str, int] = {}
    names = list(leaves_by_path(layout))
    tiles = {names[i]: group for group in layout.tiles for i in group.leaves}
    for path, leaf in leaves_by_path(layout).items():
        size = local_elements(leaf.shape, without_axis(layout.specs[path].sharded, FSDP), layout.mesh) * compute_itemsize(
            layout
        )
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


def local_record_bytes(record: RecordSpec, shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of one device's part of a record. What XLA may split as it likes counts as whole."""
    spec = tuple(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in record.spec)
    return local_elements(shape, spec, record.mesh) * jnp.dtype(dtype).itemsize


LinkBytes = dict[str, int]
"""Bytes over the link: "to_device" and "to_host", 0 where missing."""


def moved_by_updates(parts: Parts | None, indices: Iterable[int]) -> tuple[list[LinkBytes], list[LinkBytes]]:
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


def swapped_by_updates(parts: Parts | None, indices: Iterable[int]) -> list[LinkBytes]:
    """Return what of that is moved by callbacks of the nvme tier."""
    if parts is None or parts.layout.disk is None or parts.layout.config.update_on == "host":
        return []
    return [_device_update(parts, i, on_disk=True) for i in indices]


def _device_update(parts: Parts, index: int, on_disk: bool = False) -> LinkBytes:
    """Return what an update on the device moves: the leaf's state both ways, and its parameters where they rest.

    Args:
      parts: the optimizer by parts.
      index: of a parameter leaf.
      on_disk: count only what rests on disk.
    """
    master = parts.layout.abstract_state.master is not None
    opt = jax.tree.leaves(parts.update.opt_state)
    moved = {"to_device": 0, "to_host": 0}

    def add(record: RecordSpec, dtype: Any, read: bool = True) -> None:
        size = local_record_bytes(record, _weights(parts, index), dtype) if record.is_away else 0
        size = 0 if on_disk and record.shelf is None else size
        moved["to_device"] += size if read else 0
        moved["to_host"] += size

    add(parts.params[index], parts.dtypes[index], read=not master)
    if master:
        add(parts.master[index], jnp.float32)
    for j in parts.update.states_of((index,)):
        add(parts.opt_record(j), opt[j].dtype)
    return moved


def _host_update(parts: Parts, index: int) -> LinkBytes:
    """Return what an update on the host moves: the gradient, and parameters that rest on the device."""
    elements = local_record_bytes(parts.grads[index], _weights(parts, index), jnp.int8)
    on_device = not parts.params[index].is_away
    old = 4 if on_device and parts.layout.abstract_state.master is None else 0
    made = parts.dtypes[index].itemsize if on_device else 0
    return {"to_device": elements * made, "to_host": elements * (grad_itemsize(parts.layout) + old)}


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


def collectives_of_step(
    layout: Layout, leaves: Mapping[str, jax.ShapeDtypeStruct], streamed: StreamedStep | None
) -> dict[str, int]:
    """Return bytes sent by each device: the closed form over the leaves that `fsdp` splits, all_reduce for the rest.

    A streamed step gathers a layer once for all microbatches, and tiles once more where backward runs their loop again.
    """
    again = _gathered_again(streamed)
    mesh, config, itemsize = layout.mesh, layout.config, compute_itemsize(layout)
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
    paths = list(leaves_by_path(streamed.layout))
    inside = streamed.tracer.tile_loops()["backward"]
    times = {loops.name: sum(g is loops and phase == "forward" for g, phase in inside) for _, loops in streamed.plan.loops}
    return {paths[i]: times[loops.name] for group, loops in streamed.plan.loops for i in group.leaves}
