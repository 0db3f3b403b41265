"""Plans of models: a config that builds and trains.

Settings that a model or an optimizer does not support are left out.
"""

import dataclasses
import re
from typing import Any

import encoder_decoder
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import aot
from zerojax.costs import traced, workload_of_model
from zerojax.machines import Machine

MACHINE = Machine(
    name="lab", devices_per_node=4, device_bytes=10**9, host_bytes=10**10, disk_bytes=10**10, flops={"fp32": 1e9, "bf16": 1e9},
    memory_rate=1e9, link_up=1e9, link_down=1e9, link_both=2e9, network_in_node=1e9, disk_read=1e9, disk_write=1e9,
    disk_both=1e9, host_kernel=1e9,
)  # fmt: skip
LAYERS = 24
TX = optax.adamw(1e-2)
QUICK = {"prefetch_distance": 1, "num_microbatches": 1, "gather_ahead": False}


@pytest.fixture
def _nothing_is_timed(monkeypatch):
    monkeypatch.setattr(traced, "is_there", lambda mesh: False)


def mesh_of(n: int) -> Any:
    return zj.make_mesh(fsdp=n, devices=jax.devices()[:n])


def wide(batch_of: int = 8) -> tuple[zj.LayeredModel, dict[str, np.ndarray]]:
    """Return layers whose states are much larger than their activations, and a batch."""
    shape = (128, 128)
    model = zj.LayeredModel(
        LAYERS,
        lambda key: {"table": toys.draw(key, (16, 128))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {"w": toys.draw(key, shape) / 12},
        lambda p, x, key: x + jnp.tanh(x @ p["w"]),
        lambda key: {"out": toys.draw(key, (128, 16)) / 12},
        lambda p, p_embed, x, batch, key: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                (x @ p["out"]).astype(jnp.float32), batch["tokens"]
            )
        ),
    )
    return model, {
        "tokens": np.random.default_rng(0).integers(0, 16, (batch_of, 2), dtype=np.int32)
    }


def losses_of(
    model: Any, tx: Any, config: zj.ZeroConfig, mesh: Any, batch: Any, steps: int = 2
) -> list[float]:
    """Train some steps; a config that cannot be built fails here."""
    with zj.build_train_step(model, tx, config, mesh) as program:
        state, losses = program.init(jax.random.key(0)), []
        for _ in range(steps):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses


def test_planned_step_is_timed_where_its_devices_are():
    """The plan of a model that fits is the default, which trains.

    `activations` is fixed: in this small model, its modes differ by less than a busy machine's
    noise.
    """
    model, batch = wide()
    fixed = QUICK | {"grads": "device", "update": None, "stage": 3, "activations": "save"}
    made = zj.plan(model, TX, mesh_of(2), batch, MACHINE, fixed=fixed)
    assert made.source == "timed on 2 x cpu"
    assert made.config == zj.ZeroConfig()
    assert made.time.busy["compute"] > 0
    first, second = losses_of(model, TX, made.config, mesh_of(2), batch)
    assert second < first


