"""A thread for the work that the callbacks of a GPU leave to another thread."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]
"""A function without arguments, whose result is ignored."""


class JobThread:
    """Runs jobs in order: in a thread of its own, or without a thread when they are submitted.

    A GPU gets no new work while one of its callbacks runs. So a callback does only what must happen
    before the next callback, and leaves the rest (reading ahead, giving buffers back after copies,
    starting writes) to this thread. It wakes the thread once, after its last driver call. On a CPU
    the thread would only compete for the same cores.
    """

    def __init__(self, has_thread: bool, fail: Callable[[BaseException], None]) -> None:
        """Start the thread, if there is one.

        Args:
          has_thread: whether jobs run in a thread of their own.
          fail: function that receives the error of a job that the thread runs.
        """
        self._fail = fail
        self._queue: queue.SimpleQueue[Job | None] | None = None
        if has_thread:
            self._queue = queue.SimpleQueue()
            threading.Thread(
                target=self._run_all, args=(self._queue,), name="zerojax-ahead", daemon=True
            ).start()

    @property
    def has_thread(self) -> bool:
        """Whether jobs run in a thread of their own; False once it is closed."""
        return self._queue is not None

    def submit(self, job: Job) -> None:
        """Run a job; if there is a thread, there, after all earlier jobs."""
        if self._queue is None:
            job()
        else:
            self._queue.put(job)

    def settle(self) -> None:
        """Wait until all submitted jobs have been run."""
        if self._queue is not None:
            is_settled = threading.Event()
            self._queue.put(is_settled.set)
            is_settled.wait()

    def close(self) -> None:
        """End the thread; later jobs run in the threads that submit them."""
        if self._queue is not None:
            jobs = self._queue
            self._queue = None
            jobs.put(None)

    def _run_all(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # the thread must go on
                self._fail(error)
