"""Saved state is never lost.

No failing call, no kill and no foreign entry in a directory removes a complete checkpoint.
"""

import contextlib
import errno
import fcntl
import logging
import os
import signal
import time

import jax
import numpy as np
import pytest
from test_directory import BATCH, build, run

import zerojax as zj
from zerojax.checkpoint.directory import Directory
from zerojax.checkpoint.inspection import inspect


@pytest.fixture(scope="module")
def program():
    return build()


@contextlib.contextmanager
def failing_fsync(matches, number=errno.EIO):
    """Make fsync fail for the files whose path `matches` accepts."""
    real = os.fsync

    def fsync(fd):
        if matches(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(number, os.strerror(number))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def newest(program, folder) -> int:
    """Return the step that another program would continue from."""
    return int(zj.Checkpointer(folder).restore(program).step)


def test_a_step_that_is_there_is_not_set_aside_for_a_save_that_fails(program, tmp_path):
    """The directory appeared but could not be flushed, so its save and the next one fail."""
    with zj.Checkpointer(tmp_path, max_to_keep=1, is_async=False) as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        state, _ = program.step(state, BATCH)
        with (
            failing_fsync(lambda path: path == str(tmp_path)),
            pytest.raises(zj.CheckpointError, match=r"EIO \(5\)"),
        ):
            ckpt.save(program, state)
        state, _ = program.step(state, BATCH)
        with (
            failing_fsync(lambda path: "orbax-checkpoint-tmp" in path),
            pytest.raises(zj.CheckpointError, match="EIO"),
        ):
            ckpt.save(program, state)
        assert newest(program, tmp_path) == 2
        assert ckpt.save(program, state)
        assert ckpt.all_steps() == [3]
    assert not [path.name for path in tmp_path.iterdir() if "set-aside" in path.name]


def test_a_save_that_failed_is_tried_again(program, tmp_path):
    """The first two saves cannot flush the name of an existing step; the third cannot write."""
    with zj.Checkpointer(tmp_path) as ckpt:
        state = program.init(jax.random.key(0))
        with failing_fsync(lambda path: path == str(tmp_path)):
            assert ckpt.save(program, state)
            for call in (ckpt.wait, lambda: ckpt.save(program, state)):
                with pytest.raises(zj.CheckpointError, match="EIO"):
                    call()
        assert not ckpt.save(program, state)  # it exists, and has been flushed by now
        state, _ = program.step(state, BATCH)
        with failing_fsync(lambda path: "manifest" in path):
            ckpt.save(program, state)
            with pytest.raises(zj.CheckpointError, match="EIO"):
                ckpt.save(program, state)
        assert ckpt.all_steps() == [0]
        assert ckpt.save(program, state)
        assert ckpt.all_steps() == [0, 1]


def test_after_a_rollback_nothing_is_set_aside_before_a_save_is_done(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 3)
    kept = os.stat(tmp_path / "2").st_ino
    with zj.Checkpointer(tmp_path, is_async=False) as ckpt:
        state, _ = program.step(ckpt.restore(program, 1), {"x": BATCH["x"] + 1})
        with (
            failing_fsync(lambda path: "orbax-checkpoint-tmp" in path),
            pytest.raises(zj.CheckpointError, match="EIO"),
        ):
            ckpt.save(program, state)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "2", "3"]
        assert newest(program, tmp_path) == 3
        assert ckpt.save(program, state)  # in place of another step 2
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
            "1",
            "2",
            "2.set-aside",
            "3.set-aside",
        ]
        assert os.stat(tmp_path / "2.set-aside").st_ino == kept
        np.testing.assert_array_equal(ckpt.restore(program).params["w"], state.params["w"])


