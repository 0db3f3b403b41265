"""An update in forward with records on disk: the same numbers, and the planned reads and writes."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

DISK = "nvme"
HOST = "pinned_host"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK}
CASES: dict[str, dict[str, Any]] = {
    "small": {**ALL, "clip_norm": 0.4, "model": toys.small()},
    "all": {**ALL, "clip_norm": 1.2},
    "grads": {"params": HOST, "grads": DISK, "opt_state": HOST, "clip_norm": 1.2},
    "masters": {**ALL, "precision": "bf16", "clip_norm": 1.2, "num_microbatches": 2},
    "opt_state": {"params": HOST, "grads": HOST, "opt_state": DISK, "clip_norm": 1.2},
    "activations": {**ALL, "activations": DISK, "gather_ahead": True, "clip_norm": 1.2},
    "overflows": {
        **ALL,
        "precision": "fp16",
        "loss_scaling": zj.LossScaling(initial=2.0**20),
        "prefetch_distance": 2,
        "clip_norm": 1.2,
    },
    "no_prefetch": {**ALL, "prefetch_distance": 0},
}


def build(
    update: str, folder: pathlib.Path, tx: Any = None, model: Any = None, **fields: Any
) -> zj.Program:
    config = zj.ZeroConfig(stage=3, update=update, swap_dir=folder, **fields)
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    return zj.build_train_step(model or toys.layered(), tx or toys.optimizer(), config, mesh)


def train(program: zj.Program, state: Any, data: list[Any]) -> tuple[Any, list[dict[str, float]]]:
    """Return the state after a step with each batch, and the steps' metrics.

    The bytes read include what a step reads ahead for the next one. A step does not wait for these
    reads, so its own metric counts only the reads that have ended by then.
    """
    rows = []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        row = {name: float(value) for name, value in metrics.items()}
        if program.swap is not None:
            program.swap.engine.flush()
            row["swap_read_bytes"] += program.swap.engine.take_stats().bytes_read
        rows.append(row)
    return state, rows


def numbers_of(update: str, case: dict[str, Any], folder: pathlib.Path, tx: Any = None) -> Any:
    """Train, evaluate, read and settle in turns; return all numbers that this gives."""
    data = toys.batches(7)
    if "loss_scaling" in case:
        data[1] = {**data[1], "weight": np.float32(np.nan)}
    with build(update, folder, tx, **case) as program:
        state, rows = train(program, program.init(jax.random.key(0)), data[:4])
        losses = [float(program.eval(state, data[6]))]
        read = dict(jax.device_get(list(program.iter_params(state))))
        state = program.settle(state)
        losses.append(float(program.eval(state, data[6])))
        settled = dict(jax.device_get(list(program.iter_params(state))))
        state, more = train(program, state, data[4:6])
        rows += more
        planned = program.operations(data[0])
        if update == "in_forward":
            for row in rows[1:4]:  # the first step also reads ahead for the second
                assert row["swap_read_bytes"] == 4 * planned.moved("read")
                if case.get("prefetch_distance", 1) and not case.get("gather_ahead"):
                    assert row["swap_misses"] == 0
    names = ("loss", "grad_norm", "skipped_steps")
    losses += [row[name] for row in rows for name in names if name in row]
    return losses, read, settled


@pytest.mark.by_default("small")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_an_update_after_backward(case, tmp_path):
    losses, read, settled = numbers_of("in_forward", case, tmp_path)
    expected_losses, expected, _ = numbers_of("after_backward", case, tmp_path)
    np.testing.assert_array_equal(losses, expected_losses)
    jax.tree.map(np.testing.assert_array_equal, settled, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), read, expected)


@pytest.mark.exhaustive
def test_averages_of_the_weights_on_disk(tmp_path):
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    losses, _, settled = numbers_of("in_forward", CASES["all"], tmp_path, tx)
    expected_losses, _, expected = numbers_of("after_backward", CASES["all"], tmp_path, tx)
    np.testing.assert_array_equal(losses, expected_losses)
    jax.tree.map(np.testing.assert_array_equal, settled, expected)


@pytest.mark.by_default("disk_to_host")
@pytest.mark.parametrize("saved_on", [DISK, HOST], ids=["disk_to_host", "host_to_disk"])
def test_checkpoints_move_a_pending_update_between_tiers(saved_on, tmp_path):
    data = toys.batches(5)
    tiers = {
        DISK: {**ALL, "clip_norm": 0.4, "model": toys.small()},
        HOST: {**dict.fromkeys(ALL, HOST), "clip_norm": 0.4, "model": toys.small()},
    }
    restored_on = HOST if saved_on == DISK else DISK
    (swap := tmp_path / "swap").mkdir()
    with build("in_forward", swap, **tiers[saved_on]) as program:
        state, _ = train(program, program.init(jax.random.key(0)), data[:3])
        with zj.Checkpointer(tmp_path / "saved") as checkpointer:
            checkpointer.save(program, state)
        _, expected = train(program, state, data[3:])
    with (
        build("in_forward", swap, **tiers[restored_on]) as other,
        zj.Checkpointer(tmp_path / "saved") as checkpointer,
    ):
        _, actual = train(other, checkpointer.restore(other), data[3:])
    assert [row["loss"] for row in actual] == [row["loss"] for row in expected]
