"""The order of a train step's reads and writes on disk, and how early each read can start.

These are pure functions. A step is a fixed, repeated sequence of **moves** that follows from the
`Schedule`. A read can start early, but not before the last preceding write of its record,

    start(i)  >  max { j < i : moves[j] writes the record of moves[i] }

The sequence repeats because the next step follows this one: the first layers of the next forward
are read while this step ends, but only records whose update has been handed over. For each kind
only the next `distance` reads can start, or the buffers would fill with records that are needed
last.

A `Window` follows one device through the sequence. A program's callbacks can run in a different
order if nothing orders them (two kinds read in one tick), so a move is searched among the next few.
A move that is not found there is carried out all the same: the sequence decides what to read early,
never what is correct.
"""

import bisect
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from host_offload.schedule.ops import Op, Record
from host_offload.schedule.phase import Phase
from host_offload.schedule.stacks import StepPhase, StepPlan, layers_kind
from host_offload.schedule.tiles import tiles_kind


class Move(NamedTuple):
    """One record read from disk, or written to it.

    Attributes:
      kind: name of the records.
      layer: index of the record among the records of its kind.
      writes: whether the record is written instead of read.
    """

    kind: str
    layer: int
    writes: bool = False


def list_moves(
    steps: StepPlan,
    kinds: Collection[str],
    phases: Collection[str] | None = None,
    names: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Move, ...]:
    """Return the moves of a step, or of some of its phases, in order.

    Args:
      steps: plan of the full step.
      kinds: names of the records on disk. Records of "opt_state" are counted from the first layer
        whose state is off the device, and records of "activations" from the first layer of their
        schedule.
      phases: names of the wanted phases; all by default.
      names: for each schedule of layers by name, the stack's name in the names of its records
        (`layers_kind`), and the name of its records of activations if several runs of a stack's
        layers have their own.
    """
    moves: list[Move] = []
    for step_phase in steps.phases:
        if phases is None or step_phase.name in phases:
            moves += _moves_of_phase(step_phase.phase, partial(_kind, step_phase, names or {}))
    return tuple(move for move in moves if move.kind in kinds)


def _kind(step_phase: StepPhase, names: Mapping[str, tuple[str, str]], record: Record) -> str:
    """Return the on-disk name of the records to which a record belongs."""
    if step_phase.stack is None:
        return f"{record.kind}.{record.leaves}"
    if step_phase.group:
        return tiles_kind(record.kind, step_phase.group)
    stack, activations = names.get(step_phase.stack, (step_phase.stack, ""))
    if activations and record.kind == "activations":
        return activations
    return layers_kind(record.kind, stack)


def _moves_of_phase(phase: Phase, name: Callable[[Record], str]) -> Iterator[Move]:
    """Yield the moves of a phase in order.

    `name(record)` returns the on-disk name of a record.
    """
    # A layer whose optimizer state stays on the device has no record on disk.
    first_records = {"opt_state": phase.device_layers, "activations": phase.first_layer}
    for _, ops in phase.ticks():
        for op in ops:
            if op.inner is not None:
                yield from _moves_of_tiles(op)
            elif op.lane in ("read", "write"):
                index = op.number - first_records.get(op.record.kind, 0)
                yield Move(name(op.record), index, op.lane == "write")


def _moves_of_tiles(op: Op) -> Iterator[Move]:
    """Yield the moves of a loop over the tiles of one layer."""
    num_tiles = len(op.inner.layer)
    for move in _moves_of_phase(op.inner, lambda record: tiles_kind(record.kind, op.record.leaves)):
        yield move._replace(layer=op.number * num_tiles + move.layer)


def ready_after(moves: Sequence[Move]) -> np.ndarray:
    """Return the last preceding write of each move's record, for two rounds: int64[2n], -1 if none.

    Args:
      moves: the n moves of one step.
    """
    last_write: dict[tuple[str, int], int] = {}
    after = np.full(2 * len(moves), -1, np.int64)
    # Two rounds, because a read may have to wait for a write of the previous step.
    for i in range(2 * len(moves)):
        move = moves[i % len(moves)]
        record = (move.kind, move.layer)
        after[i] = last_write.get(record, -1)
        if move.writes:
            last_write[record] = i
    return after


def compute_horizon(moves: Sequence[Move], distance: int) -> int:
    """Return how many of the next moves are searched for a finished move and for reads to start."""
    kinds = {move.kind for move in moves}
    # The moves of `distance + 2` ticks, with a read and a write per kind, and a reserve.
    return min(len(moves), 2 * (distance + 2) * (len(kinds) + 1))


class Window:
    """The position of one device in a sequence of moves.

    Attributes:
      moves: the moves of one step.
      distance: number of records of each kind that are read ahead.
      position: index of the first move that has not been made.
    """

    def __init__(self, moves: Sequence[Move], distance: int) -> None:
        """Start before the first move.

        Args:
          moves: the moves of one step.
          distance: number of records of each kind that are read ahead.
        """
        self.moves = tuple(moves)
        self.distance = distance
        # A list, because callbacks read single numbers.
        self._after = ready_after(self.moves).tolist()
        # Indices of the reads in two rounds; writes, which are half of the moves, are skipped.
        self._reads = [
            i for i in range(2 * len(self.moves)) if not self.moves[i % len(self.moves)].writes
        ]
        self._horizon = compute_horizon(self.moves, distance)
        self._handed_over = [False] * len(self.moves)
        self.position = 0

    def restarted(self) -> "Window":
        """Return a window over the same moves, before the first of them."""
        window = copy.copy(self)
        window._handed_over = [False] * len(self.moves)
        window.position = 0
        return window

    def advance(self, move: Move) -> bool:
        """Mark a move as handed over; return whether it was expected."""
        moves = self.moves
        handed_over = self._handed_over
        n = len(self.moves)
        for i in range(self.position, min(self.position + self._horizon, n)):
            if moves[i] == move and not handed_over[i]:
                handed_over[i] = True
                # Moves can be made out of order: the position stays at the first missing move.
                while self.position < n and handed_over[self.position]:
                    self.position += 1
                return True
        return False

    def ahead(self, waiting: Collection[tuple[str, int]]) -> list[Move]:
        """Return the reads to start now, in order, among the next `distance` reads of each kind.

        A later read that is ready must not take the buffer of an earlier read that is not ready
        yet: the records that a loop writes last are often read first by the next loop.

        Args:
          waiting: (kind, layer) of records that have been or are being read, and are not used yet.
        """
        moves = self.moves
        handed_over = self._handed_over
        after = self._after
        n = len(self.moves)
        reads: list[Move] = []
        records = set(waiting)
        position = self.position
        distance = self.distance
        count: dict[str, int] = {}
        for kind, _ in waiting:
            count[kind] = count.get(kind, 0) + 1
        # Reads passed so far, by kind: a later read would take their buffers.
        coming: dict[str, int] = {}
        start = bisect.bisect_left(self._reads, position)
        stop = bisect.bisect_left(self._reads, position + self._horizon)
        for i in self._reads[start:stop]:
            move = moves[i % n]
            kind, layer, _ = move
            # Moves from n on belong to the next step, and none of them has been made.
            if (i < n and handed_over[i]) or coming.get(kind, 0) == distance:
                continue
            coming[kind] = coming.get(kind, 0) + 1
            write = after[i]  # the write that the read must wait for
            is_written = write < position or (write < n and handed_over[write])
            if is_written and (kind, layer) not in records and count.get(kind, 0) < distance:
                records.add((kind, layer))
                count[kind] = count.get(kind, 0) + 1
                reads.append(move)
        return reads
