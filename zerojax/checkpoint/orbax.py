"""The part of Orbax that a checkpoint uses: a manager of steps, and a handler that writes the state through zerojax."""

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.program_state import begin_save
from zerojax.checkpoint.save import Saving
from zerojax.program import Program
from zerojax.runtime import AllProcesses, BackgroundBarrier
from zerojax.state import TrainState

SAVING = "saving the checkpoint"


class Manager(ocp.CheckpointManager):
    """Orbax's, which does not ask whether the run was preempted.

    It would ask beside the steps for the one that it saved, and JAX takes that for where this process is: of several processes
    one might have passed the step at which all were to stop (`zerojax.runtime.preemption`).
    """

    def reached_preemption(self, step: int) -> bool:
        del step
        return False


class StateHandler(ocp.handlers.AsyncCheckpointHandler):
    """Orbax's way to write the item "state"; it is read by `zerojax.checkpoint.restore`."""

    async def async_save(self, directory: Any, args: "StateSave") -> list[Any]:
        args.begin(str(directory))
        return [args]

    def save(self, directory: Any, args: "StateSave") -> None:
        args.begin(str(directory))
        args.result()

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError(f"{directory} is read by zerojax.Checkpointer.restore")


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """One save: what the handler needs for it, and what is left of it, which Orbax waits for beside the next steps.

    Several processes wait for each other before Orbax's save returns, so what fails in `begin` is kept: `check` raises it in
    all of them, and `result`, which comes beside the next steps, keeps the checkpoint from appearing.
    """

    program: Program
    state: TrainState | None
    max_host_bytes: int | None
    data: Any
    beside: BackgroundBarrier
    saving: Saving | None = None
    error: BaseException | None = None

    def begin(self, folder: str) -> None:
        """Copy and keep the state."""
        self.beside.begin()
        try:
            assert self.state is not None
            self.saving = begin_save(self.program, self.state, folder, max_host_bytes=self.max_host_bytes, data=self.data)
        except BaseException as error:
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
