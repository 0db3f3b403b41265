"""Experts in MXFP4 (OCP Microscaling Formats 1.0, section 5.3), as in gpt-oss, decoded as read.

    W[e, 32 g + i, row] = map[code[e, row, g, i]] 2^(scale[e, row, g] - 127)

    tensors of a file             W[E, H, R]
    X_blocks [E, R, H / 32, 16]   uint8, two codes each, the first of them in the low bits
    X_scales [E, R, H / 32]       uint8

A code has a sign, two bits of exponent and one of mantissa, so decoded numbers are exact in
bfloat16.
"""

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import CheckpointError
from zerojax.weights import Tensor, WeightFile

_BLOCKS = "_blocks"
_SCALES = "_scales"
_GROUP = 32
"""Number of elements that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAP = np.asarray([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_DTYPE = "bfloat16"


class Mxfp4File:
    """A file of weights in which experts in MXFP4 look like any others.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes of the decoded weights, by name.
      tiled: empty.
    """

    def __init__(self, file: WeightFile) -> None:
        """Find the quantized weights.

        Args:
          file: file of weights.

        Raises:
          CheckpointError: the arrays of a weight do not fit each other.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self._file = file
        self._decoded: set[str] = set()
        self.tensors = dict(file.tensors)
        for name in file.tensors:
            weight = name.removesuffix(_BLOCKS)
            if weight != name and f"{weight}{_SCALES}" in file.tensors:
                self._add(weight)

    def _add(self, weight: str) -> None:
        """Replace the arrays of a weight by the weight.

        Raises:
          CheckpointError: they do not fit each other.
        """
        blocks = self.tensors.pop(f"{weight}{_BLOCKS}")
        scales = self.tensors.pop(f"{weight}{_SCALES}")
        is_known = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _GROUP // 2)
        if not is_known or {blocks.dtype, scales.dtype} != {"U8"}:
            raise CheckpointError(
                f"{self.path}: {weight} is not in the format MXFP4: its blocks are "
                f"{blocks.dtype}{list(blocks.shape)} and its scales {scales.dtype}"
                f"{list(scales.shape)}, and U8[E, R, G, 16] and U8[E, R, G] are needed"
            )
        experts, rows, groups = scales.shape
        self._decoded.add(weight)
        self.tensors[weight] = Tensor((experts, groups * _GROUP, rows), _DTYPE)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor cannot be read.
        """
        if name not in self._decoded:
            return self._file.read(name, box)
        experts, (start, stop), rows = box
        groups = (start // _GROUP, -(-stop // _GROUP))
        packed = self._file.read(f"{name}{_BLOCKS}", (experts, rows, groups, (0, _GROUP // 2)))
        scales = self._file.read(f"{name}{_SCALES}", (experts, rows, groups))
        codes = np.stack([packed & 15, packed >> 4], axis=-1)  # [e, r, g, 16, 2]
        codes = codes.reshape(*codes.shape[:3], _GROUP)
        decoded = np.ldexp(_MAP[codes], scales.astype(np.int32)[..., None] - 127)
        flat = decoded.reshape(*decoded.shape[:2], -1)  # [e, r, h]
        first = groups[0] * _GROUP
        part = flat[..., start - first : stop - first].swapaxes(1, 2)
        return part.astype(numpy_dtype(_DTYPE))
