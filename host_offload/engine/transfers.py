"""Transfers between buffers and a disk, and their statistics.

Two transfers of the same record are ordered; transfers of different records run concurrently.
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
    """Reads and writes records.

    Implemented by `host_offload.disk.DirectIo` and `host_offload.disk.TensorstoreIo`.
    """

    def read(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]":
        """Start to read a record into a buffer; return a future of the seconds it took."""
        ...

    def write(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]":
        """Start to write a record from a buffer; return a future of the seconds it took."""
        ...

    def close(self) -> None:
        """Wait for all transfers, and release resources."""
        ...


@dataclasses.dataclass(eq=False)
class Write:
    """A write in flight.

    Attributes:
      buffer: buffer that holds the record.
      filled: future that is done when the buffer holds the record; None if it already does.
      done: future that is done when the record is on disk, or the write has failed.
      copies: reads that copy the record from the buffer, in the order in which they end.
    """

    buffer: np.ndarray
    filled: "Future[None] | None"
    done: "Future[float]" = dataclasses.field(default_factory=Future)
    copies: "list[Future[float]]" = dataclasses.field(default_factory=list)

    def copy_to(self, buffer: np.ndarray) -> float:
        """Wait until this write's buffer is filled, and copy it to another buffer.

        Args:
          buffer: destination, of the same size.

        Returns:
          The seconds that the copy took.
        """
        if self.filled is not None:
            self.filled.result()
        start = time.perf_counter()
        np.copyto(buffer, self.buffer)
        return time.perf_counter() - start


class Transfers:
    """The transfers of an engine, and their statistics."""

    def __init__(self, io: Io, fail: Callable[[BaseException, str, int], None]) -> None:
        """Start the thread that copies between buffers.

        Args:
          io: reader and writer of records, closed by `close`.
          fail: function that receives the error, kind and layer of a failed write. The error of a
            read is raised by its future instead.
        """
        self.io = io
        self._fail = fail
        # One thread, so that copies end in order.
        self._copier = ThreadPoolExecutor(1, "zerojax-copy")
        self._lock = threading.Lock()  # protects the two attributes below
        self._stats = Stats()
        self._queued = 0

    def read(
        self, event: Event, store: Store, buffer: np.ndarray, pending: Write | None
    ) -> "Future[float]":
        """Start to read a record.

        Args:
          event: the read, not yet timed.
          store: records of the kind.
          buffer: destination.
          pending: write of the same record that may still be in flight, if any; the record is
            copied from its buffer instead of read from disk.

        Returns:
          A future of the seconds that the read took.
        """
        # The engine holds the lane's lock during this call, and needs the same lock to give back a
        # written buffer. So the buffer stays valid between this test and the copy.
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
        """Write a record as soon as its buffer is filled.

        Args:
          event: the write, not yet timed.
          store: records of the kind.
          write: buffer to write, and the futures that order it.
          after: earlier write of the same record, which must be done first, if any.
        """

        def move() -> "Future[float]":
            # Filled by now: `result` only raises an error of the copy from the device.
            if write.filled is not None:
                write.filled.result()
            return self.io.write(store, event.layer, write.buffer)

        def begin(_: Any = None) -> None:
            self._start(event, write.buffer, move, write.done)

        def order(_: Any = None) -> None:
            if after is None:
                begin()
            else:
                # Two writes of one record must not overlap, or the older one could reach the disk
                # last.
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
        """Start a transfer and count it when it ends.

        `move` starts the transfer and returns its future; `done` is completed after the counting.
        """
        with self._lock:
            queued = time.perf_counter()
            self._queued += 1
            self._stats.most_queued = max(self._stats.most_queued, self._queued)

        def finish(transfer: "Future[float]") -> None:
            # Count, and report a failed write, before completing `done`: a waiter may look at the
            # statistics and the error immediately.
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
            # An error must complete `done` too: a callback waits for it, and it triggers giving the
            # buffer back.
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
        # The reader reports how long a transfer took, not when it began: count back from its end.
        start = max(queued, time.perf_counter() - seconds)
        stats.note(event._replace(start=start, seconds=seconds, queued=queued, num_bytes=num_bytes))

    def waiting(self, event: Event, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`, and count its time as a wait of the step.

        Args:
          event: transfer that the step waits for.
          call: function that waits.
          *args: arguments of `call`.
        """
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.waited(event, start)

    def waited(self, event: Event, start: float) -> None:
        """Count a wait of the step from `start` until now; most waits take no time.

        Args:
          event: transfer that the step waited for.
          start: start of the wait, in seconds of `time.perf_counter`.
        """
        seconds = time.perf_counter() - start
        name, kind, rank, layer, number = event[:5]
        # Not `_replace`, which takes longer than everything else here; every callback waits twice.
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
        """End the copy thread, and close `io`."""
        self._copier.shutdown()
        self.io.close()

    def take_stats(self) -> Stats:
        """Return the statistics since the last call of this method."""
        with self._lock:
            stats = self._stats
            self._stats = Stats()
            return stats

    def recent_events(self) -> list[Event]:
        """Return the last MOST_EVENTS transfers and waits not yet returned by `take_stats`."""
        with self._lock:
            return list(self._stats.events)

    def count_miss(self) -> None:
        """Count a read that was started only when its record was asked for."""
        with self._lock:
            self._stats.misses += 1
