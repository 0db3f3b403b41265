"""Bytes that a resident step takes beside its arguments, and moves over the link.

All layers are on the device, so what comes and goes is the optimizer: where its state is elsewhere,
the update runs leaf by leaf.
"""

from collections.abc import Mapping
from typing import Any

from zerojax.memory.kept import resident_kept
from zerojax.memory.leaves import gathered_bytes, grad_elements, grad_itemsize, unreduced_bytes
from zerojax.memory.report import RunningBytes
from zerojax.state import StateRecords, steps_of_leaves


def resident_bytes(
    records: StateRecords, pieces: Mapping[int, int], loss: Any, abstract_batch: Any
) -> RunningBytes:
    """Return what a resident step takes beside its arguments, and moves over the link.

    Args:
      records: how the states of the program rest.
      pieces: in how many the device updates each leaf, by its index.
      loss: the objective over whole parameters.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
    """
    layout = records.layout
    steps = steps_of_leaves(records, pieces)
    device = {
        "grads": grad_elements(layout) * grad_itemsize(layout),
        # Sums over microbatches, and those that the microbatch which is computed adds to them.
        "unreduced": 2 * unreduced_bytes(layout),
        "gathered": gathered_bytes(layout),
        "activations": sum(kept.num_bytes for kept in resident_kept(layout, loss, abstract_batch)),
        # The device updates one leaf at a time, or a piece of it. Callbacks bring all leaves at
        # once.
        "in_flight": steps.peak_of("ends"),
    }
    link, called = (
        {
            "to_device": steps.moved("up", called=by_callbacks),
            "to_host": steps.moved("down", called=by_callbacks),
        }
        for by_callbacks in (False, True)
    )
    return RunningBytes(device, {"grads": 0, "activations": 0}, link, called)