@pytest.mark.parametrize("came_to", ["both", "new"])
def test_a_kill_while_a_step_replaces_another_leaves_the_new_one(program, tmp_path, came_to):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 1)
    (tmp_path / "1").rename(tmp_path / "1.next")
    if came_to == "both":
        (tmp_path / "1").mkdir()
    with zj.Checkpointer(tmp_path) as ckpt:
        assert ckpt.all_steps() == [1]
        assert ckpt.latest_step() == 1
        run(program, ckpt.restore(program), ckpt, 1)
        ckpt.wait()
        assert ckpt.all_steps() == [1, 2]
        assert not (tmp_path / "1.next").exists()
        assert int(ckpt.restore(program, 1).step) == 1


def test_a_replacement_that_could_not_be_renamed_is_renamed_by_a_later_save(
    program, tmp_path, monkeypatch
):
    with zj.Checkpointer(tmp_path, max_to_keep=1, is_async=False) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
    real = os.rename

    def rename(source, target, **kwargs):
        if str(source).endswith(".next"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), source)
        return real(source, target, **kwargs)

    with zj.Checkpointer(tmp_path, is_async=False) as ckpt:
        state, _ = program.step(program.init(jax.random.key(1)), BATCH)
        ckpt._last_step = 1  # as after a restore of step 1
        state, _ = program.step(state, BATCH)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            with pytest.raises(zj.CheckpointError, match="EACCES"):
                ckpt.save(program, state)
        assert (tmp_path / "2.next").is_dir()
        restored = ckpt.restore(program)
        np.testing.assert_array_equal(restored.params["w"], state.params["w"])
        run(program, restored, ckpt, 1)
        assert ckpt.all_steps() == [2, 3]
    assert not (tmp_path / "2.next").exists()


def test_metrics_that_cannot_be_read_stop_no_save(program, tmp_path, caplog):
    with zj.Checkpointer(tmp_path, max_to_keep=1, best_metric="loss") as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1, metrics={"loss": 1.0})
    (tmp_path / "1" / "metrics" / "metrics").write_text('{"loss": 1.')
    report = inspect(tmp_path, verify=True)
    assert not report.is_whole
    assert "1/metrics/metrics cannot be read" in report.text
    with zj.Checkpointer(tmp_path, max_to_keep=1, best_metric="loss") as ckpt:
        state = ckpt.restore(program)
        for loss in (3.0, 2.0, 4.0):
            state = run(program, state, ckpt, 1, metrics={"loss": loss})
        assert ckpt.best_step() == 3
        assert ckpt.all_steps() == [1, 3, 4]  # including the newest
    told = [r for r in caplog.records if "1/metrics/metrics cannot be read" in r.getMessage()]
    assert len(told) == 1


