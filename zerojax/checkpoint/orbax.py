"""How checkpoints use Orbax: it makes a step appear atomically, and our handler writes the state.

    writer.begin(folder, ...)   Orbax creates {folder}.orbax-checkpoint-tmp-*, and calls the handler
      StateHandler.async_save     while the step waits: `StateSave.begin`
    in Orbax's thread           waits for `StateSave.result`, then renames the folder
    in the writer's thread      waits for Orbax's, then settles the step and removes old ones
    writer.wait()               raises the error of either thread

Orbax knows nothing of the arrays: to it the state is one item, which writes its own files into the
folder. Only the directory says which steps exist and which are kept
(`zerojax.checkpoint.directory`). An additional list in memory, as in Orbax's CheckpointManager,
becomes wrong with every call that fails between changing the one and the other.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import CONFIG, METRICS, STATE
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.program_state import begin_save
from zerojax.checkpoint.save import Saving
from zerojax.program import Program
from zerojax.runtime import AllProcesses, BackgroundBarrier, interrupts_wait
from zerojax.state import TrainState

SAVING = "saving the checkpoint"
_LONGEST_SECONDS = 24 * 3600
"""Longest time that a process may write. JAX's heartbeats detect a dead process earlier."""
_STAGES = ("async_write_complete", "async_commit_complete", "settled")
"""Stages after which the processes wait for each other: two of Orbax's, and the writer's."""


class StateHandler(ocp.handlers.AsyncCheckpointHandler):
    """Writes the item "state".

    The state is not read through Orbax, which would return all of it together.
    """

    async def async_save(self, directory: Any, args: "StateSave") -> list[Any]:
        """Begin the save described by `args`."""
        args.begin(str(directory))
        # Orbax's thread calls `result` of each returned object, and only then renames the folder.
        return [args]

    # The base class requires this method. Orbax saves a step's items by `async_save`, even with
    # is_async=False.
    def save(self, directory: Any, args: "StateSave") -> None:
        """Save synchronously."""
        args.begin(str(directory))
        args.result()

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Raise NotImplementedError: `zerojax.Checkpointer.restore` reads the state."""
        raise NotImplementedError(f"{directory} is read by zerojax.Checkpointer.restore")


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """One save: the handler's inputs, and the work that remains for the background.

    Several processes wait for each other before Orbax's save returns: if one raised in `begin`, the
    others would wait for it. So the error is stored. `check` raises it in all processes once
    Orbax's save has returned. `result`, which runs during the next steps, raises it too, so that
    the checkpoint does not appear.
    """

    program: Program
    state: TrainState | None
    max_host_bytes: int | None
    data: Any
    barrier: BackgroundBarrier
    last: str | None = None
    saving: Saving | None = None
    error: BaseException | None = None

    def begin(self, folder: str) -> None:
        """Copy the arrays in memory, and keep the records on disk."""
        self.barrier.begin()
        try:
            assert self.state is not None
            self.saving = begin_save(
                self.program,
                self.state,
                folder,
                max_host_bytes=self.max_host_bytes,
                data=self.data,
                last=self.last,
            )
        except BaseException as error:
            # With one process no other waits, so the error can be raised immediately.
            if jax.process_count() == 1:
                raise
            self.error = error
        self.state = None  # the next step donates it

    def check(self) -> None:
        """Raise the error of the save so far, from this or another process."""
        AllProcesses(self.program.mesh, SAVING, CheckpointError).do(self._raise)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> None:
        """Write the remaining bytes."""
        del timeout
        self._raise()
        assert self.saving is not None
        self.saving.finish()


class StepWriter:
    """Writes states as steps, one after the other, during the steps of training."""

    def __init__(self) -> None:
        """Create a writer; no thread is started yet."""
        self.barrier = BackgroundBarrier(SAVING, CheckpointError, _STAGES)
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._save: StateSave | None = None
        self._thread: threading.Thread | None = None
        self._has_appeared = False
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save exists that `wait` must wait for."""
        return self._save is not None

    @property
    def has_appeared(self) -> bool:
        """Whether the last step that was begun has its name, in all processes."""
        return self._has_appeared

    def begin(
        self,
        folder: str,
        save: StateSave,
        config: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        settle: Callable[[], None],
    ) -> None:
        """Copy a state, and write it in the background.

        Args:
          folder: folder that is to appear.
          save: save of the state.
          config: config of the program, as JSON.
          metrics: metrics of the step; None saves none.
          settle: function that process 0 calls once the step has appeared.

        Raises:
          BaseException: the save failed, here or in another process. `wait` must still be called.
        """
        items: dict[str, Any] = {STATE: save, CONFIG: ocp.args.JsonSave(dict(config))}
        if metrics is not None:
            items[METRICS] = ocp.args.JsonSave(dict(metrics))
        # Here, in the thread of the steps, all processes number their saves identically.
        self.barrier.renew()
        self._save = save
        self._has_appeared = False
        self._error = None
        if self._orbax is None:
            # The state's item writes into its folder as soon as it is called, so Orbax must have
            # created the folder by then.
            options = ocp.options.AsyncOptions(
                timeout_secs=_LONGEST_SECONDS,
                barrier_sync_fn=self.barrier,
                create_directories_asynchronously=False,
            )
            # Orbax's CheckpointManager looks for the metrics under this file name.
            metrics_handler = ocp.JsonCheckpointHandler(filename=METRICS)
            handlers = {
                STATE: StateHandler(),
                CONFIG: ocp.JsonCheckpointHandler(),
                METRICS: metrics_handler,
            }
            composite = ocp.CompositeOptions(async_options=options)
            handler = ocp.CompositeCheckpointHandler(composite_options=composite, **handlers)
            self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        self._orbax.save(folder, args=ocp.args.Composite(**items))
        self._thread = threading.Thread(
            target=self._finish, args=(self._orbax, settle), name="zerojax-settle"
        )
        self._thread.start()
        save.check()  # an error of another process, or of this one if there are several

    def _finish(self, orbax: ocp.AsyncCheckpointer, settle: Callable[[], None]) -> None:
        try:
            try:
                orbax.wait_until_finished()
                self._has_appeared = True
                if jax.process_index() == 0:
                    settle()
                self.barrier(key="settled", timeout_ms=1000 * _LONGEST_SECONDS)
            finally:
                # After a failure this passes the barriers at which others wait for this process.
                self.barrier(key="over", timeout_ms=1000 * _LONGEST_SECONDS)
        except BaseException as error:
            self._error = self._error or error

    def wait(self) -> None:
        """Wait until the step is settled.

        After an interrupt the save continues, and this may be called again.

        Raises:
          BaseException: the step could not be written or settled. Its unfinished files are no
            longer written to.
        """
        if self._thread is not None:
            self._thread.join()
        # An interrupt halfway would leave open a snapshot of the disk, which others wait for.
        with interrupts_wait(all_wait=True):
            self._collect()

    def _collect(self) -> None:
        thread = self._thread
        save = self._save
        error = self._error
        self._thread = self._save = self._error = None
        if save is None or (thread is not None and error is None):
            return
        # It failed, perhaps in `begin`, before a thread existed.
        orbax = self._orbax
        self._orbax = None
        if orbax is not None:
            # Orbax's threads raise their error again at each further call.
            with contextlib.suppress(Exception):
                orbax.close()
        if save.saving is not None:
            save.saving.abandon()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and release Orbax's threads.

        Raises:
          BaseException: the step could not be written or settled.
        """
        try:
            self.wait()
        finally:
            orbax = self._orbax
            self._orbax = None
            if orbax is not None:
                orbax.close()
