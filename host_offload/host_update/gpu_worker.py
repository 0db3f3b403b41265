"""What an update on the host moves to and from one GPU beside its program, and the thread that runs
the kernels.

Leaves that are updated together are a **part**: the leaves of a layer, of one stack, or those that
  are no stack of layers. Of a
stack one layer after the other crosses, while the program goes on:

    down   gradients --program's stream--> slot --down stream--> buffer    queued by the callback that hands them over
           kernels, in the buffer                                        by the worker, when they are there
    up     new parameters --up stream--> slot                              queued by the worker
           slot --program's stream--> results                            queued by the callback `LAG` layers later

    event          recorded after     waited for by
    full           the program wrote  the down stream, before it reads the slot
    arrived[n]     the copy down      the worker, before its kernels; the program's stream, before it fills the slot again
    sent[n]        the copy up        the program's stream, before it reads the slot; the worker, before it fills the room again
    empty[n]       the program read   the up stream, before it fills the slot again

No callback waits for the GPU. Where the results of a layer are asked for, the callback waits for
the worker, which may wait for gradients that were queued `LAG` layers before, and never for a
callback: there are `LAG` rooms and slots up, and a job is submitted when the one before it in its
slot was taken. An event is recorded before it is waited for: by the callback itself, by one before
it, or by the worker before its job is done.

The other leaves cross once in a step, when the program has little else to do, and each is a job of
its own. They need no slots: the program's stream copies them itself, down to a buffer, and up from
a room when the job is done.

Of a delayed update the worker has all jobs from the start of the step, and keeps what they make in
memory for all layers. The callback of a layer waits for its job, queues the copy up to one slot and
the copy out of it (`GpuWorker.hand_over`): callbacks come long before the program is there, so the
copy up runs beside the products of the layer's own tick.

    sent, empty    recorded by the callback; waited for by the program's stream, and by the up stream, as above
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
"""Layers between the callback that hands over gradients and the one that takes the parameters made
of them.

With one, the program goes on when the layer before is updated. The next gradients come after a
layer's products and a copy, and the kernels wait for them. Predicted for 6.7 B parameters and
16,384 tokens on an H200: 1.79 s with one, 1.69 s with two."""

_ALIGNMENT = 256
Spec = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """Leaves that are updated together, and what crosses of them; of one layer where they are
    stacked.

    Attributes:
      leaves: their indices.
      grads: of each leaf; nothing where the gradients are in host memory.
      weights: of each leaf, where they rest on the device.
      params: of each leaf, where they rest on the device; of a delayed update those of a layer,
        which cross by a slot.
      num_scalars: of the vector of all scalars.
      stacked: whether they are stacks of layers.
      stashes: the gradients only go down to host memory, where they wait.
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
        """Of what goes down: what the callback is told, scalars, gradients and weights; of a stash
        gradients alone.
        """
        if self.stashes:
            return Packing(self.grads)
        told = [((4,), np.dtype(np.int32)), ((self.num_scalars,), np.dtype(np.float32))]
        return Packing([*told, *self.grads, *self.weights])

    @property
    def up(self) -> "Packing":
        """Of what goes up."""
        return Packing(self.params)

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory that the slots take."""
        return (self.down.num_bytes + self.num_slots_up * self.up.num_bytes) if self.stacked else 0

    @property
    def num_slots_up(self) -> int:
        """Slots through which new parameters go up."""
        return 0 if not (self.stacked and self.params) else 1 if self.stashes else LAG

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory that buffers and rooms take."""
        buffers, rooms = (0, 0) if self.stashes else (LAG + 1, LAG) if self.stacked else (1, 1)
        return buffers * self.down.num_bytes + rooms * self.up.num_bytes


class Packing:
    """Arrays one after the other in memory.

    Attributes:
      specs: of the arrays.
      starts: of each, in bytes.
      sizes: of each, in bytes.
      num_bytes: of all.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs, self.starts, self.num_bytes = tuple(specs), list[int](), 0
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        for size in self.sizes:
            self.starts.append(self.num_bytes)
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: np.ndarray) -> list[np.ndarray]:
        """Return the arrays in uint8[num_bytes]."""
        places = zip(self.specs, self.starts, self.sizes, strict=True)
        return [
            memory[at : at + size].view(dtype).reshape(shape) for (shape, dtype), at, size in places
        ]


@dataclasses.dataclass(eq=False)
class Job:
    """Leaves of one part whose gradients are on their way down, or have come.

    Attributes:
      part: of which they are.
      leaves: their indices.
      buffer: number of the buffer to which they go.
      room: number of the room for the new parameters.
      arrived: event, they are there.
      failed: they could not be sent: there is nothing to do.
      made: new parameters are in the room, and if they cross by a slot, on their way to it.
      work: what the worker does in the place of kernels.
      failure: is told why that was not done.
      done: the worker has done with it.
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
        """Wait until the worker has done with it."""
        self.done.wait()


