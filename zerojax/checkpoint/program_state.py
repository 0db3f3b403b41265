"""The state of a program as a checkpoint sees it: what its leaves hold, how it is saved, and how it is restored.

A program knows no checkpoint. Here is what a checkpoint asks of one.
"""

import dataclasses
import json
from typing import Any

import jax
import orbax.checkpoint as ocp

from zerojax.checkpoint.contents import StateLeaf, contents_of
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.restore import Restoring
from zerojax.checkpoint.save import Saving
from zerojax.program import Program
from zerojax.state import TrainState


def contents_of_program(program: Program) -> list[StateLeaf]:
    """Return what each leaf of a program's state holds, by names that do not depend on where it rests."""
    return contents_of(program.model, program.records)


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
        return Saving(program.layout, program.swap, contents, jax.block_until_ready(state), root, max_host_bytes, data)


def restore_state(program: Program, saved: SavedState, *, verify: bool = True) -> TrainState:
    """Return a saved state as a program's; see `zerojax.Checkpointer.restore`."""
    if program.layout.updates_by_record:
        with jax.set_mesh(program.mesh):
            program.check_host_memory()
    return Restoring(program.layout, program.swap, contents_of_program(program), program.calling).restore(saved, verify=verify)


def described(program: Program) -> dict[str, Any]:
    """Return what JSON tells of a program: config, mesh and versions."""
    config = {name: _plain(getattr(program.config, name)) for name in program.config.__dataclass_fields__}
    return {
        "config": config,
        "mesh": dict(program.mesh.shape),
        "devices": [program.mesh.devices.flat[0].device_kind, program.mesh.size],
        "versions": {"jax": jax.__version__, "orbax-checkpoint": ocp.__version__},
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    try:
        json.dumps(value)
    except TypeError:
        return str(value)
    return value
