"""What this package's callbacks to the host do, as work on a simulated timeline.

XLA calls them on the thread that enqueues the program's operations, so nothing is enqueued until a
callback returns. The modes are:

    "update"       gradients go down, a worker runs the host update, new parameters go up
                   (`update_on="host"`)
    "delayed"      from the first callback on, the worker updates with the last step's gradients;
                   gradients go down; in backward, each layer's parameters go up when the layer is
                   updated (`delayed_update`)
    "in_forward"   the same update, but embedding and head, then each layer's parameters, go up
                   before forward uses them; gradients go down in backward
                   (`update_on="host"` with `update="in_forward"`)
    "nvme"         a record goes up from a buffer that the disk has filled, or down into a buffer
                   that is written to disk; each has a copy to or from a slot on the device
    "nvme_update"  parameters as in "nvme"; gradients as in "update", with the optimizer state read
                   from disk and written back
    "plain"        only Python's time

An update's callbacks do not wait for the device. In a loop, they copy a layer's gradients to a
slot, and the gradients go down from there while the program continues. The worker's kernels follow,
and the new parameters go up to a slot. A callback `HOST_LAG` layers later waits for that layer's
kernels and copies the parameters out of the slot. Outside loops, gradients and parameters are
copied in the program's stream, array by array. A delayed update's gradients go down in the same
way. Its parameters go up to one slot once their callback has waited for the layer's kernels and the
slot is empty, and from there behind the products of their tick. Parameters that are stored in host
memory do not go up; the last callback waits for them. The parameters of an update in forward go up
the same way, wherever they are stored, and the products of their tick wait for them. Callbacks of
the nvme tier wait for the disk and for buffers, but not for the device. Any other callback is
assumed to wait until the device has done all enqueued work, like one that reads an index from
device memory.

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

CALLBACKS = ("plain", "update", "delayed", "in_forward", "nvme", "nvme_update")
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

_PENDING = ("delayed", "in_forward")  # updates with the last step's gradients
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
        from host_offload.host_update import HOST_LAG  # imports JAX, which nothing else here needs

        self._lag = HOST_LAG
        self.mode = mode
        self.rates = rates
        self.timeline = timeline
        self.count = 0
        self.bytes_up = 0
        self.bytes_down = 0
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
        self._last_handover: int | None = None
        self._updated_bytes = 0  # bytes of parameters that a delayed update has computed
        # by a layer's arrays: the last copy of its gradients to the host
        self._grads_down: dict[tuple[int, ...], int] = {}
        # By the new parameters of a layer, or of a single array: the kernel, and the copy up to a
        # slot if there is one.
        self._updates: dict[tuple[int, ...], collections.deque[tuple[int, int | None]]] = {}

    def call(self, operands: list[int], results: list[int], in_loop: bool = True) -> None:
        """Add one callback.

        Args:
          operands: bytes of each array that the callback gets from the program.
          results: bytes of each array that the callback returns to the program.
          in_loop: whether a loop of the program calls it.
        """
        operands = [n for n in operands if n >= LEAST_BYTES]
        results = [n for n in results if n >= LEAST_BYTES]
        bytes_down = sum(operands)
        bytes_up = sum(results)
        t = self.timeline
        self.count += 1
        if self.mode == "plain":
            t.add(HOST, self.rates.sync_seconds, after=[t.last.get(MAIN)], label=WAIT)
        num_arrays = len(operands) + len(results)
        seconds = self.rates.callback_seconds + self.rates.leaf_seconds * num_arrays
        t.add(HOST, seconds, label=f"callbacks: Python ({self.mode})")

        updates = self.mode in ("update", *_PENDING) or (
            self.mode == "nvme_update" and (bool(bytes_down) or not bytes_up)
        )
        if self.mode in _PENDING:
            self._pending(operands, results, in_loop)
        elif updates and bytes_down and in_loop:
            self._update_layer(operands, results)
        elif updates and bytes_down:
            self._update_arrays(operands)
        elif updates:
            self._take_updated(results)
        elif self.mode in ("nvme", "nvme_update") and bytes_up:
            self._fetch(tuple(results))
        elif self.mode == "nvme" and bytes_down:
            self._store(bytes_down)

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
            begun = t.last[HOST] if self._last_handover is None else self._last_handover
            self._last_handover = t.last[HOST]
            seconds = state_bytes / self.rates.disk_read
            read = t.add("", seconds, (DISK,), [begun], "disk: optimizer state")
        seconds = num_bytes / _ITEM * _UPDATED / self.rates.host_kernel
        kernel = t.add(
            WORKER, seconds, (HOST_KERNEL,), [arrived, t.last[HOST], read], "host kernel: update"
        )
        if read is not None:
            seconds = state_bytes / self.rates.disk_write
            t.add("", seconds, (DISK,), [kernel], "disk: optimizer state")
        return kernel

    def _layer_grads_down(self, grads: tuple[int, ...]) -> int:
        """Copy a layer's gradients to a slot and down from it; return the copy's task number."""
        num_bytes = sum(grads)
        # The previous layer's gradients have left the slot.
        slot = self._slot(num_bytes, self._grads_down.get(grads))
        copied = self._copy(DOWN, num_bytes, [slot])
        self._grads_down[grads] = copied
        return copied

    def _update_layer(self, grads: list[int], params: list[int]) -> None:
        record = tuple(params)
        arrived = self._layer_grads_down(tuple(grads))
        layer_updates = self._updates.setdefault(record, collections.deque())
        if len(layer_updates) == self._lag:
            self._take_updated(params)
        kernel = self._kernel(sum(grads), arrived)
        copied_up = None
        if record:
            # The slot is empty once the program has copied the previous layer's parameters out of
            # it, which its stream does in order.
            emptied = self.timeline.last[MAIN]
            copied_up = self._copy(UP, sum(params), [kernel, emptied])
        layer_updates.append((kernel, copied_up))

    def _pending(self, grads: list[int], params: list[int], in_loop: bool) -> None:
        t = self.timeline
        grad_bytes = sum(grads)
        param_bytes = sum(params)
        if self._last_handover is None:  # the first call begins the update
            self._last_handover = t.last[HOST]
        if grad_bytes and in_loop:
            self._layer_grads_down(tuple(grads))
        elif grad_bytes:
            self._main_copy(DOWN, grad_bytes)

        if param_bytes:
            self._pending_kernel(param_bytes)
        if param_bytes and in_loop:
            record = tuple(params)
            copied_up = self._copy(UP, param_bytes, [t.last[HOST], self._up_slot.get(record)])
            self._up_slot[record] = self._slot(param_bytes, copied_up)
        elif param_bytes:
            self._main_copy(UP, param_bytes)
        elif not grad_bytes:
            # In the first and the last call of a delayed update, as many gradients have arrived as
            # went down in this step. The kernels of an update in forward are waited for with their
            # parameters, before any gradient goes down.
            self._pending_kernel(max(0, self.bytes_down - self._updated_bytes))

    def _pending_kernel(self, num_bytes: int) -> None:
        """Wait for the next kernels of a pending update, which make `num_bytes` of parameters."""
        if num_bytes:
            seconds = num_bytes / _ITEM * _UPDATED / self.rates.host_kernel
            self._updated_bytes += num_bytes
            kernel = self.timeline.add(
                WORKER, seconds, (HOST_KERNEL,), [self._last_handover], "host kernel: update"
            )
            self._wait(kernel)

    def _update_arrays(self, grads: list[int]) -> None:
        for num_bytes in grads:
            arrived = self._main_copy(DOWN, num_bytes)
            kernel = self._kernel(num_bytes, arrived)
            self._updates.setdefault((), collections.deque()).append((kernel, None))

    def _take_updated(self, params: list[int]) -> None:
        """Take an update's results: a layer's oldest update, or each update of the other arrays."""
        record = tuple(params)
        if record and self._updates.get(record):
            kernel, copied_up = self._updates[record].popleft()
            self._wait(kernel)
            self._slot(sum(params), copied_up)
            return
        waiting = self._updates.get((), collections.deque())
        for num_bytes in params or [0] * len(waiting):
            if waiting:
                kernel, _ = waiting.popleft()
                self._wait(kernel)
            if num_bytes:
                self._main_copy(UP, num_bytes)

    def _main_copy(self, way: str, num_bytes: int) -> int:
        """Add a copy in the program's own stream."""
        return self._copy(way, num_bytes, [self.timeline.last.get(HOST)], MAIN)

    def _slot(self, num_bytes: int, after: int | None = None) -> int:
        # Read and written once on the device, in the program's stream.
        t = self.timeline
        seconds = 2 * num_bytes / self.rates.memory
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
        seconds = num_bytes / self.rates.disk_read
        read = t.add("", seconds, (DISK,), [begun, freed], "disk: records read")
        self._wait(read)
        ups.append(self._copy(UP, num_bytes, [read, self._up_slot.get(record)]))
        self._up_slot[record] = self._slot(num_bytes, ups[-1])

    def _store(self, num_bytes: int) -> None:
        t = self.timeline
        # The slot must have been emptied.
        slot = self._slot(num_bytes, self._down_slot.get(num_bytes))
        copied = self._copy(DOWN, num_bytes, [slot])
        self._down_slot[num_bytes] = copied
        seconds = num_bytes / self.rates.disk_write
        self._writes.append(t.add("", seconds, (DISK,), [copied], "disk: records written"))
        if len(self._writes) > _WRITTEN_FROM:
            self._wait(self._writes[-1 - _WRITTEN_FROM])
