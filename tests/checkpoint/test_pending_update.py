"""A checkpoint that holds a pending update is restored into any program, and is replaced."""

import errno
import os
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.checkpoint.manifest import SavedState

HOST = "pinned_host"
DISK = "nvme"
ON_DISK = dict.fromkeys(("params", "grads", "opt_state"), DISK)
ON_HOST = dict.fromkeys(("params", "grads", "opt_state"), HOST)
DELAYED = {"update_on": "host", "delayed_update": True, **ON_HOST}


def build(folder: pathlib.Path, tx: Any = None, model: Any = None, **fields: Any) -> zj.Program:
    (swap := folder / "swap").mkdir(exist_ok=True)
    config = zj.ZeroConfig(**{"stage": 3, "clip_norm": 1.2, "swap_dir": swap, **fields})
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    return zj.build_train_step(model or toys.layered(), tx or toys.optimizer(), config, mesh)


def train(program: zj.Program, state: Any, data: list[Any]) -> tuple[Any, list[float]]:
    losses = []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def read(program: zj.Program, state: Any) -> Any:
    return {name: jax.device_get(tree) for name, tree in program.iter_params(state)}


def assert_close(actual: Any, expected: Any) -> None:
    """Assert differences of at most 1e-6 of each leaf's largest number.

    XLA for CPUs may fuse a product and a sum in one program that it rounds separately in another.
    """

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))

    jax.tree.map(check, actual, expected)


def save_pending(folder: pathlib.Path, **kwargs: Any) -> tuple[list[float], Any]:
    """Save step 3 with a pending update; return the next losses, and the updated weights."""
    data = toys.batches(5)
    with build(folder, update="in_forward", **kwargs) as program:
        state, _ = train(program, program.init(jax.random.key(0)), data[:3])
        with zj.Checkpointer(folder / "saved") as checkpointer:
            checkpointer.save(program, state)
        with SavedState(str(folder / "saved" / "3" / "state")) as saved:
            assert not saved.is_settled
        state = program.settle(state)
        weights = read(program, state)
        _, losses = train(program, state, data[3:])
    return losses, weights


def go_on(folder: pathlib.Path, **kwargs: Any) -> tuple[list[float], Any]:
    """Restore step 3; return the next losses, and the restored weights."""
    with build(folder, **kwargs) as program:
        with zj.Checkpointer(folder / "saved") as checkpointer:
            state = checkpointer.restore(program)
        weights = read(program, state)
        _, losses = train(program, state, toys.batches(5)[3:])
    return losses, weights


TARGETS: dict[str, dict[str, Any]] = {
    "disk": {"update": "after_backward", **ON_DISK},
    "host": {"update": "after_backward", **ON_HOST, "precision": "bf16"},
    "opt_state_on_disk": {"grads": HOST, "opt_state": DISK, "model": toys.small()},
    "delayed": DELAYED,
    "in_backward": {"update": "in_backward", "clip_norm": None, **ON_HOST},
    "stage_1": {"stage": 1, "opt_state": HOST},
    "all_on_device": {"update": "after_backward"},
    "fraction": {"params": HOST, "opt_state": HOST, "opt_state_device_fraction": 0.4},
}


@pytest.mark.by_default("opt_state_on_disk")
@pytest.mark.parametrize("fields", TARGETS.values(), ids=TARGETS)
def test_another_program_applies_a_pending_update_as_it_restores(fields, tmp_path):
    same = {name: fields[name] for name in ("clip_norm", "precision", "model") if name in fields}
    losses, weights = save_pending(tmp_path, **ON_DISK, **same)
    actual, restored = go_on(tmp_path, **fields)
    assert_close(restored, weights)
    if "delayed_update" not in fields:
        np.testing.assert_allclose(actual, losses, rtol=1e-3 if "precision" in fields else 1e-6)


@pytest.mark.exhaustive  # by default test_update_in_forward.py has Muon
@pytest.mark.parametrize(
    "tx", [optax.contrib.muon(1e-2), optax.adafactor(1e-2)], ids=["muon", "adafactor"]
)
def test_optimizers_that_combine_elements_are_applied_too(tx, tmp_path):
    kwargs = {"tx": tx, "model": toys.small()}
    losses, weights = save_pending(tmp_path, **ON_HOST, **kwargs)
    actual, restored = go_on(tmp_path, update="after_backward", opt_state=DISK, **kwargs)
    assert_close(restored, weights)
    np.testing.assert_allclose(actual, losses, rtol=1e-6)


