"""What this package's callbacks to the host do, as work on a simulated timeline.

XLA calls them on the thread that enqueues the program's operations, so nothing is enqueued until a
callback returns. The modes are:

    "update"       gradients go down, a worker runs the host update, new parameters go up
                   (`update_on="host"`)
    "delayed"      from the first callback on, the worker updates with the last step's gradients;
                   gradients go down; in backward, each layer's parameters go up when the layer is
                   updated (`delayed_update`)
    "nvme"         a record goes up from a buffer that the disk has filled, or down into a buffer
                   that is written to disk; each has a copy to or from a slot on the device
    "nvme_update"  parameters as in "nvme"; gradients as in "update", with the optimizer state read
                   from disk and written back
    "plain"        only Python's time

An update's callbacks do not wait for the device. In a loop, they copy a layer's gradients to a
slot, and the gradients go down from there while the program continues. The worker's kernels follow,
and the new parameters go up to a slot. A callback `LAG` layers later waits for that layer's kernels
and copies the parameters out of the slot. Outside loops, gradients and parameters are copied in the
program's stream, array by array. A delayed update's gradients go down in the same way. Its
parameters go up to one slot once their callback has waited for the layer's kernels and the slot is
empty, and from there behind the products of their tick. Parameters that are stored in host memory
do not go up; the last callback waits for them. Callbacks of the nvme tier wait for the disk and for
buffers, but not for the device. Any other callback is assumed to wait until the device has done all
enqueued work, like one that reads an index from device memory.

The disk reads each record one use ahead, alternating between two buffers. The callback waits for
the read. The record then goes up to its kind's slot as soon as the program has copied the previous
record out of the slot, which frees the buffer; the program waits for this copy. A record on its way
down leaves its slot while the program continues, and is written from one of two buffers. Records
whose arrays have the same bytes count as one kind. The host update moves 28 bytes per parameter:
master and two moments in float32 read and written, and a gradient and a parameter in 16 bits.
"""

import collections

from zerojax.hlo.rates import Rates
from zerojax.hlo.timeline import Timeline

CALLBACKS = ("plain", "update", "delayed", "nvme", "nvme_update")
HOST = "host thread"
MAIN = "main stream"
CORES = "compute"
UP = "link up"
DOWN = "link down"
DISK = "disk"
HOST_KERNEL = "host kernel"
WORKER = "worker"
WAIT = "host waits for the device"
LEAST_BYTES = 1 << 16
"""Least bytes of an array that a callback moves; smaller arrays are indices and flags."""

_UPDATED = 28  # bytes per parameter
_STATES = 12  # bytes per parameter: master and moments on the disk
_ITEM = 2  # bytes per gradient element
_READ_INTO = _WRITTEN_FROM = 2  # number of buffers


