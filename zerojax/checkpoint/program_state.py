"""What a checkpoint asks of a program: its state's leaves, a save, a restore, and a description of
its config.

A program knows no checkpoint. What is saved and restored (`zerojax.checkpoint.save`,
`zerojax.checkpoint.restore`) knows no program, but its layout, its swap session and its leaves.
"""

import dataclasses
import json
import os
import reprlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from zerojax.checkpoint.directory import open_newest
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.leaves import StateLeaf, state_leaves
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.restore import Restoring
from zerojax.checkpoint.save import Saving
from zerojax.program import Program
from zerojax.runtime import AllProcesses
from zerojax.state import TrainState, check_host_reads

_SHORT = reprlib.Repr()
"""Of what differs: lists of hundreds of frequencies would hide the rest."""
_SHORT.maxdict = 16


def leaves_of_program(program: Program) -> list[StateLeaf]:
    """Return the leaves of a program's state, by names that do not depend on where they rest."""
    return state_leaves(program.model, program.records)


def begin_save(
    program: Program,
    state: TrainState,
    root: str,
    *,
    max_host_bytes: int | None = None,
    data: Any = None,
    last: str | None = None,
) -> Saving:
    """Begin to save a state into a folder; see `zerojax.Checkpointer`, which makes it a checkpoint.

    Raises:
      ValueError: the state was donated, or is not the one on disk.
      CheckpointError: the folder cannot be written to.
      SwapError: the state on disk is lost.
    """
    state = program.check_state(state)
    with program.calling(), jax.set_mesh(program.mesh):
        leaves = leaves_of_program(program)
        # The step must be over: its callbacks write the records on disk that are about to be
        # linked.
        is_over = jax.block_until_ready(state)
        about = program.model.about
        return Saving(
            program.layout, program.swap, leaves, is_over, root, max_host_bytes, data, last, about
        )


def restore_state(program: Program, saved: SavedState, *, verify: bool = True) -> TrainState:
    """Return a saved state as a program's; see `zerojax.Checkpointer.restore`.

    Raises:
      ValueError: another process restores another state.
    """
    _check_about(program.model.about or {}, saved)
    # Some versions of XLA read host memory at a wrong index, silently: the devices are asked first.
    if program.layout.updates_by_record:
        with jax.set_mesh(program.mesh):
            check_host_reads(program.mesh)
    if program.calls is not None:
        program.calls.agree("restore" if saved.has_opt_state else "import", _parts(saved))
    return Restoring(
        program.layout, program.swap, leaves_of_program(program), program.calling
    ).restore(saved, verify=verify)


def _parts(saved: SavedState) -> dict[str, list[str]]:
    """Return what processes compare of a saved state: its small values, such as step and key, and
    its records' checksums.

    A file of weights has no checksums, so that contents are compared of checkpoints alone.
    """
    stores = saved.records.stores if saved.has_opt_state else []
    return {
        "values": [
            f"{name} {np.asarray(value).tolist()}" for name, value in sorted(saved.values.items())
        ],
        "records": [
            f"{store.folder} {zlib.crc32(repr(store.checksums).encode()):08x}" for store in stores
        ],
    }


def _check_about(about: Mapping[str, Any], saved: SavedState) -> None:
    """Raise CheckpointError where a model tells other numbers of itself than the one that was
    saved.
    """
    if told := about_difference(about, saved.about):
        raise CheckpointError(
            f"{saved.folder} was saved of a model with {told[0]}, and this program's has {told[1]}: restore it with what "
            "it was saved with"
        )


def about_difference(here: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first difference of what two models tell of themselves (`zerojax.Model.about`),
    saved and here, or None.

    These are in no leaf, such as the scale of adapters. What one of them does not tell is not
    compared, as older checkpoints tell less. A rate of dropout may change from run to run.
    """
    for name in sorted(set(here) & set(saved)):
        a, b = (json.loads(json.dumps(each[name])) for each in (saved, here))
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [
                key
                for key in sorted(a.keys() & b.keys())
                if key != "dropout" and a.get(key) != b.get(key)
            ]
            a, b = ({key: each.get(key) for key in keys} for each in (a, b))
        if a != b:
            return f"{name}={_SHORT.repr(a)}", f"{name}={_SHORT.repr(b)}"
    return None


def describe(program: Program) -> dict[str, Any]:
    """Return config, mesh and versions, as JSON can hold them; for people, and never read by a
    restore.
    """
    config = {
        field.name: _plain(getattr(program.config, field.name))
        for field in dataclasses.fields(program.config)
    }
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


# --- a state that is opened by several processes --------------------------------------------------


def open_together(path: str | os.PathLike[str], mesh: Mesh) -> SavedState:
    """Return the state of a step, or of the newest whole step, in all processes of a mesh, which
    share the comparing.

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
        AllProcesses(mesh, f"reading the checkpoint {folder}", CheckpointError, DamagedError).do(
            check
        )
    except BaseException:
        for saved in opened:
            saved.close()
        raise
    return opened[0]
