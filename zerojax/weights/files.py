"""The weights of a checkpoint, whole, in formats that others read: Orbax's own, and safetensors.

    zj.export_orbax("runs/gpt/checkpoints", "gpt")                      ocp.StandardCheckpointer().restore(path) -> nested dict
    zj.export_safetensors("runs/gpt/checkpoints/1200", "gpt.safetensors", dtype=jnp.bfloat16)

Both are made from files alone, without a program, a model or a device. The tree is that of the parameters, as nested dicts:

    in the checkpoint           Orbax                        safetensors
    weights['blocks']['w1']     {"blocks": {"w1": a}}        blocks.w1
    weights['layers'][0].bias   {"layers": {"0": {"bias"}}}  layers.0.bias

Nothing is held whole. A tensor of safetensors is read from the records straight into the file, mapped into memory. Of an Orbax
checkpoint, Orbax writes the tree, over arrays of one number each; these are then made anew as zarr arrays of the tensors'
shapes, and filled chunk by chunk, a chunk being one layer of a stack, or `PIECE_BYTES` of it.

What is written appears under its name when it is whole and on disk.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype, sync
from zerojax.checkpoint import STATE, CheckpointError, DamagedError, SavedState, explained
from zerojax.weights.names import DTYPES

logger = logging.getLogger("zerojax")


@contextlib.contextmanager
def opened(checkpoint: str | os.PathLike[str]) -> Iterator[SavedState]:
    """Open a step's folder, or the newest whole step of a directory, once its checksums were compared.

    Raises:
      CheckpointError: there is none.
      DamagedError: it is not whole, or none is.
    """
    folder = os.path.abspath(os.fspath(checkpoint))
    if os.path.isdir(os.path.join(folder, STATE)):
        steps = [folder]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
        steps = [step for n in numbers if os.path.isdir(step := os.path.join(folder, str(n)))]
    if not steps:
        raise CheckpointError(f"{folder} is neither a zerojax.Checkpointer's directory with a checkpoint, nor a step of one")
    for step in steps:
        try:
            with SavedState(os.path.join(step, STATE)) as saved:
                saved.check(checksums=True)
        except DamagedError as error:
            if step == steps[-1]:
                raise
            logger.warning("%s is passed over: %s", step, error)
            continue
        with saved:
            yield saved
        return


def export_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype to export in; None is float32."""
    name = "float32" if dtype is None else np.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: weights are exported as one of {', '.join(DTYPES)}")
    return numpy_dtype(name)


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a name to write under; what was written is moved to `path` when the context ends without an error.

    Raises:
      ValueError: there is something already, or no folder to put it in.
      CheckpointError: it cannot be written.
    """
    target = os.path.abspath(os.fspath(path))
    parent, name = os.path.split(target)
    if "://" in os.fspath(path):
        raise ValueError(f"path={os.fspath(path)!r}: exports are files of a file system; mount the bucket")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: remove it, or give another path")
    if not os.path.isdir(parent):
        raise ValueError(f"{parent} is no folder: make it first")
    try:
        room = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent)
        try:
            yield (made := os.path.join(room, name))
            for folder, _, files in os.walk(made):
                for each in [*(os.path.join(folder, file) for file in files), folder]:
                    sync(each)
            if os.path.lexists(target):
                raise ValueError(f"{target} was made by another process meanwhile: remove it, or give another path")
            os.rename(made, target)
            sync(parent)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    except OSError as error:
        raise explained(error, f"writing {target}") from error


def read_part(saved: SavedState, name: str, box: Box, out: np.ndarray) -> None:
    """Fill `out` with a part of a weight, cast to its dtype."""
    try:
        with np.errstate(over="raise"):
            saved.records.read(name, box, out)
    except FloatingPointError as error:
        raise CheckpointError(f"{name} holds numbers that {out.dtype.name} does not reach: use bfloat16 or float32") from error
    except (OSError, KeyError) as error:
        raise DamagedError(f"the checkpoint {saved.folder} is damaged: {error}") from error
