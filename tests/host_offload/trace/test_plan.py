"""A planned transfer starts when the plan lets it, one after the other.

A late record has its actual cause.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.engine.stats import Event
from host_offload.schedule.build import build_schedule
from host_offload.schedule.moves import Move, Window, list_moves
from host_offload.schedule.ops import KINDS
from host_offload.schedule.stacks import StepPlan
from host_offload.trace.plan import (
    ASKED_TOO_LATE,
    DISK_BUSY,
    EARLIER_WRITES,
    STILL_WRITTEN,
    Causes,
    Intervals,
    Run,
    Use,
    list_uses,
    map_transfers,
    plan,
)

SIZE = 4096


def made(
    number, move, wanted, until=None, *, queued=None, start=None, end=None, rank=0, ahead=True
):
    """Return the wait for a record and its transfer."""
    until = wanted if until is None else until
    name = "write" if move.writes else "read"
    place = {"kind": move.kind, "rank": rank, "layer": move.layer, "number": number}
    wait = Event(name=f"{name}_wait", start=wanted, seconds=until - wanted, queued=wanted, **place)
    start, end = until if start is None else start, until if end is None else end
    queued = start if queued is None else queued
    return [
        wait,
        Event(
            name=name,
            start=start,
            seconds=end - start,
            queued=queued,
            num_bytes=SIZE,
            ahead=ahead,
            **place,
        ),
    ]


@st.composite
def runs_of_a_program(draw):
    """Two or three runs of a step, possibly with a run of other moves in between.

    Waits and transfers take arbitrary times.
    """
    kinds = draw(st.sets(st.sampled_from(KINDS), min_size=1))
    schedule = build_schedule(
        draw(st.integers(1, 12)),
        draw(st.integers(0, 2)),
        tiers={kind: "nvme" if kind in kinds else "device" for kind in KINDS},
        update=draw(st.sampled_from(["after_backward", "in_backward"])),
    )
    moves = list_moves(StepPlan({"": schedule}), kinds)
    other = tuple(move for move in moves if move.kind == "params" and not move.writes)
    names = draw(
        st.sampled_from([("step", "step"), ("step", "step", "step"), ("step", "eval", "step")])
    )
    duration = st.floats(1e-3, 1.0)
    runs, now, number = [], 100.0, 0
    for name in names:
        start, events, planned = now, [], moves if name == "step" else other
        for move in planned:
            number += 1
            now += draw(duration)
            waits = draw(st.sampled_from([0.0, 0.5]))
            seconds = draw(duration)
            end = now + waits if not move.writes else now + waits + 2 * seconds
            events += made(
                number,
                move,
                now,
                now + waits,
                queued=end - 2 * seconds,
                start=end - seconds,
                end=end,
            )
            now += waits
        runs.append(
            Run(
                name=name,
                moves=planned,
                start=start,
                end=now,
                events=events,
                num_events=len(events),
            )
        )
        now += draw(duration)
    return runs


def planned_of(runs, distance):
    transfers = map_transfers(event for run in runs for event in run.events)
    return plan(runs, list_uses(runs), transfers, distance)


@settings(max_examples=60, deadline=None)
@given(runs_of_a_program(), st.integers(0, 3))
def test_planned_reads_start_when_the_window_lets_them(runs, distance):
    planned = planned_of(runs, distance)
    assert [(p.run, p.turn, p.move) for p in planned] == [
        (r, t, m) for r, run in enumerate(runs) for t, m in enumerate(run.moves)
    ]
    assert [p.wanted for p in planned] == sorted(p.wanted for p in planned)
    for writes in (False, True):
        row = sorted(
            (p for p in planned if p.move.writes == writes), key=lambda p: (p.start, p.run, p.turn)
        )
        for a, b in itertools.pairwise(row):
            assert a.start + a.seconds <= b.start + 1e-9  # one after the other
    for p in planned:
        if p.move.writes:
            assert p.start >= p.wanted
            continue
        before = [
            w
            for w in planned
            if w.move == Move(p.move.kind, p.move.layer, True) and (w.run, w.turn) < (p.run, p.turn)
        ]
        assert all(w.start + w.seconds <= p.start + 1e-9 for w in before)
        if not distance:
            assert p.start >= p.wanted
        elif (
            p.start < p.wanted
        ):  # it is read ahead, in its run or in the previous one: the engine's window would do so
            now = p.start
            within = p.run if now >= runs[p.run].start else p.run - 1
            assert runs[within].moves == runs[p.run].moves
            assert now >= runs[within].start
            window = Window(runs[within].moves, distance)
            for q in planned:
                if q.run == within and q.wanted <= now:
                    window.advance(q.move)
            waiting = {
                (q.move.kind, q.move.layer)
                for q in planned
                if not q.move.writes
                and q is not p
                and (q.start, q.run, q.turn) < (now, p.run, p.turn)
                and q.wanted > now
            }
            assert p.move in list(window.ahead(waiting))


def test_planned_moves_of_a_small_step_by_hand():
    """Two layers are read and written back, each move a second after the previous one.

    A read takes half a second, a write a full second.
    """
    moves = tuple(Move("p", layer, writes) for layer in (0, 1) for writes in (False, True))
    runs, number = [], 0
    for start in (10.0, 20.0):
        now, events = start, []
        for move in moves:
            number += 1
            now += 1
            stall = 2.0 if move == Move("p", 1) else 0.0  # layer 1 is late in every run
            seconds = 1.0 if move.writes else 0.5
            end = now + stall + (seconds if move.writes else 0)
            events += made(number, move, now, now + stall, start=end - seconds, end=end)
            now += stall
        runs.append(
            Run(
                name="step",
                moves=moves,
                start=start,
                end=now,
                events=events,
                num_events=len(events),
            )
        )
    planned = planned_of(runs, 1)
    assert [p.wanted for p in planned] == [
        11,
        12,
        13,
        14,
        21,
        22,
        23,
        24,
    ]  # as if layer 1 had been in memory
    assert [p.seconds for p in planned] == [0.5, 1, 0.5, 1] * 2
    # Layer 0 of the second step may start when layer 1 was requested (13), since its write has
    # ended by then. Layer 1 of a step may start when layer 0 was requested, and in the second step
    # not before its write in the first, which ended long before.
    assert [p.start for p in planned] == [10, 12, 11, 14, 13, 22, 21, 24]


def test_planned_bytes_are_those_of_all_devices_and_unmade_moves_are_planned_too():
    moves = (Move("p", 0), Move("p", 1), Move("p", 1, True))
    events = made(1, moves[0], 1.0, start=0.0, end=1.0) + made(
        2, moves[0], 1.0, start=0.0, end=2.0, rank=1
    )
    events += made(3, moves[1], 3.0, start=2.0, end=3.0) + made(
        4, moves[1], 3.0, start=2.0, end=4.0, rank=1
    )
    planned = planned_of(
        [Run(name="step", moves=moves, start=0.0, end=5.0, events=events, num_events=8)], 1
    )
    assert [p.num_bytes for p in planned] == [2 * SIZE] * 3
    assert [p.seconds for p in planned[:2]] == [
        2.0,
        2.0,
    ]  # 16 KiB in the 4 seconds in which a read was in flight
    assert planned[2].seconds == 0  # nothing was written, so its rate is unknown


def test_uses_are_counted_from_the_last_where_the_first_were_not_kept():
    moves = (Move("p", 0), Move("p", 1), Move("p", 0))
    events = [event for n, move in enumerate(moves) for event in made(n, move, float(n))]
    run = Run(name="step", moves=moves, start=0.0, end=3.0, events=events, num_events=6)
    assert [use.turn for use in list_uses([run])] == [0, 1, 2]
    late = Run(name="step", moves=moves, start=0.0, end=3.0, events=events[2:], num_events=6)
    assert [use.turn for use in list_uses([late])] == [1, 2]
    more = [*events, *made(7, Move("p", 0), 9.0), *made(8, Move("q", 5), 9.5)]
    assert [use.turn for use in list_uses([Run(name="step", moves=moves, start=0.0, events=more, num_events=10)])] == [
        0, 1, 2, None, None,
    ]  # fmt: skip


READ, WRITE = Move("p", 3), Move("p", 3, True)
OTHER = Move("p", 4, True)
LATE = {
    # wanted at 10 and available at 12; the disk idled from 0 to 9
    ASKED_TOO_LATE: made(1, READ, 10.0, 12.0, queued=9.0, start=9.0),
    # the same, but the disk wrote another record from 1 to 9.5
    DISK_BUSY: made(1, READ, 10.0, 12.0, queued=9.0, start=9.5)
    + made(2, OTHER, 1.0, start=1.0, end=9.5),
    # its own write ended at 10.5
    STILL_WRITTEN: made(1, READ, 10.0, 12.0, queued=10.5, start=10.5)
    + made(2, WRITE, 1.0, start=9.0, end=10.5),
    # a write that waited for the end of the previous one
    EARLIER_WRITES: made(1, WRITE, 10.0, 12.0, start=12.0, end=13.0)
    + made(2, OTHER, 1.0, start=9.0, end=11.9),
    # a wait, but not for the disk: the previous write ended long before
    "": made(1, WRITE, 10.0, 10.1, start=12.0, end=13.0) + made(2, OTHER, 1.0, start=5.0, end=6.0),
}


@pytest.mark.parametrize("cause", LATE)
def test_late_records_have_their_cause(cause):
    run = Run(name="step", moves=(), start=0.0, events=LATE[cause], num_events=4)
    causes = Causes(map_transfers(run.events), 0.0)
    (use,) = [use for use in list_uses([run]) if use.number == 1]
    late = causes.of(use)
    assert late.cause == cause
    assert late.seconds == pytest.approx(2.0 if cause else 0.0)
    assert late.idle_seconds == pytest.approx({ASKED_TOO_LATE: 9.0, DISK_BUSY: 1.0}.get(cause, 0.0))


def test_late_records_of_another_device_or_kind_are_no_cause():
    """Two other writes end within the wait, and neither is the cause.

    One is of the same record on another device, and one of another kind on this device.
    """
    others = made(2, WRITE, 1.0, start=9.0, end=10.5, rank=1) + made(
        3, Move("q", 3, True), 1.0, start=9.0, end=10.5
    )
    for events in (
        made(1, WRITE, 10.0, 12.0, end=13.0) + others,
        made(1, READ, 10.0, 12.0, queued=9.0, start=9.5) + others,
    ):
        run = Run(name="step", moves=(), start=0.0, events=events, num_events=6)
        use: Use = list_uses([run])[-1]
        assert use.number == 1
        assert Causes(map_transfers(events), 0.0).of(use).cause == (
            "" if use.move.writes else ASKED_TOO_LATE
        )


def test_intervals_are_united():
    found = Intervals([(5, 6), (1, 3), (2, 4), (4, 4.5)])
    assert found.seconds == 4.5
    assert [
        found.covered(*span) for span in [(0, 10), (2, 5.5), (4.5, 5), (3, 3.5), (7, 9), (3, 1)]
    ] == [4.5, 3, 0, 0.5, 0, 0]
    assert Intervals([]).covered(0, 1) == 0
