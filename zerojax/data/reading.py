"""Records of a JSONL file or of a folder that `datasets` saved, one at a time.

A record has a number, which errors name: of a file the line, counted from 1; of a folder the index
  of the example, from 0.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from host_offload.fields import parse_json
from zerojax.data.folders import Folder
from zerojax.given import as_path

LONGEST_LINE = 2**28
"""Bytes that a line may have, so that a file without line ends does not fill the memory."""
_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class Source:
    """Where records come from.

    Attributes:
      path: of a JSONL file, or of a folder.
      split: of a folder that holds several data sets by name.
    """

    path: pathlib.Path
    split: str | None = None

    def place(self, number: int) -> str:
        """Return how errors name a record."""
        if self.path.is_dir():
            return f"{self.path / (self.split or '')}: example {number}"
        return f"{self.path}:{number}"

    def records(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield (number, record). Empty lines of a file are passed over.

        Raises:
          ValueError: a line that is no JSON object, or a folder without such a split.
        """
        return enumerate(Folder(self.path, self.split)) if self.path.is_dir() else self._lines()

    def count(self) -> int:
        """Return the number of records, in which the empty lines of a file count.

        Raises:
          ValueError: a folder without such a split.
        """
        if self.path.is_dir():
            return len(Folder(self.path, self.split))
        lines, last = 0, b"\n"
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK):
                lines += block.count(b"\n")
                last = block[-1:]
        return lines + (last != b"\n")

    def _lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{self.place(number)}: a line of more than {LONGEST_LINE:,} bytes"
                    )
                if line.strip():
                    yield number, self._record(number, line)

    def _record(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            # A byte order mark may begin the file, as Windows writes it.
            record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.place(number)}: not a line of JSON, which is in UTF-8: {error}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.place(number)}: not a line of JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.place(number)}: a JSON object is needed, got {type(record).__name__}"
            )
        return record


def source(path: str | os.PathLike[str], split: str | None = None) -> Source:
    """Return what is at a path; `~` is the user's home.

    Raises:
      ValueError: no path, nothing there, a pipe or a device, or `split` is given for a file.
    """
    given = as_path(path)
    if not given:
        raise ValueError(f"path={path!r}: the path of a JSONL file or of a folder is needed")
    found = pathlib.Path(given)
    if not found.exists():
        raise ValueError(
            f"{found}: no such file or folder; a JSONL file is needed, or a folder that `datasets` saved"
        )
    if not found.is_dir() and not found.is_file():
        raise ValueError(
            f"{found} is a pipe or a device, which cannot be read twice: write the records to a file, and give that"
        )
    if split is not None and not found.is_dir():
        raise ValueError(f"{found} is a file, which has no splits: leave out split={split!r}")
    return Source(found, split)
