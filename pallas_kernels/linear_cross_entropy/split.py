"""How `linear_cross_entropy` is split over a mesh, in collectives inside one `jax.shard_map`.

    x[T_tokens, D], labels[T_tokens]      tokens over some axes: `data` and `fsdp`, say
    w[D, V_vocab]                         the vocabulary over others: `tensor`
    w[D_fsdp, V_vocab]                    and at rest also over axes that split tokens, on either dim

Each device computes its columns for its tokens. Over the axes of the vocabulary log-sum-exps are
joined (pmax, and psum, of numbers a token) and dx is summed: dx[T, D]{U_vocab} -> dx[T, D]. Over
those of tokens dw is summed: dw[D, V]{U_tokens} -> dw[D, V]. Both sums are of arrays in the inputs'
dtype, as those of the partitioner are.

Where w rests split over an axis of the tokens, it is gathered a tile at a time, w[D_fsdp, v] ->
w[D, v], used and released, and a tile's gradient is reduce-scattered as it is made: no device holds
the whole matrix. Where w arrives whole, its gradient may still go to shards (`dw`), which halves
the bytes of its reduction.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """Axes of a mesh that split the arrays.

    Attributes:
      mesh: concrete or abstract.
      tokens: axes that split dim 0 of x and of labels.
      w: spec of w. Axes among `tokens` are gathered on use; the others, on dim V alone, split the
        vocabulary.
      dw: spec of w's gradient; None is `w`. It may name axes among `tokens` that `w` does not, on
        one dim.

    Raises:
      ValueError: an unknown axis, one named twice, or one that splits neither tokens nor the
        vocabulary.
    """

    mesh: Any
    tokens: tuple[str, ...]
    w: PartitionSpec
    dw: PartitionSpec | None = None

    def __post_init__(self):
        for name, spec in (("w", self.w), ("dw", self.grad_spec)):
            used = [axis for entry in spec for axis in axes_of(entry)]
            if len(spec) > 2 or len(set(used)) < len(used):
                raise ValueError(
                    f"linear_cross_entropy: the spec {spec} of {name}[D, V] must have one entry a dim, an axis once"
                )
            if unknown := [
                axis for axis in (*used, *self.tokens) if axis not in self.mesh.axis_names
            ]:
                raise ValueError(
                    f"linear_cross_entropy: the mesh has axes {self.mesh.axis_names}, and not {unknown}"
                )
            if wrong := [
                axis
                for axis in (*_entry(spec, 0), *used)
                if axis not in (*self.tokens, *self.vocab)
            ]:
                raise ValueError(
                    f"linear_cross_entropy: {wrong[0]!r} splits {name}[D, V] in {spec}: only axes that split the tokens, "
                    f"{self.tokens}, may split D, and be gathered; the rest split V of w"
                )
        if self.gathered and self.grad_spec != self.w:
            raise ValueError(
                f"linear_cross_entropy: w is gathered from {self.w}, so dw goes there, and not to {self.grad_spec}"
            )
        if not self.gathered and _entry(self.grad_spec, 1)[: len(self.vocab)] != self.vocab:
            raise ValueError(
                f"linear_cross_entropy: dw goes to {self.grad_spec}: V must be split as in {self.w}, and then further"
            )
        if sum(bool(set(_entry(self.grad_spec, dim)) & set(self.tokens)) for dim in (0, 1)) > 1:
            raise ValueError(
                f"linear_cross_entropy: axes of the tokens split both dims of w in {self.grad_spec}: one is allowed"
            )

    @property
    def grad_spec(self) -> PartitionSpec:
        """Spec of w's gradient."""
        return self.w if self.dw is None else self.dw

    @property
    def vocab(self) -> tuple[str, ...]:
        """Axes that split the vocabulary while it is used."""
        return tuple(axis for axis in _entry(self.w, 1) if axis not in self.tokens)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which w is gathered on use."""
        return tuple(axis for dim in (0, 1) for axis in _entry(self.w, dim) if axis in self.tokens)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Axes over which dw is reduce-scattered."""
        return tuple(
            axis for dim in (0, 1) for axis in _entry(self.grad_spec, dim) if axis in self.tokens
        )

    @property
    def dim(self) -> int:
        """Dim of w that the axes of tokens split."""
        return 0 if set(_entry(self.grad_spec, 0)) else 1

    @property
    def widening(self) -> int:
        """How many devices' columns a gathered tile has."""
        return self.size(self.gathered) if self.dim == 1 else 1

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of pieces that `axes` make."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def check(self, tokens: int, hidden: int, vocab: int) -> None:
        """Raise ValueError where dims do not divide."""
        for name, size, axes in (
            ("T", tokens, self.tokens),
            ("D", hidden, _entry(self.grad_spec, 0)),
            ("V", vocab, _entry(self.grad_spec, 1)),
        ):
            if size % self.size(axes):
                raise ValueError(
                    f"linear_cross_entropy: {name}={size} does not divide by {self.size(axes)}, "
                    f"the devices along {' x '.join(axes)}; pad it, or choose another split"
                )

    def column_ids(self, start: jax.Array, count: int, local: int) -> jax.Array:
        """Return the places in the whole vocabulary of `count` columns from `start` of this
        device's `local` ones.
        """
        axes = _entry(self.w, 1)
        first = jax.lax.axis_index(axes) * local if axes else 0
        return first + start + jnp.arange(count)

    def gather(self, w: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All_gather a tile w[D, v] and the places ids[v] of its columns over the axes of tokens
        that split it.
        """
        if not self.gathered:
            return w, ids
        if self.dim == 0:
            return jax.lax.all_gather(w, self.gathered, tiled=True), ids
        # Stacked and then transposed, a tile at a time: for a gather tiled along V XLA would
        # transpose all of w.
        whole = jax.lax.all_gather(w, self.gathered)  # [N, D, v]
        return jnp.moveaxis(whole, 0, 1).reshape(len(w), -1), jax.lax.all_gather(
            ids, self.gathered, tiled=True
        )

    def reduce_dw(self, dw: jax.Array) -> jax.Array:
        """Sum dw over the tokens of all devices, and return this device's shard: a part of dim 0."""
        # shards first: the rest of the axes, which may cross nodes, then carry 1 / N of the bytes
        if self.scattered:
            dw = jax.lax.psum_scatter(dw, self.scattered, tiled=True)
        rest = tuple(axis for axis in self.tokens if axis not in self.scattered)
        return jax.lax.psum(dw, rest) if rest else dw

    def reduce_gradients(self, dx: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sum dx[T, D] over the vocabulary and dw[D, V] of whole w over the tokens of all devices;
        dw goes to its shards.
        """
        dx = jax.lax.psum(dx, self.vocab) if self.vocab else dx
        # A reduce-scatter cuts dim 0: for shards of V it is given dw^T.
        return dx, self.reduce_dw(dw.T).T if self.scattered and self.dim == 1 else self.reduce_dw(
            dw
        )

    def reduce_tile(self, dw: jax.Array) -> jax.Array:
        """Do the same for a tile of gathered columns, dw[D, v]."""
        if self.dim == 0:
            return self.reduce_dw(dw)
        by_device = dw.reshape(len(dw), self.widening, -1)
        # [N, D, v] -> [N D, v]: each device's columns are one piece of dim 0, which the
        # reduce-scatter cuts.
        return self.reduce_dw(
            jnp.moveaxis(by_device, 1, 0).reshape(-1, by_device.shape[2])
        ).reshape(len(dw), -1)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    return axes_of(spec[dim]) if dim < len(spec) else ()
