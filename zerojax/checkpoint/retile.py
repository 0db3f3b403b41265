"""A leaf saved in one shape, read in another: a weight in other tiles, or arrays of 8 or 4 bits for
other shards.

A weight in one number of tiles is read as another, or as the dense weight that it stands for, and
back.

A weight [D, F] in tiles is [T, D / i, F / o], T = o i, of which tile k i + j holds columns k and
rows j of the grid (`zerojax.tiling`); a vector [F] is [T, F / T]. Both sides cut the same dense
weight, so a box of one is boxes of the other:

    here   box of tile t   ->   box of the dense weight   ->   boxes of the tiles that it meets, as saved

The shapes determine the grid if one side is dense or a single tile. Between two stacks of several
  tiles they do not: a kernel
may be cut along either dim or along both. If the model says how many tiles lie along the first dim
(`zerojax.Model.tiles`), that gives the program's grid, and with it the saved one. Otherwise only
the weights of an MLP can be read, which are cut along the hidden dim alone. They are recognized by
their names and by each other's shapes.

The arrays of a frozen weight in 8 or 4 bits also have other shapes for other shards. The weight is
encoded in blocks of its elements in order (`pallas_kernels.storage`). Which dims are merged depends
on the dim that was split, and so on mesh and stage; the blocks and their order do not:

    codes, values, scales    [A, B, ..] as saved  ->  flat, in the order of blocks  ->  [A B, ..] as here
    steps, means             one for each group of nf4's blocks; groups end where shards end

A group's step and mean are copied to each group that lies within it: decoding gives the same bits.
A group here that takes blocks of several saved groups would have to be encoded again, which rounds
the scales another time; so that is refused. Weights whose blocks lie along another dim have other
names in a checkpoint (`zerojax.checkpoint.leaves`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from host_offload.disk import Box, SavedRecords
from zerojax.checkpoint.leaves import ENCODED

Shape = tuple[int, ...]
_OF_GROUPS = ("steps", "means")
_OF_BLOCKS = "scales"
MLP_NAMES = ("up", "gate", "down", "up_bias", "gate_bias")


@dataclasses.dataclass(frozen=True)
class Grid:
    """How a dense weight is cut.

    Attributes:
      counts: tiles along each dim: (i, o) of a kernel, (o,) of a vector.
      tile: shape of one.
      has_dim: whether there is a dim that numbers tiles.
    """

    counts: tuple[int, ...]
    tile: tuple[int, ...]
    has_dim: bool

    def origin(self, number: int) -> tuple[int, ...]:
        """Return where tile `number` begins in the dense weight; the first dim's place runs
        fastest.
        """
        places = np.unravel_index(number, self.counts[::-1])[::-1]
        return tuple(int(p) * n for p, n in zip(places, self.tile, strict=True))

    def number(self, places: tuple[int, ...]) -> int:
        """Return the number of the tile at these places of the grid."""
        return int(np.ravel_multi_index(places[::-1], self.counts[::-1]))

    def pieces(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield for each tile that a box of the dense weight meets its number, the box in the tile,
        and the box in the box.
        """
        # From floor(start / n) to ceil(stop / n) along each dim: the tiles that the box meets.
        ranges = [range(a // n, -(-b // n)) for (a, b), n in zip(box, self.tile, strict=True)]
        for places in itertools.product(*ranges):
            starts = [p * n for p, n in zip(places, self.tile, strict=True)]
            common = [
                (max(a, s), min(b, s + n))
                for (a, b), s, n in zip(box, starts, self.tile, strict=True)
            ]
            in_tile = tuple((a - s, b - s) for (a, b), s in zip(common, starts, strict=True))
            in_box = tuple((a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
            yield self.number(places), in_tile, in_box


@dataclasses.dataclass(frozen=True)
class Retiled:
    """How to read a leaf that was saved in other tiles.

    Attributes:
      saved: its grid in the checkpoint.
      here: its grid in the program.
      lead: dims before: 1 where layers are stacked.
    """

    saved: Grid
    here: Grid
    lead: int

    def read(self, records: SavedRecords, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the leaf as it is here; errors are those of `SavedRecords.read`."""
        # Box of the leaf here: layers, then tiles if it has a dim of them, then the place in a
        # tile.
        front, rest = box[: self.lead], box[self.lead :]
        tiles: range | list[None] = range(*rest[0]) if self.here.has_dim else [None]
        part = rest[1:] if self.here.has_dim else rest
        lead = (slice(None),) * self.lead
        for row, tile in enumerate(tiles):
            # The box of this tile in the dense weight.
            origin = (0,) * len(part) if tile is None else self.here.origin(tile)
            dense = tuple((a + o, b + o) for (a, b), o in zip(part, origin, strict=True))
            target = out[*lead, row] if self.here.has_dim else out
            # The saved tiles that it meets.
            for number, in_tile, in_dense in self.saved.pieces(dense):
                source = front + (((number, number + 1),) if self.saved.has_dim else ()) + in_tile
                piece = np.empty([b - a for a, b in source], out.dtype)
                records.read(name, source, piece)
                # Without the saved dim of tiles, which is of size 1 here.
                target[*lead, *(slice(a, b) for a, b in in_dense)] = piece.reshape(
                    [b - a for a, b in front + in_tile]
                )


def of_mlp(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a leaf is one of an MLP in tiles of its hidden dim, as `zerojax.tiling.tile_mlp`
    makes it: up[.., T, D, h] beside down[.., T, h, D].

    Args:
      name: of the leaf.
      shapes: of all leaves, by name.
    """
    parent = next(
        (name.removesuffix(f"['{end}']") for end in MLP_NAMES if name.endswith(f"['{end}']")), None
    )
    if parent is None:
        return False
    up, down = (shapes.get(f"{parent}['{end}']", ()) for end in ("up", "down"))
    return len(up) >= 3 and up[:-2] == down[:-2] and up[-2:] == down[-2:][::-1]


def retiled(
    saved: tuple[int, ...],
    here: tuple[int, ...],
    *,
    stacked: bool,
    tiled: tuple[bool, bool | int],
    is_mlp: bool,
) -> Retiled:
    """Return how to read a leaf of shape `saved` as one of shape `here`.

    Args:
      saved: its shape in the checkpoint.
      here: its shape in the program.
      stacked: its first dim counts layers.
      tiled: whether the leaf is known to be a stack of tiles, there and here; here as
        `zerojax.Model.tiles` tells it. One tile may be taken for none.
      is_mlp: whether it is a leaf of an MLP, there and here (`of_mlp`).

    Raises:
      ValueError: they do not stand for one dense weight, or leave open which; says why.
    """
    lead = int(stacked)
    if saved[:lead] != here[:lead]:
        # No text of its own: the caller's error gives both shapes.
        raise ValueError("")
    saved, here = saved[lead:], here[lead:]
    if len(saved) == len(here) + 1 and len(here) in (1, 2) and tiled[0]:  # here it is dense
        return Retiled(_cut(here, saved), Grid((1,) * len(here), here, False), lead)
    if len(here) == len(saved) + 1 and len(saved) in (1, 2) and tiled[1]:  # there it is
        return Retiled(Grid((1,) * len(saved), saved, False), _cut(saved, here), lead)
    if len(saved) != len(here) or math.prod(saved) != math.prod(here) or len(saved) not in (2, 3):
        raise ValueError("")
    # What is not known to be tiles can only be a single one.
    if not any(tiled) or not all(
        flag or shape[0] == 1 for flag, shape in zip(tiled, (saved, here), strict=True)
    ):
        raise ValueError("")
    in_tiles = tiled[1]
    if not isinstance(
        in_tiles, bool
    ):  # both are stacks, and the model says how the one here is cut
        grid = _grid(here, in_tiles)
        dense = tuple(c * n for c, n in zip(grid.counts, grid.tile, strict=True))
        return Retiled(_cut(dense, saved), grid, lead)
    return Retiled(*_both(saved, here, is_mlp), lead)


def _grid(tiles: tuple[int, ...], in_tiles: int) -> Grid:
    """Return the grid of `tiles` [T, ...], of which `in_tiles` lie along the first dim."""
    counts = (tiles[0],) if len(tiles) == 2 else (in_tiles, tiles[0] // in_tiles)
    return Grid(counts, tiles[1:], True)


def _cut(dense: tuple[int, ...], tiles: tuple[int, ...]) -> Grid:
    """Return the grid of `tiles` [T, ...] over a dense shape."""
    counts = tuple(n // m for n, m in zip(dense, tiles[1:], strict=True))
    whole = tuple(c * m for c, m in zip(counts, tiles[1:], strict=True))
    if whole != dense or math.prod(counts) != tiles[0]:
        raise ValueError("")
    return Grid(counts, tiles[1:], True)


def _both(saved: tuple[int, ...], here: tuple[int, ...], is_mlp: bool) -> tuple[Grid, Grid]:
    """Return the grids of two stacks of tiles, of which shapes alone must tell."""
    # One tile is the whole weight, and shows how the other side cuts it.
    if saved[0] == 1:
        return Grid((1,) * (len(saved) - 1), saved[1:], True), _cut(saved[1:], here)
    if here[0] == 1:
        return _cut(here[1:], saved), Grid((1,) * (len(here) - 1), here[1:], True)
    # Of several tiles on both sides, shapes tell the cut only of a vector, or of a kernel known to
    # be cut along one dim.
    dims = [
        k for k, (m, n) in enumerate(zip(saved[1:], here[1:], strict=True)) if m != n
    ]  # in which tiles differ
    if len(dims) != 1 or (len(saved) == 3 and not is_mlp):
        raise ValueError(
            f": {saved[0]} tiles and {here[0]} may be cut along one dim or both; tell by the model's tiles how many of "
            f"{here[0]} lie along the first"
        )
    counts = [
        tuple(shape[0] if k == dims[0] else 1 for k in range(len(shape) - 1))
        for shape in (saved, here)
    ]
    if saved[0] * saved[1 + dims[0]] != here[0] * here[1 + dims[0]]:
        raise ValueError("")
    return Grid(counts[0], saved[1:], True), Grid(counts[1], here[1:], True)


# --- weights in 8 or 4 bits -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reblocked:
    """How to read an array that was saved in another shape.

    Attributes:
      saved: the shape of one record of it in the checkpoint.
      here: the same in the program.
      lead: dims before, which number records.
      index: for each number here, in order, its place among the saved ones; None where the order is
        the same.
    """

    saved: Shape
    here: Shape
    lead: int
    index: np.ndarray | None = None

    def read(self, records: SavedRecords, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the array as it is here; errors are those of
        `SavedRecords.read`.
        """
        front, rest = box[: self.lead], box[self.lead :]
        # The saved rows that hold the box's own rows, whole. Arrays of groups are small, and are
        # read whole.
        (start, stop), width, length = rest[0], math.prod(self.here[1:]), math.prod(self.saved[1:])
        low, high = (
            (0, self.saved[0])
            if self.index is not None
            else (start * width // length, -(-stop * width // length))
        )
        part = ((low, high), *((0, n) for n in self.saved[1:]))
        rows = np.empty([high - low, *self.saved[1:]], out.dtype)
        for record in np.ndindex(*(last - first for first, last in front)):
            at = tuple(
                (first + i, first + i + 1) for (first, _), i in zip(front, record, strict=True)
            )
            records.read(name, at + part, rows.reshape([1] * self.lead + list(rows.shape)))
            flat = rows.reshape(-1)
            if self.index is not None:
                out[record] = flat[self.index].reshape(self.here)[
                    tuple(slice(*ends) for ends in rest)
                ]
                continue
            flat = flat[start * width - low * length : stop * width - low * length]
            out[record] = flat.reshape(stop - start, *self.here[1:])[
                (slice(None), *(slice(*ends) for ends in rest[1:]))
            ]


def reblocked(
    name: str, here: Mapping[str, Shape], saved: Mapping[str, Shape], lead: int
) -> Reblocked:
    """Return how to read an array of a weight in 8 or 4 bits, the shape of which differs.

    Args:
      name: of the array.
      here: the shapes of the program's leaves by name, whole.
      saved: the shapes of the checkpoint's.
      lead: dims that number records, the same in both.

    Raises:
      ValueError: the weight, or a group of its scales, is another; the message is to follow a
        shape.
    """
    weight, _, array = name.rpartition(".")
    if here[name][:lead] != saved[name][:lead]:
        raise ValueError("")
    own, other = here[name][lead:], saved[name][lead:]
    if array not in _OF_GROUPS:
        if math.prod(own) != math.prod(other):
            raise ValueError("")
        return Reblocked(other, own, lead)
    blocks = f"{weight}.{_OF_BLOCKS}"
    index = _groups(own, here[blocks][lead:], other, saved.get(blocks, ())[lead:])
    if index is None:
        raise ValueError(
            f": a group of scales of {weight.rpartition(ENCODED)[0]} here has blocks of several saved groups"
        )
    return Reblocked(other, own, lead, index)


@functools.lru_cache(64)  # steps and means, and all weights of one shape, have the same
def _groups(own: Shape, blocks: Shape, other: Shape, other_blocks: Shape) -> np.ndarray | None:
    """Return the saved group of each group here, or None where one has blocks of several, or the
    weight is another.
    """
    if math.prod(blocks) != math.prod(other_blocks) or not blocks:
        return None
    saved = _group_of_blocks(other, other_blocks)
    mine = _group_of_blocks(own, blocks)
    first = np.full(math.prod(own), -1)
    # Of each group here one block's saved group; then all its blocks must have that one.
    first[mine] = saved
    return first if np.array_equal(first[mine], saved) else None


def _group_of_blocks(groups: Shape, blocks: Shape) -> np.ndarray:
    """Return the number of the group of each block, both in order: i32[blocks]."""
    numbers = np.arange(math.prod(groups)).reshape(groups)
    for dim, (count, size) in enumerate(zip(groups, blocks, strict=True)):
        numbers = np.repeat(numbers, size // count, axis=dim)
    return numbers.reshape(-1)
