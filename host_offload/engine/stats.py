"""Statistics of the nvme tier: sums, and the time of each transfer and wait."""

import collections
import dataclasses
from typing import NamedTuple

MOST_EVENTS = 100_000  # events (transfers and waits) kept between two calls of take_stats


class Event(NamedTuple):
    """One transfer, or one wait for a transfer.

    A read has one wait for its record, preceded by a wait for a buffer if it was not started ahead.
    A write has one wait until it may start, preceded by a wait for a buffer unless it has one. A
    wait may take no time.

    Attributes:
      name: "read" or "write"; "read_wait" or "write_wait" for the step's wait for a transfer.
      kind: kind of the record.
      rank: position of the device in the mesh.
      layer: index of the record.
      number: number of the transfer; a wait has the number of its transfer.
      start: start time, in seconds of `time.perf_counter`.
      seconds: duration.
      queued: time when the transfer was handed to the disk, in seconds of `time.perf_counter`.
      num_bytes: bytes moved.
      ahead: whether a read was started before its record was asked for.
    """

    name: str
    kind: str
    rank: int
    layer: int
    number: int
    start: float = 0.0
    seconds: float = 0.0
    queued: float = 0.0
    num_bytes: int = 0
    ahead: bool = False

    @property
    def end(self) -> float:
        """End time, in seconds of `time.perf_counter`."""
        return self.start + self.seconds


@dataclasses.dataclass
class Stats:
    """Transfers since the statistics were last taken, summed over this process's devices.

    Attributes:
      bytes_read: bytes read, padding included.
      bytes_written: bytes written, padding included.
      bytes_copied: part of `bytes_read` that was copied from the buffer of a write in flight
        instead of read from disk.
      read_seconds: sum of the durations of all reads, although they overlap.
      write_seconds: sum of the durations of all writes, although they overlap.
      stall_seconds: seconds that callbacks waited, by kind.
      misses: number of reads that were started only when their record was asked for.
      most_queued: largest number of transfers in flight at the same time.
      events: the last MOST_EVENTS transfers and waits.
      num_events: number of all transfers and waits, including those dropped from `events`.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    stall_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    misses: int = 0
    most_queued: int = 0
    events: collections.deque[Event] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MOST_EVENTS)
    )
    num_events: int = 0

    def note(self, event: Event) -> None:
        """Append an event; drop the oldest event if there are more than MOST_EVENTS."""
        self.events.append(event)
        self.num_events += 1
