"""Compare the planned transfers of a step with the actual ones: pure functions of moves and events.

An event is a transfer or a wait. A **use** is the moment at which a step asks for a record or hands
one over; each use is one move of the plan. The plan only knows the order of moves and how early a
read may start. This module assigns times to its moves:

    wanted    when each use would have happened if no device had ever waited for the disk
    write     starts when it is wanted and the previous write has ended
    read      starts when `host_offload.schedule.Window` allows it (see `_released`) and the
              previous read has ended
    seconds   bytes of all devices of this process / rate at which this run read or wrote

The result is the best that this disk could have done with this plan. If a planned read is still too
late for its use, the disk is too slow for the step. If it is in time, the cause of each wait
explains why the actual read was late.

Every late record has one of four causes. The disk is **idle** while no transfer is queued or in
flight.

    asked too late         after the record was written and before its read was queued, the disk was
                           idle for at least as long as the read was late: a larger prefetch
                           distance would have hidden the wait
    disk busy              the disk was not idle for that long: it is slower than the step
    still being written    the record was wanted before its own write had ended
    earlier writes         a write had to wait until an earlier write of its kind was on disk
"""

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.engine import Event
from host_offload.schedule import Move, compute_horizon

ASKED_TOO_LATE = "asked too late"
DISK_BUSY = "disk busy"
STILL_WRITTEN = "still being written"
EARLIER_WRITES = "earlier writes"


