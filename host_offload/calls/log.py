"""A log, in page-locked memory, of the requests that GPU programs send with their callbacks.

A callback queues a copy of 12 bytes on the program's stream and continues. When the program has
ended, the log holds the record that each call really asked for and the record that the callback
assumed, in the order of the calls.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.device import Driver, allocate, find_stream, pointer

Sent = tuple[int, int, int]
_CALLS = 4096  # calls per chunk of memory
_WIDTH = 3
_BYTES = 4 * _WIDTH


class CallLog:
    """Log of the calls of this process's GPUs; each GPU has its own memory."""

    def __init__(self, devices: Sequence[Any], driver: Driver, process: int = 0) -> None:
        """Create an empty log for a mesh.

        Args:
          devices: all devices of the mesh, in its order.
          driver: CUDA driver of this machine.
          process: index of the process whose devices are logged here.
        """
        self.driver = driver
        self._contexts: dict[int, int] = {}
        for rank, device in enumerate(devices):
            if device.process_index == process:
                self._contexts[rank] = driver.retain_context(device.local_hardware_id or 0)
        self._by_stream: dict[int, int] = {}
        self._of_rank = {rank: _Calls() for rank in self._contexts}
        memory = [calls.memory for calls in self._of_rank.values()]
        weakref.finalize(self, _unregister, driver, memory)

    def find_rank(self, context: Any, request: Any) -> int:
        """Return the rank of the calling device, found by its stream.

        Args:
          context: the callback's context.
          request: the callback's buffer, i32[3] on the device.
        """
        stream = find_stream(context)
        rank = self._by_stream.get(stream)
        if rank is None:
            # XLA normally uses a GPU's primary context, as this module does. If the stream belongs
            # to another context, wait for the rank that the program sends.
            stream_context = self.driver.context_of_stream(stream)
            ranks = [n for n, primary in self._contexts.items() if primary == stream_context]
            rank = ranks[0] if len(ranks) == 1 else self.read(context, request)[0]
            self._by_stream[stream] = rank
        return rank

    def read(self, context: Any, request: Any) -> Sent:
        """Return (rank, layer, number) of a call, after waiting for the program's queued work.

        Args:
          context: the callback's context.
          request: the callback's buffer, i32[3] on the device.
        """
        stream = find_stream(context)
        call = self.driver
        # `room` is not page-locked: the driver fills it before `copy` returns, or at the latest
        # before the stream is finished.
        room = np.zeros(_WIDTH, np.int32)
        call.ensure_context()
        call.copy(room.ctypes.data, pointer(request), _BYTES, stream)
        call.finish_stream(stream)
        rank, layer, number = room.tolist()
        return rank, layer, number

    def append(self, context: Any, request: Any, assumed: Any, rank: int) -> None:
        """Queue the copy of a call's buffer to the log, and store the assumption with it.

        Args:
          context: the callback's context.
          request: the callback's buffer, i32[3] on the device.
          assumed: value that `entries` yields with this call.
          rank: position of the device in the mesh.
        """
        calls = self._of_rank[rank]
        stream = find_stream(context)
        with calls.lock:
            count = len(calls.assumed)
            if count == _CALLS * len(calls.memory):
                self._grow(rank)
            calls.assumed.append(assumed)
            calls.streams.add(stream)
        self.driver.use(self._contexts[rank])
        target = calls.addresses[count // _CALLS] + _BYTES * (count % _CALLS)
        self.driver.copy(target, pointer(request), _BYTES, stream)

    def reserve(self, num_calls: int) -> None:
        """Allocate memory for at least `num_calls` calls per device."""
        for rank, calls in self._of_rank.items():
            while len(calls.memory) * _CALLS < num_calls:
                self._grow(rank)

    def _grow(self, rank: int) -> None:
        chunk = allocate(_BYTES * _CALLS)
        self.driver.register(chunk)
        self._of_rank[rank].memory.append(chunk)
        self._of_rank[rank].addresses.append(chunk.ctypes.data)

    def clear(self) -> None:
        """Forget all calls."""
        # A pending copy of an abandoned program would overwrite an entry of the next program.
        self._finish()
        self._by_stream.clear()
        for calls in self._of_rank.values():
            calls.assumed.clear()
            calls.streams.clear()

    def entries(self) -> Iterator[tuple[Any, Sent]]:
        """Yield (assumed, sent) for each call since `clear`; call this when the program has ended.

        `sent` is (rank, layer, number).
        """
        self._finish()
        for calls in self._of_rank.values():
            chunks = [chunk.view(np.int32) for chunk in calls.memory]
            sent = np.concatenate([np.zeros(0, np.int32), *chunks])
            for count, assumed in enumerate(calls.assumed):
                rank, layer, number = sent[_WIDTH * count : _WIDTH * (count + 1)].tolist()
                yield assumed, (rank, layer, number)

    def _finish(self) -> None:
        """Wait for all queued copies."""
        for rank, calls in self._of_rank.items():
            for stream in calls.streams:
                self.driver.use(self._contexts[rank])
                self.driver.finish_stream(stream)


class _Calls:
    """The calls of one device.

    Attributes:
      memory: page-locked chunks, each for `_CALLS` calls.
      addresses: address of each chunk.
      assumed: assumption of each call.
      streams: streams from which the device called.
      lock: protects the other attributes: unordered callbacks of a program may run concurrently.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: list[np.ndarray] = []
        self.addresses: list[int] = []
        self.assumed: list[Any] = []
        self.streams: set[int] = set()


def _unregister(driver: Driver, memory: Sequence[Sequence[np.ndarray]]) -> None:
    """Unlock the pages before the memory is freed."""
    for chunks in memory:
        for chunk in chunks:
            driver.unregister(chunk)
