"""Copy records to and from a GPU on two streams, overlapped with the running program.

`host_offload.device.copies` explains the idea: slots in device memory, and events that order the
copies that fill and read them. This module implements the slots, the streams and the driver calls.

A callback runs in a thread of XLA while the program is being queued, so work that it adds to the
program's stream runs in the program's order. Copies that it adds to the up and down streams do not:
an event orders each of them relative to the program. No callback waits for the GPU. A host buffer
is reused when an event shows that its copy has ended: threads of each GPU wait for these events and
then complete the futures for which disk and rings wait. Waking such a thread takes as long as
queueing many copies, and the thread would then compete with the callback for the Python
interpreter. So the thread is woken only when a future is used: after the callback, by another
thread.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.device.copies import Copies, HostCopies, LeafSpans, Views, num_bytes
from host_offload.device.cuda_driver import Driver, driver
from host_offload.device.link import find_stream, pointer, pointers

_TOKEN_BYTES = 4


@dataclasses.dataclass(eq=False)
class _Slot:
    """Device memory for one record, in one direction.

    Attributes:
      memory: uint8[n] on the device.
      leaves: offset and bytes of each leaf in a record.
      full: event that the slot holds a record; for a slot up, the end of the copy from `source`.
      empty: event that the record was copied out of the slot; not recorded before `used` is True.
      used: whether the slot has held a record before.
      source: for a slot up, address of the buffer whose record is in the slot or being copied to
        it; None if the slot is free.
      lock: protects `full`, `used` and `source`.
    """

    memory: jax.Array
    leaves: LeafSpans
    full: int
    empty: int
    used: bool = False
    source: int | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.address: int = self.memory.unsafe_buffer_pointer()
        # The same for every callback.
        self.spans = _locate(self.address, self.leaves)
        self.num_bytes = max((offset + size for offset, size in self.leaves), default=0)


def _locate(base: int, leaves: LeafSpans) -> list[tuple[int, int]]:
    """Return the address and the bytes of each leaf of the record at address `base`."""
    return [(base + offset, size) for offset, size in leaves]


class _Ending(Future[None]):
    """A future that, when used, wakes the thread that completes it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        super().add_done_callback(fn)
        self._wake()

    def result(self, timeout: float | None = None) -> None:
        self._wake()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wake()
        return super().exception(timeout)


class _Watch:
    """A thread that waits for events in the order of registration, and completes their futures."""

    def __init__(self, gpu: "_Gpu", name: str) -> None:
        self.gpu = gpu
        self._registered: collections.deque[tuple[int, Future[None]]] = collections.deque()
        # True: look at the registered events; False: end.
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def track_event(self, event: int) -> "Future[None]":
        """Return a future that is done when `event` has happened; the event is then recycled.

        This does not wake the thread. The thread sees the event when this future, or another
        future of the thread, is used.
        """
        done = _Ending(self._wake)
        self._registered.append((event, done))
        return done

    def _wake(self) -> None:
        self._calls.put(True)

    def _run(self) -> None:
        # A current context is a property of a thread, so this one sets its own.
        self.gpu.driver.use(self.gpu.context)
        while self._calls.get():
            while self._registered:
                self._complete(*self._registered.popleft())

    def _complete(self, event: int, done: Future[None]) -> None:
        try:
            self.gpu.driver.finish_event(event)
        except BaseException as error:  # the thread must survive
            # The event is not recycled: after an error its state is unknown.
            done.set_exception(error)
            return
        self.gpu.give_event(event)
        # This runs the future's callbacks, which start the write to disk or give a buffer back.
        done.set_result(None)

    def close(self) -> None:
        """Complete all futures, and end the thread."""
        self._wake()
        self._calls.put(False)
        self._thread.join()


