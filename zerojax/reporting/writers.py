"""Where the figures of a run go beside its own file: TensorBoard and Weights & Biases.

A missing package is an error when the run is made, not at its first step. TensorBoard's file comes
with the first figures: the step from which a run resumes is known then.
"""

import contextlib
import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

logger = logging.getLogger("zerojax")

_PACKAGES = {"tensorboard": ("tensorboardX", "zerojax[report]"), "wandb": ("wandb", "wandb")}
"""By a name in `report_to`: the module, and what pip installs it by."""


_FLUSH_SECONDS = 10.0
_RETRY_SECONDS = 60.0


class Writer(Protocol):
    """Takes figures by name and step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


def module_of(name: str, package: str) -> Any:
    """Import a module that not everyone has.

    Raises:
      ModuleNotFoundError: it is not installed; the message says how.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name not in (top, name):
            raise  # it is there, and lacks something itself
        raise ModuleNotFoundError(
            f"zj.Run needs {top}: pip install '{package}'", name=top
        ) from error


def modules_of(report_to: Sequence[str]) -> dict[str, Any]:
    """Return the module of each name.

    Raises:
      ValueError: a name is unknown.
      ModuleNotFoundError: its package is not installed.
    """
    if isinstance(report_to, str) or not set(report_to) <= _PACKAGES.keys():
        raise ValueError(
            f"report_to={report_to!r}: a tuple of {', '.join(map(repr, _PACKAGES))} is needed; () is none"
        )
    return {name: module_of(*_PACKAGES[name]) for name in report_to}


class Guarded:
    """A writer whose failures end neither the training nor the other writers.

    A failure is logged once. If the writer can be opened again, that is tried a minute later: a
    full disk may have room by then. The figures in between are missing there, and are in
    `metrics.jsonl`.
    """

    def __init__(
        self, key: str, writer: Writer | None, reopen: Callable[[], Writer] | None = None
    ) -> None:
        """Guard a writer.

        Args:
          key: its name in `report_to`.
          writer: an open one, or None to open it now.
          reopen: opens the writer; None if it can be opened only once.
        """
        self._key = key
        self._writer = writer
        self._reopen = reopen
        self._tried = -math.inf
        self._try(lambda _: None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._try(lambda writer: writer.write(step, figures))

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._try(lambda writer: writer.close(failed))
            self._writer = None

    def _try(self, use: Callable[[Writer], None]) -> None:
        try:
            if self._writer is None:
                self._writer = self._open()
            if self._writer is not None:
                use(self._writer)
        except (
            Exception
        ) as error:  # whatever another package raises: the training is worth more than its figures
            logger.warning(
                "%s takes no figures: %s: %s; the run goes on without it",
                self._key,
                type(error).__name__,
                error,
            )
            self._abandon()

    def _open(self) -> Writer | None:
        now = time.monotonic()
        if self._reopen is None or now - self._tried < _RETRY_SECONDS:
            return None
        self._tried = now
        return self._reopen()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close(failed=True)


class TensorBoard:
    """An event file in the run's folder.

    Events are written in the caller's thread. The package's own writer uses a thread, which ends at
    the first error of the disk; after ten more events its queue is full, and the training would
    wait for it without end.
    """

    def __init__(self, logdir: str, first: int) -> None:
        """Open a new file.

        Args:
          logdir: folder of the run.
          first: number of the next step.
        """
        package = _PACKAGES["tensorboard"][1]
        self._summary = module_of("tensorboardX.summary", package)
        self._protocol = module_of("tensorboardX.proto.event_pb2", package)
        # TensorBoard reads the files of a folder in the order of their names; the number keeps two
        # of one second apart.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{time.monotonic_ns()}"
        self._records = module_of("tensorboardX.record_writer", package).RecordWriter(
            os.path.join(logdir, name)
        )
        self._add(file_version="brain.Event:2")
        self._flushed = -math.inf
        if first > 1:  # TensorBoard hides what an earlier file has of these steps
            start = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
            self._add(step=first, session_log=start)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._add(step=step, summary=self._summary.scalar(name, value))
        now = time.monotonic()
        if now - self._flushed > _FLUSH_SECONDS:
            self._flushed = now
            self._records.flush()

    def close(self, failed: bool) -> None:
        del failed
        self._records.close()

    def _add(self, **fields: Any) -> None:
        event = self._protocol.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


class Wandb:
    """A run of Weights & Biases, whose environment variables hold: WANDB_MODE=offline needs no
    network.

    A run that goes on is a new one there, whose steps go on; WANDB_RUN_ID and WANDB_RESUME make it
    the same.
    """

    def __init__(self, module: Any, logdir: str, name: str, config: Mapping[str, Any]) -> None:
        project = os.environ.get("WANDB_PROJECT", "zerojax")
        self._run = module.init(
            project=project,
            name=os.environ.get("WANDB_NAME", name),
            dir=logdir,
            config=dict(config),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
