"""The records of one device: what is being read, written and waited for."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from host_offload.device import Ring, Views
from host_offload.engine.buffer_sets import BufferSet, DeviceRecords
from host_offload.engine.stats import Event
from host_offload.engine.transfers import Write
from host_offload.schedule import Window

Key = tuple[str, int]
"""Kind and layer of a record."""


class RecordBuffer(NamedTuple):
    """A buffer that holds a record, or that is about to be filled with one.

    Attributes:
      lane: the device's records.
      records: the records of the same kind.
      event: the read that fills the buffer, or the write of its contents.
      memory: the memory of the record, a result of `DeviceRecords.record_in`.
    """

    lane: "Lane"
    records: DeviceRecords
    event: Event
    memory: np.ndarray

    @property
    def buffers(self) -> BufferSet:
        """The set to which the buffer belongs."""
        return self.records.buffers

    @property
    def views(self) -> Views:
        """Views of the record's leaves."""
        return self.records.views(self.memory)


@dataclasses.dataclass(eq=False)
class Read:
    """A read in flight, or a record that was read ahead and not yet used.

    Attributes:
      buffer: buffer that the read fills.
      done: future of the seconds that the read takes.
    """

    buffer: RecordBuffer
    done: "Future[float]"


class Lane:
    """The records of one device. Callbacks and I/O threads change the attributes under `lock`.

    Attributes:
      rank: position of the device in the mesh.
      lock: lock of the other attributes.
      records: records by kind.
      shared: buffers of the kinds that share them, if any.
      window: moves that the program is expected to make.
      reading: reads in flight, and records that were read ahead, in the order of their reads.
      writing: writes in flight; each buffer holds the current contents of its record.
      lifted: kinds whose copies to the device run ahead.
      wanted: records for which a callback is taking a buffer.
      claims: ring of each wanted record: reading ahead must leave that callback a buffer.
      leaving: one entry, the ring, per buffer that a copy to the device still reads; these buffers
        are given back when their copies end.
      left: condition, notified when a leaving buffer has been given back.
    """

    def __init__(self, rank: int) -> None:
        """Create the records of a device, without any kinds."""
        self.rank = rank
        self.lock = threading.RLock()  # a read may end before the call that starts it returns
        self.records: dict[str, DeviceRecords] = {}
        self.shared: BufferSet | None = None
        self.window = Window((), 0)
        self.reading: dict[Key, Read] = {}
        self.writing: dict[Key, Write] = {}
        self.lifted: set[str] = set()
        self.wanted: list[Key] = []
        self.claims: list[Ring] = []
        self.leaving: list[Ring] = []
        self.left = threading.Condition(self.lock)

    def pop_reads(self, predicate: Callable[[Key], bool]) -> list[Read]:
        """Remove the reads that `predicate` selects, and return them; the caller drops them."""
        with self.lock:
            keys = [key for key in self.reading if predicate(key)]
            return [self.reading.pop(key) for key in keys]

    def wait_for_writes(self) -> None:
        """Wait for the writes that are in flight now; their errors are ignored."""
        with self.lock:
            pending = list(self.writing.values())
        for write in pending:
            write.done.exception()

    def wait_for_leaving(self) -> None:
        """Wait until every leaving buffer has been given back."""
        with self.lock:
            self.left.wait_for(lambda: not self.leaving)
