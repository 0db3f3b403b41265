"""A host update with the gradients of the previous step, while the step computes.

    start(scalars)          start to update every leaf with the pending gradients, record by record
    install(layer)          wait for the update of one layer; hand over its new parameters
    finish()                wait for the full update

There are two such updates. A **delayed** update (ZeRO-Offload, arXiv:2101.06840, section 5.2) runs
beside the full step, which still uses the old parameters. Records are updated in the order of
backward. A layer's parameters are used for the last time in its tick of backward, so the same tick
installs the new parameters. Parameters in host memory are not handed over: two sets of arrays swap
their roles after the step. So the full second set is written, even if there is nothing to update.
Gradients swap in the same way: a step stashes its gradients, and after the step they are pending.

An **update in forward** (`HostLeaves.in_place`) installs the new parameters before the layer is
computed. Records are updated in the order of forward, embedding and head first. Forward uses only
the parameters that `install` hands over, and backward begins after all of them are installed. So
kernels overwrite parameters in host memory, and stashed gradients overwrite pending ones.

Each device's update runs in its own thread, so `start` returns immediately. It uses no records on
disk.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.host_update.host_leaves import HostLeaves

Record = tuple[range, int]
"""Leaves that are updated together, and a layer; the layer is 0 for unstacked leaves."""


class DelayedStep:
    """A program's callbacks for an update with the gradients of the previous step.

    Attributes:
      leaves: leaves that are updated on the host.
    """

    def __init__(self, leaves: HostLeaves, groups: Sequence[range]) -> None:
        """Store the leaves.

        Args:
          leaves: leaves that are updated on the host.
          groups: indices of leaves that are updated together: one range per stack of layers, then
            the unstacked leaves.
        """
        self.leaves = leaves
        self._groups = tuple(groups)
        self._updates: dict[int, _Update] = {}  # by device

    def start(
        self, context: Any, out: Any, request: Any, after: Any, memory: Any, scalars: Any
    ) -> None:
        """Start to update every leaf with the pending gradients.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[3]: device, whether to update at all, and 0.
          after: token of the device's previous callback; not read.
          memory: every leaf's arrays in host memory, or empty if they are bound already.
          scalars: f32[n], scalars of all leaves.
        """
        del after
        number = 0
        link = self.leaves.link
        try:
            device, go, number = link.read(context, request, "request").tolist()
            self._updates.pop(device, None)
            self.leaves.take(device, 0, len(self.leaves.kernels), memory)
            # A copy, because the thread outlives the callback's buffers.
            values = link.read(context, scalars, "scalars").copy()
            records = pending_records(self.leaves, device, self._groups)
            update = _Update(self.leaves, device, records, values, bool(go))
            update.start()
            self._updates[device] = update
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        self.leaves.finish(context, out, number)

    def install(
        self, context: Any, out: Any, request: Any, after: Any, *, first: int, count: int
    ) -> None:
        """Hand over one layer's new parameters, which live on the device.

        Args:
          context: the callback's context.
          out: (list of outputs for the new parameters, output for the next token).
          request: i32[3]: device, layer and 0.
          after: token of the device's previous callback; not read.
          first: index of the first leaf.
          count: number of leaves.
        """
        del after
        number = 0
        (results, token) = out
        leaves = self.leaves
        link = self.leaves.link
        try:
            device, layer, number = link.read(context, request, "request").tolist()
            update = self._updates.get(device)
            if update is not None and has_new_params(
                leaves, first, update.has_updated(first, layer)
            ):
                for leaf, params in zip(range(first, first + count), results, strict=True):
                    room = link.room(context, params, (device, leaf, "params"))
                    np.copyto(room, leaves.record(leaves.new_params[device, leaf], leaf, layer))
                    link.write(context, params, (device, leaf, "params"))
                    leaves.count(to_device=room.nbytes)
        except BaseException as error:  # a callback must not raise
            leaves.fail(error)
        leaves.finish(context, token, number)

    def finish(self, context: Any, out: Any, request: Any, after: Any, memory: Any) -> None:
        """Wait until every leaf is updated.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[2]: device and 0.
          after: token of the device's previous callback; not read.
          memory: the same arrays as for `start`; not read. As an operand of this callback too, they
            stay unchanged until the update has ended.
        """
        del after, memory
        number = 0
        try:
            device, number = self.leaves.link.read(context, request, "request").tolist()
            if (update := self._updates.get(device)) is not None:
                update.join()
        except BaseException as error:  # a callback must not raise
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
        self._leaves = leaves
        self._device = device
        self._records = records
        self._scalars = scalars
        self._go = go
        self._done = {(leaf_ids.start, layer): threading.Event() for leaf_ids, layer in records}

    def run(self) -> None:
        for leaf_ids, layer in self._records:
            try:
                update_pending(self._leaves, self._device, leaf_ids, layer, self._scalars, self._go)
            except BaseException as error:  # a thread has nobody to raise to; `check` raises it
                self._leaves.fail(error)
            finally:
                self._done[leaf_ids.start, layer].set()

    def has_updated(self, first: int, layer: int) -> bool:
        """Wait for a record; return whether the step updates at all."""
        self._done[first, layer].wait()
        return self._go


def pending_records(leaves: HostLeaves, device: int, groups: Sequence[range]) -> list[Record]:
    """Return a device's records in the order in which they are updated.

    These are the unstacked leaves, then the layers, from first to last, if forward updates; else
    the layers, from last to first, then the unstacked leaves.

    Args:
      leaves: leaves that are updated on the host.
      device: position of the device in the mesh.
      groups: indices of leaves that are updated together.
    """
    layers = list[Record]()
    unstacked = list[Record]()
    for leaf_ids in groups:
        if leaves.kernels[leaf_ids.start].stacked:
            num_layers = len(leaves.pending[device, leaf_ids.start])
            layers += [(leaf_ids, layer) for layer in range(num_layers)]
        else:
            unstacked.append((leaf_ids, 0))
    return [*unstacked, *layers] if leaves.in_place else [*reversed(layers), *unstacked]


def has_new_params(leaves: HostLeaves, first: int, has_updated: bool) -> bool:
    """Return whether a record's parameters are handed over, once its update has ended.

    Parameters in host memory that forward does not read by itself are always handed over. The
    device keeps its other parameters if there is nothing to update.

    Args:
      leaves: leaves that are updated on the host.
      first: index of the record's first leaf.
      has_updated: whether the record was updated.
    """
    return has_updated or (leaves.in_place and not leaves.kernels[first].params_on_device)


def update_pending(
    leaves: HostLeaves, device: int, leaf_ids: range, layer: int, scalars: np.ndarray, go: bool
) -> None:
    """Update a record with its pending gradients.

    A delayed update does not overwrite the old parameters.

    Args:
      leaves: leaves that are updated on the host.
      device: position of the device in the mesh.
      leaf_ids: indices of the record's leaves.
      layer: layer of the record; 0 for unstacked leaves.
      scalars: f32[n], scalars of all leaves.
      go: whether to update. If not, parameters in host memory are copied to the new set, if any.
    """
    for leaf in leaf_ids:
        kernel = leaves.kernels[leaf]
        result = None
        if kernel.params_on_device or not leaves.in_place:
            result = leaves.record(leaves.new_params[device, leaf], leaf, layer)
        if go:
            grad = leaves.record(leaves.pending[device, leaf], leaf, layer)
            leaves.run_kernel(device, leaf, layer, grad, scalars, result=result)
        elif result is not None and not kernel.params_on_device:
            arrays = leaves.arrays[device, leaf]
            params = arrays[-1] if kernel.casts else arrays[0]
            np.copyto(result, leaves.record(params, leaf, layer))
