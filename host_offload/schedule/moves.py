"""Which records a train step moves between disk and buffers, in which order, and how early each read may start: pure functions.

A step is a fixed sequence of **moves**, repeated: it follows from the `Schedule`. A read may start early, but not before
the last write of its record that precedes it,

    start(i)  >  max { j < i : moves[j] writes the record of moves[i] }

with the sequence repeated, since the next step follows this one: the first layers of the next forward are read while
this step ends, but only records whose update has been handed over. Of each kind only the next `distance` reads may start,
or the buffers would fill with records that are needed last.

A `Window` follows one device through the sequence. Callbacks of a program may come in another order where nothing orders them
(two kinds read in one tick), so a move is looked for among the next few. A move that is not found there is carried
out all the same: the sequence decides what to read early, never what is correct.
"""

import bisect
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from host_offload.schedule.schedule import Phase, Schedule
from host_offload.schedule.stacks import layers_kind
from host_offload.schedule.tiles import TiledSchedule, TileLoops


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


Kinds = tuple[str, ...]


def moves_of(
    schedule: Schedule,
    kinds: Collection[str],
    phases: Collection[str] | None = None,
    besides: Mapping[str, tuple[Kinds, Kinds]] | None = None,
    loops: Mapping[str, Sequence[tuple[TileLoops, str]]] | None = None,
    stack: str = "",
    activations: str = "",
) -> tuple[Move, ...]:
    """Return the moves of a step, or of some phases of it.

    Args:
      schedule: of the step; where there are several stacks of layers, of one.
      kinds: those that rest on disk. Records of "opt_state" are counted from the first layer that is not on the device, and
        those of "activations" from the first layer of the schedule.
      phases: names of the phases wanted; all by default.
      besides: phase -> kinds that a tick reads, and kinds that it writes, of its own layer. The schedule lacks them because the
        device never has them: an update on the host uses them.
      loops: phase -> the loops over tiles that each of its ticks runs, in order, and which of their phases each is.
      stack: name of the stack of layers, by which its records are called (`layers_kind`).
      activations: name of the records of activations, where several runs of a stack's layers have their own; "" as of a stack.
    """
    moves: list[Move] = []

    def name_of(kind: str) -> str:
        return activations if activations and kind == "activations" else layers_kind(kind, stack)

    for phase in schedule.phases:
        if phases is not None and phase.name not in phases:
            continue

        def tiles(layer: int, inside: Sequence[tuple[TileLoops, str]]) -> list[Move]:
            """Return the moves of a tick's loops over tiles."""
            tile_moves: list[Move] = []
            for group, name in inside:
                phase_moves = _moves_of_phase(group.phase(name), group.kind)
                tile_moves += [Move(kind, layer * group.num_tiles + tile, writes) for kind, tile, writes in phase_moves]
            return tile_moves

        inside = (loops or {}).get(phase.name, ())
        moves += _moves_of_phase(phase, name_of, (besides or {}).get(phase.name, ((), ())), partial(tiles, inside=inside))
        if phase.name == "update" and isinstance(schedule, TiledSchedule):
            for group in schedule.tiles:
                moves += _moves_of_phase(group.phase("update"), group.kind)
    return tuple(move for move in moves if move.kind in kinds)


def _moves_of_phase(
    phase: Phase,
    name: Callable[[str], str],
    besides: tuple[Kinds, Kinds] = ((), ()),
    inside: Callable[[int], list[Move]] = lambda layer: [],
) -> list[Move]:
    """Return the moves of one loop of records whose kinds are called `name(kind)`; each tick also has those `inside` it."""
    moves: list[Move] = []

    def add(names: Sequence[str], layer: int, writes: bool = False) -> None:
        for kind in names:
            # A layer whose optimizer state is on the device has no record of it, and a negative number.
            before = {"opt_state": phase.device_layers, "activations": phase.first_layer}.get(kind, 0)
            record = layer - before
            if layer >= 0 and record >= 0:
                moves.append(Move(name(kind), record, writes))

    reads, writes = besides
    add(phase.fetches, phase.first)
    for layer in phase.preload.tolist():
        add(phase.fetches, layer)
    for tick, layer in enumerate(phase.layer.tolist()):
        # The moves of a tick, in the order in which it makes them.
        waits = not len(phase.preload)  # no ring: a tick fetches what it takes itself
        add(phase.fetches, int(phase.consume[tick]) if waits else int(phase.fetch[tick]))
        moves += inside(layer)
        add((*phase.reads, *reads), layer)
        add(phase.writes, int(phase.store[tick]), writes=True)
        add(writes, layer, writes=True)
    for layer in phase.drain.tolist():
        add(phase.writes, layer, writes=True)
    return moves


def ready_after(moves: Sequence[Move]) -> np.ndarray:
    """Return for each move of two rounds the last move before it that writes its record: int64[2n], -1 where there is none."""
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
    """Return how many of the next moves are searched, for reads to start and for a move that was made."""
    kinds = {move.kind for move in moves}
    # The moves of `distance + 2` ticks, a read and a write of each kind, and some to spare.
    return min(len(moves), 2 * (distance + 2) * (len(kinds) + 1))


class Window:
    """The position of one device in a sequence of moves."""

    def __init__(self, moves: Sequence[Move], distance: int) -> None:
        """Start before the first move; `distance` records of a kind are read ahead."""
        self.moves, self.distance = tuple(moves), distance
        self._after = ready_after(self.moves).tolist()  # a list: callbacks read single numbers of it
        # Places of the reads in two rounds: half of the moves are writes, which nobody reads ahead.
        self._reads = [i for i in range(2 * len(self.moves)) if not self.moves[i % len(self.moves)].writes]
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
                # Moves may come in another order: the position stays before the first that is missing.
                while self.position < n and done[self.position]:
                    self.position += 1
                return True
        return False

    def ahead(self, waiting: Collection[tuple[str, int]]) -> list[Move]:
        """Return the reads to start now, in order: of the next `distance` reads of each kind, those that may start.

        A later read that may start must not take the buffer of an earlier one that may not start yet: what a loop writes last,
        the next loop often reads first.

        Args:
          waiting: (kind, layer) of the records that were read, or are being read, and are not used yet.
        """
        moves, done, after, n = self.moves, self._done, self._after, len(self.moves)
        reads: list[Move] = []
        records, position, distance = set(waiting), self.position, self.distance
        count: dict[str, int] = {}
        for kind, _ in waiting:
            count[kind] = count.get(kind, 0) + 1
        coming: dict[str, int] = {}  # reads of each kind that were passed: a later one would take their buffers
        places = self._reads
        for at in range(bisect.bisect_left(places, position), bisect.bisect_left(places, position + self._horizon)):
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
