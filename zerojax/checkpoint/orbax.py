"""How checkpoints use Orbax: its manager decides when a step appears and is removed, and a handler of ours writes the state.

    manager.save(step)          makes {step}.orbax-checkpoint-tmp-*, and calls the handler
      StateHandler.async_save     while the step waits: `StateSave.begin`
    in Orbax's thread           waits for `StateSave.result`, then renames the folder to {step}
    the next save or wait       raises what failed there

Orbax knows nothing of the arrays: to it the state is one item, which writes files of its own into the folder.
"""

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
    """Writes the item "state". It is not read through Orbax, which would return all of it at once."""

    async def async_save(self, directory: Any, args: "StateSave") -> list[Any]:
        args.begin(str(directory))
        # Orbax's thread calls `result` of each of these, and only then renames the folder.
        return [args]

    # The base class demands it. Orbax saves the items of a step by `async_save`, also where is_async=False.
    def save(self, directory: Any, args: "StateSave") -> None:
        args.begin(str(directory))
        args.result()

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError(f"{directory} is read by zerojax.Checkpointer.restore")


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """One save: what the handler needs for it, and what is left of it, which Orbax waits for beside the next steps.

    Several processes wait for each other before Orbax's save returns: if one raised in `begin`, the others would wait for it.
    So the error is stored. `check` raises it in all processes once Orbax's save returned, and `result`, which comes beside the
    next steps, raises it so that the checkpoint does not appear.
    """

    program: Program
    state: TrainState | None
    max_host_bytes: int | None
    data: Any
    barrier: BackgroundBarrier
    saving: Saving | None = None
    error: BaseException | None = None

    def begin(self, folder: str) -> None:
        """Copy and keep the state."""
        self.barrier.begin()
        try:
            assert self.state is not None
            self.saving = begin_save(self.program, self.state, folder, max_host_bytes=self.max_host_bytes, data=self.data)
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
