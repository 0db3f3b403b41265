"""A limit on the processor time of one call, for programs that come with the data: chat templates.

jinja2's sandbox bounds each `range`, but not a loop within a loop, and nothing in Python ends a
loop from the outside. So a thread watches: once the calling thread has computed for longer than the
limit, it raises an exception there. The clock is the calling thread's own, so a process that was
suspended, or a machine that is busy, costs nothing.

The exception arrives between two bytecodes. A single call into C returns first;
`zerojax.data.sandbox` bounds what it makes.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

Result = TypeVar("Result")


class OverrunError(Exception):
    """A call computed for longer than the limit."""


class _Interrupt(BaseException):
    """What ends the call; jinja2 rewrites every `Exception` that passes through it, and leaves this
    one alone.
    """


class CpuLimit:
    """Runs calls, one at a time, each for a limited time. Use it as a context manager, which ends
    its thread.

    Attributes:
      seconds: processor time that a call may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._watched: tuple[int, int, float] | None = (
            None  # thread, its clock, and the time at which the call is ended
        )
        self._interrupted = False
        self._thread = threading.Thread(target=self._watch, name="zerojax-cpu-limit", daemon=True)

    def __enter__(self) -> "CpuLimit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ends.set()

    def run(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns.

        Raises:
          OverrunError: it took longer than the limit, and was ended.
        """
        if self._thread.ident is None:
            self._thread.start()
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        try:
            self._watched = (thread, clock, time.clock_gettime(clock) + self.seconds)
            try:
                result = call()
            except _Interrupt:
                raise
            except BaseException:
                self._release()
                raise
            self._release()
            return result
        except _Interrupt:
            self._watched = None
            self._interrupted = False
            raise OverrunError(f"it computed for more than {self.seconds:g} s") from None

    def _release(self) -> None:
        """Stop watching a call that ended by itself; an exception that was raised just then arrives
        here at the latest.
        """
        with self._lock:
            self._watched = None
        while self._interrupted:
            time.sleep(0)

    def _watch(self) -> None:
        while not self._ends.wait(self.seconds / 10):
            with self._lock:
                if self._watched is None or self._interrupted:
                    continue
                thread, clock, end = self._watched
                if time.clock_gettime(clock) > end:
                    self._interrupted = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(_Interrupt)
                    )
