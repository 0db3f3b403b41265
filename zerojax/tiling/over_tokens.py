"""Apply a function of single tokens to long sequences, a tile of tokens at a time.

    x[B, T, H] -> x[n, B, T / n, H],    y[i] = function(x[i]),    y[n, B, T / n, F] -> y[B, T, F]

What the function computes on the way, such as the hidden activations of an MLP, exists for one tile
only: in backward each tile is computed again, from x, and derived. This is the "sequence tiling" of
Arctic Long Sequence Training (arXiv:2506.13996).

On a mesh each device computes on its own tokens, and sums its own gradients of the arrays that the
function reads from outside, such as weights. Both have rows r over the axes that split the batch
and the tokens:

    x[B_(data, fsdp), T_context, H] -> x[n, r_(data, fsdp, context), B / .., T / .., H]
    dw[H, F]                         = sum_r dw[r_(data, fsdp, context), H, F]

So the loop adds to dw[r, H, F] in float32 without communication, and the sum over r after the loop
is one reduction. The partitioner would reduce dw[H, F] in each tile instead.

A function whose tokens meet on the mesh, such as a mixture of experts, has no rows: it is called
with a tile of all devices, split like activations, and the partitioner reduces its gradients in
each tile (`over_tokens_and_sums`).

    x[B_(data, fsdp), T_context, H] -> x[n, B_(data, fsdp), (T / n)_context, H]
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import CONTEXT, batch_axes, check_automatic, context_size
from zerojax.user_values import as_integer, shown

Array = jax.Array


def over_tokens(function: Callable[[Any], Any], x: Any, *, num_tiles: int) -> Any:
    """Return `function(x)`, computed over `num_tiles` tiles of the tokens, one after another.

        y = zj.over_tokens(lambda x: mlp(norm(x)), x, num_tiles=16)

    The function must treat tokens alike and apart: norms, MLPs and projections do, attention and
    `zj.moe` do not. It may read arrays from outside, such as parameters; their gradients are summed
    over the tiles. Only x is kept for backward, in which the function runs once more. It must not
    draw random numbers, because all tiles would draw the same ones.

    Args:
      function: function of x or of a tile of it. Dims 0 and 1 of its results are those of its
        argument.
      x: array [B, T, ...], or a pytree of such arrays with the same B and T.
      num_tiles: number of tiles; T divides by it, and on a mesh by num_tiles x `context`. 1 calls
        the function as it is.

    Returns:
      The function's results, [B, T, ...].

    Raises:
      ValueError: the number of tiles is not an integer of at least 1, T does not divide, arrays
        lack the dims, or the mesh has explicit axes.
    """
    cut = _find_cut(x, num_tiles, has_rows=True)
    if cut.count == 1:
        return function(x)
    return _run(lambda x: (function(x), ()), x, cut)[0]


def over_tokens_and_sums(
    function: Callable[[Any], tuple[Any, Any]], x: Any, *, num_tiles: int
) -> tuple[Any, Any]:
    """Return a function's results, computed over tiles of the tokens, and sums over all tokens.

    In contrast to `over_tokens`, tokens may meet on the mesh, as those of `zerojax.experts.mix` do:
    the function is called with a tile of all devices. On a mesh, gradients of what it reads from
    outside are therefore reduced in each tile.

    Args:
      function: function of x or of a tile of it that returns `(y, sums)`. Dims 0 and 1 of y are
        those of its argument. Sums are a pytree of floating arrays that are sums over the tokens of
        the tile.
      x: array [B, T, ...], or a pytree of such arrays with the same B and T.
      num_tiles: number of tiles, as in `over_tokens`.

    Returns:
      y[B, T, ...], and the sums over the tokens of all tiles.

    Raises:
      ValueError: as in `over_tokens`.
    """
    cut = _find_cut(x, num_tiles, has_rows=False)
    return function(x) if cut.count == 1 else _run(function, x, cut)


def _find_cut(x: Any, num_tiles: Any, *, has_rows: bool) -> "_Cut":
    """Return how x is cut into tiles; with the arguments of `over_tokens`."""
    count = as_integer(num_tiles)
    if count is None or count < 1:
        raise ValueError(
            f"over_tokens: num_tiles={shown(num_tiles)}: an integer of at least 1 is needed"
        )
    return _Cut.find(*_find_dims(x, "x"), count, has_rows)


def _run(function: Callable[[Any], tuple[Any, Any]], x: Any, cut: "_Cut") -> tuple[Any, Any]:
    """Return the results and the sums of a function over several tiles."""
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*cut.tile, *a.shape[2:]), a.dtype), x)
    traced, result = jax.make_jaxpr(function, return_shape=True)(one)
    y = result[0]
    if _find_dims(y, "a result") != cut.tile:
        raise ValueError(
            f"over_tokens: a tile of the tokens is {list(cut.tile)}, and the function returned "
            f"{[list(a.shape) for a in jax.tree.leaves(y)]}: dims 0 and 1 must stay"
        )
    tiled = _Tiled(traced.jaxpr, cut, len(jax.tree.leaves(y)))
    leaves: Any = _compute(tiled, tuple(traced.consts), tuple(jax.tree.leaves(x)))
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tiled:
    """A function of a tile.

    Attributes:
      jaxpr: jaxpr of the function of one tile; its constants are what it reads from outside.
      cut: how arrays are cut into tiles.
      num_results: number of results of the tokens; the function's other results are sums.
    """

    jaxpr: jex.Jaxpr
    cut: "_Cut"
    num_results: int

    def run(self, consts: Sequence[Any], x: Sequence[Array]) -> list[Array]:
        """Return the results for one tile, without rows."""
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(self.jaxpr, consts))(*x)

    def derive(
        self, consts: Sequence[Any], x: Sequence[Array], dy: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Return the gradients of the floating constants and of the floating x, for one tile."""
        consts_in, consts_out = _parted(consts)
        x_in, x_out = _parted(x)

        def run(consts_in: list[Any], x_in: list[Any]) -> list[Array]:
            y = self.run(_joined(consts_in, consts_out), _joined(x_in, x_out))
            return [a for a in y if _is_floating(a)]

        _, pull = jax.vjp(run, consts_in, x_in)
        return pull(list(dy))

    def mapped(self, function: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        """Return a function of all rows of a tile."""
        if not self.cut.axes:
            return function
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name=self.cut.axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(tiled: _Tiled, consts: tuple[Any, ...], x: tuple[Array, ...]) -> list[Array]:
    """Return the results [B, T, ...] of all tiles, and the sums over them, as leaves."""
    run = tiled.mapped(tiled.run, (None, 0))
    count = tiled.num_results

    def step(sums: list[Array], tile: list[Array]) -> tuple[list[Array], list[Array]]:
        y = run(consts, tile)
        return [total + a for total, a in zip(sums, y[count:], strict=True)], y[:count]

    shapes: Any = [v.aval for v in tiled.jaxpr.outvars[count:]]
    sums = [jnp.zeros(a.shape, a.dtype) for a in shapes]
    sums, y = jax.lax.scan(step, sums, [tiled.cut.split(a) for a in x])
    return [*(tiled.cut.join(a) for a in y), *sums]


def _forward(
    tiled: _Tiled, consts: tuple[Any, ...], x: tuple[Array, ...]
) -> tuple[list[Array], tuple[Any, ...]]:
    return _compute(tiled, consts, x), (consts, x)


def _backward(tiled: _Tiled, kept: tuple[Any, ...], dy: list[Array]) -> tuple[Any, Any]:
    consts, x = kept
    cut = tiled.cut
    derive = tiled.mapped(tiled.derive, (None, 0, 0))
    floating, _ = _parted(consts)
    sums = [cut.zeros(a) for a in floating]
    d_sums = dy[tiled.num_results :]  # the same for all tiles

    def step(
        sums: list[Array], tile: tuple[list[Array], list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        x, dy = tile
        grads, dx = derive(consts, x, [*dy, *d_sums])
        added = [total + g.astype(total.dtype) for total, g in zip(sums, grads, strict=True)]
        return added, dx

    dy = [a for a in dy[: tiled.num_results] if a.dtype != jax.dtypes.float0]
    tiles = [cut.split(a) for a in x], [cut.split(a) for a in dy]
    sums, dx = jax.lax.scan(step, sums, tiles)
    grads = [cut.reduce(total).astype(a.dtype) for total, a in zip(sums, floating, strict=True)]
    return (
        tuple(_with_zeros(consts, grads)),
        tuple(_with_zeros(x, [cut.join(a) for a in dx])),
    )


_compute.defvjp(_forward, _backward)


def _is_floating(a: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(a), jnp.inexact)


def _parted(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the floating arrays, and all arrays with None in the places of these."""
    floating = [a for a in leaves if _is_floating(a)]
    return floating, [None if _is_floating(a) else a for a in leaves]


def _joined(floating: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the arrays that `_parted` has parted."""
    rest = iter(floating)
    return [next(rest) if a is None else a for a in others]


def _with_zeros(leaves: Sequence[Any], grads: Sequence[Array]) -> list[Any]:
    """Return the cotangents of arrays, given those of the floating ones."""
    rest = iter(grads)
    return [
        next(rest) if _is_floating(a) else np.zeros(jnp.shape(a), jax.dtypes.float0) for a in leaves
    ]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How arrays [B, T, ...] are cut into tiles [n, r, B / b, T / (c n), ...], with r = b c rows.

    Without rows, tiles are [n, B, T / n, ...], and have T / (c n) tokens of each part of T.

    Attributes:
      size: B and T.
      count: n, number of tiles.
      mesh: the mesh in scope, or None.
      of_batch: axes that split B in b parts.
      of_tokens: axes that split T in c parts.
      has_rows: whether a function computes each part alone.
    """

    size: tuple[int, int]
    count: int
    mesh: Any
    of_batch: tuple[str, ...]
    of_tokens: tuple[str, ...]
    has_rows: bool

    @classmethod
    def find(cls, batch: int, length: int, count: int, has_rows: bool) -> Self:
        """Return the cut of arrays [batch, length, ...] on the mesh in scope.

        Raises:
          ValueError: the tokens do not divide, or the mesh has explicit axes.
        """
        mesh = jax.sharding.get_abstract_mesh()
        of_batch = of_tokens = ()
        # Inside of a shard_map (manual axes) the arrays are already one device's.
        if not mesh.empty and not getattr(mesh, "manual_axes", ()):
            check_automatic("over_tokens", mesh)
            of_batch = tuple(axis for axis in batch_axes(mesh) if mesh.shape[axis] > 1)
            of_tokens = (CONTEXT,) if context_size(mesh) > 1 else ()
            if batch % math.prod(mesh.shape[axis] for axis in of_batch):
                of_batch = ()  # a batch that devices split unevenly
        cut = cls((batch, length), count, mesh, of_batch, of_tokens, has_rows)
        if count > 1 and length % (count * cut.columns):
            multiple = count * cut.columns
            over = f"num_tiles={count}"
            if of_tokens:
                over += f" x context={cut.columns}"
            raise ValueError(
                f"over_tokens: {length} tokens do not divide by {over}: pad the sequences to "
                f"{-(-length // multiple) * multiple} tokens, or choose another number of tiles"
            )
        return cut

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the rows."""
        return (*self.of_batch, *self.of_tokens) if self.has_rows else ()

    @property
    def rows(self) -> int:
        """The number of parts of B."""
        return math.prod(self.mesh.shape[axis] for axis in self.of_batch)

    @property
    def columns(self) -> int:
        """The number of parts of T."""
        return math.prod(self.mesh.shape[axis] for axis in self.of_tokens)

    @property
    def tile(self) -> tuple[int, int]:
        """B and T of a tile, on one device if there are rows."""
        batch, length = self.size
        if not self.has_rows:
            return batch, length // self.count
        return self._part

    @property
    def _part(self) -> tuple[int, int]:
        """B and T of a device's part of a tile."""
        batch, length = self.size
        return batch // self.rows, length // (self.columns * self.count)

    def split(self, a: Array) -> Array:
        """Return the tiles of an array [B, T, ...]."""
        rest = a.shape[2:]
        batch, tokens = self._part
        pieces = a.reshape(self.rows, batch, self.columns, self.count, tokens, *rest)
        others = range(5, pieces.ndim)
        if self.axes:
            tiles = pieces.transpose(3, 0, 2, 1, 4, *others).reshape(
                self.count, -1, *self.tile, *rest
            )
            return self._constrain(tiles, (None, self.axes))
        tiles = pieces.transpose(3, 0, 1, 2, 4, *others).reshape(self.count, *self.tile, *rest)
        return self._constrain(tiles, (None, *self._split_dims))

    def join(self, tiles: Array) -> Array:
        """Return the array [B, T, ...] of these tiles."""
        batch, tokens = self._part
        if self.axes:
            rest = tiles.shape[4:]
            pieces = tiles.reshape(self.count, self.rows, self.columns, batch, tokens, *rest)
            order = (1, 3, 2, 0, 4)
        else:
            rest = tiles.shape[3:]
            pieces = tiles.reshape(self.count, self.rows, batch, self.columns, tokens, *rest)
            order = (1, 2, 3, 0, 4)
        a = pieces.transpose(*order, *range(5, pieces.ndim)).reshape(*self.size, *rest)
        return self._constrain(a, self._split_dims)

    @property
    def _split_dims(self) -> tuple[Any, Any]:
        """Axes that split B and T."""
        return self.of_batch or None, self.of_tokens or None

    def zeros(self, a: Array) -> Array:
        """Return zeros for the sums of an array's gradients, [r, ...] or [...], in float32."""
        dtype = jnp.promote_types(jnp.result_type(a), jnp.float32)
        if not self.axes:
            return jnp.zeros(jnp.shape(a), dtype)
        rows = self.rows * self.columns
        return self._constrain(jnp.zeros((rows, *jnp.shape(a)), dtype), (self.axes,))

    def reduce(self, sums: Array) -> Array:
        """Return the sum over the rows."""
        return jnp.sum(sums, 0) if self.axes else sums

    def _constrain(self, a: Array, entries: tuple[Any, ...]) -> Array:
        """Constrain the first dims of an array, and leave the others to the partitioner."""
        if not (self.of_batch or self.of_tokens):
            return a
        rest = (PartitionSpec.UNCONSTRAINED,) * (a.ndim - len(entries))
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries, *rest))
        return jax.lax.with_sharding_constraint(a, sharding)


def _find_dims(x: Any, what: str) -> tuple[int, int]:
    """Return B and T of a pytree of arrays [B, T, ...].

    Raises:
      ValueError: an array has fewer dims, or arrays differ in them.
    """
    shapes = [jnp.shape(a) for a in jax.tree.leaves(x)]
    dims = {shape[:2] for shape in shapes}
    if len(dims) != 1 or any(len(shape) < 2 for shape in shapes):
        raise ValueError(
            f"over_tokens: {what} must have arrays [B, T, ...] with the same B and T, got "
            f"{', '.join(map(str, shapes)) or 'no arrays'}"
        )
    batch, length = dims.pop()
    return batch, length
