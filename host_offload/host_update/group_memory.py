"""Groups of leaves that are updated together, and their memory and events on one GPU.

`host_offload.host_update.gpu_worker` explains how their arrays cross the link, and what buffers,
slots and rooms are.
"""

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.device import Driver, allocate

HOST_LAG = 2
"""Number of layers between handing over gradients and taking the new parameters made from them.

With HOST_LAG = 1 the program continues only when the previous layer is updated. The next gradients
then arrive after a layer's matrix products and a copy, and the kernels have to wait for them.
Predicted step time for 6.7 B parameters and 16,384 tokens on an H200: 1.79 s with 1, 1.69 s with 2.
"""

_ALIGNMENT = 256
Spec = tuple[tuple[int, ...], np.dtype]
"""(shape, dtype) of an array."""


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Leaves that are updated together, and their arrays that cross the link.

    If the leaves are stacked, all specs are for one layer.

    Attributes:
      leaves: indices of the leaves.
      grads: gradient of each leaf; empty if the gradients are in host memory.
      weights: master weight of each leaf; empty if the weights are not stored on the device.
      params: parameters of each leaf; empty if the parameters are not stored on the device. In a
        delayed update, the parameters of one layer, which cross through a slot.
      num_scalars: length of the vector of all leaves' scalars.
      stacked: whether the leaves are stacks of layers.
      stashes: whether the gradients are only copied to host memory, to be used later.
    """

    leaves: range
    grads: tuple[Spec, ...]
    weights: tuple[Spec, ...]
    params: tuple[Spec, ...]
    num_scalars: int
    stacked: bool
    stashes: bool = False

    @property
    def down(self) -> "Packing":
        """Packing of the arrays that are copied to the host.

        They are the callback's i32[4], the scalars, the gradients and the weights; for a stash,
        only the gradients.
        """
        if self.stashes:
            return Packing(self.grads)
        request = ((4,), np.dtype(np.int32))
        scalars = ((self.num_scalars,), np.dtype(np.float32))
        return Packing([request, scalars, *self.grads, *self.weights])

    @property
    def up(self) -> "Packing":
        """Packing of the new parameters, which are copied to the device."""
        return Packing(self.params)

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory per device for the slots."""
        if not self.stacked:
            return 0
        return self.down.num_bytes + self.num_slots_up * self.up.num_bytes

    @property
    def num_slots_up(self) -> int:
        """Number of slots through which new parameters are copied to the device."""
        if not (self.stacked and self.params):
            return 0
        return 1 if self.stashes else HOST_LAG

    @property
    def num_buffers(self) -> int:
        """Number of buffers into which gradients are copied; a stash has memory of its own."""
        if self.stashes:
            return 0
        return HOST_LAG + 1 if self.stacked else 1

    @property
    def num_rooms(self) -> int:
        """Number of rooms, each for the new parameters of one layer or of the unstacked leaves."""
        if self.stashes or not self.params:
            return 0
        return HOST_LAG if self.stacked else 1

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory per device for buffers and rooms."""
        return self.num_buffers * self.down.num_bytes + self.num_rooms * self.up.num_bytes


class Span(NamedTuple):
    """The bytes of an array in a packing.

    Attributes:
      start: offset, in bytes.
      num_bytes: bytes of the array, without padding.
    """

    start: int
    num_bytes: int


class Packing:
    """A layout of arrays, one after the other in memory.

    Attributes:
      specs: shape and dtype of each array.
      spans: bytes of each array.
      num_bytes: bytes of the full layout, padding included.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        """Compute the layout of arrays, given as (shape, dtype)."""
        self.specs = tuple(specs)
        self.spans = list[Span]()
        self.num_bytes = 0
        for shape, dtype in specs:
            size = math.prod(shape) * dtype.itemsize
            self.spans.append(Span(self.num_bytes, size))
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: np.ndarray) -> list[np.ndarray]:
        """Return views of the arrays in memory, uint8[num_bytes]."""
        arrays = []
        for (shape, dtype), (start, size) in zip(self.specs, self.spans, strict=True):
            arrays.append(memory[start : start + size].view(dtype).reshape(shape))
        return arrays


