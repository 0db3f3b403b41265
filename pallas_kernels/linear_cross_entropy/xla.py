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
    sum: Array
    of_label: Array
    total: Array


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
        return self.start(k) + jnp.arange(self.block) >= k * self.block if self.overlap else None

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
        places = jnp.arange(tiles.block) + tiles.start(k)
        if self.split is not None:
            places = self.split.column_ids(tiles.start(k), tiles.block, tiles.size)
        if fresh is not None:
            places = jnp.where(fresh, places, STALE)
        return (w, places) if self.split is None else self.split.gather(w, places)

    def logits(self, t: Array, w: Array) -> Array:
        """Return float32 logits[block_t, v] for tile t of the tokens."""
        return self.form.cap(
            jnp.dot(self.rows.read(self.x, t, 0), w, preferred_element_type=jnp.float32)
        )

    def is_label(self, t: Array, places: Array) -> Array:
        """Return whether each column is its token's label, bool[block_t, v]."""
        # A label of -1 equals STALE and matches stale columns, but its token is ignored.
        return self.rows.read(self.labels, t, 0)[:, None] == places[None, :]


def loop(count: int, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Run `body(k, carry)` for k below `count` and return the last carry."""
    return jax.lax.fori_loop(0, count, body, carry) if count > 1 else body(jnp.int32(0), carry)


def forward(pieces: Pieces) -> Stats:
    """Return the statistics of this device's columns, which the losses and backward need."""
    rows = pieces.rows

    def over_vocab(v: Array, stats: Stats) -> Stats:
        w, places = pieces.read_w(v)
        fresh = (places != STALE)[None, :] if pieces.columns.overlap else None

        def over_tokens(t: Array, stats: Stats) -> Stats:
            # The statistics of rows in the overlap already include this tile. Joining the tile to
            # them again is harmless, because those rows are not written.
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
    """Return the statistics over all columns from each device's, joined along mesh axes."""
    if not axes:
        return stats
    largest = jax.lax.pmax(stats.max, axes)
    rest = (stats.sum * jnp.exp(stats.max - largest), stats.of_label, stats.total)
    return Stats(largest, *jax.lax.psum(rest, axes))


def scaled(weight: Array, dtype: Any) -> tuple[Array, Array]:
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
    rows = pieces.rows
    columns = pieces.columns
    x = pieces.x
    w = pieces.w
    columns_first = pieces.sends_columns
    weight, unit = scaled(weight, x.dtype)

    def slopes(t: Array, w_v: Array, places: Array) -> Array:
        """Return slopes[block_t, v] in x's dtype, 0 at positions that are not fresh."""
        slope = pieces.form.slope(
            pieces.logits(t, w_v), rows.read(lse, t, 0)[:, None], pieces.is_label(t, places)
        )
        counts = rows.read(weight, t, 0)
        fresh = rows.fresh(t)
        # Rows of the overlap have already added their part to dw: ignore them here.
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
        # Gathered columns are reduced one tile at a time; unsharded columns are reduced together at
        # the end.
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
