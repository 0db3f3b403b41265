"""Which buffers a kind of records has on a device: rings of its own, or rings that it shares.

Stacked layers are one kind of many records, with `distance` buffers to read ahead, one more for the record in use, and as many
to write. A leaf that is no stack is a kind of one record. Hundreds of them, as a model without layers has, would hold the whole
state in buffers; but a program that uses them one after the other needs no more of them at once than of a stack's layers. So
they use one set of rings, whose buffers are as large as the largest record,

    own      sum of all records x 2
    shared   largest record x 2 (distance + 1)          the few that are much larger than the rest keep their own
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from host_offload.device import Ring
from host_offload.disk import Store


def num_buffers(distance: int, num_layers: int, in_place: bool) -> int:
    """Return how many buffers a kind has on each device, to read and to write."""
    return min(2 * (distance + 1), num_layers) if in_place else 2 * min(distance + 1, num_layers)


def shared_bytes(sizes: Sequence[int], distance: int, in_place: bool) -> int:
    """Return the bytes of each shared buffer, such that all buffers take the least memory; 0 if sharing saves none.

    Args:
      sizes: bytes of the records of kinds that a program uses one after the other. Those up to the result share.
      distance: records that are read ahead.
      in_place: whether they are updated in the buffers into which they are read.
    """
    order, alone = sorted(sizes, reverse=True), num_buffers(distance, 1, in_place)
    best, chosen = alone * sum(order), 0
    for own, size in enumerate(order):
        total = alone * sum(order[:own]) + 2 * (distance + 1) * size
        if total < best:
            best, chosen = total, size
    return chosen


@dataclasses.dataclass(eq=False)
class Rings:
    """Buffers, and leave to write from them.

    Attributes:
      reads: buffers to read into; of records that are updated in place, all buffers.
      writes: buffers to write from; the same ring where records are updated in place.
      turns: one for each write that may be under way.
    """

    reads: Ring
    writes: Ring
    turns: threading.Semaphore

    @classmethod
    def make(cls, count: int, num_bytes: int, distance: int, in_place: bool, pin: Literal["lock", "cuda", "none"]) -> "Rings":
        """Take the memory of `count` buffers of `num_bytes`."""
        reads = Ring(count if in_place else count // 2, num_bytes, pin=pin)
        writes = reads if in_place else Ring(count // 2, num_bytes, pin=pin)
        return cls(reads, writes, threading.Semaphore(distance + 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(ring.num_buffers * ring.num_bytes for ring in {self.reads, self.writes})

    def close(self) -> None:
        """Free the memory."""
        self.reads.close()
        self.writes.close()


@dataclasses.dataclass(eq=False)
class Shelf:
    """The records of one kind on one device.

    Attributes:
      store: the records.
      rings: their buffers.
    """

    store: Store
    rings: Rings

    def room(self, buffer: np.ndarray) -> np.ndarray:
        """Return the part of a buffer that holds a record."""
        return buffer[: self.store.format.padded_bytes]
