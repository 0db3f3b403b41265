"""Let callbacks get Python's lock quickly while a program calls back.

A callback needs Python's lock. If another thread holds it, for example to tokenize, the callback
waits for Python's switch interval, 5 ms by default, each time after it has released the lock. A
step has hundreds of callbacks. benchmarks/busy_thread.py measures the cost, and what the interval
below saves.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

SECONDS = 1e-4
"""Switch interval in seconds while a program calls back. Shorter intervals gained nothing."""


class _State:
    """The number of programs that call back in this process, and the interval before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before = 0.0
        self.own = 0.0


_STATE = _State()


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Shorten Python's switch interval in a context, and restore it afterwards.

    Run a program that calls back in it. An interval that is already shorter stays, and so does one
    that is set in the meantime.
    """
    state = _STATE
    with state.lock:
        state.count += 1
        if state.count == 1:
            state.before = sys.getswitchinterval()
            if state.before > SECONDS:
                sys.setswitchinterval(SECONDS)
            state.own = sys.getswitchinterval()  # Python rounds to microseconds
    try:
        yield
    finally:
        with state.lock:
            state.count -= 1
            if state.count == 0 and state.before > SECONDS and sys.getswitchinterval() == state.own:
                sys.setswitchinterval(state.before)