class Part:
    """Memory and events of one part on one GPU. Callbacks and the worker use it."""

    def __init__(self, spec: PartSpec, driver: Driver, device: Any) -> None:
        self.spec, self.driver, self.down, self.up = spec, driver, spec.down, spec.up
        by_slots, self._memory = spec.stacked, list[np.ndarray]()
        num_buffers = 0 if spec.stashes else LAG + 1 if by_slots else 1
        self.buffers = [self.down.views(self._host(self.down)) for _ in range(num_buffers)]
        num_rooms = 0 if spec.stashes or not spec.params else LAG if by_slots else 1
        self.rooms = [self.up.views(self._host(self.up)) for _ in range(num_rooms)]
        self.slot_down = self._slot(self.down, device) if by_slots else None
        self.slots_up = [self._slot(self.up, device) for _ in range(spec.num_slots_up)]
        self.full = driver.make_event()
        num_events = 1 if spec.stashes else num_buffers if by_slots else max(1, len(spec.leaves))
        self.arrived = [driver.make_event() for _ in range(num_events)]
        self.sent, self.empty = ([driver.make_event() for _ in self.slots_up] for _ in range(2))
        self.reset()

    def _host(self, packing: Packing) -> np.ndarray:
        memory = allocate(packing.num_bytes)
        self.driver.register(memory)
        self._memory.append(memory)
        return memory

    def _slot(self, packing: Packing, device: Any) -> jax.Array:
        # XLA must have filled the memory first: nothing orders XLA's streams before those that are
        # used here.
        return jax.device_put(jnp.zeros(packing.num_bytes, jnp.uint8), device).block_until_ready()

    def reset(self) -> None:
        """Expect a step, from its first callback on."""
        self.count = 0  # hand-overs
        self.updated = set[
            tuple[int, int]
        ]()  # in this step, by first leaf and layer: none is updated twice
        # Where results lag, the first ones have none.
        self.waiting: collections.deque[Job | None] = collections.deque(
            [None] * LAG if self.spec.stacked else []
        )

    def close(self) -> None:
        for event in (self.full, *self.arrived, *self.sent, *self.empty):
            self.driver.destroy_event(event)
        for memory in self._memory:
            self.driver.unregister(memory)


