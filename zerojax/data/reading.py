"""Records of a JSONL file or of a folder that `datasets` saved, one at a time.

A record has a number, which errors name: of a file the line, counted from 1; of a folder the index of the example, from 0.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any


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
        return enumerate(self._loaded()) if self.path.is_dir() else self._lines()

    def count(self) -> int:
        """Return the number of records, in which the empty lines of a file count.

        Raises:
          ValueError: a folder without such a split.
        """
        if self.path.is_dir():
            return len(self._loaded())
        with self.path.open("rb") as file:
            return sum(1 for _ in file)

    def _lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)  # which decodes UTF-8
                except ValueError as error:
                    raise ValueError(f"{self.place(number)}: not a line of JSON: {error}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{self.place(number)}: a JSON object is needed, got {type(record).__name__}")
                yield number, record

    def _loaded(self) -> Any:
        """Return a folder's data set."""
        try:
            import datasets
        except ImportError as error:
            raise ImportError("reading a folder of `datasets` needs it: pip install 'zerojax[hf]'") from error
        loaded: Any = datasets.load_from_disk(os.fspath(self.path))
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                raise ValueError(f"{self.path} holds the splits {sorted(loaded)}: choose one by split=, got {self.split!r}")
            loaded = loaded[self.split]
        elif self.split is not None:
            raise ValueError(f"{self.path} holds one data set, and no splits: leave out split={self.split!r}")
        return loaded


def source(path: str | os.PathLike[str], split: str | None = None) -> Source:
    """Return what is at a path.

    Raises:
      ValueError: nothing, or `split` is given for a file.
    """
    found = pathlib.Path(path)
    if not found.exists():
        raise ValueError(f"{found}: no such file or folder; a JSONL file is needed, or a folder that `datasets` saved")
    if split is not None and not found.is_dir():
        raise ValueError(f"{found} is a file, which has no splits: leave out split={split!r}")
    return Source(found, split)
