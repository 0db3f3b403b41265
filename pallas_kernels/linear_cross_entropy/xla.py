"""`linear_cross_entropy` as XLA computes it: loops over tiles of tokens and vocabulary, products of
the inputs' dtype.

    forward                                       backward in one pass              backward in two passes
    for v: w_v                                    for v: w_v, dw_v = 0              for t: dx_t = 0
      for t: z = x_t w_v                            for t: s = slope(x_t w_v)         for v: dx_t += slope(x_t w_v) w_v^T
        join max, sum, z[label], sum of z               dx_t += s w_v^T             for v: dw_v = 0
                                                        dw_v += x_t^T s               for t: dw_v += x_t^T slope(x_t w_v)

The log-sum-exp is joined online (Milakov and Gimelshein, arXiv:1805.02867): a maximum m and a sum l
of exp(z - m) become, with a tile's, m' = max(m, max z) and l exp(m - m') + sum exp(z - m').

Slopes are rounded to the inputs' dtype for the two products of backward, so they are kept near 1:
the cotangents of the tokens, 1 / T each for a mean, are divided by their largest, which multiplies
the float32 sums afterwards. In float16, whose numbers end at 6e-8, that is not enough for
probabilities of a vocabulary of 1e5: there slopes are multiplied by 2^12 too.

Tiles of dims that blocks do not divide: the last starts early enough to be whole and overlaps the
one before, so that no array is padded, which would be a copy. In a tile, `fresh` are the places
that were not in the one before; the others count nothing, and are not written.
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
"""The place of a column that the tile before had: that of no label that counts."""
HEADROOM = {jnp.dtype(jnp.float16): 2.0**12}
"""Slopes are multiplied by it: at most about 2 in absolute value, they stay below float16's 65504.
"""


class Stats(NamedTuple):
    """What is known of each token's logits, float32[T]: of the columns so far, or of all."""

    max: Array
    sum: Array
    of_label: Array
    total: Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One dim in tiles."""

    size: int
    block: int

    @property
    def count(self) -> int:
        return -(-self.size // self.block)

    @property
    def overlap(self) -> bool:
        """Tell whether the last tile has places of the one before."""
        return self.size % self.block != 0

    def start(self, k: Array) -> Array:
        return jnp.minimum(k * self.block, self.size - self.block)

    def fresh(self, k: Array) -> Array | None:
        """Return which places of tile k the one before did not have; None: all, in every tile."""
        return self.start(k) + jnp.arange(self.block) >= k * self.block if self.overlap else None

    def read(self, a: Array, k: Array, dim: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(a, self.start(k), self.block, dim)

    def write(self, a: Array, k: Array, tile: Array, dim: int) -> Array:
        """Write the fresh places of a tile."""
        fresh = self.fresh(k)
        if fresh is not None:
            fresh = jnp.expand_dims(fresh, [d for d in range(a.ndim) if d != dim])
            tile = jnp.where(fresh, tile, self.read(a, k, dim))
        return jax.lax.dynamic_update_slice_in_dim(a, tile, self.start(k), dim)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """One device's x[T, D], w[D, V] and labels[T], in tiles.

    Labels of tokens that count nothing are negative.
    """

    form: Form
    config: Config
    split: Split | None
    x: Array
    w: Array
    labels: Array

    @property
    def rows(self) -> Tiles:
        return Tiles(len(self.x), min(self.config.block_t, len(self.x)))

    @property
    def columns(self) -> Tiles:
        """This device's columns: a tile of them, gathered, has the configured width."""
        width = self.config.block_v // (self.split.widening if self.split else 1)
        return Tiles(self.w.shape[1], min(max(1, width), self.w.shape[1]))

    @property
    def sends_columns(self) -> bool:
        """Tell whether all of dw is summed here and its columns go to other devices: then it is
        dw^T[V, D], for shards to be whole pieces of memory.
        """
        return (
            self.split is not None
            and not self.split.gathered
            and bool(self.split.scattered)
            and self.split.dim == 1
        )

    def read_w(self, k: Array) -> tuple[Array, Array]:
        """Return tile k of the columns, w[D, v], and their places[v] in the vocabulary; STALE where
        they are not fresh.
        """
        tiles = self.columns
        w, fresh = tiles.read(self.w, k, 1), tiles.fresh(k)
        places = jnp.arange(tiles.block) + tiles.start(k)
        if self.split is not None:
            places = self.split.column_ids(tiles.start(k), tiles.block, tiles.size)
        if fresh is not None:
            places = jnp.where(fresh, places, STALE)
        return (w, places) if self.split is None else self.split.gather(w, places)

    def logits(self, t: Array, w: Array) -> Array:
        """Return float32 logits[block_t, v] of a tile of tokens."""
        return self.form.cap(
            jnp.dot(self.rows.read(self.x, t, 0), w, preferred_element_type=jnp.float32)
        )

    def is_label(self, t: Array, places: Array) -> Array:
        # A label of -1 equals STALE and matches stale columns. Its token counts nothing, so that
        # this has no effect.
        return self.rows.read(self.labels, t, 0)[:, None] == places[None, :]


