"""How everything that depends on data is split over the mesh: batches, activations, and the
residuals saved for backward.

    batch     tokens[B_(data, fsdp), S]
    inside    x[B_(data, fsdp), S, D]            other dims are left to the partitioner
    saved     x[M, B_(data, fsdp), S, D]         M microbatches, where there are several, are a dim of their own in front
    stream    x[B_(data, fsdp), S_tensor, D]     between layers, with sequence parallelism (`zerojax.activations`)

One rule for all: dim 0 of a microbatch is split as the batch is.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding.mesh import BATCH_AXES, TENSOR, num_batch_shards
from zerojax.sharding.specs import Spec, named


@dataclasses.dataclass(frozen=True)
class ActivationSpec:
    """How activations are split.

    Attributes:
      mesh: the device mesh.
      num_microbatches: of a step; where there are several, dim 0 of what `constrain_all` and
        `saved` describe counts them.
      is_stream: whether what is described is the stream between layers, split over `tensor` in dim
        1 too.
    """

    mesh: Mesh
    num_microbatches: int = 1
    is_stream: bool = False

    def __str__(self) -> str:
        """Return how x is split between layers; "..." are dims that are left to the partitioner."""
        rest = f"T_{TENSOR}, H" if self.is_stream and self.mesh.shape[TENSOR] > 1 else "..."
        return f"x[B_({', '.join(BATCH_AXES)}), {rest}]"

    def batch(self, ndim: int) -> NamedSharding:
        """Return the sharding of a batch leaf: dim 0 over `data` and `fsdp`; scalars are
        replicated.
        """
        return named(self.mesh, (BATCH_AXES,) if ndim else ())

    def constrain(self, x: Any) -> Any:
        """Keep dim 0 of one microbatch's activations split as the batch is; other dims are left to
        the partitioner.
        """
        return jax.tree.map(lambda a: self._constrain(a, 0), x)

    def constrain_all(self, x: Any) -> Any:
        """Do the same for those of all microbatches."""
        return jax.tree.map(lambda a: self._constrain(a, self._lead), x)

    def saved(
        self, shape: tuple[int, ...], batch_size: int, tier: str, known: Spec | None = None
    ) -> tuple[Any, ...]:
        """Return the spec of what forward saves of all microbatches.

        Args:
          shape: of one microbatch's activation; it is split if its dim 0 is the batch.
          batch_size: of a microbatch.
          tier: where it rests. On the device other dims are left to the partitioner; elsewhere they
            are whole, since what is moved must be told how each dim is split.
          known: the spec that it has anyhow, where that is known.
        """
        if known is not None:
            return (*(None,) * self._lead, *known)
        rest = PartitionSpec.UNCONSTRAINED if tier == "device" else None
        spec = tuple(entry or rest for entry in self.given(shape, batch_size))
        return (*(None,) * self._lead, *spec)

    def given(self, shape: tuple[int, ...], batch_size: int) -> Spec:
        """Return the spec of a leaf that a layer is given: split if its dim 0 is the batch, else
        whole.
        """
        is_batch = shape[:1] == (batch_size,) and batch_size % num_batch_shards(self.mesh) == 0
        return self._split(shape, None) if is_batch else (None,) * len(shape)

    @property
    def _lead(self) -> int:
        """Dims that come before a microbatch's own."""
        return int(self.num_microbatches > 1)

    def _constrain(self, a: jax.Array, lead: int) -> jax.Array:
        # What does not divide as the batch does is left to the partitioner.
        if a.ndim <= lead or a.shape[lead] % num_batch_shards(self.mesh):
            return a
        spec = (*(None,) * lead, *self._split(a.shape[lead:], PartitionSpec.UNCONSTRAINED))
        return jax.lax.with_sharding_constraint(a, named(self.mesh, PartitionSpec(*spec)))

    def _split(self, shape: tuple[int, ...], rest: Any) -> tuple[Any, ...]:
        """Return the spec of one microbatch's activation: `rest` for all dims but the first, and
        the sequence of a stream.
        """
        if self.is_stream and len(shape) >= 3 and shape[1] % self.mesh.shape[TENSOR] == 0:
            return (BATCH_AXES, TENSOR, *(rest,) * (len(shape) - 2))
        return (BATCH_AXES, *(rest,) * (len(shape) - 1))


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh, abstract or not, that split dim 0 of a batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
