"""Weights as one safetensors file: written from a checkpoint, and read.

    8 bytes        N, little-endian
    N bytes        JSON: {name: {"dtype", "shape", "data_offsets": [start, stop]},
                   "__metadata__": {text: text}}
    the rest       the tensors in row-major order; offsets count from here

The file is written by pwrite and read by pread, piece by piece, so no full weight is in memory.
With a memory mapping, a failing disk would cause a SIGBUS, which silently ends the process. The
metadata holds what the format lacks: which weights are stacks of tiles, and the settings that the
model reports.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from host_offload.disk import Box, ReadFile, TruncatedError, numpy_dtype, reserve
from host_offload.fields import Field, FieldError, parse_json
from zerojax.checkpoint import CheckpointError, explained
from zerojax.progress import working
from zerojax.sharding import without_mesh
from zerojax.weights.exporting import export_dtype, open_checkpoint, read_pieces, write_atomically
from zerojax.weights.kinds import kind_of_file
from zerojax.weights.names import (
    ABOUT,
    DTYPES,
    TILED,
    Tensor,
    about_in,
    build_metadata,
    map_weights,
    tiled_in,
)

ALIGNMENT = 8
"""Alignment in bytes to which the header is padded, so that a mapped file's tensors are aligned."""
MOST_HEADER_BYTES = 100_000_000
"""Largest header, as in the safetensors library."""

