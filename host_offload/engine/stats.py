"""What the nvme tier tells of a step: sums, and each transfer and wait."""

import collections
import dataclasses
from typing import NamedTuple

MOST_EVENTS = 100_000  # transfers and waits whose times are kept, between two calls of take_stats


class Event(NamedTuple):
    """One transfer, or one wait for it.

    A record that is read is waited for once, and once more for a buffer if it was not read ahead; one that is written, once for
    its turn, and before that for a buffer unless it has one. A wait may be of no length.

    Attributes:
      name: "read" or "write"; "read_wait" or "write_wait" of the step for either.
      kind: of the record.
      rank: position of the device in the mesh.
      layer: index of the record.
      number: of the transfer; a wait has the number of the transfer that it is for.
      start: seconds, of `time.perf_counter`.
      seconds: how long.
      queued: when the disk was given the transfer, seconds likewise.
      num_bytes: moved.
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
        """When it was over, seconds of `time.perf_counter`."""
        return self.start + self.seconds


@dataclasses.dataclass
class Stats:
    """What moved since the statistics were last taken, all devices of this process summed.

    Attributes:
      bytes_read: payload and padding.
      bytes_written: likewise.
      bytes_copied: those of bytes_read that came from the buffer of a write under way, and not from disk.
      read_seconds: transfers, summed, although they overlap.
      write_seconds: likewise.
      stall_seconds: time that callbacks waited, by kind.
      misses: reads that were not ahead of their use.
      most_queued: most transfers under way at one moment.
      events: the transfers and waits that are counted here, the last MOST_EVENTS of them.
      num_events: how many there were.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    stall_seconds: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    misses: int = 0
    most_queued: int = 0
    events: collections.deque[Event] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MOST_EVENTS))
    num_events: int = 0

    def note(self, event: Event) -> None:
        """Keep an event, and forget the oldest where there are too many."""
        self.events.append(event)
        self.num_events += 1
