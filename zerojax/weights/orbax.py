"""Weights as a checkpoint in Orbax's own format: written from a zerojax checkpoint, and read.

    ocp.StandardCheckpointer().restore(path)  ->  {"blocks": {"w1": f32[L, D, F]}, ...}

    {path}/_METADATA      the tree, as JSON; `custom_metadata` names the weights that are stacks of
                          tiles, and holds the settings that the model reports
    {path}/blocks.w1/     a zarr array; or, in others' checkpoints, all arrays in one database
                          (OCDBT, `manifest.ocdbt`)

Orbax writes a leaf from a full array in memory. So it receives the same tree with one number per
leaf, and writes everything of the format except the arrays' sizes. Each array is then recreated in
its own shape and filled chunk by chunk, where a chunk is one layer of a stack, or a piece of a
layer. For the same reason arrays are read by tensorstore, box by box, not by Orbax.

Orbax receives numpy numbers, since an export uses no device, and would restore numpy arrays unless
a target says otherwise. So the description is then changed to what Orbax writes for `jax.Array`, on
a mesh of the first device.

Tensorstore ends the process if it cannot allocate a chunk. So a chunk's size is compared with the
stored bytes before any chunk is read: no compression turns stored bytes into more than `MOST_RATIO`
times as many.
"""

import base64
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from host_offload.disk import Box, NotRegularError, ReadFile
from host_offload.fields import Field, FieldError, is_inner_path, parse_json
from zerojax.checkpoint import CheckpointError, SavedState, explained
from zerojax.progress import working
from zerojax.sharding import without_mesh
from zerojax.weights.exporting import (
    export_dtype,
    open_checkpoint,
    piece_shape,
    read_pieces,
    write_atomically,
)
from zerojax.weights.kinds import kind_of_folder
from zerojax.weights.names import (
    ABOUT,
    TILED,
    Tensor,
    about_in,
    build_metadata,
    map_weights,
    tiled_in,
)

CACHE_BYTES = 2**28
"""Bytes of the cache for chunks of Orbax arrays that hold several layers, kept for the next layer.
"""
MOST_RATIO = 2**15
"""Largest ratio of decoded to stored bytes.

A zstd block of at most 128 KiB takes at least 4 bytes. Orbax's other codecs reach lower ratios.
"""
_MOST_METADATA = 1 << 30
_DESCRIPTION = "_METADATA"
_SHARDING = "_sharding"
_EMPTY_NODES = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple", "Empty"})


@without_mesh
def export_orbax(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    ema: bool = False,
) -> None:
    """Write the weights of a checkpoint as a checkpoint in Orbax's own format.

    `ocp.StandardCheckpointer().restore(path)` returns the parameter tree as nested dicts of
    `jax.Array` on the first device, or where its target says. float64 arrays and arrays without
    elements are numpy arrays, since Orbax has no `jax.Array` for them. Lists and tuples become
    dicts with keys "0", "1", ..., other integer keys become text too, and attributes become keys
    with their names. Stacked layers stay stacked. The records' checksums are compared first. Call
    this in one process; it uses no device.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or its directory, whose newest intact step
        is exported.
      path: path of the folder, which must not exist.
      dtype: float64, float32, float16 or bfloat16; None: float32, in which the weights were saved.
      ema: whether to write the averages of `zerojax.Ema` instead of the weights, under the weights'
        names.

    Raises:
      ValueError: the dtype is another one, or `path` exists.
      CheckpointError: there is no checkpoint, the folder cannot be written, a weight's name or
        numbers do not fit, or there are no averages.
      DamagedError: the checkpoint is damaged.
    """
    kind = export_dtype(dtype)
    with write_atomically(path) as output, open_checkpoint(checkpoint) as saved:
        weights = map_weights(saved, ema)
        tensors = {".".join(keys): name for keys, name in weights.items()}
        for tensor, name in tensors.items():
            if not is_inner_path(tensor) or "\\" in tensor:
                raise CheckpointError(
                    f"{name}: Orbax's format cannot have a folder named {tensor}: "
                    "export it as safetensors"
                )
        try:
            _write_tree(output, weights, kind, build_metadata(saved, tensors))
            with working("export", len(tensors)) as advance:
                for tensor, name in tensors.items():
                    _write_array(os.path.join(output, tensor), saved, name, kind)
                    advance(1)
        # also what tensorstore raises for a file
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(f"writing {os.fspath(path)} failed: {error}") from error
        if kind != np.float64:  # there is no float64 jax.Array unless jax_enable_x64 is set
            _mark_as_jax(
                output, {tensor: saved.leaves[name].shape for tensor, name in tensors.items()}
            )