class GpuWorker:
    """Streams of one GPU, its parts, and the thread that runs kernels on what has come down.

    Attributes:
      context: of the driver.
      parts: by the index of their first leaf.
      stashes: those of gradients that wait in host memory.
    """

    def __init__(
        self,
        driver: Driver,
        device: Any,
        rank: int,
        specs: Sequence[PartSpec],
        run: Callable[[int, Job], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Start the thread.

        Args:
          driver: of this machine.
          device: of jax.
          rank: its position in the mesh.
          specs: of its parts.
          run: (rank, job) -> whether it updated; runs the kernels of a job, whose gradients have
            come.
          fail: is told the worker's errors.
        """
        self.driver, self.rank, self._run, self._fail = driver, rank, run, fail
        self.context = driver.context_of(device.local_hardware_id or 0)
        # Streams and events belong to the context that is current in the thread that makes them.
        driver.use(self.context)
        # One stream for each direction: the link carries both at once, but a stream runs its copies
        # one by one.
        self.up, self.down = driver.make_stream(), driver.make_stream()
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
        """Queue the copies down of what a callback was handed; returns its jobs, which `submit`
        takes, and an error.

        Args:
          stream: of the program.
          part: of which they are.
          told: buffers, in the order of `PartSpec.down`.
        """
        spec, number, error = part.spec, part.count, None
        part.count += 1
        if spec.stacked:
            i, j = number % len(part.buffers), number % max(len(part.rooms), 1)
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
        except BaseException as raised:  # whoever waits for the jobs must go on
            error = raised
            for job in jobs:
                job.failed = True
        return jobs, error

    def _bring_by_slot(
        self, stream: int, part: Part, told: Sequence[Any], job: Job, number: int
    ) -> None:
        call, memory = self.driver, part.slot_down
        assert memory is not None
        slot, buffer = memory.unsafe_buffer_pointer(), part.buffers[job.buffer]
        if number:
            call.wait(stream, part.arrived[(number - 1) % len(part.buffers)])
        for source, start, size in zip(told, part.down.starts, part.down.sizes, strict=True):
            call.copy(slot + start, pointer(source), size, stream)
        call.record(part.full, stream)
        call.wait(self.down, part.full)
        call.copy(buffer[0].ctypes.data, slot, part.down.num_bytes, self.down)
        call.record(job.arrived, self.down)

    def _bring_leaves(self, stream: int, part: Part, told: Sequence[Any]) -> None:
        targets, num = part.buffers[0], len(part.spec.leaves)

        def bring(n: int) -> None:
            self.driver.copy(targets[n].ctypes.data, pointer(told[n]), part.down.sizes[n], stream)

        bring(0)
        bring(1)
        for leaf, event in enumerate(part.arrived):
            for n in range(2 + leaf, len(told), num):  # its gradient and its weight
                bring(n)
            self.driver.record(event, stream)

    def take(self, stream: int, part: Part, results: Sequence[Any]) -> int:
        """Wait for the worker to have done the oldest jobs, and queue copies of what they made;
        returns the bytes copied.

        Args:
          stream: of the program.
          part: of which they are.
          results: buffers for the new parameters of a part.
        """
        call, num_bytes = self.driver, 0
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
        """Queue the copies of gradients down to where they wait; returns the event that they are
        there.
        """
        call, (arrived,) = self.driver, part.arrived
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
        """Queue copies of what a delayed update made: beside the program up to the slot, and then
        on its stream to `results`.

        Leaves that are no stack of layers have no slot.
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
        """Queue the copies down of scalars, and submit jobs that do `works`, one after the other,
        when they are there.
        """
        call, (buffer,), (arrived,) = self.driver, part.buffers, part.arrived
        call.use(self.context)
        for target, source, size in zip(buffer, told, part.down.sizes, strict=True):
            call.copy(target.ctypes.data, pointer(source), size, stream)
        call.record(arrived, stream)
        jobs = [Job(None, range(0), 0, 0, arrived, work=work) for work in works]
        self.submit(jobs)
        return jobs

    def future_of(self, event: int) -> "Future[None]":
        """Return a future that is done when an event has happened; if it is recorded again
        meanwhile, the later one.
        """
        done: Future[None] = Future()

        def work() -> bool:
            done.set_result(None)
            return False

        self.submit([Job(None, range(0), 0, 0, event, work=work, failure=done.set_exception)])
        return done

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let the worker do jobs."""
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
            except BaseException as error:  # the thread must go on
                self._fail(error)
                if job.failure is not None:
                    job.failure(error)
            finally:
                job.done.set()

    def _do(self, job: Job) -> None:
        call, part = self.driver, job.part
        call.finish_event(job.arrived)
        if job.work is not None or part is None:
            job.made = job.work is not None and job.work()
            return
        if part.slots_up:
            call.finish_event(part.sent[job.room])  # the last copy from this room
        made = self._run(self.rank, job)
        if made and part.slots_up:
            slot, room = part.slots_up[job.room].unsafe_buffer_pointer(), part.rooms[job.room]
            call.wait(self.up, part.empty[job.room])
            call.copy(slot, room[0].ctypes.data, part.up.num_bytes, self.up)
            call.record(part.sent[job.room], self.up)
        job.made = made

    # --- around a step ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Expect a step. What a step that was given up has left is done first."""
        idle = threading.Event()
        self._jobs.put(idle)
        idle.wait()
        # What is stashed by the end of a step may still be on its way.
        self.driver.use(self.context)
        for stream in (self.down, self.up):
            self.driver.finish_stream(stream)
        for part in (*self.parts.values(), *self.stashes.values()):
            part.reset()

    def close(self) -> None:
        """Let the worker do what it has, and free memory, streams and thread."""
        self.reset()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.driver.use(self.context)
        for stream in (self.up, self.down):
            self.driver.destroy_stream(stream)
        for part in (*self.parts.values(), *self.stashes.values()):
            part.close()
