"""All figures of a run: in memory for the report, and line by line in `metrics.jsonl`.

    {"step": 7, "train/loss": 2.25, "train/grad_norm": null}        null is a non-finite number

A run that resumes at step N keeps the lines of earlier steps. Lines of later steps, which it
recomputes, and unreadable lines move to `metrics.dropped.jsonl`. The shorter file is written next
to the old one and renamed, so that one complete file exists after a kill at any moment.

If the disk fills up, training continues: lines that could not be written stay in memory and are
written with a later step.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from host_offload.fields import Field, parse_json
from zerojax.reporting.folder import DROPPED, METRICS, RunFolder, open_file, replace_file

logger = logging.getLogger("zerojax")


class Point(NamedTuple):
    """The value of a figure at a step."""

    step: int
    value: float


class Series:
    """The values of one figure, in the order of writing; 16 bytes per point."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        """Make a series of points (step, value)."""
        self._steps = array("q")
        self._values = array("d")
        for step, value in points:
            self.append(step, value)

    def append(self, step: int, value: float) -> None:
        """Add a point."""
        self._steps.append(step)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Point:
        return Point(self._steps[index], self._values[index])

    def __iter__(self) -> Iterator[Point]:
        return (self[index] for index in range(len(self)))


class History:
    """The figures of a run and of the runs that it resumes.

    Attributes:
      series: values of each figure, by its name.
    """

    def __init__(self, folder: RunFolder, first: int) -> None:
        """Read the lines of steps before `first`, and open the file for more.

        Args:
          folder: folder of the run.
          first: number of the next step.
        """
        self.series: dict[str, Series] = {}
        self._path = folder.file(METRICS)
        self._dropped_path = folder.file(DROPPED)
        self._fd: int | None = None
        self._kept: list[bytes] = []
        self._dropped: list[bytes] = []
        self._is_changed = False
        """Whether the kept lines differ from the lines in the file."""
        self._size = 0
        """Bytes of the complete lines in the file."""
        self._pending: list[bytes] = []
        self._is_failing = False
        try:
            self._read(first)
        except OSError as error:
            self._warn(error)
        self._write_pending()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        self._remember(step, figures)
        self._pending.append(_format_line(step, figures))
        self._write_pending()

    def close(self, failed: bool) -> None:
        """Write the remaining lines, and close the file."""
        del failed
        self._write_pending()
        if self._pending:
            logger.warning(
                "%s lacks %d lines, which could not be written", self._path, len(self._pending)
            )
        fd = self._fd
        self._fd = None
        if fd is not None:
            # A network file system reports errors here that were already logged.
            with contextlib.suppress(OSError):
                os.close(fd)

    def _remember(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.series.setdefault(name, Series()).append(step, value)

    def _read(self, first: int) -> None:
        """Sort the lines of the file into kept and dropped lines."""
        damaged: list[int] = []
        last = 0
        for number, line in enumerate(_read_lines(self._path), 1):
            record = _parse_line(line)
            if record is None:
                damaged.append(number)
                self._dropped.append(line)
            elif record.step >= first:
                self._dropped.append(line)
            else:
                self._remember(record.step, record.figures)
                if _has_literals(line, record.figures):
                    line = _format_line(record.step, record.figures)
                    self._is_changed = True
                self._kept.append(line)
                last = max(last, record.step)
        if damaged:
            logger.warning(
                "%s cannot be read at line %s: moved to %s",
                self._path,
                _format_numbers(damaged),
                DROPPED,
            )
        if self._kept and last < first - 1:
            logger.warning("%s has no figures of steps %d to %d", self._path, last + 1, first - 1)

    def _open(self) -> None:
        """Remove the dropped lines from the file, and open it."""
        if self._dropped:
            _append_lines(self._dropped_path, self._dropped)
            self._dropped.clear()
            self._is_changed = True
        if self._is_changed:
            replace_file(self._path, self._kept)
            self._is_changed = False
        fd = open_file(self._path, os.O_WRONLY | os.O_CREAT)
        self._fd = fd
        self._kept.clear()
        self._size = os.fstat(fd).st_size

    def _write_pending(self) -> None:
        """Append the pending lines: all of them, or none."""
        data = b"".join(self._pending)
        try:
            if self._fd is None:
                self._open()
            assert self._fd is not None
            num_written = 0
            while num_written < len(data):
                num_written += os.pwrite(self._fd, data[num_written:], self._size + num_written)
        except OSError as error:
            self._warn(error)
            if self._fd is not None:
                with contextlib.suppress(OSError):  # remove the part of a line that was written
                    os.ftruncate(self._fd, self._size)
            return
        self._size += len(data)
        self._pending.clear()
        self._is_failing = False

    def _warn(self, error: OSError) -> None:
        if not self._is_failing:
            reason = error.strerror or error
            logger.warning(
                "%s cannot be written: %s; the run continues, and tries again at each step",
                self._path,
                reason,
            )
        self._is_failing = True


@dataclasses.dataclass(frozen=True)
class _Record:
    """One line: a step and its figures."""

    step: int
    figures: dict[str, float]


def _read_lines(path: str) -> list[bytes]:
    """Return the lines of a file with their line ends, or an empty list if there is no file."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    with open(fd, "rb") as file:
        return file.readlines()


def _parse_line(line: bytes) -> _Record | None:
    """Return the record of a line, or None if the line is not a record."""
    if not line.endswith(b"\n"):  # the run was killed while it wrote the line
        return None
    try:
        fields = Field(parse_json(line))
        step = fields["step"].integer()
        figures = {name: _parse_figure(field) for name, field in fields.fields() if name != "step"}
    except (ValueError, OverflowError):
        return None
    return _Record(step, figures)


def _has_literals(line: bytes, figures: Mapping[str, float]) -> bool:
    """Return whether a line has NaN or infinity instead of null, which strict readers refuse."""
    count = sum(not math.isfinite(value) for value in figures.values())
    return count != line.count(b"null")


def _format_line(step: int, figures: Mapping[str, float]) -> bytes:
    values = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"


def _parse_figure(field: Field) -> float:
    value = field.value
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        field.refuse("a number or null")
    return float(value)


def _append_lines(path: str, lines: list[bytes]) -> None:
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(fd, "wb") as file:
        file.writelines(_terminate(line) for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _terminate(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"


def _format_numbers(numbers: list[int]) -> str:
    most = 5
    text = ", ".join(map(str, numbers[:most]))
    return f"{text} and {len(numbers) - most} more" if len(numbers) > most else text
