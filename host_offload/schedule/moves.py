"""Which records a train step moves between disk and buffers, in which order, and how early each
read may start: pure functions.

A step is a fixed sequence of **moves**, repeated: it follows from the `Schedule`. A read may start
early, but not before the last write of its record that precedes it,

    start(i)  >  max { j < i : moves[j] writes the record of moves[i] }

with the sequence repeated, since the next step follows this one: the first layers of the next
forward are read while this step ends, but only records whose update has been handed over. Of each
kind only the next `distance` reads may start, or the buffers would fill with records that are
needed last.

A `Window` follows one device through the sequence. Callbacks of a program may come in another order
where nothing orders them (two kinds read in one tick), so a move is looked for among the next few.
A move that is not found there is carried out all the same: the sequence decides what to read early,
never what is correct.
"""

import bisect
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from host_offload.schedule.ops import Record
from host_offload.schedule.schedule import Phase
from host_offload.schedule.stacks import Part, StepPlan, layers_kind
from host_offload.schedule.tiles import tiles_kind


class Move(NamedTuple):
    """One record read from disk, or written to it.

    Attributes:
      kind: of the record.
      layer: index of the record among those of its kind.
      writes: whether it is written.
    """

    kind: str
    layer: int
    writes: bool = False


def moves_of(
    steps: StepPlan,
    kinds: Collection[str],
    phases: Collection[str] | None = None,
    names: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Move, ...]:
    """Return the moves of a step, or of some phases of it.

    Args:
      steps: everything that the step does.
      kinds: those that rest on disk. Records of "opt_state" are counted from the first layer that
        is not on the device, and those of "activations" from the first layer of their schedule.
      phases: names of the phases wanted; all by default.
      names: of each schedule of layers, by name: that of the stack by which its records are called
        (`layers_kind`), and that of its records of activations, where several runs of a stack's
        layers have their own.
    """
    moves: list[Move] = []
    for part in steps.parts:
        if phases is None or part.name in phases:
            moves += _moves_of_phase(part.phase, partial(_kind, part, names or {}))
    return tuple(move for move in moves if move.kind in kinds)


def _kind(part: Part, names: Mapping[str, tuple[str, str]], record: Record) -> str:
    """Return the name of the records on disk of which one is moved."""
    if part.stack is None:
        return f"{record.kind}.{record.leaves}"
    if part.group:
        return tiles_kind(record.kind, part.group)
    stack, activations = names.get(part.stack, (part.stack, ""))
    return (
        activations
        if activations and record.kind == "activations"
        else layers_kind(record.kind, stack)
    )


def _moves_of_phase(phase: Phase, name: Callable[[Record], str]) -> Iterator[Move]:
    """Yield the moves of a phase, whose records are called `name(record)`, in the order in which it
    makes them.
    """
    # A layer whose optimizer state is on the device has no record of it.
    before = {"opt_state": phase.device_layers, "activations": phase.first_layer}
    for _, ops in phase.ticks():
        for op in ops:
            if op.inner is not None:
                group, num_tiles = op.record.leaves, len(op.inner.layer)
                for move in _moves_of_phase(
                    op.inner, lambda record, group=group: tiles_kind(record.kind, group)
                ):
                    yield move._replace(layer=op.number * num_tiles + move.layer)
            elif op.lane in ("read", "write"):
                yield Move(
                    name(op.record), op.number - before.get(op.record.kind, 0), op.lane == "write"
                )


def ready_after(moves: Sequence[Move]) -> np.ndarray:
    """Return for each move of two rounds the last move before it that writes its record: int64[2n],
    -1 where there is none.
    """
    last_write: dict[tuple[str, int], int] = {}
    after = np.full(2 * len(moves), -1, np.int64)
    # Two rounds, because the write that a read has to wait for may be one of the step before.
    for i in range(2 * len(moves)):
        move = moves[i % len(moves)]
        record = (move.kind, move.layer)
        after[i] = last_write.get(record, -1)
        if move.writes:
            last_write[record] = i
    return after


def horizon_of(moves: Sequence[Move], distance: int) -> int:
    """Return how many of the next moves are searched, for reads to start and for a move that was
    made.
    """
    kinds = {move.kind for move in moves}
    # The moves of `distance + 2` ticks, a read and a write of each kind, and some to spare.
    return min(len(moves), 2 * (distance + 2) * (len(kinds) + 1))


class Window:
    """The position of one device in a sequence of moves."""

    def __init__(self, moves: Sequence[Move], distance: int) -> None:
        """Start before the first move; `distance` records of a kind are read ahead."""
        self.moves, self.distance = tuple(moves), distance
        self._after = ready_after(
            self.moves
        ).tolist()  # a list: callbacks read single numbers of it
        # Places of the reads in two rounds: half of the moves are writes, which nobody reads ahead.
        self._reads = [
            i for i in range(2 * len(self.moves)) if not self.moves[i % len(self.moves)].writes
        ]
        self._horizon = horizon_of(self.moves, distance)
        self._done = [False] * len(self.moves)
        self.position = 0

    def restarted(self) -> "Window":
        """Return a window before the first of the same moves."""
        window = copy.copy(self)
        window._done, window.position = [False] * len(self.moves), 0
        return window

    def advance(self, move: Move) -> bool:
        """Mark a move as handed over; return whether it was expected."""
        moves, done, n = self.moves, self._done, len(self.moves)
        for i in range(self.position, min(self.position + self._horizon, n)):
            if moves[i] == move and not done[i]:
                done[i] = True
                # Moves may come in another order: the position stays before the first that is
                # missing.
                while self.position < n and done[self.position]:
                    self.position += 1
                return True
        return False

    def ahead(self, waiting: Collection[tuple[str, int]]) -> list[Move]:
        """Return the reads to start now, in order: of the next `distance` reads of each kind, those
        that may start.

        A later read that may start must not take the buffer of an earlier one that may not start
        yet: what a loop writes last, the next loop often reads first.

        Args:
          waiting: (kind, layer) of the records that were read, or are being read, and are not used
            yet.
        """
        moves, done, after, n = self.moves, self._done, self._after, len(self.moves)
        reads: list[Move] = []
        records, position, distance = set(waiting), self.position, self.distance
        count: dict[str, int] = {}
        for kind, _ in waiting:
            count[kind] = count.get(kind, 0) + 1
        coming: dict[
            str, int
        ] = {}  # reads of each kind that were passed: a later one would take their buffers
        places = self._reads
        for at in range(
            bisect.bisect_left(places, position),
            bisect.bisect_left(places, position + self._horizon),
        ):
            i = places[at]
            move = moves[i % n]
            kind, layer, _ = move
            # From n on these are moves of the next step, of which none has been made.
            if (i < n and done[i]) or coming.get(kind, 0) == distance:
                continue
            coming[kind] = coming.get(kind, 0) + 1
            write = after[i]  # that the read must see: has it been handed over?
            is_written = write < position or (write < n and done[write])
            if is_written and (kind, layer) not in records and count.get(kind, 0) < distance:
                records.add((kind, layer))
                count[kind] = count.get(kind, 0) + 1
                reads.append(move)
        return reads
