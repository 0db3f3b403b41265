"""An update in forward of tiles, and of layers with optimizer state in part on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from test_update_in_forward import ALL_ON_HOST, HOST, assert_close, assert_same, build, train

import zerojax as zj
from zerojax.tiling import tiled_mlp

IN_PART = {"opt_state": HOST, "opt_state_device_fraction": 0.7}  # of two of three layers
FRACTIONS = {
    "small": {
        **IN_PART,
        "params": HOST,
        "precision": "bf16",
        "gather_ahead": True,
        "model": toys.small(),
    },
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
        "activations": (zj.Segment(1, activations="remat"), zj.Segment(2, activations="save")),
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FRACTIONS.values(), ids=FRACTIONS)
def test_layers_with_state_on_the_device_equal_an_update_after_backward(case):
    clip_norm = 0.4 if "model" in case else 1.2  # which is exceeded in some steps
    rows = assert_same({**case, "clip_norm": clip_norm}, toys.batches(6))
    assert {bool(row["grad_norm"] > clip_norm) for row in rows} == {True, False}


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


@pytest.mark.exhaustive
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
        ("update", 0),
        ("fetch", 2),
        ("update", 1),
        ("update", 2),
        ("store", 2),
    ]


# --- tiles ----------------------------------------------------------------------------------------


def small_model(tiles=True, names=("scale", "second")):
    """Return a model with one group of tiles, whose loop backward runs again."""

    def block(p, x, key):
        scale = p.get("scale", jnp.float32(1))
        return x + jnp.tanh(tiled_mlp(x * scale, p["second"], jax.nn.silu))

    model = tiled_toys.model({n: tiles and n == "second" for n in names}, None, False, block)
    init = lambda key: {n: tiled_toys.init_block(key)[n] for n in names}  # noqa: E731
    return dataclasses.replace(model, init_block=init)


FROZEN_BLOCK = {"scale": True, "mix": {"kernel": False, "bias": True}, "second": True}
FROZEN_BLOCK["first"] = {name: name == "up" for name in ("up", "gate", "down")}
FROZEN_BLOCK["first"] |= {"up_bias": False, "gate_bias": False}
FROZEN = {"embed": True, "block": FROZEN_BLOCK}
MODELS = {
    "small": small_model,
    "chained": tiled_toys.model,
    "tiles_alone": lambda: small_model(names=("second",)),
    "frozen": lambda: dataclasses.replace(tiled_toys.model(), frozen=FROZEN),
}
TILES = {
    "all_on_host": ("small", {**ALL_ON_HOST, "activations": "remat"}),
    "chained": ("chained", ALL_ON_HOST),
    "tiles_alone": ("tiles_alone", ALL_ON_HOST),
    "frozen": ("frozen", {**ALL_ON_HOST, "frozen": HOST}),
    "no_prefetch": ("chained", {"params": HOST, "prefetch_distance": 0, "num_microbatches": 2}),
    "masters": ("chained", {**ALL_ON_HOST, "precision": "bf16", "prefetch_distance": 2}),
    "masters_on_device": ("chained", {"params": HOST, "grads": HOST, "precision": "bf16"}),
    "remat": ("chained", {**ALL_ON_HOST, "num_microbatches": 2, "activations": "remat"}),
    "rounded": ("small", {**ALL_ON_HOST, "num_microbatches": 2, "grads_dtype": "bfloat16"}),
    "segments": (
        "chained",
        {
            **ALL_ON_HOST,
            "activations": (zj.Segment(1, activations="remat"), zj.Segment(1, activations="save")),
        },
    ),
}


@pytest.mark.by_default("all_on_host")
@pytest.mark.parametrize(("model", "case"), TILES.values(), ids=TILES)
def test_tiles_equal_an_update_after_backward(model, case):
    kwargs = {"model": MODELS[model](), "tx": optax.adamw(1e-2)}
    # The norm is clipped in some steps and not in others.
    clip_norm = 100.0 if model in ("chained", "frozen") else 1.0
    clipped = {**case, "clip_norm": clip_norm}
    schedule = build("in_forward", **kwargs, **clipped).schedule
    assert "a layer is one record and" in str(schedule)
    rows = assert_same(clipped, tiled_toys.batches(4), **kwargs)
    assert {bool(row["grad_norm"] > clip_norm) for row in rows} == {True, False}


@pytest.mark.exhaustive  # by default test_update_in_forward.py restores layers
def test_tiles_of_an_unsettled_state_are_read_and_restored(tmp_path):
    case = {**ALL_ON_HOST, "clip_norm": 1.0, "model": small_model(), "tx": optax.adamw(1e-2)}
    data = tiled_toys.batches(4)
    _, last = train(after := build("after_backward", **case), data[:2])
    _, state = train(program := build("in_forward", **case), data[:2])
    assert float(program.eval(state, data[2])) == float(after.eval(last, data[2]))
    assert_close(program.params(state), after.params(last))
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
        restored = checkpointer.restore(program)
    rows, state = train(program, data[2:], restored)
    expected, last = train(after, data[2:], last)
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    settled = program.settle(state)
    jax.tree.map(np.testing.assert_array_equal, program.params(settled), after.params(last))
    assert float(program.eval(settled, data[0])) == float(after.eval(last, data[0]))


def test_the_schedule_lists_each_tile_before_it_is_computed():
    case = {**ALL_ON_HOST, "precision": "bf16", "model": tiled_toys.model()}
    case |= {"activations": "remat"}
    batch = tiled_toys.batches(1)[0]
    program, after = (build(update, **case) for update in ("in_forward", "after_backward"))
    steps = program.operations(batch)
    phases = {part.name: part.phase for part in steps.phases}
    loops = [op for op in phases["forward"].main[0].ops if op.inner is not None]
    assert [op.record.leaves for op in loops] == ["mix", "first", "second"]
    for op in loops:
        assert set(op.inner.fetches) == {"grads", "opt_state"}
        assert set(op.inner.writes) == {"opt_state", "params"}
        verbs = [op.verb for loop in op.inner.main for op in loop.ops]
        assert verbs.index("update") < verbs.index("gather") < verbs.index("compute")
    # Backward runs some loops again, for values that it recomputes. These loops update nothing.
    again = [op for loop in phases["backward"].loops for op in loop.ops if op.inner is not None]
    again = [op.inner for op in again if op.inner.name == "forward"]
    assert {(phase.fetches, phase.writes) for phase in again} == {(("params",), ())}
    memory, memory_after = program.memory(batch), after.memory(batch)
    assert memory.host_link["to_host"] == memory_after.host_link["to_host"]
    params = program.layout.abstract_state.params
    blocks = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(params["blocks"])) // 4
    saved = memory_after.host_link["to_device"] - memory.host_link["to_device"]
    # Forward makes the parameters from masters, and loads them no more.
    assert saved == pytest.approx(blocks, rel=0.05)
    # The device holds one more record in forward, and a record is a tile.
    whole = build("in_forward", **{**case, "model": tiled_toys.model(tiles=False)}).memory(batch)
    in_flight = [report.tiers["device"]["in_flight"] for report in (memory, whole)]
    assert 2 * in_flight[0] < in_flight[1]
