"""Estimates of a config against its program's counts: bytes by tier, link and collective.

"in_flight", "working" and "activations" of an estimate describe the phase with the highest memory
use, so they are not compared kind by kind. Nothing is timed: seconds are computed from a machine's
rates.
"""

import dataclasses
import functools
import itertools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
import toys

import zerojax as zj
from zerojax import planner
from zerojax.costs import Grid, traced
from zerojax.costs.estimate import estimate
from zerojax.memory import program_memory
from zerojax.program import assemble
from zerojax.sharding import abstract_batch

H, N = "pinned_host", "nvme"
TX = optax.adamw(1e-3)
RATES = (
    "memory_rate",
    "link_up",
    "link_down",
    "network_in_node",
    "network_between_nodes",
    "host_kernel",
)
MACHINE = planner.Machine(
    name="lab", devices_per_node=8, device_bytes=1e9, host_bytes=1e10, disk_bytes=1e12, flops=dict.fromkeys(("fp32", "bf16"),
    1e11), link_both=2e9, disk_read=1e9, disk_write=1e9, disk_both=1e9, **dict.fromkeys(RATES, 1e9),
)  # fmt: skip
RESTING = ("params", "master", "opt_state", "grads", "pending", "frozen", "unreduced", "batch")
SCALARS = (
    256  # bytes: a counter of the optimizer, and leaves of a few elements that stay on the device
)


@pytest.fixture(autouse=True)
def _nothing_is_timed(monkeypatch):
    monkeypatch.setattr(traced, "is_there", lambda mesh: False)


def layered_gpt() -> zj.LayeredModel:
    return gpt.layered_gpt(
        dataclasses.replace(gpt.PRESETS["tiny"], layers=4, hidden=256, heads=4, seq=16)
    )


def with_frozen() -> zj.LayeredModel:
    """Return a model of mostly frozen layers.

    Each layer has a factor of two trainable matrices; the embedding is frozen.
    """
    return zj.LayeredModel(
        4,
        lambda key: {"table": toys.draw(key, (1024, 256))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {
            "w": toys.draw(key, (256, 256)),
            "a": toys.draw(key, (256, 16)),
            "b": toys.draw(key, (16, 256)),
        },
        lambda p, x, key: x + jnp.tanh(x @ p["w"] + x @ p["a"] @ p["b"]),
        lambda key: {"out": toys.draw(key, (256, 512))},
        lambda p, p_embed, x, batch, key: _cross_entropy(x @ p["out"], batch),
        frozen={"embed": True, "block": {"w": True, "a": False, "b": False}, "head": False},
    )


def plain() -> zj.Model:
    def loss(p: Any, batch: Any, key: Any) -> jax.Array:
        return _cross_entropy(jnp.tanh(p["table"][batch["tokens"]] @ p["w"]) @ p["out"], batch)

    shapes = {"table": (512, 256), "w": (256, 256), "out": (256, 512)}
    return zj.Model(
        lambda key: {name: toys.draw(key, shape) for name, shape in shapes.items()}, loss
    )


def _cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
    )


MODELS = {"gpt": layered_gpt, "frozen": with_frozen, "plain": plain}
BATCH = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 16), jnp.int32))


@functools.cache
def model_of(name: str) -> Any:
    return MODELS[name]()


@functools.cache
def workload_of(name: str, precision: str, data: int, fsdp: int) -> Any:
    return traced.workload_of_model(
        model_of(name), TX, mesh_of(data, fsdp), BATCH, MACHINE, zj.ZeroConfig(precision=precision)
    )  # fmt: skip


def mesh_of(data: int, fsdp: int) -> Any:
    return zj.make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])


def both(
    folder: Any, name: str = "gpt", data: int = 1, fsdp: int = 4, **fields: Any
) -> tuple[Any, Any]:
    """Return a config's estimate and its program's counts."""
    config, mesh = zj.ZeroConfig(swap_dir=str(folder), **fields), mesh_of(data, fsdp)
    parts = assemble(model_of(name), TX, config, mesh)
    with jax.set_mesh(mesh):
        counted = program_memory(parts.records, parts.step, abstract_batch(BATCH, mesh))
    workload = workload_of(name, config.precision, data, fsdp)
    return estimate(workload, config, traced.build_grid(mesh), MACHINE, shares_cores=True), counted