def _write_tree(
    folder: str,
    weights: Mapping[tuple[str, ...], str],
    kind: np.dtype[Any],
    metadata: Mapping[str, str],
) -> None:
    """Let Orbax write the tree, with one number per leaf.

    Raises:
      CheckpointError: a weight's name is also the name of a subtree.
    """
    tree: dict[str, Any] = {}
    for keys in weights:
        node = tree
        for n, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(
                    f"{weights[keys]}: its parent {'.'.join(keys[: n + 1])} is an array: "
                    "rename one of them"
                )
        if keys[-1] in node:
            raise CheckpointError(f"{weights[keys]}: a tree has the same name: rename one of them")
        node[keys[-1]] = np.zeros((), kind)
    me = jax.process_index()  # otherwise Orbax would wait for processes that do not export
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="zerojax.weights.orbax"
    )
    # Without OCDBT each array has its own folder, and can be recreated there.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata)))


def _write_array(folder: str, saved: SavedState, name: str, kind: np.dtype[Any]) -> None:
    """Replace a weight's one-number array by one of its shape, and fill it chunk by chunk."""
    leaf = saved.leaves[name]
    # By default tensorstore writes no chunk of zeros, so a lost chunk would look like zeros.
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": folder + "/"},
        "store_data_equal_to_fill_value": True,
    }
    # Orbax's own metadata, such as dtype and compressor; only shape and chunks change.
    metadata = ts.open(spec).result().spec().to_json()["metadata"]
    chunks = piece_shape(leaf.shape, leaf.lead, kind.itemsize)
    spec["metadata"] = metadata | {"shape": list(leaf.shape), "chunks": list(chunks)}
    array = ts.open(spec, create=True, delete_existing=True).result()
    for box, piece in read_pieces(saved, name, kind):
        array[tuple(slice(a, b) for a, b in box)].write(piece).result()