@pytest.mark.exhaustive
def test_an_average_and_moments_in_bfloat16_are_updated(tmp_path):
    kwargs = {"tx": optax.chain(optax.adamw(1e-2), zj.Ema(0.9)), "moments": "bfloat16"}
    losses, weights = save_pending(tmp_path, **ON_DISK, **kwargs)
    actual, restored = go_on(tmp_path, **ON_HOST, **kwargs)
    assert_close(restored, weights)
    np.testing.assert_allclose(actual, losses, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved_as", ["in_forward", "after_backward"])
def test_a_device_applies_what_the_host_would_have_updated(saved_as, tmp_path):
    losses, weights = save_pending(tmp_path, **ON_HOST, update_on="host")
    actual, restored = go_on(tmp_path, **ON_HOST, update=saved_as)
    if saved_as == "after_backward":
        assert_close(restored, weights)
    np.testing.assert_allclose(actual, losses, rtol=1e-6)


def test_an_optimizer_with_other_scalars_is_refused(tmp_path):
    save_pending(tmp_path, model=toys.small(), **ON_DISK)
    with (
        build(tmp_path, model=toys.small(), **ON_HOST, moments="bfloat16") as program,
        zj.Checkpointer(tmp_path / "saved") as checkpointer,
        pytest.raises(zj.CheckpointError, match=r"restore it with update='in_forward' .* moments"),
    ):
        checkpointer.restore(program)


def test_a_delayed_update_is_refused_elsewhere(tmp_path):
    program = build(tmp_path, model=toys.small(), **DELAYED)
    state, _ = train(program, program.init(jax.random.key(0)), toys.batches(1))
    with zj.Checkpointer(tmp_path / "saved") as checkpointer:
        checkpointer.save(program, state)
    for update in ("after_backward", "in_forward"):
        with (
            zj.Checkpointer(tmp_path / "saved") as checkpointer,
            pytest.raises(zj.CheckpointError, match="restore it with delayed_update=True"),
        ):
            checkpointer.restore(build(tmp_path, model=toys.small(), update=update, **ON_HOST))


# --- the same step again --------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path):
    with build(tmp_path, model=toys.small(), update="in_forward", **ON_DISK) as program:
        yield program


def is_settled(folder: pathlib.Path) -> bool:
    with SavedState(str(folder / "state")) as saved:
        saved.check(checksums=True)
        return saved.is_settled


def test_a_settled_state_replaces_the_checkpoint_with_its_update(program, tmp_path):
    saved = tmp_path / "saved"
    state, _ = train(program, program.init(jax.random.key(0)), toys.batches(2))
    with zj.Checkpointer(saved) as checkpointer:
        assert checkpointer.save(program, state)
        assert not checkpointer.save(program, state, force=True)
        assert not is_settled(saved / "2")
        state = program.settle(state)
        assert checkpointer.save(program, state)
        checkpointer.wait()
        assert is_settled(saved / "2")
        assert not checkpointer.save(program, state, force=True)
        assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["2"]
    weights = read(program, state)
    zj.export_safetensors(saved, tmp_path / "out.safetensors")
    with zj.Checkpointer(saved) as checkpointer:
        restored = checkpointer.restore(program)
    jax.tree.map(np.testing.assert_array_equal, read(program, restored), weights)


class Position:
    """An iterator that only has a position."""

    def get_state(self) -> dict[str, int]:
        return {"next": 2}

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_replacement_may_not_lose_the_position_of_the_data(program, tmp_path):
    state, _ = train(program, program.init(jax.random.key(0)), toys.batches(1))
    data = Position()
    with zj.Checkpointer(tmp_path / "saved") as checkpointer:
        assert checkpointer.save(program, state, data=data)
        state = program.settle(state)
        with pytest.raises(zj.IteratorError, match=r"position of the iterator .* save with data="):
            checkpointer.save(program, state)
        assert checkpointer.save(program, state, data=data)
        checkpointer.restore(program, data=data)
    assert data.state == {"next": 2}


@pytest.mark.by_default("rename")
@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_failed_replacement_leaves_one_of_both(program, tmp_path, monkeypatch, broken):
    """And the next save of the same state replaces it."""
    saved = tmp_path / "saved"
    state, _ = train(program, program.init(jax.random.key(0)), toys.batches(2))
    rename, fsync = os.rename, os.fsync

    def fail(*args: Any, **kwargs: Any) -> Any:
        real = rename if broken == "rename" else fsync
        if broken == "write" or str(args[0]).endswith("2.next"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    with zj.Checkpointer(saved, is_async=False) as checkpointer:
        checkpointer.save(program, state)
        state = program.settle(state)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename" if broken == "rename" else "fsync", fail)
            with pytest.raises(zj.CheckpointError, match="EIO"):
                checkpointer.save(program, state)
        names = sorted(path.name for path in saved.iterdir() if path.name[0] == "2")
        assert names == (["2"] if broken == "write" else ["2.next"])
        assert checkpointer.all_steps() == [2]
        # The renamed one had appeared.
        assert checkpointer.save(program, state) == (broken == "write")
        assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["2"]
        assert is_settled(saved / "2")


@pytest.mark.by_default("both")
@pytest.mark.parametrize("moment", ["both", "new"])
def test_a_kill_while_it_is_replaced_leaves_the_new_one(program, tmp_path, moment):
    saved = tmp_path / "saved"
    state, _ = train(program, program.init(jax.random.key(0)), toys.batches(2))
    with zj.Checkpointer(saved) as checkpointer:
        checkpointer.save(program, state)
    with zj.Checkpointer(tmp_path / "other") as checkpointer:
        state = program.settle(state)
        checkpointer.save(program, state)
    (tmp_path / "other" / "2").rename(saved / "2.next")
    if moment == "new":
        (saved / ".deleted.1").mkdir()
        (saved / "2").rename(saved / ".deleted.1" / "2")
    with zj.Checkpointer(saved) as checkpointer:
        assert checkpointer.all_steps() == [2]
        state, _ = train(program, checkpointer.restore(program), toys.batches(1))
        checkpointer.save(program, state)
    names = sorted(path.name for path in saved.iterdir() if path.is_dir())
    assert names == (["2", "2.set-aside", "3"] if moment == "both" else ["2", "3"])
    assert is_settled(saved / "2")
