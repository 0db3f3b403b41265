"""The schedule of a pipeline: its order, its slots, its phases, and what it prints."""

import dataclasses
import itertools
import logging
import pickle
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.pipeline import build_pipeline_schedule

SVG = "{http://www.w3.org/2000/svg}"
MOST_STAGES, MOST_CHUNKS, MOST_TURNS = 8, 4, 4


def microbatches_of(p, v):
    """Return every allowed number of microbatches up to 4 p."""
    step = p if v > 1 else 1
    return range(step, MOST_TURNS * p + 1, step)


def all_ticks(schedule):
    """Return the ticks of all phases, one after the other, as one tree of arrays."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *[p.ticks for p in schedule.phases])


def unit_ticks(units, v, M):
    """Return the tick of each unit, int[v, M, p], and check that each occurs exactly once."""
    present = units.slot >= 0
    for field in units:
        assert np.array_equal(field >= 0, present)
    tick, stage = np.nonzero(present)
    at = np.full((v, M, present.shape[1]), -1)
    at[units.chunk[present], units.microbatch[present], stage] = tick
    assert len(tick) == at.size
    assert (at >= 0).all()
    return at


def check(p, v, M):
    schedule = build_pipeline_schedule(p, M, v)
    ticks = all_ticks(schedule)
    forward, backward = unit_ticks(ticks.forward, v, M), unit_ticks(ticks.backward, v, M)

    # In the order in which a microbatch passes them: chunk by chunk, in each stage by stage.
    forward_path = forward.transpose(0, 2, 1).reshape(v * p, M)
    backward_path = backward.transpose(0, 2, 1).reshape(v * p, M)
    assert (np.diff(forward_path, axis=0) == 1).all()
    assert (np.diff(backward_path, axis=0) == -1).all()
    assert (backward_path[-1] == forward_path[-1]).all()  # forward comes first within the tick

    # A slot holds one unit from its forward tick to its backward tick, both included.
    for stage in range(p):
        by_slot = {}
        for c, m in itertools.product(range(v), range(M)):
            start, stop = forward[c, m, stage], backward[c, m, stage]
            slot = ticks.forward.slot[start, stage]
            assert ticks.backward.slot[stop, stage] == slot < schedule.num_slots
            by_slot.setdefault(slot, []).append((start, stop))
        for spans in by_slot.values():
            spans.sort()
            assert all(last[1] < span[0] for last, span in itertools.pairwise(spans))

    most = v * p + p - 1
    assert schedule.num_slots == max(
        int(((forward <= t) & (backward >= t)).sum((0, 1)).max()) for t in range(len(ticks.enters))
    )
    assert schedule.num_slots == min(most, v * M)

    # The phases have forward, both, and backward.
    fill, steady, drain = schedule.phases
    assert fill.num_ticks + steady.num_ticks == steady.num_ticks + drain.num_ticks == v * M + p - 1
    assert schedule.time == v * M + p - 1
    assert (fill.num_ticks, drain.num_ticks) == (v * p - 1, v * p - 1)
    assert (ticks.forward.slot >= 0).any(1).tolist() == [
        t < steady.stop for t in range(schedule.num_ticks)
    ]
    assert (ticks.backward.slot >= 0).any(1).tolist() == [
        t >= steady.start for t in range(schedule.num_ticks)
    ]

    # Each microbatch enters, meets the head and leaves in the tick of its unit.
    for field, at in (
        (ticks.enters, forward_path[0]),
        (ticks.meets_head, forward_path[-1]),
        (ticks.leaves, backward_path[0]),
    ):
        expected = np.full(schedule.num_ticks, -1)
        expected[at] = np.arange(M)
        assert np.array_equal(field, expected)


@pytest.mark.parametrize("v", range(1, MOST_CHUNKS + 1))
@pytest.mark.parametrize("p", range(1, MOST_STAGES + 1))
def test_pipeline_schedule_runs_each_unit_once_and_a_tick_after_what_it_needs(p, v):
    for M in microbatches_of(p, v):
        check(p, v, M)


def test_pipeline_schedule_follows_the_closed_form():
    """Unit k is in tick s + k forward and v p - 1 + (p - 1 - s) + k backward, chunks reversed."""
    p, M, v = 4, 12, 2
    ticks = all_ticks(build_pipeline_schedule(p, M, v))
    for s, k in itertools.product(range(p), range(v * M)):
        c, m = k % (p * v) // p, k // (p * v) * p + k % p
        assert (ticks.forward.chunk[s + k, s], ticks.forward.microbatch[s + k, s]) == (c, m)
        t = v * p - 1 + (p - 1 - s) + k
        assert (ticks.backward.chunk[t, s], ticks.backward.microbatch[t, s]) == (v - 1 - c, m)


def test_pipeline_schedule_has_phases_in_order_that_jax_scans():
    """A loop over each phase, in order, sees the ticks of the step in order."""
    schedule = build_pipeline_schedule(4, 8)
    assert [phase.name for phase in schedule.phases] == ["fill", "steady", "drain"]
    assert [(phase.start, phase.stop) for phase in schedule.phases] == [(0, 3), (3, 11), (11, 14)]
    assert schedule.phase("steady") is schedule.phases[1]
    with pytest.raises(ValueError, match="'warmup': a pipeline's schedule has the phases fill, st"):
        schedule.phase("warmup")

    left = []
    for phase in schedule.phases:
        assert {leaf.dtype for leaf in jax.tree.leaves(phase.ticks)} == {np.dtype(np.int32)}
        assert not any(leaf.flags.writeable for leaf in jax.tree.leaves(phase.ticks))
        assert {leaf.shape for leaf in phase.ticks.forward} == {(phase.num_ticks, 4)}

        def body(count, tick):
            assert tick.forward.slot.shape == (4,)
            return count + jnp.sum(tick.backward.slot >= 0), tick.leaves

        count, leaves = jax.lax.scan(body, jnp.int32(0), phase.ticks)
        assert count == (phase.ticks.backward.slot >= 0).sum()
        left += leaves.tolist()
    assert [m for m in left if m >= 0] == list(range(8))


def test_pipeline_schedule_of_one_stage_has_no_bubble():
    schedule = build_pipeline_schedule(1, 3)
    assert [phase.num_ticks for phase in schedule.phases] == [0, 3, 0]
    assert (schedule.num_slots, schedule.bubble, schedule.time) == (1, 0.0, 3)
    assert schedule.phase("fill").ticks.forward.slot.shape == (0, 1)


def test_pipeline_schedule_counts_time_and_bubble():
    schedule = build_pipeline_schedule(4, 8, 2)
    assert schedule.bubble == 3 / 16
    assert schedule.time == 19 == schedule.num_chunks * schedule.num_microbatches * (1 + 3 / 16)
    assert schedule.num_ticks == 26


def test_pipeline_schedule_takes_integers_of_numpy():
    schedule = build_pipeline_schedule(np.int64(2), np.int32(4), np.uint8(2))
    fields = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    assert fields == (2, 4, 2)
    assert {type(field) for field in fields} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 6, 2), "num_microbatches=6 does not divide by pipe=4 (6 = 1 x 4 + 2): with pipe_chunks=2, stages take microbatches in groups of 4. Use num_microbatches=4 or 8, or pipe_chunks=1"),
        ((4, 3, 2), "(3 = 0 x 4 + 3): with pipe_chunks=2, stages take microbatches in groups of 4. Use num_microbatches=4, or pipe_chunks=1"),
        ((0, 4), "num_stages=0: an integer of at least 1 is needed"),
        ((4, 0), "num_microbatches=0: an integer of at least 1 is needed"),
        ((4, 4, 0), "num_chunks=0: an integer of at least 1 is needed"),
        ((4, 4, 1.5), "num_chunks=1.5: an integer"),
        ((True, 4), "num_stages=True: an integer"),
    ],
)  # fmt: skip
def test_pipeline_schedule_refuses_what_it_cannot_run(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_pipeline_schedule(*arguments)


def test_pipeline_schedule_warns_of_fewer_microbatches_than_stages(caplog):
    with caplog.at_level(logging.WARNING, "zerojax"):
        build_pipeline_schedule(4, 4)
        assert not caplog.records
        build_pipeline_schedule(4, 2)
    (record,) = caplog.records
    # 3 of 5 ticks without work, 3 of 7 with 4 microbatches, and 3 of 19 with 16.
    assert record.getMessage() == (
        "num_microbatches=2 for pipe=4: each stage has work in 2 of 5 ticks and is idle for 60 % of "
        "a step. It is idle for 43 % with num_microbatches=4, and for 16 % with 16"
    )


# --- text and pictures ----------------------------------------------------------------------------


def test_pipeline_schedule_prints_a_row_for_each_stage():
    assert str(build_pipeline_schedule(3, 4)).splitlines() == [
        "3 stages, 4 microbatches: 8 ticks, 4 slots on each stage, bubble 2/4 = 50.0 %",
        "",
        "pipeline: fill ticks 0 to 1, steady ticks 2 to 5, drain ticks 6 to 7",
        "tick        0     1     2     3     4     5     6     7",
        "stage 0    F0    F1    F2    F3    B0    B1    B2    B3",
        "stage 1     .    F0    F1 F2/B0 F3/B1    B2    B3     .",
        "stage 2     .     . F0/B0 F1/B1 F2/B2 F3/B3     .     .",
        "",
        "F2: forward of microbatch 2; B2: backward of microbatch 2",
    ]


def test_pipeline_schedule_of_four_stages_and_eight_microbatches_fits_a_line():
    text = build_pipeline_schedule(4, 8).timeline()
    assert ".." not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("p", "M", "v"), [(4, 8, 2), (16, 64, 2)])
def test_pipeline_schedule_of_many_ticks_prints_each_phase(p, M, v):
    schedule = build_pipeline_schedule(p, M, v)
    title, *blocks = schedule.timeline(100).split("\n\n")
    assert title.startswith(f"{p} stages of {v} chunks, {M} microbatches")
    assert [block.split(":")[0] for block in blocks] == ["fill", "steady", "drain"]
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 100
    whole = schedule.timeline(10_000)
    assert ".." not in whole
    assert f"F{M - 1}.{v - 1}/B{M - 1}.{v - 1}" in whole


@pytest.mark.parametrize("v", [1, 2])
def test_pipeline_schedule_is_drawn_with_a_lane_for_each_stage(v):
    schedule = build_pipeline_schedule(4, 8, v)
    ticks = all_ticks(schedule)
    root = ET.fromstring(schedule.timeline_svg())
    legend = [e.text for e in root.findall(f"{SVG}g[@id='legend']/{SVG}text")]
    assert legend == ["forward", "backward"]
    for stage in range(4):
        (lane,) = [e for e in root.iter(f"{SVG}g") if e.get("id") == f"pipeline-stage-{stage}"]
        boxes = lane.findall(f"{SVG}g[@class='box']")
        has_forward = ticks.forward.slot[:, stage] >= 0
        has_backward = ticks.backward.slot[:, stage] >= 0
        assert len(boxes) == (has_forward | has_backward).sum()
        kinds = has_forward * 1 + has_backward
        frame = 1
        assert [len(box.findall(f"{SVG}rect")) - frame for box in boxes] == list(kinds[kinds > 0])
        for box in boxes:
            (width,) = {int(rect.get("width")) for rect in box.findall(f"{SVG}rect")}
            (label,) = box.findall(f"{SVG}text")
            assert width >= 8 * len(label.text)

    first = next(e for e in root.iter(f"{SVG}title") if e.text.startswith("stage 3, tick"))
    slot = ticks.forward.slot[3, 3]
    expected = f"stage 3, tick 3: forward of microbatch 0, chunk 0, slot {slot}"
    assert first.text.startswith(expected)
    assert schedule.timeline_svg() in schedule.timeline_html()


def test_pipeline_schedule_survives_pickling():
    schedule = build_pipeline_schedule(4, 8, 2)
    restored = pickle.loads(pickle.dumps(schedule))
    assert str(restored) == str(schedule)
    assert dataclasses.replace(schedule, phases=restored.phases).num_ticks == schedule.num_ticks
