"""Bytes that a resident step takes in addition to its arguments, and moves over the host link.

All layers are on the device, so only the optimizer's records move: if its state is stored
elsewhere, the update runs leaf by leaf.
"""

from collections.abc import Mapping
from typing import Any

from zerojax.memory.derivative import counts_working, objective_working_bytes
from zerojax.memory.kept import microbatch_shapes, resident_kept
from zerojax.memory.leaves import gathered_bytes, grad_elements, grad_itemsize, unreduced_bytes
from zerojax.memory.report import RunningBytes
from zerojax.state import StateRecords, steps_of_leaves
from zerojax.trees import Batch


def resident_bytes(
    records: StateRecords, pieces: Mapping[int, int], loss: Any, abstract_batch: Batch
) -> RunningBytes:
    """Return the bytes of a resident step in addition to its arguments, and over the host link.

    Args:
      records: how the states of the program are stored.
      pieces: number of pieces in which the device updates each leaf, by the leaf's index.
      loss: objective, a function of the full parameters.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
    """
    layout = records.layout
    steps = steps_of_leaves(records, pieces)
    activations = sum(kept.num_bytes for kept in resident_kept(layout, loss, abstract_batch))
    device = {
        "grads": grad_elements(layout) * grad_itemsize(layout),
        # The sums over microbatches, and the current microbatch's gradients before they are added.
        "unreduced": 2 * unreduced_bytes(layout),
        "gathered": gathered_bytes(layout),
        "activations": activations,
        # The device updates one leaf, or a piece of it, at a time. Callbacks bring all leaves at
        # the same time.
        "in_flight": steps.find_peak("unstacked"),
    }
    if counts_working(layout):
        micro = microbatch_shapes(abstract_batch, layout.config.num_microbatches)
        device["working"] = max(0, objective_working_bytes(layout, loss, micro) - activations)
    link = {
        "to_device": steps.moved("up", called=False),
        "to_host": steps.moved("down", called=False),
    }
    called = {
        "to_device": steps.moved("up", called=True),
        "to_host": steps.moved("down", called=True),
    }
    return RunningBytes(device, {"grads": 0, "activations": 0}, link, called)
