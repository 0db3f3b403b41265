"""What this package's callbacks to the host do today, as work on a timeline.

XLA calls them on the thread that enqueues the program's operations, so nothing is enqueued until one returns. Each first waits
until the device has done all that was enqueued, because it reads an index from device memory. Then, by mode:

    "update"       gradients down, the host's update, new parameters up: one after the other (`update_on="host"`)
    "delayed"      gradients down, new parameters of the last step up, and copies of both within host memory (`delayed_update`)
    "nvme"         a record up from a buffer that the disk has filled, or one down into a buffer that goes to the disk; with
                   a copy to or from a slot on the device each time
    "nvme_update"  parameters as in "nvme"; gradients as in "update", with the optimizer's state from and to the disk
    "plain"        Python's time alone

The disk reads a record one use ahead. It goes up to its kind's slot as soon as it is read and the program has taken the one
before from there; the callback waits until it is there. A record down leaves its slot beside what comes next, and two buffers
are written from. Records whose arrays have the same bytes count as one kind. The host's update moves 28 bytes a parameter:
master and two moments in float32 read and written, a gradient and a parameter in 16 bits.
"""

from zerojax.hlo.rates import Rates
from zerojax.hlo.timeline import Timeline

CALLBACKS = ("plain", "update", "delayed", "nvme", "nvme_update")
HOST, MAIN, CORES, UP, DOWN = "host thread", "main stream", "compute", "link up", "link down"
DISK, HOST_KERNEL = "disk", "host kernel"
WAIT = "host waits for the device"
LEAST_BYTES = 1 << 16
"""Smaller arrays are indices and flags, which a callback does not move."""

_UPDATED = 28  # bytes a parameter
_STATES = 12  # bytes a parameter of master and moments on the disk
_ITEM = 2  # bytes of a gradient
_WRITTEN_FROM = 2  # buffers


class Callbacks:
    """Puts callbacks on a timeline, as they come in the program.

    Attributes:
      count: callbacks so far.
      bytes_up: that they moved to the device.
      bytes_down: that they moved to the host.
    """

    def __init__(self, mode: str, rates: Rates, timeline: Timeline) -> None:
        self.mode, self.rates, self.timeline = mode, rates, timeline
        self.count = self.bytes_up = self.bytes_down = 0
        self._read_after: dict[tuple[int, ...], int] = {}  # by the record's arrays: the call after which it is read ahead
        self._up_slot: dict[tuple[int, ...], int] = {}  # by the same: the program's last copy out of the slot
        self._down_slot: dict[int, int] = {}  # by the record's bytes: the last copy down from the slot
        self._writes: list[int] = []
        self._states: int | None = None

    def call(self, given: list[int], made: list[int]) -> None:
        """Add one callback.

        Args:
          given: bytes of each array that it gets from the program.
          made: bytes of each array that it gives to it.
        """
        given, made = [n for n in given if n >= LEAST_BYTES], [n for n in made if n >= LEAST_BYTES]
        down, up, t = sum(given), sum(made), self.timeline
        self.count += 1
        t.add(HOST, self.rates.sync_seconds, after=[t.last.get(MAIN)], label=WAIT)
        python = self.rates.callback_seconds + self.rates.leaf_seconds * (len(given) + len(made))
        self._work(python, f"callbacks: Python ({self.mode})")
        if self.mode == "update" and down:
            self._update(down, up)
        elif self.mode == "nvme_update" and down and not up:
            self._update(down, up)
            # One record's state is read and written while the next one's gradients are computed.
            before, seconds = self._states, down / _ITEM * _STATES * (1 / self.rates.disk_read + 1 / self.rates.disk_write)
            self._states = t.add("", seconds, (DISK,), [t.last[HOST]], "disk: optimizer state")
            self._wait(before)
        elif self.mode == "delayed" and (down or up):
            self._link(DOWN, down)
            self._link(UP, up)
            self._work((down + 2 * up) / self.rates.host_copy, "callbacks: copies in host memory")
        elif self.mode in ("nvme", "nvme_update") and up:
            self._fetch(tuple(made))
        elif self.mode == "nvme" and down:
            self._store(down)

    def _work(self, seconds: float, label: str) -> None:
        self.timeline.add(HOST, seconds, label=label)

    def _wait(self, task: int | None) -> None:
        if task is not None:
            self.timeline.add(HOST, after=[task])

    def _copy(self, way: str, num_bytes: int, after: list[int | None]) -> int:
        """Add a copy by a copy engine."""
        if way == UP:
            self.bytes_up += num_bytes
        else:
            self.bytes_down += num_bytes
        return self.timeline.add("", num_bytes / self.rates.link, (way,), after, f"{way}: callbacks' copies")

    def _link(self, way: str, num_bytes: int) -> None:
        """Add a copy that the host's thread begins and waits for."""
        self._wait(self._copy(way, num_bytes, [self.timeline.last.get(HOST)]))

    def _update(self, down: int, up: int) -> None:
        self._link(DOWN, down)
        seconds = down / _ITEM * _UPDATED / self.rates.host_kernel
        self._wait(self.timeline.add("", seconds, (HOST_KERNEL,), [self.timeline.last[HOST]], "host kernel: update"))
        self._link(UP, up)

    def _slot(self, num_bytes: int, after: int | None = None) -> int:
        # Read and written once on the device, in the program's stream.
        seconds, t = 2 * num_bytes / self.rates.memory, self.timeline
        return t.add(MAIN, seconds, (CORES,), [t.last[HOST], after], "copies on the device: slots")

    def _fetch(self, record: tuple[int, ...]) -> None:
        t, num_bytes = self.timeline, sum(record)
        # The disk has read it since the last fetch of such a record began; the first one is read now.
        begun = self._read_after.get(record, t.last[HOST])
        self._read_after[record] = t.last[HOST]
        read = t.add("", num_bytes / self.rates.disk_read, (DISK,), [begun], "disk: records read")
        self._wait(self._copy(UP, num_bytes, [read, self._up_slot.get(record)]))
        self._up_slot[record] = self._slot(num_bytes)

    def _store(self, num_bytes: int) -> None:
        t = self.timeline
        # The slot must have been emptied.
        slot = self._slot(num_bytes, self._down_slot.get(num_bytes))
        self._down_slot[num_bytes] = copied = self._copy(DOWN, num_bytes, [slot])
        self._writes.append(t.add("", num_bytes / self.rates.disk_write, (DISK,), [copied], "disk: records written"))
        if len(self._writes) > _WRITTEN_FROM:
            self._wait(self._writes[-1 - _WRITTEN_FROM])
