"""What a pipelined program says of its bytes and operations before it runs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import long_decoder
import optax
import pytest

import zerojax as zj
from zerojax import hlo

LAYERS = 8


def build(mesh: dict[str, int], microbatches: int = 4, **fields: Any) -> zj.Program:
    size = math.prod(mesh.values())
    return zj.build_train_step(
        long_decoder.model(layers=LAYERS),
        optax.adamw(1e-3),
        zj.ZeroConfig(num_microbatches=microbatches, **fields),
        zj.make_mesh(**mesh, devices=jax.devices()[:size]),
    )


def batch_of(program: zj.Program, rows: int = 1) -> Any:
    """Return the shapes of a batch with some rows for each device and microbatch."""
    mesh = program.mesh
    size = rows * mesh.shape["data"] * mesh.shape["fsdp"] * program.config.num_microbatches
    batch = long_decoder.batches(1)[0]
    return {k: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for k, a in batch.items()}


def sent_by(text: str, mesh: Any) -> dict[tuple[str, str], float]:
    """Return the bytes that a device sends in a compiled step, by collective and axes."""
    sent = dict[tuple[str, str], float]()
    for c in hlo.collectives(text, unknown_trips=1, mesh=mesh):
        devices = math.prod(mesh.shape[axis] for axis in (c.axes or "").split("+") if axis)
        share = 1.0 if c.op == "collective-permute" else (devices - 1) / devices
        key = (c.op, c.axes or "")
        sent[key] = sent.get(key, 0.0) + share * c.num_bytes * c.times
    return sent


MESHES = {"fsdp": {"pipe": 2, "fsdp": 2}, "data": {"pipe": 4, "data": 2, "fsdp": 1}}
STAGES = {
    "stage 1": {"stage": 1, "activations": "selective"},
    "stage 3, chunks": {"stage": 3, "pipe_chunks": 2, "activations": "remat"},
    "stage 2": {"stage": 2, "activations": "save"},
    "stage 0": {"stage": 0},
}


@pytest.mark.by_default("stage 3, chunks-fsdp")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", STAGES)
def test_arguments_and_permutes_are_those_of_the_compiled_step(case, mesh):
    with build(MESHES[mesh], **STAGES[case]) as program:
        batch = batch_of(program)
        report = program.memory(batch)
        compiled = program.lower(batch).compile()
        stats: Any = compiled.memory_analysis()
        assert report.argument_bytes == stats.argument_size_in_bytes
        assert report.host_argument_bytes == 0
        sent = sent_by(compiled.as_text() or "", program.mesh)
        assert report.collectives["pipe_permute"] == sent["collective-permute", "pipe"]
        text = str(report)
        assert "over pipe    permute" in text


def test_bytes_do_not_grow_with_the_microbatches():
    held = list[int]()
    for microbatches in (4, 8, 16):
        with build({"pipe": 2, "fsdp": 2}, microbatches, pipe_chunks=2) as program:
            report = program.memory(batch_of(program))
            held.append(report.device_bytes - report.tiers["device"]["batch"])
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("activations", ["remat", "selective", "save"])
def test_kept_values_fill_every_slot(activations):
    with build({"pipe": 2, "fsdp": 2}, pipe_chunks=2, activations=activations) as program:
        batch = batch_of(program, rows=2)
        kept = program.kept(batch)
        layers = LAYERS // 2 // 2
        count = program.schedule.num_slots * layers
        assert program.schedule.num_slots == 2 * 2 + 2 - 1
        for value in kept:
            shards = math.prod(
                program.mesh.shape[axis]
                for entry in value.spec
                for axis in ((entry,) if isinstance(entry, str) else entry or ())
            )
            size = math.prod(value.shape) * jnp.dtype(value.dtype).itemsize // shards
            assert (value.tier, value.count) == ("device", count)
            assert value.num_bytes == count * size
        x = next(value for value in kept if value.name == "x")
        assert x.shape == (4, long_decoder.SEQ, long_decoder.WIDTH)
        assert x.spec[0] == ("data", "fsdp")
        assert (len(kept) == 1) == (activations == "remat")
        assert f"{count} x " in str(kept)
        # The activations also have x and dx, which the stages pass on.
        carried = 2 * x.num_bytes // count
        assert program.memory(batch).tiers["device"]["activations"] == kept.num_bytes + carried


@pytest.mark.parametrize("chunks", [1, 2])
def test_operations_run_as_often_as_the_schedule_says(chunks):
    stages, microbatches = 2, 4
    with build({"pipe": 2, "fsdp": 2}, stage=3, pipe_chunks=chunks) as program:
        operations = program.operations(batch_of(program))
        report = program.memory(batch_of(program))
    ticks = chunks * microbatches + stages - 1
    layers = LAYERS // stages // chunks
    counts = dict[tuple[str, str, str], int]()
    for step_phase in operations.phases:
        for loop in step_phase.phase.loops:
            for op in loop.ops:
                inner = [] if op.inner is None else op.inner.loops
                for times, each in [(1, op), *((i.trips, o) for i in inner for o in i.ops)]:
                    key = (each.verb, each.record.kind, each.record.leaves)
                    counts[key] = counts.get(key, 0) + loop.trips * times
    assert counts["send", "x", "layers"] == counts["send", "dy", "layers"] == ticks
    assert counts["gather", "gathered", "layers"] == 2 * ticks * layers
    assert counts["reduce", "grads", "layers"] == ticks * layers
    assert counts["exchange", "y", "layers"] == counts["exchange", "dy", "layers"] == microbatches
    assert counts["run", "layer", "forward"] == counts["run", "layer", "backward"] == ticks
    names = [step_phase.name for step_phase in operations.phases]
    assert list(dict.fromkeys(names)) == ["fill", "steady", "drain", "update", "unstacked"]
    table = str(operations)
    assert f"layer 0 .. {layers - 1}" in table
    assert "layer of head and loss" in table
    device = report.tiers["device"]
    peaks = [operations.find_peak(name) for name in ("fill", "steady", "drain")]
    assert device["gathered"] + device["in_flight"] >= max(peaks) > 0


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_optimizer_state_in_host_memory_crosses_the_link(update_on):
    fields = {"opt_state": "pinned_host", "update_on": update_on, "stage": 2}
    with build({"pipe": 2, "fsdp": 2}, **fields) as program:
        batch = batch_of(program)
        report, operations = program.memory(batch), program.operations(batch)
    moved = {"to_device": operations.moved("up"), "to_host": operations.moved("down")}
    assert moved == report.host_link
    assert report.tiers["pinned_host"]["opt_state"] > 0
    per_device = report.num_params // 4
    expected = {"device": 8, "host": 4}[update_on]  # both moments, or gradients and parameters
    assert moved["to_device"] == pytest.approx(expected * per_device, rel=0.6)


def test_a_schedule_prints_and_draws_a_lane_for_each_stage():
    with build({"pipe": 2, "fsdp": 2}, pipe_chunks=2) as program:
        schedule = program.schedule
    assert "2 stages of 2 chunks, 4 microbatches" in str(schedule)
    assert schedule.timeline().count("stage ") >= 2
    assert "<svg" in schedule.timeline_svg()
    assert "<svg" in schedule.timeline_html()


def test_plans_tuning_and_generation_are_refused_by_name():
    with build({"pipe": 2, "fsdp": 2}) as program:
        mesh, batch = program.mesh, long_decoder.batches(1)[0]
        model, config = long_decoder.model(layers=LAYERS), zj.ZeroConfig()
        with pytest.raises(NotImplementedError, match=r"with pipe=2: plan on a mesh with these"):
            zj.plan(model, optax.adamw(1e-3), mesh, batch)
        with pytest.raises(NotImplementedError, match=r"autotune .* with pipe=2.*schedule\.bubble"):
            zj.autotune(model, optax.adamw(1e-3), config, mesh, batch)
        state = program.init(jax.random.key(0))
        with pytest.raises(NotImplementedError, match=r"generate does not run .* with pipe=2: sav"):
            zj.generate(program, state, [[1, 2]], max_new_tokens=1)
        with pytest.raises(NotImplementedError, match=r"apply_cached does not run .* pipe=2: each"):
            program.apply_cached(state, batch, None, long_decoder.SEQ)
