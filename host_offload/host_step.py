"""An optimizer's update on the host, beside the state: callbacks that a jitted program makes, layer by layer.

Only gradients go down the link and compute-dtype parameters go up (ZeRO-Offload, arXiv:2101.06840, section 4): masters and
moments stay in host memory, where a fused kernel updates one layer's records in place,

    stash(layer, g)                     keep a gradient in host memory until its scale is known
    update(layer, scalars, g or none)   for each leaf: kernel(g, w[layer], s[layer], scalars), in place; hand back cast(w)

The memory is that of arrays which the program is given and hands back untouched, so that outside of a step they are ordinary
arrays. A callback never raises, since another device may be waiting in a collective: it records its error, and `check` raises
it when the step is over. Where parameters rest in host memory too, the kernel writes them there, and nothing goes up.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.fused import Kernel
from host_offload.link import Link


@dataclasses.dataclass(frozen=True, eq=False)
class LeafKernel:
    """How one leaf is updated.

    Attributes:
      kernel: from (gradient, weight, states, scalars) to (weight, states, and the cast weight if `casts`).
      scalars: where this leaf's scalars lie in the vector of all.
      num_states: leaves of optimizer state.
      stacked: whether its arrays hold all layers.
      weight_on_device: the float32 weight is no host array: it is an operand, and the new one a result.
      casts: the kernel returns a compute-dtype weight besides.
      params_on_device: the parameters are a result of the callback; else they are written to the host.
    """

    kernel: Kernel
    scalars: slice
    num_states: int
    stacked: bool
    weight_on_device: bool
    casts: bool
    params_on_device: bool


@dataclasses.dataclass
class Traffic:
    """Bytes that crossed the link, summed over devices and steps since they were last taken."""

    to_host: int = 0
    to_device: int = 0


class HostStep:
    """The callbacks of one program, and the host memory that they work on."""

    def __init__(self, leaves: Sequence[LeafKernel], link: Link) -> None:
        self.leaves, self.link = tuple(leaves), link
        self.arrays: dict[tuple[int, int], list[np.ndarray]] = {}
        self.stashed: dict[tuple[int, int], np.ndarray] = {}
        self.traffic = Traffic()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def bind(self, device: int, leaf: int, arrays: Sequence[np.ndarray]) -> None:
        """Give a leaf's memory on one device: weight (unless on the device), states, and parameters (unless on the device)."""
        self.arrays[device, leaf] = list(arrays)

    def reserve(self, device: int, leaf: int, shape: Sequence[int], dtype: Any) -> None:
        """Make room for a leaf's gradients between backward and update."""
        if (device, leaf) not in self.stashed:
            self.stashed[device, leaf] = np.zeros(shape, dtype)

    def check(self) -> None:
        """Raise the first error of the callbacks since the last check.

        Raises:
          RuntimeError: an update failed; the state is then neither that before the step nor that after it.
        """
        errors, self._errors = self._errors, []
        if errors:
            raise RuntimeError("the optimizer's update on the host failed, and the state is lost: restore it") from errors[0]

    def stash(self, context: Any, out: Any, where: Any, after: Any, *grads: Any, first: int) -> None:
        """Copy gradients to host memory.

        Args:
          context: of the callback.
          out: i32[1], a token.
          where: i32[2], device and layer.
          after: the token of the device's callback before this one.
          *grads: one for each leaf from `first` on.
          first: index of a leaf.
        """
        del after
        try:
            device, layer = self.link.read(context, where, "where").tolist()
            for leaf, grad in enumerate(grads, first):
                room = self._record(self.stashed[device, leaf], leaf, layer)
                np.copyto(room, self.link.read(context, grad, (device, leaf, "grad")))
                self._count(to_host=room.nbytes)
            self._finish(context, out)
        except Exception as error:  # a callback must not raise: see the module's docstring
            self._errors.append(error)

    def update(
        self,
        context: Any,
        out: Any,
        where: Any,
        after: Any,
        scalars: Any,
        *operands: Any,
        first: int,
        count: int,
        stashed: bool,
    ) -> None:
        """Update `count` leaves, from `first` on, of one layer.

        Args:
          context: of the callback.
          out: (list of new parameters, and new weights, that live on the device; token).
          where: i32[3], device, layer and whether to update at all.
          after: the token of the device's callback before this one.
          scalars: f32[n], of every leaf.
          *operands: gradients unless `stashed`, then weights that live on the device.
          first: index of a leaf.
          count: leaves.
          stashed: whether the gradients are in host memory.
        """
        del after
        try:
            device, layer, go = self.link.read(context, where, "where").tolist()
            values = self.link.read(context, scalars, "scalars")
            results, token = out
            rest, made = iter(operands), iter(results)
            grads = [None if stashed else next(rest) for _ in range(count)]
            for leaf, grad in enumerate(grads, first):
                old = next(rest) if self.leaves[leaf].weight_on_device else None
                result = next(made) if self.leaves[leaf].params_on_device else None
                if go:
                    self._update_leaf(context, device, leaf, layer, grad, old, result, values)
            self._finish(context, token)
        except Exception as error:  # as above
            self._errors.append(error)

    def _update_leaf(
        self, context: Any, device: int, leaf: int, layer: int, grad: Any, old: Any, result: Any, values: np.ndarray
    ) -> None:
        plan, place = self.leaves[leaf], (device, leaf)
        held = [self._record(a, leaf, layer) for a in self.arrays.get(place, [])]
        weights = [] if plan.weight_on_device else [held.pop(0)]
        states, params = held[: plan.num_states], held[plan.num_states :]
        if old is not None:
            weights = [self.link.read(context, old, (*place, "weight"))]
            self._count(to_host=weights[0].nbytes)
        if grad is None:
            g = self._record(self.stashed[place], leaf, layer)
        else:
            g = self.link.read(context, grad, (*place, "grad"))
            self._count(to_host=g.nbytes)
        room = self.link.room(result, (*place, "params")) if result is not None else None
        if plan.casts:
            new, cast = [None], [room if room is not None else params[0]]
        else:
            new, cast = [room], []
        flat = [None if a is None else a.reshape(-1) for a in (g, *weights, *states, *new, *cast)]
        inputs, outputs = flat[: 2 + len(states)], [flat[2 + len(states)], *[None] * len(states), *flat[3 + len(states) :]]
        plan.kernel([*inputs, *values[plan.scalars]], outputs)
        if result is not None and room is not None:
            self.link.write(context, result, (*place, "params"))
            self._count(to_device=room.nbytes)

    def _record(self, array: np.ndarray, leaf: int, layer: int) -> np.ndarray:
        return array[layer, ...] if self.leaves[leaf].stacked else array  # a view, also where a record is one number

    def _finish(self, context: Any, token: Any) -> None:
        self.link.room(token, "token")[...] = 0
        self.link.write(context, token, "token")

    def _count(self, to_host: int = 0, to_device: int = 0) -> None:
        with self._lock:
            self.traffic.to_host += to_host
            self.traffic.to_device += to_device
