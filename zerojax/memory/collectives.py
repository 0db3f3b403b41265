"""Bytes that each device sends in a step of one program, by collective.

A leaf that ZeRO splits sends the bytes of its stage's closed form; a leaf that stays replicated
is reduced by an all_reduce over all replicas. With reduce_dtype="float32" an element counts 4 bytes
when it is reduced, and 2 when it is gathered; with reduce_every="step" it is reduced once per step.
An embedding may send fewer bytes, by rows (`zerojax.gather.look_up`), which depends on the batch.
Tensor parallelism sends its bytes inside of the model: `zerojax.memory.tensor` counts them. What
attention sends over `context`, and experts over `expert`, is not counted: `zerojax.attention` and
`zerojax.moe` have the formulas.

An optimizer that needs full leaves of a layer (`zerojax.optim.leaf_rule`) moves them in addition,
in float32: stacks that are updated together by one all_to_all each way, and a record updated on its
own by an all_gather. Not counted are sums over a leaf, such as a norm, and the bytes that XLA sends
to partition the products of unstacked leaves.
"""

import math

from jax.sharding import Mesh

from zerojax.formulas import collective_elements
from zerojax.memory.leaves import reduced_itemsize
from zerojax.sharding import (
    DATA,
    STAGES,
    context_size,
    count_rows,
    list_axes,
    local_elements,
    parse_axes,
    zero_axes,
)
from zerojax.state import Layout, Leaf, OwnedTransformation
from zerojax.streamed import StreamedStep


def collectives_of_step(layout: Layout, streamed: StreamedStep | None) -> dict[str, int]:
    """Return the bytes that each device sends in a step, by collective.

    They follow the closed form for leaves that ZeRO splits, and are an all_reduce for other
    leaves. A streamed step gathers a layer once for all microbatches, and tiles once more if
    backward runs their loop again.

    Args:
      layout: layout of the program.
      streamed: the streamed step, or None for a resident step.
    """
    regathers = _tile_regathers(streamed)
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for leaf in layout.all_leaves:
        is_streamed = streamed is not None and leaf.is_stacked
        elements_sent = _elements_sent(layout, leaf, is_streamed)
        if is_streamed:
            # Once in forward and once in backward, and again if backward reruns a loop over tiles.
            elements_sent["all_gather"] *= 1 + regathers.get(leaf.group, 0) / 2
        if leaf.frozen:  # it is gathered if it is split, and has no gradient
            is_gathered = STAGES[layout.config.stage].params
            elements_sent = {"all_gather": elements_sent["all_gather"] if is_gathered else 0.0}
        reduced = reduced_itemsize(layout, leaf)
        for name, n in elements_sent.items():
            sent[name] += n * (leaf.dtype.itemsize if name == "all_gather" else reduced)
        sent["all_reduce"] += _replica_elements(layout, leaf) * reduced

    if isinstance(layout.tx, OwnedTransformation) and STAGES[layout.config.stage].opt_state:
        for name, n in _full_leaves_sent(layout, layout.tx).items():
            sent[name] = sent.get(name, 0.0) + n
    return {name: int(n) for name, n in sent.items()}


def splits_state(layout: Layout, leaf: Leaf) -> bool:
    """Return whether ZeRO splits a leaf's optimizer state."""
    return STAGES[layout.config.stage].opt_state and leaf.spec.sharded != leaf.spec.base


def num_leaf_shards(leaf: Leaf, mesh: Mesh) -> int:
    """Return the number of devices over which ZeRO splits, or could split, a leaf."""
    own_axes = list_axes(leaf.spec.base)
    return math.prod(mesh.shape[axis] for axis in zero_axes(mesh) if axis not in own_axes)


def _num_reductions(layout: Layout) -> int:
    """Return how often a step reduces gradients."""
    return 1 if layout.reduces_once else layout.config.num_microbatches


