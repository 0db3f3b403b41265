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

import ast
import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from host_offload.record_format import numpy_dtype
from host_offload.saved_records import Box
from host_offload.snapshot import sync
from zerojax.checkpoint import STATE
from zerojax.checkpoint_error import CheckpointError, DamagedError, explained
from zerojax.saved_state import SavedContent, SavedState

logger = logging.getLogger("zerojax")

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What weights may be written in, and its name in safetensors."""
PIECE_BYTES = 32 * 2**20
"""Most bytes of a chunk of an Orbax array, unless a row of its last dim is larger."""
TILED = "zerojax.tiled"
"""In the metadata of either format: JSON list of the names of weights that are stacks of tiles."""
ALIGNMENT = 8
_KEY = re.compile(r"""\.([^\W\d]\w*)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+)\]|\[<flat index (\d+)>\]""")
_WEIGHTS = "weights"


# --- names -----------------------------------------------------------------------------------------------------------------


def path_of(name: str) -> tuple[str, ...]:
    """Return the keys of a weight, from its name in a checkpoint: "weights['a'][0].b" -> ("a", "0", "b").

    Raises:
      CheckpointError: a key is neither text, nor a number, nor an attribute.
    """
    keys, at = [], len(_WEIGHTS)
    while at < len(name):
        if (found := _KEY.match(name, at)) is None:
            raise CheckpointError(f"{name}: {name[at:]} is no key that other formats know: use text or numbers as keys")
        attribute, key, number = found.groups()
        keys.append(attribute or number or str(ast.literal_eval(key)))
        at = found.end()
    return tuple(keys)


def weights_of(saved: SavedState) -> dict[tuple[str, ...], str]:
    """Return the names of the weights, by their keys, in order.

    Raises:
      CheckpointError: there is none, or two that other formats do not tell apart.
    """
    found: dict[tuple[str, ...], str] = {}
    joined: dict[str, str] = {}
    for name in saved.contents:
        if not name.startswith(_WEIGHTS):
            continue
        path = path_of(name)
        if not path:
            raise CheckpointError(f"{saved.folder}: its parameters are one array, which has no name: put it into a dict")
        if (other := joined.setdefault(".".join(path), name)) != name:
            raise CheckpointError(f"{other} and {name} are both {'.'.join(path)} in other formats: rename one of them")
        found[path] = name
    if not found:
        raise CheckpointError(f"{saved.folder} holds no weights")
    return dict(sorted(found.items(), key=lambda item: ".".join(item[0])))


# --- what is exported, and to where ----------------------------------------------------------------------------------------


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


def _dtype(dtype: Any) -> np.dtype[Any]:
    name = "float32" if dtype is None else np.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: weights are exported as one of {', '.join(DTYPES)}")
    return numpy_dtype(name)


@contextlib.contextmanager
def _appearing(path: str | os.PathLike[str]) -> Iterator[str]:
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


def _read(saved: SavedState, name: str, box: Box, out: np.ndarray) -> None:
    """Fill `out` with a part of a weight, cast to its dtype."""
    try:
        with np.errstate(over="raise"):
            saved.records.read(name, box, out)
    except FloatingPointError as error:
        raise CheckpointError(f"{name} holds numbers that {out.dtype.name} does not reach: use bfloat16 or float32") from error
    except (OSError, KeyError) as error:
        raise DamagedError(f"the checkpoint {saved.folder} is damaged: {error}") from error


# --- safetensors -----------------------------------------------------------------------------------------------------------


def export_safetensors(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, dtype: Any = None) -> None:
    """Write the weights of a checkpoint into one safetensors file.

    A tensor's name is its path in the parameter tree, joined by ".": "blocks.w1", "layers.0.bias". Stacked layers stay stacked.
    The records' checksums are compared first. To be called by one process; it uses no device.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or its directory: then its newest whole step.
      path: of the file; nothing may be there.
      dtype: float64, float32, float16 or bfloat16; None: float32, in which the weights were saved.

    Raises:
      ValueError: another dtype, or `path` exists.
      CheckpointError: there is no checkpoint, the file cannot be written, or a weight's name or numbers do not fit.
      DamagedError: the checkpoint is not whole.
    """
    kind = _dtype(dtype)
    with _appearing(path) as made, opened(checkpoint) as saved:
        tensors = {".".join(keys): name for keys, name in weights_of(saved).items()}
        header, end = _header(saved, tensors, kind)
        with open(made, "wb") as file:
            file.write(header)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, end)  # a full disk is told now: over mapped memory it would be a signal
        whole = np.asarray(mapped := np.memmap(made, np.uint8, "r+"))
        at = len(header)
        for name in tensors.values():
            content = saved.contents[name]
            num_bytes = math.prod(content.shape) * kind.itemsize
            _fill(saved, name, content, whole[at : at + num_bytes].view(kind).reshape(content.shape))
            at += num_bytes
        mapped.flush()
        sync(made)


def _header(saved: SavedState, tensors: Mapping[str, str], kind: np.dtype[Any]) -> tuple[bytes, int]:
    """Return what a file begins with, and its size."""
    told: dict[str, Any] = {"__metadata__": {TILED: json.dumps(_tiled(saved, tensors))}}
    at = 0
    for tensor, name in tensors.items():
        shape = saved.contents[name].shape
        end = at + math.prod(shape) * kind.itemsize
        told[tensor] = {"dtype": DTYPES[kind.name], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _tiled(saved: SavedState, tensors: Mapping[str, str]) -> list[str]:
    return [tensor for tensor, name in tensors.items() if saved.contents[name].is_tiled]


def _fill(saved: SavedState, name: str, content: SavedContent, out: np.ndarray) -> None:
    """Fill `out`, a whole weight, one record after the other."""
    for index in np.ndindex(*content.shape[: content.lead]):
        box = (*((i, i + 1) for i in index), *((0, n) for n in content.shape[content.lead :]))
        _read(saved, name, box, out[*(slice(a, b) for a, b in box), ...])


# --- Orbax -----------------------------------------------------------------------------------------------------------------


def export_orbax(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, dtype: Any = None) -> None:
    """Write the weights of a checkpoint as a checkpoint of Orbax's own format.

    `ocp.StandardCheckpointer().restore(path)` returns the parameter tree as nested dicts of arrays. Lists and tuples become
    dicts with keys "0", "1", ..., as do other integer keys, and attributes keys of their names. Stacked layers stay stacked.
    The records' checksums are compared first. To be called by one process; it uses no device.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or its directory: then its newest whole step.
      path: of the folder; nothing may be there.
      dtype: float64, float32, float16 or bfloat16; None: float32, in which the weights were saved.

    Raises:
      ValueError: another dtype, or `path` exists.
      CheckpointError: there is no checkpoint, the folder cannot be written, or a weight's name or numbers do not fit.
      DamagedError: the checkpoint is not whole.
    """
    kind = _dtype(dtype)
    with _appearing(path) as made, opened(checkpoint) as saved:
        weights = weights_of(saved)
        tensors = {".".join(keys): name for keys, name in weights.items()}
        for tensor, name in tensors.items():
            if not {"", ".", ".."}.isdisjoint(tensor.split("/")) or "\\" in tensor:
                raise CheckpointError(f"{name}: no folder of Orbax's format can be named {tensor}: export it as safetensors")
        try:
            _write_tree(made, weights, kind, _tiled(saved, tensors))
            for keys, name in weights.items():
                _write_array(os.path.join(made, ".".join(keys)), saved, name, kind)
        except ValueError as error:  # tensorstore's, of a file too
            raise CheckpointError(f"writing {os.fspath(path)} failed: {error}") from error


def _write_tree(made: str, weights: Mapping[tuple[str, ...], str], kind: np.dtype[Any], tiled: Sequence[str]) -> None:
    """Let Orbax write the tree, each leaf of one number."""
    tree: dict[str, Any] = {}
    for keys in weights:
        node = tree
        for n, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{weights[keys]}: its parent {'.'.join(keys[: n + 1])} is an array: rename one of them")
        if keys[-1] in node:
            raise CheckpointError(f"{weights[keys]}: there is a tree of its name, too: rename one of them")
        node[keys[-1]] = np.zeros((), kind)
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix="zerojax.export")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
        writer.save(made, args=ocp.args.PyTreeSave(tree, custom_metadata={TILED: json.dumps(list(tiled))}))


def _write_array(folder: str, saved: SavedState, name: str, kind: np.dtype[Any]) -> None:
    """Make the array of a weight in place of that of one number, and fill it chunk by chunk."""
    content = saved.contents[name]
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": folder + "/"}, "store_data_equal_to_fill_value": True}
    metadata = ts.open(spec).result().spec().to_json()["metadata"]
    chunks = chunk_shape(content.shape, content.lead, kind.itemsize)
    spec["metadata"] = metadata | {"shape": list(content.shape), "chunks": list(chunks)}
    array = ts.open(spec, create=True, delete_existing=True).result()
    for corner in itertools.product(*(range(0, n, c) for n, c in zip(content.shape, chunks, strict=True))):
        box = tuple((a, min(a + c, n)) for a, c, n in zip(corner, chunks, content.shape, strict=True))
        piece = np.empty([b - a for a, b in box], kind)
        _read(saved, name, box, piece)
        array[tuple(slice(a, b) for a, b in box)].write(piece).result()


def chunk_shape(shape: Sequence[int], lead: int, itemsize: int) -> tuple[int, ...]:
    """Return the chunks of an array: one record of a stack, or as many rows of it as `PIECE_BYTES` hold."""
    chunks = [1] * len(shape)
    for dim in range(lead, len(shape)):
        row = math.prod(shape[dim + 1 :]) * itemsize
        if row <= PIECE_BYTES:
            chunks[dim:] = shape[dim:]
            chunks[dim] = min(shape[dim], PIECE_BYTES // max(1, row))
            break
    return tuple(max(1, n) for n in chunks)
