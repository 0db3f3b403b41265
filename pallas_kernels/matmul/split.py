"""Split the kernel of `matmul` over a mesh with a `jax.shard_map`.

The partitioner cannot see into a kernel, so the split is given explicitly.

    x[M_rows, K] @ w[K, N_columns] -> y[M_rows, N_columns]
    x[M_rows, K_summed] @ w[K_summed, N] -> y[P_summed, M_rows, N]     sum(y, 0) is the product

In the second form y holds each device's part of the sum. Neither form has a collective: the caller
adds the parts up, after accumulating any number of products onto them. Only forward is inside the
shard_map. The derivative's products are XLA's, on unsharded arrays, and the partitioner sums them
over devices like those of any dense layer.
"""

import dataclasses
import math
from typing import Any

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """Axes of a mesh that split the arrays of a product.

    Attributes:
      mesh: concrete or abstract mesh.
      rows: axes that split M.
      columns: axes that split N; cannot be combined with `summed`.
      summed: axes that split K, over P devices. It needs a single weight without bias and
        activation, because these are applied after the sum.

    Raises:
      ValueError: an axis is unknown or named twice.
    """

    mesh: Any
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    def __post_init__(self):
        """Raise ValueError if an axis is unknown or named twice."""
        used = (*self.rows, *self.columns, *self.summed)
        unknown = [axis for axis in used if axis not in self.mesh.axis_names]
        if unknown:
            raise ValueError(f"matmul: the mesh has axes {self.mesh.axis_names}, and not {unknown}")
        if len(set(used)) < len(used) or (self.columns and self.summed):
            raise ValueError(
                f"matmul: M, N and K are split over {self.rows}, {self.columns} and {self.summed}: "
                "each axis once is needed, and not both N and K"
            )

    @property
    def num_parts(self) -> int:
        """Number of parts P of the sum, or 0 if K is not split."""
        return self.size(self.summed) if self.summed else 0

    @property
    def x(self) -> PartitionSpec:
        """Spec of x[M, K]."""
        return PartitionSpec(self.rows or None, self.summed or None)

    @property
    def w(self) -> PartitionSpec:
        """Spec of a weight [K, N]."""
        return PartitionSpec(self.summed or None, self.columns or None)

    @property
    def bias(self) -> PartitionSpec:
        """Spec of a bias [N]."""
        return PartitionSpec(self.columns or None)

    @property
    def y(self) -> PartitionSpec:
        """Spec of y and of accumulated arrays: [M, N], or [P, M, N]."""
        matrix = (self.rows or None, self.columns or None)
        return PartitionSpec(self.summed, *matrix) if self.summed else PartitionSpec(*matrix)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of pieces into which `axes` split a dim.

        Args:
          axes: names of mesh axes; none leave the dim in one piece.
        """
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def shard(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """Return M, N and K of one device's product, from the full dims.

        Args:
          m: rows M of x and of the result.
          n: columns N of w and of the result.
          k: summed dim K.

        Raises:
          ValueError: a dim is not divisible by the devices along its axes.
        """
        for name, size, axes in (
            ("M", m, self.rows),
            ("N", n, self.columns),
            ("K", k, self.summed),
        ):
            if size % self.size(axes):
                raise ValueError(
                    f"matmul: {name}={size} does not divide by {self.size(axes)}, the devices "
                    f"along {' x '.join(axes)}: pad it, or choose another split"
                )
        return m // self.size(self.rows), n // self.size(self.columns), k // self.size(self.summed)
