"""A trace holds each transfer and each wait once, in a form that Perfetto opens.

The end of a long trace is kept.
"""

import functools
import gzip
import itertools
import json
import logging
import os
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.disk.errors import SwapError
from host_offload.disk.folder import SwapFolder
from host_offload.disk.record_format import LeafFormat, RecordFormat
from host_offload.disk.store import Store
from host_offload.engine.engine import Engine
from host_offload.engine.stats import Event, Stats
from host_offload.schedule.moves import Move
from host_offload.trace import recorder
from host_offload.trace.perfetto import build_trace, check_path, write_trace
from host_offload.trace.plan import Run
from host_offload.trace.recorder import Recorder

FORMAT = RecordFormat((LeafFormat("w", (1024,), "float32"),))
LAYERS = 4
MOVES = tuple(Move("p", layer, writes) for layer in range(LAYERS) for writes in (False, True))


@st.composite
def transfers(draw):
    """Reads and writes of two kinds on two devices.

    Their times are sums of 1/1024 s, so that many coincide.
    """
    found = []
    for number in range(draw(st.integers(0, 40))):
        queued, wait, seconds = (draw(st.integers(least, 40)) / 1024 for least in (0, 0, 1))
        place = {
            "kind": draw(st.sampled_from(["p", "q"])),
            "rank": draw(st.integers(0, 1)),
            "layer": number,
        }
        name = draw(st.sampled_from(["read", "write"]))
        found.append(
            Event(
                name,
                **place,
                number=number,
                start=queued + wait,
                seconds=seconds,
                queued=queued,
                num_bytes=number,
            )
        )
    return found


@settings(max_examples=60, deadline=None)
@given(transfers())
def test_transfers_that_overlap_have_lanes_of_their_own(events):
    run = Run(name="step", moves=(), start=0.0, end=3.0, events=events, num_events=len(events))
    trace = build_trace([run], 1)
    traces.check(trace)
    drawn = traces.slices(trace, "read ") + traces.slices(trace, "write ")
    assert sorted(s["args"]["number"] for s in drawn) == list(range(len(events)))
    of = {s["args"]["number"]: s for s in drawn}
    processes = traces.process_names(trace)
    for event in events:
        s = of[event.number]
        assert processes[s["pid"]] == f"rank {event.rank}"
        assert s["ts"] == pytest.approx(event.start * 1e6, abs=1e-3)
        assert s["dur"] == pytest.approx(event.seconds * 1e6, abs=2e-3)  # both ends are rounded
    lanes = {(s["pid"], s["cat"]): set() for s in drawn}
    for s in drawn:
        lanes[s["pid"], s["cat"]].add(s["tid"])
    for (pid, track), tids in lanes.items():  # no more lanes than concurrent transfers
        own = [s for s in drawn if (s["pid"], s["cat"]) == (pid, track)]
        most = max(sum(a["ts"] <= b["ts"] < a["ts"] + a["dur"] for a in own) for b in own)
        assert len(tids) <= most
    for name, sizes in (
        ("transfers queued", lambda e: 1),
        ("bytes in flight", lambda e: e.num_bytes),
    ):
        values = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == name]
        for direction in ("read", "write"):
            own = [e for e in events if e.name == direction]
            most = max(
                (sum(sizes(a) for a in own if a.queued <= b.queued < a.end) for b in own), default=0
            )
            assert max((v[direction] for v in values), default=0) == most
            assert not values or values[-1][direction] == 0


class MemoryIo:
    """A disk in memory, which may be slow or broken."""

    def __init__(self) -> None:
        self.records: dict[int, np.ndarray] = {}
        self.broken = False
        self.delay = 0.0  # seconds

    def read(self, store, layer, buffer):
        return self._do(lambda: np.copyto(buffer, self.records[layer]))

    def write(self, store, layer, buffer):
        return self._do(lambda: self.records.update({layer: buffer.copy()}))

    def _do(self, work):
        done: Future = Future()
        if self.broken:
            done.set_exception(OSError(5, "broken"))
        else:
            work()
            end = functools.partial(done.set_result, self.delay)
            if self.delay:
                threading.Timer(self.delay, end).start()
            else:
                end()
        return done

    def close(self):
        pass


@pytest.fixture
def engine(tmp_path, request):
    with SwapFolder(str(tmp_path)) as folder:
        engine = Engine(MemoryIo(), getattr(request, "param", 1), pin="none")
        for rank in (0, 3):
            engine.add("p", rank, Store(folder.path, "p", rank, LAYERS, FORMAT))
        for rank in (0, 3):
            for layer in range(LAYERS):
                engine.store("p", rank, layer, lambda views: views[0].fill(1))
        engine.take_stats()
        yield engine
        engine.close()


def step(engine, recorder, moves=MOVES, name="step"):
    recorder.begin(name, moves, engine)
    engine.begin(moves)
    for move in moves:
        for rank in (0, 3):
            if move.writes:
                engine.store(move.kind, rank, move.layer, lambda views: None)
            else:
                engine.fetch(move.kind, rank, move.layer, lambda views: None)
    engine.check()
    stats = engine.take_stats()
    recorder.finish(stats)
    return stats


