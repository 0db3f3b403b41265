"""A saved state, opened from the folder of a step or from a directory of steps, whose newest whole step is taken.

    runs/gpt/checkpoints/1200      that step, or an error
    runs/gpt/checkpoints           the newest step whose bytes have their checksums; a damaged one is passed over with a warning
"""

import os
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from zerojax.checkpoint.directory import STATE, Directory
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.manifest import SavedState
from zerojax.runtime import AllProcesses


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of a zerojax checkpoint, or a directory of some.

    Orbax names an item of its own checkpoints `state`, too, so a zerojax description is looked for in it.
    """
    path = os.path.abspath(os.fspath(path))
    if _is_state(os.path.join(path, STATE)):
        return True
    if not os.path.isdir(path):
        return False
    directory = Directory(path)
    return any(_is_state(directory.state_folder(step)) for step in directory.steps())


def _is_state(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, "manifest.0.json"))


def open_newest(path: str | os.PathLike[str], read: Callable[[str], SavedState]) -> SavedState:
    """Return the state of a step, if `path` is the folder of one, or of the newest whole step in it.

    Args:
      path: of the step or of the directory.
      read: opens the folder of a state, and raises DamagedError where it is not whole.

    Raises:
      CheckpointError: there is no checkpoint.
      DamagedError: the step is not whole, or none is.
    """
    directory = Directory(path)
    if os.path.isdir(state := os.path.join(directory.path, STATE)):
        return read(state)
    if os.path.isdir(directory.path):
        newest = directory.newest_whole(lambda step: read(directory.state_folder(step)), label=directory.step_folder)
        if newest is not None:
            return newest[1]
    raise CheckpointError(
        f"{directory.path} is neither a zerojax.Checkpointer's directory with a checkpoint, nor a step of one"
    )


def open_together(path: str | os.PathLike[str], mesh: Mesh) -> SavedState:
    """Return the state of a step, or of the newest whole step, in all processes of a mesh, which share the comparing.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read now.
      DamagedError: the step is not whole, or none is; in all processes.
    """
    return open_newest(path, lambda folder: _checked_together(folder, mesh))


def _checked_together(folder: str, mesh: Mesh) -> SavedState:
    """Open a state in all processes, each of which compares its part of the checksums."""
    opened: list[SavedState] = []

    def check() -> None:
        opened.append(SavedState(folder))
        opened[0].check(checksums=True, part=jax.process_index(), num_parts=jax.process_count())

    try:
        AllProcesses(mesh, f"reading the checkpoint {folder}", CheckpointError, DamagedError).do(check)
    except BaseException:
        for saved in opened:
            saved.close()
        raise
    return opened[0]
