"""Define the table's rows: a contender's time next to its base's time, within one round."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]
"""Function that does a contender's work once and blocks until it is done."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      name: name of the contender.
      base: name of the contender that it is compared with.
      goal: upper bound of the ratio or the difference; None if there is none.
      differs: whether the row shows a difference in seconds, and not a ratio.
    """

    name: str
    base: str
    goal: float | None = None
    differs: bool = False

    def value(self, seconds: float, base: float) -> float:
        """Return the ratio or the difference of two times in seconds."""
        return seconds - base if self.differs else seconds / base


def in_turn(calls: Mapping[str, Call], repeats: int, warmup: int = 2) -> dict[str, float]:
    """Run contenders in turn, several times, and return the median seconds of each.

    Args:
      calls: contenders by name.
      repeats: number of timed calls of each contender.
      warmup: number of untimed calls of each contender before that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in seconds.items()}
