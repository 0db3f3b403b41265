"""Copies of a host update to and from one GPU, and the thread that runs the kernels.

Leaves that are updated together form a **group**: either one stack's leaves of a layer, or the
unstacked leaves. A stack's layers cross the link one after the other, while the program runs:

    down   gradients --program's stream--> slot
           slot --down stream--> buffer                   both queued by the callback that hands the
                                                          gradients over
           kernels, in the buffer                         run by the worker when they have arrived
    up     new parameters --up stream--> slot             queued by the worker
           slot --program's stream--> results             queued by the callback `HOST_LAG` layers
                                                          later

    event        recorded after       waited for by
    full         the program's write  the down stream, before it reads the slot
    arrived[n]   the copy down        the worker, before its kernels; the program's stream, before
                                      it fills the slot again
    sent[n]      the copy up          the program's stream, before it reads the slot; the worker,
                                      before it fills the room again
    empty[n]     the program's read   the up stream, before it fills the slot again

A **room** is host memory for the new parameters of one layer. No callback waits for the GPU. When a
callback needs the results of a layer, it waits for the worker. The worker may wait for gradients
that were queued `HOST_LAG` layers earlier, but never for a callback: there are `HOST_LAG` rooms and
slots up, and a job is submitted only after the previous job in its slot was taken. An event is
recorded before it is waited for: by the same callback, by an earlier callback, or by the worker
before its job is done.

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

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from host_offload.device import Driver, pointer
from host_offload.host_update.group_memory import GroupMemory, Job, LeafGroup, Packing


class GpuWorker:
    """The streams and groups of one GPU, and the thread that runs kernels on arrived gradients.

    Attributes:
      driver: CUDA driver of this machine.
      rank: position of the GPU in the mesh.
      context: primary CUDA context of the GPU.
      up: stream for copies to the GPU.
      down: stream for copies from the GPU.
      groups: groups that are updated, by the index of their first leaf.
      stashes: groups whose gradients are stashed in host memory, by the index of their first leaf.
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
          device: Any of the GPU.
          rank: position of the GPU in the mesh.
          specs: specs of its groups.
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
        groups = [GroupMemory(spec, driver, device) for spec in specs]
        self.groups = {group.spec.leaves.start: group for group in groups if not group.spec.stashes}
        self.stashes = {group.spec.leaves.start: group for group in groups if group.spec.stashes}
        self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"zerojax-update-{rank}", daemon=True
        )
        self._thread.start()

    # --- in callbacks -----------------------------------------------------------------------------

    def queue_down(
        self, stream: int, group: GroupMemory, operands: Sequence[Any]
    ) -> tuple[list[Job], BaseException | None]:
        """Queue copies of a callback's operands to the host.

        Args:
          stream: stream of the program.
          group: group of the leaves.
          operands: buffers of the operands, in the order of `LeafGroup.down`.

        Returns:
          The jobs to pass to `submit`, and the error if the copies could not be queued, else None.
        """
        spec = group.spec
        number = group.count
        error = None
        group.count += 1
        if spec.stacked:
            buffer = number % len(group.buffers)
            room = number % max(len(group.rooms), 1)
            jobs = [Job(group, spec.leaves, buffer, room, group.arrived[buffer])]
        else:
            jobs = [
                Job(group, range(leaf, leaf + 1), 0, 0, event)
                for leaf, event in zip(spec.leaves, group.arrived, strict=True)
            ]
        try:
            self.driver.use(self.context)
            if spec.stacked:
                self._queue_layer_down(stream, group, operands, jobs[0], number)
            else:
                self._queue_leaves_down(stream, group, operands)
        except BaseException as raised:  # waiters must not hang: the jobs are submitted as failed
            error = raised
            for job in jobs:
                job.failed = True
        return jobs, error

    def _queue_layer_down(
        self, stream: int, group: GroupMemory, operands: Sequence[Any], job: Job, number: int
    ) -> None:
        """Queue copies of a layer's operands to the slot, and of the slot to the job's buffer."""
        driver = self.driver
        assert group.slot_down is not None
        slot = group.slot_down.unsafe_buffer_pointer()
        buffer = group.buffers[job.buffer]
        if number:
            driver.wait(stream, group.arrived[(number - 1) % len(group.buffers)])
        self._fill_slot(stream, slot, group.down, operands)
        driver.record(group.full, stream)
        driver.wait(self.down, group.full)
        driver.copy(buffer[0].ctypes.data, slot, group.down.num_bytes, self.down)
        driver.record(job.arrived, self.down)

    def _fill_slot(self, stream: int, slot: int, packing: Packing, sources: Sequence[Any]) -> None:
        """Queue copies of device buffers to their places in a slot."""
        for source, (start, num_bytes) in zip(sources, packing.spans, strict=True):
            self.driver.copy(slot + start, pointer(source), num_bytes, stream)

    def _read_slot(self, stream: int, slot: int, packing: Packing, targets: Sequence[Any]) -> None:
        """Queue copies of the arrays in a slot to device buffers."""
        for target, (start, num_bytes) in zip(targets, packing.spans, strict=True):
            self.driver.copy(pointer(target), slot + start, num_bytes, stream)

    def _queue_leaves_down(self, stream: int, group: GroupMemory, operands: Sequence[Any]) -> None:
        """Queue copies of unstacked leaves' operands, leaf by leaf, each with its own event."""
        targets = group.buffers[0]
        num_leaves = len(group.spec.leaves)

        def copy(n: int) -> None:
            target = targets[n]
            self.driver.copy(target.ctypes.data, pointer(operands[n]), target.nbytes, stream)

        copy(0)
        copy(1)
        for leaf, event in enumerate(group.arrived):
            for n in range(2 + leaf, len(operands), num_leaves):  # the leaf's gradient and weight
                copy(n)
            self.driver.record(event, stream)

    def take(self, stream: int, group: GroupMemory, results: Sequence[Any]) -> int:
        """Wait for the oldest job, and queue copies of its results to the device.

        If the group's leaves are unstacked, all of its jobs are waited for.

        Args:
          stream: stream of the program.
          group: group of the leaves.
          results: device buffers for the group's new parameters.

        Returns:
          The number of bytes that the queued copies move.
        """
        driver = self.driver
        num_bytes = 0
        driver.use(self.context)
        for n in range(1 if group.spec.stacked else len(group.waiting)):
            job = group.waiting.popleft()
            if job is None:
                continue
            job.finish()
            if not job.has_updated:  # there was no update, or it failed
                continue
            if group.slots_up:
                slot = group.slots_up[job.room].unsafe_buffer_pointer()
                driver.wait(stream, group.sent[job.room])
                self._read_slot(stream, slot, group.up, results)
                num_bytes += sum(span.num_bytes for span in group.up.spans)
                driver.record(group.empty[job.room], stream)
            elif results:
                params = group.rooms[0][n]
                driver.copy(pointer(results[n]), params.ctypes.data, params.nbytes, stream)
                num_bytes += params.nbytes
        return num_bytes

    def stash(
        self, stream: int, group: GroupMemory, grads: Sequence[Any], targets: Sequence[np.ndarray]
    ) -> int:
        """Queue copies of gradients to host memory, where they are stashed.

        Args:
          stream: stream of the program.
          group: group of the leaves.
          grads: device buffers of the gradients.
          targets: host memory for each gradient.

        Returns:
          The event that the gradients have arrived.
        """
        driver = self.driver
        (arrived,) = group.arrived
        driver.use(self.context)
        if group.slot_down is None:
            for grad, target in zip(grads, targets, strict=True):
                driver.copy(target.ctypes.data, pointer(grad), target.nbytes, stream)
            driver.record(arrived, stream)
            return arrived
        slot = group.slot_down.unsafe_buffer_pointer()
        if group.count:
            driver.wait(stream, arrived)
        group.count += 1
        self._fill_slot(stream, slot, group.down, grads)
        driver.record(group.full, stream)
        driver.wait(self.down, group.full)
        for target, (start, num_bytes) in zip(targets, group.down.spans, strict=True):
            driver.copy(target.ctypes.data, slot + start, num_bytes, self.down)
        driver.record(arrived, self.down)
        return arrived

    def hand_over(
        self,
        stream: int,
        group: GroupMemory,
        params: Sequence[np.ndarray],
        results: Sequence[Any],
    ) -> None:
        """Queue copies of a delayed update's results to the device.

        The copy up to the slot overlaps with the program; the program's stream then copies the slot
        to `results`. Unstacked leaves have no slot, and are copied on the program's stream only.

        Args:
          stream: stream of the program.
          group: group of the leaves.
          params: new parameters in host memory, one array per leaf.
          results: device buffers for the new parameters.
        """
        driver = self.driver
        driver.use(self.context)
        if not group.slots_up:
            for source, result in zip(params, results, strict=True):
                driver.copy(pointer(result), source.ctypes.data, source.nbytes, stream)
            return
        slot = group.slots_up[0].unsafe_buffer_pointer()
        (sent,) = group.sent
        (empty,) = group.empty
        driver.wait(self.up, empty)
        for source, (start, num_bytes) in zip(params, group.up.spans, strict=True):
            driver.copy(slot + start, source.ctypes.data, num_bytes, self.up)
        driver.record(sent, self.up)
        driver.wait(stream, sent)
        self._read_slot(stream, slot, group.up, results)
        driver.record(empty, stream)

    def start(
        self,
        stream: int,
        group: GroupMemory,
        operands: Sequence[Any],
        works: Sequence[Callable[[], bool]],
    ) -> list[Job]:
        """Queue copies of scalars to the host, and submit jobs that use them.

        Args:
          stream: stream of the program.
          group: group whose buffer receives the scalars.
          operands: device buffers of the callback's i32[4] and of the scalars.
          works: functions that the worker calls, one after the other, when the scalars have
            arrived. Each returns whether it updated.

        Returns:
          One job per function.
        """
        driver = self.driver
        (buffer,) = group.buffers
        (arrived,) = group.arrived
        driver.use(self.context)
        for target, source in zip(buffer, operands, strict=True):
            driver.copy(target.ctypes.data, pointer(source), target.nbytes, stream)
        driver.record(arrived, stream)
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
        driver = self.driver
        group = job.group
        driver.finish_event(job.arrived)
        if job.work is not None or group is None:
            job.has_updated = job.work is not None and job.work()
            return
        if group.slots_up:
            driver.finish_event(group.sent[job.room])  # the previous copy from this room
        has_updated = self._run(self.rank, job)
        if has_updated and group.slots_up:
            slot = group.slots_up[job.room].unsafe_buffer_pointer()
            room = group.rooms[job.room]
            driver.wait(self.up, group.empty[job.room])
            driver.copy(slot, room[0].ctypes.data, group.up.num_bytes, self.up)
            driver.record(group.sent[job.room], self.up)
        job.has_updated = has_updated

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
        for group in (*self.groups.values(), *self.stashes.values()):
            group.reset()

    def close(self) -> None:
        """Finish all jobs, end the thread, and free memory, events and streams."""
        self.reset()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.driver.use(self.context)
        for stream in (self.up, self.down):
            self.driver.destroy_stream(stream)
        for group in (*self.groups.values(), *self.stashes.values()):
            group.close()
