"""Records of a folder that `datasets` saved, as lines of JSON would hold them.

`datasets` stores objects in two ways. A `datasets.Json` column keeps each object unchanged. Any
other column has fixed keys: if a key occurs only in some records, it is null in all the others.
Nulls are therefore removed, including any that were in the source.
"""

import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger("zerojax.data")
FREE_FORM = ("arguments", "parameters", "properties")
"""Keys whose objects have different keys in each record: tool call arguments and tool schemas."""


class Folder:
    """A data set in memory-mapped files."""

    def __init__(self, path: pathlib.Path, split: str | None) -> None:
        """Open a folder.

        Raises:
          ValueError: the folder holds no data set, or no such split.
        """
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                "reading a folder of `datasets` needs the datasets library: pip install "
                "'zerojax[hf]'"
            ) from error
        loaded: Any
        try:
            loaded = datasets.load_from_disk(os.fspath(path))
        except Exception as error:  # the type depends on which file is damaged
            raise ValueError(
                f"{path}: not a folder that `datasets` saved by save_to_disk: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise ValueError(
                    f"{path} holds the splits {sorted(loaded)}: choose one by split=, got {split!r}"
                )
            loaded = loaded[split]
        elif split is not None:
            raise ValueError(
                f"{path} holds a single data set without splits: leave out split={split!r}"
            )
        self._rows = loaded.with_format(
            None
        )  # a saved format, such as torch's, would turn lists into arrays
        self._features: Mapping[str, Any] = loaded.features
        self._path = path

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield each record, without the nulls that `datasets` added."""
        fixed: list[str] = []
        for name in ("messages", "prompt", "completion", "conversations", "tools"):
            fixed += self._fixed(name)
        if fixed:
            logger.warning(
                "%s: `datasets` gave all records the same keys in %s, in one order: keys that are "
                "null are left out, and integers mixed with fractions become fractions. Columns of "
                "datasets.Json keep what a line of JSON says: "
                'Dataset.from_list(records, on_mixed_types="use_json")',
                self._path,
                ", ".join(fixed),
            )
        for _, record in self.part(0, len(self)):
            yield record

    def part(self, begin: int, end: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield (number, record) for the records from `begin` up to `end`."""
        for number, row in enumerate(self._rows.select(range(begin, end)), begin):
            yield number, _without_nulls(row, self._features)

    def _fixed(self, column: str) -> list[str]:
        """Return the places where a column has fixed keys instead of each record's own keys."""
        return _fixed_keys(self._features[column], column) if column in self._features else []


def _without_nulls(value: Any, feature: Any) -> Any:
    """Return a value without its null keys, wherever its feature has fixed keys."""
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {
            name: _without_nulls(value[name], inner)
            for name, inner in feature.items()
            if value[name] is not None
        }
    inner = _element(feature)
    return value if inner is None else [_without_nulls(element, inner) for element in value]


def _fixed_keys(feature: Any, place: str) -> list[str]:
    """Return the places below which keys are free in JSON but fixed here.

    An example is messages.tool_calls.function.arguments.
    """
    if isinstance(feature, Mapping):
        places = []
        for name, inner in feature.items():
            inner_place = f"{place}.{name}"
            if name in FREE_FORM and isinstance(inner, Mapping):
                places.append(inner_place)
            else:
                places += _fixed_keys(inner, inner_place)
        return places
    inner = _element(feature)
    return [] if inner is None else _fixed_keys(inner, place)


def _element(feature: Any) -> Any:
    """Return the feature of a list's elements, or None if `feature` is not a list."""
    if isinstance(feature, list):
        return feature[0]
    import datasets

    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None
