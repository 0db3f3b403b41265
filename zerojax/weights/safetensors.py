"""Weights as one safetensors file: written from a checkpoint, and read.

    8 bytes        N, little-endian
    N bytes        JSON: {name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {text: text}}
    the rest       the tensors, row by row; offsets count from here

The file is mapped into memory both ways. An export reads each record from the checkpoint straight into its place in the file;
an import copies out the slices that it is asked for. Either touches the pages of one record at a time, and they are the page
cache's. What the format does not have, which weights are stacks of tiles, is in its metadata.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.disk import Box, ReadFile, numpy_dtype, sync
from zerojax.checkpoint import CheckpointError, SavedLeaf, SavedState, explained
from zerojax.weights.exporting import export_dtype, open_checkpoint, read_part, write_atomically
from zerojax.weights.names import DTYPES, TILED, Tensor, tiled_names, weights_of

ALIGNMENT = 8
"""The header is padded to it, so that the tensors of a mapped file are aligned for their dtypes."""


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
    kind = export_dtype(dtype)
    with write_atomically(path) as output, open_checkpoint(checkpoint) as saved:
        tensors = {".".join(keys): name for keys, name in weights_of(saved).items()}
        header, end = _header(saved, tensors, kind)
        with open(output, "wb") as file:
            file.write(header)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, end)  # a full disk is told now: over mapped memory it would be a signal
        whole = np.asarray(mapping := np.memmap(output, np.uint8, "r+"))
        at = len(header)
        for name in tensors.values():
            leaf = saved.leaves[name]
            num_bytes = math.prod(leaf.shape) * kind.itemsize
            _fill(saved, name, leaf, whole[at : at + num_bytes].view(kind).reshape(leaf.shape))
            at += num_bytes
        mapping.flush()
        sync(output)


def _header(saved: SavedState, tensors: Mapping[str, str], kind: np.dtype[Any]) -> tuple[bytes, int]:
    """Return what a file begins with, and its size."""
    header: dict[str, Any] = {"__metadata__": {TILED: json.dumps(tiled_names(saved, tensors))}}
    at = 0
    for tensor, name in tensors.items():
        shape = saved.leaves[name].shape
        end = at + math.prod(shape) * kind.itemsize
        header[tensor] = {"dtype": DTYPES[kind.name], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _fill(saved: SavedState, name: str, leaf: SavedLeaf, out: np.ndarray) -> None:
    """Fill `out`, a whole weight, one record after the other."""
    for index in np.ndindex(*leaf.shape[: leaf.lead]):
        box = (*((i, i + 1) for i in index), *((0, n) for n in leaf.shape[leaf.lead :]))
        read_part(saved, name, box, out[*(slice(a, b) for a, b in box), ...])


class SafetensorsFile:
    """A safetensors file.

    Attributes:
      path: of the file.
      tensors: by name.
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the header.

        Raises:
          CheckpointError: it is no such file, or is cut off.
        """
        self.path = path
        dtypes = {there: here for here, there in DTYPES.items()}
        try:
            self._file = ReadFile(path)
            size = self._file.num_bytes
            length = int.from_bytes(self._bytes(0, min(8, size)), "little")
            # A file of another kind may begin with any number: so many bytes must not be asked for.
            if size < 8 or length > size - 8:
                raise ValueError(f"its header takes {length} bytes, and the file {size}")
            header = json.loads(self._bytes(8, length))
            metadata = header.pop("__metadata__", {})
            self.tiled = frozenset(json.loads(metadata.get(TILED, "[]")))
            self.tensors = {
                name: Tensor(tuple(entry["shape"]), dtypes.get(entry["dtype"]) or str(entry["dtype"]))
                for name, entry in header.items()
            }
            self._starts = {}
            for name, tensor in self.tensors.items():
                start, stop = header[name]["data_offsets"]
                num_bytes = (
                    math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize if tensor.dtype in DTYPES else stop - start
                )
                # Finds a file that is cut off, and offsets that do not fit the dtype and shape.
                if not 0 <= start <= stop <= size - 8 - length or stop - start != num_bytes:
                    raise ValueError(f"{name} {tensor.dtype}{list(tensor.shape)} is told at bytes {start} to {stop}")
                self._starts[name] = 8 + length + start
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file, or is cut off: {error}") from error

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        out = np.empty(num_bytes, np.uint8)
        self._file.read_bytes(offset, out)
        return out.tobytes()

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor.

        Raises:
          CheckpointError: the file cannot be read; its text tells the byte.
        """
        tensor = self.tensors[name]
        kind = numpy_dtype(tensor.dtype)
        out = np.empty([stop - start for start, stop in box], kind)
        try:
            self._file.read_box(self._starts[name], tensor.shape, kind, box, out)
        except OSError as error:
            raise explained(error, f"reading {name}") from error
        return out
