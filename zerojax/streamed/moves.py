"""What a streamed step reads from disk and writes to it, in order. The engine reads ahead in this order.

    ends read | layers of forward, backward, ... | ends updated | update of the layers, where the ends come before it

The schedule knows the records of layers that the device fetches and stores. Three things are added to it: the ends, which are
the leaves that are no stack of layers; the records that an update on the host reads and writes without the device; and the
loops over tiles inside of a tick.
"""

from collections.abc import Mapping, Sequence

from host_offload.schedule import Move, TileLoops, moves_of
from zerojax.streamed.plan import StreamedPlan

Loops = Mapping[str, Sequence[tuple[TileLoops, str]]]


def step_moves(plan: StreamedPlan, loops: Loops, ends_first: bool) -> tuple[Move, ...]:
    """Return the moves of a step.

    Args:
      plan: of the step.
      loops: over tiles, of a tick of each phase.
      ends_first: whether the ends are updated before the layers.
    """
    if plan.layout.disk is None:
        return ()
    kinds, phases = plan.layout.disk.kinds.keys(), [phase.name for phase in plan.schedule.phases]
    first, last = plan.state_records.end_moves()
    by_host = {} if plan.host is None else plan.host.state.moves()
    after = ["update"] if ends_first else []
    # The engine reads ahead in this order, so it must be the one in which the program fetches and stores.
    before = moves_of(plan.schedule, kinds, [name for name in phases if name not in after], by_host, loops)
    return (*first, *before, *last, *moves_of(plan.schedule, kinds, after, by_host))


def eval_moves(plan: StreamedPlan, loops: Loops) -> tuple[Move, ...]:
    """Return the moves of an evaluation: parameters alone."""
    if plan.layout.disk is None:
        return ()
    first = plan.state_records.end_moves()[0]
    # Forward of a step also writes activations. An evaluation keeps none.
    forward = moves_of(plan.schedule, plan.layout.disk.kinds.keys(), ("forward",), loops=loops)
    # Tiles and ends have kinds of their own, "params.tiles.<group>" and "params.<i>".
    return (*first, *(move for move in forward if move.kind.split(".")[0] in ("params", "frozen")))


def grads_moves(plan: StreamedPlan, loops: Loops) -> tuple[Move, ...]:
    """Return the moves of forward and backward alone, of a step that keeps gradients on the device."""
    if plan.layout.disk is None:
        return ()
    first, kinds = plan.state_records.end_moves()[0], plan.layout.disk.kinds.keys()
    return (*first, *moves_of(plan.schedule, kinds, ("forward", "backward"), loops=loops))
