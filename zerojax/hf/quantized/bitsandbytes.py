"""Weights that bitsandbytes quantized to 4 or 8 bits, decoded as they are read.

    4 bits    W[i] = map[code[i]] scale[i // 64]        code: 4 bits, the first of a byte on top
              scale[j] = map2[scale8[j]] scale2[j // 256] + offset        if scales are nested
    8 bits    W[row, column] = code[row, column] scale[row] / 127

    tensors of a file                            4 bits (arXiv:2305.14314)       8 bits (2208.07339)
    X.weight                                     uint8, two codes each           int8
    X.weight.absmax, .quant_map                  scale or scale8, map            X.SCB: scale
    X.weight.nested_absmax, .nested_quant_map    scale2, map2
    X.weight.quant_state.bitsandbytes__nf4       JSON: shape, dtype, sizes of blocks, offset

Elements of W are counted in row-major order. A box is decoded from the rows that it meets, in
float32, and rounded to the dtype in which bitsandbytes itself would use it.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype
from host_offload.fields import Field, parse_json
from zerojax.checkpoint import CheckpointError
from zerojax.weights import DTYPES, Tensor, WeightFile

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_OF_8_BITS = ("SCB", "weight_format")


@dataclasses.dataclass(frozen=True)
class _State:
    """How a weight was quantized to 4 bits.

    Attributes:
      shape: dims of the weight.
      dtype: dtype in which it is used.
      block: number of elements that share a scale.
      scales: numbers that the codes stand for, f32[16].
      nested_block: number of scales that share a scale of their own, or 0.
      nested_scales: numbers that the codes of nested scales stand for, f32[256].
      offset: mean of nested scales.
    """

    shape: tuple[int, ...]
    dtype: str
    block: int
    scales: np.ndarray
    nested_block: int = 0
    nested_scales: np.ndarray | None = None
    offset: float = 0.0


class BitsAndBytesFile:
    """A file of weights in which quantized weights look like any others.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes of the decoded weights, by name.
      tiled: empty.
    """

    def __init__(self, file: WeightFile, dtype: str) -> None:
        """Find the quantized weights.

        Args:
          file: file of weights.
          dtype: dtype of weights in 8 bits, for which the file names none.

        Raises:
          CheckpointError: a weight lacks an array, or an array does not fit it.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self._file = file
        self._states: dict[str, _State] = {}
        self._rows: dict[str, str] = {}
        self.tensors = dict(file.tensors)
        for name in file.tensors:
            weight, mark, kind = name.partition(_STATE)
            if mark:
                self._add_4_bits(weight, name, kind)
            if name.endswith(".SCB"):
                self._add_8_bits(name.removesuffix("SCB"), dtype)

    def _add_4_bits(self, weight: str, state_name: str, kind: str) -> None:
        """Replace the arrays of a weight in 4 bits by the weight.

        Raises:
          CheckpointError: an array is missing or does not fit.
        """
        try:
            if kind not in _KINDS:
                raise ValueError(f"its type {kind!r} is none of {', '.join(_KINDS)}")
            state = self._read_state(weight, state_name)
            count = math.prod(state.shape)
            blocks = -(-count // state.block)
            self._check(weight, "U8", -(-count // 2))
            self._check(f"{weight}.absmax", "U8" if state.nested_block else "float32", blocks)
            if state.nested_block:
                nested = -(-blocks // state.nested_block)
                self._check(f"{weight}.nested_absmax", "float32", nested)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: {weight} is not in the format of bitsandbytes: {error}"
            ) from error
        for name in [name for name in self.tensors if name.startswith(f"{weight}.")]:
            del self.tensors[name]
        self._states[weight] = state
        self.tensors[weight] = Tensor(state.shape, state.dtype)

    def _read_state(self, weight: str, state_name: str) -> _State:
        """Return how a weight in 4 bits was quantized.

        Raises:
          FieldError: a number is missing or out of range.
        """
        state = Field(parse_json(self._all(state_name).tobytes()))
        shape = state["shape"].integers(1)
        dtype = state["dtype"].text()
        if dtype not in DTYPES:
            state["dtype"].refuse(f"one of {', '.join(DTYPES)}")
        self._check(f"{weight}.quant_map", "float32", 16)
        block = state["blocksize"].integer(1, 2**20)
        scales = self._all(f"{weight}.quant_map")
        if f"{weight}.nested_absmax" not in self._file.tensors:
            return _State(shape, dtype, block, scales)
        self._check(f"{weight}.nested_quant_map", "float32", 256)
        offset: Any = state["nested_offset"].value
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            state["nested_offset"].refuse("a number")
        return _State(
            shape,
            dtype,
            block,
            scales,
            nested_block=state["nested_blocksize"].integer(1, 2**20),
            nested_scales=self._all(f"{weight}.nested_quant_map"),
            offset=float(offset),
        )

    def _add_8_bits(self, module: str, dtype: str) -> None:
        """Replace the arrays of a weight in 8 bits by the weight.

        Raises:
          CheckpointError: an array is missing or does not fit.
        """
        weight = f"{module}weight"
        try:
            shape = self._file.tensors[weight].shape
            if len(shape) != 2:
                raise ValueError(f"it is {list(shape)}, not a matrix")
            self._check(weight, "I8", math.prod(shape))
            self._check(f"{module}SCB", "float32", shape[0])
            layout = f"{module}weight_format"
            if layout in self._file.tensors and self._all(layout).any():
                raise ValueError("its rows are not stored one after the other")
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: {weight} is not in the format of bitsandbytes: {error}"
            ) from error
        for name in _OF_8_BITS:
            self.tensors.pop(f"{module}{name}", None)
        self._rows[weight] = f"{module}SCB"
        self.tensors[weight] = Tensor(shape, dtype)

    def _check(self, name: str, dtype: str, count: int) -> None:
        """Raise ValueError unless a tensor has this dtype and number of elements."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ValueError(f"{name} is missing")
        if tensor.dtype != dtype or math.prod(tensor.shape) != count:
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)}, and {count} numbers of {dtype} are "
                "needed"
            )

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor cannot be read.
        """
        if name in self._states:
            return self._read_4_bits(name, self._states[name], box)
        if name not in self._rows:
            return self._file.read(name, box)
        codes = self._file.read(name, box).astype(np.float32)
        scales = self._flat(self._rows[name], *box[0])
        decoded = codes * scales[:, None] * np.float32(1 / 127)
        return decoded.astype(numpy_dtype(self.tensors[name].dtype))

    def _read_4_bits(self, name: str, state: _State, box: Box) -> np.ndarray:
        shape = state.shape
        row = math.prod(shape[1:])
        start, stop = box[0][0] * row, box[0][1] * row
        packed = self._flat(name, start // 2, -(-stop // 2))
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        codes = codes[start % 2 :][: stop - start]
        blocks = np.arange(start, stop) // state.block
        decoded = state.scales[codes]
        if blocks.size:
            first = int(blocks[0])
            decoded = (
                decoded * self._scales(name, state, first, int(blocks[-1]) + 1)[blocks - first]
            )
        decoded = decoded.reshape(box[0][1] - box[0][0], *shape[1:])
        inner = tuple(slice(a, b) for a, b in box[1:])
        return decoded[(slice(None), *inner)].astype(numpy_dtype(state.dtype))

    def _scales(self, name: str, state: _State, first: int, last: int) -> np.ndarray:
        """Return the scales of a range of blocks, in float32."""
        scales = self._flat(f"{name}.absmax", first, last)
        if state.nested_scales is None:
            return scales
        groups = np.arange(first, last) // state.nested_block
        start = int(groups[0])
        nested = self._flat(f"{name}.nested_absmax", start, int(groups[-1]) + 1)
        return state.nested_scales[scales] * nested[groups - start] + np.float32(state.offset)

    def _all(self, name: str) -> np.ndarray:
        return self._flat(name, 0, math.prod(self._file.tensors[name].shape))

    def _flat(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return a range of a vector, which may be stored with other dims of 1."""
        shape = self._file.tensors[name].shape
        if math.prod(shape) != max(shape, default=1):
            raise CheckpointError(f"{self.path}: {name} is {list(shape)}, and a vector is needed")
        longest = shape.index(max(shape)) if shape else None
        box = tuple((start, stop) if dim == longest else (0, 1) for dim in range(len(shape)))
        return np.asarray(self._file.read(name, box)).reshape(-1)
