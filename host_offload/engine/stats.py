"""Statistics of the nvme tier: sums, and the times of each transfer and wait."""

import collections
import dataclasses
from typing import NamedTuple

MOST_EVENTS = 100_000  # transfers and waits whose times are kept, between two calls of take_stats


class Event(NamedTuple):
    """One transfer, or one wait for it.

    A read has one wait for its record, and before it one for a buffer if it was not started ahead.
    A write has one wait until it may start, and before it one for a buffer unless it has one. A
    wait may take no time.

    Attributes:
      name: "read" or "write"; "read_wait" or "write_wait" of the step for either.
      kind: of the record.
      rank: position of the device in the mesh.
      layer: index of the record.
      number: of the transfer; a wait has the number of the transfer that it is for.
      start: seconds, of `time.perf_counter`.
      seconds: how long.
      queued: when the transfer was handed to the disk, on the same clock.
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
        """When it ended, seconds of `time.perf_counter`."""
        return self.start + self.seconds


@dataclasses.dataclass
class Stats:
    """What moved since the statistics were last taken, all devices of this process summed.

    Attributes:
      bytes_read: payload and padding.
      bytes_written: likewise.
      bytes_copied: those of bytes_read that came from the buffer of a write under way, and not from
        disk.
      read_seconds: transfers, summed, although they overlap.
      write_seconds: likewise.
      stall_seconds: time that callbacks waited, by kind.
      misses: reads that were started only when their record was asked for.
      most_queued: the most transfers in progress at one time.
      events: the transfers and waits that are counted here, the last MOST_EVENTS of them.
      num_events: how many there were.
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
        """Append an event; the oldest one is dropped when there are too many."""
        self.events.append(event)
        self.num_events += 1
