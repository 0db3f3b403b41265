"""Split `linear_cross_entropy` over a mesh, with collectives inside one `jax.shard_map`.

    x[T_tokens, D], labels[T_tokens]      tokens over some axes, such as `data` and `fsdp`
    w[D, V_vocab]                         the vocabulary over other axes, such as `tensor`
    w[D_fsdp, V_vocab]                    w may be stored split over token axes too, on either dim

Each device computes its columns for its tokens. Over the axes of the vocabulary, log-sum-exps are
joined (pmax and psum of a few numbers per token) and dx is summed: dx[T, D]{U_vocab} -> dx[T, D].
Over the axes of the tokens, dw is summed: dw[D, V]{U_tokens} -> dw[D, V]. Both sums are in the
inputs' dtype, like the partitioner's.

If w is stored split over an axis of the tokens, it is gathered one tile at a time, w[D_fsdp, v] ->
w[D, v], used and released, and each tile's gradient is reduce-scattered as soon as it is computed:
no device holds the full matrix. If w arrives unsharded, its gradient may still be scattered to
shards (`dw`), which halves the bytes of its reduction.
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
      mesh: concrete or abstract mesh.
      tokens: axes that split dim 0 of x and of labels.
      w: spec of w. Axes in `tokens` are gathered on use; the other axes, allowed only on dim V,
        split the vocabulary.
      dw: spec of w's gradient; None means `w`. On one dim it may name axes in `tokens` that `w`
        does not name.

    Raises:
      ValueError: an axis is unknown, is named twice, or splits neither tokens nor the vocabulary.
    """

    mesh: Any
    tokens: tuple[str, ...]
    w: PartitionSpec
    dw: PartitionSpec | None = None

    def __post_init__(self):
        """Raise ValueError if the specs do not fit the mesh or each other."""
        for name, spec in (("w", self.w), ("dw", self.grad_spec)):
            used = [axis for entry in spec for axis in parse_axes(entry)]
            if len(spec) > 2 or len(set(used)) < len(used):
                raise ValueError(
                    f"linear_cross_entropy: the spec {spec} of {name}[D, V] must have one entry "
                    "per dim and name each axis once"
                )
            unknown = [axis for axis in (*used, *self.tokens) if axis not in self.mesh.axis_names]
            if unknown:
                raise ValueError(
                    f"linear_cross_entropy: the mesh has axes {self.mesh.axis_names}, and not "
                    f"{unknown}"
                )
            allowed = (*self.tokens, *self.vocab)
            refused = [axis for axis in (*_entry(spec, 0), *used) if axis not in allowed]
            if refused:
                raise ValueError(
                    f"linear_cross_entropy: {refused[0]!r} splits {name}[D, V] in {spec}: only "
                    f"axes that split the tokens, {self.tokens}, may split D and be gathered; all "
                    "other axes must split V of w"
                )
        if self.gathered and self.grad_spec != self.w:
            raise ValueError(
                f"linear_cross_entropy: w is gathered from {self.w}, so dw must have the same "
                f"spec, and not {self.grad_spec}"
            )
        if not self.gathered and _entry(self.grad_spec, 1)[: len(self.vocab)] != self.vocab:
            raise ValueError(
                f"linear_cross_entropy: dw has the spec {self.grad_spec}: V must be split as in "
                f"{self.w}, and then optionally further"
            )
        token_dims = [dim for dim in (0, 1) if set(_entry(self.grad_spec, dim)) & set(self.tokens)]
        if len(token_dims) > 1:
            raise ValueError(
                "linear_cross_entropy: axes of the tokens split both dims of w in "
                f"{self.grad_spec}: they may split only one"
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
        axes = (*_entry(self.w, 0), *_entry(self.w, 1))
        return tuple(axis for axis in axes if axis in self.tokens)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Axes over which dw is reduce-scattered."""
        axes = (*_entry(self.grad_spec, 0), *_entry(self.grad_spec, 1))
        return tuple(axis for axis in axes if axis in self.tokens)

    @property
    def dim(self) -> int:
        """Dim of w that the token axes split."""
        return 0 if set(_entry(self.grad_spec, 0)) else 1

    @property
    def widening(self) -> int:
        """Number of devices whose columns a gathered tile holds."""
        return self.size(self.gathered) if self.dim == 1 else 1

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of pieces into which `axes` split a dim.

        Args:
          axes: names of mesh axes; none leave the dim in one piece.
        """
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def check(self, tokens: int, hidden: int, vocab: int) -> None:
        """Check that each dim is divisible by the devices along its axes.

        Args:
          tokens: number of tokens T of all devices.
          hidden: width D.
          vocab: number of words V.

        Raises:
          ValueError: a dim is not divisible.
        """
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
        """Return the indices i32[count] of some of this device's columns in the full vocabulary.

        Args:
          start: first of these columns, i32[], counted among the device's columns.
          count: number of columns.
          local: number of all columns of the device.
        """
        axes = _entry(self.w, 1)
        first = jax.lax.axis_index(axes) * local if axes else 0
        return first + start + jnp.arange(count)

    def gather(self, w: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a tile and its columns' ids, all-gathered over the token axes that split w.

        Args:
          w: tile of the matrix, w[D, v].
          ids: indices of its columns in the full vocabulary, i32[v].
        """
        if not self.gathered:
            return w, ids
        if self.dim == 0:
            return jax.lax.all_gather(w, self.gathered, tiled=True), ids
        # Stacked and then transposed, one tile at a time: for a gather tiled along V, XLA would
        # transpose all of w.
        stacked = jax.lax.all_gather(w, self.gathered)  # [N, D, v]
        gathered = jnp.moveaxis(stacked, 0, 1).reshape(len(w), -1)  # [D, N v]
        return gathered, jax.lax.all_gather(ids, self.gathered, tiled=True)

    def reduce_dw(self, dw: jax.Array) -> jax.Array:
        """Return this device's shard along dim 0 of dw, summed over the tokens of all devices.

        Args:
          dw: sum over this device's tokens, in two dims; dim 0 is scattered.
        """
        # Scatter first: the remaining axes, which may cross nodes, then carry 1 / N of the bytes.
        if self.scattered:
            dw = jax.lax.psum_scatter(dw, self.scattered, tiled=True)
        remaining = tuple(axis for axis in self.tokens if axis not in self.scattered)
        return jax.lax.psum(dw, remaining) if remaining else dw

    def reduce_gradients(self, dx: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return dx summed over the vocabulary, and dw over the tokens, of all devices.

        w is unsharded; dw is scattered to its shards.

        Args:
          dx: sum over this device's words, dx[T, D].
          dw: sum over this device's tokens, dw[D, V].
        """
        if self.vocab:
            dx = jax.lax.psum(dx, self.vocab)
        if self.scattered and self.dim == 1:
            # A reduce-scatter cuts dim 0: for shards of V it takes dw^T.
            return dx, self.reduce_dw(dw.T).T
        return dx, self.reduce_dw(dw)

    def reduce_tile(self, dw: jax.Array) -> jax.Array:
        """Return this device's shard of a tile of gathered columns, summed over all tokens.

        Args:
          dw: sum over this device's tokens, dw[D, v].
        """
        if self.dim == 0:
            return self.reduce_dw(dw)
        by_device = dw.reshape(len(dw), self.widening, -1)  # [D, N, v]
        # [N, D, v] -> [N D, v]: the reduce-scatter cuts dim 0 into the devices' columns.
        stacked = jnp.moveaxis(by_device, 1, 0).reshape(-1, by_device.shape[2])
        return self.reduce_dw(stacked).reshape(len(dw), -1)


def parse_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    return parse_axes(spec[dim]) if dim < len(spec) else ()
