"""What a run over many records warns about: each fault once, with the number of records and the
first one's place.
"""

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
    """Warnings about records, by their text.

    Attributes:
      number: of the record that is read now.
    """

    def __init__(self) -> None:
        self.number = 0
        self._found: dict[str, _Notice] = {}

    def add(self, text: str) -> None:
        """Note a fault of the record that is read now."""
        notice = self._found.setdefault(text, _Notice(self.number, self.number, 1))
        if notice.last != self.number:
            notice.records += 1
            notice.last = self.number

    def log(self, place: Callable[[int], str]) -> None:
        """Log each fault once."""
        for text, notice in self._found.items():
            more = f" (and in {notice.records - 1:,} more)" if notice.records > 1 else ""
            logger.warning("%s%s: %s", place(notice.first), more, text)
