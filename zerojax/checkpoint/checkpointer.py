"""Checkpoints of a program's whole state, on Orbax: asynchronous, atomic, and independent of where the bytes lived.

    with zj.Checkpointer("runs/gpt/checkpoints", max_to_keep=3, save_interval_steps=100) as ckpt:
        state = ckpt.restore(program, data=data)     the newest whole checkpoint, on any mesh, stage, tier and precision
        for batch in data:
            state, metrics = program.step(state, batch)
            ckpt.save(program, state, data=data)     the step waits only for copies to host memory

    {directory}/{step}/state       records, and what they hold (`zerojax.checkpoint.manifest`)
    {directory}/{step}/config      config, mesh and versions, as JSON

Orbax's CheckpointManager makes a checkpoint appear whole or not at all, keeps as many as asked for, and lets the processes of a
run wait for each other. The arrays are not Orbax's: its format is read and written leaf by leaf, so a stack of layers, or a
tier on disk, would pass through memory whole; here a record of one layer is the unit, which a disk's records are linked as.
`zerojax.weights.files` writes checkpoints of Orbax's own format.
"""

import contextlib
import fcntl
import itertools
import logging
import math
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from host_offload.disk import sync
from zerojax.checkpoint.directory import ASIDE, CONFIG, DELETED, LOCK, STATE, TEMPORARY
from zerojax.checkpoint.errors import CheckpointError, DamagedError, IteratorError, explained
from zerojax.checkpoint.manifest import SavedState, position_of
from zerojax.checkpoint.orbax import SAVING, Manager, StateSave
from zerojax.checkpoint.program_state import described, restore_state
from zerojax.program import Program
from zerojax.runtime import AllProcesses, BackgroundBarrier
from zerojax.state import TrainState

logger = logging.getLogger("zerojax")
_LONGEST_SECONDS = 24 * 3600
"""That a process may write for. One that died is noticed before, by JAX's heartbeats."""


