"""Weights in float8 with a scale per square block, as in DeepSeek V3 (arXiv:2412.19437, 3.3.2).

    W[i, j] = code[i, j] scale[i // 128, j // 128]

    tensors of a file        W[A, B]
    X.weight                 float8_e4m3fn [A, B]
    X.weight_scale_inv       float32 [A / 128, B / 128], rounded up

`weight_block_size` of `quantization_config` is the size of a block. A box is decoded in float32 and
rounded to the dtype that `config.json` names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype
from host_offload.fields import Field
from zerojax.checkpoint import CheckpointError
from zerojax.weights import Tensor, WeightFile

_SCALE = "_scale_inv"
_CODES = "F8_E4M3"


class Fp8File:
    """A file of weights in which weights in float8 look like any others.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes of the decoded weights, by name.
      tiled: empty.
    """

    def __init__(self, file: WeightFile, quantization: Mapping[str, Any], dtype: str) -> None:
        """Find the quantized weights.

        Args:
          file: file of weights.
          quantization: `quantization_config` of the folder's `config.json`.
          dtype: dtype of the decoded weights.

        Raises:
          CheckpointError: a weight has no scales, or scales that do not fit it; or the sizes of
            blocks are missing.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self._file = file
        self._dtype = dtype
        self.tensors = dict(file.tensors)
        try:
            sizes = Field(quantization.get("weight_block_size"), "weight_block_size")
            rows, columns = sizes.integers(1)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: its quantization_config needs the two numbers of "
                f"weight_block_size: {error}"
            ) from error
        self._block = (rows, columns)
        self._decoded: set[str] = set()
        for name, tensor in file.tensors.items():
            if tensor.dtype == _CODES:
                self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        """Replace a weight's codes and scales by the weight.

        Raises:
          CheckpointError: the scales are missing or do not fit.
        """
        scales = self.tensors.pop(f"{name}{_SCALE}", None)
        needed = tuple(-(-n // size) for n, size in zip(tensor.shape, self._block, strict=False))
        if len(tensor.shape) != 2 or scales is None or scales.shape != needed:
            found = "missing" if scales is None else f"{scales.dtype}{list(scales.shape)}"
            raise CheckpointError(
                f"{self.path}: {name} {list(tensor.shape)} in float8 needs scales for blocks of "
                f"{list(self._block)} in {name}{_SCALE}, which is {found}"
            )
        self._decoded.add(name)
        self.tensors[name] = Tensor(tensor.shape, self._dtype)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor cannot be read.
        """
        codes = self._file.read(name, box)
        if name not in self._decoded:
            return codes
        sides = list(zip(box, self._block, strict=True))
        blocks = tuple((start // size, -(-stop // size)) for (start, stop), size in sides)
        scales = np.asarray(self._file.read(f"{name}{_SCALE}", blocks), np.float32)
        for dim, ((start, stop), size) in enumerate(sides):
            indices = np.arange(start, stop) // size - blocks[dim][0]
            scales = np.take(scales, indices, axis=dim)
        return (codes.astype(np.float32) * scales).astype(numpy_dtype(self._dtype))
