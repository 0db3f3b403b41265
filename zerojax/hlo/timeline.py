"""Work on lanes and resources, played in time: when each task starts and ends.

A lane runs its tasks in the order in which they were added, as a stream of a GPU or a thread does.
A task also waits for the tasks that it comes after, and then for its resources, each of which
serves one task at a time. Whoever has been ready longest is served first; of two that became ready
at once, the one that was added first. A task whose resources are not all free takes none.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One piece of work.

    Attributes:
      lane: that runs it; empty for one that is in no order.
      resources: that it occupies.
      seconds: that it takes.
      after: numbers of the tasks that it waits for, the one before it on its lane among them.
      label: what it is.
    """

    lane: str
    resources: tuple[str, ...]
    seconds: float
    after: tuple[int, ...]
    label: str


class Timeline:
    """Tasks with what each waits for.

    Attributes:
      tasks: in the order in which they were added, by which they are numbered.
      last: the number of the last task of each lane.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.last: dict[str, int] = {}

    def add(
        self,
        lane: str,
        seconds: float = 0.0,
        resources: tuple[str, ...] = (),
        after: Iterable[int | None] = (),
        label: str = "",
    ) -> int:
        """Add a task after the last one of its lane, and return its number.

        Args:
          lane: that runs it; empty for one that waits for `after` alone.
          seconds: that it takes.
          resources: that it occupies meanwhile.
          after: other tasks that it waits for; None is no task.
          label: what it is.
        """
        before = {n for n in (*after, self.last.get(lane) if lane else None) if n is not None}
        self.tasks.append(Task(lane, resources, seconds, tuple(before), label))
        if lane:
            self.last[lane] = len(self.tasks) - 1
        return len(self.tasks) - 1

    def play(self) -> list[tuple[float, float]]:
        """Return the start and the end of each task, in seconds from the start of the first."""
        tasks = self.tasks
        missing = [len(task.after) for task in tasks]
        followers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for before in task.after:
                followers[before].append(number)
        spans = [(0.0, 0.0)] * len(tasks)
        taken: set[str] = set()
        ready: list[tuple[float, int]] = []  # (since when, number) of what waits for a resource
        running: list[tuple[float, int]] = []  # a heap of (end, number)

        def release(number: int, now: float) -> None:
            """Let go on what waits for a task; what takes no time and occupies nothing is over at
            once.
            """
            over = [number]
            while over:
                for follower in followers[over.pop()]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        over += become_ready(follower, now)

        def become_ready(number: int, now: float) -> list[int]:
            if tasks[number].resources or tasks[number].seconds:
                bisect.insort(ready, (now, number))
                return []
            spans[number] = (now, now)
            return [number]

        for number in [n for n, count in enumerate(missing) if not count]:
            for over in become_ready(number, 0.0):
                release(over, 0.0)
        now = 0.0
        while ready or running:
            waiting = []
            for since, number in ready:
                task = tasks[number]
                if taken.isdisjoint(task.resources):
                    taken.update(task.resources)
                    spans[number] = (now, now + task.seconds)
                    heapq.heappush(running, (now + task.seconds, number))
                else:
                    waiting.append((since, number))
            ready[:] = waiting
            now = running[0][0]
            # All that end now, before others start.
            while running and running[0][0] == now:
                _, number = heapq.heappop(running)
                taken.difference_update(tasks[number].resources)
                release(number, now)
        return spans