class Callbacks:
    """Put callbacks on a timeline, in the order in which they occur in the program.

    Attributes:
      count: number of callbacks so far.
      bytes_up: bytes that callbacks moved to the device.
      bytes_down: bytes that callbacks moved to the host.
    """

    def __init__(self, mode: str, rates: Rates, timeline: Timeline) -> None:
        """Start without callbacks.

        Args:
          mode: what the callbacks do, one of `CALLBACKS`.
          rates: rates of the machine.
          timeline: timeline that the work is added to.
        """
        from host_offload.host_update import LAG  # imports JAX, which nothing else here needs

        self._lag = LAG
        self.mode = mode
        self.rates = rates
        self.timeline = timeline
        self.count = self.bytes_up = self.bytes_down = 0
        # by the record's arrays: the call after which the record is read ahead
        self._read_after: dict[tuple[int, ...], int] = {}
        # by the record's arrays: the program's last copy out of the slot
        self._up_slot: dict[tuple[int, ...], int] = {}
        # by the record's arrays: the last copies up, which free buffers
        self._ups: dict[tuple[int, ...], collections.deque[int]] = {}
        # by the record's bytes: the last copy down from the slot
        self._down_slot: dict[int, int] = {}
        self._writes: list[int] = []
        # the last call that handed over gradients or began an update
        self._handed: int | None = None
        self._made = 0  # bytes of parameters that a delayed update has made
        # by a layer's arrays: the last copy of its gradients to the host
        self._down: dict[tuple[int, ...], int] = {}
        # By the new parameters of a layer, or of a single array: the kernel, and the copy up to a
        # slot if there is one.
        self._updates: dict[tuple[int, ...], collections.deque[tuple[int, int | None]]] = {}

    def call(self, given: list[int], made: list[int], in_loop: bool = True) -> None:
        """Add one callback.

        Args:
          given: bytes of each array that the callback gets from the program.
          made: bytes of each array that the callback returns to the program.
          in_loop: whether a loop of the program calls it.
        """
        given = [n for n in given if n >= LEAST_BYTES]
        made = [n for n in made if n >= LEAST_BYTES]
        down = sum(given)
        up = sum(made)
        t = self.timeline
        self.count += 1
        updates = self.mode in ("update", "delayed") or (
            self.mode == "nvme_update" and (bool(down) or not up)
        )
        if self.mode == "plain":
            t.add(HOST, self.rates.sync_seconds, after=[t.last.get(MAIN)], label=WAIT)
        python = self.rates.callback_seconds + self.rates.leaf_seconds * (len(given) + len(made))
        self._work(python, f"callbacks: Python ({self.mode})")
        if self.mode == "delayed":
            self._delayed(given, made, in_loop)
        elif updates and down and in_loop:
            self._update_layer(given, made)
        elif updates and down:
            self._update_arrays(given)
        elif updates:
            self._take(made)
        elif self.mode in ("nvme", "nvme_update") and up:
            self._fetch(tuple(made))
        elif self.mode == "nvme" and down:
            self._store(down)

    def _work(self, seconds: float, label: str) -> None:
        self.timeline.add(HOST, seconds, label=label)

    def _wait(self, task: int | None) -> None:
        if task is not None:
            self.timeline.add(HOST, after=[task])

    def _copy(self, way: str, num_bytes: int, after: list[int | None], lane: str = "") -> int:
        """Add a copy by a copy engine, and return its task number."""
        if way == UP:
            self.bytes_up += num_bytes
        else:
            self.bytes_down += num_bytes
        return self.timeline.add(
            lane, num_bytes / self.rates.link, (way,), after, f"{way}: callbacks' copies"
        )

    def _kernel(self, num_bytes: int, arrived: int) -> int:
        """Add the worker's kernels for an update whose gradients have `num_bytes` bytes."""
        t = self.timeline
        read = None
        state_bytes = num_bytes / _ITEM * _STATES
        # The state has been read since the previous layer's gradients were handed over.
        if self.mode == "nvme_update":
            begun = self._handed
            self._handed = t.last[HOST]
            after = [t.last[HOST] if begun is None else begun]
            read = t.add(
                "", state_bytes / self.rates.disk_read, (DISK,), after, "disk: optimizer state"
            )
        seconds = num_bytes / _ITEM * _UPDATED / self.rates.host_kernel
        kernel = t.add(
            WORKER, seconds, (HOST_KERNEL,), [arrived, t.last[HOST], read], "host kernel: update"
        )
        if read is not None:
            t.add(
                "", state_bytes / self.rates.disk_write, (DISK,), [kernel], "disk: optimizer state"
            )
        return kernel

    def _update_layer(self, given: list[int], made: list[int]) -> None:
        down = sum(given)
        record = tuple(made)
        slot = self._slot(down, self._down.get(tuple(given)))
        self._down[tuple(given)] = arrived = self._copy(DOWN, down, [slot])
        before = self._updates.setdefault(record, collections.deque())
        if len(before) == self._lag:
            self._take(made)
        kernel = self._kernel(down, arrived)
        # The slot is empty once the program has copied the previous layer's parameters out of it,
        # which its stream does in order.
        taken = self.timeline.last[MAIN] if record else None
        before.append((kernel, self._copy(UP, sum(made), [kernel, taken]) if record else None))

    def _delayed(self, given: list[int], made: list[int], in_loop: bool) -> None:
        t = self.timeline
        down = sum(given)
        up = sum(made)
        if self._handed is None:  # the first call begins the update
            self._handed = t.last[HOST]
        if down and in_loop:
            slot = self._slot(down, self._down.get(tuple(given)))
            self._down[tuple(given)] = self._copy(DOWN, down, [slot])
        elif down:
            self._main_copy(DOWN, down)
        if up:
            self._pending_kernel(up)
        if up and in_loop:
            record = tuple(made)
            self._up_slot[record] = self._slot(
                up, self._copy(UP, up, [t.last[HOST], self._up_slot.get(record)])
            )
        elif up:
            self._main_copy(UP, up)
        elif not down:
            # In the first and the last call, as many gradients have arrived as went down in this
            # step.
            self._pending_kernel(max(0, self.bytes_down - self._made))

    def _pending_kernel(self, num_bytes: int) -> None:
        """Wait for a delayed update's next kernels, which make `num_bytes` bytes of parameters."""
        if num_bytes:
            seconds = num_bytes / _ITEM * _UPDATED / self.rates.host_kernel
            self._made += num_bytes
            self._wait(
                self.timeline.add(
                    WORKER, seconds, (HOST_KERNEL,), [self._handed], "host kernel: update"
                )
            )

    def _update_arrays(self, given: list[int]) -> None:
        for num_bytes in given:
            arrived = self._main_copy(DOWN, num_bytes)
            self._updates.setdefault((), collections.deque()).append(
                (self._kernel(num_bytes, arrived), None)
            )

    def _take(self, made: list[int]) -> None:
        """Take an update's results: a layer's oldest update, or each update of the other arrays."""
        record = tuple(made)
        if record and self._updates.get(record):
            kernel, up = self._updates[record].popleft()
            self._wait(kernel)
            self._slot(sum(made), up)
            return
        waiting = self._updates.get((), collections.deque())
        for num_bytes in made or [0] * len(waiting):
            if waiting:
                self._wait(waiting.popleft()[0])
            if num_bytes:
                self._main_copy(UP, num_bytes)

    def _main_copy(self, way: str, num_bytes: int) -> int:
        """Add a copy in the program's own stream."""
        return self._copy(way, num_bytes, [self.timeline.last.get(HOST)], MAIN)

    def _slot(self, num_bytes: int, after: int | None = None) -> int:
        # Read and written once on the device, in the program's stream.
        seconds = 2 * num_bytes / self.rates.memory
        t = self.timeline
        return t.add(MAIN, seconds, (CORES,), [t.last[HOST], after], "copies on the device: slots")

    def _fetch(self, record: tuple[int, ...]) -> None:
        t = self.timeline
        num_bytes = sum(record)
        # The disk has been reading it since the previous fetch of such a record began. The first
        # one is read now.
        begun = self._read_after.get(record, t.last[HOST])
        self._read_after[record] = t.last[HOST]
        ups = self._ups.setdefault(record, collections.deque(maxlen=_READ_INTO))
        freed = ups[0] if len(ups) == _READ_INTO else None
        read = t.add(
            "", num_bytes / self.rates.disk_read, (DISK,), [begun, freed], "disk: records read"
        )
        self._wait(read)
        ups.append(self._copy(UP, num_bytes, [read, self._up_slot.get(record)]))
        self._up_slot[record] = self._slot(num_bytes, ups[-1])

    def _store(self, num_bytes: int) -> None:
        t = self.timeline
        # The slot must have been emptied.
        slot = self._slot(num_bytes, self._down_slot.get(num_bytes))
        self._down_slot[num_bytes] = copied = self._copy(DOWN, num_bytes, [slot])
        self._writes.append(
            t.add("", num_bytes / self.rates.disk_write, (DISK,), [copied], "disk: records written")
        )
        if len(self._writes) > _WRITTEN_FROM:
            self._wait(self._writes[-1 - _WRITTEN_FROM])
