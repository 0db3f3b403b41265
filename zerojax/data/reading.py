"""Records of a JSONL file or of a folder that `datasets` saved, one at a time.

Errors name a record by its number: the line of a file, counted from 1, or the index of an example
in a folder, counted from 0.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from host_offload.fields import parse_json
from zerojax.data.folders import Folder
from zerojax.user_values import as_path

LONGEST_LINE = 2**28
"""Maximum bytes per line, so that a file without line ends does not fill the memory."""
_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class Position:
    """A position between two records.

    Attributes:
      offset: number of bytes of the file before it; in a folder, the index of the next record.
      number: number of lines before it; in a folder, the index of the next record.
    """

    offset: int = 0
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Window:
    """Some consecutive records.

    Attributes:
      records: (number, record) of each.
      end: position after them.
      is_last: whether no records follow.
    """

    records: list[tuple[int, Mapping[str, Any]]]
    end: Position
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """Place that records are read from.

    Attributes:
      path: path of a JSONL file or of a folder.
      split: name of one data set, for a folder that holds several.
    """

    path: pathlib.Path
    split: str | None = None

    def place(self, number: int) -> str:
        """Return the place of a record for error messages."""
        if self.path.is_dir():
            return f"{self.path / (self.split or '')}: example {number}"
        return f"{self.path}:{number}"

    def window(self, begin: "Position", count: int) -> "Window":
        """Return the next records.

        Args:
          begin: position of the first one.
          count: largest number of records.

        Raises:
          ValueError: a line is not a JSON object, or the folder has no such split.
        """
        if self.path.is_dir():
            folder = Folder(self.path, self.split)
            end = min(begin.number + count, len(folder))
            records = [*folder.part(begin.number, end)]
            return Window(records, Position(end, end), end == len(folder))
        records = []
        position = begin
        with self.path.open("rb") as file:
            file.seek(begin.offset)
            while len(records) < count and (line := file.readline(LONGEST_LINE + 1)):
                position = Position(position.offset + len(line), position.number + 1)
                records += self._of_line(position.number, line)
            is_last = not file.read(1)
        return Window(records, position, is_last)

    def records(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield (number, record); empty lines of a file are skipped.

        Raises:
          ValueError: a line is not a JSON object, or the folder has no such split.
        """
        return enumerate(Folder(self.path, self.split)) if self.path.is_dir() else self._lines()

    def count(self) -> int:
        """Return the number of records; empty lines of a file are included.

        Raises:
          ValueError: the folder has no such split.
        """
        if self.path.is_dir():
            return len(Folder(self.path, self.split))
        lines = 0
        last = b"\n"
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK):
                lines += block.count(b"\n")
                last = block[-1:]
        return lines + (last != b"\n")

    def _lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                yield from self._of_line(number, line)

    def _of_line(self, number: int, line: bytes) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the record of a line with its number; none if the line is empty."""
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{self.place(number)}: a line of more than {LONGEST_LINE:,} bytes")
        return [(number, self._record(number, line))] if line.strip() else []

    def _record(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            # The first line may begin with a byte order mark, as Windows writes it.
            record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.place(number)}: not a line of JSON in UTF-8: {error}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.place(number)}: not a line of JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.place(number)}: a JSON object is needed, got {type(record).__name__}"
            )
        return record


def source(path: str | os.PathLike[str], split: str | None = None) -> Source:
    """Return the source at a path; `~` is expanded to the user's home.

    Raises:
      ValueError: the path is empty, does not exist, or is a pipe or a device, or `split` is given
        for a file.
    """
    path_text = as_path(path)
    if not path_text:
        raise ValueError(f"path={path!r}: the path of a JSONL file or of a folder is needed")
    location = pathlib.Path(path_text)
    if not location.exists():
        raise ValueError(
            f"{location}: no such file or folder; a JSONL file is needed, or a folder that "
            "`datasets` saved"
        )
    if not location.is_dir() and not location.is_file():
        raise ValueError(
            f"{location} is a pipe or a device, which cannot be read twice: write the records to a "
            "file, and give that"
        )
    if split is not None and not location.is_dir():
        raise ValueError(f"{location} is a file, which has no splits: leave out split={split!r}")
    return Source(location, split)
