"""Frozen weights in checkpoints: written once, linked afterwards.

They are restored and imported bit for bit into every tier.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from host_offload.disk import SwapError
from zerojax.checkpoint import DamagedError, inspect

FROZEN = {
    "embed": {"table": True, "odd": False},
    "block": {"w1": True, "b1": True, "w2": False, "scale": False, "gate": False},
}
HOST, DISK = "pinned_host", "nvme"
TIERS = {
    "device": {},
    "host": {"params": HOST, "opt_state": HOST},
    "base_on_disk": {"frozen": DISK},
}
TIERS["all_on_disk"] = {"params": DISK, "opt_state": DISK}


def build(tmp_path, named=FROZEN, /, tx=None, **fields):
    (swap := tmp_path / "swap").mkdir(exist_ok=True)
    config = zj.ZeroConfig(
        precision="bf16", swap_dir=str(swap) if DISK in fields.values() else None, **fields
    )
    model, mesh = (
        dataclasses.replace(toys.layered(), frozen=named),
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )
    return zj.build_train_step(model, tx or optax.adamw(1e-2), config, mesh)


def weights(program, state):
    return jax.device_get(dict(program.iter_params(state)))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def files(folder, wanted):
    """Return a step's records in folders whose name contains `word`, by relative path."""
    root = pathlib.Path(folder) / "state"
    return {
        str(p.relative_to(root)): p for p in root.rglob("c.*") if wanted in str(p.relative_to(root))
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved_from", TIERS)
@pytest.mark.parametrize("restored_to", TIERS)
def test_a_base_is_written_once_and_restored_bit_for_bit(restored_to, saved_from, tmp_path):
    directory, batch = tmp_path / "run", toys.batches(1)[0]
    with build(tmp_path, **TIERS[saved_from]) as program, zj.Checkpointer(directory) as ckpt:
        state = program.init(jax.random.key(0))
        for _ in range(2):
            state, _ = jax.block_until_ready(program.step(state, batch))
            ckpt.save(program, state)
            ckpt.wait()
        saved = weights(program, state)
        first, second = (files(directory / str(step), "frozen") for step in (1, 2))
        assert first.keys() == second.keys()
        assert sum(p.stat().st_size for p in first.values()) >= 2 * sum(
            np.prod(leaf.shape) for leaf in program.layout.frozen
        )
        assert all(os.path.samefile(first[name], second[name]) for name in first)
        trained = [files(directory / str(step), "") for step in (1, 2)]
        assert not any(
            os.path.samefile(path, trained[1][name])
            for name, path in trained[0].items()
            if name not in first
        )
    with build(tmp_path, **TIERS[restored_to]) as program, zj.Checkpointer(directory) as ckpt:
        state = ckpt.restore(program)
        assert_same(weights(program, state), saved)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.frozen)} == {"bfloat16"}
        state, _ = jax.block_until_ready(program.step(state, batch))
        ckpt.save(program, state)
        ckpt.wait()
        third = files(directory / "3", "frozen")
        if {saved_from, restored_to} <= {
            "device",
            "host",
        }:  # the run continues with the restored base
            assert all(os.path.samefile(first[name], third[name]) for name in first)
        # Another state's base is written next to the checkpoint's base, which stays unchanged.
        program.init(jax.random.key(5))
        assert_same(weights(program, ckpt.restore(program, 2)), saved)


def test_another_base_and_a_damaged_one_are_written_anew(tmp_path):
    directory = tmp_path / "run"
    with build(tmp_path, tx=optax.sgd(1e-2)) as program, zj.Checkpointer(directory) as ckpt:
        state = program.init(jax.random.key(0))

        def save(state, step):
            ckpt.save(program, dataclasses.replace(state, step=state.step + step))
            ckpt.wait()
            return files(directory / str(step), "frozen.layers")

        one = save(state, 1)
        other = dataclasses.replace(state, frozen=jax.tree.map(lambda a: a + 1, state.frozen))
        two = save(other, 2)
        assert not any(os.path.samefile(one[name], two[name]) for name in one)
        base = sum(2 * np.prod(leaf.shape) for leaf in program.layout.frozen)
        assert re.search(rf"total frozen +{base:,}\n", inspect(directory / "2").text)
        three = save(other, 3)
        assert all(os.path.samefile(two[name], three[name]) for name in two)
        name, path = next(iter(three.items()))
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        four = save(other, 4)
        assert [n for n in four if not os.path.samefile(three[n], four[n])] == [name]
        with pytest.raises(DamagedError):
            ckpt.restore(program, 3)
        assert_same(weights(program, ckpt.restore(program, 4)), weights(program, other))


