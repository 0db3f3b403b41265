"""The link between programs and checkpoints: a state's leaves, save, restore, config description.

A program does not know about checkpoints. The modules that save and restore
(`zerojax.checkpoint.save`, `zerojax.checkpoint.restore`) do not know the program, only its layout,
its swap session and its leaves.
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
"""Shortened text of differing values: lists of hundreds of frequencies would hide the rest."""
_SHORT.maxdict = 16


def leaves_of_program(program: Program) -> list[StateLeaf]:
    """Return the leaves of a program's state, under names that do not depend on their tiers."""
    return state_leaves(program.state_model, program.records)


def begin_save(
    program: Program,
    state: TrainState,
    root: str,
    *,
    max_host_bytes: int | None = None,
    data: Any = None,
    last: str | None = None,
) -> Saving:
    """Begin to save a state into a folder; `zerojax.Checkpointer` makes the folder a checkpoint.

    Args:
      program: program that returned the state.
      state: the state, not donated yet.
      root: existing, empty folder.
      max_host_bytes: most bytes of copies that wait to be written; None: no limit.
      data: this process's iterator, or None.
      last: folder of the last saved or restored state, whose records of frozen weights are linked;
        or None.

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
        return Saving(
            program.layout,
            program.swap,
            leaves,
            is_over,
            root,
            max_host_bytes,
            data,
            last,
            program.model.about,
            program.settler,
        )


def restore_state(program: Program, saved: SavedState, *, verify: bool = True) -> TrainState:
    """Return a saved state as a state of a program; see `zerojax.Checkpointer.restore`.

    Args:
      program: program with the same model and optimizer as the one that saved.
      saved: the saved state.
      verify: compare all records' checksums first; otherwise only their sizes.

    Raises:
      ValueError: another process restores another state.
      CheckpointError: the state belongs to another model or optimizer.
      DamagedError: the state is damaged.
      SwapError: the program's disk is too small, or failed.
    """
    _check_about(program.model.about or {}, saved)
    # Some versions of XLA silently read host memory at a wrong index, so this checks the devices
    # first.
    if program.layout.updates_by_record:
        with jax.set_mesh(program.mesh):
            check_host_reads(program.mesh)
    if program.calls is not None:
        program.calls.agree("restore" if saved.has_opt_state else "import", _compared_texts(saved))
    return Restoring(
        program.layout,
        program.swap,
        leaves_of_program(program),
        program.calling,
        program.settler,
    ).restore(saved, verify=verify)


def _compared_texts(saved: SavedState) -> dict[str, list[str]]:
    """Return texts that are equal in two processes if they opened the same saved state.

    They describe its small values, such as step and key, and its records' checksums. A file of
    weights has no checksums, so only checkpoints are compared by contents.
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
    """Raise CheckpointError if a model reports other settings than the saved model did."""
    difference = about_difference(about, saved.about)
    if difference is not None:
        raise CheckpointError(
            f"{saved.folder} was saved from a model with {difference[0]}, and this program's "
            f"model has {difference[1]}: restore it with the saved setting"
        )


def about_difference(
    program_about: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the first difference between two models' settings (`zerojax.Model.about`), or None.

    No leaf holds these settings, for example the scale of adapters. A setting that only one model
    reports is not compared, since older checkpoints report fewer. The dropout rate may change from
    run to run.

    Args:
      program_about: settings of the program's model.
      saved: settings of the saved model.

    Returns:
      The differing setting as text: the saved one, and the program's.
    """
    for name in sorted(set(program_about) & set(saved)):
        theirs = json.loads(json.dumps(saved[name]))
        ours = json.loads(json.dumps(program_about[name]))
        if isinstance(theirs, dict) and isinstance(ours, dict):
            common = (theirs.keys() & ours.keys()) - {"dropout"}
            keys = [key for key in sorted(common) if theirs[key] != ours[key]]
            theirs = {key: theirs[key] for key in keys}
            ours = {key: ours[key] for key in keys}
        if theirs != ours:
            return f"{name}={_SHORT.repr(theirs)}", f"{name}={_SHORT.repr(ours)}"
    return None


def describe(program: Program) -> dict[str, Any]:
    """Return config, mesh and versions, in a form that JSON can hold.

    The description is for people; a restore never reads it.
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


# --- states opened by several processes -----------------------------------------------------------


def open_together(path: str | os.PathLike[str], mesh: Mesh) -> SavedState:
    """Open the state of a step in all processes of a mesh, which share the comparison of checksums.

    Args:
      path: folder of a step, or a directory whose newest intact step is opened.
      mesh: mesh whose processes take part.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read now.
      DamagedError: the step is damaged, or all steps are; all processes raise it.
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
