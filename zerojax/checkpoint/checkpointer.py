"""Checkpoints of a program's full state: asynchronous, atomic, and independent of the tiers.

    with zj.Checkpointer("runs/gpt/checkpoints", max_to_keep=3, save_interval_steps=100) as ckpt:
        # the newest intact checkpoint, on any mesh, stage, tier and precision
        state = ckpt.restore(program, data=data)
        for batch in data:
            state, metrics = program.step(state, batch)
            # the step waits only for copies to host memory
            ckpt.save(program, state, data=data)

    {directory}/{step}/state       records and their description (`zerojax.checkpoint.manifest`)
    {directory}/{step}/config      config, mesh and versions, as JSON

Orbax makes a checkpoint appear complete or not at all, and lets the processes of a run wait for
each other. Orbax does not write the arrays. Its format is read and written leaf by leaf, so a full
stack of layers, or all of a tier on disk, would pass through memory. Here the unit is the record of
one layer, and records on disk are hard-linked. `zerojax.weights` writes weights in Orbax's own
format.

The promise: `restore` returns the newest state whose save was confirmed, unless its bytes were
damaged on disk. A save is confirmed when `wait`, `close`, or a later `save` or `restore` returns
without an error. A failed save removes nothing, renames nothing, and may be retried.

This module defines the order of events in a save and in a restore. `zerojax.checkpoint.directory`
describes the directory's contents and renames and removes entries. `zerojax.checkpoint.retention`
chooses the steps to keep. `zerojax.checkpoint.save` and `zerojax.checkpoint.restore` write and read
the state.
"""

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.checkpoint.directory import STATE, Directory, is_folder
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    IteratorError,
    explained,
    explaining,
)
from zerojax.checkpoint.iterators import check_position, own_position
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.orbax import SAVING, StateSave, StepWriter
from zerojax.checkpoint.program_state import describe, restore_state
from zerojax.checkpoint.retention import Retention
from zerojax.program import Program
from zerojax.runtime import AllProcesses, interrupts_wait
from zerojax.sharding import without_mesh
from zerojax.state import TrainState
from zerojax.user_values import as_integer, as_path, whole_number

logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step that is being saved.

    Attributes:
      number: number of the step.
      before: step from which the run continued, saved or restored; None if there is none.
      aside: steps of a rolled-back run, to be set aside once this step has appeared.
      folder: folder in which the step appears.
      removes: whether the step replaces a checkpoint of the same state with an update to apply,
        which is removed once this step has appeared.
    """

    number: int
    before: int | None
    aside: tuple[int, ...]
    folder: str
    removes: bool = False


class Checkpointer:
    """Save and restore the states of programs.

    As a context manager it waits at the end for a save in the background.

    Attributes:
      directory: absolute path of the directory of checkpoints.
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
        """Use a directory of checkpoints; it is created if it does not exist.

        Args:
          directory: path on a file system that all processes share.
          max_to_keep: number of newest checkpoints to keep; with `best_metric`, the number of best
            ones, and the newest is kept too. None keeps all.
          save_interval_steps: `save` skips steps that are not a multiple of it.
          best_metric: name in `metrics` by which the checkpoints to keep are chosen.
          best_mode: whether the smallest ("min") or the largest ("max") metric is best.
          is_async: whether training continues while a checkpoint is written. A second save waits
            for the first.
          max_host_bytes: most bytes per process for copies, of state stored in memory, that wait to
            be written; the step waits if they would exceed it. None copies everything at the same
            time: the bytes of this process's shards of weights and optimizer state that are not on
            disk.
          verify: compare checksums of all bytes before a restore, and in `latest_step`; False
            compares only sizes.

        Raises:
          ValueError: settings are out of range.
          CheckpointError: the directory cannot be created.
        """
        if max_to_keep is not None:
            max_to_keep = whole_number("max_to_keep", max_to_keep, 1, ", or None to keep all")
        save_interval_steps = whole_number("save_interval_steps", save_interval_steps, 1)
        if max_host_bytes is not None:
            max_host_bytes = whole_number(
                "max_host_bytes", max_host_bytes, 0, ", or None for no limit"
            )
        _check_best(best_metric, best_mode)
        self._directory = Directory(_checked_directory(directory))
        self.directory = self._directory.path
        self._interval = save_interval_steps
        self._max_host_bytes = max_host_bytes
        self._verify = verify
        self._is_async = is_async
        self._best_metric = best_metric
        self._retention = Retention(max_to_keep, best_metric, best_mode)
        self._directory.make()
        self._writer = StepWriter()
        self._mutex = threading.RLock()  # one call at a time; `save` and `restore` call `wait`
        self._pid = os.getpid()
        self._is_closed = False
        self._last_step: int | None = None  # last saved or restored step
        self._saving: _Step | None = None  # None once it is settled
        # last step that was saved or restored with an update to apply
        self._unsettled_step: int | None = None

    # --- saving -----------------------------------------------------------------------------------

    @without_mesh
    def save(
        self,
        program: Program,
        state: TrainState,
        *,
        metrics: Mapping[str, Any] | None = None,
        data: Any = None,
        force: bool = False,
    ) -> bool:
        """Save a state under its own step number.

        In a run with several processes, all of them must call this.

        Args:
          program: program that returned the state.
          state: state from `init`, `step` or `restore`, not donated yet. The next step may take it
            as soon as this returns.
          metrics: metrics of the step, by which the best checkpoints are chosen.
          data: this process's iterator; the result of its `get_state()` is saved too.
          force: save even between intervals.

        Returns:
          Whether the state is being saved: False for a step between intervals, and for the last
            saved or restored step. But if that checkpoint holds an update to apply, with
            update="in_forward", a state of this step without one is saved, and replaces it.

        Raises:
          ValueError: the state was donated, or is not the one on disk; or `data` cannot be saved.
          CheckpointError: this save, or the last one in the background, failed; the state and older
            checkpoints are unchanged. Or the directory holds checkpoints of another run.
          SwapError: the state on disk is lost.
        """
        with self._mutex:
            return self._save(program, state, metrics, data, force)

    def _save(
        self,
        program: Program,
        state: TrainState,
        metrics: Mapping[str, Any] | None,
        data: Any,
        force: bool,
    ) -> bool:
        self._check_process()
        if self._is_closed:
            raise CheckpointError(
                f"this Checkpointer of {self.directory} is closed: create another"
            )
        state = program.check_state(state)
        # Waits for the step that computes this state.
        step = int(state.step)
        may_replace = step == self._unsettled_step and not program.settler.has_update(state)
        if (not force and not may_replace and step % self._interval) or (
            step == self._last_step and self._saving is None and not may_replace
        ):
            return False
        _note(program, "save")
        together = AllProcesses(program.mesh, SAVING, CheckpointError)
        # All processes refuse it together, before anything is changed.
        together.do(lambda: check_position(data))
        if self._best_metric is not None and (metrics is None or self._best_metric not in metrics):
            names = sorted(metrics or ())
            raise ValueError(
                f"best_metric={self._best_metric!r}: metrics with that name are needed, got {names}"
            )
        kept_metrics = None if self._best_metric is None else _numbers(metrics or {})
        # Taken before the directory is listed: from here on no other run may add or remove a step.
        self._take_lock(program.mesh)
        together.do(self._wait)
        together.do(self._settle_again)
        replaces = may_replace and step == self._last_step and self._is_unsettled(together, step)
        if step == self._last_step and not replaces:
            return False
        if replaces and data is None:
            together.do(lambda: self._check_no_position(step))
        together.do(self._directory.check_writable)
        saving = self._step_to_save(program.mesh, step, replaces)
        with explaining(f"saving step {step} in {self.directory}"):
            self._begin_save(program, state, saving, kept_metrics, data)
        if not self._is_async:
            together.do(self._wait)
        return True

    def _begin_save(
        self,
        program: Program,
        state: TrainState,
        saving: _Step,
        metrics: Mapping[str, float] | None,
        data: Any,
    ) -> None:
        """Let Orbax begin the save, which continues during the next steps.

        If it fails, everything is as before.
        """
        # Only frozen weights can be linked; trainable ones change at each step.
        last = None
        if program.layout.frozen and saving.before is not None:
            last = self._directory.state_folder(saving.before)
        save = StateSave(program, state, self._max_host_bytes, data, self._writer.barrier, last)
        # From here on, the end of the program has a save to wait for.
        _OPEN.add(self)
        # An interrupt is delivered once the save has begun or was given up. In between, nothing
        # would know which files the save has opened.
        with interrupts_wait(all_wait=True):
            # `_give_up` undoes this if the save fails.
            self._saving = saving
            self._last_step = saving.number
            if program.settler.has_update(state):
                self._unsettled_step = saving.number
            try:
                self._writer.begin(
                    saving.folder, save, describe(program), metrics, lambda: self._settle(saving)
                )
            except BaseException:
                with contextlib.suppress(Exception):  # this error already reports it
                    self._writer.wait()
                self._give_up()
                raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # the threads and the lock stayed in the parent
            raise CheckpointError(
                f"this Checkpointer of {self.directory} was created before a fork: "
                "create another in this process"
            )

    def _is_unsettled(self, together: AllProcesses, step: int) -> bool:
        """Return whether the checkpoint of a step holds an update that the next step applies.

        A damaged checkpoint counts as one that does.

        Raises:
          CheckpointError: it cannot be read now.
        """
        found: list[bool] = []

        def look() -> None:
            if jax.process_index() != 0:
                return
            try:
                with SavedState(self._directory.state_folder(step)) as saved:
                    found.append(not saved.is_settled)
            except DamagedError:
                found.append(True)

        together.do(look)
        return together.least(0 if any(found) else 1) == 0

    def _check_no_position(self, step: int) -> None:
        """Raise IteratorError if a checkpoint to replace holds the position of an iterator."""
        if jax.process_index() != 0:
            return
        with (
            contextlib.suppress(DamagedError),
            SavedState(self._directory.state_folder(step)) as saved,
        ):
            if saved.data:
                raise IteratorError(
                    f"the checkpoint {saved.folder} holds the position of the iterator in data, "
                    "which saving in its place would lose: save with data= again"
                )

    def _step_to_save(self, mesh: Mesh, step: int, removes: bool) -> _Step:
        """Return where a step will appear, and which newer steps will be set aside.

        Args:
          mesh: mesh of the program.
          step: number of the step.
          removes: whether an earlier checkpoint of the step is replaced.

        Raises:
          CheckpointError: the directory holds another run's steps.
        """
        steps: list[int] = []
        last = self._last_step

        def look() -> None:
            steps.extend(self._directory.steps() if jax.process_index() == 0 else ())
            # A run that restored nothing must not mix its steps with another run's.
            if steps and (max(steps) >= step if last is None else step < last):
                raise CheckpointError(
                    f"{self.directory} holds checkpoints of steps up to {max(steps)}, of another "
                    f"run, and this state is at step {step}: restore and continue from there, or "
                    "use another directory"
                )

        together = AllProcesses(mesh, SAVING, CheckpointError)
        together.do(look)
        first = step if removes else None if last is None else last + 1
        aside = tuple(number for number in steps if first is not None and number >= first)
        # Only process 0 has listed the directory, and all processes write into the same folder.
        replaces = together.least(0 if step in aside else 1) == 0
        folder = self._directory.new_folder(step, replaces=replaces)
        return _Step(step, last, aside, folder, removes)

    def _settle(self, saving: _Step) -> None:
        """Make a step that has appeared the newest one, then remove the surplus steps."""
        names = self._directory.settle(saving.number, saving.aside, removes=saving.removes)
        for name in names:
            logger.warning(
                "%s: step %s is set aside as %s, as this run continued from step %s",
                self.directory,
                name.partition(".")[0],
                name,
                saving.before,
            )
        try:
            self._directory.delete(self._retention.surplus(self._directory))
        except (OSError, CheckpointError) as error:
            # The new step has appeared, so the save did not fail. The next save tries again.
            logger.warning(
                "%s: old checkpoints were not removed: %s",
                self.directory,
                explained(error, "removing them"),
            )

    def _settle_again(self) -> None:
        """Settle a step that has appeared, if settling it failed before."""
        if self._saving is None:
            return
        with explaining(f"saving step {self._saving.number} in {self.directory}"):
            if not self._has_appeared(self._saving):
                self._last_step = self._saving.before
            elif jax.process_index() == 0:
                self._settle(self._saving)
        self._saving = None

    def _has_appeared(self, saving: _Step) -> bool:
        """Return whether a step has appeared although its save failed.

        Raises:
          OSError: the file system does not say.
        """
        # With several processes, the others could see the disk before or after this one does, and
        # all must agree.
        is_alone = jax.process_count() == 1
        return self._writer.has_appeared or (
            is_alone and is_folder(os.path.join(saving.folder, STATE))
        )

    @without_mesh
    def wait(self) -> None:
        """Wait until the last saved state is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        self._check_process()
        with self._mutex:
            self._wait()

    def _wait(self) -> None:
        if not self._writer.is_writing:
            return
        with explaining(f"saving in {self.directory}"):
            try:
                self._writer.wait()
            except BaseException:
                # Otherwise the wait was interrupted, and the save continues.
                if not self._writer.is_writing:
                    self._give_up()
                raise
            self._saving = None

    def _give_up(self) -> None:
        """Return to the step before a failed save, and remove the files that the save left.

        If the save's step has appeared after all, it stays.
        """
        assert self._saving is not None
        # If the file system does not say, the next call asks again.
        with contextlib.suppress(OSError):
            if not self._has_appeared(self._saving):
                self._last_step = self._saving.before
                self._saving = None
        with contextlib.suppress(OSError):  # the save's own error is raised
            self._directory.clean()

    def _take_lock(self, mesh: Mesh) -> None:
        """Take the directory's lock, so that other runs cannot save here."""
        if self._directory.is_locked:
            return
        try:
            AllProcesses(mesh, "locking the directory of checkpoints", CheckpointError).do(
                self._directory.lock
            )
        except BaseException:
            # Only process 0 knows of a refusal; all must ask again.
            self._directory.unlock()
            raise

    # --- restoring --------------------------------------------------------------------------------

    @without_mesh
    def restore(self, program: Program, step: int | None = None, *, data: Any = None) -> TrainState:
        """Return a saved state as a state of this program.

        In a run with several processes, all of them must call this.

        Args:
          program: program with the same model and optimizer as the one that saved, on any mesh,
            stage, tier, precision and number of tiles. Its state on disk is overwritten once the
            checkpoint was found intact.
          step: number of the step, or None for the newest one. If the newest is damaged, a warning
            names it, and the newest intact step is restored.
          data: this process's iterator; its `set_state` is called with the saved position.

        Raises:
          CheckpointError: there is no checkpoint, or it belongs to another model; the error names
            the leaves that differ.
          IteratorError: `data` was given, but the checkpoint holds no positions, or another number
            of processes saved them; restore without `data` then.
          DamagedError: the requested step is damaged, or all steps are.
          SwapError: the program's disk is too small, or failed.
        """
        with self._mutex:
            return self._restore(program, step, data)

    def _restore(self, program: Program, step: int | None, data: Any) -> TrainState:
        if step is not None:
            number = as_integer(step)
            if number is None:
                raise ValueError(f"step={step!r}: None or the number of a step is needed")
            step = number
        self._check_process()
        _note(program, "restore" if step is None else f"restore of step {step}")
        AllProcesses(program.mesh, SAVING, CheckpointError).do(self._wait)

        unsettled: list[int] = []

        def read(step: int) -> tuple[TrainState, Any, bool]:
            with self._open_step(step, program.mesh) as saved:
                if not saved.is_settled:
                    unsettled.append(step)
                # The position first: if this process has none, nothing of the program's is
                # overwritten.
                position = None
                if data is not None:
                    position = own_position(saved.folder, saved.num_processes, saved.data)
                state = restore_state(program, saved, verify=self._verify)
                return state, position, bool(saved.data)

        if step is not None:
            steps = self._directory.steps()
            if step not in steps:
                raise CheckpointError(
                    f"{self.directory} has no checkpoint of step {step}: its steps are "
                    f"{steps or 'none'}"
                )
            state, position, has_position = read(step)
        else:
            newest = self._directory.newest_whole(read)
            if newest is None:
                raise CheckpointError(
                    f"{self.directory} has no checkpoint: start from program.init(key)"
                )
            step, (state, position, has_position) = newest
        # After the state was read: a failed restore leaves the iterator where it was.
        if data is not None:
            data.set_state(position)
        elif has_position:
            logger.warning(
                "step %d holds the position of an iterator: pass data= to restore to set it",
                step,
            )
        self._last_step = step
        self._saving = None
        if step in unsettled:
            self._unsettled_step = step
        return state

    def _open_step(self, step: int, mesh: Mesh) -> SavedState:
        """Open a checkpoint in all processes, or raise DamagedError in all of them.

        So all processes skip the same damaged checkpoints.
        """
        states: list[SavedState] = []  # holds one state once it is open
        folder = self._directory.state_folder(step)
        try:
            together = AllProcesses(mesh, f"opening step {step}", CheckpointError, DamagedError)
            together.do(lambda: states.append(SavedState(folder)))
        except BaseException:
            # Opened here but refused by another process: none of them reads it.
            for saved in states:
                saved.close()
            raise
        return states[0]

    @without_mesh
    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order.

        Raises:
          CheckpointError: the save in the background failed, or the directory cannot be read.
        """
        self.wait()
        return self._directory.steps()

    @without_mesh
    def latest_step(self) -> int | None:
        """Return the newest intact step, which `restore` would use, or None if there is none.

        Damaged steps are skipped with a warning. With `verify=True` this reads all bytes, as a
        restore does; `all_steps` costs nothing and shows whether there are checkpoints at all. In a
        run with several processes, all of them must call this.

        Raises:
          CheckpointError: a checkpoint cannot be read now, so it is not known whether it is intact.
        """
        self.wait()
        newest = self._directory.newest_whole(self._check, required=False)
        return None if newest is None else newest[0]

    def _check(self, step: int) -> None:
        """Compare a checkpoint with its descriptions, as `restore` does.

        The processes share the reading, and all raise if one does.
        """

        def check() -> None:
            with SavedState(self._directory.state_folder(step)) as saved:
                saved.check(
                    checksums=self._verify, part=jax.process_index(), num_parts=jax.process_count()
                )

        mesh = Mesh(np.asarray(jax.devices()), ("devices",))
        AllProcesses(mesh, f"reading step {step}", CheckpointError, DamagedError).do(check)

    @without_mesh
    def best_step(self) -> int | None:
        """Return the step with the best metric, or the newest one without `best_metric`.

        None if there is none. The step is not checked for damage: restoring it raises DamagedError
        if it is damaged.

        Raises:
          CheckpointError: the directory or the metrics cannot be read now.
        """
        self.wait()
        return self._retention.best(self._directory)

    @without_mesh
    def close(self) -> None:
        """Wait for a save in the background, and unlock the directory.

        The end of the program does this too. If the wait is interrupted, the next call or the end
        of the program does both.

        Raises:
          CheckpointError: the save failed.
        """
        # The threads and the lock belong to the process that forked this one.
        if os.getpid() != self._pid:
            _OPEN.discard(self)
            return
        with self._mutex:
            try:
                self._wait()
            finally:
                # Also after a failed save: otherwise this process would keep other runs out of the
                # directory. But not if the wait was interrupted: the save continues, and another
                # run would remove its files.
                if not self._writer.is_writing:
                    self._is_closed = True
                    _OPEN.discard(self)
                    try:
                        self._writer.close()
                    finally:
                        self._directory.unlock()

    def __enter__(self) -> Self:
        """Return this Checkpointer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for a save in the background, and close."""
        self.close()


def _note(program: Program, call: str) -> None:
    """Compare a call with the calls of the other processes.

    A process that makes another call would otherwise wait for this one forever.

    Raises:
      ValueError, RuntimeError: another process makes another call, or left.
    """
    if program.calls is not None:
        program.calls.note(call, None, tuple)


# Checkpointers that have begun a save and are not closed.
_OPEN: "set[Checkpointer]" = set()


def _close_all() -> None:
    """Close open checkpointers when the program ends, while threads can still be started."""
    for ckpt in list(_OPEN):
        try:
            ckpt.close()
        except Exception:
            logger.exception("the last checkpoint in %s was not saved", ckpt.directory)


# This runs before Python's executors, some of which Orbax's threads use, refuse work; `atexit` is
# later.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _checked_directory(directory: str | os.PathLike[str]) -> str:
    """Return the path of a directory of checkpoints.

    Raises:
      ValueError: it is not a path in a file system.
    """
    path = as_path(directory)
    if path is None:
        raise ValueError(
            f"directory={directory!r}: the path of a folder is needed, as a str or an os.PathLike"
        )
    if "://" in path:
        raise ValueError(f"directory={path!r}: records need a file system: mount the bucket")
    return path


def _check_best(best_metric: Any, best_mode: Any) -> None:
    if not isinstance(best_metric, str | None):
        raise ValueError(f"best_metric={best_metric!r}: None or the name of a metric is needed")
    if best_mode not in ("min", "max"):
        raise ValueError(f"best_mode={best_mode!r}: 'min' or 'max' is needed")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers that JSON can hold.

    Raises:
      ValueError: a metric is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"metrics[{name!r}] is {value!r:.100}: a number is needed") from error
    return numbers
