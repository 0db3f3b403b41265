"""An array of a frozen weight in 8 or 4 bits, saved for one number of shards, read for another; exact, or refused.

A weight is encoded in blocks of its elements in order (`pallas_kernels.storage`). Which dims of its arrays are merged depends
on the dim that was split, and so on mesh and stage; the blocks and their order do not:

    codes, values, scales    [A, B, ..] as saved  ->  flat, in the order of blocks  ->  [A B, ..] as here
    steps, means             one for each group of nf4's blocks; groups are cut at shards, and so are others for other shards

A group's step and mean are copied to each group that lies within it: decoding gives the same bits. A group here that takes
blocks of several saved groups would have to be encoded again, which rounds the scales another time; so that is refused.
Weights whose blocks lie along another dim have other names in a checkpoint (`zerojax.checkpoint.leaves`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from host_offload.disk import Box, SavedRecords
from zerojax.checkpoint.leaves import ENCODED

_OF_GROUPS = ("steps", "means")
_OF_BLOCKS = "scales"
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reblocked:
    """How to read an array that was saved in another shape.

    Attributes:
      saved: the shape of one record of it in the checkpoint.
      here: the same in the program.
      lead: dims before, which number records.
      index: for each number here, in order, its place among the saved ones; None where the order is the same.
    """

    saved: Shape
    here: Shape
    lead: int
    index: np.ndarray | None = None

    def read(self, records: SavedRecords, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the array as it is here; errors are those of `SavedRecords.read`."""
        front, rest = box[: self.lead], box[self.lead :]
        # The saved rows that hold the box's own rows, whole. Arrays of groups are small, and are read whole.
        (start, stop), width, length = rest[0], math.prod(self.here[1:]), math.prod(self.saved[1:])
        low, high = (0, self.saved[0]) if self.index is not None else (start * width // length, -(-stop * width // length))
        part = ((low, high), *((0, n) for n in self.saved[1:]))
        rows = np.empty([high - low, *self.saved[1:]], out.dtype)
        for record in np.ndindex(*(last - first for first, last in front)):
            at = tuple((first + i, first + i + 1) for (first, _), i in zip(front, record, strict=True))
            records.read(name, at + part, rows.reshape([1] * self.lead + list(rows.shape)))
            flat = rows.reshape(-1)
            if self.index is not None:
                out[record] = flat[self.index].reshape(self.here)[tuple(slice(*ends) for ends in rest)]
                continue
            flat = flat[start * width - low * length : stop * width - low * length]
            out[record] = flat.reshape(stop - start, *self.here[1:])[(slice(None), *(slice(*ends) for ends in rest[1:]))]


def reblocked(name: str, here: Mapping[str, Shape], saved: Mapping[str, Shape], lead: int) -> Reblocked:
    """Return how to read an array of a weight in 8 or 4 bits, the shape of which differs.

    Args:
      name: of the array.
      here: the shapes of the program's leaves by name, whole.
      saved: the shapes of the checkpoint's.
      lead: dims that number records, the same in both.

    Raises:
      ValueError: the weight, or a group of its scales, is another; the message is to follow a shape.
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
        raise ValueError(f": a group of scales of {weight.rpartition(ENCODED)[0]} here has blocks of several saved groups")
    return Reblocked(other, own, lead, index)


@functools.lru_cache(64)  # steps and means, and all weights of one shape, have the same
def _groups(own: Shape, blocks: Shape, other: Shape, other_blocks: Shape) -> np.ndarray | None:
    """Return the saved group of each group here, or None where one has blocks of several, or the weight is another."""
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