def test_a_file_system_without_flushes_of_folders_is_saved_to(program, tmp_path, caplog):
    with failing_fsync(os.path.isdir, errno.EINVAL), zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
    assert newest(program, tmp_path) == 2
    told = [
        r.getMessage()
        for r in caplog.records
        if "does not flush folders (fsync: Invalid argument)" in r.getMessage()
    ]
    assert len(told) == 1


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_file_system_without_locks_is_saved_to_by_one_process(
    program, tmp_path, caplog, monkeypatch, num_processes
):
    def flock(fd, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with zj.Checkpointer(tmp_path) as ckpt:
        if num_processes == 2:
            monkeypatch.setattr(jax, "process_count", lambda: 2)
            directory = Directory(tmp_path)
            with pytest.raises(
                zj.CheckpointError,
                match=r"does not lock files \(flock: .*\), .*: mount it with locks",
            ):
                directory.lock()
            assert not directory.is_locked
            return
        run(program, program.init(jax.random.key(0)), ckpt, 2)
    assert newest(program, tmp_path) == 2
    assert (
        len(
            [
                r
                for r in caplog.records
                if "a second run that saves there is not noticed" in r.getMessage()
            ]
        )
        == 1
    )


@pytest.mark.parametrize("planted", ["symlink", "hard link", "fifo", "folder", "text"])
def test_a_planted_lock_overwrites_no_file(program, tmp_path, planted):
    victim, lock = tmp_path / "thesis", tmp_path / "c" / ".zerojax.lock"
    victim.write_text("ten years of work")
    lock.parent.mkdir()
    match planted:
        case "symlink":
            lock.symlink_to(victim)
        case "hard link":
            lock.hardlink_to(victim)
        case "fifo":
            os.mkfifo(lock)
        case "folder":
            lock.mkdir()
        case "text":
            lock.write_text("not a number")
    with zj.Checkpointer(lock.parent) as ckpt:
        for _ in range(2):
            with pytest.raises(
                zj.CheckpointError, match=r"\.zerojax\.lock is not a lock file.*remove it"
            ):
                ckpt.save(program, program.init(jax.random.key(0)))
    assert victim.read_text() == "ten years of work"


def test_a_step_that_cannot_be_looked_at_is_not_passed_over(program, tmp_path, monkeypatch):
    """os.path.isdir returns False if it cannot find out."""
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
    real = os.stat

    def stat(path, *args, **kwargs):
        if isinstance(path, str) and path.startswith(str(tmp_path / "2")):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    with zj.Checkpointer(tmp_path) as ckpt:
        for call in (ckpt.latest_step, lambda: ckpt.restore(program), lambda: inspect(tmp_path)):
            with pytest.raises(zj.CheckpointError, match="ESTALE"):
                call()


def test_a_save_that_failed_while_the_disk_could_not_be_asked_is_tried_again(
    program, tmp_path, monkeypatch
):
    with zj.Checkpointer(tmp_path, is_async=False) as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        state, _ = program.step(state, BATCH)
        real = os.stat

        def stat(path, *args, **kwargs):
            if path == str(tmp_path / "2" / "state"):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch, failing_fsync(lambda path: "manifest" in path):
            patch.setattr(os, "stat", stat)
            for told in ("EIO", "ESTALE"):
                with pytest.raises(zj.CheckpointError, match=told):
                    ckpt.save(program, state)
        assert ckpt.save(program, state)
        assert ckpt.all_steps() == [1, 2]


def test_folders_that_are_no_steps_are_left_alone(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 1)
    for name in ("²", "٣", "007", "9" * 200, "-4", " 5"):
        (tmp_path / name).mkdir()
    with zj.Checkpointer(tmp_path, max_to_keep=1) as ckpt:
        assert ckpt.all_steps() == [1]
        run(program, ckpt.restore(program), ckpt, 1)
        ckpt.wait()
        assert ckpt.all_steps() == [2]
    assert (tmp_path / "²").is_dir()


def test_a_forked_child_that_unwinds_waits_for_nothing(program, tmp_path):
    """The saving threads belong to the parent."""
    with zj.Checkpointer(tmp_path) as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "warnings.warn", lambda *_, **__: None
            )  # from JAX: a forked child must not use it
            child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(zj.CheckpointError, match="created before a fork"):
                    ckpt.wait()
                ckpt.close()
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
        run(program, state, ckpt, 1)
    assert newest(program, tmp_path) == 2


@pytest.mark.parametrize("call", ["wait", "close"])
def test_an_interrupted_wait_gives_no_save_up(program, tmp_path, caplog, call):
    with zj.Checkpointer(tmp_path) as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        with pytest.MonkeyPatch.context() as patch:

            def join(timeout=None):
                raise KeyboardInterrupt

            # Only this thread's join: other threads are joined when they are collected as garbage.
            patch.setattr(ckpt._writer._thread, "join", join)
            with pytest.raises(KeyboardInterrupt):
                getattr(ckpt, call)()
            with pytest.raises(
                zj.CheckpointError, match="saves checkpoints in"
            ):  # otherwise it would remove what is being written
                zj.Checkpointer(tmp_path).save(program, state, force=True)
        run(program, state, ckpt, 1)
    assert newest(program, tmp_path) == 2
    assert not [r for r in caplog.records if r.levelno > logging.WARNING]