@pytest.mark.by_default("base_on_disk")
@pytest.mark.parametrize("tier", TIERS)
def test_weights_of_a_file_fill_the_base_in_every_tier(tier, tmp_path):
    directory, path = tmp_path / "run", tmp_path / "gpt.safetensors"
    with build(tmp_path) as program, zj.Checkpointer(directory) as ckpt:
        state = program.init(jax.random.key(1))
        saved = weights(program, state)
        ckpt.save(program, state)
        ckpt.wait()
    zj.export_safetensors(directory, path)
    with build(tmp_path, **TIERS[tier]) as program:
        state = zj.import_params(program, path, key=jax.random.key(0))
        assert_same(weights(program, state), saved)
        if tier == "base_on_disk":
            check_saving_takes_no_room(program, state, tmp_path)
        assert float(program.eval(state, toys.batches(1)[0])) > 0


def check_saving_takes_no_room(program, state, tmp_path):
    """Save a base on disk twice, on a disk without space for a second copy."""
    swap = tmp_path / "swap"
    before = held_bytes(swap)
    with pytest.MonkeyPatch.context() as patch, zj.Checkpointer(tmp_path / "linked") as ckpt:
        patch.setattr(os, "posix_fallocate", full)
        for step in (1, 2):
            ckpt.save(program, dataclasses.replace(state, step=state.step + step))
            ckpt.wait()
    records = {file.stat().st_ino for file in swap.rglob("c.*.0")}
    for step in ("1", "2"):
        assert {
            path.stat().st_ino for path in files(tmp_path / "linked" / step, "disk.frozen").values()
        } == records
    assert held_bytes(swap) == before


