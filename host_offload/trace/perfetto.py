"""Write a program's planned and actual transfers to a trace file for Perfetto (ui.perfetto.dev).

The file uses the object form of the Chrome trace event format: complete events ("X"), counters
("C") and names ("M"), with times in microseconds. Slices of one thread must not overlap in this
format, so overlapping transfers of one kind are drawn on several **lanes**.

    process     threads                             what is drawn
    disk        steps; counters                     each run with its sums; queued transfers, bytes
    planned     read and write, by kind             each move at its ideal time, all devices
    predicted   compute, up, down, read, write      a prediction of each step, from the step's start
    rank N      read, write and wait, by kind       each transfer and each wait of one device

`plan.py` computes the ideal times. A planned move and its actual transfers share the arguments
"run" and "move". A transfer without them was not requested by any run of the trace: it was read
ahead for the next run, or dropped. "counted_in" names the run whose metrics count the transfer: the
first run that ended after it. A record written last in a run is counted by the next run.
"""

import collections
import contextlib
import dataclasses
import errno
import gzip
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from host_offload.engine import Event
from host_offload.trace.plan import (
    Causes,
    Intervals,
    Lateness,
    Planned,
    Run,
    Use,
    list_uses,
    map_transfers,
    plan,
)

DISK = 1
PLANNED = 2
RANKS = 3
"""Process ids of the shared disk, of the plan and of the first device."""
PREDICTED = 1 << 20
"""Process id of the prediction, larger than any device's."""
STEP = "step"
"""Name of the runs for which a prediction is drawn."""
Json = dict[str, Any]
Span = tuple[str, str, float, float]
"""(lane, label, start, stop) of a predicted operation, in seconds from the start of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slice:
    """A box in the trace: `name` is drawn in it, `track` next to it; times in nanoseconds."""

    process: int
    track: str
    name: str
    start: int
    end: int
    args: Json


def build_trace(
    runs: Sequence[Run],
    distance: int,
    *,
    before: Run | None = None,
    after: Sequence[Event] = (),
    predicted: Sequence[Span] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Json:
    """Build the trace of some runs of a program.

    Args:
      runs: runs to draw, in order of time.
      distance: prefetch distance, in records of a kind.
      before: the run before `runs`, during which the first records were read ahead.
      after: events after the last run, such as the end of its last writes.
      predicted: predicted operations of a step, drawn once per run named "step".
      metadata: entries of the file's "otherData", stored unchanged.

    Returns:
      The JSON object to pass to `write_trace`.
    """
    return _Builder(runs, distance, before, after, predicted).build(metadata or {})


class _Builder:
    """Builds one trace; holds the data that its parts share."""

    def __init__(
        self,
        runs: Sequence[Run],
        distance: int,
        before: Run | None,
        after: Sequence[Event],
        predicted: Sequence[Span],
    ) -> None:
        # The run before is planned and counted too, because it read ahead for the first drawn run,
        # but it is not drawn itself.
        self.runs = [*([] if before is None else [before]), *runs]
        self.first = len(self.runs) - len(runs)  # index of the first run to draw
        self.distance = distance
        self.after = after
        self.predicted = predicted
        events = [event for run in self.runs for event in run.events] + list(after)
        self.transfers = map_transfers(events)
        self.uses = list_uses(self.runs)
        self.use_of = {use.number: use for use in self.uses}
        self.counted_in: dict[int, int] = {}
        for index, run in enumerate(self.runs):
            transfers = map_transfers(run.events)
            self.counted_in |= dict.fromkeys(transfers, index)
        starts = [run.start for run in self.runs]
        since = min(starts + [event.queued for event in events], default=0.0)
        causes = Causes(self.transfers, since)
        self.busy = causes.busy
        self.late = {use.number: causes.of(use) for use in self.uses}
        planned = plan(self.runs, self.uses, self.transfers, distance)
        self.planned = [move for move in planned if move.run >= self.first]
        self.drawn = [transfer for transfer in self.transfers.values() if self._is_drawn(transfer)]
        starts = starts[self.first :] + [move.start for move in self.planned]
        self.origin = min(starts + [transfer.queued for transfer in self.drawn], default=0.0)
        self.names = _names(self.runs, self.first)

    def _is_drawn(self, transfer: Event) -> bool:
        """Return whether a transfer ended after the first drawn run began, or is used by one."""
        use = self.use_of.get(transfer.number)
        is_used = use is not None and use.run >= self.first
        return is_used or self.counted_in.get(transfer.number, len(self.runs)) >= self.first

    def build(self, metadata: Mapping[str, Any]) -> Json:
        """Return the trace as a JSON object."""
        slices = [*self._runs(), *self._planned(), *map(self._transfer, self.drawn), *self._waits()]
        ranks = sorted({s.process for s in slices if s.process >= RANKS})
        events = _process(DISK, "disk", 0) + _process(PLANNED, "planned", 1)
        if predicted := list(self._predicted()):
            events += _process(PREDICTED, "predicted", 2)
        for i, process in enumerate(ranks, 3 if predicted else 2):
            events += _process(process, f"rank {process - RANKS}", i)
        slices += predicted
        events += _on_lanes(slices) + self._counters()
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(metadata)}

    def _ns(self, time: float) -> int:
        # Integers: rounding after the lanes are chosen could make two slices of a lane overlap.
        return round((time - self.origin) * 1e9)

    def _slice(
        self, process: int, track: str, name: str, start: float, end: float, args: Json
    ) -> _Slice:
        return _Slice(
            process=process,
            track=track,
            name=name,
            start=self._ns(start),
            end=self._ns(end),
            args=args,
        )

    def _place(self, use: Use | None) -> Json:
        """Return the trace arguments that identify the planned move of a transfer."""
        if use is None or use.run < self.first:
            return {}
        place: Json = {"run": self.names[use.run]}
        if use.turn is not None:
            place["move"] = use.turn
        return place

    def _transfer(self, event: Event) -> _Slice:
        use = self.use_of.get(event.number)
        late = self.late.get(event.number)
        counted = self.counted_in.get(event.number)
        args = {
            "kind": event.kind,
            "layer": event.layer,
            **self._place(use),
            "number": event.number,
            "bytes": event.num_bytes,
            "GB_per_s": _rate(event.num_bytes, event.seconds),
            "queued_ms": _ms(event.start - event.queued),
        }
        if counted is not None and counted >= self.first:
            args["counted_in"] = self.names[counted]
        if event.name == "read":
            args["ahead"] = event.ahead
            if use is not None and late is not None:
                args |= {"before_use_ms": _ms(use.wanted - event.end), **_lateness(late)}
        track = f"{event.name} {event.kind}"
        name = f"{track} {event.layer}"
        return self._slice(RANKS + event.rank, track, name, event.start, event.end, args)

    def _waits(self) -> Iterable[_Slice]:
        for run in self.runs[self.first :]:
            for event in run.events:
                if event.name in ("read_wait", "write_wait"):
                    yield self._wait(event)

    def _wait(self, event: Event) -> _Slice:
        use = self.use_of[event.number]
        late = self.late[event.number]
        args = {
            "kind": event.kind,
            "layer": event.layer,
            **self._place(use),
            "number": event.number,
            **_lateness(late),
        }
        verb = "write" if use.move.writes else "read"
        name = f"{verb} {event.kind} {event.layer}: {late.cause or 'not late'}"
        track = f"wait {event.kind}"
        return self._slice(RANKS + event.rank, track, name, event.start, event.end, args)

    def _planned(self) -> Iterable[_Slice]:
        uses: dict[tuple[int, int | None], list[Use]] = {}
        for use in self.uses:
            uses.setdefault((use.run, use.turn), []).append(use)
        for planned in self.planned:
            yield self._planned_move(planned, uses.get((planned.run, planned.turn), []))

    def _planned_move(self, planned: Planned, uses: Sequence[Use]) -> _Slice:
        move = planned.move
        end = planned.start + planned.seconds
        args = {
            "kind": move.kind,
            "layer": move.layer,
            "run": self.names[planned.run],
            "move": planned.turn,
            "bytes": planned.num_bytes,
            "GB_per_s": _rate(planned.num_bytes, planned.seconds),
            "made_on_devices": len(uses),
        }
        if not move.writes:
            reads = [self.transfers[use.number] for use in uses if use.number in self.transfers]
            args["missed_on_devices"] = sum(not read.ahead for read in reads)
            args["ideally_late_ms"] = _ms(max(0.0, end - planned.wanted))
        if uses:
            latenesses = [self.late[use.number] for use in uses]
            args |= _lateness(max(latenesses, key=lambda late: late.seconds))
        track = f"{'write' if move.writes else 'read'} {move.kind}"
        return self._slice(PLANNED, track, f"{track} {move.layer}", planned.start, end, args)

    def _predicted(self) -> Iterable[_Slice]:
        for index, run in enumerate(self.runs):
            if index < self.first or run.name != STEP:
                continue
            for lane, label, start, stop in self.predicted:
                args = {"run": self.names[index]}
                yield self._slice(PREDICTED, lane, label, run.start + start, run.start + stop, args)

    def _runs(self) -> Iterable[_Slice]:
        for index, run in enumerate(self.runs):
            if index < self.first:
                continue
            end = run.end
            if end is None:
                end = max([run.start, *(event.end for event in run.events)])
            sums = self._sums(index, run, end)
            yield self._slice(DISK, "steps", self.names[index], run.start, end, sums)

    def _sums(self, index: int, run: Run, end: float) -> Json:
        """Return a run's bytes and waits, counted as in its metrics, and its waits by cause."""
        args: Json = {}
        for name in ("read", "write"):
            transfers = [e for e in run.events if e.name == name]
            # Transfers overlap: the rate is over the time in which at least one was in flight.
            num_bytes = sum(e.num_bytes for e in transfers)
            under_way = Intervals((e.start, e.end) for e in transfers)
            args[f"{name}_bytes"] = num_bytes
            args[f"{name}_GB_per_s"] = _rate(num_bytes, under_way.seconds)
        stalls: dict[str, float] = collections.defaultdict(float)
        for use in self.uses:
            if use.run == index:
                stalls["all"] += use.waited
                stalls[self.late[use.number].cause or "not late"] += use.waited
        seconds = end - run.start
        args["stall_ms"] = {cause: _ms(stall) for cause, stall in sorted(stalls.items())}
        args["misses"] = sum(e.name == "read" and not e.ahead for e in run.events)
        busy = self.busy.covered(run.start, end)
        args["disk_busy"] = round(busy / seconds, 4) if seconds else 0.0
        if run.end is None:
            args["ended"] = False
        return args

    def _counters(self) -> list[Json]:
        """Return counter events of the transfers queued or in flight, and of their bytes."""
        changes: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for event in self.drawn:
            for time, sign in ((self._ns(event.queued), 1), (self._ns(event.end), -1)):
                changes[time][event.name] += sign
                changes[time][event.name + " bytes"] += sign * event.num_bytes
        now: collections.Counter[str] = collections.Counter()
        events = []
        for time, change in sorted(changes.items()):
            now.update(change)
            for name, unit in (("transfers queued", ""), ("bytes in flight", " bytes")):
                values = {direction: now[direction + unit] for direction in ("read", "write")}
                events.append(
                    {"ph": "C", "pid": DISK, "name": name, "ts": time / 1e3, "args": values}
                )
        return events