def assert_equal(estimated: Any, counted: Any) -> None:
    """Compare bytes of stored state, on disk, over the link and of collectives."""
    for tier, kind in itertools.product(("device", H), RESTING):
        a, b = (
            bytes_by_tier[tier].get(kind, 0) for bytes_by_tier in (estimated.bytes, counted.tiers)
        )
        assert a == pytest.approx(b, rel=1e-3, abs=SCALARS), (tier, kind)
    kept = (estimated.bytes[H].get("activations", 0), counted.tiers[H].get("activations", 0))
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)
    on_disk = {kind: n for kind, n in counted.tiers[N].items() if n}
    assert set(estimated.bytes[N]) == set(on_disk)
    for kind, n in estimated.bytes[N].items():
        # A record is a whole number of blocks of 4096 bytes. The gpt has 4 records for its layers
        # and 7 for the ends' leaves.
        assert n - SCALARS <= on_disk[kind] <= n + 11 * 4096, kind
    names = set(estimated.collectives) | set(counted.collectives)
    for name in names:
        a, b = (n.get(name, 0) for n in (estimated.collectives, counted.collectives))
        assert a == pytest.approx(b, rel=1e-3, abs=SCALARS), name
    assert 0 < estimated.least <= estimated.time.seconds * (1 + 1e-9)
    for lane, way in (("up", "to_device"), ("down", "to_host")):
        assert estimated.moved[lane] == pytest.approx(
            counted.host_link[way], rel=0.01, abs=SCALARS
        ), lane


