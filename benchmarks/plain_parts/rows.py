"""Rows of the table: what a contender takes over what its base takes, within one round."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]
"""Does the work of a contender once, and returns when it is done."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      name: of the contender.
      base: the contender that it is divided by, or subtracted from.
      goal: the most that the ratio, or the difference in seconds, should be; None where none was set.
      differs: whether the row tells the difference in seconds in place of the ratio.
    """

    name: str
    base: str
    goal: float | None = None
    differs: bool = False

    def value(self, seconds: float, base: float) -> float:
        """Return what the row tells, of two times in seconds."""
        return seconds - base if self.differs else seconds / base


def in_turn(calls: Mapping[str, Call], repeats: int, warmup: int = 2) -> dict[str, float]:
    """Run contenders one after the other, several times; return the median seconds of each.

    Args:
      calls: by name.
      repeats: how often each is timed.
      warmup: how often each runs before that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in seconds.items()}
