"""Copies of a host update to and from one GPU, and the thread that runs the kernels.

Leaves that are updated together form a **part**: either one stack's leaves of a layer, or the
unstacked leaves. A stack's layers cross the link one after the other, while the program runs:

    down   gradients --program's stream--> slot
           slot --down stream--> buffer                   both queued by the callback that hands the
                                                          gradients over
           kernels, in the buffer                         run by the worker when they have arrived
    up     new parameters --up stream--> slot             queued by the worker
           slot --program's stream--> results             queued by the callback `LAG` layers later

    event        recorded after       waited for by
    full         the program's write  the down stream, before it reads the slot
    arrived[n]   the copy down        the worker, before its kernels; the program's stream, before
                                      it fills the slot again
    sent[n]      the copy up          the program's stream, before it reads the slot; the worker,
                                      before it fills the room again
    empty[n]     the program's read   the up stream, before it fills the slot again

A **room** is host memory for the new parameters of one layer. No callback waits for the GPU. When a
callback needs the results of a layer, it waits for the worker. The worker may wait for gradients
that were queued `LAG` layers earlier, but never for a callback: there are `LAG` rooms and slots up,
and a job is submitted only after the previous job in its slot was taken. An event is recorded
before it is waited for: by the same callback, by an earlier callback, or by the worker before its
job is done.

The unstacked leaves cross once per step, when the program has little else to do, and each is a
separate job. They need no slots: the program's stream copies them itself, down to a buffer, and up
from a room when the job is done.

In a delayed update, the worker gets all jobs at the start of the step, and keeps their results in
memory for all layers. The callback of a layer waits for its job, then queues the copy up to a slot
and the copy out of the slot (`GpuWorker.hand_over`). Callbacks run long before the program reaches
them, so the copy up overlaps with the matrix products of the layer's own tick. In this case the
callback records both `sent` and `empty`; the program's stream waits for `sent` and the up stream
for `empty`, as in the table.
"""

import collections
import dataclasses
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.device import Driver, allocate, pointer

LAG = 2
"""Number of layers between handing over gradients and taking the new parameters made from them.

With LAG = 1 the program continues only when the previous layer is updated. The next gradients then
arrive after a layer's matrix products and a copy, and the kernels have to wait for them. Predicted
step time for 6.7 B parameters and 16,384 tokens on an H200: 1.79 s with 1, 1.69 s with 2.
"""

_ALIGNMENT = 256
Spec = tuple[tuple[int, ...], np.dtype]
"""(shape, dtype) of an array."""


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Leaves that are updated together, and their arrays that cross the link.

    If the leaves are stacked, all specs are for one layer.

    Attributes:
      leaves: indices of the leaves.
      grads: gradient of each leaf; empty if the gradients are in host memory.
      weights: master weight of each leaf; empty if the weights are not stored on the device.
      params: parameters of each leaf; empty if the parameters are not stored on the device. In a
        delayed update, the parameters of one layer, which cross through a slot.
      num_scalars: length of the vector of all leaves' scalars.
      stacked: whether the leaves are stacks of layers.
      stashes: whether the gradients are only copied to host memory, to be used later.
    """

    leaves: range
    grads: tuple[Spec, ...]
    weights: tuple[Spec, ...]
    params: tuple[Spec, ...]
    num_scalars: int
    stacked: bool
    stashes: bool = False

    @property
    def down(self) -> "Packing":
        """Packing of the arrays that are copied to the host.

        They are the callback's i32[4], the scalars, the gradients and the weights; for a stash,
        only the gradients.
        """
        if self.stashes:
            return Packing(self.grads)
        told = [((4,), np.dtype(np.int32)), ((self.num_scalars,), np.dtype(np.float32))]
        return Packing([*told, *self.grads, *self.weights])

    @property
    def up(self) -> "Packing":
        """Packing of the new parameters, which are copied to the device."""
        return Packing(self.params)

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory per device for the slots."""
        return (self.down.num_bytes + self.num_slots_up * self.up.num_bytes) if self.stacked else 0

    @property
    def num_slots_up(self) -> int:
        """Number of slots through which new parameters are copied to the device."""
        if not (self.stacked and self.params):
            return 0
        return 1 if self.stashes else LAG

    @property
    def num_buffers(self) -> int:
        """Number of buffers in host memory that receive what the device sends."""
        if self.stashes:
            return 0
        return LAG + 1 if self.stacked else 1

    @property
    def num_rooms(self) -> int:
        """Number of rooms in host memory for new parameters on their way to the device."""
        if self.stashes or not self.params:
            return 0
        return LAG if self.stacked else 1

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory per device for buffers and rooms."""
        return self.num_buffers * self.down.num_bytes + self.num_rooms * self.up.num_bytes


class Packing:
    """A layout of arrays, one after the other in memory.

    Attributes:
      specs: shape and dtype of each array.
      starts: offset of each array, in bytes.
      sizes: bytes of each array, without padding.
      num_bytes: bytes of the full layout, padding included.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        """Compute the layout of arrays, given as (shape, dtype)."""
        self.specs = tuple(specs)
        self.starts = list[int]()
        self.num_bytes = 0
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        for size in self.sizes:
            self.starts.append(self.num_bytes)
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: np.ndarray) -> list[np.ndarray]:
        """Return views of the arrays in memory, uint8[num_bytes]."""
        places = zip(self.specs, self.starts, self.sizes, strict=True)
        return [
            memory[at : at + size].view(dtype).reshape(shape) for (shape, dtype), at, size in places
        ]


