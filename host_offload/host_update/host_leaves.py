"""The leaves that are updated on the host: their kernels, their host memory and their errors.

The memory belongs to arrays that are arguments and results of the program. As far as XLA knows, the
program does not change them; outside of a step they are ordinary arrays. On a CPU each callback
receives them (`take`). A GPU program cannot pass host memory to a callback, so there they are bound
before the step (`bind`). JAX returns read-only views, which are made writable here.

A callback must never raise, because another device may be waiting for it in a collective. It stores
its error (`fail`), and `check` raises the first error when the step has ended. Errors of the disk
are passed to the engine, whose own `check` raises them.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.device import Link, Views, writable
from host_offload.disk import SwapError
from host_offload.engine import Mode, Swap
from host_offload.host_update.leaf_kernel import LeafKernel, Traffic

DeviceLeaf = tuple[int, int]
"""(position of a device in the mesh, index of a leaf)."""


class HostLeaves:
    """The leaves of one program that are updated on the host.

    Attributes:
      kernels: kernel of each leaf.
      link: access to device buffers in callbacks.
      swap: connection with the engine of the records on disk; None without such records.
      in_place: whether an update with the previous step's gradients overwrites the parameters, and
        this step's gradients then overwrite the previous ones (an update in forward). If not, both
        have a second set of arrays (a delayed update).
      arrays: each leaf's host arrays, in the order of `LeafKernel.arrays`.
      stashed: gradients of this step, stored from backward until the update.
      pending: gradients of the previous step, if a step updates with them.
      new_params: parameters that such an update makes.
      traffic: bytes that crossed the link.
    """

    def __init__(
        self,
        kernels: Sequence[LeafKernel],
        link: Link,
        swap: Swap | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """Store the kernels, without binding memory."""
        self.kernels = tuple(kernels)
        self.link = link
        self.swap = swap
        self.in_place = in_place
        self.arrays: dict[DeviceLeaf, list[np.ndarray]] = {}
        self.stashed: dict[DeviceLeaf, np.ndarray] = {}
        self.pending: dict[DeviceLeaf, np.ndarray] = {}
        self.new_params: dict[DeviceLeaf, np.ndarray] = {}
        self.traffic = Traffic()
        self._allocations: list[np.ndarray] = []
        self._num_memory = tuple(
            kernel.arrays.count(None) + kernel.pending for kernel in self.kernels
        )
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()  # of `traffic`: devices call back concurrently

    # --- memory -----------------------------------------------------------------------------------

    def take(self, device: int, first: int, count: int, memory: Sequence[Any]) -> None:
        """Bind the arrays that a callback received.

        Args:
          device: position of the device in the mesh.
          first: index of the first leaf.
          count: number of leaves.
          memory: for each leaf, its arrays in host memory, followed by its pending gradients if
            there are any; empty if the arrays are bound already.
        """
        if not memory:
            return
        remaining = iter(memory)
        for leaf in range(first, first + count):
            read_only = itertools.islice(remaining, self._num_memory[leaf])
            arrays = [writable(np.asarray(array)) for array in read_only]
            if self.kernels[leaf].pending:
                self.bind_pending(device, leaf, arrays.pop())
            self.bind(device, leaf, arrays)

    def bind(self, device: int, leaf: int, arrays: Sequence[np.ndarray]) -> None:
        """Set a leaf's host arrays on one device, in the order of `LeafKernel.arrays`."""
        self.arrays[device, leaf] = list(arrays)
        kernel = self.kernels[leaf]
        if self.in_place and not kernel.params_on_device:
            self.new_params[device, leaf] = arrays[-1] if kernel.casts else arrays[0]

    def bind_pending(self, device: int, leaf: int, grads: np.ndarray) -> None:
        """Set the memory of a leaf's pending gradients."""
        self.pending[device, leaf] = grads
        if self.in_place:
            self.stashed[device, leaf] = grads

    def reserve(self, device: int, leaf: int, shape: Sequence[int], dtype: Any) -> None:
        """Allocate memory for a leaf's gradients of this step, unless it exists already."""
        if (device, leaf) not in self.stashed:
            self.stashed[device, leaf] = self._allocated(shape, dtype)

    def bind_stash(self, device: int, leaf: int, grads: np.ndarray) -> None:
        """Set the memory for a leaf's gradients of this step."""
        self.stashed[device, leaf] = grads

    def reserve_new_params(self, device: int, leaf: int, shape: Sequence[int], dtype: Any) -> None:
        """Allocate memory for a leaf's new parameters, unless it exists already."""
        if (device, leaf) not in self.new_params:
            self.new_params[device, leaf] = self._allocated(shape, dtype)

    def bind_new_params(self, device: int, leaf: int, params: np.ndarray) -> None:
        """Set the memory for a leaf's new parameters."""
        self.new_params[device, leaf] = params

    def _allocated(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self._allocations.append(self.link.allocate(shape, dtype))
        return self._allocations[-1]

    def release(self) -> None:
        """Drop all references to memory; a later step must bind and reserve its memory again."""
        for memory in (self.arrays, self.stashed, self.pending, self.new_params):
            memory.clear()
        self.link.free(self._allocations)
        self._allocations.clear()

    def record(self, array: np.ndarray, leaf: int, layer: int) -> np.ndarray:
        """Return a view of one layer of a leaf's array; of the full array if it is unstacked."""
        # With `...` the result is a view even if a layer is a single number.
        return array[layer, ...] if self.kernels[leaf].stacked else array

    def record_modes(self, leaf_ids: Iterable[int]) -> dict[str, Mode]:
        """Return how an update of some leaves uses the records on disk, by kind."""
        modes: dict[str, Mode] = {}
        for leaf in leaf_ids:
            modes |= self.kernels[leaf].records
        return modes

    # --- the update -------------------------------------------------------------------------------

    def run_kernel(
        self,
        device: int,
        leaf: int,
        layer: int,
        grad: np.ndarray,
        scalars: np.ndarray,
        *,
        weight: np.ndarray | None = None,
        result: np.ndarray | None = None,
        views: Mapping[str, Views] | None = None,
    ) -> None:
        """Update one record of a leaf.

        Args:
          device: position of the device in the mesh.
          leaf: index of the leaf.
          layer: layer of the record; 0 for an unstacked leaf.
          grad: gradient of the record.
          scalars: f32[n], scalars of all leaves.
          weight: copy of the float32 weight, if it lives on the device.
          result: memory for the new parameters; None updates them in place.
          views: leaves of the borrowed records on disk, by kind.
        """
        kernel = self.kernels[leaf]
        in_memory = iter(self.arrays.get((device, leaf), []))
        arrays = list[np.ndarray]()
        for place in kernel.arrays:
            if place is None:
                arrays.append(self.record(next(in_memory), leaf, layer))
            else:
                arrays.append((views or {})[place.kind][place.leaf])
        # In the order of `LeafKernel.arrays`: the weight unless it is on the device, the states,
        # the parameters cast from the weight.
        if weight is None:
            weight = arrays.pop(0)
        states = arrays[: kernel.num_states]
        params = arrays[kernel.num_states :]
        # Outputs in the kernel's order; None overwrites the output's own input.
        if kernel.casts:
            cast = params[0] if result is None else result
            outputs = [None, *[None] * len(states), cast]
        else:
            outputs = [result, *[None] * len(states)]
        # The kernel works in place, so reshape must return a view. It does, because a record is
        # contiguous.
        inputs = [array.reshape(-1) for array in (grad, weight, *states)]
        kernel.kernel(
            [*inputs, *scalars[kernel.scalars]],
            [None if a is None else a.reshape(-1) for a in outputs],
        )

    def stashed_grad(
        self, device: int, leaf: int, layer: int, views: Mapping[str, Views]
    ) -> np.ndarray:
        """Return the memory of a stashed gradient.

        Args:
          device: position of the device in the mesh.
          leaf: index of the leaf.
          layer: layer of the record; 0 for an unstacked leaf.
          views: leaves of the borrowed records on disk, by kind.
        """
        if (place := self.kernels[leaf].grad) is not None:
            return views[place.kind][place.leaf]
        return self.record(self.stashed[device, leaf], leaf, layer)

    @contextlib.contextmanager
    def borrowed(
        self, device: int, layer: int, modes: Mapping[str, Mode], number: int
    ) -> Iterator[dict[str, Views]]:
        """Return a context that lends one layer's records of several kinds on disk.

        Args:
          device: position of the device in the mesh.
          layer: index of the records.
          modes: how to use the records, by kind.
          number: number of the state to which the records belong.
        """
        with contextlib.ExitStack() as stack:
            if not modes:
                yield {}
                return
            assert self.swap is not None
            engine = self.swap.find_engine(number)
            yield {
                kind: stack.enter_context(engine.borrow(kind, device, layer, mode))
                for kind, mode in modes.items()
            }

    def skip(self, device: int, layer: int, modes: Mapping[str, Mode], number: int) -> None:
        """Skip one layer's records of several kinds, which an update would have borrowed.

        Args:
          device: position of the device in the mesh.
          layer: index of the records.
          modes: how the records would have been used, by kind.
          number: number of the state to which the records belong.
        """
        for kind, mode in modes.items():
            assert self.swap is not None
            self.swap.find_engine(number).skip(kind, device, layer, mode)

    # --- the end of a callback --------------------------------------------------------------------

    def finish(self, context: Any, token: Any, number: int) -> None:
        """Write a callback's output token, which orders the device's next callback.

        Args:
          context: the callback's context.
          token: i32[1], output for the token.
          number: number of the state on disk, the token's value.
        """
        try:
            self.link.room(context, token, "token")[...] = number
            self.link.write(context, token, "token")
        except BaseException as error:  # a callback must not raise
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Store an error: a disk error for the engine's `check`, any other for `check` here."""
        if isinstance(error, SwapError) and self.swap is not None:
            self.swap.fail(error)
        else:
            self._errors.append(error)

    def count(self, to_host: int = 0, to_device: int = 0) -> None:
        """Count bytes that crossed the link."""
        with self._lock:
            self.traffic.to_host += to_host
            self.traffic.to_device += to_device

    def check(self) -> None:
        """Raise the first error of the callbacks since the last check.

        Raises:
          RuntimeError: an update failed; the state is partly updated and lost.
          BaseException: a callback raised an error that is not an Exception, such as
            KeyboardInterrupt; it is raised unchanged.
        """
        if errors := self.take_errors():
            if not isinstance(errors[0], Exception):
                raise errors[0]
            raise RuntimeError(
                "the optimizer's update on the host failed, and the state is lost: restore a "
                "checkpoint, or make a state with init"
            ) from errors[0]

    def take_errors(self) -> list[BaseException]:
        """Return the errors of the callbacks since the last call of this method."""
        errors = self._errors
        self._errors = []
        return errors