def _names(runs: Sequence[Run], first: int) -> list[str]:
    counts: collections.Counter[str] = collections.Counter()
    names = []
    for index, run in enumerate(runs):
        counts[run.name] += index >= first
        names.append(f"{run.name} {counts[run.name]}")
    return names


def _lateness(late: Lateness) -> Json:
    if not late.cause:
        return {}
    return {
        "late_ms": _ms(late.seconds),
        "disk_rested_ms": _ms(late.idle_seconds),
        "cause": late.cause,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def _rate(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0


def _process(process: int, name: str, order: int) -> list[Json]:
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": order}},
    ]


def _on_lanes(slices: Iterable[_Slice]) -> list[Json]:
    """Return a complete event per slice, on the first free lane of its track, and lane names."""
    tracks: dict[tuple[int, str], list[_Slice]] = {}
    for s in slices:
        tracks.setdefault((s.process, s.track), []).append(s)
    events: list[Json] = []
    threads: collections.Counter[int] = collections.Counter()
    for (process, track), track_slices in sorted(tracks.items()):
        ends: list[int] = []  # end of the last slice of each lane
        first = threads[process] + 1
        for s in sorted(track_slices, key=lambda s: (s.start, s.end)):
            lane = next((i for i, end in enumerate(ends) if end <= s.start), len(ends))
            ends[lane : lane + 1] = [s.end]
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": first + lane,
                    "name": s.name,
                    "cat": track,
                    "ts": s.start / 1e3,
                    "dur": (s.end - s.start) / 1e3,
                    "args": s.args,
                }
            )
        for lane in range(len(ends)):
            thread = first + lane
            name = track if lane == 0 else f"{track} ({lane + 1})"
            events.append(_thread_metadata(process, thread, "thread_name", {"name": name}))
            events.append(
                _thread_metadata(process, thread, "thread_sort_index", {"sort_index": thread})
            )
        threads[process] += len(ends)
    return events


