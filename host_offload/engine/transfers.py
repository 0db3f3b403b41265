"""Transfers between buffers and a disk, ordered where two of them use one record, and counted with
the waits for them.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from host_offload.disk import Store
from host_offload.engine.stats import Event, Stats


class Io(Protocol):
    """How records are read and written: `host_offload.disk.direct_io` or
    `host_offload.disk.tensorstore_io`.
    """

    def read(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]": ...

    def write(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]": ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class Write:
    """A record on its way to the disk.

    Attributes:
      buffer: the buffer that holds it.
      filled: done when the buffer holds the record; None if it holds it already.
      done: done when the record is on disk, or the write has failed.
      copies: reads of the record that copy it from the buffer, in the order in which they end.
    """

    buffer: np.ndarray
    filled: "Future[None] | None"
    done: "Future[float]" = dataclasses.field(default_factory=Future)
    copies: "list[Future[float]]" = dataclasses.field(default_factory=list)

    def copy_to(self, buffer: np.ndarray) -> float:
        """Wait until the buffer is filled, and copy it; return the seconds that the copy took."""
        if self.filled is not None:
            self.filled.result()
        start = time.perf_counter()
        np.copyto(buffer, self.buffer)
        return time.perf_counter() - start


class Transfers:
    """The transfers of an engine, and their statistics."""

    def __init__(self, io: Io, fail: Callable[[BaseException, str, int], None]) -> None:
        """Use `io`; the error of a write is handed to `fail` with kind and layer, that of a read to
        whoever waits for it.
        """
        self.io, self._fail = io, fail
        self._copier = ThreadPoolExecutor(
            1, "zerojax-copy"
        )  # one thread, so that copies end in order
        self._lock = threading.Lock()  # of what follows
        self._stats = Stats()
        self._queued = 0

    def read(
        self, event: Event, store: Store, buffer: np.ndarray, pending: Write | None
    ) -> "Future[float]":
        """Read a record: from the buffer of a write of it that is under way, else from disk."""
        # The engine holds the lock of the lane during this call, and needs the same lock to give
        # back a buffer that was written. So the buffer stays valid between this test and the copy.
        if pending is None or pending.done.done():
            return self._start(
                event, buffer, lambda: self.io.read(store, event.layer, buffer), Future()
            )

        def copy() -> "Future[float]":
            with self._lock:
                self._stats.bytes_copied += buffer.nbytes
            pending.copies.append(self._copier.submit(pending.copy_to, buffer))
            return pending.copies[-1]

        return self._start(event, buffer, copy, Future())

    def write(self, event: Event, store: Store, write: Write, after: Write | None) -> None:
        """Write a record when its buffer is filled, and after another write of it, if one is given."""

        def move() -> "Future[float]":
            # Filled by now: `result` only raises what went wrong in the copy from the device.
            if write.filled is not None:
                write.filled.result()
            return self.io.write(store, event.layer, write.buffer)

        def begin(_: Any = None) -> None:
            self._start(event, write.buffer, move, write.done)

        def order(_: Any = None) -> None:
            if after is None:
                begin()
            else:
                # Two writes of one record must not overlap, or the older one could be the last to
                # reach the disk.
                after.done.add_done_callback(begin)

        if write.filled is None:
            order()
        else:
            write.filled.add_done_callback(order)

    def _start(
        self,
        event: Event,
        buffer: np.ndarray,
        move: "Callable[[], Future[float]]",
        done: "Future[float]",
    ) -> "Future[float]":
        """Start a transfer by `move`, which returns a future of its end, and count it when it ends."""
        with self._lock:
            queued = time.perf_counter()
            self._queued += 1
            self._stats.most_queued = max(self._stats.most_queued, self._queued)

        def finish(transfer: "Future[float]") -> None:
            # Count before `done` is set, and report the failure of a write too: whoever waits for
            # `done` looks at both at once.
            error = transfer.exception()
            with self._lock:
                self._queued -= 1
                if error is None:
                    self._count(event, queued, transfer.result(), buffer.nbytes)
            if error is None:
                done.set_result(transfer.result())
                return
            if event.name == "write":
                self._fail(error, event.kind, event.layer)
            done.set_exception(error)

        try:
            # An error must end `done` as well: a callback waits for it, and a buffer is given back
            # by it.
            transfer = move()
        except BaseException as error:
            transfer = Future()
            transfer.set_exception(error)
        transfer.add_done_callback(finish)
        return done

    def _count(self, event: Event, queued: float, seconds: float, num_bytes: int) -> None:
        stats = self._stats
        if event.name == "read":
            stats.bytes_read += num_bytes
            stats.read_seconds += seconds
        else:
            stats.bytes_written += num_bytes
            stats.write_seconds += seconds
        # The reader tells how long a transfer took, not when it began: count back from its end.
        start = max(queued, time.perf_counter() - seconds)
        stats.note(event._replace(start=start, seconds=seconds, queued=queued, num_bytes=num_bytes))

    def waiting(self, event: Event, call: Callable[..., Any], *args: Any) -> Any:
        """Call `call(*args)`, and count its time as a wait of the step for a transfer."""
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.waited(event, start)

    def waited(self, event: Event, start: float) -> None:
        """Count a wait of the step for a transfer, from `start` to now; most of them take no time."""
        seconds = time.perf_counter() - start
        name, kind, rank, layer, number = event[:5]
        # `_replace` takes longer than all else here, and every callback waits twice.
        wait = Event(
            name + "_wait",
            kind,
            rank,
            layer,
            number,
            start,
            seconds,
            start,
            event.num_bytes,
            event.ahead,
        )
        with self._lock:
            self._stats.stall_seconds[kind] += seconds
            self._stats.note(wait)

    def close(self) -> None:
        """End the thread, and close `io`."""
        self._copier.shutdown()
        self.io.close()

    def take_stats(self) -> Stats:
        """Return the statistics since this was last called."""
        with self._lock:
            stats, self._stats = self._stats, Stats()
            return stats

    def recent_events(self) -> list[Event]:
        """Return transfers and waits that `take_stats` has not returned yet, at most the last
        MOST_EVENTS.
        """
        with self._lock:
            return list(self._stats.events)

    def count_miss(self) -> None:
        """Count a read that was not ahead of its use."""
        with self._lock:
            self._stats.misses += 1
