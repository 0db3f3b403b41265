"""Host updates that overlap with a GPU's program: callbacks queue copies, a worker runs kernels.

    update(layer, scalars, g)     queue the copies down of one layer; return the new parameters of
                                  the layer `HOST_LAG` calls before
    take()                        return the new parameters of the oldest layer not taken yet
    stash(layer, g)               queue copies of gradients to host memory, where they are kept
                                  until their norm is known, or until the next step
    start(), install(layer), finish()
                                  callbacks of an update with the previous step's gradients
                                  (`host_offload.host_update.delayed`)

`host_offload.host_update.gpu_worker` implements the streams, slots and events. When a callback
runs, the program's values, such as whether to update at all, are not computed yet. They are copied
down with the gradients, and the worker reads them. So no callback waits for the program. When a
program has ended, everything is updated, because its last callbacks wait for the worker.

A callback must never raise, and a failed job counts as done too: errors are passed to
`HostLeaves.fail`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from host_offload.calls import CallbackSite
from host_offload.device import Driver, Views, find_stream, num_bytes, pointer
from host_offload.host_update.delayed import has_new_params, pending_records, update_pending
from host_offload.host_update.gpu_worker import GpuWorker
from host_offload.host_update.group_memory import GroupMemory, Job, LeafGroup
from host_offload.host_update.host_leaves import HostLeaves


class QueuedStep:
    """The callbacks of one GPU program for host updates, in the same step or delayed.

    Attributes:
      leaves: leaves that are updated on the host.
      specs: specs of the groups in which the leaves cross the link.
    """

    def __init__(
        self,
        leaves: HostLeaves,
        specs: Sequence[LeafGroup],
        devices: Sequence[Any],
        driver: Callable[[], Driver],
    ) -> None:
        """Store the devices of a mesh, without starting workers.

        Args:
          leaves: leaves that are updated on the host.
          specs: specs of the groups in which the leaves cross the link.
          devices: all devices, in the order of the mesh.
          driver: function that returns the CUDA driver of this machine; called when a step is
            prepared, not when it is compiled.
        """
        self.leaves = leaves
        self.specs = tuple(specs)
        self._devices = list(devices)
        self._driver = driver
        self._workers: dict[int, GpuWorker] = {}
        self._by_stream: dict[int, GpuWorker] = {}
        # Jobs of delayed updates, by rank, then by first leaf and layer of the record.
        self._started: dict[int, dict[tuple[int, int], Job]] = {}
        self._lock = threading.Lock()

    # --- callbacks --------------------------------------------------------------------------------

    def update(
        self,
        context: Any,
        out: Any,
        request: Any,
        after: Any,
        scalars: Any,
        *operands: Any,
        first: int,
    ) -> None:
        """Queue the update of a group of leaves; if they are stacked, of one layer.

        For a stacked group, this also queues copies of the results of the call `HOST_LAG` calls
        before.

        Args:
          context: the callback's context.
          out: (list of outputs for new parameters, output for the next token). The list is empty
            unless the group is stacked and its parameters are stored on the device.
          request: i32[4]: device, layer, whether to update at all, and the number of the state on
            disk.
          after: token of the device's previous callback.
          scalars: f32[n], scalars of all leaves.
          *operands: gradients unless they are stashed, then weights that live on the device.
          first: index of the group's first leaf.
        """
        results, token = out

        def update() -> None:
            stream = find_stream(context)
            worker = self._worker(stream)
            group = worker.groups[first]
            jobs, error = worker.queue_down(stream, group, (request, scalars, *operands))
            try:
                group.waiting.extend(jobs)
                if group.spec.stacked:
                    self.leaves.count(to_device=worker.take(stream, group, results))
            finally:
                worker.submit(jobs)
            if error is not None:
                raise error
            self.leaves.count(to_host=sum(map(num_bytes, operands)))

        self._try(update)
        self._try(lambda: self._pass_on(context, after, token))

    def take(self, context: Any, out: Any, request: Any, after: Any, *, first: int) -> None:
        """Queue copies of the results of a group's oldest update that was not taken yet.

        Args:
          context: the callback's context.
          out: (list of outputs for new parameters, output for the next token).
          request: i32[3]; not read.
          after: token of the device's previous callback.
          first: index of the group's first leaf.
        """
        del request
        results, token = out

        def take() -> None:
            stream = find_stream(context)
            worker = self._worker(stream)
            self.leaves.count(to_device=worker.take(stream, worker.groups[first], results))

        self._try(take)
        self._try(lambda: self._pass_on(context, after, token))

    def stash(
        self,
        context: Any,
        out: Any,
        request: Any,
        after: Any,
        *grads: Any,
        first: int,
        site: CallbackSite,
    ) -> None:
        """Queue copies of gradients to host memory, or to the buffer of a record on disk.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[3]: device, layer, and the number of the state on disk.
          after: token of the device's previous callback.
          *grads: gradients, one per leaf of the group.
          first: index of the group's first leaf.
          site: site of the callback.
        """

        def stash() -> None:
            rank, layer, number = site.ask(context, request)
            worker = self._workers[rank]
            stream = find_stream(context)
            leaves = self.leaves
            group = worker.stashes[first]
            on_disk = [leaves.kernels[leaf].grad for leaf in group.spec.leaves]
            records = [record for record in on_disk if record is not None]
            if records:
                assert leaves.swap is not None
                engine = leaves.swap.find_engine(number)

                def fill(views: Views) -> "Future[None]":
                    targets = [views[record.leaf] for record in records]
                    return self._stash_in_buffer(worker, stream, group, grads, targets)

                engine.store(records[0].kind, rank, layer, fill)
            else:
                targets = [
                    leaves.record(leaves.stashed[rank, leaf], leaf, layer)
                    for leaf in group.spec.leaves
                ]
                worker.stash(stream, group, grads, targets)
            leaves.count(to_host=sum(map(num_bytes, grads)))

        self._try(stash)
        self._try(lambda: self._pass_on(context, after, out))

    def _stash_in_buffer(
        self,
        worker: GpuWorker,
        stream: int,
        group: GroupMemory,
        grads: Sequence[Any],
        targets: Sequence[np.ndarray],
    ) -> "Future[None]":
        """Queue copies of gradients to the engine's buffer; return a future of their arrival."""
        try:
            event = worker.stash(stream, group, grads, targets)
        except BaseException:
            # The buffer is given back and refilled immediately, so no copy may still write into
            # it.
            with contextlib.suppress(RuntimeError):
                worker.driver.finish_stream(worker.down)
            raise
        return worker.track_event(event)

    def start(self, context: Any, out: Any, request: Any, after: Any, scalars: Any) -> None:
        """Start a delayed update of every leaf with the pending gradients.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[4]: device, whether to update at all, 0, and the number of the state on disk.
          after: token of the device's previous callback.
          scalars: f32[n], scalars of all leaves.
        """

        def start() -> None:
            stream = find_stream(context)
            worker = self._worker(stream)
            self._started.pop(worker.rank, None)
            group = worker.groups[0]
            request_values, scalar_values = group.buffers[0]

            def work(leaf_ids: range, layer: int) -> bool:
                device, go, *_ = request_values.tolist()
                _check_device(device, worker.rank)
                update_pending(self.leaves, device, leaf_ids, layer, scalar_values, bool(go))
                return bool(go)

            groups = [spec.leaves for spec in self.specs if spec.stashes]
            records = pending_records(self.leaves, worker.rank, groups)
            works = [functools.partial(work, *record) for record in records]
            jobs = worker.start(stream, group, (request, scalars), works)
            self._started[worker.rank] = {
                (leaf_ids.start, layer): job
                for (leaf_ids, layer), job in zip(records, jobs, strict=True)
            }

        self._try(start)
        self._try(lambda: self._pass_on(context, after, out))

    def install(
        self,
        context: Any,
        out: Any,
        request: Any,
        after: Any,
        *,
        first: int,
        count: int,
        site: CallbackSite,
    ) -> None:
        """Queue copies of one layer's new parameters from a delayed update to the device.

        Args:
          context: the callback's context.
          out: (list of outputs for new parameters, output for the next token).
          request: i32[3]: device, layer, and the number of the state on disk.
          after: token of the device's previous callback.
          first: index of the first leaf.
          count: number of leaves.
          site: site of the callback.
        """
        results, token = out

        def install() -> None:
            rank, layer, _ = site.ask(context, request)
            worker = self._workers[rank]
            leaves = self.leaves
            worker.driver.use(worker.context)  # XLA may call from a different thread each time
            job = self._started.get(rank, {}).get((first, layer))
            if job is None:  # `start` failed, and its error was stored
                return
            job.finish()
            if has_new_params(leaves, first, job.has_updated):
                params = [
                    leaves.record(leaves.new_params[rank, leaf], leaf, layer)
                    for leaf in range(first, first + count)
                ]
                worker.hand_over(find_stream(context), worker.stashes[first], params, results)
                leaves.count(to_device=sum(array.nbytes for array in params))

        self._try(install)
        self._try(lambda: self._pass_on(context, after, token))

    def finish(self, context: Any, out: Any, request: Any, after: Any) -> None:
        """Wait until a delayed update has finished.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[2]; not read.
          after: token of the device's previous callback.
        """
        del request

        def finish() -> None:
            worker = self._worker(find_stream(context))
            worker.driver.use(worker.context)
            for job in self._started.get(worker.rank, {}).values():
                job.finish()

        self._try(finish)
        self._try(lambda: self._pass_on(context, after, out))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)

    def _pass_on(self, context: Any, after: Any, token: Any) -> None:
        # The number of the state is copied from token to token on the device.
        self._driver().copy(pointer(token), pointer(after), num_bytes(token), find_stream(context))

    def _worker(self, stream: int) -> GpuWorker:
        """Return the worker of the device to which a program's stream belongs."""
        with self._lock:
            if (worker := self._by_stream.get(stream)) is None:
                context = self._driver().context_of_stream(stream)
                workers = self._workers.values()
                (worker,) = [worker for worker in workers if worker.context == context]
                self._by_stream[stream] = worker
            return worker

    # --- kernels ----------------------------------------------------------------------------------

    def _run(self, rank: int, job: Job) -> bool:
        """Run the kernels of a job, in the worker's thread; return whether it updated."""
        leaves = self.leaves
        group = job.group
        assert group is not None
        spec = group.spec
        request, scalars, *arrays = group.buffers[job.buffer]
        device, layer, go, number = request.tolist()
        worker = self._workers[rank]
        if not spec.grads and spec.leaves.start in worker.stashes:
            # Wait for the last recorded event: earlier copies on the same stream have ended too.
            worker.driver.finish_event(worker.stashes[spec.leaves.start].arrived[0])
        _check_device(device, rank)
        if (record := (job.leaves.start, layer)) in group.updated:
            raise RuntimeError(
                f"the compiled program asked twice for the update of layer {layer} in one step: "
                "the optimizer state is wrong, restore the last checkpoint"
            )
        group.updated.add(record)
        modes = leaves.record_modes(job.leaves)
        # A gradient was not finite: give back the buffers read ahead for this update.
        if not go:
            leaves.skip(device, layer, modes, number)
            return False
        grads = arrays[: len(spec.grads)]
        weights = arrays[len(spec.grads) :]
        with leaves.borrowed(device, layer, modes, number) as views:
            for leaf in job.leaves:
                n = leaf - spec.leaves.start
                grad = grads[n] if grads else leaves.stashed_grad(device, leaf, layer, views)
                leaves.run_kernel(
                    device,
                    leaf,
                    layer,
                    grad,
                    scalars,
                    weight=weights[n] if weights else None,
                    result=group.rooms[job.room][n] if spec.params else None,
                    views=views,
                )
        return True

    # --- around a step ----------------------------------------------------------------------------

    def prepare(self, ranks: Sequence[int]) -> None:
        """Prepare for a step; create the workers of these devices unless they exist already.

        Args:
          ranks: positions of this process's devices in the mesh.
        """
        for rank in ranks:
            if rank not in self._workers:
                worker = GpuWorker(
                    self._driver(),
                    self._devices[rank],
                    rank,
                    self.specs,
                    self._run,
                    self.leaves.fail,
                )
                self._workers[rank] = worker
        self._by_stream.clear()
        for worker in self._workers.values():
            worker.reset()
        self._started.clear()

    def close(self) -> None:
        """End the workers, and free their memory and streams."""
        workers = self._workers
        self._workers = {}
        self._by_stream.clear()
        for worker in workers.values():
            worker.close()


def _check_device(sender: int, rank: int) -> None:
    # The memory of the device to which the stream belongs must not receive another device's update.
    if sender != rank:
        raise RuntimeError(f"gradients of device {sender} arrived on a stream of device {rank}")