BYTES = {"U8": np.uint8, "I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
"""Dtypes of the codes of quantized weights, by the names in safetensors."""


@without_mesh
def export_safetensors(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    ema: bool = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file.

    A tensor's name is its path in the parameter tree, joined with ".": "blocks.w1",
    "layers.0.bias". Stacked layers stay stacked. The records' checksums are compared first. Call
    this in one process; it uses no device.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or its directory, whose newest intact step
        is exported.
      path: path of the file, which must not exist.
      dtype: float64, float32, float16 or bfloat16; None: float32, in which the weights were saved.
      ema: whether to write the averages of `zerojax.Ema` instead of the weights, under the weights'
        names.

    Raises:
      ValueError: the dtype is another one, or `path` exists.
      CheckpointError: there is no checkpoint, the file cannot be written, a weight's name or
        numbers do not fit, or there are no averages.
      DamagedError: the checkpoint is damaged.
    """
    kind = export_dtype(dtype)
    with write_atomically(path) as output, open_checkpoint(checkpoint) as saved:
        names = {".".join(keys): name for keys, name in map_weights(saved, ema).items()}
        tensors = {
            tensor: Tensor(saved.leaves[name].shape, kind.name) for tensor, name in names.items()
        }
        metadata = build_metadata(saved, names)
        write_safetensors(
            output,
            tensors,
            lambda tensor: (p for _, p in read_pieces(saved, names[tensor], kind)),
            metadata,
        )


def write_safetensors(
    path: str,
    tensors: Mapping[str, Tensor],
    pieces: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of tensors, each piece by piece.

    Args:
      path: path of the file, which must not exist.
      tensors: descriptions of the tensors by name, in the order in which they are written.
      pieces: function of a name that yields the tensor's numbers in its dtype, in row-major order.
      metadata: texts by name.

    Raises:
      OSError: the file cannot be written.
    """
    header, end = _header(tensors, metadata)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        reserve(fd, end)  # reports a full disk now, not after half an hour
        offset = _write(fd, np.frombuffer(header, np.uint8), 0)
        with working("export", len(tensors)) as advance:
            for name in tensors:
                for piece in pieces(name):
                    offset = _write(fd, piece, offset)
                advance(1)
        assert offset == end, f"{path}: pieces end at byte {offset} of {end}"
    finally:
        os.close(fd)


def _write(fd: int, piece: np.ndarray, offset: int) -> int:
    """Write an array, and return its end in the file."""
    view = piece.reshape(-1).view(np.uint8).data
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)  # pwrite may write only a part
    return offset + written


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header of a file, and the size of the file in bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def _kind(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor in a file."""
    return np.dtype(BYTES[dtype]) if dtype in BYTES else numpy_dtype(dtype)


class SafetensorsFile:
    """A safetensors file.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes, by name.
      tiled: names of the tensors that are known to be stacks of tiles.
      about: settings that the model of a zerojax export reports, or an empty dict.
    """

    def __init__(self, path: str) -> None:
        """Read the header.

        Raises:
          CheckpointError: the file is not a safetensors file, or is cut off.
        """
        self.path = path
        try:
            self._file = ReadFile(path)
            try:
                header, start = self._header()
                self._describe(header, start)
            except (ValueError, TruncatedError) as error:
                kind = kind_of_file(path)
                if kind is not None:
                    raise CheckpointError(
                        f"{path} is not a safetensors file: it is {kind}"
                    ) from error
                raise CheckpointError(
                    f"{path} is not a safetensors file, or is cut off: {error}"
                ) from error
        except OSError as error:
            raise explained(error, f"reading {path}") from error

    def _header(self) -> tuple[Field, int]:
        """Return the header, and where the tensors start.

        Raises:
          ValueError: the header is longer than the file, or than the format allows.
        """
        size = self._file.num_bytes
        length = int.from_bytes(self._bytes(0, min(8, size)), "little")
        # A file of another kind may begin with any number, so that many bytes must not be
        # allocated.
        if size < 8 or length > size - 8:
            raise ValueError(f"its header takes {length} bytes, and the file {size}")
        if length > MOST_HEADER_BYTES:
            raise ValueError(
                f"its header takes {length} bytes, and a safetensors header at most "
                f"{MOST_HEADER_BYTES}"
            )
        return Field(parse_json(self._bytes(8, length))), 8 + length

    def _describe(self, header: Field, data: int) -> None:
        """Record each tensor's description and start; the tensors' bytes start at `data`.

        Raises:
          FieldError: a field is missing or wrong, tensors overlap, or the file ends before they do.
        """
        dtypes = {file_dtype: dtype for dtype, file_dtype in DTYPES.items()}
        self.tiled = frozenset[str]()
        self.about: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        size = self._file.num_bytes - data
        extents = []
        for name, entry in header.fields():
            if name == "__metadata__":
                texts = {key: text.text() for key, text in entry.fields()}
                # Other programs' files have neither.
                self.tiled = tiled_in(texts.get(TILED))
                self.about = about_in(texts.get(ABOUT))
                continue
            file_dtype = entry["dtype"].text()
            dtype = dtypes.get(file_dtype, file_dtype)
            tensor = self.tensors[name] = Tensor(entry["shape"].integers(), dtype)
            offsets = entry["data_offsets"].integers()
            # Tensors of unsupported dtypes may have any size.
            is_supported = dtype in DTYPES or dtype in BYTES
            num_bytes = entry["shape"].num_bytes(_kind(dtype).itemsize if is_supported else 1)
            if len(offsets) != 2:
                entry["data_offsets"].refuse("[start, stop]")
            start, stop = offsets
            # Detects a file that is cut off, and offsets that do not fit dtype and shape.
            if not 0 <= start <= stop <= size or (is_supported and stop - start != num_bytes):
                raise FieldError(
                    f"{name} {dtype}{list(tensor.shape)} cannot be at bytes {start} to "
                    f"{stop} of {size}"
                )
            self._starts[name] = data + start
            extents.append((start, stop, name))
        nonempty = sorted(extent for extent in extents if extent[0] < extent[1])
        for (_, end, name), (start, stop, next_name) in itertools.pairwise(nonempty):
            if start < end:
                raise FieldError(
                    f"{name} ends at byte {end}, and {next_name} is at bytes {start} to {stop}: "
                    "they overlap"
                )

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        out = np.empty(num_bytes, np.uint8)
        self._file.read_bytes(offset, out)
        return out.tobytes()

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read; the error gives the byte.
        """
        tensor = self.tensors[name]
        kind = _kind(tensor.dtype)
        out = np.empty([stop - start for start, stop in box], kind)
        try:
            self._file.read_box(self._starts[name], tensor.shape, kind, box, out)
        except OSError as error:
            raise explained(error, f"reading {name}") from error
        return out
