"""Checkpoints of a program's whole state, on Orbax: asynchronous, atomic, and independent of where
the bytes lived.

    with zj.Checkpointer("runs/gpt/checkpoints", max_to_keep=3, save_interval_steps=100) as ckpt:
        state = ckpt.restore(program, data=data)     the newest whole checkpoint, on any mesh, stage, tier and precision
        for batch in data:
            state, metrics = program.step(state, batch)
            ckpt.save(program, state, data=data)     the step waits only for copies to host memory

    {directory}/{step}/state       records, and what they hold (`zerojax.checkpoint.manifest`)
    {directory}/{step}/config      config, mesh and versions, as JSON

Orbax makes a checkpoint appear whole or not at all, and lets the processes of a run wait for each
other. The arrays are not Orbax's: its format is read and written leaf by leaf, so a stack of
layers, or a tier on disk, would pass through memory whole; here a record of one layer is the unit,
which a disk's records are linked as. `zerojax.weights` writes weights in Orbax's own format.

The promise: `restore` returns the newest state whose save was confirmed, unless its bytes were
  damaged on disk. A save is
confirmed when `wait`, `close`, or a later `save` or `restore`, returns without an error. A save
that fails removes nothing, renames nothing, and may be tried again.

This module holds the order of events in a save and in a restore. `zerojax.checkpoint.directory`
says what lies in the directory, and what is renamed and removed there;
`zerojax.checkpoint.retention` which steps are kept. `zerojax.checkpoint.save` and
`zerojax.checkpoint.restore` write and read the state.
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
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explained, explaining
from zerojax.checkpoint.iterators import check_position, own_position
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.orbax import SAVING, StateSave, StepWriter
from zerojax.checkpoint.program_state import describe, restore_state
from zerojax.checkpoint.retention import Retention
from zerojax.given import as_integer, as_path, whole_number
from zerojax.program import Program
from zerojax.runtime import AllProcesses, interrupts_wait
from zerojax.sharding import without_mesh
from zerojax.state import TrainState

logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step that is being saved.

    Attributes:
      number: of the step.
      before: the step from which the run went on, saved or restored; None for neither.
      aside: steps of a run that was rolled back, to be set aside once this one is there.
      folder: under which it appears.
    """

    number: int
    before: int | None
    aside: tuple[int, ...]
    folder: str


