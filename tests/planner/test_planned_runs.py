"""Plans against real runs: bytes written to disk, and memory of the compiled step.

The memory limits fall step by step.
"""

import dataclasses
from typing import Any

import gpt
import jax
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import aot
from zerojax.costs import traced
from zerojax.machines import machine_of

SEQ, BATCH, STEPS = 16, 4, 10
MACHINE = zj.Machine(
    name="toy", device_bytes=10**9, host_bytes=10**12, disk_bytes=10**12, flops={"fp32": 1e11, "bf16": 1e11},
    memory_rate=1e10, link_up=1e10, link_down=1e10, link_both=2e10, disk_read=3e9, disk_write=3e9, disk_both=3e9,
    host_kernel=2e10,
)  # fmt: skip


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return roofline seconds: these tests only check bytes."""
    monkeypatch.setattr(traced, "is_there", lambda mesh: False)


@pytest.fixture(scope="module")
def model() -> zj.LayeredModel:
    config = dataclasses.replace(
        gpt.PRESETS["tiny"], layers=4, hidden=64, heads=2, seq=SEQ, vocab=256
    )
    return gpt.layered_gpt(config)


def mesh_of(devices: int = 1) -> Any:
    return zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])


def batch_of() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH, SEQ)).astype(np.int32)
    return {"tokens": tokens, "targets": tokens}


DISKS: dict[str, dict[str, Any]] = {
    "in_backward": {
        "params": "nvme",
        "opt_state": "nvme",
        "activations": "nvme",
        "update": "in_backward",
    },
    "after_backward": {
        "params": "nvme",
        "grads": "nvme",
        "opt_state": "nvme",
        "activations": "remat",
    },
    "opt_state_alone": {
        "params": "device",
        "grads": "device",
        "opt_state": "nvme",
        "activations": "save",
    },
    "host_update": {
        "params": "nvme",
        "grads": "device",
        "opt_state": "nvme",
        "update_on": "host",
        "activations": "remat",
    },
    "bf16": {
        "precision": "bf16",
        "params": "nvme",
        "grads": "nvme",
        "opt_state": "nvme",
        "activations": "nvme",
    },
}


@pytest.mark.exhaustive  # by default, steps on a disk compare what they read
@pytest.mark.parametrize("case", DISKS)
@pytest.mark.usefixtures("untimed")
def test_plan_tells_what_ten_steps_write(case, model, tmp_path):
    tx, mesh, batch = optax.adamw(1e-3), mesh_of(), batch_of()
    defaults = {
        "stage": 3,
        "update": None,
        "update_on": "device",
        "moments": "float32",
        "num_microbatches": 1,
    }
    fixed = defaults | {"swap_dir": str(tmp_path)} | DISKS[case]
    made = zj.plan(model, tx, mesh, batch, MACHINE, fixed=fixed)
    assert {name: getattr(made.config, name) for name in DISKS[case]} == DISKS[case]
    written = 0.0
    with zj.build_train_step(model, tx, made.config, mesh) as program:
        state = program.init(jax.random.key(0))
        # Writes may end during the next step, and are then counted there.
        program.swap.engine.flush()
        program.swap.engine.take_stats()
        for _ in range(STEPS):
            state, metrics = program.step(state, batch)
            jax.block_until_ready(state)
            written += float(metrics["swap_write_bytes"])
        program.swap.engine.flush()
        written += program.swap.engine.take_stats().bytes_written
    np.testing.assert_allclose(made.disk_bytes["write"] * STEPS, written, rtol=0.01)


def compiled_bytes(model: Any, config: zj.ZeroConfig, mesh: Any, batch: Any) -> int:
    """Return the CPU memory of a step, including the host tier and its records."""
    with zj.build_train_step(model, optax.adamw(1e-3), config, mesh) as program:
        stats = program.lower(batch).compile().memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [f"{n / 10:.1f}" for n in range(1, 11)])
def test_auto_trains_within_the_device_or_refuses(share, model, tmp_path):
    # The program of the plainest config sets the scale; limits fall below it in ten steps.
    mesh, batch, tx = mesh_of(), batch_of(), optax.adamw(1e-3)
    most = compiled_bytes(model, zj.ZeroConfig(), mesh, batch)
    machine = dataclasses.replace(MACHINE, device_bytes=int(float(share) * most))
    made = error = None
    try:
        made = zj.plan(
            model, tx, mesh, batch, machine, fixed={"swap_dir": str(tmp_path)}, validate=True
        )
    except zj.PlanError as refused:
        error = refused
    if made is None:
        assert error.needed > error.had
        return
    program_bytes = compiled_bytes(model, made.config, mesh, batch) - sum(
        made.bytes["pinned_host"].values()
    )
    assert program_bytes <= float(share) * most
    with zj.build_train_step(model, tx, made.config, mesh) as program:
        _, metrics = program.step(program.init(jax.random.key(0)), batch)
        assert np.isfinite(float(metrics["loss"]))


def test_plan_of_a_batch_that_does_not_divide_says_so(model):
    tokens = np.zeros((6, SEQ), np.int32)
    with pytest.raises(
        ValueError, match=r"batch 6 is not divisible by data x fsdp = 1 x 4, .* use 8"
    ):
        zj.plan(
            model, optax.adamw(1e-3), mesh_of(4), {"tokens": tokens, "targets": tokens}, MACHINE
        )


def test_machine_of_gpus_that_are_not_there_is_known():
    for name, chip in aot.CHIPS.items():
        assert machine_of(chip.device_kinds[0]) == name