@dataclasses.dataclass(eq=False)
class Job:
    """A job of the worker: to update leaves whose gradients are in flight or have arrived.

    Attributes:
      part: part of the leaves; None for a job with `work`.
      leaves: indices of the leaves.
      buffer: index of the buffer to which the gradients are copied.
      room: index of the room for the new parameters.
      arrived: event that the gradients have arrived.
      failed: whether queueing the copies failed, so that there is nothing to do.
      made: whether new parameters are in the room, and, if they cross through a slot, in flight to
        it.
      work: function to call instead of running kernels; returns whether it updated.
      failure: function that receives the error if the job fails.
      done: event, set when the worker has finished the job.
    """

    part: "Part | None"
    leaves: range
    buffer: int
    room: int
    arrived: int
    failed: bool = False
    made: bool = False
    work: Callable[[], bool] | None = None
    failure: Callable[[BaseException], None] | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def finish(self) -> None:
        """Wait until the worker has finished this job."""
        self.done.wait()


class Part:
    """Memory and events of one part on one GPU, used by callbacks and by the worker."""

    def __init__(self, spec: LeafGroup, driver: Driver, device: Any) -> None:
        """Allocate a part's memory and events on a GPU."""
        self.spec = spec
        self.driver = driver
        self.down = spec.down
        self.up = spec.up
        by_slots = spec.stacked
        self._memory = list[np.ndarray]()
        self.buffers = [self.down.views(self._host(self.down)) for _ in range(spec.num_buffers)]
        self.rooms = [self.up.views(self._host(self.up)) for _ in range(spec.num_rooms)]
        self.slot_down = self._slot(self.down, device) if by_slots else None
        self.slots_up = [self._slot(self.up, device) for _ in range(spec.num_slots_up)]
        self.full = driver.make_event()
        num_events = spec.num_buffers if by_slots else max(1, len(spec.leaves))
        if spec.stashes:
            num_events = 1
        self.arrived = [driver.make_event() for _ in range(num_events)]
        self.sent, self.empty = ([driver.make_event() for _ in self.slots_up] for _ in range(2))
        self.reset()

    def _host(self, packing: Packing) -> np.ndarray:
        memory = allocate(packing.num_bytes)
        self.driver.register(memory)
        self._memory.append(memory)
        return memory

    def _slot(self, packing: Packing, device: Any) -> jax.Array:
        # Wait until XLA has filled the memory: nothing orders XLA's streams before the streams used
        # here.
        return jax.device_put(jnp.zeros(packing.num_bytes, jnp.uint8), device).block_until_ready()

    def reset(self) -> None:
        """Prepare for the first callback of a step."""
        self.count = 0  # number of times that a callback handed over gradients
        # (first leaf, layer) of the records updated in this step: none may be updated twice.
        self.updated = set[tuple[int, int]]()
        # Results lag by `LAG` calls, so the first calls have no results to take.
        self.waiting: collections.deque[Job | None] = collections.deque(
            [None] * LAG if self.spec.stacked else []
        )

    def close(self) -> None:
        """Destroy the events and unregister the host memory."""
        for event in (self.full, *self.arrived, *self.sent, *self.empty):
            self.driver.destroy_event(event)
        for memory in self._memory:
            self.driver.unregister(memory)


