"""What a streamed step reads from disk and writes to it, in order. The engine reads ahead in this order.

    ends read | layers of forward, backward, ... | ends updated | update of the layers, where the ends come before it

The schedule knows the records of layers that the device fetches and stores. Three things are added to it: the ends, which are
the leaves that are no stack of layers; the records that an update on the host reads and writes without the device; and the
loops over tiles inside of a tick.
"""

from collections.abc import Mapping, Sequence

from host_offload.schedule import Move, TileLoops, moves_of
from zerojax.streamed.plan import StreamedPlan

Loops = Sequence[Mapping[str, Sequence[tuple[TileLoops, str]]]]
"""Of each run of layers, the loops over tiles of a tick of each phase."""


def step_moves(plan: StreamedPlan, loops: Loops, ends_first: bool) -> tuple[Move, ...]:
    """Return the moves of a step.

    Args:
      plan: of the step.
      loops: over tiles.
      ends_first: whether the ends are updated before the layers.
    """
    if plan.layout.disk is None:
        return ()
    first, last = plan.state_records.end_moves()
    # The engine reads ahead in this order, so it must be the one in which the program fetches and stores.
    layers, update = [*_moves(plan, "forward", loops), *_moves(plan, "backward", loops)], _moves(plan, "update")
    return (*first, *layers, *last, *update) if ends_first else (*first, *layers, *update, *last)


def _moves(plan: StreamedPlan, phase: str, loops: Loops = ()) -> list[Move]:
    """Return the moves of a phase of every run of layers: backward begins with the last one."""
    assert plan.layout.disk is not None
    kinds, moves = plan.layout.disk.kinds.keys(), []
    for n, stack in (reversed if phase == "backward" else list)(list(enumerate(plan.of_stacks))):
        by_host = {} if plan.host is None else plan.host.state.moves(stack.leaves)
        inside, activations = loops[n] if loops else None, stack.run.activations_kind
        moves += moves_of(stack.schedule, kinds, (phase,), by_host, inside, stack.name, activations)
    return moves


def eval_moves(plan: StreamedPlan, loops: Loops) -> tuple[Move, ...]:
    """Return the moves of an evaluation: parameters alone."""
    if plan.layout.disk is None:
        return ()
    # Forward of a step also writes activations. An evaluation keeps none. Tiles, ends and stacks have kinds of their own,
    # "params.tiles.<group>", "params.<i>" and "params.<stack>".
    forward = [move for move in _moves(plan, "forward", loops) if move.kind.split(".")[0] in ("params", "frozen")]
    return (*plan.state_records.end_moves()[0], *forward)


def grads_moves(plan: StreamedPlan, loops: Loops) -> tuple[Move, ...]:
    """Return the moves of forward and backward alone, of a step that keeps gradients on the device."""
    if plan.layout.disk is None:
        return ()
    return (*plan.state_records.end_moves()[0], *_moves(plan, "forward", loops), *_moves(plan, "backward", loops))
