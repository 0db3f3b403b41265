"""Update the state on the host, where it is stored: callbacks of a jitted program, layer by layer.

Only gradients go down the link, and only compute-dtype parameters go up (ZeRO-Offload,
arXiv:2101.06840, section 4). Masters and moments stay in host memory, where a fused kernel updates
one layer's records in place:

    stash(layer, g)                     keep a gradient in host memory until its scale is known
    update(layer, scalars, g or none)   for each leaf: kernel(g, w[layer], s[layer], scalars), in
                                        place; return cast(w)

If parameters are in host memory too, the kernel writes them there, and nothing goes up. State on
disk is updated in the buffers through which it moves (ZeRO-Infinity, arXiv:2104.07857, section
5.2.2):

    disk -> buffer;  kernel(g, w, s, scalars), in place;  buffer -> disk

So it does not cross the link either. Its records are borrowed from the engine
(`host_offload.engine.engine`), which in the meantime reads the next layer's records and writes the
previous layer's. Gradients are stashed in records, and parameters written to records, in the same
way.

Tokens order the callbacks of a device, and hold the number of the state on disk. For an update that
is delayed by a step, see `host_offload.host_update.delayed`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.device import Views
from host_offload.engine import Mode
from host_offload.host_update.host_leaves import HostLeaves


class _LeafBuffers(NamedTuple):
    """A leaf's buffers on the device; None for arrays that do not cross the link."""

    grad: Any
    weight: Any
    params: Any


class _Call(NamedTuple):
    """A callback: its context, device and layer, all scalars, and the borrowed records."""

    context: Any
    device: int
    layer: int
    scalars: np.ndarray
    views: Mapping[str, Views]


class HostStep:
    """A program's callbacks that stash gradients and update with them in the same step.

    Attributes:
      leaves: leaves that are updated on the host.
    """

    def __init__(self, leaves: HostLeaves) -> None:
        """Store the leaves that are updated on the host."""
        self.leaves = leaves

    def stash(
        self, context: Any, out: Any, request: Any, after: Any, *grads: Any, first: int
    ) -> None:
        """Copy gradients to host memory, or to a record on disk.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          request: i32[3]: device, layer, and the number of the state on disk.
          after: token of the device's previous callback; not read.
          *grads: gradients, one per leaf from `first` on.
          first: index of the first leaf.
        """
        del after
        number = 0
        link = self.leaves.link
        try:
            device, layer, number = link.read(context, request, "request").tolist()
            kernels = self.leaves.kernels[first : first + len(grads)]
            modes: dict[str, Mode] = {
                kernel.grad.kind: "write" for kernel in kernels if kernel.grad is not None
            }
            with self.leaves.borrowed(device, layer, modes, number) as views:
                for leaf, grad in enumerate(grads, first):
                    room = self.leaves.stashed_grad(device, leaf, layer, views)
                    np.copyto(room, link.read(context, grad, (device, leaf, "grad")))
                    self.leaves.count(to_host=room.nbytes)
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        # Not in the try block: the token must be written even after an error, or the next callback
        # reads garbage.
        self.leaves.finish(context, out, number)

    def update(
        self,
        context: Any,
        out: Any,
        request: Any,
        after: Any,
        memory: Any,
        scalars: Any,
        *operands: Any,
        first: int,
        count: int,
        stashed: bool,
    ) -> None:
        """Update some leaves of one layer.

        Args:
          context: the callback's context.
          out: (list of outputs for the new parameters and weights that live on the device, output
            for the next token).
          request: i32[4]: device, layer, whether to update at all, and the number of the state on
            disk.
          after: token of the device's previous callback; not read.
          memory: the leaves' arrays in host memory, or empty if they are bound already.
          scalars: f32[n], scalars of all leaves.
          *operands: gradients, unless `stashed`, then weights that live on the device.
          first: index of the first leaf.
          count: number of leaves.
          stashed: whether the gradients were stashed by earlier callbacks.
        """
        del after
        number = 0
        results, token = out
        kernels = self.leaves.kernels
        link = self.leaves.link
        try:
            device, layer, go, number = link.read(context, request, "request").tolist()
            self.leaves.take(device, first, count, memory)
            scalar_values = link.read(context, scalars, "scalars")
            leaf_ids = range(first, first + count)
            buffers = self._match_buffers(leaf_ids, stashed, operands, results)
            # A layer's stacked leaves share records; each unstacked leaf has its own records.
            groups = [leaf_ids] if kernels[first].stacked else [[leaf] for leaf in leaf_ids]
            for group in groups:
                modes = self.leaves.record_modes(group)
                # A gradient was not finite: give back the buffers read ahead for this update.
                if not go:
                    self.leaves.skip(device, layer, modes, number)
                    continue
                with self.leaves.borrowed(device, layer, modes, number) as views:
                    call = _Call(context, device, layer, scalar_values, views)
                    for leaf in group:
                        self._update_leaf(call, leaf, buffers[leaf])
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        self.leaves.finish(context, token, number)

    def _match_buffers(
        self, leaf_ids: range, stashed: bool, operands: Sequence[Any], results: Sequence[Any]
    ) -> dict[int, _LeafBuffers]:
        """Return the device buffers of each leaf: all gradients come first, then weights."""
        kernels = self.leaves.kernels
        inputs = iter(operands)
        outputs = iter(results)
        grads = {leaf: None if stashed else next(inputs) for leaf in leaf_ids}
        buffers: dict[int, _LeafBuffers] = {}
        for leaf in leaf_ids:
            weight = next(inputs) if kernels[leaf].weight_on_device else None
            params = next(outputs) if kernels[leaf].params_on_device else None
            buffers[leaf] = _LeafBuffers(grads[leaf], weight, params)
        return buffers

    def _update_leaf(self, call: _Call, leaf: int, buffers: _LeafBuffers) -> None:
        """Update one record."""
        leaves = self.leaves
        link = leaves.link
        context = call.context
        device = call.device
        # Arrays that are not in host memory cross the link: a weight that lives on the device, and
        # the gradient unless it was stashed.
        weight = None
        if buffers.weight is not None:
            weight = link.read(context, buffers.weight, (device, leaf, "weight"))
            leaves.count(to_host=weight.nbytes)
        if buffers.grad is None:
            grad = leaves.stashed_grad(device, leaf, call.layer, call.views)
        else:
            grad = link.read(context, buffers.grad, (device, leaf, "grad"))
            leaves.count(to_host=grad.nbytes)
        # New parameters that live on the device are written here and copied up; others stay in
        # host memory.
        room = None
        if buffers.params is not None:
            room = link.room(context, buffers.params, (device, leaf, "params"))
        leaves.run_kernel(
            device,
            leaf,
            call.layer,
            grad,
            call.scalars,
            weight=weight,
            result=room,
            views=call.views,
        )
        if room is not None:
            link.write(context, buffers.params, (device, leaf, "params"))
            leaves.count(to_device=room.nbytes)
