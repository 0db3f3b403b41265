"""Bytes that each device sends in a step of one program, by collective.

A leaf that `fsdp` splits sends the bytes of its stage's closed form; a leaf that stays replicated
is reduced by an all_reduce over all replicas. With reduce_dtype="float32" an element counts 4 bytes
when it is reduced, and 2 when it is gathered; with reduce_every="step" it is reduced once per step.
An embedding may send fewer bytes, by rows (`zerojax.gather.look_up`), which depends on the batch.
Tensor parallelism sends its bytes inside of the model: `zerojax.memory.tensor` counts them.

An optimizer that needs full leaves of a layer (`zerojax.optim.leaf_rule`) moves them in addition,
in float32: stacks that are updated together by one all_to_all each way, and a record updated on its
own by an all_gather. Not counted are sums over a leaf, such as a norm, and the bytes that XLA sends
to partition the products of unstacked leaves.
"""

import math

from zerojax.formulas import collective_elements
from zerojax.memory.leaves import reduced_itemsize
from zerojax.sharding import DATA, FSDP, STAGES, local_elements, parse_axes
from zerojax.state import Layout, OwnedTransformation
from zerojax.streamed import StreamedStep


def collectives_of_step(layout: Layout, streamed: StreamedStep | None) -> dict[str, int]:
    """Return the bytes that each device sends in a step, by collective.

    They follow the closed form for leaves that `fsdp` splits, and are an all_reduce for other
    leaves. A streamed step gathers a layer once for all microbatches, and tiles once more if
    backward runs their loop again.

    Args:
      layout: layout of the program.
      streamed: the streamed step, or None for a resident step.
    """
    gathers_of_tiles = _gathers_again(streamed)
    mesh = layout.mesh
    config = layout.config
    shards = mesh.shape[FSDP]
    replicas = mesh.shape[DATA]
    count = config.num_microbatches
    reductions = 1 if layout.reduces_once else count
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for leaf in layout.all_leaves:
        elements = local_elements(leaf.shape, leaf.spec.base, mesh)
        split = STAGES[config.stage].opt_state and leaf.spec.sharded != leaf.spec.base
        # A leaf that `fsdp` does not split is reduced by an all_reduce over all of its copies.
        stage, copies = (config.stage, shards) if split else (0, shards * replicas)
        elements_sent = collective_elements(elements, stage, copies, count, reductions)
        if streamed and leaf.is_stacked:
            if split:
                elements_sent["all_gather"] = collective_elements(elements, config.stage, shards)[
                    "all_gather"
                ]
            else:
                elements_sent["all_gather"] = 0.0
            # Once in forward and once in backward, and again if backward reruns a loop over tiles.
            elements_sent["all_gather"] *= 1 + gathers_of_tiles.get(leaf.group, 0) / 2
        if leaf.frozen:  # it is gathered if it is split, and has no gradient
            elements_sent = {
                "all_gather": elements_sent["all_gather"] if STAGES[config.stage].params else 0.0
            }
        reduced = reduced_itemsize(layout, leaf)
        for name, n in elements_sent.items():
            sent[name] += n * (leaf.dtype.itemsize if name == "all_gather" else reduced)
        # Hybrid sharding: after the reduce_scatter, shards of gradients are summed over the
        # replicas.
        if split and replicas > 1 and not leaf.frozen:
            sent["all_reduce"] += (
                2 * elements / shards * (replicas - 1) / replicas * reduced * reductions
            )
    if isinstance(layout.tx, OwnedTransformation) and STAGES[config.stage].opt_state:
        for name, n in _of_whole_leaves(layout, layout.tx).items():
            sent[name] = sent.get(name, 0.0) + n
    return {name: int(n) for name, n in sent.items()}


def _of_whole_leaves(layout: Layout, tx: OwnedTransformation) -> dict[str, float]:
    """Return the additional bytes that an optimizer sends if it needs full leaves of a layer."""
    sent = {"all_to_all": 0.0, "all_gather": 0.0}
    for leaf, (there, back) in zip(layout.leaves, tx.moved, strict=True):
        axes = [
            layout.mesh.shape[axis] for entry in leaf.spec.sharded for axis in parse_axes(entry)
        ]
        devices = math.prod(axes)
        layers = leaf.shape[0] if leaf.is_stacked else 1
        if layout.updates_by_record:
            sent["all_gather"] += 4 * there * layers * (devices - 1) / devices
        elif leaf.is_stacked:
            # One axis after the other: in each all_to_all a device keeps its own part and sends the
            # other parts.
            rows = -(-layers // devices) * devices
            sent["all_to_all"] += (
                4 * (there + back) * rows / devices * sum((n - 1) / n for n in axes)
            )
    return {name: n for name, n in sent.items() if n}


def _gathers_again(streamed: StreamedStep | None) -> dict[str, float]:
    """Return how often backward runs each group's forward loop, by the group's name.

    It is a mean over the layers of the group's stack.
    """
    if streamed is None:
        return {}
    again: dict[str, float] = {}
    for loops in streamed.loops:
        inside = loops.tracer.tile_loops()["backward"]
        run = loops.stack.run
        for group, tiles in loops.stack.loops:
            times = sum(g is tiles and phase == "forward" for g, phase in inside)
            again[group.name] = (
                again.get(group.name, 0.0) + times * run.num_layers / run.stack.num_layers
            )
    return again
