"""A CPU time limit for one call, for programs that are distributed with the data: chat templates.

jinja2's sandbox bounds each `range`, but not nested loops, and Python cannot stop a loop from the
outside. So a thread watches the calling thread and raises an exception in it when it has computed
for longer than the limit. The clock is the calling thread's own CPU clock: time in which the
process is suspended or the machine is busy does not count.

The exception arrives between two bytecodes, so a single call into C returns first.
`zerojax.data.sandbox` bounds the results of such calls.
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
    """Ends the call.

    It is not an `Exception`, because jinja2 rewrites every `Exception` that passes through it.
    """


class CpuLimit:
    """Runs calls, one at a time, each with a CPU time limit.

    Use it as a context manager: leaving it ends the watching thread.

    Attributes:
      seconds: CPU seconds that a call may take.
    """

    def __init__(self, seconds: float) -> None:
        """Set the limit of each call to `seconds` of CPU time."""
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._watched: tuple[int, int, float] | None = (
            None  # thread, its clock, and the clock time at which to end the call
        )
        self._interrupted = False
        self._thread = threading.Thread(target=self._watch, name="zerojax-cpu-limit", daemon=True)

    def __enter__(self) -> "CpuLimit":
        """Return the limit itself; the thread starts at the first call."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watching thread."""
        self._ends.set()

    def run(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`.

        Raises:
          OverrunError: the call took longer than the limit and was ended.
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
        """Stop watching a call that ended by itself.

        If the watching thread has just raised its exception, it arrives here at the latest.
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
