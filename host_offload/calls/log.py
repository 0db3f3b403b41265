"""What programs on GPUs send along with their callbacks, in page-locked memory, in the order in
which they send it.

A callback queues the copy of 12 bytes on the program's stream and goes on. When the program is
over, the log holds what each call was asked for, beside what the callback assumed.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.device import Driver, allocate, pointer, stream_of

Sent = tuple[int, int, int]
_CALLS = 4096  # that one piece of memory holds
_WIDTH = 3
_BYTES = 4 * _WIDTH


class CallLog:
    """The calls of this process's GPUs, each of which has memory of its own."""

    def __init__(self, devices: Sequence[Any], driver: Driver, process: int = 0) -> None:
        """Serve the devices of a mesh, in its order.

        Args:
          devices: all of them.
          driver: of this machine.
          process: whose devices call here.
        """
        self.driver = driver
        local = [
            (rank, device) for rank, device in enumerate(devices) if device.process_index == process
        ]
        self._contexts = {
            rank: driver.context_of(device.local_hardware_id or 0) for rank, device in local
        }
        self._by_stream: dict[int, int] = {}
        self._of_rank = {rank: _Calls() for rank in self._contexts}
        memory = [calls.memory for calls in self._of_rank.values()]
        weakref.finalize(self, _unregister, driver, memory)

    def rank_of(self, context: Any, where: Any) -> int:
        """Return the device whose program calls, by its stream."""
        stream = stream_of(context)
        rank = self._by_stream.get(stream)
        if rank is None:
            # XLA uses the primary context of a GPU, and so do we. Another one tells nothing: then
            # the program is asked.
            of_stream = self.driver.context_of_stream(stream)
            found = [rank for rank, own in self._contexts.items() if own == of_stream]
            rank = found[0] if len(found) == 1 else self.read(context, where)[0]
            self._by_stream[stream] = rank
        return rank

    def read(self, context: Any, where: Any) -> Sent:
        """Return what a call sends; waits for all that the program has queued."""
        stream, call = stream_of(context), self.driver
        # Into memory that is not page-locked the driver copies before it returns, or before the
        # stream is finished.
        room = np.zeros(_WIDTH, np.int32)
        call.ensure_context()
        call.copy(room.ctypes.data, pointer(where), _BYTES, stream)
        call.finish_stream(stream)
        rank, layer, number = room.tolist()
        return rank, layer, number

    def append(self, context: Any, where: Any, assumed: Any, rank: int) -> None:
        """Queue the copy of what a call sends, and keep what was assumed beside it."""
        calls, stream = self._of_rank[rank], stream_of(context)
        with calls.lock:
            count = len(calls.assumed)
            if count == _CALLS * len(calls.memory):
                self._grow(rank)
            calls.assumed.append(assumed)
            calls.streams.add(stream)
        self.driver.use(self._contexts[rank])
        self.driver.copy(
            calls.addresses[count // _CALLS] + _BYTES * (count % _CALLS),
            pointer(where),
            _BYTES,
            stream,
        )

    def reserve(self, num_calls: int) -> None:
        """Have memory for so many calls of each device."""
        for rank, calls in self._of_rank.items():
            while len(calls.memory) * _CALLS < num_calls:
                self._grow(rank)

    def _grow(self, rank: int) -> None:
        piece = allocate(_BYTES * _CALLS)
        self.driver.register(piece)
        self._of_rank[rank].memory.append(piece)
        self._of_rank[rank].addresses.append(piece.ctypes.data)

    def clear(self) -> None:
        """Forget all calls."""
        self._finish()  # a copy of a program that was left would write into what the next one sends
        self._by_stream.clear()
        for calls in self._of_rank.values():
            calls.assumed.clear()
            calls.streams.clear()

    def entries(self) -> Iterator[tuple[Any, Sent]]:
        """Yield what was assumed and what was sent, of all calls since `clear`, when the program is
        over.
        """
        self._finish()
        for calls in self._of_rank.values():
            sent = np.concatenate(
                [np.zeros(0, np.int32), *(piece.view(np.int32) for piece in calls.memory)]
            )
            for count, assumed in enumerate(calls.assumed):
                rank, layer, number = sent[_WIDTH * count : _WIDTH * (count + 1)].tolist()
                yield assumed, (rank, layer, number)

    def _finish(self) -> None:
        """Wait for the copies that are queued."""
        for rank, calls in self._of_rank.items():
            for stream in calls.streams:
                self.driver.use(self._contexts[rank])
                self.driver.finish_stream(stream)


class _Calls:
    """The calls of one device.

    Attributes:
      memory: page-locked, each piece for `_CALLS` calls.
      addresses: of the pieces.
      assumed: of each call.
      streams: from which they came.
      lock: of all of these: what nothing orders in a program may call at once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: list[np.ndarray] = []
        self.addresses: list[int] = []
        self.assumed: list[Any] = []
        self.streams: set[int] = set()


def _unregister(driver: Driver, memory: Sequence[Sequence[np.ndarray]]) -> None:
    """Undo the page-locks, before the memory is freed."""
    for pieces in memory:
        for piece in pieces:
            driver.unregister(piece)
