"""Play tasks on lanes and resources in time: when each task starts and ends.

A lane runs its tasks in the order in which they were added, like a GPU stream or a thread. A task
also waits for other given tasks, and then for its resources. Each resource serves one task at a
time. The task that has been ready longest is served first; of two tasks that became ready at the
same time, the one added first. A task takes its resources only when all of them are free.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A piece of work.

    Attributes:
      lane: lane that runs the task; empty if it is in no lane's order.
      resources: resources that the task occupies.
      seconds: duration.
      after: numbers of the tasks that it waits for, including the previous task of its lane.
      label: kind of work.
    """

    lane: str
    resources: tuple[str, ...]
    seconds: float
    after: tuple[int, ...]
    label: str


class Timeline:
    """A set of tasks, each with the tasks that it waits for.

    Attributes:
      tasks: tasks in the order in which they were added; a task's number is its index.
      last: number of the last task of each lane.
    """

    def __init__(self) -> None:
        """Start without tasks."""
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
          lane: lane that runs the task; empty for a task that waits only for `after`.
          seconds: duration.
          resources: resources that the task occupies.
          after: numbers of other tasks that it waits for; None entries are ignored.
          label: kind of work.
        """
        before = {n for n in (*after, self.last.get(lane) if lane else None) if n is not None}
        self.tasks.append(Task(lane, resources, seconds, tuple(before), label))
        if lane:
            self.last[lane] = len(self.tasks) - 1
        return len(self.tasks) - 1

    def play(self) -> list[tuple[float, float]]:
        """Return the start and end of each task, in seconds from the start of the first task."""
        tasks = self.tasks
        missing = [len(task.after) for task in tasks]
        followers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for before in task.after:
                followers[before].append(number)
        spans = [(0.0, 0.0)] * len(tasks)
        occupied: set[str] = set()  # resources
        # (ready since, number) of tasks that wait for a resource
        ready: list[tuple[float, int]] = []
        running: list[tuple[float, int]] = []  # a heap of (end, number)

        def release(number: int, now: float) -> None:
            """Start the followers of a task that ended.

            A follower that takes no time and no resources ends immediately.
            """
            ended = [number]
            while ended:
                for follower in followers[ended.pop()]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        ended += become_ready(follower, now)

        def become_ready(number: int, now: float) -> list[int]:
            """Queue a task, or end it if it takes nothing; return the tasks that ended."""
            if tasks[number].resources or tasks[number].seconds:
                bisect.insort(ready, (now, number))
                return []
            spans[number] = (now, now)
            return [number]

        for number in [n for n, count in enumerate(missing) if not count]:
            for ended in become_ready(number, 0.0):
                release(ended, 0.0)

        now = 0.0
        while ready or running:
            waiting = []
            for since, number in ready:
                task = tasks[number]
                if occupied.isdisjoint(task.resources):
                    occupied.update(task.resources)
                    spans[number] = (now, now + task.seconds)
                    heapq.heappush(running, (now + task.seconds, number))
                else:
                    waiting.append((since, number))
            ready[:] = waiting
            now = running[0][0]
            # All tasks that end now, before others start.
            while running and running[0][0] == now:
                _, number = heapq.heappop(running)
                occupied.difference_update(tasks[number].resources)
                release(number, now)
        return spans
