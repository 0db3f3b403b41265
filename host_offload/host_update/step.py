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

from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.device import Views
from host_offload.engine import Mode
from host_offload.host_update.host_leaves import HostLeaves


class HostStep:
    """A program's callbacks that stash gradients and update with them in the same step.

    Attributes:
      leaves: leaves that are updated on the host.
    """

    def __init__(self, leaves: HostLeaves) -> None:
        """Store the leaves that are updated on the host."""
        self.leaves = leaves

    def stash(
        self, context: Any, out: Any, where: Any, after: Any, *grads: Any, first: int
    ) -> None:
        """Copy gradients to host memory, or to a record on disk.

        Args:
          context: the callback's context.
          out: i32[1], output for the next token.
          where: i32[3]: device, layer, and the number of the state on disk.
          after: token of the device's previous callback; not read.
          *grads: gradients, one per leaf from `first` on.
          first: index of the first leaf.
        """
        del after
        number = 0
        link = self.leaves.link
        try:
            device, layer, number = link.read(context, where, "where").tolist()
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
        where: Any,
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
          where: i32[4]: device, layer, whether to update at all, and the number of the state on
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
        (results, token) = out
        kernels = self.leaves.kernels
        link = self.leaves.link
        try:
            device, layer, go, number = link.read(context, where, "where").tolist()
            self.leaves.take(device, first, count, memory)
            values = link.read(context, scalars, "scalars")
            rest = iter(operands)
            buffers = iter(results)
            leaves = range(first, first + count)
            grads = [None if stashed else next(rest) for _ in leaves]
            weights = [next(rest) if kernels[leaf].weight_on_device else None for leaf in leaves]
            params = [next(buffers) if kernels[leaf].params_on_device else None for leaf in leaves]
            # A layer's stacked leaves share records; each unstacked leaf has its own records.
            for part in [leaves] if kernels[first].stacked else [[leaf] for leaf in leaves]:
                modes: dict[str, Mode] = {
                    kind: mode for leaf in part for kind, mode in kernels[leaf].records.items()
                }
                # A gradient was not finite: give back the buffers read ahead for this update.
                if not go:
                    self.leaves.skip(device, layer, modes, number)
                    continue
                with self.leaves.borrowed(device, layer, modes, number) as views:
                    for leaf in part:
                        i = leaf - first
                        self._update_leaf(
                            context,
                            device,
                            leaf,
                            layer,
                            grads[i],
                            weights[i],
                            params[i],
                            values,
                            views,
                        )
        except BaseException as error:  # a callback must not raise
            self.leaves.fail(error)
        self.leaves.finish(context, token, number)

    def _update_leaf(
        self,
        context: Any,
        device: int,
        leaf: int,
        layer: int,
        grad: Any,
        weight: Any,
        params: Any,
        scalars: np.ndarray,
        views: Mapping[str, Views],
    ) -> None:
        """Update one record; `grad`, `weight` and `params` are buffers of the device, or None."""
        leaves = self.leaves
        link = self.leaves.link
        # Arrays that are not in host memory cross the link: a weight that lives on the device, and
        # the gradient unless it was stashed.
        w = None
        if weight is not None:
            w = link.read(context, weight, (device, leaf, "weight"))
            leaves.count(to_host=w.nbytes)
        if grad is None:
            g = self.leaves.stashed_grad(device, leaf, layer, views)
        else:
            g = link.read(context, grad, (device, leaf, "grad"))
            leaves.count(to_host=g.nbytes)
        # New parameters that live on the device are written here and copied up; others stay in
        # host memory.
        room = None if params is None else link.room(context, params, (device, leaf, "params"))
        leaves.run_kernel(device, leaf, layer, g, scalars, weight=w, result=room, views=views)
        if room is not None:
            link.write(context, params, (device, leaf, "params"))
            leaves.count(to_device=room.nbytes)
