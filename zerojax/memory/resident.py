"""Bytes that a resident step takes beside its arguments, and moves over the link.

All layers are on the device, so what comes and goes is the optimizer: where its state is elsewhere, the update runs leaf by
leaf. What backward needs of forward is found by tracing the loss and its derivative, without running either.
"""

import math
from typing import Any

import jax
import jax.extend.core as jex

from zerojax.memory.leaves import gathered_bytes, grad_elements, grad_itemsize
from zerojax.memory.link import both_ways, moved_by_updates, summed, swapped_by_updates
from zerojax.memory.report import RunningBytes
from zerojax.sharding import num_batch_shards
from zerojax.state import Layout, StateRecords, join_frozen


def resident_bytes(records: StateRecords, loss: Any, abstract_batch: Any) -> RunningBytes:
    """Return what a resident step takes beside its arguments, and moves over the link.

    Args:
      records: how the states of the program rest.
      loss: the objective over whole parameters.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
    """
    layout = records.layout
    copied, called = moved_by_updates(records, layout.ends)
    device = {
        "grads": grad_elements(layout) * grad_itemsize(layout),
        "gathered": gathered_bytes(layout),
        "activations": _residual_bytes(layout, loss, abstract_batch),
        # The device updates one leaf at a time, so the largest counts. Callbacks bring all leaves at once.
        "in_flight": max(max(map(both_ways, copied), default=0), summed(called)["to_device"]),
    }
    swapped, link = summed(swapped_by_updates(records, layout.ends)), summed(copied)
    # Callbacks move what rests on nvme, so it is no copy of the compiled program.
    link = {way: link[way] - swapped[way] for way in link}
    return RunningBytes(device, {"grads": 0, "activations": 0}, link, summed([*called, swapped]))


def _residual_bytes(layout: Layout, loss: Any, abstract_batch: Any) -> int:
    """Return the bytes that a microbatch keeps from forward to backward on each device, parameters excluded.

    The loss is traced, not run. Residuals that are arguments are not counted; the rest is split as the batch is.
    """
    config = layout.config
    count = config.num_microbatches
    # Of one microbatch: each is differentiated before the next one runs.
    micro = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]) if len(a.shape) else a.shape, a.dtype),
        abstract_batch,
    )
    state = layout.abstract_arrays
    params, frozen = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state.params, state.frozen))
    frozen = jax.eval_shape(layout.decode, frozen)  # backward decodes again, so that what is decoded is no residual

    model_state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), layout.abstract_arrays.model_state)

    def residuals(params: Any, frozen: Any, batch: Any, model_state: Any) -> list[Any]:
        value = lambda p: loss(join_frozen(p, frozen), batch, None, model_state)[0].value()  # noqa: E731
        return jax.tree.leaves(jax.vjp(value, params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, frozen, micro, model_state).jaxpr
    # A residual that is an argument (a parameter, the batch) takes no bytes of its own, and each other counts once.
    values: Any = {v for v in jaxpr.outvars if isinstance(v, jex.Var)} - set(jaxpr.invars)
    total = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in values)
    return total // num_batch_shards(layout.mesh)