def _elements_sent(layout: Layout, leaf: Leaf, is_streamed: bool) -> dict[str, float]:
    """Return the elements that each device sends of a leaf, by collective, in closed form."""
    mesh = layout.mesh
    stage = layout.config.stage
    shards = num_leaf_shards(leaf, mesh)
    count = layout.config.num_microbatches
    reductions = _num_reductions(layout)
    elements = local_elements(leaf.shape, leaf.spec.base, mesh)
    if not splits_state(layout, leaf):
        # It is reduced by an all_reduce over all of its copies.
        copies = shards * mesh.shape[DATA]
        sent = collective_elements(elements, 0, copies, count, reductions)
        if is_streamed:
            sent["all_gather"] = 0.0
        return sent
    sent = collective_elements(elements, stage, shards, count, reductions)
    if is_streamed:  # gathered once for all microbatches
        sent["all_gather"] = collective_elements(elements, stage, shards)["all_gather"]
    if layout.reduces_once and context_size(mesh) > 1:
        # An all_reduce over `context` in each microbatch, which XLA moves behind a streamed step's
        # loop over microbatches; then a reduce_scatter over the other axes.
        times = 1 if is_streamed else count
        context = context_size(mesh)
        rows = count_rows(mesh, leaf.spec.base) // mesh.shape[DATA]
        sent["all_reduce"] = times * collective_elements(elements, 0, context)["all_reduce"]
        sent["reduce_scatter"] = collective_elements(elements, 1, rows)["reduce_scatter"]
    return sent


def _replica_elements(layout: Layout, leaf: Leaf) -> float:
    """Return the elements that each device sends to sum a leaf's gradient over the replicas.

    In hybrid sharding, this follows the reduce_scatter: shards of gradients are summed.
    """
    replicas = layout.mesh.shape[DATA]
    if replicas == 1 or leaf.frozen or not splits_state(layout, leaf):
        return 0.0
    elements = local_elements(leaf.shape, leaf.spec.base, layout.mesh)
    shard = elements / num_leaf_shards(leaf, layout.mesh)
    return 2 * shard * (replicas - 1) / replicas * _num_reductions(layout)


def _full_leaves_sent(layout: Layout, tx: OwnedTransformation) -> dict[str, float]:
    """Return the additional bytes that an optimizer sends if it needs full leaves of a layer."""
    sent = {"all_to_all": 0.0, "all_gather": 0.0}
    for leaf, (gathered, returned) in zip(layout.leaves, tx.moved, strict=True):
        axis_sizes = list[int]()
        for entry in leaf.spec.sharded[leaf.layer_dims :]:
            axis_sizes += [layout.mesh.shape[axis] for axis in parse_axes(entry)]
        devices = math.prod(axis_sizes)
        layers = leaf.shape[0] if leaf.is_stacked else 1
        if layout.updates_by_record:
            sent["all_gather"] += 4 * gathered * layers * (devices - 1) / devices
        elif leaf.is_stacked:
            # One axis after the other: in each all_to_all a device keeps 1/n of its elements and
            # sends the others.
            rows = -(-layers // devices) * devices
            share_sent = sum((n - 1) / n for n in axis_sizes)
            sent["all_to_all"] += 4 * (gathered + returned) * rows / devices * share_sent
    return {name: n for name, n in sent.items() if n}


def _tile_regathers(streamed: StreamedStep | None) -> dict[str, float]:
    """Return how often backward runs each group's forward loop, by the group's name.

    It is a mean over the layers of the group's stack.
    """
    if streamed is None:
        return {}
    regathers: dict[str, float] = {}
    for loops in streamed.loops:
        backward_loops = loops.tracer.tile_loops()["backward"]
        run = loops.stack.run
        for group, tiles in loops.stack.loops:
            times = sum(loop is tiles and phase == "forward" for loop, phase in backward_loops)
            mean_times = times * run.num_layers / run.stack.num_layers
            regathers[group.name] = regathers.get(group.name, 0.0) + mean_times
    return regathers
