"""How checkpoints use Orbax: it makes a step appear whole or not at all, and a handler of ours
writes the state.

    writer.begin(folder, ...)   Orbax makes {folder}.orbax-checkpoint-tmp-*, and calls the handler
      StateHandler.async_save     while the step waits: `StateSave.begin`
    in Orbax's thread           waits for `StateSave.result`, then renames the folder
    in the writer's thread      waits for Orbax's, then settles the step in its directory, and removes old ones
    writer.wait()               raises what failed in either

Orbax knows nothing of the arrays: to it the state is one item, which writes files of its own into
  the folder. Which steps there
are, and which are kept, is told from the directory alone (`zerojax.checkpoint.directory`): a list
in memory beside it, as that of Orbax's CheckpointManager, goes wrong with every call that fails
between the two.
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
"""That a process may write for. One that died is noticed before, by JAX's heartbeats."""
_STAGES = ("async_write_complete", "async_commit_complete", "settled")
"""After which the processes wait for each other: two of Orbax's, by its names, and the writer's."""


class StateHandler(ocp.handlers.AsyncCheckpointHandler):
    """Writes the item "state".

    It is not read through Orbax, which would return all of it at once.
    """

    async def async_save(self, directory: Any, args: "StateSave") -> list[Any]:
        args.begin(str(directory))
        # Orbax's thread calls `result` of each of these, and only then renames the folder.
        return [args]

    # The base class demands it. Orbax saves the items of a step by `async_save`, also where
    # is_async=False.
    def save(self, directory: Any, args: "StateSave") -> None:
        args.begin(str(directory))
        args.result()

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError(f"{directory} is read by zerojax.Checkpointer.restore")


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """One save: what the handler needs for it, and what is left of it, which Orbax waits for beside
    the next steps.

    Several processes wait for each other before Orbax's save returns: if one raised in `begin`, the
    others would wait for it. So the error is stored. `check` raises it in all processes once
    Orbax's save returned, and `result`, which comes beside the next steps, raises it so that the
    checkpoint does not appear.
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
        """Copy and keep the state."""
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
            # A single process keeps no other waiting, so its error may leave at once.
            if jax.process_count() == 1:
                raise
            self.error = error
        self.state = None  # the next step donates it

    def check(self) -> None:
        """Raise what failed so far, here or in another process."""
        AllProcesses(self.program.mesh, SAVING, CheckpointError).do(self._raise)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> None:
        """Write what is left."""
        del timeout
        self._raise()
        assert self.saving is not None
        self.saving.finish()


class StepWriter:
    """Writes a state as a step, one after the other, beside the steps of training."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.barrier = BackgroundBarrier(SAVING, CheckpointError, _STAGES)
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._save: StateSave | None = None
        self._thread: threading.Thread | None = None
        self._has_appeared = False
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether there is a save for `wait` to wait for."""
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
        """Copy a state, and go on with the rest in the background.

        Args:
          folder: that is to appear.
          save: of the state.
          config: of the program, as JSON.
          metrics: of the step; None saves none.
          settle: what process 0 does once the step has appeared.

        Raises:
          BaseException: what failed so far, here or in another process. `wait` is still to be
            called.
        """
        items: dict[str, Any] = {STATE: save, CONFIG: ocp.args.JsonSave(dict(config))}
        if metrics is not None:
            items[METRICS] = ocp.args.JsonSave(dict(metrics))
        # Here, in the thread of the steps, all processes number their saves alike.
        self.barrier.renew()
        self._save, self._has_appeared, self._error = save, False, None
        if self._orbax is None:
            # The state's item writes into its folder as soon as it is called, so Orbax must have
            # made it by then.
            options = ocp.options.AsyncOptions(
                timeout_secs=_LONGEST_SECONDS,
                barrier_sync_fn=self.barrier,
                create_directories_asynchronously=False,
            )
            # The metrics under the file's name that Orbax's CheckpointManager looks for.
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
        save.check()  # what failed in another process, or in this one of several

    def _finish(self, orbax: ocp.AsyncCheckpointer, settle: Callable[[], None]) -> None:
        try:
            try:
                orbax.wait_until_finished()
                self._has_appeared = True
                if jax.process_index() == 0:
                    settle()
                self.barrier(key="settled", timeout_ms=1000 * _LONGEST_SECONDS)
            finally:
                # Passes the barriers at which others wait for this process, if it failed.
                self.barrier(key="over", timeout_ms=1000 * _LONGEST_SECONDS)
        except BaseException as error:
            self._error = self._error or error

    def wait(self) -> None:
        """Wait until the step is settled. An interrupt leaves it to go on; it may be waited for
        again.

        Raises:
          BaseException: it could not be written or settled. What it left unfinished is no longer
            written to.
        """
        if self._thread is not None:
            self._thread.join()
        with interrupts_wait(
            all_wait=True
        ):  # half done, a snapshot of the disk would stay open, for which others wait
            self._collect()

    def _collect(self) -> None:
        thread, save, error = self._thread, self._save, self._error
        self._thread = self._save = self._error = None
        if save is None or (thread is not None and error is None):
            return
        # It failed, perhaps in `begin`, before there was a thread.
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            with contextlib.suppress(
                Exception
            ):  # Orbax's threads raise what failed there at each further call
                orbax.close()
        if save.saving is not None:
            save.saving.abandon()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and release Orbax's threads.

        Raises:
          BaseException: as `wait` does.
        """
        try:
            self.wait()
        finally:
            orbax, self._orbax = self._orbax, None
            if orbax is not None:
                orbax.close()
