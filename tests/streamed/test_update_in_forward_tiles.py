"""An update in forward of layers whose optimizer state is in part on the device."""

import pytest
import toys
from test_update_in_forward import ALL_ON_HOST, HOST, assert_close, assert_same, build, train

import zerojax as zj

IN_PART = {"opt_state": HOST, "opt_state_device_fraction": 0.5}
FRACTIONS = {
    "all_on_host": {**ALL_ON_HOST, **IN_PART},
    # The ring holds nothing but the optimizer state of the last layer.
    "opt_state_alone": {**IN_PART, "params": HOST, "precision": "bf16", "gather_ahead": True},
    "all_ahead": {**ALL_ON_HOST, **IN_PART, "gather_ahead": True, "prefetch_distance": 2},
    "no_prefetch": {"params": HOST, **IN_PART, "prefetch_distance": 0, "num_microbatches": 2},
    "beyond_the_end": {"params": HOST, **IN_PART, "prefetch_distance": 5},
    # The first run has no state off the device, the second has both.
    "segments": {
        **ALL_ON_HOST,
        **IN_PART,
        "opt_state_device_fraction": 0.7,
        "activations": (zj.Segment(1, activations="remat"), zj.Segment(2, activations="save")),
    },
}


@pytest.mark.by_default("all_on_host", "opt_state_alone")
@pytest.mark.parametrize("case", FRACTIONS.values(), ids=FRACTIONS)
def test_layers_with_state_on_the_device_equal_an_update_after_backward(case):
    rows = assert_same({**case, "clip_norm": 1.2}, toys.batches(6))
    assert {bool(row["grad_norm"] > 1.2) for row in rows} == {True, False}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [0.4, 0.7])
@pytest.mark.parametrize("distance", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tiers", [{"params": HOST}, ALL_ON_HOST], ids=["params", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_share_on_the_device_equals_an_update_after_backward(
    precision, tiers, ahead, distance, fraction
):
    case = {**tiers, "opt_state": HOST, "precision": precision, "gather_ahead": ahead}
    case |= {"opt_state_device_fraction": fraction, "prefetch_distance": distance}
    assert_same({**case, "clip_norm": 1.2}, toys.batches(3))


def test_a_state_in_part_on_the_device_is_read_and_restored(tmp_path):
    # A step makes the parameters from masters, and fetches nothing for a layer with masters on the
    # device: an evaluation reads parameters that the schedule does not list.
    case = {"params": HOST, **IN_PART, "precision": "bf16", "clip_norm": 1.2}
    data = toys.batches(4)
    _, last = train(after := build("after_backward", **case), data[:2])
    _, state = train(program := build("in_forward", **case), data[:2])
    assert float(program.eval(state, data[2])) == float(after.eval(last, data[2]))
    assert_close(program.params(state), after.params(last))
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
        other = build("in_forward", **{**case, "opt_state_device_fraction": 0.0})
        restored = other.settle(checkpointer.restore(other))
    assert_close(other.params(restored), after.params(last))
    state = program.settle(state)
    assert float(program.eval(state, data[2])) == float(after.eval(last, data[2]))


def test_state_on_the_device_does_not_cross_the_link():
    case = {**ALL_ON_HOST, "precision": "bf16"}
    batch = toys.batches(1)[0]
    programs = [build("in_forward", **{**case, **fields}) for fields in ({}, IN_PART)]
    away, split = (program.memory(batch) for program in programs)
    # One of three layers, and no more.
    saved = away.tiers[HOST]["opt_state"] - split.tiers[HOST]["opt_state"]
    saved += away.tiers[HOST]["master"] - split.tiers[HOST]["master"]
    assert saved > 0
    for way in ("to_device", "to_host"):
        assert away.host_link[way] - split.host_link[way] == saved
    after = build("after_backward", **{**case, **IN_PART}).memory(batch)
    assert split.host_link["to_host"] == after.host_link["to_host"]
    (forward,) = (p.phase for p in programs[1].operations(batch).phases if p.name == "forward")
    moved = [
        (op.verb, op.number)
        for _, ops in forward.ticks()
        for op in ops
        if op.record.kind == "opt_state"
    ]
    assert moved == [
        ("fetch", 1), ("update", 0), ("fetch", 2), ("update", 1), ("store", 1),
        ("update", 2), ("store", 2),
    ]  # fmt: skip