def test_modes_with_the_same_backward_are_timed_once():
    model, batch = wide()
    (stack,) = workload_of_model(model, TX, mesh_of(1), batch, MACHINE, zj.ZeroConfig()).stacks
    assert stack.backward["selective"] == stack.backward["save"]  # the block has no attention
    assert stack.backward["remat"] != stack.backward["save"]


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_of_a_model_that_does_not_fit_trains_from_another_tier(tmp_path):
    """On CPUs, host memory is the device's own memory, so what does not fit goes to disk.

    `ZeroConfig.auto` returns that config.
    """
    model, batch = wide()
    state = 16 * LAYERS * 128**2
    small = dataclasses.replace(
        MACHINE, devices_per_node=1, device_bytes=int(0.7 * state), host_bytes=int(0.7 * state)
    )
    fixed = QUICK | {
        "swap_dir": str(tmp_path),
        "update_on": "device",
        "activations": "remat",
        "update": None,
    }
    made = zj.plan(model, TX, mesh_of(1), batch, small, fixed=fixed)
    assert "nvme" in (made.config.params, made.config.opt_state)
    assert (
        sum(made.bytes["device"].values()) + sum(made.bytes["pinned_host"].values())
        <= 0.95 * 0.7 * state
    )
    assert losses_of(model, TX, made.config, mesh_of(1), batch)[1] > 0
    assert zj.ZeroConfig.auto(model, TX, mesh_of(1), batch, small, **fixed) == made.config
    with zj.build_train_step(model, TX, made.config, mesh_of(1)) as program:
        counted = program.memory(batch).tiers
    for tier, kinds in counted.items():  # a plan's bytes are its program's
        assert {kind: n for kind, n in kinds.items() if n} == made.bytes[tier]


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_with_a_part_of_the_state_on_disk_trains(tmp_path):
    model, batch = wide()
    state = 16 * LAYERS * 128**2
    small = dataclasses.replace(
        MACHINE, devices_per_node=1, device_bytes=int(0.9 * state), disk_read=1e8, disk_write=1e8
    )
    fixed = QUICK | {
        "opt_state": "nvme",
        "update_on": "device",
        "activations": "remat",
        "update": None,
        "params": "device",
    }
    made = zj.plan(
        model,
        TX,
        mesh_of(1),
        batch,
        small,
        fixed=fixed | {"swap_dir": str(tmp_path), "grads": "device"},
    )
    assert 0.4 < made.config.opt_state_device_fraction < 0.7
    losses = losses_of(model, TX, made.config, mesh_of(1), batch)
    np.testing.assert_allclose(
        losses, losses_of(model, TX, zj.ZeroConfig(), mesh_of(1), batch), rtol=1e-5
    )


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_of_a_plain_model_chooses_what_it_can_take(caplog):
    batch = toys.batches(1)[0]
    fixed = {"num_microbatches": 1, "stage": 3}
    fits = zj.plan(toys.unrolled(), TX, mesh_of(2), batch, MACHINE, fixed=fixed)
    assert fits.config == zj.ZeroConfig()
    assert (
        sum("stay replicated" in record.message for record in caplog.records) == 1
    )  # and not once per config
    needed = fits.device_bytes
    tight = dataclasses.replace(MACHINE, device_bytes=int(0.8 * needed))
    made = zj.plan(toys.unrolled(), TX, mesh_of(2), batch, tight, fixed=fixed)
    assert made.config != zj.ZeroConfig()
    assert (made.config.params, made.config.grads) == ("device", "device")
    assert "1 built" in made.search


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_leaves_out_what_the_optimizer_cannot_do():
    """Sums over all gradients are not elementwise.

    Such an optimizer runs on the full tree, on the device.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        norm = optax.global_norm(updates)
        return jax.tree.map(lambda g: -0.01 * g / norm, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    model, batch = wide()
    made = zj.plan(model, tx, mesh_of(2), batch, MACHINE, fixed=QUICK)
    left_out = [note for note in made.notes if "is not considered" in note]
    assert any(note.startswith("opt_state='pinned_host' is not considered: ") for note in left_out)
    assert any(note.startswith("update='in_backward' is not considered: ") for note in left_out)
    assert (made.config.opt_state, made.config.update) == ("device", None)


@pytest.mark.usefixtures("_nothing_is_timed")
@pytest.mark.exhaustive  # by default test_planner.py follows suggested changes for sizes
@pytest.mark.parametrize(("device", "host", "devices"), [(0.05, 0.3, 1), (0.5, 0.3, 2)])
def test_error_of_a_model_names_a_change_that_its_program_fits(device, host, devices):
    """A program takes a few bytes more than its estimate, which finds the nearest config.

    The error must name all of those bytes.
    """
    model, batch = wide()
    state = 16 * LAYERS * 128**2
    small = dataclasses.replace(
        MACHINE,
        devices_per_node=devices,
        device_bytes=int(device * state),
        host_bytes=int(host * state),
        disk_bytes=0,
    )
    arguments = {"fixed": QUICK | {"update": None, "activations": "remat", "grads": "device"}}
    with pytest.raises(zj.PlanError, match="nothing fits lab: ") as caught:
        zj.plan(model, TX, mesh_of(devices), batch, small, **arguments)
    named = re.findall(r"(\w+_bytes) of ([\d,]+)", str(caught.value))
    assert named
    more = {name: int(n.replace(",", "")) for name, n in named}
    zj.plan(model, TX, mesh_of(devices), batch, dataclasses.replace(small, **more), **arguments)


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_tells_why_clipping_leaves_no_update_in_backward():
    model, batch = wide()
    made = zj.plan(model, TX, mesh_of(2), batch, MACHINE, fixed=QUICK | {"clip_norm": 1.0})
    note = "update='in_backward' is not considered with clip_norm=1.0: the global norm is known only after the backward pass"
    assert note in made.notes


@pytest.mark.exhaustive  # by default models of one stack are planned
@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_of_two_stacks_trains():
    model, batch = encoder_decoder.model(), encoder_decoder.batches(1)[0]
    fixed = QUICK | {
        "opt_state": "pinned_host",
        "grads": "device",
        "activations": "remat",
        "update_on": "device",
        "update": None,
    }
    made = zj.plan(model, TX, mesh_of(2), batch, MACHINE, fixed=fixed)
    assert made.name == "1,656 parameters, 5 layers"
    assert losses_of(model, TX, made.config, mesh_of(2), batch, 1)


@pytest.mark.usefixtures("_nothing_is_timed")
def test_plan_counts_frozen_weights_and_updates_none_of_them():
    model, batch = wide()
    frozen = dataclasses.replace(model, frozen={"embed": True, "block": {"w": True}, "head": False})
    plans = [
        zj.plan(m, TX, mesh_of(2), batch, MACHINE, fixed=QUICK | {"activations": "remat"})
        for m in (model, frozen)
    ]
    assert plans[1].bytes["device"]["frozen"] == pytest.approx(
        plans[0].bytes["device"]["params"], rel=0.1
    )
    searched = zj.plan(
        frozen, TX, mesh_of(2), batch, MACHINE, fixed=QUICK
    )  # of layers without optimizer state
    assert searched.config.opt_state_device_fraction == 0
    assert plans[1].bytes["device"]["opt_state"] < 0.1 * plans[0].bytes["device"]["opt_state"]


@pytest.mark.usefixtures("_nothing_is_timed")
def test_flops_of_frozen_matrices_are_without_their_gradients():
    """Frozen layers take two products each instead of three.

    This also applies to 8-bit weights, whose scales are not parameters.
    """
    model, batch = wide()
    frozen = dataclasses.replace(model, frozen={"embed": True, "block": {"w": True}, "head": False})
    plans = [
        zj.plan(m, TX, mesh_of(2), batch, MACHINE, fixed=QUICK | {"frozen_dtype": kind})
        for m, kind in ((model, None), (frozen, None), (frozen, "int8"))
    ]
    assert plans[0].tokens == batch["tokens"].size
    assert plans[0].flops == 6 * batch["tokens"].size * (LAYERS * 128**2 + 128 * 16)
    assert plans[0].flops - plans[1].flops == 2 * batch["tokens"].size * LAYERS * 128**2
    assert plans[0].hardware_flops == plans[0].flops
    assert plans[2].flops == plans[1].flops
    assert len({made.name for made in plans}) == 1


def test_plan_for_gpus_that_are_not_there_takes_their_rates():
    """Nothing runs there: seconds are computed from the rates of the devices' machine."""
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)
    model, batch = wide()
    made = zj.plan(model, TX, mesh, batch, fixed=QUICK | {"precision": "bf16", "stage": 3})
    assert made.source == "roofline of its equations at the rates of h200"
    assert made.machine == dataclasses.replace(zj.machine("h200"), devices_per_node=8)
    assert made.fields == {"precision": "bf16"}
    assert made.mfu is not None
    assert 0 < made.mfu < 1
    assert "pinned_host is not considered: the machine lacks host_bytes" in made.notes


