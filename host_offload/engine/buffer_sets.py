"""The buffers of a kind of records on a device: a set of its own, or a shared set.

A stack of layers is one kind with many records. It has `distance` buffers to read ahead, one more
for the record in use, and the same number to write. An unstacked leaf is a kind with a single
record. A model without stacks has hundreds of them; if each had its own buffers, the full state
would be in memory. A program that uses these kinds one after the other needs no more of their
records at the same time than of a stack's layers, so they share one set of buffers, each as large
as the largest record:

    own buffers    sum of all records x 2
    shared         largest record x 2 (distance + 1)

The few records that are much larger than the rest keep their own buffers.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np

from host_offload.device import Ring, Views
from host_offload.disk import Store


def num_buffers(distance: int, num_layers: int, in_place: bool) -> int:
    """Return the number of buffers of a kind per device, for reads and writes together.

    Args:
      distance: prefetch distance, in records of a kind.
      num_layers: number of records of the kind.
      in_place: whether records are updated in the buffers into which they are read.
    """
    # In place, one ring serves both directions, so a kind of one record needs one buffer, not two.
    return min(2 * (distance + 1), num_layers) if in_place else 2 * min(distance + 1, num_layers)


def shared_bytes(sizes: Sequence[int], distance: int, in_place: bool) -> int:
    """Return the bytes per shared buffer that minimize the memory of all buffers.

    Kinds whose records are not larger than the result share buffers. The result is 0 if sharing
    saves no memory.

    Args:
      sizes: bytes of one record of each kind. The kinds have one record each, and a program uses
        them one after the other.
      distance: prefetch distance, in records of a kind.
      in_place: whether records are updated in the buffers into which they are read.
    """
    order = sorted(sizes, reverse=True)
    buffers_alone = num_buffers(distance, 1, in_place)
    min_bytes = buffers_alone * sum(order)
    shared = 0
    for num_alone, size in enumerate(order):
        # Only record sizes are candidates: a shared buffer larger than its largest record is waste.
        total = buffers_alone * sum(order[:num_alone]) + 2 * (distance + 1) * size
        if total < min_bytes:
            min_bytes = total
            shared = size
    return shared


@dataclasses.dataclass(eq=False)
class BufferSet:
    """Buffers to read into and to write from, and a limit on the number of writes in flight.

    Attributes:
      reads: buffers to read into; all buffers if records are updated in place.
      writes: buffers to write from; the same ring as `reads` if records are updated in place.
      turns: semaphore that limits the writes in flight. Without it, writes could take all buffers
        of a ring shared by both directions, and leave none to read ahead into.
      num_turns: maximum number of writes in flight.
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
        """Allocate the buffers.

        Args:
          count: number of buffers, for reads and writes together.
          num_bytes: bytes per buffer.
          distance: prefetch distance; distance + 1 writes may be in flight.
          in_place: whether one ring serves both reads and writes.
          pin: how to lock the pages, as for `Ring`.
        """
        reads = Ring(count if in_place else count // 2, num_bytes, pin=pin)
        writes = reads if in_place else Ring(count // 2, num_bytes, pin=pin)
        # The same number of writes in flight as a separate ring for writes would have buffers.
        return cls(reads, writes, threading.Semaphore(distance + 1), distance + 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        # A set, because both are the same ring if records are updated in place.
        return sum(ring.num_buffers * ring.num_bytes for ring in {self.reads, self.writes})

    def is_whole(self) -> bool:
        """Return whether every buffer and every turn has been given back."""
        # A semaphore does not expose its count: no turn is missing if all can be taken.
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
      store: records on disk.
      buffers: buffers through which the records move.
    """

    store: Store
    buffers: BufferSet
    _records: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    _views: dict[int, Views] = dataclasses.field(default_factory=dict)

    def record_in(self, buffer: np.ndarray) -> np.ndarray:
        """Return the part of a buffer that holds a record: a shared buffer may be longer.

        The result is the same array each time.
        """
        # The ring keeps its buffers alive and this dict keeps their parts, so ids identify them.
        if (record := self._records.get(id(buffer))) is None:
            record = self._records[id(buffer)] = buffer[: self.store.format.padded_bytes]
        return record

    def views(self, record: np.ndarray) -> Views:
        """Return views of a record's leaves, created once per buffer.

        Args:
          record: result of `record_in`.
        """
        if (views := self._views.get(id(record))) is None:
            views = self._views[id(record)] = self.store.format.views(record)
        return views
