"""Weights in safetensors files, read and written."""

import json
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype, sync
from zerojax.checkpoint import CheckpointError, SavedLeaf, SavedState, explained
from zerojax.weights.exporting import appearing, export_dtype, opened, read_part
from zerojax.weights.names import DTYPES, TILED, Tensor, tiled_names, weights_of

ALIGNMENT = 8


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
    with appearing(path) as made, opened(checkpoint) as saved:
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
    told: dict[str, Any] = {"__metadata__": {TILED: json.dumps(tiled_names(saved, tensors))}}
    at = 0
    for tensor, name in tensors.items():
        shape = saved.contents[name].shape
        end = at + math.prod(shape) * kind.itemsize
        told[tensor] = {"dtype": DTYPES[kind.name], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _fill(saved: SavedState, name: str, content: SavedLeaf, out: np.ndarray) -> None:
    """Fill `out`, a whole weight, one record after the other."""
    for index in np.ndindex(*content.shape[: content.lead]):
        box = (*((i, i + 1) for i in index), *((0, n) for n in content.shape[content.lead :]))
        read_part(saved, name, box, out[*(slice(a, b) for a, b in box), ...])


class SafetensorsFile:
    """A safetensors file, mapped into memory.

    Attributes:
      path: of it.
      tensors: what it holds.
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the header.

        Raises:
          CheckpointError: it is no such file, or is cut off.
        """
        self.path = path
        names = {told: name for name, told in DTYPES.items()}
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise ValueError(f"its header takes {length} bytes, and the file {size}")
                told = json.loads(file.read(length))
                self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
            metadata = told.pop("__metadata__", {})
            self.tiled = frozenset(json.loads(metadata.get(TILED, "[]")))
            self.tensors = {n: Tensor(tuple(t["shape"]), names.get(t["dtype"]) or str(t["dtype"])) for n, t in told.items()}
            self._starts = {}
            for name, tensor in self.tensors.items():
                start, stop = told[name]["data_offsets"]
                needed = (
                    math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize if tensor.dtype in DTYPES else stop - start
                )
                if not 0 <= start <= stop <= size - 8 - length or stop - start != needed:
                    raise ValueError(f"{name} {tensor.dtype}{list(tensor.shape)} is told at bytes {start} to {stop}")
                self._starts[name] = 8 + length + start
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file, or is cut off: {error}") from error

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor."""
        tensor = self.tensors[name]
        kind = numpy_dtype(tensor.dtype)
        data = self._data[self._starts[name] :][: math.prod(tensor.shape) * kind.itemsize]
        return _view(data, kind).reshape(tensor.shape)[tuple(slice(a, b) for a, b in box)]


def _view(data: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Return bytes as numbers; other writers do not align them."""
    return np.ndarray((data.nbytes // kind.itemsize,), kind, buffer=data) if data.nbytes else np.empty(0, kind)
