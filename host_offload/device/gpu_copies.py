"""Copies of records to and from a GPU, on two streams of its own, beside the program that computes.

`host_offload.device.copies` explains the idea: slots in device memory, and events that order who fills them and who reads
them. This module has the slots, the streams and the calls of the driver.

A callback runs in a thread of XLA while the program is being queued, so what it adds to the program's stream runs in the
program's order. What it adds to the streams up and down does not: an event orders each such copy against the program. A buffer
of the host is reused only when an event says that its copy is over; one thread for each GPU waits for the copies down and then
completes the futures for which the disk waits.
"""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.device.copies import Copies, HostCopies, Views, num_bytes
from host_offload.device.cuda_driver import Driver, driver
from host_offload.device.link import pointer, stream_of


@dataclasses.dataclass(eq=False)
class _Slot:
    """Device memory for one record, in one direction.

    Attributes:
      memory: uint8[n] on the device.
      full: event, a record is in it.
      empty: event, the record was copied out of it; recorded once `used`.
      used: whether it ever held a record.
      source: up: address of the buffer whose record is in the slot, or on its way there.
    """

    memory: jax.Array
    full: int
    empty: int
    used: bool = False
    source: int | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def address(self) -> int:
        return self.memory.unsafe_buffer_pointer()


class _Gpu:
    """Streams of one GPU, and the thread that waits for copies down."""

    def __init__(self, driver: Driver, device: Any, rank: int) -> None:
        self.driver = driver
        self.context = driver.context_of(device.local_hardware_id or 0)
        # Streams and events belong to the context that is current in the thread that makes them.
        driver.use(self.context)
        # One stream for each direction: the link carries both at once, but a stream runs its copies one by one.
        self.up, self.down = driver.make_stream(), driver.make_stream()
        self.events: list[int] = []
        self._lock = threading.Lock()
        self._saved: queue.SimpleQueue[tuple[int, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"zerojax-copies-{rank}", daemon=True)
        self._thread.start()

    def take_event(self) -> int:
        with self._lock:
            if self.events:
                return self.events.pop()
        return self.driver.make_event()

    def future_of(self, event: int) -> "Future[None]":
        """Return a future that is done when `event` has happened; the event is reused then."""
        done: Future[None] = Future()
        self._saved.put((event, done))
        return done

    @contextlib.contextmanager
    def finishing(self, stream: int) -> Iterator[None]:
        """Before an error leaves the context, wait for all that is queued on a stream.

        The caller gives its buffers back on an error, and they are filled again at once: a copy that still ran would read or
        write another record's bytes.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.driver.finish_stream(stream)
            raise

    def _watch(self) -> None:
        # A current context is a property of a thread, so this one sets its own.
        self.driver.use(self.context)
        while (job := self._saved.get()) is not None:
            event, done = job
            try:
                self.driver.finish_event(event)
            except BaseException as error:  # the thread must go on
                # The event is not reused: after an error nothing is known of it.
                done.set_exception(error)
                continue
            with self._lock:
                self.events.append(event)
            # Outside of the lock: this runs the callbacks of the future, which start the write to disk.
            done.set_result(None)

    def close(self) -> None:
        """Complete all futures, and end the thread."""
        self._saved.put(None)
        self._thread.join()
        self.driver.use(self.context)
        for stream in (self.up, self.down):
            self.driver.finish_stream(stream)
            self.driver.destroy_stream(stream)
        for event in self.events:
            self.driver.destroy_event(event)


class GpuCopies:
    """Records of CUDA devices."""

    lifts = True

    def __init__(self, devices: Sequence[Any], driver: Driver) -> None:
        """Serve the devices of a mesh, in its order. Those of other processes are listed, but never used."""
        self.devices, self.driver = list(devices), driver
        self._gpus: dict[int, _Gpu] = {}
        self._up: dict[tuple[str, int], _Slot] = {}
        self._down: dict[tuple[str, int], _Slot] = {}

    def add(self, kind: str, rank: int, num_bytes: int, *, up: bool, down: bool) -> None:
        if rank not in self._gpus:
            self._gpus[rank] = _Gpu(self.driver, self.devices[rank], rank)
        self.driver.use(self._gpus[rank].context)
        for wanted, slots in ((up, self._up), (down, self._down)):
            if wanted:
                # XLA must have filled the memory first: nothing orders XLA's streams before those that are used here.
                memory = jax.device_put(jnp.zeros(num_bytes, jnp.uint8), self.devices[rank]).block_until_ready()
                slots[kind, rank] = _Slot(memory, self.driver.make_event(), self.driver.make_event())

    def remove(self, kind: str) -> None:
        for slots in (self._up, self._down):
            for key in [key for key in slots if key[0] == kind]:
                slot, gpu = slots.pop(key), self._gpus[key[1]]
                self.driver.use(gpu.context)
                for event in (slot.full, slot.empty):  # nothing may still read or fill the memory
                    self.driver.finish_event(event)
                    self.driver.destroy_event(event)

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        slot = self._up.get((kind, rank))
        if slot is None:
            return
        with slot.lock:
            # The slot holds a record that nobody has taken yet: it stays until `load` or `drop`.
            if slot.source is not None:
                return
            gpu, call = self._gpus[rank], self.driver
            call.use(gpu.context)
            with gpu.finishing(gpu.up):
                if slot.used:
                    call.wait(gpu.up, slot.empty)
                call.copy(slot.address, buffer.ctypes.data, buffer.nbytes, gpu.up)
                call.record(slot.full, gpu.up)
            # Last, so that a copy that failed is never taken for a record.
            slot.source = buffer.ctypes.data

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        slot = self._up.get((kind, rank))
        if slot is None:
            return
        with slot.lock:
            if slot.source == buffer.ctypes.data:
                self.driver.use(self._gpus[rank].context)
                self.driver.finish_event(slot.full)
                slot.source = None

    def load(self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]) -> None:
        call, stream = self.driver, stream_of(context)
        call.use(self._gpus[rank].context)
        slot = self._up.get((kind, rank))
        base = views[0].ctypes.data if views else 0  # a record's first leaf lies at its start
        if slot is not None:
            with slot.lock:
                if slot.source == base:
                    call.wait(stream, slot.full)
                    for target, view in zip(out, views, strict=True):
                        call.copy(pointer(target), slot.address + view.ctypes.data - base, view.nbytes, stream)
                    call.record(slot.empty, stream)
                    slot.used = True
                    # The caller reuses the buffer when this returns. Only the copy up must be over, not what the program does.
                    call.finish_event(slot.full)
                    slot.source = None
                    return
        # The record was not lifted: copy it on the stream of the program, and wait, because the buffer is reused.
        for target, view in zip(out, views, strict=True):
            call.copy(pointer(target), view.ctypes.data, view.nbytes, stream)
        call.finish_stream(stream)

    def save(self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views) -> "Future[None] | None":
        call, stream, gpu = self.driver, stream_of(context), self._gpus[rank]
        call.use(gpu.context)
        slot = self._down.get((kind, rank))
        if slot is None:
            for value, view in zip(values, views, strict=True):
                call.copy(view.ctypes.data, pointer(value), view.nbytes, stream)
            call.finish_stream(stream)
            return None
        base = views[0].ctypes.data
        with slot.lock, gpu.finishing(gpu.down):
            if slot.used:
                call.wait(stream, slot.empty)
            for value, view in zip(values, views, strict=True):
                call.copy(slot.address + view.ctypes.data - base, pointer(value), view.nbytes, stream)
            call.record(slot.full, stream)
            call.wait(gpu.down, slot.full)
            for view in views:
                call.copy(view.ctypes.data, slot.address + view.ctypes.data - base, view.nbytes, gpu.down)
            call.record(slot.empty, gpu.down)
            slot.used = True
            # An event for this store alone: `empty` may be recorded again before the thread has waited for this copy.
            event = gpu.take_event()
            call.record(event, gpu.down)
        return gpu.future_of(event)

    def pass_on(self, context: Any, source: Any, out: Any) -> None:
        self.driver.copy(pointer(out), pointer(source), num_bytes(out), stream_of(context))

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        for target in out:
            self.driver.clear(pointer(target), num_bytes(target), stream_of(context))

    def close(self) -> None:
        for kind in {kind for kind, _ in (*self._up, *self._down)}:
            self.remove(kind)
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()


def copies_of(devices: Sequence[Any]) -> Copies:
    """Return the copies between buffers and the devices of a mesh.

    Raises:
      NotImplementedError: devices of an unknown kind, or cuda-bindings is missing.
    """
    platform = devices[0].platform
    if platform == "cpu":
        return HostCopies()
    if platform in ("gpu", "cuda"):
        return GpuCopies(devices, driver())
    raise NotImplementedError(f"the nvme tier moves buffers of cpu and cuda devices, and these are {platform}'s")
