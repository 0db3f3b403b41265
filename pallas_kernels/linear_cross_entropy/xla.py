"""`linear_cross_entropy` in XLA: loops over tiles of tokens and vocabulary.

Products are in the inputs' dtype.

    forward               backward in one pass          backward in two passes
    for v: w_v            for v: w_v, dw_v = 0          for t: dx_t = 0
      for t:                for t:                        for v: dx_t += slope(x_t w_v) w_v^T
        z = x_t w_v           s = slope(x_t w_v)        for v: dw_v = 0
        join stats of z       dx_t += s w_v^T             for t: dw_v += x_t^T slope(x_t w_v)
                              dw_v += x_t^T s

The statistics are the maximum, the sum of exponentials, z[label] and the sum of z.

The log-sum-exp is joined online (Milakov and Gimelshein, arXiv:1805.02867): with a new tile, a
maximum m and a sum l of exp(z - m) become m' = max(m, max z) and l exp(m - m') + sum exp(z - m').

Slopes are rounded to the inputs' dtype for the two products of backward, so they are kept near 1:
the cotangents of the tokens, 1 / T each for a mean, are divided by the largest of them, and the
float32 sums are multiplied by it afterwards. In float16, whose smallest number is 6e-8, that is not
enough for the probabilities of a vocabulary of 1e5: there slopes are also multiplied by 2^12.

If a block does not divide its dim, the last tile starts early enough to be full and overlaps the
tile before, because padding an array would copy it. `fresh` marks a tile's positions that were not
in the tile before; the other positions are ignored and not written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.linear_cross_entropy.config import Config
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.split import Split

Array = jax.Array
STALE = -1
"""Index given to a column that the tile before also had: no label that counts equals it."""
HEADROOM = {jnp.dtype(jnp.float16): 2.0**12}
"""Factor of the slopes by dtype; slopes of magnitude 2 or less stay below float16's 65504."""


class Stats(NamedTuple):
    """Statistics of each token's logits, float32[T], over the columns so far or all columns."""

    max: Array
    sum: Array  # of exponentials, exp(z - max)
    label_logit: Array
    logit_sum: Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One dim cut into tiles."""

    size: int
    block: int

    @property
    def count(self) -> int:
        """Number of tiles."""
        return -(-self.size // self.block)

    @property
    def overlap(self) -> bool:
        """Whether the last tile shares positions with the tile before."""
        return self.size % self.block != 0

    def start(self, k: Array) -> Array:
        """Return the first position of tile k."""
        return jnp.minimum(k * self.block, self.size - self.block)

    def fresh(self, k: Array) -> Array | None:
        """Return which positions of tile k are not in tile k - 1; None if tiles never overlap."""
        if not self.overlap:
            return None
        return self.start(k) + jnp.arange(self.block) >= k * self.block

    def read(self, a: Array, k: Array, dim: int) -> Array:
        """Return tile k of an array along dim `dim`."""
        return jax.lax.dynamic_slice_in_dim(a, self.start(k), self.block, dim)

    def write(self, a: Array, k: Array, tile: Array, dim: int) -> Array:
        """Write the fresh positions of a tile."""
        fresh = self.fresh(k)
        if fresh is not None:
            fresh = jnp.expand_dims(fresh, [d for d in range(a.ndim) if d != dim])
            tile = jnp.where(fresh, tile, self.read(a, k, dim))
        return jax.lax.dynamic_update_slice_in_dim(a, tile, self.start(k), dim)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """One device's x[T, D], w[D, V] and labels[T], in tiles; ignored labels are negative."""

    form: Form
    config: Config
    split: Split | None
    x: Array
    w: Array
    labels: Array

    @property
    def rows(self) -> Tiles:
        """Tiles of the tokens."""
        return Tiles(len(self.x), min(self.config.block_t, len(self.x)))

    @property
    def columns(self) -> Tiles:
        """Tiles of this device's columns; once gathered, a tile has the configured width."""
        width = self.config.block_v // (self.split.widening if self.split else 1)
        return Tiles(self.w.shape[1], min(max(1, width), self.w.shape[1]))

    @property
    def sends_columns(self) -> bool:
        """Whether all of dw is summed here before its columns are sent to other devices.

        It is then dw^T[V, D], so that shards are contiguous in memory.
        """
        return (
            self.split is not None
            and not self.split.gathered
            and bool(self.split.scattered)
            and self.split.dim == 1
        )

    def read_w(self, k: Array) -> tuple[Array, Array]:
        """Return tile k of the columns, w[D, v], and their indices[v] in the vocabulary.

        Columns that are not fresh have the index STALE.
        """
        tiles = self.columns
        w = tiles.read(self.w, k, 1)
        fresh = tiles.fresh(k)
        column_ids = jnp.arange(tiles.block) + tiles.start(k)
        if self.split is not None:
            column_ids = self.split.column_ids(tiles.start(k), tiles.block, tiles.size)
        if fresh is not None:
            column_ids = jnp.where(fresh, column_ids, STALE)
        if self.split is None:
            return w, column_ids
        return self.split.gather(w, column_ids)

    def logits(self, t: Array, w: Array) -> Array:
        """Return float32 logits[block_t, v] for tile t of the tokens."""
        x_t = self.rows.read(self.x, t, 0)  # [block_t, D]
        return self.form.cap(jnp.dot(x_t, w, preferred_element_type=jnp.float32))

    def is_label(self, t: Array, column_ids: Array) -> Array:
        """Return whether each column is its token's label, bool[block_t, v]."""
        # A label of -1 equals STALE and matches stale columns, but its token is ignored.
        return self.rows.read(self.labels, t, 0)[:, None] == column_ids[None, :]