class GpuWorker:
    """The streams and parts of one GPU, and the thread that runs kernels on arrived gradients.

    Attributes:
      driver: CUDA driver of this machine.
      rank: position of the GPU in the mesh.
      context: primary CUDA context of the GPU.
      up: stream for copies to the GPU.
      down: stream for copies from the GPU.
      parts: parts that are updated, by the index of their first leaf.
      stashes: parts whose gradients are stashed in host memory, by the index of their first leaf.
    """

    def __init__(
        self,
        driver: Driver,
        device: Any,
        rank: int,
        specs: Sequence[LeafGroup],
        run: Callable[[int, Job], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Allocate streams and memory, and start the thread.

        Args:
          driver: CUDA driver of this machine.
          device: jax.Device of the GPU.
          rank: position of the GPU in the mesh.
          specs: specs of its parts.
          run: function (rank, job) -> whether it updated, which runs the kernels of a job whose
            gradients have arrived.
          fail: function that receives the worker's errors.
        """
        self.driver = driver
        self.rank = rank
        self._run = run
        self._fail = fail
        self.context = driver.retain_context(device.local_hardware_id or 0)
        # Streams and events belong to the context that is current in the thread that creates them.
        driver.use(self.context)
        # One stream per direction: the link carries both directions at the same time, but a stream
        # runs its copies one by one.
        self.up = driver.make_stream()
        self.down = driver.make_stream()
        parts = [Part(spec, driver, device) for spec in specs]
        self.parts = {part.spec.leaves.start: part for part in parts if not part.spec.stashes}
        self.stashes = {part.spec.leaves.start: part for part in parts if part.spec.stashes}
        self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"zerojax-update-{rank}", daemon=True
        )
        self._thread.start()

    # --- in callbacks -----------------------------------------------------------------------------

    def bring(
        self, stream: int, part: Part, told: Sequence[Any]
    ) -> tuple[list[Job], BaseException | None]:
        """Queue copies of a callback's operands to the host.

        Args:
          stream: stream of the program.
          part: part of the leaves.
          told: buffers of the operands, in the order of `LeafGroup.down`.

        Returns:
          The jobs to pass to `submit`, and the error if the copies could not be queued, else None.
        """
        spec = part.spec
        number = part.count
        error = None
        part.count += 1
        if spec.stacked:
            i = number % len(part.buffers)
            j = number % max(len(part.rooms), 1)
            jobs = [Job(part, spec.leaves, i, j, part.arrived[i])]
        else:
            jobs = [
                Job(part, range(leaf, leaf + 1), 0, 0, event)
                for leaf, event in zip(spec.leaves, part.arrived, strict=True)
            ]
        try:
            self.driver.use(self.context)
            if spec.stacked:
                self._bring_by_slot(stream, part, told, jobs[0], number)
            else:
                self._bring_leaves(stream, part, told)
        except BaseException as raised:  # waiters must not hang: the jobs are submitted as failed
            error = raised
            for job in jobs:
                job.failed = True
        return jobs, error

    def _bring_by_slot(
        self, stream: int, part: Part, told: Sequence[Any], job: Job, number: int
    ) -> None:
        call = self.driver
        memory = part.slot_down
        assert memory is not None
        slot = memory.unsafe_buffer_pointer()
        buffer = part.buffers[job.buffer]
        if number:
            call.wait(stream, part.arrived[(number - 1) % len(part.buffers)])
        for source, start, size in zip(told, part.down.starts, part.down.sizes, strict=True):
            call.copy(slot + start, pointer(source), size, stream)
        call.record(part.full, stream)
        call.wait(self.down, part.full)
        call.copy(buffer[0].ctypes.data, slot, part.down.num_bytes, self.down)
        call.record(job.arrived, self.down)

    def _bring_leaves(self, stream: int, part: Part, told: Sequence[Any]) -> None:
        targets = part.buffers[0]
        num = len(part.spec.leaves)

        def bring(n: int) -> None:
            self.driver.copy(targets[n].ctypes.data, pointer(told[n]), part.down.sizes[n], stream)

        bring(0)
        bring(1)
        for leaf, event in enumerate(part.arrived):
            for n in range(2 + leaf, len(told), num):  # the leaf's gradient and weight
                bring(n)
            self.driver.record(event, stream)

    def take(self, stream: int, part: Part, results: Sequence[Any]) -> int:
        """Wait for the oldest job, and queue copies of its results to the device.

        If the part's leaves are unstacked, all of its jobs are waited for.

        Args:
          stream: stream of the program.
          part: part of the leaves.
          results: device buffers for the part's new parameters.

        Returns:
          The number of bytes that the queued copies move.
        """
        call = self.driver
        num_bytes = 0
        call.use(self.context)
        for n in range(1 if part.spec.stacked else len(part.waiting)):
            job = part.waiting.popleft()
            if job is None:
                continue
            job.finish()
            if not job.made:  # there was no update, or it failed
                continue
            if part.slots_up:
                slot = part.slots_up[job.room].unsafe_buffer_pointer()
                call.wait(stream, part.sent[job.room])
                for result, start, size in zip(results, part.up.starts, part.up.sizes, strict=True):
                    call.copy(pointer(result), slot + start, size, stream)
                    num_bytes += size
                call.record(part.empty[job.room], stream)
            elif results:
                call.copy(
                    pointer(results[n]), part.rooms[0][n].ctypes.data, part.up.sizes[n], stream
                )
                num_bytes += part.up.sizes[n]
        return num_bytes

    def stash(
        self, stream: int, part: Part, grads: Sequence[Any], targets: Sequence[np.ndarray]
    ) -> int:
        """Queue copies of gradients to host memory, where they are stashed.

        Args:
          stream: stream of the program.
          part: part of the leaves.
          grads: device buffers of the gradients.
          targets: host memory for each gradient.

        Returns:
          The event that the gradients have arrived.
        """
        call = self.driver
        (arrived,) = part.arrived
        call.use(self.context)
        if part.slot_down is None:
            for grad, target, size in zip(grads, targets, part.down.sizes, strict=True):
                call.copy(target.ctypes.data, pointer(grad), size, stream)
            call.record(arrived, stream)
            return arrived
        slot = part.slot_down.unsafe_buffer_pointer()
        if part.count:
            call.wait(stream, arrived)
        part.count += 1
        for grad, start, size in zip(grads, part.down.starts, part.down.sizes, strict=True):
            call.copy(slot + start, pointer(grad), size, stream)
        call.record(part.full, stream)
        call.wait(self.down, part.full)
        for target, start, size in zip(targets, part.down.starts, part.down.sizes, strict=True):
            call.copy(target.ctypes.data, slot + start, size, self.down)
        call.record(arrived, self.down)
        return arrived

    def hand_over(
        self, stream: int, part: Part, made: Sequence[np.ndarray], results: Sequence[Any]
    ) -> None:
        """Queue copies of a delayed update's results to the device.

        The copy up to the slot overlaps with the program; the program's stream then copies the slot
        to `results`. Unstacked leaves have no slot, and are copied on the program's stream only.

        Args:
          stream: stream of the program.
          part: part of the leaves.
          made: new parameters in host memory, one array per leaf.
          results: device buffers for the new parameters.
        """
        call = self.driver
        call.use(self.context)
        if not part.slots_up:
            for source, result in zip(made, results, strict=True):
                call.copy(pointer(result), source.ctypes.data, source.nbytes, stream)
            return
        slot, (sent,), (empty,) = part.slots_up[0].unsafe_buffer_pointer(), part.sent, part.empty
        call.wait(self.up, empty)
        for source, start in zip(made, part.up.starts, strict=True):
            call.copy(slot + start, source.ctypes.data, source.nbytes, self.up)
        call.record(sent, self.up)
        call.wait(stream, sent)
        for result, start, size in zip(results, part.up.starts, part.up.sizes, strict=True):
            call.copy(pointer(result), slot + start, size, stream)
        call.record(empty, stream)

    def start(
        self, stream: int, part: Part, told: Sequence[Any], works: Sequence[Callable[[], bool]]
    ) -> list[Job]:
        """Queue copies of scalars to the host, and submit jobs that use them.

        Args:
          stream: stream of the program.
          part: part whose buffer receives the scalars.
          told: device buffers of the callback's i32[4] and of the scalars.
          works: functions that the worker calls, one after the other, when the scalars have
            arrived. Each returns whether it updated.

        Returns:
          One job per function.
        """
        call, (buffer,), (arrived,) = self.driver, part.buffers, part.arrived
        call.use(self.context)
        for target, source, size in zip(buffer, told, part.down.sizes, strict=True):
            call.copy(target.ctypes.data, pointer(source), size, stream)
        call.record(arrived, stream)
        jobs = [Job(None, range(0), 0, 0, arrived, work=work) for work in works]
        self.submit(jobs)
        return jobs

    def track_event(self, event: int) -> "Future[None]":
        """Return a future that is done when an event has happened.

        If the event is recorded again before the worker waits for it, the later record counts.
        """
        done: Future[None] = Future()

        def work() -> bool:
            done.set_result(None)
            return False

        self.submit([Job(None, range(0), 0, 0, event, work=work, failure=done.set_exception)])
        return done

    def submit(self, jobs: Sequence[Job]) -> None:
        """Append jobs to the worker's queue."""
        for job in jobs:
            self._jobs.put(job)

    # --- in the worker ----------------------------------------------------------------------------

    def _work(self) -> None:
        # A current context is a property of a thread, so this one sets its own.
        self.driver.use(self.context)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                if not job.failed:
                    self._do(job)
            except BaseException as error:  # the thread must survive
                self._fail(error)
                if job.failure is not None:
                    job.failure(error)
            finally:
                job.done.set()

    def _do(self, job: Job) -> None:
        call = self.driver
        part = job.part
        call.finish_event(job.arrived)
        if job.work is not None or part is None:
            job.made = job.work is not None and job.work()
            return
        if part.slots_up:
            call.finish_event(part.sent[job.room])  # the previous copy from this room
        made = self._run(self.rank, job)
        if made and part.slots_up:
            slot = part.slots_up[job.room].unsafe_buffer_pointer()
            room = part.rooms[job.room]
            call.wait(self.up, part.empty[job.room])
            call.copy(slot, room[0].ctypes.data, part.up.num_bytes, self.up)
            call.record(part.sent[job.room], self.up)
        job.made = made

    # --- around a step ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Prepare for a step, after finishing all jobs and copies of an abandoned step."""
        idle = threading.Event()
        self._jobs.put(idle)
        idle.wait()
        # Gradients stashed at the end of a step may still be in flight.
        self.driver.use(self.context)
        for stream in (self.down, self.up):
            self.driver.finish_stream(stream)
        for part in (*self.parts.values(), *self.stashes.values()):
            part.reset()

    def close(self) -> None:
        """Finish all jobs, end the thread, and free memory, events and streams."""
        self.reset()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.driver.use(self.context)
        for stream in (self.up, self.down):
            self.driver.destroy_stream(stream)
        for part in (*self.parts.values(), *self.stashes.values()):
            part.close()
