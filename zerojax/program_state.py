"""The state of a program as a checkpoint sees it: what its leaves hold, how it is saved, and how it is restored.

A program knows no checkpoint. Here is what a checkpoint asks of one.
"""

from typing import Any

import jax

from zerojax.contents import Content, contents_of
from zerojax.restoring import Restoring
from zerojax.saved_state import SavedState
from zerojax.saving import Saving
from zerojax.state import TrainState
from zerojax.step import Program


def contents_of_program(program: Program) -> list[Content]:
    """Return what each leaf of a program's state holds, by names that do not depend on where it rests."""
    return contents_of(program.model, program.layout, program.parts)


def begin_save(
    program: Program, state: TrainState, root: str, *, max_host_bytes: int | None = None, data: Any = None
) -> Saving:
    """Begin to save a state into a folder; see `zerojax.Checkpointer`, which makes it a checkpoint.

    Raises:
      ValueError: the state was donated, or is not the one on disk.
      CheckpointError: the folder cannot be written to.
      SwapError: the state on disk is lost.
    """
    program.check_state(state)
    with program.calling(), jax.set_mesh(program.mesh):
        contents = contents_of_program(program)
        return Saving(program.layout, contents, jax.block_until_ready(state), root, max_host_bytes, data)


def restore_state(program: Program, saved: SavedState, *, verify: bool = True) -> TrainState:
    """Return a saved state as a program's; see `zerojax.Checkpointer.restore`."""
    if program.parts is not None:
        with jax.set_mesh(program.mesh):
            program.check_host_memory()
    return Restoring(program.layout, contents_of_program(program), program.calling).restore(saved, verify=verify)
