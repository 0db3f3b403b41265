"""Record a program's transfers, run by run, and write them to a file when a trace ends.

Outside of a trace only the last run is kept, because the first records of a traced run were read
ahead in it. During a trace all runs are kept, up to MOST_EVENTS transfers and waits. A longer trace
keeps only its last runs; the file's "otherData" and the log report how many were dropped.
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from host_offload.disk import SwapError
from host_offload.engine import MOST_EVENTS, Engine, Stats
from host_offload.schedule import Move
from host_offload.trace.perfetto import Span, build_trace, write_trace
from host_offload.trace.plan import Run

logger = logging.getLogger("zerojax")


class Recorder:
    """Records the runs of one program's engine.

    Attributes:
      distance: prefetch distance, in records of a kind.
    """

    def __init__(self, distance: int) -> None:
        """Start without runs."""
        self.distance = distance
        self._open: Run | None = None  # the run in progress
        self._last: Run | None = None  # the run before the traced ones; outside a trace, the last
        self._traced: list[Run] | None = None
        self._dropped = 0

    def begin(self, name: str, moves: Sequence[Move], engine: Engine) -> None:
        """Start a run.

        If the previous run failed, its transfers are first removed from the engine's statistics.

        Args:
          name: name of the program.
          moves: planned moves, in order.
          engine: engine that moves the records.
        """
        if self._open is not None:
            self._close(engine.take_stats(), None)
        self._open = Run(name=name, moves=tuple(moves), start=time.perf_counter())

    def finish(self, stats: Stats) -> None:
        """End the run.

        Args:
          stats: statistics of the run's transfers.
        """
        if self._open is not None:
            self._close(stats, time.perf_counter())

    def _close(self, stats: Stats, end: float | None) -> None:
        assert self._open is not None
        run = dataclasses.replace(
            self._open, end=end, events=list(stats.events), num_events=stats.num_events
        )
        self._open = None
        if self._traced is None:
            self._last = run
            return
        self._traced.append(run)
        while len(self._traced) > 1 and sum(len(run.events) for run in self._traced) > MOST_EVENTS:
            self._last = self._traced.pop(0)
            self._dropped += 1

    @contextlib.contextmanager
    def trace(
        self,
        path: str | os.PathLike[str],
        engine: Callable[[], Engine | None],
        metadata: Mapping[str, Any],
        predicted: Sequence[Span] = (),
    ) -> Iterator[None]:
        """Return a context that writes the runs inside it to a file when it ends.

        The file is also written if the context ends by an error. A failure to write it then is
        logged and does not replace that error.

        Args:
          path: path of the trace file.
          engine: function that returns the engine, or None if it was closed.
          metadata: entries of the file's "otherData".
          predicted: predicted operations of a step, drawn from the start of each step.

        Raises:
          ValueError: the program is already being traced.
          OSError: the context ended without an error, and the file could not be written.
        """
        if self._traced is not None:
            raise ValueError("this program is traced already: end that trace first")
        self._traced = []
        self._dropped = 0
        has_failed = True
        process = os.getpid()
        try:
            yield
            has_failed = False
        finally:
            # A forked child has no threads to wait for, and the file belongs to its parent.
            if os.getpid() == process:
                self._end_trace(path, engine, metadata, has_failed, predicted)

    def _end_trace(
        self,
        path: str | os.PathLike[str],
        engine: Callable[[], Engine | None],
        metadata: Mapping[str, Any],
        has_failed: bool,
        predicted: Sequence[Span],
    ) -> None:
        runs = self._traced
        self._traced = None
        assert runs is not None
        after = []
        # The last writes of the last run may still be in flight: wait, so that they are drawn.
        if (live := engine()) is not None:
            with contextlib.suppress(SwapError):  # the program's next run raises it
                live.flush()
            after = live.recent_events()
        if self._open is not None:  # the last run failed
            runs = [*runs, dataclasses.replace(self._open, events=after, num_events=len(after))]
            after = []
        before = self._last
        self._last = (runs or [self._last])[-1]
        try:
            self._write(path, runs, before, after, metadata, predicted)
        except Exception as error:
            if not has_failed:
                raise
            logger.error("no trace was written to %s: %r", os.fspath(path), error)

    def _write(
        self,
        path: str | os.PathLike[str],
        runs: list[Run],
        before: Run | None,
        after: list[Any],
        metadata: Mapping[str, Any],
        predicted: Sequence[Span],
    ) -> None:
        lost = sum(run.num_events - len(run.events) for run in runs)
        other_data = {**metadata, "prefetch_distance": self.distance, "runs": len(runs)}
        other_data |= {"runs_dropped": self._dropped, "events_dropped": lost}
        trace = build_trace(
            runs,
            self.distance,
            before=before,
            after=after,
            predicted=predicted,
            metadata=other_data,
        )
        write_trace(trace, path)
        logger.info(
            "the swapping of %d runs is in %s: open it at https://ui.perfetto.dev",
            len(runs),
            os.fspath(path),
        )
        if self._dropped or lost:
            logger.warning(
                "%s lacks the first %d runs and %d events: %d events are kept; trace fewer steps",
                os.fspath(path),
                self._dropped,
                lost,
                MOST_EVENTS,
            )
