"""Weights as a checkpoint in Orbax's own format: written from a checkpoint of zerojax, and read.

    ocp.StandardCheckpointer().restore(path)  ->  {"blocks": {"w1": f32[L, D, F]}, ...}

    {path}/_METADATA      the tree, as JSON; `custom_metadata` names the weights that are stacks of tiles
    {path}/blocks.w1/     a zarr array; or, in others' checkpoints, all arrays in one database (OCDBT, `manifest.ocdbt`)

Orbax writes a leaf from an array that is there whole. So it is given the same tree with one number for each leaf, and writes
all of the format but the arrays' sizes; each array is then made anew in its own shape and filled chunk by chunk, a chunk being
one layer of a stack, or `PIECE_BYTES` of it. For the same reason arrays are read by tensorstore, box by box, not by Orbax.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from host_offload.disk import Box
from zerojax.checkpoint import STATE, CheckpointError, SavedState, explained
from zerojax.weights.exporting import export_dtype, open_checkpoint, read_part, write_atomically
from zerojax.weights.names import TILED, Tensor, tiled_names, weights_of

PIECE_BYTES = 32 * 2**20
"""Most bytes of a chunk of an Orbax array, unless a row of its last dim is larger."""
CACHE_BYTES = 2**28
"""Of chunks of Orbax arrays that hold several layers, kept for the next one."""
_EMPTY_NODES = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple", "Empty"})


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
    kind = export_dtype(dtype)
    with write_atomically(path) as output, open_checkpoint(checkpoint) as saved:
        weights = weights_of(saved)
        tensors = {".".join(keys): name for keys, name in weights.items()}
        for tensor, name in tensors.items():
            if not {"", ".", ".."}.isdisjoint(tensor.split("/")) or "\\" in tensor:
                raise CheckpointError(f"{name}: no folder of Orbax's format can be named {tensor}: export it as safetensors")
        try:
            _write_tree(output, weights, kind, tiled_names(saved, tensors))
            for keys, name in weights.items():
                _write_array(os.path.join(output, ".".join(keys)), saved, name, kind)
        except ValueError as error:  # tensorstore's, of a file too
            raise CheckpointError(f"writing {os.fspath(path)} failed: {error}") from error


def _write_tree(folder: str, weights: Mapping[tuple[str, ...], str], kind: np.dtype[Any], tiled: Sequence[str]) -> None:
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
    me = jax.process_index()  # of several processes, those that do not export would be waited for
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="zerojax.weights.orbax"
    )
    # Without OCDBT each array has a folder of its own, and can be made anew there.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(tree, custom_metadata={TILED: json.dumps(list(tiled))}))


def _write_array(folder: str, saved: SavedState, name: str, kind: np.dtype[Any]) -> None:
    """Make the array of a weight in place of that of one number, and fill it chunk by chunk."""
    leaf = saved.leaves[name]
    # By default tensorstore writes no chunk of zeros; then a lost chunk could not be told from one.
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": folder + "/"}, "store_data_equal_to_fill_value": True}
    # Orbax's own metadata, such as dtype and compressor; only shape and chunks are changed.
    metadata = ts.open(spec).result().spec().to_json()["metadata"]
    chunks = chunk_shape(leaf.shape, leaf.lead, kind.itemsize)
    spec["metadata"] = metadata | {"shape": list(leaf.shape), "chunks": list(chunks)}
    array = ts.open(spec, create=True, delete_existing=True).result()
    for corner in itertools.product(*(range(0, n, c) for n, c in zip(leaf.shape, chunks, strict=True))):
        box = tuple((a, min(a + c, n)) for a, c, n in zip(corner, chunks, leaf.shape, strict=True))
        piece = np.empty([b - a for a, b in box], kind)
        read_part(saved, name, box, piece)
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


class OrbaxFolder:
    """A checkpoint of a tree of arrays in Orbax's format.

    Attributes:
      path: of the folder.
      tensors: by keys joined by ".".
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the tree.

        Raises:
          CheckpointError: it is no such checkpoint.
        """
        self.path = path
        description = os.path.join(path, "_METADATA")
        if not os.path.exists(description):
            raise CheckpointError(
                f"{path} is no checkpoint that holds arrays in Orbax's format: it has no _METADATA{_hint(path)}"
            )
        try:
            with open(description) as file:
                metadata = json.load(file)
            driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
            self.tiled = frozenset(json.loads((metadata.get("custom_metadata") or {}).get(TILED, "[]")))
            names = [
                ".".join(str(key["key"]) for key in leaf["key_metadata"])
                for leaf in metadata["tree_metadata"].values()
                if leaf["value_metadata"]["value_type"] not in _EMPTY_NODES
            ]
            self._arrays = self._open(driver, names)
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint of Orbax: {error}") from error
        self.tensors = {n: Tensor(tuple(a.shape), str(a.dtype.name)) for n, a in self._arrays.items()}

    def _open(self, driver: str, names: Sequence[str]) -> dict[str, Any]:
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        files = {"driver": "file", "path": self.path + "/"}
        is_joined = os.path.exists(os.path.join(self.path, "manifest.ocdbt"))
        # All are opened at once, and then waited for.
        futures = {}
        for name in names:
            store = (
                {"driver": "ocdbt", "base": files, "path": name + "/"}
                if is_joined
                else files | {"path": f"{self.path}/{name}/"}
            )
            futures[name] = ts.open({"driver": driver, "kvstore": store}, open=True, read=True, context=context)
        return {name: array.result() for name, array in futures.items()}

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor.

        Raises:
          OSError: it cannot be read.
        """
        try:
            return self._arrays[name][tuple(slice(a, b) for a, b in box)].read().result()
        except ValueError as error:
            raise OSError(f"{name} of {self.path}: {error}") from error


def _hint(path: str) -> str:
    if os.path.isdir(os.path.join(path, STATE)):
        return "; it is a zerojax checkpoint, for Checkpointer.restore or zj.export_orbax"
    inner = sorted(name for name in os.listdir(path) if os.path.exists(os.path.join(path, name, "_METADATA")))
    return f"; {inner[0]} in it has one" if inner else ""