MoveKey = tuple[int, int]
"""Index of a run, and index of a move in the run (its turn)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a program.

    Attributes:
      name: name of the program, such as "step".
      moves: planned moves, in order.
      start: time when the run began to read ahead, in seconds of `time.perf_counter`.
      end: time when the run ended; None if it has not ended, or failed.
      events: waits of the run, and transfers that ended since the previous run.
      num_events: number of events recorded; larger than len(events) if the oldest were dropped.
    """

    name: str
    moves: tuple[Move, ...]
    start: float
    end: float | None = None
    events: Sequence[Event] = ()
    num_events: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """A record that a step asked for or handed over.

    Attributes:
      run: index of the run.
      turn: index of the move in the run; None if the move was not planned.
      move: the record, and whether it was read or written.
      rank: position of the device in the mesh.
      number: number of the transfer.
      waits: waits for the transfer, at least one, in order of time.
    """

    run: int
    turn: int | None
    move: Move
    rank: int
    number: int
    waits: tuple[Event, ...]

    @property
    def wanted(self) -> float:
        """Time when the record or an empty buffer was asked for, in `time.perf_counter` seconds."""
        return self.waits[0].start

    @property
    def until(self) -> float:
        """Time when the step could continue, in seconds of `time.perf_counter`."""
        return self.waits[-1].end

    @property
    def waited(self) -> float:
        """Seconds that the step waited, summed over `waits`."""
        return sum(wait.seconds for wait in self.waits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A move of the plan at its ideal time.

    Attributes:
      run: index of the run.
      turn: index of the move in the run.
      move: the record, and whether it is read or written.
      start: ideal start, in seconds of `time.perf_counter`.
      seconds: duration.
      num_bytes: bytes moved, summed over this process's devices.
      wanted: time when the first device would ask for the record, or the last one hand it over, if
        no device ever waited for the disk.
    """

    run: int
    turn: int
    move: Move
    start: float
    seconds: float
    num_bytes: int
    wanted: float


@dataclasses.dataclass(frozen=True)
class Lateness:
    """How late a use was, and why.

    Attributes:
      seconds: for a read, seconds from when the record was wanted until it was available; for a
        write, seconds spent waiting for earlier writes of its kind.
      idle_seconds: seconds for which the disk was idle while the record could have been read but
        was not asked for.
      cause: one of the module's four causes, or "" if the use was not late.
    """

    seconds: float
    idle_seconds: float
    cause: str


class Intervals:
    """A union of time intervals, in seconds."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        """Merge intervals (start, end), given in any order."""
        merged: list[list[float]] = []
        for start, end in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts = [m[0] for m in merged]
        self._ends = [m[1] for m in merged]
        self._sums = [0.0, *itertools.accumulate(m[1] - m[0] for m in merged)]

    @property
    def seconds(self) -> float:
        """Total length of the union, in seconds."""
        return self._sums[-1]

    def covered(self, start: float, end: float) -> float:
        """Return the seconds of the union that lie between `start` and `end`."""
        return max(0.0, self._before(end) - self._before(start))

    def _before(self, time: float) -> float:
        # All intervals that began before `time`, minus the part of the last one after `time`.
        i = bisect.bisect_right(self._starts, time)
        if not i:
            return 0.0
        return self._sums[i] - max(0.0, self._ends[i - 1] - time)


def map_transfers(events: Iterable[Event]) -> dict[int, Event]:
    """Return the reads and writes among `events`, by transfer number."""
    return {event.number: event for event in events if event.name in ("read", "write")}


def list_uses(runs: Sequence[Run]) -> list[Use]:
    """Return the uses of records, run by run, in order of time within each run.

    A device's k-th use of a record is matched with the record's k-th planned move. If the oldest
    events of a run were dropped, both are counted from the end.
    """
    uses = list[Use]()
    for index, run in enumerate(runs):
        uses += _uses_of_run(index, run)
    return uses


def _uses_of_run(index: int, run: Run) -> list[Use]:
    waits: dict[int, list[Event]] = {}
    for event in run.events:
        if event.name in ("read_wait", "write_wait"):
            waits.setdefault(event.number, []).append(event)
    groups = sorted(waits.values(), key=lambda group: group[0].start)
    # If the oldest events were dropped, pair uses and moves from the end, where both are complete.
    backward = run.num_events > len(run.events)
    turns: dict[Move, list[int]] = {}
    for turn, move in enumerate(run.moves):
        turns.setdefault(move, []).append(turn)
    counts: dict[tuple[int, Move], int] = {}
    uses = []
    for group in reversed(groups) if backward else groups:
        first = group[0]
        move = Move(first.kind, first.layer, first.name == "write_wait")
        record_turns = turns.get(move, [])
        count = counts.get((first.rank, move), 0)
        counts[first.rank, move] = count + 1
        turn = None
        if count < len(record_turns):
            turn = record_turns[-1 - count if backward else count]
        uses.append(
            Use(
                run=index,
                turn=turn,
                move=move,
                rank=first.rank,
                number=first.number,
                waits=tuple(group),
            )
        )
    return uses[::-1] if backward else uses


def written_before(transfers: Mapping[int, Event]) -> dict[int, float]:
    """Return, by number of each read, the end of the last write of its record queued before it.

    Times are seconds of `time.perf_counter`; reads without such a write are left out.
    """
    last: dict[tuple[str, int, int], float] = {}
    ends = {}
    # If a write and a read were queued at the same moment, the write is first.
    for transfer in sorted(transfers.values(), key=lambda t: (t.queued, t.name == "read")):
        record = (transfer.kind, transfer.rank, transfer.layer)
        if transfer.name == "write":
            last[record] = transfer.end
        elif record in last:
            ends[transfer.number] = last[record]
    return ends


class Causes:
    """Finds out why uses waited."""

    def __init__(self, transfers: Mapping[int, Event], since: float) -> None:
        """Store the transfers.

        Args:
          transfers: all reads and writes from the time `since` on, by number.
          since: time in seconds of `time.perf_counter`.
        """
        self.transfers = transfers
        self.since = since
        self.busy = Intervals((t.queued, t.end) for t in transfers.values())
        self._written = written_before(transfers)
        self._ends: dict[tuple[str, int], list[float]] = {}  # ends of writes, by kind and rank
        for transfer in sorted(transfers.values(), key=lambda t: t.end):
            if transfer.name == "write":
                self._ends.setdefault((transfer.kind, transfer.rank), []).append(transfer.end)

    def of(self, use: Use) -> Lateness:
        """Return how late a use was, and why."""
        if use.move.writes:
            # A wait counts only if a write of this kind ended during it and so made room.
            ends = self._ends.get((use.move.kind, use.rank), [])
            late = 0.0
            for wait in use.waits:
                if bisect.bisect_left(ends, wait.start) < bisect.bisect_right(ends, wait.end):
                    late += wait.seconds
            return Lateness(late, 0.0, EARLIER_WRITES if late else "")
        read = self.transfers.get(use.number)
        if read is None or read.end <= use.wanted:
            return Lateness(0.0, 0.0, "")
        late = read.end - use.wanted
        written = self._written.get(use.number, self.since)
        if written > use.wanted:
            return Lateness(late, 0.0, STILL_WRITTEN)
        # From when the record could have been read until its read was queued, minus the time in
        # which the disk was busy.
        idle = max(0.0, read.queued - written - self.busy.covered(written, read.queued))
        return Lateness(late, idle, ASKED_TOO_LATE if idle >= late else DISK_BUSY)


def plan(
    runs: Sequence[Run], uses: Sequence[Use], transfers: Mapping[int, Event], distance: int
) -> list[Planned]:
    """Return every move of the runs at its ideal time, as the module's docstring defines it.

    Args:
      runs: runs, in order of time.
      uses: uses of all runs, from `list_uses`.
      transfers: reads and writes, by number.
      distance: prefetch distance, in records of a kind.
    """
    wanted = _wanted(runs, uses)
    costs = _costs(runs, uses, transfers)
    keys = [(run, turn) for run in range(len(runs)) for turn in range(len(runs[run].moves))]
    starts: dict[MoveKey, float] = {}

    # Writes first, because a read of the same record may start only when its write has ended.
    write_ends: dict[MoveKey, float] = {}
    free = -np.inf  # time when the disk has finished all writes placed so far
    for key in keys:
        run, turn = key
        if runs[run].moves[turn].writes:
            starts[key] = max(free, wanted[run][turn])
            free = starts[key] + costs[key].seconds
            write_ends[key] = free

    starts |= _place_reads(_released(runs, wanted, write_ends, distance), costs)
    planned = []
    for key in keys:
        run, turn = key
        planned.append(
            Planned(
                run=run,
                turn=turn,
                move=runs[run].moves[turn],
                start=starts[key],
                seconds=costs[key].seconds,
                num_bytes=costs[key].num_bytes,
                wanted=wanted[run][turn],
            )
        )
    return planned


class _Cost(NamedTuple):
    """Bytes of a move, summed over devices, and its duration in seconds."""

    num_bytes: int
    seconds: float


def _place_reads(
    released: Mapping[MoveKey, float], costs: Mapping[MoveKey, _Cost]
) -> dict[MoveKey, float]:
    """Return the start of each read.

    Reads have a queue of their own: each direction runs at its own rate, in parallel. Among the
    reads that may start, the disk serves the earliest move first.
    """
    starts: dict[MoveKey, float] = {}
    waiting = [(time, key) for key, time in released.items()]
    heapq.heapify(waiting)
    ready: list[MoveKey] = []
    free = -np.inf  # time when the disk has finished all reads placed so far
    while waiting or ready:
        # Collect the reads that may start by now; if there is none, advance time to the next one.
        while waiting and (waiting[0][0] <= free or not ready):
            time, key = heapq.heappop(waiting)
            free = max(free, time)
            heapq.heappush(ready, key)
        key = heapq.heappop(ready)
        starts[key] = free
        free += costs[key].seconds
    return starts


def _wanted(runs: Sequence[Run], uses: Sequence[Use]) -> list[list[float]]:
    """Return when each move of each run would be wanted if no device ever waited for the disk.

    A move without a use gets the time of the move before it.
    """
    stalls = []
    for run in runs:
        waits = [event for event in run.events if event.name in ("read_wait", "write_wait")]
        stalls.append(Intervals((wait.start, wait.end) for wait in waits))
    times: dict[MoveKey, list[float]] = {}
    for use in uses:
        if use.turn is not None:
            time = use.until if use.move.writes else use.wanted
            # Subtract all the time that the run had stalled by then, on any device.
            stalled = stalls[use.run].covered(runs[use.run].start, time)
            times.setdefault((use.run, use.turn), []).append(time - stalled)

    wanted = []
    for index, run in enumerate(runs):
        run_times = []
        last = run.start
        for turn, move in enumerate(run.moves):
            if move_times := times.get((index, turn)):
                # A read is wanted when the first device asks for it, a write when the last device
                # has handed its record over.
                last = max(move_times) if move.writes else min(move_times)
            run_times.append(last)
        wanted.append(run_times)
    return wanted


def _costs(
    runs: Sequence[Run], uses: Sequence[Use], transfers: Mapping[int, Event]
) -> dict[MoveKey, _Cost]:
    """Return the cost of each move.

    Seconds use the rate of the move's run and direction, or if that is unknown, of all runs.
    """
    by_name: dict[str, list[Event]] = {"read": [], "write": []}
    by_run: dict[tuple[int, str], list[Event]] = {}
    sizes: dict[MoveKey, dict[int, int]] = {}  # by rank
    for use in uses:
        if (transfer := transfers.get(use.number)) is not None:
            by_name[transfer.name].append(transfer)
            by_run.setdefault((use.run, transfer.name), []).append(transfer)
            if use.turn is not None:
                sizes.setdefault((use.run, use.turn), {})[use.rank] = transfer.num_bytes
    usual_bytes = {transfer.kind: transfer.num_bytes for transfer in transfers.values()}
    ranks = {use.rank for use in uses}
    run_rates = {key: _rate(group) for key, group in by_run.items()}
    overall_rates = {name: _rate(group) for name, group in by_name.items()}

    costs: dict[MoveKey, _Cost] = {}
    for index, run in enumerate(runs):
        for turn, move in enumerate(run.moves):
            # If a device's transfer is missing, use the size of other records of the kind.
            usual = usual_bytes.get(move.kind, 0)
            move_sizes = sizes.get((index, turn), {})
            num_bytes = sum(move_sizes.get(rank, usual) for rank in ranks)
            name = "write" if move.writes else "read"
            rate = run_rates.get((index, name)) or overall_rates[name]
            costs[index, turn] = _Cost(num_bytes, num_bytes / rate if rate else 0.0)
    return costs


def _rate(transfers: Sequence[Event]) -> float:
    """Return bytes per second while any transfer was in flight; 0 if unknown."""
    seconds = Intervals((t.start, t.end) for t in transfers).seconds
    return sum(t.num_bytes for t in transfers) / seconds if seconds else 0.0


def _released(
    runs: Sequence[Run],
    wanted: Sequence[Sequence[float]],
    written: Mapping[MoveKey, float],
    distance: int,
) -> dict[MoveKey, float]:
    """Return when the plan allows each read to start.

    A read may start when all of these hold: the `distance`-th read of its kind before it has been
    asked for; the previous read of its own record has been asked for; its record has been written;
    it is within the window's horizon. If the previous run had different moves, a read does not
    start before its own run begins.
    """
    released: dict[MoveKey, float] = {}
    last_write: dict[tuple[str, int], float] = {}  # end of each record's last write so far
    for index, run in enumerate(runs):
        # If two consecutive runs have the same moves, the second one's reads start in the first.
        continues = index > 0 and runs[index - 1].moves == run.moves
        begin = runs[index - 1 if continues else index].start
        bounds = _list_bounds(run.moves, distance, continues)
        for turn, move in enumerate(run.moves):
            record = (move.kind, move.layer)
            if move.writes:
                last_write[record] = written[index, turn]
                continue
            # A negative turn is of the run before.
            times = [
                wanted[index][bound] if bound >= 0 else wanted[index - 1][bound]
                for bound in bounds[turn]
            ]
            released[index, turn] = max([begin, last_write.get(record, begin), *times])
    return released


def _list_bounds(moves: Sequence[Move], distance: int, continues: bool) -> list[list[int]]:
    """Return for each move the turns that must be wanted before it is read; none for writes.

    A negative turn counts from the end of the run before, whose moves are the same if `continues`.
    """
    num_moves = len(moves)
    lowest = -num_moves if continues else 0
    horizon = compute_horizon(moves, distance)
    bounds: list[list[int]] = [[] for _ in moves]
    reads: dict[str, list[int]] = {}
    last_reads: dict[tuple[str, int], int] = {}
    for turn in range(lowest, num_moves):
        move = moves[turn % num_moves]
        if move.writes:
            continue
        record = (move.kind, move.layer)
        kind_reads = reads.setdefault(move.kind, [])
        if turn >= 0:
            if turn - horizon >= lowest:
                bounds[turn].append(turn - horizon)
            if 0 < distance <= len(kind_reads):
                bounds[turn].append(kind_reads[-distance])  # the read whose buffer it takes
            if not distance:
                bounds[turn].append(turn)  # its own use, because nothing is read ahead
            if record in last_reads:
                bounds[turn].append(last_reads[record])
        kind_reads.append(turn)
        last_reads[record] = turn
    return bounds