class Checkpointer:
    """Saves and restores the states of programs. As a context manager it waits at the end for a
    save in the background.

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
          max_to_keep: newest checkpoints to keep, or best ones and the newest; None keeps all.
          save_interval_steps: `save` skips steps that are no multiple of it.
          best_metric: name in `metrics`, by which the checkpoints to keep are chosen.
          best_mode: whether the least or the greatest is best.
          is_async: go on while a checkpoint is written. A second save waits for the first.
          max_host_bytes: that a process's copies of what rests in memory may take while they wait
            to be written; the step waits if they would take more. None: all at once, which are the
            bytes of this process's shards of weights and optimizer state that are not on disk.
          verify: compare checksums of all bytes before a restore, and in `latest_step`; False
            compares sizes alone.

        Raises:
          ValueError: settings out of range.
          CheckpointError: the directory cannot be made.
        """
        if max_to_keep is not None:
            max_to_keep = whole_number("max_to_keep", max_to_keep, 1, ", or None to keep all")
        save_interval_steps = whole_number("save_interval_steps", save_interval_steps, 1)
        if max_host_bytes is not None:
            max_host_bytes = whole_number(
                "max_host_bytes", max_host_bytes, 0, ", or None for no limit"
            )
        _check_best(best_metric, best_mode)
        path = as_path(directory)
        if path is None:
            raise ValueError(
                f"directory={directory!r}: a folder's path is needed, a str or an os.PathLike of one"
            )
        if "://" in path:
            raise ValueError(
                f"directory={path!r}: records are files of a file system; mount the bucket"
            )
        self._directory = Directory(path)
        self.directory = self._directory.path
        self._interval, self._max_host_bytes, self._verify = (
            save_interval_steps,
            max_host_bytes,
            verify,
        )
        self._is_async, self._best_metric = is_async, best_metric
        self._retention = Retention(max_to_keep, best_metric, best_mode)
        self._directory.make()
        self._writer = StepWriter()
        self._mutex = threading.RLock()  # one call at a time; `save` and `restore` call `wait`
        self._pid = os.getpid()
        self._is_closed = False
        self._last_step: int | None = None  # that was saved or restored
        self._saving: _Step | None = None  # until it is settled

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
        """Save a state, at its own step number; in a run of several processes all call this.

        Args:
          program: that made the state.
          state: from `init`, `step` or `restore`; not donated yet. It may go on to the next step
            when this returns.
          metrics: of the step, to choose the best checkpoints by.
          data: this process's iterator; what its `get_state()` returns is saved too.
          force: whatever the interval says.

        Returns:
          Whether it saves: False for a step between intervals, and for the one that was saved or
            restored last.

        Raises:
          ValueError: the state was donated, or is not the one on disk; or `data` cannot be saved.
          CheckpointError: this save, or the last one in the background, failed; the state and older
            checkpoints are as they were. Or the directory holds checkpoints of another run.
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
            raise CheckpointError(f"this Checkpointer of {self.directory} is closed: make another")
        state = program.check_state(state)
        # Waits for the step that makes this state.
        step = int(state.step)
        if (not force and step % self._interval) or (
            step == self._last_step and self._saving is None
        ):
            return False
        _note(program, "save")
        together = AllProcesses(program.mesh, SAVING, CheckpointError)
        # refused before anything is touched, and by all processes
        together.do(lambda: check_position(data))
        if self._best_metric is not None and (metrics is None or self._best_metric not in metrics):
            names = sorted(metrics or ())
            raise ValueError(
                f"best_metric={self._best_metric!r}: metrics with that name are needed, got {names}"
            )
        kept = None if self._best_metric is None else _numbers(metrics or {})
        # Before the directory is listed: from here on no other run may add or remove a step.
        self._take_lock(program.mesh)
        together.do(self._wait)
        together.do(self._settle_again)
        if step == self._last_step:
            return False
        together.do(self._directory.check_writable)
        saving = self._step_to_save(program.mesh, step)
        with explaining(f"saving step {step} in {self.directory}"):
            self._begin_save(program, state, saving, kept, data)
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
        """Let Orbax begin the save, and go on with it beside the next steps; if it fails, all is as
        it was before.
        """
        # Of frozen weights alone: what trains is another thing at each step.
        last = (
            self._directory.state_folder(saving.before)
            if program.layout.frozen and saving.before is not None
            else None
        )
        save = StateSave(program, state, self._max_host_bytes, data, self._writer.barrier, last)
        # From here on the end of the program has something to wait for.
        _OPEN.add(self)
        # An interrupt comes when the save has begun, or was given up: in between, nobody would know
        # of what it has opened.
        with interrupts_wait(all_wait=True):
            # `_give_up` takes this back if the save fails.
            self._saving, self._last_step = saving, saving.number
            try:
                self._writer.begin(
                    saving.folder, save, describe(program), metrics, lambda: self._settle(saving)
                )
            except BaseException:
                with contextlib.suppress(Exception):  # of which this error told already
                    self._writer.wait()
                self._give_up()
                raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # neither the threads nor the lock are here
            raise CheckpointError(
                f"this Checkpointer of {self.directory} was made before a fork: make another in this process"
            )

    def _step_to_save(self, mesh: Mesh, step: int) -> _Step:
        """Return where a step is to appear, and what is newer than the step from which this run
        went on.

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
                    f"{self.directory} holds checkpoints of steps up to {max(steps)}, of another run, and this state is at "
                    f"step {step}: restore and go on from there, or give another directory"
                )

        together = AllProcesses(mesh, SAVING, CheckpointError)
        together.do(look)
        aside = tuple(other for other in steps if last is not None and other > last)
        # Only process 0 has listed the directory, and all write into one folder.
        replaces = together.least(0 if step in aside else 1) == 0
        return _Step(step, last, aside, self._directory.new_folder(step, replaces=replaces))

    def _settle(self, saving: _Step) -> None:
        """Make a step that has appeared the newest one, and then remove those that are no longer
        kept.
        """
        for name in self._directory.settle(saving.number, saving.aside):
            logger.warning(
                "%s: step %s is set aside as %s, as this run went on from step %s",
                self.directory,
                name.partition(".")[0],
                name,
                saving.before,
            )
        try:
            self._directory.delete(self._retention.surplus(self._directory))
        except (OSError, CheckpointError) as error:
            # The new step is there, so the save did not fail. The next one tries again.
            logger.warning(
                "%s: old checkpoints were not removed: %s",
                self.directory,
                explained(error, "removing them"),
            )

    def _settle_again(self) -> None:
        """Settle a step that has appeared, if that failed before."""
        if self._saving is None:
            return
        with explaining(f"saving step {self._saving.number} in {self.directory}"):
            if not self._has_appeared(self._saving):
                self._last_step = self._saving.before
            elif jax.process_index() == 0:
                self._settle(self._saving)
        self._saving = None

    def _has_appeared(self, saving: _Step) -> bool:
        """Tell whether a step whose save failed is there nevertheless.

        Raises:
          OSError: that cannot be told.
        """
        # Of several processes, others could see the disk before or after this one does, and all
        # must find the same.
        is_alone = jax.process_count() == 1
        return self._writer.has_appeared or (
            is_alone and is_folder(os.path.join(saving.folder, STATE))
        )

    @without_mesh
    def wait(self) -> None:
        """Wait until what was saved is on disk.

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
                if (
                    not self._writer.is_writing
                ):  # else the wait was interrupted, and the save goes on
                    self._give_up()
                raise
            self._saving = None

    def _give_up(self) -> None:
        """Go back to the step before a save that failed, and remove what it left; if its step is
        there, it stays.
        """
        assert self._saving is not None
        # Where it cannot be told, the next call asks again.
        with contextlib.suppress(OSError):
            if not self._has_appeared(self._saving):
                self._last_step, self._saving = self._saving.before, None
        with contextlib.suppress(OSError):  # the save's own error is told
            self._directory.clean()

    def _take_lock(self, mesh: Mesh) -> None:
        """Keep other runs from saving here."""
        if self._directory.is_locked:
            return
        try:
            AllProcesses(mesh, "taking the directory of checkpoints", CheckpointError).do(
                self._directory.lock
            )
        except BaseException:
            # Refused in process 0 alone: all must ask for it again.
            self._directory.unlock()
            raise

    # --- restoring --------------------------------------------------------------------------------

    @without_mesh
    def restore(self, program: Program, step: int | None = None, *, data: Any = None) -> TrainState:
        """Return a saved state, as this program's; in a run of several processes all call this.

        Args:
          program: of the same model and optimizer as the one that saved, on any mesh, stage, tier,
            precision and number of tiles. What it had on disk is overwritten, once the checkpoint
            was found whole.
          step: None takes the newest one; if that is damaged, a warning names it, and the newest
            whole one is taken.
          data: this process's iterator; its `set_state` is called with what was saved.

        Raises:
          CheckpointError: there is none, or it is of another model; leaves that differ are named.
          IteratorError: with `data`, it was saved without, or by another number of processes;
            restore without it then.
          DamagedError: the step asked for is not whole, or none is.
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

        def read(step: int) -> tuple[TrainState, Any, bool]:
            with self._open_step(step, program.mesh) as saved:
                # The position first: if there is none for this process, nothing of the program's is
                # overwritten.
                position = (
                    None
                    if data is None
                    else own_position(saved.folder, saved.num_processes, saved.data)
                )
                return (
                    restore_state(program, saved, verify=self._verify),
                    position,
                    bool(saved.data),
                )

        if step is not None:
            if step not in (steps := self._directory.steps()):
                raise CheckpointError(
                    f"{self.directory} has no checkpoint of step {step}: there are {steps or 'none'}"
                )
            state, position, has_position = read(step)
        elif (newest := self._directory.newest_whole(read)) is not None:
            step, (state, position, has_position) = newest
        else:
            raise CheckpointError(
                f"{self.directory} has no checkpoint: start from program.init(key)"
            )
        # After the state was read: a restore that fails leaves the iterator where it was.
        if data is not None:
            data.set_state(position)
        elif has_position:
            logger.warning(
                "step %d holds the position of an iterator, which restore(program, data=...) sets",
                step,
            )
        self._last_step, self._saving = step, None
        return state

    def _open_step(self, step: int, mesh: Mesh) -> SavedState:
        """Open a checkpoint in all processes, or raise DamagedError in all, so that all pass the
        same ones over.
        """
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

    @without_mesh
    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order."""
        self.wait()
        return self._directory.steps()

    @without_mesh
    def latest_step(self) -> int | None:
        """Return the newest step that is whole, which `restore` would take; None if there is none.

        One that is not whole is passed over with a warning. With `verify=True` all bytes are read
        to tell, as in a restore: whether there are checkpoints at all is told by `all_steps`, at no
        cost. In a run of several processes all call this.

        Raises:
          CheckpointError: a checkpoint cannot be read now, so that it cannot be told whether it is
            whole.
        """
        self.wait()
        newest = self._directory.newest_whole(self._check, required=False)
        return None if newest is None else newest[0]

    def _check(self, step: int) -> None:
        """Compare a checkpoint with what was saved, as `restore` does: the processes share the
        reading, and agree.
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
        """Return the step of the best metric, with `best_metric`; else the newest. None if there is
        none.

        Whether it is whole is not looked at: `restore` of it raises DamagedError if it is not.

        Raises:
          CheckpointError: the directory or the metrics cannot be read now.
        """
        self.wait()
        return self._retention.best(self._directory)

    @without_mesh
    def close(self) -> None:
        """Wait for a save in the background, and unlock the directory. The end of the program does
        this too.

        An interrupt of the wait leaves both to the next call, or to the end of the program.
        """
        if (
            os.getpid() != self._pid
        ):  # the threads and the lock are those of the process from which this one was forked
            _OPEN.discard(self)
            return
        with self._mutex:
            try:
                self._wait()
            finally:
                # Also after a save that failed: else this process would keep other runs from the
                # directory. But not where the wait was interrupted: the save goes on, and another
                # run would remove what it writes.
                if not self._writer.is_writing:
                    self._is_closed = True
                    _OPEN.discard(self)
                    try:
                        self._writer.close()
                    finally:
                        self._directory.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _note(program: Program, call: str) -> None:
    """Compare a call with those of the other processes, which would wait for this one without end.

    Raises:
      ValueError, RuntimeError: another process makes another call, or left.
    """
    if program.calls is not None:
        program.calls.note(call, None, tuple)


# Those that have begun a save and are not closed.
_OPEN: "set[Checkpointer]" = set()


def _close_all() -> None:
    """Close what is still open when the program ends, while threads may still be started."""
    for ckpt in list(_OPEN):
        try:
            ckpt.close()
        except Exception:
            logger.exception("the last checkpoint in %s was not saved", ckpt.directory)


# Before Python's executors refuse work, of which Orbax's threads have some: `atexit` comes after
# that.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _check_best(best_metric: Any, best_mode: Any) -> None:
    if not isinstance(best_metric, str | None):
        raise ValueError(f"best_metric={best_metric!r}: None or the name of a metric is needed")
    if best_mode not in ("min", "max"):
        raise ValueError(f"best_mode={best_mode!r}: 'min' or 'max' is needed")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as JSON can hold them.

    Raises:
      ValueError: one is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"metrics[{name!r}] is {value!r:.100}: a number is needed") from error
    return numbers
