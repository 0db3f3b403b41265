"""Bytes that each device sends in a step of one program, by collective.

A leaf that `fsdp` splits sends what the closed form of its stage says; one that stays replicated is reduced by an all_reduce
over all replicas. An embedding may send fewer, by rows (`zerojax.gather.look_up`), which the batch decides. What tensor
parallelism adds is inside of the model, and not counted.
"""

from zerojax.memory.closed_forms import collective_elements
from zerojax.sharding import DATA, FSDP, STAGES, local_elements
from zerojax.state import Layout
from zerojax.streamed import StreamedStep


def collectives_of_step(layout: Layout, streamed: StreamedStep | None) -> dict[str, int]:
    """Return bytes sent by each device: the closed form over the leaves that `fsdp` splits, all_reduce for the rest.

    A streamed step gathers a layer once for all microbatches, and tiles once more where backward runs their loop again.
    """
    gathers_of_tiles = _gathers_again(streamed)
    mesh, config = layout.mesh, layout.config
    shards, replicas, count = mesh.shape[FSDP], mesh.shape[DATA], config.num_microbatches
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for leaf in layout.all_leaves:
        elements = local_elements(leaf.shape, leaf.spec.base, mesh)
        split = STAGES[config.stage].opt_state and leaf.spec.sharded != leaf.spec.base
        # What `fsdp` does not split is reduced by an all_reduce over all of its copies.
        elements_sent = collective_elements(elements, config.stage if split else 0, shards * (1 if split else replicas), count)
        if streamed and leaf.is_stacked:
            elements_sent["all_gather"] = collective_elements(elements, config.stage, shards)["all_gather"] if split else 0.0
            # Once in forward and once in backward; and again where backward runs a loop over tiles once more.
            elements_sent["all_gather"] *= 1 + gathers_of_tiles.get(leaf.group, 0) / 2
        if leaf.frozen:  # it is gathered where it is split, and has no gradient
            elements_sent = {"all_gather": elements_sent["all_gather"] if STAGES[config.stage].params else 0.0}
        for name, n in elements_sent.items():
            sent[name] += n * leaf.dtype.itemsize
        # Hybrid sharding: after the reduce_scatter, shards of gradients are summed over the replicas.
        if split and replicas > 1 and not leaf.frozen:
            sent["all_reduce"] += 2 * elements / shards * (replicas - 1) / replicas * leaf.dtype.itemsize * count
    return {name: int(n) for name, n in sent.items()}


def _gathers_again(streamed: StreamedStep | None) -> dict[str, int]:
    """Return how often backward runs a group's forward loop, by the group's name."""
    if streamed is None:
        return {}
    inside = streamed.tracer.tile_loops()["backward"]
    return {group.name: sum(g is loops and phase == "forward" for g, phase in inside) for group, loops in streamed.plan.loops}
