"""Records of a folder that `datasets` saved, as lines of JSON would hold them.

`datasets` stores objects in two ways. A column of `datasets.Json` keeps each as it was. Any other
column has fixed keys: a key that another record has is null here, so such a null is left out. A
null that the source did have is left out with it.
"""

import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger("zerojax.data")
FREE_FORM = ("arguments", "parameters", "properties")
"""Keys under which each record has keys of its own: arguments of tool calls, and what tools say of
them.
"""


class Folder:
    """A data set in memory-mapped files."""

    def __init__(self, path: pathlib.Path, split: str | None) -> None:
        """Open a folder.

        Raises:
          ValueError: it holds no data set, or no such split.
        """
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                "reading a folder of `datasets` needs it: pip install 'zerojax[hf]'"
            ) from error
        loaded: Any
        try:
            loaded = datasets.load_from_disk(os.fspath(path))
        except Exception as error:  # each damaged file fails in its own way
            raise ValueError(
                f"{path}: not a folder that `datasets` saved by save_to_disk: {type(error).__name__}: {error}"
            ) from error
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise ValueError(
                    f"{path} holds the splits {sorted(loaded)}: choose one by split=, got {split!r}"
                )
            loaded = loaded[split]
        elif split is not None:
            raise ValueError(f"{path} holds one data set, and no splits: leave out split={split!r}")
        self._rows = loaded.with_format(
            None
        )  # a format that was saved, such as torch's, makes arrays of lists
        self._features: Mapping[str, Any] = loaded.features
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        fixed = [
            place
            for name in ("messages", "prompt", "completion", "tools")
            for place in self._fixed(name)
        ]
        if fixed:
            logger.warning(
                "%s: `datasets` gave all records the same keys in %s, in one order: keys that are null are left out, and a "
                "whole number beside fractions is a fraction. Columns of datasets.Json keep what a line of JSON says: "
                'Dataset.from_list(records, on_mixed_types="use_json")',
                self._path,
                ", ".join(fixed),
            )
        for row in self._rows:
            yield _without_nulls(row, self._features)

    def _fixed(self, column: str) -> list[str]:
        """Return where a column has fixed keys in the place of each record's own."""
        return _fixed_keys(self._features[column], column) if column in self._features else []


def _without_nulls(value: Any, feature: Any) -> Any:
    """Return a value without the keys that are null, where its feature has fixed keys."""
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
    """Return the places below which keys are free in JSON and fixed here, such as
    messages.tool_calls.function.arguments.
    """
    if isinstance(feature, Mapping):
        found = []
        for name, inner in feature.items():
            there = f"{place}.{name}"
            found += (
                [there]
                if name in FREE_FORM and isinstance(inner, Mapping)
                else _fixed_keys(inner, there)
            )
        return found
    inner = _element(feature)
    return [] if inner is None else _fixed_keys(inner, place)


def _element(feature: Any) -> Any:
    """Return the feature of a list's elements, or None of what is no list."""
    if isinstance(feature, list):
        return feature[0]
    import datasets

    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None