def _mark_as_jax(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Let Orbax restore arrays as `jax.Array`.

    This changes the description, and writes the file of shardings that Orbax looks for. The mesh
    holds only the device with number 0, of any platform. A `SingleDeviceSharding` would name the
    platform.
    """
    path = os.path.join(folder, _DESCRIPTION)
    with open(path) as file:
        description = json.load(file)
    shardings = {}
    for leaf in description["tree_metadata"].values():
        tensor = ".".join(str(key["key"]) for key in leaf["key_metadata"])
        if 0 in shapes[tensor]:
            continue
        leaf["value_metadata"] |= {"value_type": "jax.Array", "write_shape": list(shapes[tensor])}
        shardings[base64.b64encode(tensor.encode()).decode()] = _FIRST_DEVICE
    for name, content in ((_DESCRIPTION, description), (_SHARDING, shardings)):
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file)


_FIRST_DEVICE = json.dumps(
    {
        "sharding_type": "NamedSharding",
        "shape": [1],
        "axis_names": ["device"],
        "partition_spec": [],
        "device_mesh": {"mesh": [{"id": 0}]},
    }
)


class OrbaxFolder:
    """A checkpoint of a tree of arrays in Orbax's format.

    Attributes:
      path: path of the folder.
      tensors: shapes and dtypes, by keys joined with ".".
      tiled: names of the tensors that are known to be stacks of tiles.
      about: settings that the model of a zerojax export reports, or an empty dict.
    """

    def __init__(self, path: str) -> None:
        """Read the tree.

        Raises:
          CheckpointError: the folder is not such a checkpoint.
        """
        self.path = path
        try:
            description = os.path.join(path, _DESCRIPTION)
            if not os.path.lexists(description):
                kind = kind_of_folder(path)
                it_is = f": it is {kind}" if kind else ""
                raise CheckpointError(
                    f"{path} cannot be imported{it_is}; as a checkpoint in Orbax's own format it "
                    f"has no {_DESCRIPTION}"
                )
            names, driver = self._describe(
                Field(parse_json(ReadFile(description).read_all(_MOST_METADATA)))
            )
            self._stored = _stored_bytes(path)
            self._arrays = self._open(driver, names)
            self.tensors = {
                n: Tensor(tuple(a.shape), str(a.dtype.name)) for n, a in self._arrays.items()
            }
            for name, array in self._arrays.items():
                self._check_chunks(name, array)
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint of Orbax: {error}"
            ) from error

    def _describe(self, metadata: Field) -> tuple[list[str], str]:
        """Return the names of the arrays, and tensorstore's driver for them.

        Raises:
          FieldError: a field is missing or wrong, or leads out of the folder; or two arrays have
            the same name.
        """
        zarr3 = metadata.get("use_zarr3")
        custom = metadata.get("custom_metadata")
        tiled = None if custom is None else custom.get(TILED)
        about = None if custom is None else custom.get(ABOUT)
        self.tiled = tiled_in(None if tiled is None else tiled.text())
        self.about = about_in(None if about is None else about.text())
        names: dict[str, str] = {}
        for path, leaf in metadata["tree_metadata"].fields():
            if leaf["value_metadata"]["value_type"].text() in _EMPTY_NODES:
                continue
            keys = leaf["key_metadata"].items()
            name = ".".join(_key(key["key"]) for key in keys)
            if not is_inner_path(name):
                leaf["key_metadata"].refuse("keys that name a folder in this one")
            # Both would have the same files.
            namesake = names.setdefault(name, path)
            if namesake != path:
                raise FieldError(
                    f"{namesake} and {path} are both stored as {name}: rename one of them, "
                    "and save them again"
                )
        return list(names), "zarr3" if zarr3 is not None and zarr3.flag() else "zarr"

    def _open(self, driver: str, names: Sequence[str]) -> dict[str, Any]:
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        files = {"driver": "file", "path": self.path + "/"}
        # All are opened concurrently.
        futures = {}
        for name in names:
            if self._is_joined:
                store = {"driver": "ocdbt", "base": files, "path": name + "/"}
            else:
                store = files | {"path": f"{self.path}/{name}/"}
            futures[name] = ts.open(
                {"driver": driver, "kvstore": store}, open=True, read=True, context=context
            )
        return {name: array.result() for name, array in futures.items()}

    @property
    def _is_joined(self) -> bool:
        """Whether all arrays are in one database."""
        return os.path.exists(os.path.join(self.path, "manifest.ocdbt"))

    def _check_chunks(self, name: str, array: Any) -> None:
        """Raise FieldError if a chunk is larger than its array, or than its stored bytes allow."""
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())
        shape = tuple(array.shape)
        num_bytes = math.prod(chunk) * array.dtype.numpy_dtype.itemsize
        if any(c > max(1, n) for c, n in zip(chunk, shape, strict=True)):
            raise FieldError(
                f"{name} {list(shape)} has chunks of {list(chunk)}, which are larger than it is"
            )
        # In a database it is not known which bytes belong to which array.
        if self._is_joined:
            stored = self._stored["."]
        else:
            stored = self._stored.get(os.path.normpath(name), 0)
        # 0: missing chunks have one value everywhere, and take no memory.
        if stored and num_bytes > stored * MOST_RATIO:
            raise FieldError(
                f"{name} {list(shape)} has chunks of {list(chunk)}, which take {num_bytes} bytes "
                f"each, and its files have {stored} bytes: they cannot hold such a chunk"
            )

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor cannot be read.
        """
        try:
            return self._arrays[name][tuple(slice(a, b) for a, b in box)].read().result()
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{name} of {self.path} cannot be read: {error}") from error


def _key(key: Field) -> str:
    """Return a key of the tree as it appears in names; numbers are list indices."""
    if isinstance(key.value, int) and not isinstance(key.value, bool):
        return str(key.integer())
    return key.text()


def _stored_bytes(path: str) -> dict[str, int]:
    """Return the bytes of the files in each folder below `path`, by relative path.

    Files in inner folders count too; descriptions of arrays do not.

    Raises:
      OSError: a folder cannot be read.
      NotRegularError: an entry is neither a file nor a folder: tensorstore would wait for a FIFO.
    """
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(path, onerror=_raise):
        num_bytes = 0
        for name in names:
            status = os.stat(os.path.join(folder, name))
            if not stat.S_ISREG(status.st_mode):
                ReadFile(os.path.join(folder, name))  # raises an error that says what it is
                raise NotRegularError(f"{os.path.join(folder, name)} was not a regular file")
            num_bytes += status.st_size if name not in (".zarray", "zarr.json") else 0
        inner = os.path.relpath(folder, path)
        while True:
            sizes[inner] = sizes.get(inner, 0) + num_bytes
            if inner in ("", "."):
                break
            inner = os.path.dirname(inner) or "."
    return sizes


def _raise(error: OSError) -> None:
    raise error
