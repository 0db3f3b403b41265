"""Bytes that an update moves over a device's link to the host, leaf by leaf.

An update on the device fetches the optimizer's state of a leaf, and stores it; parameters are fetched only where they are
their own masters, and stored where they rest. An update on the host takes the gradient, and gives back the new parameter where
parameters rest on the device. Copies are operations of the compiled program. Callbacks, of the host update and of the nvme
tier, move their bytes beside it, and are counted apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.memory.leaves import grad_itemsize, local_record_bytes
from zerojax.state import RecordSpec, StateRecords

LinkBytes = dict[str, int]
"""Bytes over the link: "to_device" and "to_host", 0 where missing."""


def moved_by_updates(records: StateRecords, indices: Iterable[int]) -> tuple[list[LinkBytes], list[LinkBytes]]:
    """Return what the updates of some leaves move, of one layer where they are stacked: by copies, and by callbacks."""
    if records.layout.config.update_on == "host":
        return [], [_host_update(records, i) for i in indices]
    return [_device_update(records, i) for i in indices], []


def swapped_by_updates(records: StateRecords, indices: Iterable[int]) -> list[LinkBytes]:
    """Return what callbacks of the nvme tier move of what `moved_by_updates` counts as copies."""
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

    def add(record: RecordSpec, dtype: Any, shape: Sequence[int] = leaf.record_shape, read: bool = True) -> None:
        size = local_record_bytes(record, shape, dtype) if record.is_away else 0
        size = 0 if on_disk and record.disk_records is None else size
        moved["to_device"] += size if read else 0
        moved["to_host"] += size

    add(records.params[index], leaf.dtype, read=not layout.has_master)
    if layout.has_master:
        add(records.master[index], jnp.float32)
    for j in layout.opt_map.states_of((index,)):
        state = layout.opt_map.leaves[j]
        add(records.opt_record(j), state.dtype, state.shape[leaf.lead :])
    return moved


def _host_update(records: StateRecords, index: int) -> LinkBytes:
    """Return what an update on the host moves: the gradient, and parameters that rest on the device."""
    layout, leaf = records.layout, records.leaves[index]
    # Counted as int8: one byte for each element.
    elements = local_record_bytes(records.grads[index], leaf.record_shape, jnp.int8)
    on_device = not records.params[index].is_away
    # Parameters that are their own masters go down to the host, which updates them.
    weights = 4 if on_device and not layout.has_master else 0
    params = leaf.dtype.itemsize if on_device else 0
    return {"to_device": elements * params, "to_host": elements * (grad_itemsize(layout) + weights)}


def updated_alone(records: StateRecords, pieces: Mapping[int, int]) -> int:
    """Return the most bytes on their way where leaves are updated one after the other.

    Args:
      records: how the state rests.
      pieces: in how many each leaf is updated, by its index. While one is made, the one before it waits to be stored.
    """
    copied, _ = moved_by_updates(records, pieces)
    each = zip(copied, pieces.values(), strict=True)
    return max((both_ways(n) if count == 1 else (both_ways(n) + n["to_host"]) // count for n, count in each), default=0)


def summed(moved: Iterable[LinkBytes]) -> LinkBytes:
    """Return the sums of bytes in both directions of the link."""
    terms = list(moved)
    return {way: sum(term.get(way, 0) for term in terms) for way in ("to_device", "to_host")}


def both_ways(moved: LinkBytes) -> int:
    """Return the bytes of both directions together."""
    return moved["to_device"] + moved["to_host"]
