"""How batches, activations and the residuals saved for backward are split over the mesh.

    batch     tokens[B_(data, fsdp), T]
    inside    x[B_(data, fsdp), T, D]            the partitioner chooses the other dims
    saved     x[M, B_(data, fsdp), T, D]         M > 1 microbatches add a leading dim
    stream    x[B_(data, fsdp), T_tensor, D]     between layers, with sequence parallelism
                                                 (`zerojax.activations`)

One rule covers all of them: dim 0 of a microbatch is split like the batch. On a mesh with `expert`
that axis splits dim 0 too. On a mesh with `context` that axis splits dim 1, the tokens, of all but
the batch, where it divides:

    inside    x[B_(data, fsdp), T_context, D]
    stream    x[B_(data, fsdp), T_(context, tensor), D]

A batch arrives with complete sequences, and the program cuts them: each process then loads the same
rows on any mesh.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding.mesh import CONTEXT, TENSOR, batch_axes, context_size, num_batch_shards
from zerojax.sharding.specs import Spec, as_entry, named


@dataclasses.dataclass(frozen=True)
class ActivationSpec:
    """How activations are split.

    Attributes:
      mesh: the device mesh.
      num_microbatches: microbatches per step. If there are several, dim 0 of the arrays that
        `constrain_all` and `saved` describe counts them.
      is_stream: whether the arrays are the stream between layers, whose dim 1 is also split over
        `tensor`.
      length: length of the sequence, if it may be in another dim than dim 1: the first dim of this
        length after the batch is then the sequence. None: dim 1 is.
    """

    mesh: Mesh
    num_microbatches: int = 1
    is_stream: bool = False
    length: int | None = None

    def __str__(self) -> str:
        """Return how x is split between layers; the partitioner chooses the dims shown as "..."."""
        sequence_axes = [CONTEXT] if context_size(self.mesh) > 1 else []
        if self.is_stream and self.mesh.shape[TENSOR] > 1:
            sequence_axes.append(TENSOR)
        rest = "..."
        if len(sequence_axes) == 1:
            rest = f"T_{sequence_axes[0]}, H"
        elif sequence_axes:
            rest = f"T_({', '.join(sequence_axes)}), H"
        return f"x[B_({', '.join(batch_axes(self.mesh))}), {rest}]"

    def batch(self, ndim: int) -> NamedSharding:
        """Return a batch leaf's sharding: dim 0 over the batch's axes; scalars are replicated."""
        return named(self.mesh, (batch_axes(self.mesh),) if ndim else ())

    def constrain(self, x: Any) -> Any:
        """Split dim 0 of one microbatch's activations like the batch.

        The partitioner chooses the other dims.
        """
        return jax.tree.map(lambda a: self._constrain(a, 0), x)

    def constrain_all(self, x: Any) -> Any:
        """Split the batch dim of all microbatches' activations, x[M, B, ..], like the batch."""
        return jax.tree.map(lambda a: self._constrain(a, self._lead), x)

    def saved(
        self, shape: tuple[int, ...], batch_size: int, tier: str, known: Spec | None = None
    ) -> tuple[Any, ...]:
        """Return the spec of an activation that forward saves, for all microbatches together.

        Args:
          shape: shape of one microbatch's activation; it is split if its dim 0 is the batch.
          batch_size: rows of one microbatch.
          tier: where the activation is stored. On the device, the partitioner chooses the other
            dims. In other tiers the other dims are unsharded, since a transfer needs the split of
            every dim.
          known: the activation's spec, if it is already known.

        Returns:
          One entry per dim, with a leading None for the microbatches if there are several.
        """
        if known is not None:
            return (*(None,) * self._lead, *known)
        unsplit = PartitionSpec.UNCONSTRAINED if tier == "device" else None
        spec = tuple(entry or unsplit for entry in self.given(shape, batch_size))
        return (*(None,) * self._lead, *spec)

    def given(self, shape: tuple[int, ...], batch_size: int) -> Spec:
        """Return the spec of a leaf that a layer receives.

        The leaf is split if its dim 0 is the batch and divides by the batch shards; otherwise it is
        unsharded.

        Args:
          shape: shape of the leaf.
          batch_size: rows of one microbatch.
        """
        is_batch = shape[:1] == (batch_size,) and batch_size % num_batch_shards(self.mesh) == 0
        return self._split(shape, None) if is_batch else (None,) * len(shape)

    def constrain_given(self, x: Any) -> Any:
        """Split one microbatch's activations as `given` says, in all dims.

        The partitioner then splits no dim over further axes.
        """

        def constrain(a: jax.Array) -> jax.Array:
            spec = self.given(a.shape, a.shape[0] if a.shape else 0)
            return jax.lax.with_sharding_constraint(a, named(self.mesh, spec))

        return jax.tree.map(constrain, x)

    @property
    def _lead(self) -> int:
        """Number of dims in front of a microbatch's own dims: 0 or 1."""
        return int(self.num_microbatches > 1)

    def _constrain(self, a: jax.Array, lead: int) -> jax.Array:
        # The partitioner chooses the split of an array that does not divide like the batch.
        if a.ndim <= lead or a.shape[lead] % num_batch_shards(self.mesh):
            return a
        spec = (*(None,) * lead, *self._split(a.shape[lead:], PartitionSpec.UNCONSTRAINED))
        return jax.lax.with_sharding_constraint(a, named(self.mesh, PartitionSpec(*spec)))

    def _split(self, shape: tuple[int, ...], unsplit: Any) -> tuple[Any, ...]:
        """Return the spec of one microbatch's activation.

        All dims get the entry `unsplit`, except dim 0 (the batch) and the sequence, which `context`
        splits where it divides, or in a stream `context` and `tensor`.
        """
        entries = [batch_axes(self.mesh), *(unsplit,) * (len(shape) - 1)]
        dim = self._find_sequence(shape)
        axes = self._list_sequence_axes(shape, dim)
        if axes:
            entries[dim] = as_entry(axes)
        return tuple(entries)

    def _find_sequence(self, shape: tuple[int, ...]) -> int:
        """Return the dim that is the sequence, or 0 if there is none."""
        if self.length is not None:
            return shape.index(self.length, 1) if self.length in shape[1:] else 0
        return 1 if len(shape) > 1 else 0

    def _list_sequence_axes(self, shape: tuple[int, ...], dim: int) -> tuple[str, ...]:
        """Return the axes that split the sequence, dim `dim` of an activation."""
        if not dim:
            return ()
        axes: tuple[str, ...] = ()
        context = context_size(self.mesh)
        if context > 1 and shape[dim] % context == 0:
            axes = (CONTEXT,)
        stream_shards = context * self.mesh.shape[TENSOR]
        if self.is_stream and len(shape) >= 3 and shape[dim] % stream_shards == 0:
            axes += (TENSOR,)
        return axes
