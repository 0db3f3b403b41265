"""Reads start early, but never before a write that they must see.

As many are in flight as there are buffers.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.schedule.build import build_schedule
from host_offload.schedule.moves import Move, Window, list_moves, ready_after
from host_offload.schedule.ops import KINDS
from host_offload.schedule.stacks import StepPlan


@st.composite
def sequences(draw):
    """Return the moves of a step under any schedule and any choice of kinds on disk."""
    kinds = draw(st.sets(st.sampled_from(KINDS), min_size=1))
    num_layers = draw(st.integers(1, 9))
    opt_on_disk = "opt_state" in kinds
    schedule = build_schedule(
        num_layers,
        draw(st.integers(0, 3)),
        tiers={kind: "nvme" if kind in kinds else "device" for kind in KINDS},
        update=draw(st.sampled_from(["after_backward", "in_backward"])),
        gather_ahead=draw(st.booleans()),
        master=draw(st.booleans()),
        device_layers=draw(st.integers(0, num_layers)) if opt_on_disk else 0,
    )
    return list_moves(StepPlan({"": schedule}), kinds)


def last_write_before(moves, turn):
    """Return the turn of the last write of a record before `turn`, over all rounds, or None."""
    move = moves[turn % len(moves)]
    turns = [t for t in range(turn) if moves[t % len(moves)] == Move(move.kind, move.layer, True)]
    return turns[-1] if turns else None


@settings(max_examples=60, deadline=None)
@given(sequences(), st.integers(0, 4))
def test_reads_ahead_see_the_last_write_and_fit_the_buffers(moves, distance):
    if not moves:
        return
    n = len(moves)
    waiting: dict[tuple[str, int], int] = {}  # record -> turn at which it was started
    hits = misses = 0
    for round_ in range(2):
        window = Window(moves, distance)
        for i, move in enumerate(moves):
            turn = round_ * n + i
            for read in window.ahead(waiting):
                record = (read.kind, read.layer)
                assert record not in waiting
                waiting[record] = turn
            for kind in {kind for kind, _ in waiting}:
                assert sum(k == kind for k, _ in waiting) <= distance
            if not move.writes:
                started = waiting.pop((move.kind, move.layer), None)
                before = last_write_before(moves, turn)
                assert started is None or before is None or started > before
                hits, misses = hits + (started is not None), misses + (started is None)
            assert window.advance(move)
        assert window.position == n
    if not distance:
        assert hits == 0
    elif not any(move.writes for move in moves):
        assert misses == 0  # a record whose write was just handed over may be wanted immediately


def test_reads_wait_for_their_own_write_alone():
    moves = [Move("a", 0), Move("b", 0), Move("a", 0, True), Move("a", 1), Move("a", 0)]
    assert ready_after(moves).tolist() == [-1, -1, -1, -1, 2, 2, -1, 2, -1, 7]
    window = Window(moves, 2)
    assert list(window.ahead(())) == [Move("a", 0), Move("b", 0), Move("a", 1)]
    window.advance(moves[0])
    assert list(window.ahead({("b", 0), ("a", 1)})) == []  # a0 is written first
    window.advance(moves[1])
    window.advance(moves[2])
    assert list(window.ahead({("a", 1)})) == [
        Move("a", 0),
        Move("b", 0),
    ]  # and b0 of the next round


def test_calls_in_another_order_or_unknown_are_taken_as_they_come():
    moves = [Move("a", 0), Move("b", 0), Move("a", 1), Move("b", 1)]
    window = Window(moves, 1)
    assert window.advance(Move("b", 0))
    assert window.position == 0
    assert not window.advance(Move("c", 7))
    assert window.advance(Move("a", 0))
    assert window.position == 2
    assert list(window.ahead(())) == [Move("a", 1), Move("b", 1)]
    assert list(Window((), 3).ahead(())) == []


def test_the_next_round_is_read_while_this_one_ends():
    moves = [Move("p", 0), Move("p", 1), Move("p", 1, True), Move("p", 0, True)]
    window = Window(moves, 1)
    for move in moves[:3]:
        window.advance(move)
    assert (
        list(window.ahead(())) == []
    )  # p0 is not handed over yet; p1 is, but would take its buffer
    window.advance(moves[3])
    assert list(window.ahead(())) == [Move("p", 0)]


def test_a_record_that_is_read_twice_in_a_row_is_not_overtaken():
    """Forward ends with the layer with which backward begins."""
    window = Window([Move("p", 0), Move("p", 1), Move("p", 1), Move("p", 0)], 1)
    assert list(window.ahead(())) == [Move("p", 0)]
    window.advance(Move("p", 0))
    assert list(window.ahead(())) == [Move("p", 1)]
    assert list(window.ahead({("p", 1)})) == []
    window.advance(Move("p", 1))
    assert list(window.ahead(())) == [Move("p", 1)]


@pytest.mark.parametrize("distance", [1, 2])
def test_what_is_written_last_and_read_first_is_read_ahead(distance):
    """Activations, and gradients before the update.

    A loop reads in the opposite order of the loop that wrote.
    """
    moves = [
        *(Move("a", layer, True) for layer in range(5)),
        *(Move("a", layer) for layer in reversed(range(5))),
    ]
    window, waiting, misses = Window(moves, distance), set(), 0
    for move in moves:
        record = (move.kind, move.layer)
        misses += not move.writes and record not in waiting
        waiting.discard(record)
        window.advance(move)
        waiting |= {(read.kind, read.layer) for read in window.ahead(waiting)}
    assert misses == 0
