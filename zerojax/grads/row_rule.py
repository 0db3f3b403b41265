"""Rows of unreduced gradients: one per batch shard, and how arrays get them.

In a pipeline the tokens of embedding and head are divided over the stages. Then the rows are those
of the stages too: tokens take the place of the batch, and `pipe` that of its axes.

guess_split    which dim of an argument is the batch
cut            x[B, D] -> x[R, B / R, D]    each device keeps its own part of the batch
lift           g[D, F] -> g[R, D, F]        g in row 0, zeros in the other rows
constrain      g[R_(data, fsdp), D, F]      each device holds one row
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.activations import ANY, Split
from zerojax.sharding import batch_axes, num_batch_shards, row_axes

Array = jax.Array


def unreduced_sharding(mesh: Mesh, unsharded: Sequence[Any]) -> NamedSharding:
    """Return the sharding of a leaf's unreduced gradient, for arguments as in `row_axes`."""
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh, unsharded), *unsharded))


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Properties shared by all jaxprs of a derivative.

    Attributes:
      mesh: the device mesh.
      axes: axes that split the rows.
      batch_size: number of examples of a microbatch.
      num_tokens: 0, or the length of dim 1 of an argument with the batch in dim 0, if the rows are
        parts of this dim instead of the batch.
      reduced_early: descriptions of the sums that were reduced where they are made.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    batch_size: int
    num_tokens: int = 0
    reduced_early: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """R, the number of devices along `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def guess_split(self, shape: tuple[int, ...], is_data: bool) -> Split:
        """Return how an array is split: in dim 0 if it is data with the length of the batch.

        Tokens are split in dim 1 of such an array.
        """
        is_batch = (
            is_data
            and self.batch_size > 0
            and shape[:1] == (self.batch_size,)
            and self.batch_size % num_batch_shards(self.mesh) == 0
        )
        split: list[tuple[str, ...]] = [()] * len(shape)
        if is_batch:
            split[0] = batch_axes(self.mesh)
        if is_batch and self.num_tokens and shape[1:2] == (self.num_tokens,):
            split[1] = self.axes
        return tuple(split)

    def batch_dim(self, split: Split) -> int:
        """Return the dim that is split like the rows' part of the data, or -1."""
        followed = set(self.axes if self.num_tokens else batch_axes(self.mesh))
        for dim, axes in enumerate(split):
            if axes is not ANY and not followed.isdisjoint(axes):
                return dim
        return -1

    def constrain(self, value: Array, *spec: Any) -> Array:
        """Keep dim 0, the rows, on their devices.

        The partitioner chooses the sharding of the other dims unless `spec` gives it.
        """
        other_dims = spec or (PartitionSpec.UNCONSTRAINED,) * (value.ndim - 1)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes, *other_dims))
        return jax.lax.with_sharding_constraint(value, sharding)

    def cut(self, value: Any, dim: int) -> Array:
        """Return an array with dim `dim` cut into R pieces, as dim 0: x[B, D] -> x[R, B / R, D]."""
        value = jnp.asarray(value)
        pieces = value.reshape(*value.shape[:dim], self.num_rows, -1, *value.shape[dim + 1 :])
        return self.constrain(jnp.moveaxis(pieces, dim, 0))

    def lift(self, value: Any) -> Array:
        """Return rows whose sum is `value`: the value itself, and zeros."""
        value = jnp.asarray(value)
        row = jax.lax.broadcasted_iota(jnp.int32, (self.num_rows, *(1,) * value.ndim), 0)
        return self.constrain(jnp.where(row == 0, value[None], jnp.zeros((), value.dtype)))
