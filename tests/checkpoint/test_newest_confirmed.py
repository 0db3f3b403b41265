"""A Checkpointer's promise: `restore` returns the newest state whose save was confirmed.

The promise is tested over sequences of these calls:

  save        confirmed when the save and the wait for it return
  fail        a save in which the n-th call of some kind to the file system fails
  kill        a save that ends in the middle: another run continues with the directory at the n-th
              change
  go back     restore an older step; the next save sets the newer steps aside
  damage      a record of a step is changed on disk
  keep        another run, with another max_to_keep

After each call a fresh Checkpointer restores. It must return the newest confirmed and undamaged
state, bit for bit. It may also return a state whose save appeared without being confirmed, since no
caller was promised that state.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile
import threading

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_directory import BATCH, build

import zerojax as zj

FAULTS = {
    "fsync": (errno.EIO, errno.EINVAL),
    "open": (errno.EMFILE, errno.EACCES, errno.ENOSPC),
    "rename": (errno.EIO, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EROFS),
    "stat": (errno.ESTALE, errno.ENOMEM),
    "scandir": (errno.EMFILE,),
    "listdir": (errno.EIO,),
    "rmdir": (errno.EBUSY,),
    "unlink": (errno.EIO,),
}
FAULT = st.sampled_from([(name, number) for name, numbers in FAULTS.items() for number in numbers])
CHANGES = ("fsync", "rename", "mkdir", "rmdir", "unlink")


@contextlib.contextmanager
def at_call(root, names, number, act):
    """Call `act(name)` before the n-th call, from 0, of some functions of `os` below `root`."""
    lock, left = threading.Lock(), [number]

    def wrapped(name, real):
        def call(path, *args, **kwargs):
            # For a descriptor, use the file that it has open: rmtree removes names relative to
            # their folder's descriptor.
            folder = kwargs.get("dir_fd")
            where = (
                os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            )
            if isinstance(folder, int):
                where = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), where)
            if isinstance(where, str) and where.startswith(root):
                with lock:
                    is_now, left[0] = left[0] == 0, left[0] - 1
                    if is_now:
                        act(name)
            return real(path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield


class Directory(RuleBasedStateMachine):
    program = build()

    def __init__(self):
        super().__init__()
        self.room = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.room.name) / "c"
        self.ckpt = zj.Checkpointer(self.path)
        self.state = self.program.init(jax.random.key(0))
        self.confirmed: dict[
            int, bytes
        ] = {}  # the state saved at each step, as far as retention may have kept it
        self.unconfirmed: list[
            tuple[int, bytes]
        ] = []  # states whose saves failed: they may have appeared
        self.damaged: set[int] = set()
        self.last: int | None = None  # step from which this run continues
        self.seed = 0
        self.keep: int | None = None

    def teardown(self):
        with contextlib.suppress(zj.CheckpointError):
            self.ckpt.close()
        self.room.cleanup()

    def numbers(self, state) -> bytes:
        return b"".join(
            np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state))
        )

    def advance(self):
        self.seed += 1  # so that a run that went back makes different states
        self.state, _ = self.program.step(self.state, {"x": BATCH["x"] + self.seed})
        return int(self.state.step), self.numbers(self.state)

    def confirm(self, step, numbers):
        # States newer than this run's starting step belong to another run, and are set aside.
        self.confirmed = {
            k: v for k, v in self.confirmed.items() if self.last is None or k <= self.last
        }
        self.unconfirmed = []
        self.confirmed[step], self.last = numbers, step
        self.damaged = {k for k in self.damaged if k in self.confirmed and k != step}
        if self.keep is not None:
            self.confirmed = {k: self.confirmed[k] for k in sorted(self.confirmed)[-self.keep :]}

    def reopen(self):
        with contextlib.suppress(zj.CheckpointError):
            self.ckpt.close()
        self.ckpt = zj.Checkpointer(self.path, max_to_keep=self.keep, is_async=bool(self.seed % 2))
        self.go_on()

    def go_on(self, step=None):
        """Restore as a new run does."""
        if not self.confirmed and not self.unconfirmed:
            self.state, self.last = self.program.init(jax.random.key(0)), None
            return
        try:
            self.state = self.ckpt.restore(self.program, step)
        except zj.CheckpointError:
            # No complete checkpoint exists: a run like this one would begin in another directory.
            assert not set(self.confirmed) - self.damaged
            shutil.rmtree(self.path)
            self.ckpt.close()
            self.ckpt = zj.Checkpointer(self.path, max_to_keep=self.keep)
            self.confirmed, self.unconfirmed, self.damaged = {}, [], set()
            self.state, self.last = self.program.init(jax.random.key(0)), None
            return
        self.last = int(self.state.step)
        if self.unconfirmed and self.confirmed.get(self.last) != (now := self.numbers(self.state)):
            assert (self.last, now) in self.unconfirmed
            self.confirmed[self.last] = now
            self.damaged.discard(self.last)  # it replaced a damaged one

    def save(self, step, numbers) -> bool:
        try:
            self.ckpt.save(self.program, self.state)
            self.ckpt.wait()
        except zj.CheckpointError:
            self.unconfirmed.append((step, numbers))
            return False
        self.confirm(step, numbers)
        return True

    @rule()
    def save_once(self):
        assert self.save(*self.advance())

    @rule(fault=FAULT, at=st.integers(0, 12))
    def fail(self, fault, at):
        name, number = fault

        def act(_):
            raise OSError(number, os.strerror(number))

        step, numbers = self.advance()
        with at_call(str(self.path), [name], at, act):
            was_saved = self.save(step, numbers)
        if not was_saved:
            assert self.save(step, numbers)  # nothing fails from here on

    @rule(fault=FAULT, at=st.integers(0, 12))
    def fail_and_end(self, fault, at):
        name, number = fault

        def act(_):
            raise OSError(number, os.strerror(number))

        with at_call(str(self.path), [name], at, act):
            self.save(*self.advance())
        self.reopen()

    @rule(at=st.integers(0, 40))
    def kill(self, at):
        other = self.path.with_name("killed")
        before = (dict(self.confirmed), list(self.unconfirmed), set(self.damaged))
        step, numbers = self.advance()
        with at_call(str(self.path), CHANGES, at, lambda _: shutil.copytree(self.path, other)):
            self.save(step, numbers)
        if other.exists():
            self.ckpt.close()
            shutil.rmtree(self.path)
            other.rename(self.path)
            self.confirmed, self.unconfirmed, self.damaged = before
            self.unconfirmed.append((step, numbers))
            if (
                self.keep is not None and step in self.ckpt.all_steps()
            ):  # it has appeared, so retention may have begun
                self.confirmed = {
                    k: v for k, v in self.confirmed.items() if (self.path / str(k)).is_dir()
                }
            self.reopen()

    @precondition(lambda self: set(self.confirmed) - self.damaged)
    @rule(data=st.data())
    def go_back(self, data):
        self.go_on(data.draw(st.sampled_from(sorted(set(self.confirmed) - self.damaged))))

    @precondition(lambda self: set(self.confirmed) - self.damaged and not self.unconfirmed)
    @rule(data=st.data(), way=st.sampled_from(["flip", "cut", "remove", "manifest"]))
    def damage(self, data, way):
        step = data.draw(
            st.sampled_from(sorted(set(self.confirmed) - self.damaged))
        )  # a bit that flips twice is intact
        folder = self.path / str(step) / "state"
        file = folder / "manifest.0.json" if way == "manifest" else sorted(folder.rglob("c.*"))[-1]
        held = bytearray(file.read_bytes())
        held[len(held) // 3] ^= 1
        match way:
            case "cut":
                file.write_bytes(held[:-1])
            case "remove":
                file.unlink()
            case _:
                file.write_bytes(held)
        self.damaged.add(step)

    @rule(keep=st.sampled_from([None, 1, 2]))
    def keep_other_numbers(self, keep):
        self.keep = keep
        self.reopen()

    @invariant()
    def the_newest_confirmed_is_restored(self):
        whole = set(self.confirmed) - self.damaged
        with zj.Checkpointer(self.path) as reader:
            try:
                state = reader.restore(self.program)
            except zj.CheckpointError:
                assert not whole, f"confirmed {sorted(whole)}, but none is restored"
                assert reader.latest_step() is None
                return
            step, numbers = int(state.step), self.numbers(state)
            assert reader.latest_step() == step
        assert (whole and step == max(whole) and numbers == self.confirmed[step]) or (
            step,
            numbers,
        ) in self.unconfirmed, f"confirmed {sorted(whole)}, but restored {step}"


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_the_newest_confirmed_state_is_restored(examples, monkeypatch):
    # A kill loses nothing that the kernel has, and waiting for the disk would take most of the
    # time.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    run_state_machine_as_test(
        Directory,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            # a failure is reported immediately, without minutes of shrinking
            phases=(Phase.generate,),
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
