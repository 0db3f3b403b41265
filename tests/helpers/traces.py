"""Properties of every trace of swapping: the trace event format, lanes, and sums."""

import collections
import itertools
from typing import Any

import pytest

NUMBER = (int, float)
FIELDS: dict[str, dict[str, Any]] = {  # of each phase of the trace event format in use
    "X": {
        "name": str,
        "cat": str,
        "pid": int,
        "tid": int,
        "ts": NUMBER,
        "dur": NUMBER,
        "args": dict,
    },
    "C": {"name": str, "pid": int, "ts": NUMBER, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}


def check(trace: dict[str, Any]) -> None:
    """Check the format and names, and that no slices of a thread overlap."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    threads = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        for field, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[field], kind), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values()), (
                event
            )
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for row in threads.values():
        spans = sorted(
            (round(s["ts"] * 1e3), round(s["ts"] * 1e3) + round(s["dur"] * 1e3)) for s in row
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), row
        assert len({s["cat"] for s in row}) == 1
    metadata = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert {(e["pid"], e["tid"]) for e in metadata if e["name"] == "thread_name"} == set(threads)
    names = process_names(trace)
    assert {e["pid"] for e in trace["traceEvents"]} <= set(names)
    assert len(set(names.values())) == len(names)


def process_names(trace: dict[str, Any]) -> dict[int, str]:
    found = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    return {e["pid"]: e["args"]["name"] for e in found}


def slices(trace: dict[str, Any], track: str, process: str = "") -> list[dict[str, Any]]:
    """Return the slices of tracks whose name has this prefix, of one process or of all."""
    names = process_names(trace)
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"].startswith(track)]
    return [e for e in found if names[e["pid"]] == (process or names[e["pid"]])]


def check_runs(trace: dict[str, Any], moves: dict[str, Any], ranks: list[int]) -> None:
    """Check that the plan and each device draw every move of every run once.

    A late read also has a cause.
    """
    for rank in ranks:
        for args in (
            s["args"] for s in slices(trace, "read ", f"rank {rank}") if "move" in s["args"]
        ):
            assert ("cause" in args) == (args["before_use_ms"] < 0)
            assert args.get("late_ms", 0) == max(0, -args["before_use_ms"])
    assert [s["name"] for s in slices(trace, "steps")] == list(moves)
    for process in ("planned", *(f"rank {rank}" for rank in ranks)):
        drawn = slices(trace, "read ", process) + slices(trace, "write ", process)
        found = collections.Counter(
            (s["args"]["run"], s["args"]["move"], s["name"]) for s in drawn if "move" in s["args"]
        )
        expected = collections.Counter(
            (run, turn, f"{'write' if move.writes else 'read'} {move.kind} {move.layer}")
            for run, planned in moves.items()
            for turn, move in enumerate(planned)
        )
        assert found == expected, process


def check_sums(
    trace: dict[str, Any], run: str, read: float, written: float, stalled: float, misses: float
) -> None:
    """Check that a run's slices sum to its metrics.

    Bytes must match exactly, and waits to one nanosecond per slice.
    """
    devices = [name for name in process_names(trace).values() if name.startswith("rank")]
    for track, total in (("read ", read), ("write ", written)):
        counted = [
            s["args"]
            for name in devices
            for s in slices(trace, track, name)
            if s["args"].get("counted_in") == run
        ]
        assert sum(args["bytes"] for args in counted) == total
    counted = [
        s["args"]
        for name in devices
        for s in slices(trace, "read ", name)
        if s["args"].get("counted_in") == run
    ]
    assert sum(not args["ahead"] for args in counted) == misses
    (step,) = (s for s in slices(trace, "steps") if s["name"] == run)
    assert step["args"]["read_bytes"] == read
    assert step["args"]["write_bytes"] == written
    assert step["args"]["misses"] == misses
    waits = [s for s in slices(trace, "wait ") if s["args"]["run"] == run]
    assert sum(s["dur"] for s in waits) / 1e6 == pytest.approx(stalled, abs=1e-9 * len(waits))
    by_cause = step["args"]["stall_ms"]
    assert by_cause["all"] / 1e3 == pytest.approx(stalled, abs=1e-8)
    assert sum(ms for cause, ms in by_cause.items() if cause != "all") == pytest.approx(
        by_cause["all"], abs=1e-4
    )
