"""An optimizer's update on the host that is delayed by a step (ZeRO-Offload, arXiv:2101.06840, section 5.2).

The kernels work on the gradients of the step before while this one computes, and their results are stored beside the parameters
that it reads:

    start(scalars)          start to update every leaf with the pending gradients
    install(layer)          wait for the update; hand over the new parameters

This step's gradients are stashed, and after the step they are the pending ones: two sets of arrays exchange their roles. The
update of a device runs in a thread of its own, so `start` returns at once. A delayed update uses no records on disk.
"""

import threading
from typing import Any

import numpy as np

from host_offload.host_update.host_leaves import HostLeaves


class DelayedStep:
    """The callbacks of one program that update with the gradients of the step before."""

    def __init__(self, leaves: HostLeaves) -> None:
        self.leaves = leaves
        self._jobs: dict[int, threading.Thread | None] = {}  # by device; None where there was nothing to update

    def start(self, context: Any, out: Any, where: Any, after: Any, memory: Any, scalars: Any) -> None:
        """Start to update every leaf with the pending gradients.

        Args:
          context: of the callback.
          out: i32[1], a token.
          where: i32[3], device, whether to update at all, and 0.
          after: the token of the device's callback before this one.
          memory: the leaves' arrays in host memory, or nothing where they are bound; of every leaf.
          scalars: f32[n], of every leaf.
        """
        del after
        number, link = 0, self.leaves.link
        try:
            device, go, number = link.read(context, where, "where").tolist()
            self.leaves.take(device, 0, len(self.leaves.kernels), memory)
            values = link.read(context, scalars, "scalars").copy()  # the thread outlives the callback's buffers
            job = threading.Thread(target=self._update, args=(device, values), daemon=True) if go else None
            self._jobs[device] = job
            if job is not None:
                job.start()
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        self.leaves.finish(context, out, number)

    def _update(self, device: int, scalars: np.ndarray) -> None:
        try:
            update_pending(self.leaves, device, scalars)
        except BaseException as error:  # nobody joins a thread to be raised at: `check` raises it
            self.leaves.fail(error)

    def install(self, context: Any, out: Any, where: Any, after: Any, memory: Any, *, first: int, count: int) -> None:
        """Hand over one layer's new parameters.

        Args:
          context: of the callback.
          out: (list of new parameters that live on the device; token).
          where: i32[3], device, layer and 0.
          after: the token of the device's callback before this one.
          memory: as for `start`, of these leaves.
          first: index of a leaf.
          count: leaves.
        """
        del after
        number, (results, token) = 0, out
        leaves = self.leaves
        try:
            device, layer, number = leaves.link.read(context, where, "where").tolist()
            leaves.take(device, first, count, memory)
            if (job := self._jobs.get(device)) is not None:
                # Every layer joins, and only the first one waits.
                job.join()
            buffers = iter(results)
            for leaf in range(first, first + count):
                params = next(buffers) if leaves.kernels[leaf].params_on_device else None
                if job is not None:
                    self._install_leaf(context, device, leaf, layer, params)
        except BaseException as error:  # as above
            leaves.fail(error)
        leaves.finish(context, token, number)

    def _install_leaf(self, context: Any, device: int, leaf: int, layer: int, params: Any) -> None:
        """Copy one record's new parameters to a buffer of the device, or where they rest in host memory."""
        leaves = self.leaves
        if params is None:
            install_on_host(leaves, device, leaf, layer)
            return
        room = leaves.link.room(context, params, (device, leaf, "params"))
        np.copyto(room, leaves.record(leaves.new_params[device, leaf], leaf, layer))
        leaves.link.write(context, params, (device, leaf, "params"))
        leaves.count(to_device=room.nbytes)


def update_pending(leaves: HostLeaves, device: int, scalars: np.ndarray) -> None:
    """Update every leaf of a device with its pending gradients; the new parameters are stored beside the old ones."""
    for leaf, kernel in enumerate(leaves.kernels):
        grads, params = leaves.pending[device, leaf], leaves.new_params[device, leaf]
        for layer in range(len(grads)) if kernel.stacked else (0,):
            grad, result = leaves.record(grads, leaf, layer), leaves.record(params, leaf, layer)
            leaves.run_kernel(device, leaf, layer, grad, scalars, result=result)


def install_on_host(leaves: HostLeaves, device: int, leaf: int, layer: int) -> None:
    """Copy one record's new parameters to where they rest in host memory."""
    arrays = leaves.arrays[device, leaf]
    target = arrays[-1] if leaves.kernels[leaf].casts else arrays[0]
    np.copyto(leaves.record(target, leaf, layer), leaves.record(leaves.new_params[device, leaf], leaf, layer))