class Checkpointer:
    """Saves and restores the states of programs; a context manager, which waits for what is under way.

    Attributes:
      directory: of the checkpoints.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        is_async: bool = True,
        max_host_bytes: int | None = None,
        verify: bool = True,
    ) -> None:
        """Use a directory; it is made if it is not there.

        Args:
          directory: on a file system that all processes share.
          max_to_keep: newest checkpoints to keep, or best ones; None keeps all.
          save_interval_steps: `save` skips steps that are no multiple of it.
          best_metric: name in `metrics`, by which the checkpoints to keep are chosen.
          best_mode: whether the least or the greatest is best.
          is_async: go on while a checkpoint is written. A second save waits for the first.
          max_host_bytes: that a process's copies of what rests in memory may take while they wait to be written; the step waits
            if they would take more. None: all at once, which are the bytes of this process's shards of weights and optimizer
            state that are not on disk.
          verify: compare checksums of all bytes before a restore; False compares sizes alone.

        Raises:
          ValueError: settings out of range.
          CheckpointError: the directory cannot be made.
        """
        for name, value in (("max_to_keep", max_to_keep), ("save_interval_steps", save_interval_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: an integer of at least 1 is needed")
        if isinstance(max_host_bytes, bool) or not isinstance(max_host_bytes, int | None) or (max_host_bytes or 0) < 0:
            raise ValueError(f"max_host_bytes={max_host_bytes!r}: None or an integer of at least 0 is needed")
        if not isinstance(best_metric, str | None):
            raise ValueError(f"best_metric={best_metric!r}: None or the name of a metric is needed")
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={best_mode!r}: 'min' or 'max' is needed")
        self.directory = os.path.abspath(os.fspath(directory))
        if "://" in os.fspath(directory):
            raise ValueError(f"directory={os.fspath(directory)!r}: records are files of a file system; mount the bucket")
        self._interval, self._max_host_bytes, self._verify = save_interval_steps, max_host_bytes, verify
        self._best = best_metric
        self._beside = BackgroundBarrier(
            SAVING, CheckpointError, ("async_write_complete", "async_commit_complete")
        )  # Orbax's names
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            raise explained(error, f"making the directory of checkpoints {self.directory}") from error
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            best_fn=None if best_metric is None else lambda metrics: _comparable(metrics[best_metric], best_mode),
            best_mode=best_mode,
            todelete_subdir=DELETED,
            enable_async_checkpointing=is_async,
            async_options=ocp.AsyncOptions(
                timeout_secs=_LONGEST_SECONDS, barrier_sync_fn=self._beside, create_directories_asynchronously=False
            ),
        )
        self._opened: ocp.CheckpointManager | None = None
        self._mutex = threading.RLock()  # one call at a time
        self._is_closed = False
        self._lock: int | None = None
        self._emptying: threading.Thread | None = None
        self._from: int | None = None  # the step that was saved or restored last
        self._before: int | None = None  # and the one before that, to which a save that failed goes back
        self._last: StateSave | None = None

    # --- saving ------------------------------------------------------------------------------------------------------------

    def save(
        self,
        program: Program,
        state: TrainState,
        *,
        metrics: Mapping[str, Any] | None = None,
        data: Any = None,
        force: bool = False,
    ) -> bool:
        """Save a state, at its own step number; in a run of several processes all call this.

        Args:
          program: that made the state.
          state: from `init`, `step` or `restore`; not donated yet. It may go on to the next step when this returns.
          metrics: of the step, to choose the best checkpoints by.
          data: this process's iterator; what its `get_state()` returns is saved too.
          force: whatever the interval says.

        Returns:
          Whether it saves: False for a step between intervals, and for the one that was saved or restored last.

        Raises:
          ValueError: the state was donated, or is not the one on disk; or `data` cannot be saved.
          CheckpointError: this save, or the last one in the background, failed; the state and older checkpoints are as they
            were. Or the directory holds checkpoints of another run.
          SwapError: the state on disk is lost.
        """
        with self._mutex:
            return self._save(program, state, metrics, data, force)

    def _save(self, program: Program, state: TrainState, metrics: Mapping[str, Any] | None, data: Any, force: bool) -> bool:
        self._check_open()
        program.check_state(state)
        step = int(state.step)
        if (not force and step % self._interval) or step == self._from:
            return False
        # refused before anything is touched, and by all processes
        AllProcesses(program.mesh, SAVING, CheckpointError).do(lambda: None if data is None else _check_position(data))
        if self._best is not None and (metrics is None or self._best not in metrics):
            raise ValueError(f"best_metric={self._best!r}: metrics with that name are needed, got {sorted(metrics or ())}")
        self._take_lock(program.mesh)
        self.wait()
        AllProcesses(program.mesh, SAVING, CheckpointError).do(self._check_writable)
        manager = self._manager()
        with _explaining(f"saving step {step} in {self.directory}"):
            self._make_way(program.mesh, manager, step)
            save = StateSave(program, state, self._max_host_bytes, data, self._beside)
            args = ocp.args.Composite(**{STATE: save, CONFIG: ocp.args.JsonSave(described(program))})
            told = None if metrics is None else {name: float(value) for name, value in metrics.items()}
            self._beside.renew()
            self._last, self._before = save, self._from
            _OPEN.add(self)
            try:
                manager.save(step, args=args, metrics=told if self._best is not None else None, force=True)
                save.check()
            except BaseException:
                self._give_up()
                raise
        if jax.process_index() == 0:
            self._emptying = threading.Thread(target=self._empty, args=(manager,), name="zerojax-delete")
            self._emptying.start()
        self._from = step
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"this Checkpointer of {self.directory} is closed: make another")

    def _check_writable(self) -> None:
        """Make a file: where Orbax cannot make its folder, the processes that do not make it wait for it."""
        if jax.process_index() == 0:
            with _explaining(f"writing to {self.directory}"), tempfile.TemporaryFile(dir=self.directory):
                pass

    def _make_way(self, mesh: Mesh, manager: ocp.CheckpointManager, step: int) -> None:
        """Set aside checkpoints that are newer than that from which this run went on: it makes its own."""
        there, last = manager.all_steps(), self._from
        if there and (max(there) >= step if last is None else step < last):
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps up to {max(there)}, of another run, and this state is at step "
                f"{step}: restore and go on from there, or give another directory"
            )
        newer = [one for one in there if last is not None and one > last]
        if not newer:
            return

        def set_aside() -> None:
            for one in newer if jax.process_index() == 0 else ():
                names = (f"{one}{ASIDE}{n or ''}" for n in itertools.count())
                name = next(n for n in names if not os.path.lexists(os.path.join(self.directory, n)))
                os.rename(os.path.join(self.directory, str(one)), os.path.join(self.directory, name))
                logger.warning(
                    "%s: step %d is set aside as %s, as this run went on from step %s", self.directory, one, name, last
                )

        AllProcesses(mesh, "setting newer checkpoints aside", CheckpointError).do(set_aside)
        manager.reload()

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        with self._mutex:
            self._wait()

    def _wait(self) -> None:
        if self._opened is None:
            return
        with _explaining(f"saving in {self.directory}"):
            try:
                self._opened.wait_until_finished()
                if self._emptying is not None:
                    self._emptying.join()
                sync(self.directory)  # the name of the last checkpoint
            except BaseException:
                self._give_up()
                raise
            self._last = None

    def _give_up(self) -> None:
        """Let go of a manager whose save failed, which would raise its error again, and of what that left."""
        manager, self._opened = self._opened, None
        if manager is not None:
            with contextlib.suppress(Exception):  # what failed fails in the background too
                manager.close()
        if self._last is not None and self._last.saving is not None:  # Orbax may not have come to it
            self._last.saving.abandon()
        self._from = self._before
        self._clean()

    def _clean(self) -> None:
        """Remove what saves that failed, or that a kill ended, left."""
        if jax.process_index() == 0:
            for name in os.listdir(self.directory):
                if TEMPORARY in name or name == DELETED:
                    shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)

    def _empty(self, manager: ocp.CheckpointManager) -> None:
        """Remove the files of old checkpoints, once the new one is there."""
        with contextlib.suppress(Exception):  # `wait` raises it
            manager.wait_until_finished()
        shutil.rmtree(os.path.join(self.directory, DELETED), ignore_errors=True)

    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            with _explaining(f"opening {self.directory}"):
                self._opened = Manager(pathlib.Path(self.directory), options=self._options)
        return self._opened

    def _take_lock(self, mesh: Mesh) -> None:
        """Keep other runs from saving here; the kernel lets go of the lock with the process."""
        if self._lock is None:
            AllProcesses(mesh, "taking the directory of checkpoints", CheckpointError).do(self._lock_directory)

    def _lock_directory(self) -> None:
        if jax.process_index() != 0:
            self._lock = -1
            return
        path = os.path.join(self.directory, LOCK)
        with _explaining(f"taking the directory of checkpoints {self.directory}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError as error:
                owner = os.pread(fd, 64, 0).decode(errors="replace").strip() or "?"
                os.close(fd)
                raise CheckpointError(
                    f"process {owner} saves checkpoints in {self.directory}: give this run a directory of its own"
                ) from error
            except BaseException:
                os.close(fd)
                raise
            self._clean()  # now no other run writes there
        self._lock = fd
        os.register_at_fork(after_in_child=lambda: self._forget(fd))

    def _forget(self, fd: int) -> None:
        """Close the lock's file in a forked child, which would keep the lock when this process is gone."""
        if self._lock == fd:
            self._lock = None
            os.close(fd)

    # --- restoring ---------------------------------------------------------------------------------------------------------

    def restore(self, program: Program, step: int | None = None, *, data: Any = None) -> TrainState:
        """Return a saved state, as this program's; in a run of several processes all call this.

        Args:
          program: of the same model and optimizer as the one that saved, on any mesh, stage, tier, precision and number of
            tiles. What it had on disk is overwritten, once the checkpoint was found whole.
          step: None takes the newest one; if that is damaged, a warning names it, and the newest whole one is taken.
          data: this process's iterator; its `set_state` is called with what was saved.

        Raises:
          CheckpointError: there is none, or it is of another model; leaves that differ are named.
          IteratorError: with `data`, it was saved without, or by another number of processes; restore without it then.
          DamagedError: the step asked for is not whole, or none is.
          SwapError: the program's disk is too small, or failed.
        """
        with self._mutex:
            return self._restore(program, step, data)

    def _restore(self, program: Program, step: int | None, data: Any) -> TrainState:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int | np.integer)):
            raise ValueError(f"step={step!r}: None or the number of a step is needed")
        steps = self.all_steps()
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}: there are {steps or 'none'}")
        if not steps:
            raise CheckpointError(f"{self.directory} has no checkpoint: start from program.init(key)")
        wanted = [step] if step is not None else steps[::-1]
        for one in wanted:
            try:
                with self._saved(one, program.mesh) as saved:
                    position = _position(saved, data)
                    state = restore_state(program, saved, verify=self._verify)
            except DamagedError as error:
                if one == wanted[-1]:
                    raise
                logger.warning("step %d is passed over: %s", one, error)
                continue
            if data is not None:
                data.set_state(position)
            elif saved.data:
                logger.warning("step %d holds the position of an iterator, which restore(program, data=...) sets", one)
            self._from = one
            return state
        raise AssertionError

    def _saved(self, step: int, mesh: Mesh) -> SavedState:
        """Open a checkpoint in all processes, or raise DamagedError in all."""
        found: list[SavedState] = []
        try:
            AllProcesses(mesh, f"opening step {step}", DamagedError).do(lambda: found.append(SavedState(self._path(step))))
        except BaseException:
            for saved in found:
                saved.close()
            raise
        return found[0]

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order."""
        self.wait()
        return self._steps()

    def _steps(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise CheckpointError(f"the directory of checkpoints {self.directory} cannot be read: {error.strerror}") from error
        return sorted(int(name) for name in names if name.isdigit() and os.path.isdir(os.path.join(self.directory, name)))

    def latest_step(self) -> int | None:
        """Return the newest step of which all files are there, in the size in which they were saved; None if there is none.

        One that is not so is passed over with a warning.
        """
        for step in self.all_steps()[::-1]:
            try:
                with SavedState(self._path(step)) as saved:
                    saved.check(checksums=False)
            except DamagedError as error:
                logger.warning("step %d is passed over: %s", step, error)
                continue
            return step
        return None

    def best_step(self) -> int | None:
        """Return the step of the best metric, with `best_metric`; else the latest."""
        self.wait()
        return self._manager().best_step()

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, str(step), STATE)

    def close(self) -> None:
        """Wait for what is under way, and let go of the directory. At the program's end this is done for you."""
        with self._mutex:
            self._is_closed = True
            _OPEN.discard(self)
            try:
                self._wait()
            finally:
                manager, self._opened = self._opened, None
                if manager is not None:
                    manager.close()
                fd, self._lock = self._lock, None
                if fd is not None and fd >= 0:
                    os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_OPEN: "set[Checkpointer]" = set()


