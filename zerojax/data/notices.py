"""Warnings about records: each is logged once, with the first record's place and a count."""

import dataclasses
import logging
from collections.abc import Callable

logger = logging.getLogger("zerojax.data")


@dataclasses.dataclass
class _Notice:
    first: int
    last: int
    records: int


class Notices:
    """Warnings about records, grouped by their text.

    Attributes:
      number: number of the record that is being read.
    """

    def __init__(self) -> None:
        """Start without warnings."""
        self.number = 0
        self._found: dict[str, _Notice] = {}
        self._logged: set[str] = set()

    def add(self, text: str) -> None:
        """Add a warning about the record that is being read."""
        notice = self._found.setdefault(text, _Notice(self.number, self.number, 1))
        if notice.last != self.number:
            notice.records += 1
            notice.last = self.number

    def log(self, place: Callable[[int], str]) -> None:
        """Log each warning once; `place` turns a record's number into its place.

        A later call logs only warnings that an earlier call did not.
        """
        for text, notice in self._found.items():
            if text in self._logged:
                continue
            self._logged.add(text)
            more = f" (and in {notice.records - 1:,} more)" if notice.records > 1 else ""
            logger.warning("%s%s: %s", place(notice.first), more, text)