def full(fd, offset, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def held_bytes(folder, pattern="*"):
    """Return the bytes that a folder's files take on disk, counting each file once."""
    files = {
        (found := file.stat()).st_ino: found.st_blocks
        for file in folder.rglob(pattern)
        if file.is_file()
    }
    return 512 * sum(files.values())


def test_a_base_on_disk_is_linked_from_its_checkpoint_and_outlives_a_new_state_without_room(
    tmp_path,
):
    (swap := tmp_path / "swap").mkdir()
    first, second = toys.batches(2)
    with (
        build(tmp_path, tx=optax.sgd(1e-2), frozen=DISK) as program,
        zj.Checkpointer(tmp_path / "run") as ckpt,
    ):
        state, _ = program.step(program.init(jax.random.key(0)), first)
        ckpt.save(program, state)
        ckpt.wait()
        before = held_bytes(swap)
        with no_room() as patch:
            with pytest.raises(
                SwapError, match=r"in addition to a record that checkpoints hold.*ENOSPC"
            ):
                program.init(jax.random.key(1))
            patch.setattr(os, "link", other_file_system)
            with pytest.raises(
                SwapError, match=r"in addition to a record that checkpoints hold.*ENOSPC"
            ):
                ckpt.restore(program)
        assert held_bytes(swap) == before
        state, metrics = program.step(state, second)  # the last state still exists
        expected = float(metrics["loss"]), weights(program, state)
        records = {
            path.stat().st_ino: path.read_bytes()
            for path in files(tmp_path / "run/1", "disk.frozen").values()
        }
        with no_room():
            state = ckpt.restore(program)
        assert {path.stat().st_ino for path in swap.rglob("c.*.0")} == records.keys()
        saved = weights(program, state)
        state, metrics = program.step(state, second)
        assert float(metrics["loss"]) == expected[0]
        assert_same(weights(program, state), expected[1])
        program.init(jax.random.key(1))  # there is space: its base is written to other files
        program.swap.engine.flush()
        assert not {path.stat().st_ino for path in swap.rglob("c.*.0")} & records.keys()
        again = files(tmp_path / "run/1", "disk.frozen").values()
        assert {path.stat().st_ino: path.read_bytes() for path in again} == records
    before = held_bytes(tmp_path, "c.*.0")
    with (
        build(tmp_path, tx=optax.sgd(1e-2), frozen=DISK) as program,
        zj.Checkpointer(tmp_path / "run") as ckpt,
    ):
        with no_room():
            state = ckpt.restore(program)
        assert {path.stat().st_ino for path in swap.rglob("c.*.0")} == records.keys()
        assert held_bytes(tmp_path, "c.*.0") == before > 0
        assert_same(weights(program, state), saved)


@contextlib.contextmanager
def no_room():
    """Make every reservation of space fail, on a full disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr("host_offload.disk.store._free_bytes", lambda path: 0)
        yield patch


def other_file_system(source, target):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.exhaustive
def test_other_leaves_frozen_are_restored_where_the_optimizer_state_allows_it(tmp_path):
    directory = tmp_path / "run"
    with build(tmp_path, False, tx=optax.sgd(1e-2)) as program, zj.Checkpointer(directory) as ckpt:
        state = program.init(jax.random.key(0))
        saved = weights(program, state)
        ckpt.save(program, state)
    with build(tmp_path, tx=optax.sgd(1e-2)) as program, zj.Checkpointer(directory) as ckpt:
        restored = weights(program, ckpt.restore(program))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1 / 256), restored, saved
        )  # the base in 16 bits
    refused = pytest.raises(
        zj.CheckpointError, match=r"no opt_state\[0\].mu\['blocks'\]\['scale'\]"
    )
    with build(tmp_path) as program, zj.Checkpointer(directory) as ckpt, refused:
        ckpt.restore(program)


@pytest.mark.exhaustive
def test_averages_are_exported_beside_the_base_that_needs_none(tmp_path):
    directory, path = tmp_path / "run", tmp_path / "ema.safetensors"
    with (
        build(tmp_path, tx=optax.chain(optax.adamw(1e-2), zj.Ema(0.9))) as program,
        zj.Checkpointer(directory) as ckpt,
    ):
        state = program.init(jax.random.key(0))
        state, _ = jax.block_until_ready(program.step(state, toys.batches(1)[0]))
        ckpt.save(program, state)
        ckpt.wait()
        averages = jax.device_get(dict(program.iter_params(state, ema=True)))
        zj.export_safetensors(directory, path, ema=True)
        imported = zj.import_params(program, path, key=jax.random.key(0))
        assert_same(weights(program, imported), averages)


def test_a_checkpoint_of_other_frozen_weights_names_them_and_the_repair(tmp_path):
    def build(frozen):
        init = lambda key: {"a": jnp.ones(8), "b": jnp.ones(8)}  # noqa: E731
        loss = lambda p, batch, key: jnp.mean(batch["x"] @ (p["a"] * p["b"]))  # noqa: E731
        model = zj.Model(init, loss, frozen=frozen)
        return zj.build_train_step(
            model, optax.adam(0.1), zj.ZeroConfig(stage=1), zj.make_mesh(fsdp=8)
        )

    program = build({"a": True, "b": False})
    with zj.Checkpointer(tmp_path / "run") as checkpoint:
        checkpoint.save(program, program.init(jax.random.key(0)))
        checkpoint.wait()
        words = r"frozen only here: weights\['b'\]; frozen only in the checkpoint: weights\['a'\]. Restore it with the same"
        with pytest.raises(zj.CheckpointError, match=words):
            checkpoint.restore(build({"a": False, "b": True}))
        with pytest.raises(zj.CheckpointError, match="frozen only in the checkpoint"):
            checkpoint.restore(build(None))
