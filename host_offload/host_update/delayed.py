"""An optimizer's update on the host that is delayed by a step (ZeRO-Offload, arXiv:2101.06840,
section 5.2).

The kernels work on the gradients of the step before while this one computes, and their results are
stored beside the parameters that it reads:

    start(scalars)          start to update every leaf with the pending gradients, record by record in the order of backward
    install(layer)          wait for the update of one layer; hand over its new parameters
    finish()                wait for all of it

A layer's parameters are used for the last time in its tick of backward, so that tick takes the new
ones. Parameters in host memory are not handed over: two sets of arrays exchange their roles after
the step, and so all of the other set is written, also where there is nothing to update. Gradients
do the same: this step's are stashed, and after it they are the pending ones.

The update of a device runs in a thread of its own, so `start` returns at once. A delayed update
uses no records on disk.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.host_update.host_leaves import HostLeaves

Record = tuple[range, int]
"""Leaves that are updated together, and a layer; 0 of leaves that are not stacked."""


class DelayedStep:
    """The callbacks of one program that update with the gradients of the step before."""

    def __init__(self, leaves: HostLeaves, parts: Sequence[range]) -> None:
        """Serve some leaves.

        Args:
          leaves: that are updated.
          parts: those of each stack of layers, then the others.
        """
        self.leaves, self._parts = leaves, tuple(parts)
        self._updates: dict[int, _Update] = {}  # by device

    def start(
        self, context: Any, out: Any, where: Any, after: Any, memory: Any, scalars: Any
    ) -> None:
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
            self._updates.pop(device, None)
            self.leaves.take(device, 0, len(self.leaves.kernels), memory)
            values = link.read(
                context, scalars, "scalars"
            ).copy()  # the thread outlives the callback's buffers
            update = _Update(
                self.leaves,
                device,
                pending_records(self.leaves, device, self._parts),
                values,
                bool(go),
            )
            update.start()
            self._updates[device] = update
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        self.leaves.finish(context, out, number)

    def install(
        self, context: Any, out: Any, where: Any, after: Any, *, first: int, count: int
    ) -> None:
        """Hand over one layer's new parameters, which live on the device.

        Args:
          context: of the callback.
          out: (list of new parameters; token).
          where: i32[3], device, layer and 0.
          after: the token of the device's callback before this one.
          first: index of a leaf.
          count: leaves.
        """
        del after
        number, (results, token) = 0, out
        leaves, link = self.leaves, self.leaves.link
        try:
            device, layer, number = link.read(context, where, "where").tolist()
            update = self._updates.get(device)
            if update is not None and update.is_made(first, layer):
                for leaf, params in zip(range(first, first + count), results, strict=True):
                    room = link.room(context, params, (device, leaf, "params"))
                    np.copyto(room, leaves.record(leaves.new_params[device, leaf], leaf, layer))
                    link.write(context, params, (device, leaf, "params"))
                    leaves.count(to_device=room.nbytes)
        except BaseException as error:  # as above
            leaves.fail(error)
        leaves.finish(context, token, number)

    def finish(self, context: Any, out: Any, where: Any, after: Any, memory: Any) -> None:
        """Wait until all is updated.

        Args:
          context: of the callback.
          out: i32[1], a token.
          where: i32[2], device and 0.
          after: the token of the device's callback before this one.
          memory: as for `start`: an operand here, too, so that it stays what it is until then.
        """
        del after, memory
        number = 0
        try:
            device, number = self.leaves.link.read(context, where, "where").tolist()
            if (update := self._updates.get(device)) is not None:
                update.join()
        except BaseException as error:  # as above
            self.leaves.fail(error)
        self.leaves.finish(context, out, number)


class _Update(threading.Thread):
    """The update of one device in one step."""

    def __init__(
        self,
        leaves: HostLeaves,
        device: int,
        records: Sequence[Record],
        scalars: np.ndarray,
        go: bool,
    ) -> None:
        super().__init__(daemon=True)
        self._leaves, self._device, self._records, self._scalars, self._go = (
            leaves,
            device,
            records,
            scalars,
            go,
        )
        self._done = {(part.start, layer): threading.Event() for part, layer in records}

    def run(self) -> None:
        for part, layer in self._records:
            try:
                update_pending(self._leaves, self._device, part, layer, self._scalars, self._go)
            except (
                BaseException
            ) as error:  # nobody joins a thread to be raised at: `check` raises it
                self._leaves.fail(error)
            finally:
                self._done[part.start, layer].set()

    def is_made(self, first: int, layer: int) -> bool:
        """Wait for a record; returns whether there was anything to update."""
        self._done[first, layer].wait()
        return self._go


def pending_records(leaves: HostLeaves, device: int, parts: Sequence[range]) -> list[Record]:
    """Return the records of a device in the order of backward: from the last layer to the first,
    then the other leaves.
    """
    stacks = [part for part in parts if leaves.kernels[part.start].stacked]
    ends = [(part, 0) for part in parts if part not in stacks]
    layers = [
        (part, layer) for part in stacks for layer in range(len(leaves.pending[device, part.start]))
    ]
    return [*reversed(layers), *ends]


def update_pending(
    leaves: HostLeaves, device: int, part: range, layer: int, scalars: np.ndarray, go: bool
) -> None:
    """Update a record with its pending gradients; the new parameters are stored beside the old
    ones.

    Without `go` there is nothing to update, and parameters in host memory are copied.
    """
    for leaf in part:
        result = leaves.record(leaves.new_params[device, leaf], leaf, layer)
        if go:
            grad = leaves.record(leaves.pending[device, leaf], leaf, layer)
            leaves.run_kernel(device, leaf, layer, grad, scalars, result=result)
        elif not leaves.kernels[leaf].params_on_device:
            arrays = leaves.arrays[device, leaf]
            np.copyto(
                result,
                leaves.record(arrays[-1] if leaves.kernels[leaf].casts else arrays[0], leaf, layer),
            )
