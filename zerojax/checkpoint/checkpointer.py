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
`zerojax.weights` writes weights in Orbax's own format.

This module holds the order of events in a save and in a restore. `zerojax.checkpoint.directory` says what lies in the
directory, and what is renamed and removed there. `zerojax.checkpoint.save` and `zerojax.checkpoint.restore` write and read it.
"""

import contextlib
import logging
import math
import os
import pathlib
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from zerojax.checkpoint.directory import CONFIG, DELETED, STATE, Directory
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explaining
from zerojax.checkpoint.iterators import check_position, own_position
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.orbax import SAVING, Manager, StateSave
from zerojax.checkpoint.program_state import describe, restore_state
from zerojax.program import Program
from zerojax.runtime import AllProcesses, BackgroundBarrier
from zerojax.state import TrainState

logger = logging.getLogger("zerojax")
_LONGEST_SECONDS = 24 * 3600
"""That a process may write for. One that died is noticed before, by JAX's heartbeats."""


class Checkpointer:
    """Saves and restores the states of programs. As a context manager it waits at the end for a save in the background.

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
        _check_settings(max_to_keep, save_interval_steps, best_metric, best_mode, max_host_bytes)
        self._directory = Directory(directory)
        self.directory = self._directory.path
        if "://" in os.fspath(directory):
            raise ValueError(f"directory={os.fspath(directory)!r}: records are files of a file system; mount the bucket")
        self._interval, self._max_host_bytes, self._verify = save_interval_steps, max_host_bytes, verify
        self._best_metric = best_metric
        stages = ("async_write_complete", "async_commit_complete")  # Orbax's names
        self._barrier = BackgroundBarrier(SAVING, CheckpointError, stages)
        self._directory.make()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            best_fn=None if best_metric is None else lambda metrics: _comparable(metrics[best_metric], best_mode),
            best_mode=best_mode,
            todelete_subdir=DELETED,
            enable_async_checkpointing=is_async,
            # The state's item writes into its folder as soon as it is called, so Orbax must have made it by then.
            async_options=ocp.AsyncOptions(
                timeout_secs=_LONGEST_SECONDS, barrier_sync_fn=self._barrier, create_directories_asynchronously=False
            ),
        )
        self._open_manager: ocp.CheckpointManager | None = None
        self._mutex = threading.RLock()  # one call at a time; `save` and `restore` call `wait`
        self._is_closed = False
        self._deletion: threading.Thread | None = None  # of old checkpoints
        self._last_step: int | None = None  # that was saved or restored
        self._step_before: int | None = None  # to which a save that fails goes back
        self._last_save: StateSave | None = None  # until it is on disk

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
        # Waits for the step that makes this state.
        step = int(state.step)
        if (not force and step % self._interval) or step == self._last_step:
            return False
        # refused before anything is touched, and by all processes
        AllProcesses(program.mesh, SAVING, CheckpointError).do(lambda: check_position(data))
        if self._best_metric is not None and (metrics is None or self._best_metric not in metrics):
            names = sorted(metrics or ())
            raise ValueError(f"best_metric={self._best_metric!r}: metrics with that name are needed, got {names}")
        # The lock before the manager: once it lists the steps, no other run may add or remove one.
        self._take_lock(program.mesh)
        self.wait()
        AllProcesses(program.mesh, SAVING, CheckpointError).do(self._directory.check_writable)
        manager = self._manager()
        with explaining(f"saving step {step} in {self.directory}"):
            # Orbax would count the steps of a rolled-back run among the newest, and remove this run's for them.
            self._set_newer_aside(program.mesh, manager, step)
            self._begin_save(manager, program, state, step, metrics, data)
        if jax.process_index() == 0:
            # Orbax only renames an old step into the folder of deleted ones. Removing its many files is slow, so a thread does
            # it.
            self._deletion = threading.Thread(target=self._delete_old, args=(manager,), name="zerojax-delete")
            self._deletion.start()
        # `_give_up` takes this back if what is left of the save fails.
        self._last_step = step
        return True

    def _begin_save(
        self,
        manager: ocp.CheckpointManager,
        program: Program,
        state: TrainState,
        step: int,
        metrics: Mapping[str, Any] | None,
        data: Any,
    ) -> None:
        """Let Orbax begin the save, and go on with it beside the next steps; if it fails, all is as it was before."""
        save = StateSave(program, state, self._max_host_bytes, data, self._barrier)
        args = ocp.args.Composite(**{STATE: save, CONFIG: ocp.args.JsonSave(describe(program))})
        # Orbax writes metrics as JSON, which holds no arrays.
        numbers = None if metrics is None else {name: float(value) for name, value in metrics.items()}
        # Here, in the thread of the steps, all processes number their saves alike.
        self._barrier.renew()
        self._last_save, self._step_before = save, self._last_step
        # From here on the end of the program has something to wait for.
        _OPEN.add(self)
        try:
            # force: the interval was looked at already, and Orbax must not decide again.
            manager.save(step, args=args, metrics=numbers if self._best_metric is not None else None, force=True)
            save.check()  # what failed in another process, or in this one of several
        except BaseException:
            self._give_up()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"this Checkpointer of {self.directory} is closed: make another")

    def _set_newer_aside(self, mesh: Mesh, manager: ocp.CheckpointManager, step: int) -> None:
        """Set aside checkpoints newer than the one from which this run went on, since it will write its own."""
        steps, last = manager.all_steps(), self._last_step
        # A run that restored nothing must not mix its steps with another run's.
        if steps and (max(steps) >= step if last is None else step < last):
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps up to {max(steps)}, of another run, and this state is at step "
                f"{step}: restore and go on from there, or give another directory"
            )
        newer = [other for other in steps if last is not None and other > last]
        if not newer:
            return

        def set_aside() -> None:
            for other in newer:
                if (name := self._directory.set_aside(other)) is not None:
                    logger.warning(
                        "%s: step %d is set aside as %s, as this run went on from step %s", self.directory, other, name, last
                    )

        AllProcesses(mesh, "setting newer checkpoints aside", CheckpointError).do(set_aside)
        manager.reload()  # it listed them when it was opened

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        with self._mutex:
            self._wait()

    def _wait(self) -> None:
        if self._open_manager is None:
            return
        with explaining(f"saving in {self.directory}"):
            try:
                self._open_manager.wait_until_finished()
                # The next save starts another: only one thread at a time removes what is on its way out.
                if self._deletion is not None:
                    self._deletion.join()
                self._directory.sync()  # the name of the last checkpoint
            except BaseException:
                self._give_up()
                raise
            self._last_save = None

    def _give_up(self) -> None:
        """Drop a manager whose save failed, since it would raise that error again, and remove what the save left."""
        manager, self._open_manager = self._open_manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # what failed fails in the background too
                manager.close()
        # Its threads may still write into the folder that `clean` removes.
        if self._last_save is not None and self._last_save.saving is not None:  # Orbax may not have come to it
            self._last_save.saving.abandon()
        self._last_step = self._step_before
        self._directory.clean()

    def _delete_old(self, manager: ocp.CheckpointManager) -> None:
        """Remove the files of old checkpoints, once the new one is there."""
        with contextlib.suppress(Exception):  # `wait` raises it
            manager.wait_until_finished()
        self._directory.empty_deleted()

    def _manager(self) -> ocp.CheckpointManager:
        if self._open_manager is None:
            with explaining(f"opening {self.directory}"):
                self._open_manager = Manager(pathlib.Path(self.directory), options=self._options)
        return self._open_manager

    def _take_lock(self, mesh: Mesh) -> None:
        """Keep other runs from saving here."""
        if not self._directory.is_locked:
            AllProcesses(mesh, "taking the directory of checkpoints", CheckpointError).do(self._directory.lock)

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
        self.wait()

        def read(step: int) -> tuple[TrainState, Any, bool]:
            with self._open_step(step, program.mesh) as saved:
                # The position first: if there is none for this process, nothing of the program's is overwritten.
                position = None if data is None else own_position(saved.folder, saved.num_processes, saved.data)
                return restore_state(program, saved, verify=self._verify), position, bool(saved.data)

        if step is not None:
            if step not in (steps := self._directory.steps()):
                raise CheckpointError(f"{self.directory} has no checkpoint of step {step}: there are {steps or 'none'}")
            state, position, has_position = read(step)
        elif (newest := self._directory.newest_whole(read)) is not None:
            step, (state, position, has_position) = newest
        else:
            raise CheckpointError(f"{self.directory} has no checkpoint: start from program.init(key)")
        # After the state was read: a restore that fails leaves the iterator where it was.
        if data is not None:
            data.set_state(position)
        elif has_position:
            logger.warning("step %d holds the position of an iterator, which restore(program, data=...) sets", step)
        self._last_step = step
        return state

    def _open_step(self, step: int, mesh: Mesh) -> SavedState:
        """Open a checkpoint in all processes, or raise DamagedError in all, so that all pass the same ones over."""
        states: list[SavedState] = []  # of one, once it is open
        folder = self._directory.state_folder(step)
        try:
            together = AllProcesses(mesh, f"opening step {step}", CheckpointError, DamagedError)
            together.do(lambda: states.append(SavedState(folder)))
        except BaseException:
            # Opened here and refused by another process: none of them reads it.
            for saved in states:
                saved.close()
            raise
        return states[0]

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order."""
        self.wait()
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """Return the newest step of which all files are there, in the size in which they were saved; None if there is none.

        One that is not so is passed over with a warning.
        """
        self.wait()
        newest = self._directory.newest_whole(self._check_sizes, required=False)
        return None if newest is None else newest[0]

    def _check_sizes(self, step: int) -> None:
        with SavedState(self._directory.state_folder(step)) as saved:
            saved.check(checksums=False)

    def best_step(self) -> int | None:
        """Return the step of the best metric, with `best_metric`; else the latest."""
        self.wait()
        return self._manager().best_step()

    def close(self) -> None:
        """Wait for a save in the background, and unlock the directory. The end of the program does this too."""
        with self._mutex:
            self._is_closed = True
            _OPEN.discard(self)
            try:
                self._wait()
            finally:
                # Also after a save that failed: else this process would keep other runs from the directory.
                manager, self._open_manager = self._open_manager, None
                if manager is not None:
                    manager.close()
                self._directory.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# Those that have begun a save and are not closed.
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


def _check_settings(max_to_keep: Any, save_interval_steps: Any, best_metric: Any, best_mode: Any, max_host_bytes: Any) -> None:
    for name, value in (("max_to_keep", max_to_keep), ("save_interval_steps", save_interval_steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: an integer of at least 1 is needed")
    if isinstance(max_host_bytes, bool) or not isinstance(max_host_bytes, int | None) or (max_host_bytes or 0) < 0:
        raise ValueError(f"max_host_bytes={max_host_bytes!r}: None or an integer of at least 0 is needed")
    if not isinstance(best_metric, str | None):
        raise ValueError(f"best_metric={best_metric!r}: None or the name of a metric is needed")
    if best_mode not in ("min", "max"):
        raise ValueError(f"best_mode={best_mode!r}: 'min' or 'max' is needed")


def _comparable(value: float, mode: str) -> float:
    """Return a metric for comparing checkpoints: NaN becomes the worst value."""
    return value if not math.isnan(value) else (math.inf if mode == "min" else -math.inf)
