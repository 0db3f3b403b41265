"""Schedules of layers with tiles.

Every tile is fetched in time, as often as it is used, and bytes are bounded.
"""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.schedule.build import build_schedule
from host_offload.schedule.moves import Move, list_moves
from host_offload.schedule.stacks import StepPlan
from host_offload.schedule.tiles import build_tiled_schedule, tiles_kind

TIERS = {"params": "nvme", "grads": "nvme", "opt_state": "nvme", "activations": "pinned_host"}
BYTES = {"params": 10, "gathered": 40, "grads": 40, "opt_state": 60}
TILE_BYTES = {"params": 3, "gathered": 12, "grads": 12, "opt_state": 18}


def build(layers, distance, groups, update="after_backward", **options):
    return build_tiled_schedule(
        layers, distance, groups=groups, group_bytes=[TILE_BYTES] * len(groups), tiers=TIERS, update=update,
        record_bytes=BYTES | {"activations": 5}, **options,
    )  # fmt: skip


groups_of = st.dictionaries(st.sampled_from(["mlp", "qkv", "out"]), st.integers(2, 5), min_size=1)


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    groups_of,
    st.sampled_from(["after_backward", "in_backward"]),
)
def test_every_tile_moves_once_a_loop_in_order(layers, distance, groups, update):
    schedule = build(layers, distance, groups, update)
    kinds = [kind for kind in TIERS if kind != "activations"]
    every = [*kinds, *(tiles_kind(kind, name) for kind in kinds for name in groups)]
    moves = list_moves(StepPlan({"": schedule}), every)
    counted = collections.Counter(moves)
    stored = update == "after_backward"
    for name, count in groups.items():
        for record in range(layers * count):
            params, grads, state = (tiles_kind(kind, name) for kind in kinds)
            assert counted[Move(params, record)] == 2  # forward, backward
            assert counted[Move(params, record, True)] == counted[Move(state, record, True)] == 1
            assert counted[Move(state, record)] == 1
            assert (
                counted[Move(grads, record)]
                == counted[Move(grads, record, True)]
                == (1 if stored else 0)
            )
        first = [
            move.layer
            for move in moves
            if move.kind == tiles_kind("params", name) and not move.writes
        ]
        assert first[: layers * count] == list(range(layers * count))
        assert sorted(first[layers * count :]) == list(range(layers * count))
        # a tile of layer l is read while the previous layers in backward run: last layer first
        assert [record // count for record in first[layers * count :: count]] == list(
            range(layers)
        )[::-1]
    for at, move in enumerate(
        moves
    ):  # nothing is written before its last read, except records that are read later
        if move.writes and not move.kind.startswith(("grads", "activations")):
            assert move._replace(writes=False) in moves[:at]


@given(st.integers(1, 4), st.integers(0, 6), groups_of, st.booleans())
def test_an_update_in_forward_moves_every_tile_once_and_no_more_where_it_is_read_again(
    layers, distance, groups, runs_again
):
    schedule = build(layers, distance, groups, "in_forward")
    if runs_again:
        again = [(name, phase) for name in groups for phase in ("read", "backward")]
        schedule = schedule.with_tiles(
            {"forward": [(name, "forward") for name in groups], "backward": again}
        )
    for name, count in groups.items():
        params, grads, state = (tiles_kind(kind, name) for kind in ("params", "grads", "opt_state"))
        moves = list_moves(StepPlan({"": schedule}), [params, grads, state])
        counted = collections.Counter(moves)
        records = range(layers * count)
        assert [move.layer for move in moves if move.kind == state and not move.writes] == [
            *records
        ]
        for record in records:
            for kind in (params, grads, state):
                assert counted[Move(kind, record, True)] == 1
            assert counted[Move(grads, record)] == counted[Move(state, record)] == 1
            # Forward makes the parameters from masters. Backward reads them.
            assert counted[Move(params, record)] == 1 + runs_again
            # A record is read before it is updated and written.
            assert moves.index(Move(state, record)) < moves.index(Move(state, record, True))
            assert moves.index(Move(grads, record)) < moves.index(Move(params, record, True))


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    groups_of,
    st.sampled_from(["after_backward", "in_backward", "in_forward"]),
)
def test_bytes_in_flight_are_those_of_a_layer_and_of_one_group(layers, distance, groups, update):
    schedule = build(layers, distance, groups, update)
    plain = build_schedule(
        layers, distance, tiers=TIERS, update=update, record_bytes=BYTES | {"activations": 5}
    )
    for name, total in plain.in_flight().items():
        if name != "update":
            most = max(loops.phase(name).peak_bytes for loops in schedule.tiles)
            np.testing.assert_array_equal(schedule.in_flight()[name], total + most)
    assert schedule.peak_bytes == max(int(total.max()) for total in schedule.in_flight().values())
    if update == "after_backward":
        assert {name for name in schedule.in_flight() if "/" in name} == {
            f"update/{name}" for name in groups
        }


def test_a_tile_takes_the_same_bytes_however_many_there_are():
    few, many = (build(2, 1, {"mlp": count}).peak_bytes for count in (4, 64))
    assert few == many


def test_the_loops_of_a_group_go_over_the_tiles_of_a_layer_or_of_all_layers():
    schedule = build(3, 1, {"mlp": 4})
    (loops,) = schedule.tiles
    assert loops.phase("forward").layer.tolist() == [0, 1, 2, 3]
    assert loops.phase("backward").layer.tolist() == [3, 2, 1, 0]
    assert loops.phase("update").layer.tolist() == list(range(12))
    assert "update/mlp, after the layers: fetches params" not in str(
        schedule
    )  # masters replace the parameters
    assert (
        "update/mlp, after the layers: fetches grads, opt_state; writes opt_state, params"
        in str(schedule)
    )


def test_a_budget_tells_the_distance_that_fits():
    peak = build(4, 2, {"mlp": 4}).peak_bytes
    assert build(4, 2, {"mlp": 4}, budget_bytes=peak).distance == 2
    with pytest.raises(
        ValueError,
        match=r"budget_bytes=\d+: prefetch_distance=2 puts \d+ bytes .* prefetch_distance=1 fits",
    ):
        build(4, 2, {"mlp": 4}, budget_bytes=peak - 1)
    with pytest.raises(ValueError, match="nothing fits"):
        build(4, 2, {"mlp": 4}, budget_bytes=20)