def loop(count: int, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Run `body(k, carry)` for k below `count` and return the last carry."""
    if count > 1:
        return jax.lax.fori_loop(0, count, body, carry)
    return body(jnp.int32(0), carry)


def forward(pieces: Pieces) -> Stats:
    """Return the statistics of this device's columns, which the losses and backward need."""
    rows = pieces.rows

    def over_vocab(v: Array, stats: Stats) -> Stats:
        w, column_ids = pieces.read_w(v)
        fresh = (column_ids != STALE)[None, :] if pieces.columns.overlap else None

        def over_tokens(t: Array, stats: Stats) -> Stats:
            # The statistics of rows in the overlap already include this tile. Joining the tile to
            # them again is harmless, because those rows are not written.
            before = Stats(*(rows.read(a, t, 0) for a in stats))
            after = _join_tile(pieces, before, t, w, column_ids, fresh)
            return Stats(*(rows.write(a, t, tile, 0) for a, tile in zip(stats, after, strict=True)))

        return loop(rows.count, over_tokens, stats)

    zeros = jnp.zeros(rows.size, jnp.float32)
    lowest = jnp.full(rows.size, -jnp.inf, jnp.float32)
    return loop(pieces.columns.count, over_vocab, Stats(lowest, zeros, zeros, zeros))


def _join_tile(
    pieces: Pieces, before: Stats, t: Array, w: Array, column_ids: Array, fresh: Array | None
) -> Stats:
    """Return the statistics of a tile of tokens joined with the logits of a tile of columns.

    Args:
      pieces: arrays in tiles.
      before: statistics of these tokens over earlier columns.
      t: tile of the tokens.
      w: tile of the columns, w[D, v].
      column_ids: indices[v] of the columns in the vocabulary.
      fresh: which columns are new, bool[1, v]; None if all are.
    """
    z = pieces.logits(t, w)  # [block_t, v]
    inside = z if fresh is None else jnp.where(fresh, z, -jnp.inf)
    largest = jnp.maximum(before.max, inside.max(1))
    rescaled = before.sum * jnp.exp(before.max - largest)
    exp_sum = rescaled + jnp.exp(inside - largest[:, None]).sum(1)
    label_logit = before.label_logit + jnp.where(pieces.is_label(t, column_ids), z, 0).sum(1)
    new_logits = z if fresh is None else jnp.where(fresh, z, 0)
    return Stats(largest, exp_sum, label_logit, before.logit_sum + new_logits.sum(1))


def join_devices(stats: Stats, axes: tuple[str, ...]) -> Stats:
    """Return the statistics over all columns from each device's, joined along mesh axes."""
    if not axes:
        return stats
    largest = jax.lax.pmax(stats.max, axes)
    sums = (stats.sum * jnp.exp(stats.max - largest), stats.label_logit, stats.logit_sum)
    return Stats(largest, *jax.lax.psum(sums, axes))


def scale_weight(weight: Array, dtype: Any) -> tuple[Array, Array]:
    """Return weights scaled so that `dtype` can represent the slopes.

    The second result is the factor that undoes the scaling, to apply to the sums.
    """
    headroom = HEADROOM.get(dtype, 1.0)
    # If no token counts, all weights are 0 and any unit works.
    largest = jnp.abs(weight).max()
    unit = jnp.where(largest == 0, 1, largest)
    return weight / unit * headroom, unit / headroom


def backward(pieces: Pieces, lse: Array, weight: Array) -> tuple[Array, Array]:
    """Return dx[T, D] and dw[D, V], reduced over devices as the split asks.

    Without a split, dx covers this device's columns and dw its tokens.

    Args:
      pieces: the same arrays as in forward.
      lse: float32[T], each token's log-sum-exp over the full vocabulary.
      weight: float32[T], the cotangent of each token's loss; 0 for ignored tokens.
    """
    x = pieces.x
    w = pieces.w
    weight, unit = scale_weight(weight, x.dtype)
    gradients = _Gradients(pieces, lse, weight, unit)
    num_row_tiles = pieces.rows.count
    num_column_tiles = pieces.columns.count
    empty = jnp.zeros(w.T.shape if pieces.sends_columns else w.shape, w.dtype)
    if pieces.config.passes == 1:
        sums = (jnp.zeros(x.shape, jnp.float32), empty)
        dx, dw = loop(num_column_tiles, gradients.add_columns, sums)
        dx = (dx * unit).astype(x.dtype)
    else:
        dx = loop(num_row_tiles, gradients.write_dx, jnp.zeros_like(x))
        dw = loop(num_column_tiles, gradients.write_dw, empty)
    if pieces.split is None:
        return dx, dw
    if pieces.split.vocab:
        dx = jax.lax.psum(dx, pieces.split.vocab)
    if not pieces.split.gathered:
        dw = pieces.split.reduce_dw(dw)
    return dx, dw.T if pieces.sends_columns else dw


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """The bodies of backward's loops over tiles.

    Attributes:
      pieces: the arrays in tiles.
      lse: float32[T], log-sum-exps.
      weight: float32[T], scaled cotangents of the losses.
      unit: float32[], factor of the sums that undoes the scaling.
    """

    pieces: Pieces
    lse: Array
    weight: Array
    unit: Array

    def add_columns(self, v: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Add tile v of the columns to float32 dx[T, D], and write its part of dw: one pass."""
        dx, dw = sums
        rows = self.pieces.rows
        w_v, column_ids = self.pieces.read_w(v)

        def over_tokens(t: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            dx, dw_v = sums
            s = self._slopes(t, w_v, column_ids)  # [block_t, v]
            dx = rows.write(dx, t, rows.read(dx, t, 0) + self._dx(s, w_v), 0)
            return dx, dw_v + self._dw(s, t)

        dx, dw_v = loop(rows.count, over_tokens, (dx, self._zeros(w_v)))
        return dx, self._write_dw(dw, v, dw_v)

    def write_dx(self, t: Array, dx: Array) -> Array:
        """Write tile t of dx[T, D], summed over the columns: the first of two passes."""
        rows = self.pieces.rows
        x = self.pieces.x

        def over_vocab(v: Array, dx_t: Array) -> Array:
            w_v, column_ids = self.pieces.read_w(v)
            return dx_t + self._dx(self._slopes(t, w_v, column_ids), w_v)

        zeros = jnp.zeros((rows.block, x.shape[1]), jnp.float32)
        dx_t = loop(self.pieces.columns.count, over_vocab, zeros)
        return rows.write(dx, t, (dx_t * self.unit).astype(x.dtype), 0)

    def write_dw(self, v: Array, dw: Array) -> Array:
        """Write tile v of dw, summed over the tokens: the second of two passes."""
        w_v, column_ids = self.pieces.read_w(v)

        def over_tokens(t: Array, dw_v: Array) -> Array:
            return dw_v + self._dw(self._slopes(t, w_v, column_ids), t)

        dw_v = loop(self.pieces.rows.count, over_tokens, self._zeros(w_v))
        return self._write_dw(dw, v, dw_v)

    def _slopes(self, t: Array, w_v: Array, column_ids: Array) -> Array:
        """Return slopes[block_t, v] in x's dtype, 0 at positions that are not fresh."""
        pieces = self.pieces
        rows = pieces.rows
        z = pieces.logits(t, w_v)
        lse = rows.read(self.lse, t, 0)[:, None]
        slope = pieces.form.slope(z, lse, pieces.is_label(t, column_ids))
        weight = rows.read(self.weight, t, 0)
        fresh = rows.fresh(t)
        # Rows of the overlap have already added their part to dw: ignore them here.
        if fresh is not None:
            weight = jnp.where(fresh, weight, 0)
        slope = slope * weight[:, None]
        if pieces.columns.overlap:
            slope = jnp.where(column_ids == STALE, 0, slope)
        return slope.astype(pieces.x.dtype)

    def _dx(self, s: Array, w_v: Array) -> Array:
        return _contract(s, w_v, 1, 1)  # [T, V] [D, V] -> [T, D]

    def _dw(self, s: Array, t: Array) -> Array:
        x_t = self.pieces.rows.read(self.pieces.x, t, 0)
        if self.pieces.sends_columns:
            return _contract(s, x_t, 0, 0)  # [T, V] [T, D] -> [V, D]
        return _contract(x_t, s, 0, 0)  # [T, D] [T, V] -> [D, V]

    def _zeros(self, w_v: Array) -> Array:
        shape = w_v.T.shape if self.pieces.sends_columns else w_v.shape
        return jnp.zeros(shape, jnp.float32)

    def _write_dw(self, dw: Array, v: Array, dw_v: Array) -> Array:
        dw_v = (dw_v * self.unit).astype(self.pieces.w.dtype)
        # Gathered columns are reduced one tile at a time; unsharded columns are reduced together at
        # the end.
        split = self.pieces.split
        if split is not None and split.gathered:
            dw_v = split.reduce_tile(dw_v)
        return self.pieces.columns.write(dw, v, dw_v, 0 if self.pieces.sends_columns else 1)


def _contract(a: Array, b: Array, dim_a: int, dim_b: int) -> Array:
    return jax.lax.dot_general(
        a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=jnp.float32
    )
