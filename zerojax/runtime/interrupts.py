"""Make signals wait for the running program.

Python runs a signal's handler wherever the main thread is, and a handler may raise:
KeyboardInterrupt for Ctrl-C, or whatever the user's handler for SIGALRM or SIGTERM raises. During a
jitted program the main thread may be in a callback, hold a callback's lock, or be in JAX before it
returns the results. If a handler raises there, the program fails, or it continues unnoticed and its
callbacks run during the next program.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AT_ONCE = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals of a fault, which must not be held back.

When a handler returns, the failed instruction is run again or the process ends. Such a signal would
repeat without end, or never be delivered.
"""
_NUMBERS = tuple(int(number) for number in signal.valid_signals() - _AT_ONCE)
"""All other signals, as plain numbers.

Every call would create enums again, and signals are held before every step.
"""


@contextlib.contextmanager
def interrupts_wait(*, all_wait: bool = False) -> Iterator[None]:
    """Hold back signals with a Python handler until the context ends.

    A second SIGINT is handled immediately. At the end, the handlers are called in the order in
    which their signals first arrived, each once. The context does nothing outside the main thread,
    which alone handles signals, and for signals without a handler in Python.

    Args:
      all_wait: whether a second SIGINT waits too. Use it around short work that must not be left
        half done. The second SIGINT is delivered together with the first, so that an enclosing
        context sees both.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    current = {number: signal.getsignal(number) for number in _NUMBERS}
    handlers = {number: handler for number, handler in current.items() if callable(handler)}
    pending: dict[int, FrameType | None] = {}  # in the order of their first arrival
    has_ended = is_impatient = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_impatient
        if number == signal.SIGINT and number in pending:
            is_impatient = True
            if not all_wait:
                del pending[number]
        # A signal may arrive while the handlers are being restored. Nothing delivers held signals
        # after that.
        if has_ended or (is_impatient and not all_wait and number == signal.SIGINT):
            handlers[number](number, frame)
        else:
            pending.setdefault(number, frame)

    # The stack calls the last callback first, and continues if a call raises. So all handlers are
    # restored before the first signal is delivered, and a handler that raises does not block the
    # signals after it.
    with contextlib.ExitStack() as stack:

        def deliver() -> None:
            for number, frame in reversed(pending.items()):
                for _ in range(2 if is_impatient and number == signal.SIGINT else 1):
                    stack.callback(handlers[number], number, frame)

        stack.callback(deliver)
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, hold)
        try:
            yield
        finally:
            has_ended = True
