"""Which buffers a kind of records uses on a device: a set of its own, or a shared one.

Stacked layers are one kind of many records. It has `distance` buffers to read ahead, one more for
the record in use, and as many to write. A leaf that is not a stack is a kind of one record. A model
without layers has hundreds of those; with buffers of their own, the whole state would be in memory.
A program that uses them one after the other needs no more of them at once than of the layers of a
stack, so they share one set of buffers, each as large as the largest record:

    alone    sum of all records x 2
    shared   largest record x 2 (distance + 1)          the few that are much larger than the rest stay alone
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np

from host_offload.device import Ring, Views
from host_offload.disk import Store


def num_buffers(distance: int, num_layers: int, in_place: bool) -> int:
    """Return how many buffers a kind has on each device, to read and to write."""
    # In place, one ring serves both directions, so a kind of one record needs one buffer and not
    # two.
    return min(2 * (distance + 1), num_layers) if in_place else 2 * min(distance + 1, num_layers)


def shared_bytes(sizes: Sequence[int], distance: int, in_place: bool) -> int:
    """Return the bytes of each shared buffer, such that all buffers take the least memory; 0 if
    sharing saves none.

    Args:
      sizes: bytes of the records of kinds that a program uses one after the other. Kinds whose
        records are not larger than the result share buffers.
      distance: records that are read ahead.
      in_place: whether they are updated in the buffers into which they are read.
    """
    order, buffers_alone = sorted(sizes, reverse=True), num_buffers(distance, 1, in_place)
    least, shared = buffers_alone * sum(order), 0
    for num_alone, size in enumerate(order):
        # Only sizes of records need a trial: a shared buffer larger than the largest record in it
        # is waste.
        total = buffers_alone * sum(order[:num_alone]) + 2 * (distance + 1) * size
        if total < least:
            least, shared = total, size
    return shared


@dataclasses.dataclass(eq=False)
class BufferSet:
    """Buffers to read into and to write from, and a limit on the writes in progress.

    Attributes:
      reads: buffers to read into; of records that are updated in place, all buffers.
      writes: buffers to write from; the same ring where records are updated in place.
      turns: counts the writes that may still start. Without it writes could take all buffers of a
        ring that serves both ways, and leave none to read ahead into.
      num_turns: writes that may be in progress at once.
    """

    reads: Ring
    writes: Ring
    turns: threading.Semaphore
    num_turns: int

    @classmethod
    def make(
        cls,
        count: int,
        num_bytes: int,
        distance: int,
        in_place: bool,
        pin: Literal["lock", "cuda", "none"],
    ) -> Self:
        """Allocate `count` buffers of `num_bytes` each."""
        reads = Ring(count if in_place else count // 2, num_bytes, pin=pin)
        writes = reads if in_place else Ring(count // 2, num_bytes, pin=pin)
        # As many writes at once as there would be buffers in a ring for writes alone.
        return cls(reads, writes, threading.Semaphore(distance + 1), distance + 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        # A set, because both are the same ring where records are updated in place.
        return sum(ring.num_buffers * ring.num_bytes for ring in {self.reads, self.writes})

    def is_whole(self) -> bool:
        """Tell whether every buffer and every turn has been given back."""
        # A semaphore does not tell its count: whoever can take all turns finds none missing.
        taken = sum(self.turns.acquire(blocking=False) for _ in range(self.num_turns))
        if taken:
            self.turns.release(taken)
        return taken == self.num_turns and all(
            ring.free == ring.num_buffers for ring in (self.reads, self.writes)
        )

    def close(self) -> None:
        """Free the memory."""
        self.reads.close()
        self.writes.close()


@dataclasses.dataclass(eq=False)
class DeviceRecords:
    """The records of one kind on one device.

    Attributes:
      store: the records on disk.
      buffers: the buffers through which they move.
    """

    store: Store
    buffers: BufferSet
    _records: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    _views: dict[int, Views] = dataclasses.field(default_factory=dict)

    def record_in(self, buffer: np.ndarray) -> np.ndarray:
        """Return the part of a buffer that holds a record, the same array each time: shared buffers
        may be longer.
        """
        # A ring keeps its buffers, and this keeps their parts, so that they are known by their ids.
        if (record := self._records.get(id(buffer))) is None:
            record = self._records[id(buffer)] = buffer[: self.store.format.padded_bytes]
        return record

    def views(self, record: np.ndarray) -> Views:
        """Return the leaves of what `record_in` returned, made once for each buffer."""
        if (views := self._views.get(id(record))) is None:
            views = self._views[id(record)] = self.store.format.views(record)
        return views
