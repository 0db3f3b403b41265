"""Further destinations of a run's figures: TensorBoard and Weights & Biases.

A missing package is an error when the run is made, not at its first step. TensorBoard's file is
opened with the first figures, when the step from which a run resumes is known.
"""

import contextlib
import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger("zerojax")


class Package(NamedTuple):
    """An optional package: its module, and what to install with pip."""

    module: str
    requirement: str


_PACKAGES = {
    "tensorboard": Package("tensorboardX", "zerojax[report]"),
    "wandb": Package("wandb", "wandb"),
}
"""Packages by name in `report_to`."""
_FLUSH_SECONDS = 10.0
_RETRY_SECONDS = 60.0


class Writer(Protocol):
    """Receives figures by name and step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        ...

    def close(self, failed: bool) -> None:
        """Close the writer; `failed` is whether the run ended with an error."""
        ...


def import_module(name: str, requirement: str) -> ModuleType:
    """Import and return a module of an optional package.

    Raises:
      ModuleNotFoundError: the package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name not in (top, name):
            raise  # the module exists, but lacks one of its own dependencies
        raise ModuleNotFoundError(
            f"zj.Run needs {top}: pip install '{requirement}'", name=top
        ) from error


def import_writers(report_to: Sequence[str]) -> dict[str, ModuleType]:
    """Return {name: module} for the names of `report_to`.

    Raises:
      ValueError: a name is unknown.
      ModuleNotFoundError: the package of a name is not installed.
    """
    if isinstance(report_to, str) or not set(report_to) <= _PACKAGES.keys():
        raise ValueError(
            f"report_to={report_to!r}: a tuple of {', '.join(map(repr, _PACKAGES))} is needed; () "
            "is none"
        )
    return {name: import_module(*_PACKAGES[name]) for name in report_to}


class Guarded:
    """A writer whose failures end neither the training nor the other writers.

    Each failure is logged once. If the writer can be reopened, this is tried a minute later,
    because a full disk may have room by then. The figures in between are missing there, but are in
    `metrics.jsonl`.
    """

    def __init__(
        self, key: str, writer: Writer | None, reopen: Callable[[], Writer] | None = None
    ) -> None:
        """Guard a writer.

        Args:
          key: name of the writer in `report_to`.
          writer: an open writer, or None to open it now.
          reopen: function that opens the writer; None if it can be opened only once.
        """
        self._key = key
        self._writer = writer
        self._reopen = reopen
        self._tried = -math.inf
        self._try(lambda _: None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, or log a failure."""
        self._try(lambda writer: writer.write(step, figures))

    def close(self, failed: bool) -> None:
        """Close the writer, or log a failure."""
        if self._writer is not None:
            self._try(lambda writer: writer.close(failed))
            self._writer = None

    def _try(self, use: Callable[[Writer], None]) -> None:
        try:
            if self._writer is None:
                self._writer = self._open()
            if self._writer is not None:
                use(self._writer)
        # Any error of another package: the training is worth more than its figures.
        except Exception as error:
            logger.warning(
                "%s takes no figures: %s: %s; the run continues without it",
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
        writer = self._writer
        self._writer = None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close(failed=True)


class TensorBoard:
    """An event file in the run's folder.

    Events are written in the caller's thread. The package's own writer uses a thread that ends at
    the first error of the disk; after ten more events its queue is full, and the training would
    wait for it forever.
    """

    def __init__(self, logdir: str, first: int) -> None:
        """Open a new file.

        Args:
          logdir: folder of the run.
          first: number of the next step.
        """
        package = _PACKAGES["tensorboard"].requirement
        self._summary = import_module("tensorboardX.summary", package)
        self._protocol = import_module("tensorboardX.proto.event_pb2", package)
        # TensorBoard reads the files of a folder in the order of their names; the last number
        # distinguishes two files of the same second.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{time.monotonic_ns()}"
        )
        self._records = import_module("tensorboardX.record_writer", package).RecordWriter(
            os.path.join(logdir, name)
        )
        self._add(file_version="brain.Event:2")
        self._flushed = -math.inf
        if first > 1:  # makes TensorBoard hide these steps of an earlier file
            start = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
            self._add(step=first, session_log=start)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for name, value in figures.items():
            self._add(step=step, summary=self._summary.scalar(name, value))
        now = time.monotonic()
        if now - self._flushed > _FLUSH_SECONDS:
            self._flushed = now
            self._records.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        del failed
        self._records.close()

    def _add(self, **fields: Any) -> None:
        event = self._protocol.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


class Wandb:
    """A run of Weights & Biases.

    Its environment variables apply: WANDB_MODE=offline needs no network. A resumed run is a new run
    there, whose step numbers continue; set WANDB_RUN_ID and WANDB_RESUME to continue the same run.
    """

    def __init__(
        self, module: ModuleType, logdir: str, name: str, config: Mapping[str, str]
    ) -> None:
        """Start a run; WANDB_PROJECT and WANDB_NAME override its project and name."""
        project = os.environ.get("WANDB_PROJECT", "zerojax")
        self._run = module.init(
            project=project,
            name=os.environ.get("WANDB_NAME", name),
            dir=logdir,
            config=dict(config),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        """Finish the run; `failed` sets a nonzero exit code."""
        self._run.finish(exit_code=int(failed))