@pytest.mark.parametrize(("arguments", "message"), [
    ({"tx": None}, "a plan of a model takes (model, tx, mesh, batch): lacks tx"),
    ({"mesh": None}, "lacks mesh"),
    ({"mesh": {"fsdp": 2}}, "mesh is {'fsdp': 2}, which is not a jax.sharding.Mesh"),
    ({"model": lambda x: x}, "model must be a zerojax.Model, LayeredModel or Sizes, got function"),
    ({"fixed": {"stages": 3}}, "did you mean 'stage'"),
    ({"fixed": ["stage"]}, "fixed=['stage']: pass fields of ZeroConfig by name, such as fixed={'stage': 3}"),
    ({"batch": {"tokens": 1}}, "batch['tokens'] is 1: a plan takes arrays or jax.ShapeDtypeStructs of one step"),
    ({"batch": {}}, "batch has no array with rows"),
])  # fmt: skip
def test_plan_of_a_model_refuses_what_is_missing(arguments, message):
    model, batch = wide()
    given = {
        "model": model,
        "tx": TX,
        "mesh": mesh_of(2),
        "batch": batch,
        "machine": MACHINE,
    } | arguments
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the full message is compared
        zj.plan(**given)
    assert message in str(caught.value)


def test_plan_of_a_batch_that_does_not_divide_says_so():
    model, batch = wide(batch_of=6)
    with pytest.raises(
        ValueError, match=r"batch 6 is not divisible by data x fsdp = 1 x 4, .* use 8"
    ):
        zj.plan(model, TX, mesh_of(4), batch, MACHINE)


def test_longest_rows_of_a_model_that_depends_on_their_length():
    lengths = list[int]()

    def build(tokens: int) -> zj.LayeredModel:
        lengths.append(tokens)
        return dataclasses.replace(wide()[0], num_layers=2)

    batch = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}
    machine = dataclasses.replace(MACHINE, device_bytes=4 * 10**7, host_bytes=4 * 10**7)
    fixed = {**QUICK, **dict.fromkeys(("params", "grads", "opt_state"), "device")}
    fixed |= {"activations": "remat", "update": None, "update_on": "device"}
    plan = zj.plan(build, TX, mesh_of(1), batch, machine, fixed=fixed, longest=2048)
    length = plan.length
    assert length is not None
    assert length > 2048
    assert {length, length + 2048} <= {*lengths}  # the longer one did not fit
    assert plan.tokens == 2 * length
    assert plan.source.startswith("roofline")  # a layer that may not fit is not timed
    floats = {"x": jax.ShapeDtypeStruct((2, 8), jnp.float32)}
    with pytest.raises(ValueError, match="longest needs a batch with tokens"):
        zj.plan(build, TX, mesh_of(1), floats, machine, longest=True)
