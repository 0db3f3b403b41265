"""Transfers between buffers and a disk, one after the other where they must be, each counted with the waits for it."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from host_offload.store import Store
from host_offload.swap_stats import Event, Stats


class Io(Protocol):
    """How records are read and written: `host_offload.direct_io` or `host_offload.tensorstore_io`."""

    def read(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]": ...

    def write(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]": ...

    def close(self) -> None: ...


class Transfers:
    """What an engine has under way, and its statistics."""

    def __init__(self, io: Io, fail: Callable[[Exception, str, int], None]) -> None:
        """Use `io`; the error of a write is handed to `fail` with kind and layer, that of a read to whoever waits for it."""
        self.io, self._fail = io, fail
        self._lock = threading.Lock()  # of what follows
        self._stats = Stats()
        self._queued = 0

    def start(
        self,
        event: Event,
        store: Store,
        buffer: np.ndarray,
        after: "Future[float] | None",
        filled: "Future[None] | None" = None,
    ) -> "Future[float]":
        """Read or write a record: after another transfer, if one is given, and when its buffer is filled."""
        done: Future[float] = Future()
        queued = 0.0

        def begin(_: Any = None) -> None:
            nonlocal queued
            with self._lock:
                queued = time.perf_counter()
                self._queued += 1
                self._stats.most_queued = max(self._stats.most_queued, self._queued)
            try:
                if filled is not None:
                    filled.result()
                moved = (self.io.read if event.name == "read" else self.io.write)(store, event.layer, buffer)
            except Exception as error:
                moved = Future()
                moved.set_exception(error)
            moved.add_done_callback(finish)

        def finish(moved: "Future[float]") -> None:
            error = moved.exception()
            with self._lock:
                self._queued -= 1
                if error is None:
                    self._count(event, queued, moved.result(), buffer.nbytes)
            if error is None:
                done.set_result(moved.result())
                return
            if event.name == "write" and isinstance(error, Exception):
                self._fail(error, event.kind, event.layer)
            done.set_exception(error)

        def order(_: Any = None) -> None:
            if after is None:
                begin()
            else:
                after.add_done_callback(begin)

        if filled is None:
            order()
        else:
            filled.add_done_callback(order)
        return done

    def _count(self, event: Event, queued: float, seconds: float, num_bytes: int) -> None:
        stats = self._stats
        if event.name == "read":
            stats.bytes_read += num_bytes
            stats.read_seconds += seconds
        else:
            stats.bytes_written += num_bytes
            stats.write_seconds += seconds
        start = max(queued, time.perf_counter() - seconds)
        stats.note(dataclasses.replace(event, start=start, seconds=seconds, queued=queued, num_bytes=num_bytes))

    def waiting(self, event: Event, call: Callable[[], Any]) -> Any:
        """Call, and count the time as a stall of the step for a transfer."""
        start = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._stats.stall_seconds[event.kind] += seconds
                self._stats.note(
                    dataclasses.replace(event, name=f"{event.name}_wait", start=start, seconds=seconds, queued=start)
                )

    def take_stats(self) -> Stats:
        """Return the statistics since this was last called."""
        with self._lock:
            taken, self._stats = self._stats, Stats()
            return taken

    def recent_events(self) -> list[Event]:
        """Return transfers and waits that `take_stats` has not returned yet, at most the last MOST_EVENTS."""
        with self._lock:
            return list(self._stats.events)

    def count_miss(self) -> None:
        """Count a read that was not ahead of its use."""
        with self._lock:
            self._stats.misses += 1