@dataclasses.dataclass(eq=False)
class Job:
    """A job of the worker: to update leaves whose gradients are in flight or have arrived.

    Attributes:
      group: group of the leaves; None for a job with `work`.
      leaves: indices of the leaves.
      buffer: index of the buffer to which the gradients are copied.
      room: index of the room for the new parameters.
      arrived: event that the gradients have arrived.
      failed: whether queueing the copies failed, so that there is nothing to do.
      has_updated: whether new parameters are in the room, and, if they cross through a slot, in
        flight to it.
      work: function to call instead of running kernels; returns whether it updated.
      failure: function that receives the error if the job fails.
      done: event, set when the worker has finished the job.
    """

    group: "GroupMemory | None"
    leaves: range
    buffer: int
    room: int
    arrived: int
    failed: bool = False
    has_updated: bool = False
    work: Callable[[], bool] | None = None
    failure: Callable[[BaseException], None] | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def finish(self) -> None:
        """Wait until the worker has finished this job."""
        self.done.wait()


class GroupMemory:
    """Memory and events of a group of leaves on one GPU, used by callbacks and by the worker.

    Attributes:
      spec: the leaves, and their arrays that cross the link.
      driver: CUDA driver of this machine.
      down: packing of the arrays that are copied to the host.
      up: packing of the new parameters.
      buffers: for each buffer in host memory, its arrays, packed as in `down`.
      rooms: for each room in host memory, its arrays, packed as in `up`.
      slot_down: device memory through which stacked leaves are copied to the host, or None.
      slots_up: device memory through which the new parameters of stacked leaves are copied.
      full: event that the program has filled `slot_down`.
      arrived: events that gradients have arrived: one per buffer, or per unstacked leaf.
      sent: event for each slot up that it has been filled.
      empty: event for each slot up that the program has read it.
      count: number of times that a callback handed over gradients in this step.
      updated: (first leaf, layer) of the records updated in this step: none may be updated twice.
      waiting: jobs whose results no callback has taken yet, oldest first.
    """

    def __init__(self, spec: LeafGroup, driver: Driver, device: Any) -> None:
        """Allocate the group's memory and events on a GPU."""
        self.spec = spec
        self.driver = driver
        self.down = spec.down
        self.up = spec.up
        self._memory = list[np.ndarray]()
        self.buffers = [self.down.views(self._host(self.down)) for _ in range(spec.num_buffers)]
        self.rooms = [self.up.views(self._host(self.up)) for _ in range(spec.num_rooms)]
        self.slot_down = self._slot(self.down, device) if spec.stacked else None
        self.slots_up = [self._slot(self.up, device) for _ in range(spec.num_slots_up)]
        self.full = driver.make_event()
        num_arrivals = spec.num_buffers if spec.stacked else max(1, len(spec.leaves))
        if spec.stashes:
            num_arrivals = 1
        self.arrived = [driver.make_event() for _ in range(num_arrivals)]
        self.sent = [driver.make_event() for _ in self.slots_up]
        self.empty = [driver.make_event() for _ in self.slots_up]
        self.reset()

    def _host(self, packing: Packing) -> np.ndarray:
        memory = allocate(packing.num_bytes)
        self.driver.register(memory)
        self._memory.append(memory)
        return memory

    def _slot(self, packing: Packing, device: Any) -> jax.Array:
        # Wait until XLA has filled the memory: nothing orders XLA's streams before the streams used
        # here.
        return jax.device_put(jnp.zeros(packing.num_bytes, jnp.uint8), device).block_until_ready()

    def reset(self) -> None:
        """Prepare for the first callback of a step."""
        self.count = 0
        self.updated = set[tuple[int, int]]()
        # Results lag by `HOST_LAG` calls, so the first calls have no results to take.
        no_results = [None] * HOST_LAG if self.spec.stacked else []
        self.waiting: collections.deque[Job | None] = collections.deque(no_results)

    def close(self) -> None:
        """Destroy the events and unregister the host memory."""
        for event in (self.full, *self.arrived, *self.sent, *self.empty):
            self.driver.destroy_event(event)
        for memory in self._memory:
            self.driver.unregister(memory)