class _Gpu:
    """The streams and events of one GPU, and the threads that wait for the events."""

    def __init__(self, driver: Driver, device: Any, rank: int) -> None:
        self.driver = driver
        self.context = driver.retain_context(device.local_hardware_id or 0)
        # Streams and events belong to the context that is current in the thread that creates them.
        driver.use(self.context)
        # One stream per direction: the link carries both directions at the same time, but a stream
        # runs its copies one by one.
        self.up = driver.make_stream()
        self.down = driver.make_stream()
        self._events: list[int] = []
        self._lock = threading.Lock()
        # Two threads, so that copies up, which end early, do not wait behind events that the
        # program reaches late.
        self.lifted = _Watch(self, f"zerojax-copies-{rank}-lifted")
        self.passed = _Watch(self, f"zerojax-copies-{rank}-passed")

    def take_event(self) -> int:
        with self._lock:
            if self._events:
                return self._events.pop()
        return self.driver.make_event()

    def give_event(self, event: int) -> None:
        with self._lock:
            self._events.append(event)

    def after(self, stream: int) -> "Future[None]":
        """Return a future that is done when all work queued on a stream so far is done."""
        event = self.take_event()
        self.driver.record(event, stream)
        return self.passed.track_event(event)

    def finish_after_error(self, stream: int) -> None:
        """Wait for all work queued on a stream, before an error is raised.

        On an error the caller gives its buffers back, and they are refilled immediately. A copy
        still in flight would read or write another record's bytes.
        """
        with contextlib.suppress(RuntimeError):
            self.driver.finish_stream(stream)

    def close(self) -> None:
        """Complete all futures, end the threads, and destroy the streams and events."""
        self.lifted.close()
        self.passed.close()
        self.driver.use(self.context)
        for stream in (self.up, self.down):
            self.driver.finish_stream(stream)
            self.driver.destroy_stream(stream)
        for event in self._events:
            self.driver.destroy_event(event)