STATES: dict[str, dict[str, Any]] = {
    "device": {},
    "opt_state-host": {"opt_state": H},
    "a-part-host": {"opt_state": H, "opt_state_device_fraction": 0.4},
    "grads-host": {"grads": H, "opt_state": H},
    "params-host": {"params": H},
    "all-host": {"params": H, "grads": H, "opt_state": H},
    "all-nvme": {"params": N, "grads": N, "opt_state": N},
    "opt_state-nvme": {"opt_state": N},
    "updated-on-host": {"opt_state": H, "update_on": "host"},
    "all-updated-on-host": {"params": H, "opt_state": H, "update_on": "host"},
    "nvme-updated-on-host": {"params": N, "opt_state": N, "update_on": "host"},
    "in-backward": {"params": H, "opt_state": H, "update": "in_backward"},
    "nvme-in-backward": {"params": N, "opt_state": N, "update": "in_backward"},
    "host-in-backward": {"params": H, "opt_state": H, "update": "in_backward", "update_on": "host"},
    "host-in-forward": {"params": H, "opt_state": H, "update": "in_forward", "update_on": "host"},
    "device-in-forward": {"update": "in_forward"},
    "opt_state-in-forward": {"opt_state": H, "update": "in_forward"},
    "params-in-forward": {"params": H, "update": "in_forward"},
    "all-in-forward": {"params": H, "grads": H, "opt_state": H, "update": "in_forward"},
    "nvme-in-forward": {"params": N, "grads": N, "opt_state": N, "update": "in_forward"},
}
SEGMENTS = {
    "segments": (
        zj.Segment(1, activations="save"),
        zj.Segment(3, activations="remat", saved_names=("#0",)),
    ),
    "segments-away": (
        zj.Segment(3, activations=H, offloaded_names=("#2",)),
        zj.Segment(1, activations="save"),
    ),
}


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fsdp", [1, 4])
@pytest.mark.by_default("4-bf16-all-in-forward")
def test_estimate_of_states_equals_the_programs(fsdp, precision, states, tmp_path):
    assert_equal(*both(tmp_path, fsdp=fsdp, precision=precision, **STATES[states]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("states", ["device", "opt_state-host"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.by_default("2-device-0", "2-device-2", "2-opt_state-host-1")
def test_estimate_of_a_stage_equals_the_programs(data, states, stage, tmp_path):
    assert_equal(*both(tmp_path, data=data, fsdp=4 // data, stage=stage, **STATES[states]))


@pytest.mark.parametrize("activations", ["remat", "selective", H, N, *SEGMENTS])
@pytest.mark.parametrize("states", ["device", "all-host"])
@pytest.mark.by_default("all-host-pinned_host")
def test_estimate_of_activations_equals_the_programs(states, activations, tmp_path):
    fields = STATES[states] | {"activations": SEGMENTS.get(activations, activations)}
    estimated, counted = both(tmp_path, **fields)
    assert_equal(estimated, counted)
    # On the device, saved activations count in the phase with the highest memory use: all or none.
    kept = estimated.bytes["device"].get("activations", 0)
    assert kept in (0, pytest.approx(counted.tiers["device"]["activations"], rel=1e-3))


@pytest.mark.parametrize("fields", [
    pytest.param({}, id="resident"),
    pytest.param({"stage": 0}, id="stage-0"),
    pytest.param({"stage": 2, "reduce_every": "step"}, id="once"),
    pytest.param({"params": H, "grads": H, "opt_state": H}, id="streamed"),
    pytest.param({"params": H, "reduce_every": "step"}, id="streamed-once"),
])  # fmt: skip
@pytest.mark.by_default("once", "streamed")
def test_estimate_of_microbatches_equals_the_programs(fields, tmp_path):
    """A streamed step gathers layers once for all microbatches, and its ends once for each."""
    assert_equal(*both(tmp_path, num_microbatches=2, **fields))


@pytest.mark.parametrize(
    "states", [name for name in STATES if "updated-on" not in name and "host-in" not in name]
)
@pytest.mark.by_default("all-host")
def test_estimate_of_frozen_weights_equals_the_programs(states, tmp_path):
    """Frozen leaves are gathered and loaded like trainable ones, but not reduced or updated."""
    assert_equal(*both(tmp_path, "frozen", **STATES[states]))


@pytest.mark.parametrize("fields", [
    pytest.param({"opt_state": H}, id="host"),
    pytest.param({"opt_state": N, "stage": 2}, id="nvme"),
    pytest.param({"opt_state": H, "update_on": "host"}, id="updated-on-host"),
    pytest.param({"num_microbatches": 2}, id="microbatches"),
])  # fmt: skip
def test_estimate_of_a_plain_model_moves_its_state(fields, tmp_path):
    estimated, counted = both(tmp_path, "plain", **fields)
    assert_equal(estimated, counted)
    assert ("opt_state" in fields) == (estimated.time.busy["up"] > 0)


def test_estimate_counts_gathered_layers_as_the_program(tmp_path):
    for ahead in (False, True):
        for name in (
            "gpt",
            "frozen",
        ):  # the largest of the latter is the embedding, which is frozen
            estimated, counted = both(tmp_path, name, gather_ahead=ahead, activations="selective")
            assert estimated.bytes["device"]["gathered"] == pytest.approx(
                counted.tiers["device"]["gathered"], rel=1e-3
            )


def test_estimate_of_buffers_equals_the_programs(tmp_path):
    for states in ("all-nvme", "nvme-updated-on-host"):
        estimated, counted = both(tmp_path, **STATES[states])
        assert estimated.bytes[H]["buffers"] == pytest.approx(counted.tiers[H]["buffers"], rel=0.01)


def test_wires_of_a_config_ask_for_what_it_uses():
    bare = dataclasses.replace(MACHINE, link_up=None, disk_read=None)
    workload, grid = workload_of("gpt", "fp32", 1, 4), Grid(fsdp=4)
    assert estimate(workload, zj.ZeroConfig(), grid, bare).time.busy["up"] == 0
    with pytest.raises(ValueError, match="link_up"):
        estimate(workload, zj.ZeroConfig(opt_state=H), grid, bare)
    linked = dataclasses.replace(bare, link_up=1e9)
    assert estimate(workload, zj.ZeroConfig(opt_state=H), grid, linked).time.busy["up"] > 0
    with pytest.raises(ValueError, match="disk_read"):
        estimate(workload, zj.ZeroConfig(opt_state=N, swap_dir="x"), grid, linked)
