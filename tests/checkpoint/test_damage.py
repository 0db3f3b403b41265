"""Damage to a checkpoint, a folder or a disk is reported.

Training continues, and older checkpoints stay as they were.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest
import toys
from disks import ext4, fill, lose_data, mounted
from matrix_of_checkpoints import DISK, HOST, assert_same, numbers, whole
from test_resume import build

import zerojax as zj
from host_offload.disk.snapshot import Snapshot
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.inspection import inspect
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.program_state import begin_save

pytestmark = pytest.mark.xdist_group("damage")  # which share programs
DATA = toys.batches(6)
ON_DISK = {"stage": 3, "params": DISK, "opt_state": DISK}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with build(ON_DISK, tmp_path_factory.mktemp("swap") / "s") as made:
        yield made


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    with build({"stage": 1}, tmp_path_factory.mktemp("unused")) as made:
        yield made


@pytest.fixture(scope="module")
def saved_once(program, tmp_path_factory):
    """Save steps 1 and 2; return the folder and the contents of step 1."""
    folder = tmp_path_factory.mktemp("saved") / "c"
    with zj.Checkpointer(folder) as ckpt:
        state = program.init(jax.random.key(0))
        for batch in DATA[:2]:
            state, _ = program.step(state, batch)
            ckpt.save(program, state)
    return folder, numbers(folder, 1)


@pytest.fixture
def saved(saved_once, tmp_path):
    """Return a copy of the folder, and the contents of step 1."""
    folder, contents = saved_once
    return shutil.copytree(folder, tmp_path / "c"), contents


def records(folder: pathlib.Path, step: int) -> list[pathlib.Path]:
    return sorted((folder / str(step) / "state").glob("*/*/c.*"))


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose_manifest(path: pathlib.Path) -> None:
    (path.parents[2] / "manifest.0.json").unlink()


def change_manifest(path: pathlib.Path) -> None:
    manifest = path.parents[2] / "manifest.0.json"
    manifest.write_text(manifest.read_text().replace('"first": 0', '"first": 1', 1))


def lose_state(path: pathlib.Path) -> None:
    os.rename(path.parents[2], path.parents[2].with_name("lost"))


DAMAGE = {
    "flipped": (flip, r"record \d+ of .*: its checksum is \w+, and \w+ was saved"),
    "truncated": (cut, r"has \d+ bytes, and the record \d+"),
    "removed": (pathlib.Path.unlink, r"removed: .*c\.\d+\.0"),
    "no manifest": (lose_manifest, "lost its manifest.0.json"),
    "another manifest": (change_manifest, "it was changed since"),
    "no state": (lose_state, "ENOENT"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(program, saved, name, caplog, tmp_path):
    folder, expected = saved
    damage, told = DAMAGE[name]
    damage(records(folder, 2)[5])
    with zj.Checkpointer(folder) as ckpt:
        state = program.init(jax.random.key(1))
        with pytest.raises(DamagedError, match=told):
            ckpt.restore(program, 2)
        program.eval(state, DATA[0])  # the state on disk is unchanged
        assert ckpt.latest_step() == 1
        caplog.clear()
        state = ckpt.restore(program)
        assert "step 2 is passed over" in caplog.text
        assert int(state.step) == 1
        with zj.Checkpointer(tmp_path / "again") as again:
            again.save(program, state)
        assert_same(numbers(tmp_path / "again", 1), expected)


@pytest.mark.by_default("flipped")
@pytest.mark.parametrize("name", DAMAGE)
def test_training_goes_on_in_place_of_a_damaged_checkpoint(program, saved, name):
    folder, expected = saved
    DAMAGE[name][0](records(folder, 2)[5])
    with zj.Checkpointer(folder) as ckpt:
        state, _ = program.step(ckpt.restore(program), DATA[1])
        assert ckpt.save(program, state)  # in place of the damaged checkpoint
        ckpt.wait()
        assert int(ckpt.restore(program, 2).step) == 2
        assert_same(numbers(folder, 1), expected)


def test_an_unreadable_sector_is_damage(program, tmp_path, caplog):
    """Each of these cases once read mapped files, and ended the process with SIGBUS."""
    with ext4(tmp_path / "disk", 64 << 20) as disk, zj.Checkpointer(disk / "c") as ckpt:
        state = program.init(jax.random.key(0))
        for batch in DATA[:2]:
            state, _ = program.step(state, batch)
            ckpt.save(program, state)
        ckpt.wait()
        expected = numbers(disk / "c", 1)
        zj.export_safetensors(disk / "c" / "2", disk / "weights")
        lose_data(disk, [*records(disk / "c", 2), disk / "weights"])
        told = r"Input/output error at byte 0: '.*/2/state/.*/c\.\d+\.0'"
        with pytest.raises(DamagedError, match=told):
            ckpt.restore(program, 2)
        with pytest.raises(DamagedError, match=told):
            zj.export_safetensors(disk / "c" / "2", tmp_path / "out")
        assert re.search(told, inspect(disk / "c" / "2", verify=True).text)
        with pytest.raises(
            CheckpointError,
            match=r"EIO \(5\), Input/output error at byte \d+, .*weights; the disk failed",
        ):
            zj.import_params(program, disk / "weights", key=jax.random.key(0))
        caplog.clear()
        state = ckpt.restore(program)
        assert "step 2 is passed over" in caplog.text
        with zj.Checkpointer(tmp_path / "again") as again:
            again.save(program, state)
        assert_same(numbers(tmp_path / "again", 1), expected)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupts_in_a_save_leave_no_snapshot_open(program, tmp_path, monkeypatch, number):
    """Otherwise the next `init` or restore would wait for it forever."""
    real = begin_save

    def interrupted(*args, **kwargs):
        saving = real(*args, **kwargs)
        for _ in range(number):
            os.kill(os.getpid(), signal.SIGINT)
        return saving

    with zj.Checkpointer(tmp_path / "c") as ckpt:
        state = program.init(jax.random.key(0))
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a worker of xdist ignores it
        try:
            monkeypatch.setattr("zerojax.checkpoint.orbax.begin_save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(program, state)
        finally:
            signal.signal(signal.SIGINT, before)
        ckpt.wait()
        assert all(snapshot.is_closed for snapshot in program.swap._snapshots)
        assert int(ckpt.restore(program).step) == 0


def test_a_record_that_rotted_in_the_swap_folder_fails_the_save(program, tmp_path):
    """The damaged record would be linked into the checkpoint that replaces the last good one."""
    with zj.Checkpointer(tmp_path / "c", max_to_keep=1, is_async=False) as ckpt:
        state = program.init(jax.random.key(0))
        ckpt.save(program, state)
        state, _ = program.step(state, DATA[0])
        # writes outlast the step: a record that is damaged before its write is intact after it
        program.swap.engine.flush()
        (record,) = pathlib.Path(program.config.swap_dir).rglob("opt_state/1/c.1.0")
        data = bytearray(record.read_bytes())
        data[100] ^= 1
        # the same file: only the other buffer, from the previous step, has two names
        with open(record, "r+b") as file:
            file.write(data)
        with pytest.raises(
            CheckpointError, match=r"opt_state/1/c\.1\.0: its checksum is \w+, and \w+ was written"
        ):
            ckpt.save(program, state)
        assert ckpt.all_steps() == [0]
        state, _ = program.step(ckpt.restore(program), DATA[0])
        assert ckpt.save(program, state)


@pytest.mark.by_default("EMFILE")
@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.EACCES, errno.ENOMEM], ids=lambda number: errno.errorcode[number]
)
def test_what_cannot_be_read_now_is_no_damage(program, saved, number, monkeypatch, caplog):
    """No step is skipped, and the next save sets none aside.

    A process with more files or memory can read the checkpoint.
    """
    folder, _ = saved
    name, real = errno.errorcode[number], os.open

    def refused(path, *args, **kwargs):
        if "/2/state/" in os.fspath(path):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    with zj.Checkpointer(folder) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            for call in (lambda: ckpt.restore(program), lambda: ckpt.restore(program, 2)):
                with pytest.raises(
                    CheckpointError, match=rf"reading .*/2/state failed: {name} .*; "
                ) as caught:
                    call()
                assert not isinstance(caught.value, DamagedError)
            with pytest.raises(CheckpointError, match=name):
                inspect(folder, verify=True)
        assert "passed over" not in caplog.text
        state = ckpt.restore(program)
        assert int(state.step) == 2
        state, _ = program.step(state, DATA[2])
        assert ckpt.save(program, state)
        ckpt.wait()
        assert ckpt.all_steps() == [1, 2, 3]


def test_where_all_are_damaged_the_oldest_is_told(program, saved):
    folder, _ = saved
    for step in (1, 2):
        records(folder, step)[0].unlink()
    with zj.Checkpointer(folder) as ckpt:
        assert ckpt.latest_step() is None
        with pytest.raises(DamagedError, match="c/1/state is damaged"):
            ckpt.restore(program)


def test_a_checkpoint_without_verification_is_compared_by_size(program, saved):
    folder, _ = saved
    flip(records(folder, 2)[5])
    with zj.Checkpointer(folder, verify=False) as ckpt:
        assert int(ckpt.restore(program).step) == 2
        cut(records(folder, 2)[5])
        with pytest.raises(DamagedError):
            ckpt.restore(program, 2)


# --- another model, another run -------------------------------------------------------------------


def test_a_checkpoint_of_another_model_names_the_leaves_that_differ(program, saved, tmp_path):
    folder, _ = saved
    state = program.init(jax.random.key(0))
    wide = zj.LayeredModel(
        3, toys.init_embed, toys.embed, lambda k: toys.init_block(k) | {"w1": np.ones((16, 48)), "extra": np.ones(2)},
        toys.block, lambda k: {"bias": np.zeros(24)}, toys.head,
    )  # fmt: skip
    with (
        zj.Checkpointer(folder) as ckpt,
        build({"stage": 3}, tmp_path, model=wide, tx=optax.sgd(1e-3)) as other,
    ):
        with pytest.raises(CheckpointError) as raised:
            ckpt.restore(other)
        for part in (
            "weights['blocks']['w1'] [3, 16, 40], and here it is [3, 16, 48]",
            "no weights['blocks']['extra'] [3, 2]",
            "which this program's state does not have",
        ):
            assert part in str(raised.value)
        assert not isinstance(raised.value, DamagedError)
        with pytest.raises(
            CheckpointError, match="has no checkpoint of step 7: its steps are \\[1, 2\\]"
        ):
            ckpt.restore(other, 7)
    unrolled = build({"stage": 3}, tmp_path, model=toys.unrolled())
    with (
        zj.Checkpointer(folder) as ckpt,
        pytest.raises(CheckpointError, match=r"weights\['layers'\]\[0\]"),
    ):
        ckpt.restore(unrolled)
    program.eval(state, DATA[0])


def test_nothing_there_is_told(program, tmp_path):
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.latest_step() is None
        assert ckpt.all_steps() == []
        with pytest.raises(CheckpointError, match=r"has no checkpoint: start from program.init"):
            ckpt.restore(program)


def test_checkpoints_of_another_run_are_not_overwritten(program, saved):
    folder, expected = saved
    with zj.Checkpointer(folder) as ckpt:
        state, _ = program.step(program.init(jax.random.key(5)), DATA[0])
        with pytest.raises(
            CheckpointError, match="steps up to 2, of another run, and this state is at step 1"
        ):
            ckpt.save(program, state)
    assert_same(numbers(folder, 1), expected)


def test_two_writers_of_one_folder(program, saved):
    folder, expected = saved
    code = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1] + '/.zerojax.lock', os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX); "
        "os.ftruncate(fd, 0); os.pwrite(fd, str(os.getpid()).encode(), 0); print('locked', flush=True); sys.stdin.read()"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code, folder], stdin=-1, stdout=-1) as other,
        zj.Checkpointer(folder) as ckpt,
    ):
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"locked\n"
        state = ckpt.restore(program)
        state, _ = program.step(state, DATA[2])
        with pytest.raises(
            CheckpointError,
            match=rf"process {other.pid} saves checkpoints in .*use another directory",
        ):
            ckpt.save(program, state)
        other.stdin.close()
        other.wait()
        assert ckpt.save(program, state)
    assert_same(numbers(folder, 1), expected)


# --- folders and disks ----------------------------------------------------------------------------


def save_and_wait(ckpt, program, state):
    ckpt.save(program, state)
    ckpt.wait()


@pytest.mark.by_default("nvme")
@pytest.mark.parametrize("tier", ["device", DISK])
def test_a_full_disk_loses_nothing(program, tier, tmp_path):
    """The swap folder is on another disk.

    Records to be linked are copied instead, and the copy finds no space.
    """
    with contextlib.ExitStack() as stack:
        small = stack.enter_context(mounted(tmp_path / "small", "size=4m"))
        made = program if tier == DISK else stack.enter_context(build({"stage": 3}, tmp_path))
        ckpt = stack.enter_context(zj.Checkpointer(small / "c"))
        state, _ = made.step(made.init(jax.random.key(0)), DATA[0])
        ckpt.save(made, state)
        ckpt.wait()
        expected = numbers(small / "c", 1)
        ballast = fill(small)
        state, _ = made.step(state, DATA[1])
        with pytest.raises(CheckpointError, match=r"ENOSPC .*older checkpoints are unchanged"):
            save_and_wait(ckpt, made, state)
        assert ckpt.all_steps() == [1]
        assert sorted(os.listdir(small / "c")) == [".zerojax.lock", "1"]
        state, _ = made.step(state, DATA[2])
        ballast.unlink()
        assert ckpt.save(made, state)
        ckpt.wait()
        assert ckpt.all_steps() == [1, 3]
        assert_same(numbers(small / "c", 1), expected)
        losses, _ = toys.run(made, state, DATA[3:])
        again, _ = toys.run(made, ckpt.restore(made), DATA[3:])
        assert losses == again


def test_a_full_disk_below_swap_folder_and_checkpoints(tmp_path):
    """Linked records need space for the next step's records.

    If there is none, the save is refused and the step is not.
    """
    with (
        mounted(tmp_path / "small", "size=4m") as small,
        build(ON_DISK, small / "swap", {"fsdp": 1}) as made,
        zj.Checkpointer(small / "c") as ckpt,
    ):
        state, _ = made.step(made.init(jax.random.key(0)), DATA[0])
        ballast = fill(small)
        with pytest.raises(CheckpointError, match="ENOSPC"):
            save_and_wait(ckpt, made, state)
        _, state = toys.run(made, state, DATA[1:3])
        ballast.unlink()
        ckpt.save(made, state)
        losses, _ = toys.run(made, state, DATA[3:])
        assert toys.run(made, ckpt.restore(made), DATA[3:])[0] == losses


def test_a_read_only_folder_is_told(program, tmp_path):
    with mounted(tmp_path / "small", "size=1m") as small:
        ckpt = zj.Checkpointer(small / "c")
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        state = program.init(jax.random.key(0))
        with pytest.raises(CheckpointError, match=r"EROFS .*use another directory"):
            ckpt.save(program, state)
        program.step(state, DATA[0])
        with pytest.raises(CheckpointError, match="EROFS"):
            zj.Checkpointer(small / "other")


def test_a_snapshot_is_linked_and_what_it_links_is_never_written_again(program, saved, tmp_path):
    """On one file system no byte is copied.

    The checkpoint's record is the file that was in the swap folder.
    """
    folder, _ = saved
    with zj.Checkpointer(folder) as ckpt:
        state = ckpt.restore(program)
        state, _ = program.step(state, DATA[2])
        swap = pathlib.Path(program.config.swap_dir or "")
        before = {p.stat().st_ino for p in swap.glob("*/opt_state/*/c.*")}
        ckpt.save(program, state)
        ckpt.wait()
        after = {
            p.stat().st_ino for p in records(folder, 3) if p.parents[1].name == "disk.opt_state"
        }
        assert after
        assert after <= before
        expected = numbers(folder, 3)
        _, state = toys.run(program, state, DATA[3:5])
        assert not after & {p.stat().st_ino for p in swap.glob("*/opt_state/*/c.*")}
        assert_same(numbers(folder, 3), expected)
        assert not list(swap.glob("*/snapshot-*"))


def test_a_program_that_closes_waits_for_what_is_saved_from_its_disk(
    program, tmp_path, monkeypatch
):
    move = Snapshot.move

    def late(self, kept, target):
        time.sleep(0.05)
        move(self, kept, target)

    monkeypatch.setattr(Snapshot, "move", late)
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        with build(ON_DISK, tmp_path / "swap") as made:
            state = made.init(jax.random.key(0))
            assert ckpt.save(made, state)
            state = made.init(jax.random.key(1))
            expected, _ = toys.run(made, ckpt.restore(made), DATA[:1])
            state = made.init(jax.random.key(1))
            ckpt.save(made, made.step(state, DATA[0])[0])
        assert ckpt.all_steps() == [0, 1]
        assert toys.run(program, ckpt.restore(program, 0), DATA[:1])[0] == expected


# --- settings -------------------------------------------------------------------------------------


def test_settings_out_of_range_are_refused(tmp_path):
    wrong = [
        ("max_to_keep", 0),
        ("save_interval_steps", 0),
        ("max_host_bytes", -1),
        ("max_host_bytes", True),
    ]
    for name, value in [*wrong, ("best_mode", "best"), ("best_metric", 3)]:
        with pytest.raises(ValueError, match=f"{name}={value!r}: "):
            zj.Checkpointer(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="mount the bucket"):
        zj.Checkpointer("gs://bucket/run")


def test_interval_keep_and_best(resident, tmp_path):
    state = resident.init(jax.random.key(0))
    with zj.Checkpointer(tmp_path / "a", max_to_keep=2, save_interval_steps=2) as ckpt:
        did = []
        for batch in DATA:
            state, _ = resident.step(state, batch)
            did.append(ckpt.save(resident, state))
        assert did == [False, True] * 3
        assert not ckpt.save(resident, state)
        assert ckpt.all_steps() == [4, 6]
        state, _ = resident.step(state, DATA[0])
        assert ckpt.save(resident, state, force=True)
    with zj.Checkpointer(tmp_path / "b", max_to_keep=1, best_metric="loss") as ckpt:
        for loss in (3.0, 1.0, 2.0):
            state, _ = resident.step(state, DATA[0])
            ckpt.save(resident, state, metrics={"loss": loss})
        assert ckpt.best_step() == 9
        assert ckpt.all_steps() == [9, 10]  # including the newest
        with pytest.raises(
            ValueError, match="best_metric='loss': metrics with that name are needed"
        ):
            ckpt.save(resident, resident.step(state, DATA[0])[0], metrics={"norm": 1.0})


@pytest.mark.parametrize("on_host", [True, False])
def test_copies_stay_within_the_bound(on_host, tmp_path, monkeypatch):
    """Arrays that numpy cannot read in place, such as a GPU's, are cut on the device."""
    monkeypatch.setattr("zerojax.checkpoint.save.is_host_memory", lambda _: on_host)
    found, fields = [], {"stage": 3, "params": HOST, "opt_state": HOST}
    with build(fields, tmp_path, {"fsdp": 2}) as made:
        state = made.init(jax.random.key(0))
        for most in (None, 20_000, 0):
            folder = tmp_path / str(most)
            folder.mkdir()
            saving = begin_save(made, state, str(folder), max_host_bytes=most)
            saving.finish()
            largest = max(form.record_bytes for form in SavedState(str(folder)).records.stores)
            assert saving.peak_host_bytes <= max(most if most is not None else 1 << 30, largest)
            assert (saving.peak_host_bytes > 20_000) == (most is None)
            with SavedState(str(folder)) as kept:
                found.append({name: whole(kept, name) for name in kept.leaves})
    for other in found[1:]:
        assert_same(other, found[0])


class Counter:
    """An iterator that can be saved."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        return DATA[self.at % len(DATA)]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_the_order_of_data_goes_on(resident, tmp_path):
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        data = Counter()
        state, _ = resident.step(resident.init(jax.random.key(0)), next(data))
        ckpt.save(resident, state, data=data)
        state, metrics = resident.step(state, next(data))
        other = Counter()
        state = ckpt.restore(resident, data=other)
        assert other.at == 1
        state, again = resident.step(state, next(other))
        assert float(again["loss"]) == float(metrics["loss"])
        with pytest.raises(ValueError, match="an iterator with get_state and set_state"):
            ckpt.save(resident, state, data=iter(DATA))
    with zj.Checkpointer(tmp_path / "d") as ckpt:
        ckpt.save(resident, resident.init(jax.random.key(0)))
        with pytest.raises(CheckpointError, match="holds no state of the iterator of process 0"):
            ckpt.restore(resident, data=Counter())
