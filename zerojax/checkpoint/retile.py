"""Read a leaf that was saved in another shape: in other tiles, or quantized for other shards.

A weight in one number of tiles can be read in another number, or as the dense weight that it stands
for, and back.

A weight [D, F] in tiles is [T, D / i, F / o], T = o i. Tile k i + j holds columns k and rows j of
the grid (`zerojax.tiling`). A vector [F] is [T, F / T]. Both sides cut the same dense weight, so a
box of one side consists of boxes of the other:

    box of tile t here  ->  box of the dense weight  ->  boxes of the saved tiles that overlap it

The shapes determine the grid if one side is dense or a single tile. Between two stacks of several
tiles they do not: a kernel may be cut along either dim or along both. If the model says how many
tiles are along the first dim (`zerojax.Model.tiles`), that gives the program's grid, and with it
the saved one. Otherwise only the weights of an MLP can be read, which are cut along the hidden dim
alone. Their names and each other's shapes identify them.

The arrays of a frozen 8-bit or 4-bit weight also have other shapes for other shards. The weight is
encoded in blocks of its elements in order (`pallas_kernels.storage`). Which dims are merged depends
on the dim that was split, and so on mesh and stage; the blocks and their order do not:

    codes, values, scales    [A, B, ..] as saved  ->  flat, in block order  ->  [A B, ..] here
    steps, means             one per group of nf4's blocks; groups end where shards end

The step and the mean of a saved group are copied to each group here that lies within it: decoding
gives the same bits. A group here that contains blocks of several saved groups would have to be
encoded again, which would round the scales once more, so it is refused. Weights whose blocks run
along another dim have other names in a checkpoint (`zerojax.checkpoint.leaves`).
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
_DIMS = (1, 2, 3)
"""Dims of a vector, a kernel, and the kernels of all experts."""
MLP_NAMES = ("up", "gate", "down", "up_bias", "gate_bias")


@dataclasses.dataclass(frozen=True)
class Grid:
    """How a dense weight is cut into tiles.

    Attributes:
      counts: number of tiles along each dim: (i, o) of a kernel, (o,) of a vector.
      tile: shape of one tile.
      has_dim: whether the array has a dim that numbers the tiles.
    """

    counts: tuple[int, ...]
    tile: tuple[int, ...]
    has_dim: bool

    def origin(self, number: int) -> tuple[int, ...]:
        """Return where tile `number` starts in the dense weight.

        The place along the first dim varies fastest.
        """
        places = np.unravel_index(number, self.counts[::-1])[::-1]
        return tuple(int(p) * n for p, n in zip(places, self.tile, strict=True))

    def number(self, places: tuple[int, ...]) -> int:
        """Return the number of the tile at these places of the grid."""
        return int(np.ravel_multi_index(places[::-1], self.counts[::-1]))

    def pieces(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield the pieces of a box of the dense weight, one for each tile that overlaps it.

        Args:
          box: box of the dense weight.

        Yields:
          The number of the tile, the piece's box in the tile, and the piece's box relative to
            `box`.
        """
        # The tiles that overlap the box: from floor(start / n) to ceil(stop / n) along each dim.
        ranges = [range(a // n, -(-b // n)) for (a, b), n in zip(box, self.tile, strict=True)]
        for places in itertools.product(*ranges):
            tile = [(p * n, (p + 1) * n) for p, n in zip(places, self.tile, strict=True)]
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, tile, strict=True)]
            in_tile = tuple((a - c, b - c) for (a, b), (c, _) in zip(common, tile, strict=True))
            in_box = tuple((a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
            yield self.number(places), in_tile, in_box


@dataclasses.dataclass(frozen=True)
class Retiled:
    """How to read a leaf that was saved in other tiles.

    Attributes:
      saved: grid of the leaf in the checkpoint.
      target: grid of the leaf in the program.
      lead: number of dims in front of the grid's: 1 for stacked layers, otherwise 0.
    """

    saved: Grid
    target: Grid
    lead: int

    def read(self, records: SavedRecords, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the leaf in the program's shape.

        Args:
          records: records of the checkpoint.
          name: name of the leaf.
          box: box of the leaf in the program.
          out: array with the shape of the box.

        Raises:
          OSError, KeyError: as `SavedRecords.read` raises them.
        """
        # The box of the leaf in the program: layers, then tiles if they have a dim, then the box in
        # a tile.
        front = box[: self.lead]
        inner = box[self.lead :]
        tiles: range | list[None] = range(*inner[0]) if self.target.has_dim else [None]
        tile_box = inner[1:] if self.target.has_dim else inner
        lead = (slice(None),) * self.lead
        for row, tile in enumerate(tiles):
            # The box of this tile in the dense weight.
            origin = (0,) * len(tile_box) if tile is None else self.target.origin(tile)
            dense = tuple((a + o, b + o) for (a, b), o in zip(tile_box, origin, strict=True))
            tile_out = out[*lead, row] if self.target.has_dim else out
            # The saved tiles that overlap it.
            for number, in_tile, in_dense in self.saved.pieces(dense):
                tile_dim = ((number, number + 1),) if self.saved.has_dim else ()
                source = front + tile_dim + in_tile
                piece = np.empty([b - a for a, b in source], out.dtype)
                records.read(name, source, piece)
                # Without the saved dim of tiles, whose size is 1 here.
                tile_out[*lead, *(slice(a, b) for a, b in in_dense)] = piece.reshape(
                    [b - a for a, b in front + in_tile]
                )


def of_mlp(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a leaf belongs to an MLP that is tiled along its hidden dim.

    `zerojax.tiling.tile_mlp` creates such leaves: up[.., T, D, h] next to down[.., T, h, D].

    Args:
      name: name of the leaf.
      shapes: shapes of all leaves, by name.
    """
    suffixes = [f"['{end}']" for end in MLP_NAMES if name.endswith(f"['{end}']")]
    if not suffixes:
        return False
    parent = name.removesuffix(suffixes[0])
    up, down = (shapes.get(f"{parent}['{end}']", ()) for end in ("up", "down"))
    return len(up) >= 3 and up[:-2] == down[:-2] and up[-2:] == down[-2:][::-1]


def retiled(
    saved: tuple[int, ...],
    target: tuple[int, ...],
    *,
    stacked: bool,
    tiled: tuple[bool, bool | int],
    is_mlp: bool,
) -> Retiled:
    """Return how to read a leaf of shape `saved` as one of shape `target`.

    Args:
      saved: shape in the checkpoint.
      target: shape in the program.
      stacked: whether the first dim counts layers.
      tiled: whether the leaf is known to be a stack of tiles, in the checkpoint and in the program;
        the latter as `zerojax.Model.tiles` returns it. A single tile may be treated as untiled.
      is_mlp: whether the leaf belongs to an MLP (`of_mlp`) both in the checkpoint and in the
        program.

    Raises:
      ValueError: the shapes do not stand for the same dense weight, or are ambiguous. The message
        is to be appended to a text that gives both shapes.
    """
    lead = int(stacked)
    if saved[:lead] != target[:lead]:
        # No text: the caller's error gives both shapes.
        raise ValueError("")
    saved = saved[lead:]
    target = target[lead:]
    # Dense in the program.
    if len(saved) == len(target) + 1 and len(target) in _DIMS and tiled[0]:
        return Retiled(_cut(target, saved), Grid((1,) * len(target), target, False), lead)
    # Dense in the checkpoint.
    if len(target) == len(saved) + 1 and len(saved) in _DIMS and tiled[1]:
        return Retiled(Grid((1,) * len(saved), saved, False), _cut(saved, target), lead)
    has_same_dims = len(saved) == len(target) and len(saved) - 1 in _DIMS
    if not has_same_dims or math.prod(saved) != math.prod(target):
        raise ValueError("")
    # A stack that is not known to hold tiles can only be a single tile.
    if not any(tiled) or not all(
        flag or shape[0] == 1 for flag, shape in zip(tiled, (saved, target), strict=True)
    ):
        raise ValueError("")
    in_tiles = tiled[1]
    # Both are stacks, and the model says how the one here is cut.
    if not isinstance(in_tiles, bool):
        grid = _grid(target, in_tiles)
        dense = tuple(c * n for c, n in zip(grid.counts, grid.tile, strict=True))
        return Retiled(_cut(dense, saved), grid, lead)
    return Retiled(*_both(saved, target, is_mlp), lead)


def _grid(tiles: tuple[int, ...], in_tiles: int) -> Grid:
    """Return the grid of `tiles` [T, ...], `in_tiles` of which are along the first dim."""
    counts = [1] * (len(tiles) - 1)
    counts[0] = tiles[0] if len(tiles) == 2 else in_tiles
    if len(tiles) > 2:
        counts[1] = tiles[0] // in_tiles
    return Grid(tuple(counts), tiles[1:], True)


def _cut(dense: tuple[int, ...], tiles: tuple[int, ...]) -> Grid:
    """Return the grid of `tiles` [T, ...] over a dense shape.

    Raises:
      ValueError: the tiles do not fit the dense shape.
    """
    counts = tuple(n // m for n, m in zip(dense, tiles[1:], strict=True))
    covered = tuple(c * m for c, m in zip(counts, tiles[1:], strict=True))
    if covered != dense or math.prod(counts) != tiles[0]:
        raise ValueError("")
    return Grid(counts, tiles[1:], True)


def _both(saved: tuple[int, ...], target: tuple[int, ...], is_mlp: bool) -> tuple[Grid, Grid]:
    """Return the grids of two stacks of tiles from their shapes alone.

    Raises:
      ValueError: the shapes are ambiguous, or stand for different weights.
    """
    # A single tile is the dense weight, and shows how the other side cuts it.
    if saved[0] == 1:
        return Grid((1,) * (len(saved) - 1), saved[1:], True), _cut(saved[1:], target)
    if target[0] == 1:
        return _cut(target[1:], saved), Grid((1,) * (len(target) - 1), target[1:], True)
    # With several tiles on both sides, the shapes determine the grids only for a vector, or for a
    # kernel known to be cut along one dim: the dim in which the tiles differ.
    dims = [k for k, (m, n) in enumerate(zip(saved[1:], target[1:], strict=True)) if m != n]
    if len(dims) != 1 or (len(saved) == 3 and not is_mlp):
        raise ValueError(
            f": {saved[0]} tiles and {target[0]} may be cut along one dim or both; set the model's "
            f"tiles to say how many of {target[0]} are along the first"
        )
    dim = dims[0]
    if saved[0] * saved[1 + dim] != target[0] * target[1 + dim]:
        raise ValueError("")
    return _cut_along(dim, saved), _cut_along(dim, target)


def _cut_along(dim: int, tiles: tuple[int, ...]) -> Grid:
    """Return the grid of `tiles` [T, ...] that are cut along one dim."""
    counts = [1] * (len(tiles) - 1)
    counts[dim] = tiles[0]
    return Grid(tuple(counts), tiles[1:], True)


# --- weights in 8 or 4 bits -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reblocked:
    """How to read an array that was saved in another shape.

    Attributes:
      saved: shape of one record of the array in the checkpoint.
      target: shape of one record of the array in the program.
      lead: number of leading dims, which number records.
      index: for each number of the array in the program, in order, its position among the saved
        numbers; None if the order is the same.
    """

    saved: Shape
    target: Shape
    lead: int
    index: np.ndarray | None = None

    def read(self, records: SavedRecords, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the array in the program's shape.

        Args:
          records: records of the checkpoint.
          name: name of the array.
          box: box of the array in the program.
          out: array with the shape of the box.

        Raises:
          OSError, KeyError: as `SavedRecords.read` raises them.
        """
        front = box[: self.lead]
        inner = tuple(slice(*bounds) for bounds in box[self.lead :])
        start, stop = box[self.lead]
        row_size = math.prod(self.target[1:])
        saved_row_size = math.prod(self.saved[1:])
        # Read the saved rows that contain the box's rows. Arrays of groups are small, and are read
        # in full.
        low = 0
        high = self.saved[0]
        if self.index is None:
            low = start * row_size // saved_row_size
            high = -(-stop * row_size // saved_row_size)
        row_box = ((low, high), *((0, n) for n in self.saved[1:]))
        rows = np.empty([high - low, *self.saved[1:]], out.dtype)
        for record in np.ndindex(*(last - first for first, last in front)):
            numbers = [first + i for (first, _), i in zip(front, record, strict=True)]
            record_box = tuple((number, number + 1) for number in numbers)
            records.read(
                name, record_box + row_box, rows.reshape([1] * self.lead + list(rows.shape))
            )
            flat = rows.reshape(-1)
            if self.index is not None:
                out[record] = flat[self.index].reshape(self.target)[inner]
                continue
            offset = low * saved_row_size
            flat = flat[start * row_size - offset : stop * row_size - offset]
            out[record] = flat.reshape(stop - start, *self.target[1:])[:, *inner[1:]]


def reblocked(
    name: str, program: Mapping[str, Shape], saved: Mapping[str, Shape], lead: int
) -> Reblocked:
    """Return how to read an array of an 8-bit or 4-bit weight whose shape differs.

    Args:
      name: name of the array.
      program: shapes of the program's leaves over all layers, by name.
      saved: shapes of the checkpoint's leaves over all layers, by name.
      lead: number of dims that number records, the same in both.

    Raises:
      ValueError: the weight, or a group of its scales, differs. The message is to be appended to a
        text that gives both shapes.
    """
    weight, _, array = name.rpartition(".")
    if program[name][:lead] != saved[name][:lead]:
        raise ValueError("")
    target = program[name][lead:]
    source = saved[name][lead:]
    if array not in _OF_GROUPS:
        if math.prod(target) != math.prod(source):
            raise ValueError("")
        return Reblocked(source, target, lead)
    blocks = f"{weight}.{_OF_BLOCKS}"
    index = _groups(target, program[blocks][lead:], source, saved.get(blocks, ())[lead:])
    if index is None:
        raise ValueError(
            f": a group of scales of {weight.rpartition(ENCODED)[0]} here has blocks of several "
            "saved groups"
        )
    return Reblocked(source, target, lead, index)


@functools.lru_cache(64)  # steps and means, and all weights of the same shape, share an entry
def _groups(
    target: Shape, target_blocks: Shape, source: Shape, source_blocks: Shape
) -> np.ndarray | None:
    """Return the saved group of each group here.

    None if a group here has blocks of several saved groups, or the weight differs.
    """
    if math.prod(target_blocks) != math.prod(source_blocks) or not target_blocks:
        return None
    source_group = _group_of_blocks(source, source_blocks)
    target_group = _group_of_blocks(target, target_blocks)
    group_map = np.full(math.prod(target), -1)
    # For each group here, take the saved group of one of its blocks; all its blocks must agree.
    group_map[target_group] = source_group
    return group_map if np.array_equal(group_map[target_group], source_group) else None


def _group_of_blocks(groups: Shape, blocks: Shape) -> np.ndarray:
    """Return the number of each block's group, both in order: i32[blocks]."""
    numbers = np.arange(math.prod(groups)).reshape(groups)
    for dim, (count, size) in enumerate(zip(groups, blocks, strict=True)):
        numbers = np.repeat(numbers, size // count, axis=dim)
    return numbers.reshape(-1)