@pytest.mark.parametrize("engine", [0, 1], indirect=True)
def test_a_trace_of_an_engine_is_what_its_statistics_say(engine, tmp_path, caplog):
    recorder, path = Recorder(engine.distance), tmp_path / "trace.json"
    step(engine, recorder)
    with caplog.at_level(logging.INFO), recorder.trace(path, lambda: engine, {"io": "memory"}):
        found = [step(engine, recorder), step(engine, recorder, MOVES[::2], "eval")]
        engine.io.delay = 0.02  # the last writes end after the step
        found.append(step(engine, recorder))
    assert found[0].bytes_written == LAYERS * 2 * FORMAT.padded_bytes
    assert "ui.perfetto.dev" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    trace = json.loads(path.read_text())
    names = ["step 1", "eval 1", "step 2"]
    traces.check(trace)
    assert trace["otherData"] == {
        "io": "memory", "prefetch_distance": engine.distance, "runs": 3, "runs_dropped": 0, "events_dropped": 0,
    }  # fmt: skip
    traces.check_runs(trace, dict(zip(names, (MOVES, MOVES[::2], MOVES), strict=True)), [0, 3])
    for name, stats in zip(names, found, strict=True):
        traces.check_sums(
            trace,
            name,
            stats.bytes_read,
            stats.bytes_written,
            sum(stats.stall_seconds.values()),
            stats.misses,
        )


@pytest.mark.parametrize("engine", [0, 1], indirect=True)
def test_events_of_an_engine_lie_where_they_were(engine):
    engine.io.delay = 0.02
    began = time.perf_counter()
    events = step(engine, Recorder(engine.distance)).events
    waits = {e.number: e for e in events if e.name.endswith("_wait")}  # the last one for each
    transfers = [e for e in events if e.name in ("read", "write")]
    assert sum(e.name == "read" for e in transfers) >= 2 * LAYERS
    for e in transfers:
        assert began <= e.queued <= e.start
        assert e.seconds == 0.02
        wait = waits.get(e.number)
        if wait is not None and e.name == "read":
            assert e.end <= wait.end
            assert e.ahead <= engine.distance
        elif wait is not None:
            assert wait.end <= e.queued
    assert engine.distance == 0 or any(e.ahead for e in transfers)

    def has_long_wait(events):
        return any(e.seconds > 0.01 for e in events if e.name.endswith("_wait"))

    # On a busy machine a step may come so late to its waits that the disk has ended before.
    more = (step(engine, Recorder(engine.distance)).events for _ in range(20))
    assert any(map(has_long_wait, itertools.chain([events], more)))


def test_a_trace_ends_with_the_error_that_ends_its_steps(engine, tmp_path):
    recorder, path = Recorder(1), tmp_path / "trace.json.gz"

    def fail():
        with recorder.trace(path, lambda: engine, {}):
            step(engine, recorder)
            engine.io.broken = True
            step(engine, recorder)

    with pytest.raises(SwapError):
        fail()
    trace = json.loads(gzip.decompress(path.read_bytes()))
    traces.check(trace)
    first, last = traces.slices(trace, "steps")
    assert "ended" not in first["args"]
    assert last["args"]["ended"] is False
    assert last["args"]["stall_ms"]["all"] > 0
    engine.io.broken = False
    engine.reset()
    after = step(engine, recorder)
    engine.reset()
    engine.take_stats()
    assert (
        step(engine, recorder).num_events == after.num_events
    )  # the bytes of the failed transfer are not included
    with recorder.trace(tmp_path / "none.json", lambda: None, {}):
        pass
    assert traces.slices(json.loads((tmp_path / "none.json").read_text()), "steps") == []


def test_a_long_trace_keeps_its_last_runs_and_says_so(engine, tmp_path, monkeypatch, caplog):
    events_of_a_step = step(engine, Recorder(1)).num_events
    monkeypatch.setattr(recorder, "MOST_EVENTS", 2 * events_of_a_step + 3)
    kept, path = Recorder(1), tmp_path / "trace.json"
    with kept.trace(path, lambda: engine, {}):
        for _ in range(5):
            step(engine, kept)
    trace = json.loads(path.read_text())
    assert trace["otherData"]["runs_dropped"] == 3
    assert "lacks the first 3 runs" in caplog.text
    traces.check_runs(trace, {"step 1": MOVES, "step 2": MOVES}, [0, 3])
    caplog.clear()
    with kept.trace(path, lambda: engine, {}):
        kept.begin("step", MOVES, engine)
        events = step(engine, Recorder(1)).events
        kept.finish(Stats(events=events, num_events=len(events) + 7))
    assert json.loads(path.read_text())["otherData"]["events_dropped"] == 7
    assert "lacks the first 0 runs and 7 events" in caplog.text


def test_one_trace_at_a_time(engine, tmp_path):
    recorder = Recorder(1)
    with recorder.trace(tmp_path / "a.json", lambda: engine, {}):
        with (
            pytest.raises(ValueError, match="traced already"),
            recorder.trace(tmp_path / "b.json", lambda: engine, {}),
        ):
            pass
        step(engine, recorder)
    assert len(traces.slices(json.loads((tmp_path / "a.json").read_text()), "steps")) == 1
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_disk_that_fills_while_a_trace_is_written_leaves_no_part_of_it(small_disk, name):
    path = small_disk / name
    path.write_text("older")
    with pytest.raises(OSError, match="No space left"):
        write_trace({"traceEvents": [os.urandom(1 << 10).hex() for _ in range(1 << 11)]}, path)
    assert os.listdir(small_disk) == [name]
    assert path.read_text() == "older"


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "trace.json"):
        with pytest.raises(ValueError, match=str(path)):
            check_path(path)
    check_path(tmp_path / "trace.json")
    assert os.listdir(tmp_path) == []
    write_trace(build_trace([], 1), tmp_path / "trace.json")
    traces.check(json.loads((tmp_path / "trace.json").read_text()))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_written_through_no_name_that_can_be_guessed(tmp_path, name):
    victim = tmp_path / "of the user"
    victim.write_text("kept")
    (tmp_path / f"{name}.part").symlink_to(victim)
    check_path(tmp_path / name)
    write_trace({"traceEvents": []}, tmp_path / name)
    assert victim.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"of the user", name, f"{name}.part"}
