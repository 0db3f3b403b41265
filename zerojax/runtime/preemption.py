"""End a run between two steps on SIGTERM or SIGINT, at the same step in all processes.

    with zj.Preemption() as preemption:
        for step in ...:
            state, metrics = program.step(state, batch)
            if preemption.reached(step):
                break

A scheduler that takes a machine back sends SIGTERM some time in advance, often to only one process.
In a run of one process, a handler notes the signal. In a run of several, JAX's coordination service
informs the other processes and chooses the step: one after the latest that any process has reached,
since steps are started without waiting for the other processes. The service listens to SIGTERM by
itself and checks once a second, so the run continues for about that long.

The service is asked by a number that grows by one with each call, not by the step. It chooses the
number after the largest that it has seen, and answers yes to that number only. A run that is
resumed at step 1000, or that asks after every tenth step, would never reach the chosen number.
"""

import itertools
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CALLS = itertools.count(1)
"""Numbers of the questions to JAX's service.

The service is shared by the whole process, so the numbers continue from one `Preemption` to the
next.
"""


class Preemption:
    """Report when a signal asks the run to end; a context manager to enter in the main thread.

    A second SIGINT does what it did before: it raises KeyboardInterrupt, unless the program set
    another handler.
    """

    def __init__(self) -> None:
        """Start without signals."""
        self._received: set[int] = set()
        self._is_over = False  # as reported by the service
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Handle the signals.

        Raises:
          RuntimeError: this is not the main thread, the only one that may handle signals; or JAX's
            preemption service is disabled.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption handles signals, which only the main thread can: enter it there"
            )
        self._received.clear()
        self._is_over = False
        if self._is_alone():
            numbers = _SIGNALS
        else:
            # Raises if the service is disabled. A signal that arrived earlier may already have its
            # answer here.
            self._is_over = multihost_utils.reached_preemption_sync_point(next(_CALLS))
            # JAX has its own handler for SIGTERM, which a Python handler would replace.
            numbers = (signal.SIGINT,)
        self._handlers_before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers_before.items():
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _is_alone(self) -> bool:
        return jax.process_count() == 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first Ctrl-C asks for an end between two steps. Pressing it again means that the user
        # does not want to wait for that.
        if number == signal.SIGINT and number in self._received:
            handler = self._handlers_before[number]
            if callable(handler):
                handler(number, frame)
        self._received.add(number)
        if not self._is_alone() and number == signal.SIGINT:
            signal.raise_signal(signal.SIGTERM)  # for JAX's handler

    def reached(self, step: int) -> bool:
        """Return whether to save and leave.

        In a run of several processes, all of them must call this after the same steps.

        Args:
          step: the step that was just made, the same in all processes.

        Returns:
          True at the same step in all processes. Nothing is sent for it, so steps continue without
          a wait.
        """
        del step  # see the module's docstring
        if self._is_alone():
            # No agreement is needed, and JAX's coordination service may be missing.
            return bool(self._received)
        # The service answers yes only once. All processes get that answer in the same call, and
        # none asks again.
        self._is_over = self._is_over or multihost_utils.reached_preemption_sync_point(next(_CALLS))
        return self._is_over