def _close_all() -> None:
    """Close what is still open when the program ends, while threads may still be started."""
    for ckpt in list(_OPEN):
        try:
            ckpt.close()
        except Exception:
            logger.exception("the last checkpoint in %s was not saved", ckpt.directory)


# Before Python's executors refuse work, of which Orbax's threads have some: `atexit` comes after that.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _comparable(value: float, mode: str) -> float:
    """Return a metric by which checkpoints are compared: what is no number is worst."""
    return value if not math.isnan(value) else (math.inf if mode == "min" else -math.inf)


def _check_position(data: Any) -> None:
    position_of(data)


def _position(saved: SavedState, data: Any) -> Any:
    """Return where this process's iterator was.

    Raises:
      IteratorError: that was not saved, or by other processes; it is raised in all processes.
    """
    if data is None:
        return None
    if saved.num_processes != jax.process_count():
        raise IteratorError(
            f"{saved.folder} holds the iterators of {saved.num_processes} processes, and these are {jax.process_count()}: "
            "restore without data, and set the iterator's position from state.step"
        )
    if missing := [process for process in range(saved.num_processes) if process not in saved.data]:
        raise IteratorError(
            f"{saved.folder} holds no state of the iterator of process {missing[0]}: save it with data=, or restore without"
        )
    return saved.data[jax.process_index()]


class _explaining:  # noqa: N801
    """Raise what fails as a CheckpointError."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise explained(error, self.doing) from error