def loop(count: int, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Run `body(k, carry)` for k below `count`."""
    return jax.lax.fori_loop(0, count, body, carry) if count > 1 else body(jnp.int32(0), carry)


def forward(pieces: Pieces) -> Stats:
    """Return what the losses and backward need of this device's columns."""
    rows = pieces.rows

    def over_vocab(v: Array, stats: Stats) -> Stats:
        w, places = pieces.read_w(v)
        fresh = (places != STALE)[None, :] if pieces.columns.overlap else None

        def over_tokens(t: Array, stats: Stats) -> Stats:
            # The statistics of rows in the overlap have this tile already. What is joined to them
            # again is not written.
            before = Stats(*(rows.read(a, t, 0) for a in stats))
            z = pieces.logits(t, w)  # [block_t, v]
            inside = z if fresh is None else jnp.where(fresh, z, -jnp.inf)
            largest = jnp.maximum(before.max, inside.max(1))
            after = Stats(
                largest,
                before.sum * jnp.exp(before.max - largest)
                + jnp.exp(inside - largest[:, None]).sum(1),
                before.of_label + jnp.where(pieces.is_label(t, places), z, 0).sum(1),
                before.total + (z if fresh is None else jnp.where(fresh, z, 0)).sum(1),
            )
            return Stats(*(rows.write(a, t, tile, 0) for a, tile in zip(stats, after, strict=True)))

        return loop(rows.count, over_tokens, stats)

    zeros = jnp.zeros(rows.size, jnp.float32)
    return loop(
        pieces.columns.count,
        over_vocab,
        Stats(jnp.full(rows.size, -jnp.inf, jnp.float32), zeros, zeros, zeros),
    )


def joined(stats: Stats, axes: tuple[str, ...]) -> Stats:
    """Return the stats of all columns, of those of each device along mesh axes."""
    if not axes:
        return stats
    largest = jax.lax.pmax(stats.max, axes)
    rest = (stats.sum * jnp.exp(stats.max - largest), stats.of_label, stats.total)
    return Stats(largest, *jax.lax.psum(rest, axes))


def scaled(weight: Array, dtype: Any) -> tuple[Array, Array]:
    """Return weights of tokens whose slopes `dtype` keeps, and the factor of their sums that undoes
    the scaling.
    """
    headroom = HEADROOM.get(dtype, 1.0)
    # Where no token counts, weights are 0 and any unit serves.
    largest = jnp.abs(weight).max()
    unit = jnp.where(largest == 0, 1, largest)
    return weight / unit * headroom, unit / headroom


def backward(pieces: Pieces, lse: Array, weight: Array) -> tuple[Array, Array]:
    """Return dx[T, D] of this device's columns, and dw[D, V] of all tokens where w is, or as the
    split sends it.

    Args:
      pieces: what forward had.
      lse: float32[T], of all columns.
      weight: float32[T], the cotangent of each token's loss; 0 where a token counts nothing.
    """
    rows, columns, x, w = pieces.rows, pieces.columns, pieces.x, pieces.w
    columns_first = pieces.sends_columns
    weight, unit = scaled(weight, x.dtype)

    def slopes(t: Array, w_v: Array, places: Array) -> Array:
        """Return slopes[block_t, v] in x's dtype, 0 for what is not fresh."""
        slope = pieces.form.slope(
            pieces.logits(t, w_v), rows.read(lse, t, 0)[:, None], pieces.is_label(t, places)
        )
        counts, fresh = rows.read(weight, t, 0), rows.fresh(t)
        # Rows of the overlap have added their part to dw: here they count nothing.
        counts = counts if fresh is None else jnp.where(fresh, counts, 0)
        slope = slope * counts[:, None]
        return (jnp.where(places == STALE, 0, slope) if columns.overlap else slope).astype(x.dtype)

    def to_x(s: Array, w_v: Array) -> Array:
        return _contract(s, w_v, 1, 1)  # [T, V] [D, V] -> [T, D]

    def to_w(s: Array, t: Array) -> Array:
        x_t = rows.read(x, t, 0)
        return (
            _contract(s, x_t, 0, 0) if columns_first else _contract(x_t, s, 0, 0)
        )  # [T, D] [T, V] -> [V, D] or [D, V]

    def keep(dw: Array, v: Array, tile: Array) -> Array:
        tile = (tile * unit).astype(w.dtype)
        # Gathered columns are reduced a tile at a time; whole ones wait for one reduction at the
        # end.
        if pieces.split is not None and pieces.split.gathered:
            tile = pieces.split.reduce_tile(tile)
        return columns.write(dw, v, tile, 0 if columns_first else 1)

    def zeros_for(w_v: Array) -> Array:
        return jnp.zeros(w_v.T.shape if columns_first else w_v.shape, jnp.float32)

    def both_over_vocab(v: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dx, dw = carry
        w_v, places = pieces.read_w(v)

        def over_tokens(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dx, dw_v = carry
            s = slopes(t, w_v, places)  # [block_t, v]
            return rows.write(dx, t, rows.read(dx, t, 0) + to_x(s, w_v), 0), dw_v + to_w(s, t)

        dx, dw_v = loop(rows.count, over_tokens, (dx, zeros_for(w_v)))
        return dx, keep(dw, v, dw_v)

    def dx_over_tokens(t: Array, dx: Array) -> Array:
        def over_vocab(v: Array, dx_t: Array) -> Array:
            w_v, places = pieces.read_w(v)
            return dx_t + to_x(slopes(t, w_v, places), w_v)

        dx_t = loop(columns.count, over_vocab, jnp.zeros((rows.block, x.shape[1]), jnp.float32))
        return rows.write(dx, t, (dx_t * unit).astype(x.dtype), 0)

    def dw_over_vocab(v: Array, dw: Array) -> Array:
        w_v, places = pieces.read_w(v)
        return keep(
            dw,
            v,
            loop(
                rows.count, lambda t, dw_v: dw_v + to_w(slopes(t, w_v, places), t), zeros_for(w_v)
            ),
        )

    empty = jnp.zeros(w.T.shape if columns_first else w.shape, w.dtype)
    if pieces.config.passes == 1:
        dx, dw = loop(columns.count, both_over_vocab, (jnp.zeros(x.shape, jnp.float32), empty))
        dx = (dx * unit).astype(x.dtype)
    else:
        dx = loop(rows.count, dx_over_tokens, jnp.zeros_like(x))
        dw = loop(columns.count, dw_over_vocab, empty)
    if pieces.split is None:
        return dx, dw
    dx = jax.lax.psum(dx, pieces.split.vocab) if pieces.split.vocab else dx
    dw = dw if pieces.split.gathered else pieces.split.reduce_dw(dw)
    return dx, dw.T if columns_first else dw


def _contract(a: Array, b: Array, dim_a: int, dim_b: int) -> Array:
    return jax.lax.dot_general(
        a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=jnp.float32
    )