class GpuCopies:
    """Copies records of CUDA devices.

    Attributes:
      devices: devices of the mesh, in its order.
      driver: CUDA driver of this machine.
    """

    lifts = True

    def __init__(self, devices: Sequence[Any], driver: Driver) -> None:
        """Store the devices of a mesh.

        Args:
          devices: all devices of the mesh, in its order; the devices of other processes are never
            used.
          driver: CUDA driver of this machine.
        """
        self.devices = list(devices)
        self.driver = driver
        self._gpus: dict[int, _Gpu] = {}
        self._leaves: dict[str, LeafSpans] = {}
        self._up: dict[tuple[str, int], _Slot] = {}
        self._down: dict[tuple[str, int], _Slot] = {}

    def add(
        self, kind: str, rank: int, num_bytes: int, leaves: LeafSpans, *, up: bool, down: bool
    ) -> None:
        """Create the slots of a kind on a GPU, as `Copies.add` describes."""
        if rank not in self._gpus:
            self._gpus[rank] = _Gpu(self.driver, self.devices[rank], rank)
        self._leaves[kind] = tuple(leaves)
        self.driver.use(self._gpus[rank].context)
        if up:
            self._up[kind, rank] = self._make_slot(kind, rank, num_bytes)
        if down:
            self._down[kind, rank] = self._make_slot(kind, rank, num_bytes)

    def _make_slot(self, kind: str, rank: int, num_bytes: int) -> _Slot:
        """Allocate a slot on a GPU, whose context must be current."""
        zeros = jnp.zeros(num_bytes, jnp.uint8)
        # Wait until XLA has filled the memory: nothing orders XLA's streams before the streams used
        # here.
        memory = jax.device_put(zeros, self.devices[rank]).block_until_ready()
        full = self._gpus[rank].take_event()
        return _Slot(memory, self._leaves[kind], full, self.driver.make_event())

    def remove(self, kind: str) -> None:
        """Free a kind's slots, after the copies that use them."""
        for slots in (self._up, self._down):
            ranks = [rank for slot_kind, rank in slots if slot_kind == kind]
            for rank in ranks:
                slot = slots.pop((kind, rank))
                gpu = self._gpus[rank]
                self.driver.use(gpu.context)
                # Nothing may still read or fill the memory, not even a dropped copy.
                self.driver.finish_stream(gpu.up if slots is self._up else gpu.down)
                for event in (slot.full, slot.empty):
                    self.driver.finish_event(event)
                    self.driver.destroy_event(event)

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        """Queue the copy of a buffer's record to its slot up, if the slot is free."""
        slot = self._up.get((kind, rank))
        # A record in the slot that was not taken yet stays there until `load` or `drop`.
        if slot is None or slot.source is not None:
            return
        with slot.lock:
            if slot.source is not None:
                return
            gpu = self._gpus[rank]
            call = self.driver
            address = buffer.ctypes.data
            call.use(gpu.context)
            try:
                if slot.used:
                    call.wait(gpu.up, slot.empty)
                call.copy(slot.address, address, buffer.nbytes, gpu.up)
                call.record(slot.full, gpu.up)
            except BaseException:
                gpu.finish_after_error(gpu.up)
                raise
            # Set last, so that a failed copy is never mistaken for a record.
            slot.source = address

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> "Future[None] | None":
        """Free the slot of a lifted buffer, as `Copies.drop` describes."""
        slot = self._up.get((kind, rank))
        if slot is None or slot.source is None:
            return None
        with slot.lock:
            if slot.source != buffer.ctypes.data:
                return None
            self.driver.use(self._gpus[rank].context)
            return self._empty_slot(slot, self._gpus[rank])

    def _empty_slot(self, slot: _Slot, gpu: _Gpu) -> "Future[None]":
        """Mark the slot as free, and return a future of the copy that filled it.

        The GPU's context must be current.
        """
        # The copy keeps its event for itself: the slot's next copy may be recorded before a thread
        # has waited for this event.
        event = slot.full
        slot.full = gpu.take_event()
        slot.source = None
        return gpu.lifted.track_event(event)

    def load(
        self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]
    ) -> "Future[None] | None":
        """Queue copies of a record's leaves to a callback's buffers, as `Copies.load` describes."""
        if not views:
            return None
        call = self.driver
        stream = find_stream(context)
        gpu = self._gpus[rank]
        call.use(gpu.context)
        slot = self._up.get((kind, rank))
        base = views.address
        targets = pointers(out)
        if slot is not None:
            with slot.lock:
                if slot.source == base:
                    call.wait(stream, slot.full)
                    call.copy_out(slot.spans, targets, stream)
                    call.record(slot.empty, stream)
                    slot.used = True
                    # The buffer is free when the copy up has ended, whatever the program does.
                    return self._empty_slot(slot, gpu)
        # The record was not lifted: copy it on the program's stream, which needs the buffer until
        # the copy has ended.
        try:
            call.copy_out(_locate(base, self._leaves[kind]), targets, stream)
            return gpu.after(stream)
        except BaseException:
            gpu.finish_after_error(stream)
            raise

    def save(
        self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views
    ) -> "Future[None] | None":
        """Queue copies of a callback's operands to a record, as `Copies.save` describes."""
        if not views:
            return None
        call = self.driver
        stream = find_stream(context)
        gpu = self._gpus[rank]
        call.use(gpu.context)
        slot = self._down.get((kind, rank))
        base = views.address
        sources = pointers(values)
        if slot is None:
            try:
                call.copy_in(_locate(base, self._leaves[kind]), sources, stream)
                return gpu.after(stream)
            except BaseException:
                gpu.finish_after_error(stream)
                raise
        with slot.lock:
            try:
                if slot.used:
                    call.wait(stream, slot.empty)
                call.copy_in(slot.spans, sources, stream)
                call.record(slot.full, stream)
                call.wait(gpu.down, slot.full)
                # One copy for the full record: the slot has the same layout as the buffer.
                call.copy(base, slot.address, slot.num_bytes, gpu.down)
                call.record(slot.empty, gpu.down)
                slot.used = True
                # A separate event for this store: `empty` may be recorded again before the thread
                # has waited for this copy.
                return gpu.after(gpu.down)
            except BaseException:
                gpu.finish_after_error(gpu.down)
                raise

    def pass_on(self, context: Any, rank: int | None, source: Any, out: Any) -> None:
        """Queue the copy of a token, i32[1], to the next token."""
        if rank is not None:  # else the driver raises if the thread has no context yet
            self.driver.use(self._gpus[rank].context)
        self.driver.copy(pointer(out), pointer(source), _TOKEN_BYTES, find_stream(context))

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        """Queue fills of a callback's buffers with zeros."""
        for target in out:
            self.driver.clear(pointer(target), num_bytes(target), find_stream(context))

    def close(self) -> None:
        """Wait for all copies, and free slots, streams and threads."""
        for kind in {kind for kind, _ in (*self._up, *self._down)}:
            self.remove(kind)
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()


def build_copies(devices: Sequence[Any]) -> Copies:
    """Return the object that copies records between buffers and the devices of a mesh.

    Args:
      devices: all devices of the mesh, in its order.

    Raises:
      NotImplementedError: the platform is unknown, or the package cuda-bindings is missing.
    """
    platform = devices[0].platform
    if platform == "cpu":
        return HostCopies()
    if platform in ("gpu", "cuda"):
        return GpuCopies(devices, driver())
    raise NotImplementedError(
        f"the nvme tier moves buffers of cpu and cuda devices, and these are {platform}'s"
    )