def _thread_metadata(process: int, thread: int, name: str, args: Json) -> Json:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that a trace can be written to a path.

    An existing file is not changed, and no new file is left behind.

    Args:
      path: path of the future trace file.

    Raises:
      ValueError: the path is not the name of a file in a writable folder.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"a trace cannot be written to {path!r}: name a file, such as trace.json.gz"
        )
    try:
        if os.path.lexists(name) and not os.path.isfile(name):
            raise OSError(errno.EINVAL, "not a regular file")
        # Create the temporary file of `write_trace` instead of opening an older trace.
        temporary = _build_temporary_name(name)
        with open(temporary, "xb"):
            pass
        os.unlink(temporary)
    except OSError as error:
        raise ValueError(
            f"a trace cannot be written to {name} ({error.strerror}): name a file in an existing "
            "folder that you can write to"
        ) from error


def _build_temporary_name(name: str) -> str:
    """Return the name of the temporary file of a trace.

    It is random, so that nobody can have put a link of that name there.
    """
    return f"{name}.{secrets.token_hex(8)}.part"


def write_trace(trace: Json, path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON, compressed if the name ends in ".gz".

    The file appears under its name only when it is complete.

    Args:
      trace: result of `build_trace`.
      path: path of the file.

    Raises:
      OSError: the file cannot be written; an older file of that name is kept.
    """
    name = os.fspath(path)
    temporary = _build_temporary_name(name)
    open_file = gzip.open if name.endswith(".gz") else open
    try:
        with open_file(temporary, "xt") as file:
            json.dump(trace, file, separators=(",", ":"))
        os.replace(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
