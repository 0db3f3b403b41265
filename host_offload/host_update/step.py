"""An optimizer's update on the host, beside the state: callbacks that a jitted program makes, layer by layer.

Only gradients go down the link and compute-dtype parameters go up (ZeRO-Offload, arXiv:2101.06840, section 4): masters and
moments stay in host memory, where a fused kernel updates one layer's records in place,

    stash(layer, g)                     keep a gradient in host memory until its scale is known
    update(layer, scalars, g or none)   for each leaf: kernel(g, w[layer], s[layer], scalars), in place; hand back cast(w)

Delayed by a step (section 5.2), the kernels work on the gradients of the step before while this one computes, and their results
wait beside the parameters that it reads:

    start(scalars)          begin to update every leaf with the gradients that are pending
    install(layer)          wait for that; hand the new parameters over; this step's gradients are now the pending ones

What rests on disk is updated in the buffers through which it goes (ZeRO-Infinity, arXiv:2104.07857, section 5.2.2),

    disk -> buffer;  kernel(g, w, s, scalars), in place;  buffer -> disk

and crosses no link either. It is borrowed from the engine, which reads the next layer's records meanwhile and writes the last
one's (`host_offload.engine.engine`); gradients are stashed in records, and parameters filled into them, in the same way.

The memory is that of arrays which the program is given and hands back, as far as XLA knows, untouched; outside of a step they
are ordinary arrays. On a CPU each callback is handed them, on a GPU they are bound before the step (`bind`). A callback never
raises, since another device may be waiting in a collective: it records its error, and `check` raises it when the step is over,
or the engine's own `check` what the disk did. Tokens order callbacks, and hold the number of the state that is on disk.
Where parameters rest in host memory too, the kernel writes them there, and nothing goes up.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.device import Link, writable
from host_offload.disk import SwapError
from host_offload.engine import Mode, Swap, Views
from host_offload.host_update.leaf_kernel import LeafKernel, Traffic


class HostStep:
    """The callbacks of one program, and the host memory that they work on."""

    def __init__(self, leaves: Sequence[LeafKernel], link: Link, swap: Swap | None = None) -> None:
        self.leaves, self.link, self.swap = tuple(leaves), link, swap
        self.arrays: dict[tuple[int, int], list[np.ndarray]] = {}
        self.stashed: dict[tuple[int, int], np.ndarray] = {}
        self.pending: dict[tuple[int, int], np.ndarray] = {}
        self.made: dict[tuple[int, int], np.ndarray] = {}  # delayed: new parameters beside the old ones
        self.traffic = Traffic()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._jobs: dict[int, threading.Thread | None] = {}

    @property
    def num_memory(self) -> tuple[int, ...]:
        """How many arrays each leaf has in host memory, pending gradients included."""
        return tuple(p.held.count(None) + p.delayed for p in self.leaves)

    def _take(self, device: int, first: int, count: int, memory: Sequence[Any]) -> None:
        """Bind the arrays that a callback was handed: those of each leaf in turn, the pending gradients last."""
        if not memory:
            return
        rest = iter(memory)
        for leaf in range(first, first + count):
            arrays = [writable(np.asarray(next(rest))) for _ in range(self.num_memory[leaf])]
            if self.leaves[leaf].delayed:
                self.bind_pending(device, leaf, arrays.pop())
            self.bind(device, leaf, arrays)

    def bind(self, device: int, leaf: int, arrays: Sequence[np.ndarray]) -> None:
        """Give a leaf's memory on one device: of its `LeafKernel.held` what rests in host memory."""
        self.arrays[device, leaf] = list(arrays)

    def reserve(self, device: int, leaf: int, shape: Sequence[int], dtype: Any) -> None:
        """Make room for a leaf's gradients between backward and update."""
        if (device, leaf) not in self.stashed:
            self.stashed[device, leaf] = np.zeros(shape, dtype)

    def reserve_made(self, device: int, leaf: int, shape: Sequence[int], dtype: Any) -> None:
        """Make room for a leaf's new parameters beside the old ones."""
        if (device, leaf) not in self.made:
            self.made[device, leaf] = np.zeros(shape, dtype)

    def bind_pending(self, device: int, leaf: int, grads: np.ndarray) -> None:
        """Give the memory of a leaf's pending gradients."""
        self.pending[device, leaf] = grads

    def release(self) -> None:
        """Let go of all memory; what a later step needs is reserved again."""
        for held in (self.arrays, self.stashed, self.pending, self.made):
            held.clear()

    def check(self) -> None:
        """Raise the first error of the callbacks since the last check.

        Raises:
          RuntimeError: an update failed; the state is then neither that before the step nor that after it.
          BaseException: as it is, if it is no Exception, such as KeyboardInterrupt.
        """
        if errors := self.take_errors():
            if not isinstance(errors[0], Exception):
                raise errors[0]
            raise RuntimeError(
                "the optimizer's update on the host failed, and the state is lost: make one by init"
            ) from errors[0]

    def take_errors(self) -> list[BaseException]:
        """Return the errors of the callbacks since this was last called."""
        errors, self._errors = self._errors, []
        return errors

    def stash(self, context: Any, out: Any, where: Any, after: Any, *grads: Any, first: int) -> None:
        """Copy gradients to host memory, or to a record.

        Args:
          context: of the callback.
          out: i32[1], a token.
          where: i32[3], device, layer, and the number of the state on disk.
          after: the token of the device's callback before this one.
          *grads: one for each leaf from `first` on.
          first: index of a leaf.
        """
        del after
        number = 0
        try:
            device, layer, number = self.link.read(context, where, "where").tolist()
            plans = self.leaves[first : first + len(grads)]
            modes: dict[str, Mode] = {p.grad.kind: "write" for p in plans if p.grad is not None}
            with self._borrowed(device, layer, modes, number) as views:
                for leaf, grad in enumerate(grads, first):
                    room = self._stashed(device, leaf, layer, views)
                    np.copyto(room, self.link.read(context, grad, (device, leaf, "grad")))
                    self._count(to_host=room.nbytes)
        except BaseException as error:  # a callback must not raise: see the module's docstring
            self._fail(error)
        self._finish(context, out, number)

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
        """Update `count` leaves, from `first` on, of one layer.

        Args:
          context: of the callback.
          out: (list of new parameters, and new weights, that live on the device; token).
          where: i32[4], device, layer, whether to update at all, and the number of the state on disk.
          after: the token of the device's callback before this one.
          memory: the leaves' arrays in host memory, or nothing where they are bound.
          scalars: f32[n], of every leaf.
          *operands: gradients unless `stashed`, then weights that live on the device.
          first: index of a leaf.
          count: leaves.
          stashed: whether the gradients are in host memory.
        """
        del after
        number, (results, token) = 0, out
        try:
            device, layer, go, number = self.link.read(context, where, "where").tolist()
            self._take(device, first, count, memory)
            values = self.link.read(context, scalars, "scalars")
            rest, made = iter(operands), iter(results)
            leaves = range(first, first + count)
            grads = [None if stashed else next(rest) for _ in leaves]
            olds = [next(rest) if self.leaves[leaf].weight_on_device else None for leaf in leaves]
            places = [next(made) if self.leaves[leaf].params_on_device else None for leaf in leaves]
            given = dict(zip(leaves, zip(grads, olds, places, strict=True), strict=True))
            # The stacked leaves of a layer share records, any other leaf has its own.
            for part in [leaves] if self.leaves[first].stacked else [[leaf] for leaf in leaves]:
                modes: dict[str, Mode] = {kind: mode for n in part for kind, mode in self.leaves[n].records.items()}
                if not go:
                    self._skip(device, layer, modes, number)
                    continue
                with self._borrowed(device, layer, modes, number) as views:
                    for leaf in part:
                        self._update_leaf(context, device, leaf, layer, *given[leaf], values, views)
        except BaseException as error:  # as above
            self._fail(error)
        self._finish(context, token, number)

    def start(self, context: Any, out: Any, where: Any, after: Any, memory: Any, scalars: Any) -> None:
        """Begin to update every leaf with the pending gradients.

        Args:
          context: of the callback.
          out: i32[1], a token.
          where: i32[3], device, whether to update at all, and 0.
          after: the token of the device's callback before this one.
          memory: as for `update`, of every leaf.
          scalars: f32[n], of every leaf.
        """
        del after
        number = 0
        try:
            device, go, number = self.link.read(context, where, "where").tolist()
            self._take(device, 0, len(self.leaves), memory)
            values = self.link.read(context, scalars, "scalars").copy()
            job = threading.Thread(target=self._update_all, args=(device, values), daemon=True) if go else None
            self._jobs[device] = job
            if job is not None:
                job.start()
        except BaseException as error:  # as above
            self._fail(error)
        self._finish(context, out, number)

    def _update_all(self, device: int, values: np.ndarray) -> None:
        try:
            for leaf, plan in enumerate(self.leaves):
                grads, made = self.pending[device, leaf], self.made[device, leaf]
                for layer in range(len(grads)) if plan.stacked else (0,):
                    g, room = self._record(grads, leaf, layer), self._record(made, leaf, layer)
                    self._run_kernel(device, leaf, layer, g, None, room, values)
        except BaseException as error:  # as above
            self._fail(error)

    def install(self, context: Any, out: Any, where: Any, after: Any, memory: Any, *, first: int, count: int) -> None:
        """Hand over one layer's new parameters, and make its stashed gradients the pending ones.

        Args:
          context: of the callback.
          out: (list of new parameters that live on the device; token).
          where: i32[3], device, layer and 0.
          after: the token of the device's callback before this one.
          memory: as for `update`.
          first: index of a leaf.
          count: leaves.
        """
        del after
        number, (results, token) = 0, out
        try:
            device, layer, number = self.link.read(context, where, "where").tolist()
            self._take(device, first, count, memory)
            if (job := self._jobs.get(device)) is not None:
                job.join()
            rest = iter(results)
            for leaf in range(first, first + count):
                place, result = (device, leaf), next(rest) if self.leaves[leaf].params_on_device else None
                if job is not None:
                    self._install_leaf(context, place, layer, result)
                pending = self._record(self.pending[place], leaf, layer)
                np.copyto(pending, self._record(self.stashed[place], leaf, layer))
        except BaseException as error:  # as above
            self._fail(error)
        self._finish(context, token, number)

    def _install_leaf(self, context: Any, place: tuple[int, int], layer: int, result: Any) -> None:
        made = self._record(self.made[place], place[1], layer)
        if result is None:
            held = self.arrays[place]
            params = held[-1] if self.leaves[place[1]].casts else held[0]
            np.copyto(self._record(params, place[1], layer), made)
            return
        room = self.link.room(result, (*place, "params"))
        np.copyto(room, made)
        self.link.write(context, result, (*place, "params"))
        self._count(to_device=room.nbytes)

    def _update_leaf(
        self,
        context: Any,
        device: int,
        leaf: int,
        layer: int,
        grad: Any,
        old: Any,
        result: Any,
        values: np.ndarray,
        views: Mapping[str, Views],
    ) -> None:
        place, weight = (device, leaf), None
        if old is not None:
            weight = self.link.read(context, old, (*place, "weight"))
            self._count(to_host=weight.nbytes)
        if grad is None:
            g = self._stashed(device, leaf, layer, views)
        else:
            g = self.link.read(context, grad, (*place, "grad"))
            self._count(to_host=g.nbytes)
        room = None if result is None else self.link.room(result, (*place, "params"))
        self._run_kernel(device, leaf, layer, g, weight, room, values, views)
        if room is not None:
            self.link.write(context, result, (*place, "params"))
            self._count(to_device=room.nbytes)

    def _run_kernel(
        self,
        device: int,
        leaf: int,
        layer: int,
        g: np.ndarray,
        weight: np.ndarray | None,
        room: np.ndarray | None,
        values: np.ndarray,
        views: Mapping[str, Views] | None = None,
    ) -> None:
        """Update one record. `room` is where the new parameters go, unless that is in place; `views` are what is borrowed."""
        plan = self.leaves[leaf]
        memory = iter(self.arrays.get((device, leaf), []))
        held = [
            self._record(next(memory), leaf, layer) if rest is None else (views or {})[rest.kind][rest.leaf]
            for rest in plan.held
        ]
        weight = held.pop(0) if weight is None else weight
        states, params = held[: plan.num_states], held[plan.num_states :]
        if plan.casts:
            outputs = [None, *[None] * len(states), params[0] if room is None else room]
        else:
            outputs = [room, *[None] * len(states)]
        inputs = [a.reshape(-1) for a in (g, weight, *states)]
        plan.kernel([*inputs, *values[plan.scalars]], [None if a is None else a.reshape(-1) for a in outputs])

    # --- records on disk ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _borrowed(self, device: int, layer: int, modes: Mapping[str, Mode], number: int) -> Iterator[dict[str, Views]]:
        """Borrow one layer's records of several kinds; `number` is that of their state."""
        with contextlib.ExitStack() as stack:
            if not modes:
                yield {}
                return
            assert self.swap is not None
            engine = self.swap.engine_of(number)
            yield {kind: stack.enter_context(engine.borrow(kind, device, layer, mode)) for kind, mode in modes.items()}

    def _skip(self, device: int, layer: int, modes: Mapping[str, Mode], number: int) -> None:
        for kind, mode in modes.items():
            assert self.swap is not None
            self.swap.engine_of(number).skip(kind, device, layer, mode)

    def _stashed(self, device: int, leaf: int, layer: int, views: Mapping[str, Views]) -> np.ndarray:
        """Return where a gradient waits."""
        rest = self.leaves[leaf].grad
        return self._record(self.stashed[device, leaf], leaf, layer) if rest is None else views[rest.kind][rest.leaf]

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, SwapError) and self.swap is not None:
            self.swap.fail(error)
        else:
            self._errors.append(error)

    def _record(self, array: np.ndarray, leaf: int, layer: int) -> np.ndarray:
        return array[layer, ...] if self.leaves[leaf].stacked else array  # a view, also where a record is one number

    def _finish(self, context: Any, token: Any, number: int) -> None:
        try:
            self.link.room(token, "token")[...] = number
            self.link.write(context, token, "token")
        except BaseException as error:  # as above
            self._fail(error)

    def _count(self, to_host: int = 0, to_device: int = 0) -> None:
        with self._lock:
            self.traffic.to_host += to_host
            self.traffic.to_device += to_device
