"""Signals wait for the program that runs.

Python runs a signal's handler wherever the main thread is, and a handler may raise:
KeyboardInterrupt for Ctrl-C, or whatever the user's handler of SIGALRM or SIGTERM raises. During a
jitted program the main thread may be in a callback, in a lock of it, or in JAX before it returns
the results. If a handler raises there, the program fails. Or it runs on unseen, and its callbacks
run during the next one.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AT_ONCE = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals of a fault. When a handler returns, the instruction that failed is run again, or the
process ends: held back, these would come without end, or never be delivered."""
_NUMBERS = tuple(int(number) for number in signal.valid_signals() - _AT_ONCE)
"""All other signals, as plain numbers: enums would be made anew by every call, and this is called
before every step.
"""


@contextlib.contextmanager
def interrupts_wait(*, all_wait: bool = False) -> Iterator[None]:
    """Hold signals that Python handles back until the context ends; a second SIGINT is handled at
    once.

    Their handlers are then called in the order in which the signals first came, each once. Does
    nothing outside of the main thread, which alone handles signals, and for signals without a
    handler in Python.

    Args:
      all_wait: a second SIGINT waits too, around what must not be left half done and does not take
        long. It is handed on beside the first, so that a context around this one sees both.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    current = {number: signal.getsignal(number) for number in _NUMBERS}
    handlers = {number: handler for number, handler in current.items() if callable(handler)}
    pending: dict[int, FrameType | None] = {}  # in the order in which they first came
    has_ended = is_impatient = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_impatient
        if number == signal.SIGINT and number in pending:
            is_impatient = True
            if not all_wait:
                del pending[number]
        # A signal may come while the handlers are being put back: then nothing delivers what is
        # held any more.
        if has_ended or (is_impatient and not all_wait and number == signal.SIGINT):
            handlers[number](number, frame)
        else:
            pending.setdefault(number, frame)

    # The stack calls what was put in last first, and goes on where a call raises: so all handlers
    # are put back before the first signal is delivered, and a handler that raises keeps neither
    # from the signals after it.
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
