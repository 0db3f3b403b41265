"""SIGTERM and SIGINT end a run between two steps, at the same one in all processes.

    with zj.Preemption() as preemption:
        for step in ...:
            state, metrics = program.step(state, batch)
            if preemption.reached(step):
                break

A scheduler that takes a machine back sends SIGTERM some time before, often to one process alone. In
a run of one process a handler notes the signal. In a run of several, JAX's coordination service
tells the others and chooses the step: one after the latest that any process has reached, since
steps are started without waiting for the other processes. It listens to SIGTERM by itself and looks
once a second, so the run goes on for about that long.

The service is asked by a number that grows by one from call to call, and not by the step. It
chooses the number after the largest that it has seen, and says yes to that number alone: a run that
is resumed at step 1000, or that asks after every tenth step, would never come to the number that
was chosen.
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
"""Numbers of the questions to JAX's service, which has one for the process: they go on from one
`Preemption` to the next.
"""


class Preemption:
    """Tells when a signal asks the run to end; a context manager, to be entered in the main thread.

    A second SIGINT is what it was before: KeyboardInterrupt, unless the program says otherwise.
    """

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._is_over = False  # as the service said
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Handle the signals.

        Raises:
          RuntimeError: this is not the main thread, which alone may; or JAX's preemption service is
            disabled.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption handles signals, and that is for the main thread alone: enter it there"
            )
        self._received.clear()
        self._is_over = False
        if self._is_alone():
            numbers = _SIGNALS
        else:
            # Raises where the service is disabled. A signal that came before may have its answer
            # already here.
            self._is_over = multihost_utils.reached_preemption_sync_point(next(_CALLS))
            numbers = (
                signal.SIGINT,
            )  # JAX has a handler of its own for SIGTERM, which one in Python would replace
        self._handlers_before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers_before.items():
            # None: the handler was not installed from Python, so Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _is_alone(self) -> bool:
        return jax.process_count() == 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first Ctrl-C asks for an end between two steps. Whoever presses it again does not want
        # to wait for that.
        if (
            number == signal.SIGINT
            and number in self._received
            and callable(before := self._handlers_before[number])
        ):
            before(number, frame)
        self._received.add(number)
        if not self._is_alone() and number == signal.SIGINT:
            signal.raise_signal(signal.SIGTERM)  # to JAX's handler

    def reached(self, step: int) -> bool:
        """Tell whether to save and leave; in a run of several processes all call this after the
        same steps.

        Args:
          step: just made, the same in all processes.

        Returns:
          True at the same step in all processes. Nothing is sent for it, so steps go on without a
          wait.
        """
        del step  # see the module's docstring
        if self._is_alone():
            # No agreement is needed, and the coordination service of JAX may not be there.
            return bool(self._received)
        # The service says so once. All processes hear it at the same call, and none asks again.
        self._is_over = self._is_over or multihost_utils.reached_preemption_sync_point(next(_CALLS))
        return self._is_over
