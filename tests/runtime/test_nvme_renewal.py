"""Records are rebuilt when needed.

That is for another batch shape, after a failure, and after somebody removed them.
"""

import pathlib
import shutil
import stat

import disks
import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from host_offload.disk.errors import SwapError

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}


def build(swap_dir, model=None, **fields):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir) if fields else None, **fields)
    return zj.build_train_step(
        model or toys.small(),
        optax.adamw(1e-2),
        config,
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )


def part(batch, rows):
    return {name: a[:rows] if np.ndim(a) else a for name, a in batch.items()}


def shapes_of(batches):
    return [part(batch, rows) for batch, rows in zip(batches, (32, 16, 32, 16), strict=True)]


def losses_of(program, batches, between=lambda batch: None):
    state, losses = program.init(jax.random.key(0)), []
    for batch in batches:
        between(batch)
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.by_default("direct")
@pytest.mark.parametrize(
    "fields", [{}, {"update_on": "host", "io": "tensorstore"}], ids=["direct", "host"]
)
def test_batches_may_change_their_shape_and_programs_may_be_asked_about_others(tmp_path, fields):
    batches = shapes_of(toys.batches(4))
    with build(tmp_path) as program:
        expected = losses_of(program, batches)
    with build(tmp_path, **ALL, **fields) as program:

        def ask(batch):
            for rows in (32, 16):
                other = part(batch, rows)
                program.memory(other)
                program.check(other)

        np.testing.assert_allclose(losses_of(program, batches, ask), expected, rtol=1e-5)
        np.testing.assert_allclose(losses_of(program, batches), expected, rtol=1e-5)
        made = {records.kind: records for records in program.swap._files_of.values()}
        assert made["activations"].num_bytes == program.layout.disk.declare(
            "activations", 3, ["x"], [jax.ShapeDtypeStruct((16, 5, 16), np.float32)], [("fsdp",)], lifetime="step"
        ).num_bytes  # fmt: skip


@pytest.mark.by_default("40")
@pytest.mark.parametrize("kilobytes", [40, 120, 230])
def test_after_a_full_disk_has_room_init_makes_a_state(tmp_path, kilobytes):
    with (
        disks.mounted(tmp_path / "small", f"size={kilobytes}k") as disk,
        build(disk, toys.layered(), **ALL) as program,
    ):
        with pytest.raises(SwapError, match="ENOSPC"):
            losses_of(program, toys.batches(2))
        disks.resize(disk, "16m")
        losses = losses_of(program, toys.batches(2))
        assert losses == losses_of(program, toys.batches(2))
        assert losses[1] < losses[0]


def test_a_step_that_found_no_room_for_its_gradients_may_be_tried_again(tmp_path):
    with build(tmp_path, **ALL) as program:
        expected = losses_of(program, toys.batches(2))
    with disks.mounted(tmp_path / "small", "size=4m") as disk, build(disk, **ALL) as program:
        state, (first, second) = program.init(jax.random.key(0)), toys.batches(2)
        disks.fill(disk)
        with pytest.raises(SwapError, match="ENOSPC"):
            program.step(state, first)
        disks.resize(disk, "16m")
        state, metrics = program.step(state, first)
        _, more = program.step(state, second)
        assert [float(metrics["loss"]), float(more["loss"])] == expected


@pytest.mark.by_default("params/0-direct")
@pytest.mark.parametrize(
    ("what", "io"),
    [
        ("params/0", "direct"),
        ("", "tensorstore"),
        pytest.param("params/0", "tensorstore", marks=pytest.mark.exhaustive),
        pytest.param("", "direct", marks=pytest.mark.exhaustive),
    ],
)
def test_after_folders_were_removed_init_makes_a_state_in_a_private_folder(tmp_path, what, io):
    program = build(tmp_path, **ALL, io=io)
    expected = losses_of(program, toys.batches(2))
    state = program.init(jax.random.key(0))
    program.swap.engine.flush()
    shutil.rmtree(tmp_path / "zerojax-swap-0" / what)
    with pytest.raises(SwapError):
        program.step(state, toys.batches(1)[0])
    assert losses_of(program, toys.batches(2)) == expected
    assert stat.S_IMODE((tmp_path / "zerojax-swap-0").stat().st_mode) == 0o700
    program.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_folder_of_somebody_elses_files_is_not_emptied(tmp_path):
    (tmp_path / "zerojax-swap-0").mkdir()
    kept = pathlib.Path(tmp_path / "zerojax-swap-0" / "thesis.tex")
    kept.write_text("so far")
    with pytest.raises(SwapError, match="holds files, but no lock"):
        build(tmp_path, **ALL)
    assert kept.read_text() == "so far"
    assert kept.read_text() == "so far"


def test_of_a_plain_model_only_a_few_leaves_are_in_host_memory(tmp_path):
    """Unstacked leaves use the same buffers."""

    def loss(params, batch, key):
        x = batch
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    model = zj.Model(lambda key: [toys.draw(key, (64, 64), leaf) / 8 for leaf in range(12)], loss)
    mesh, batch = zj.make_mesh(fsdp=2, devices=jax.devices()[:2]), np.ones((4, 64), np.float32)
    losses = {}
    for tier in ("device", DISK):
        config = zj.ZeroConfig(opt_state=tier, swap_dir=str(tmp_path) if tier == DISK else None)
        with zj.build_train_step(model, optax.adamw(1e-2), config, mesh) as program:
            state, losses[tier] = program.init(jax.random.key(0)), []
            for step in range(4):
                state, metrics = program.step(state, batch)
                losses[tier].append(float(metrics["loss"]))
                assert step == 0 or tier == "device" or metrics["swap_misses"] == 0
            if tier == DISK:
                report, engine = program.memory(batch), program.swap.engine
                buffers = report.tiers["pinned_host"]["buffers"]
                assert engine.buffer_bytes == 2 * buffers  # of two devices
                assert buffers == sum(report.tiers["nvme"].values()) * 4 // 12
    np.testing.assert_allclose(losses[DISK], losses["device"], rtol=1e-6)
