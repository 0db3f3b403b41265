"""Python's threads while a program calls back: one that computes in Python gives way to a callback
at once.

A callback needs Python's lock. Where another thread holds it, as one that tokenizes does, the
callback waits for Python's switch interval, 5 ms by default, each time that it has let go of the
lock; and a step has hundreds of callbacks. What that costs, and what the interval below saves, is
measured by benchmarks/busy_thread.py.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

SECONDS = 1e-4
"""The switch interval while a program calls back. Shorter ones gained nothing."""


class _State:
    """How many programs that call back run in this process, and the interval that was set before
    the first.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before = 0.0
        self.own = 0.0


_STATE = _State()


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Run a program that calls back in this: Python's switch interval is short, and then again as
    it was.

    A shorter one than ours stays, and so does one that is set meanwhile.
    """
    state = _STATE
    with state.lock:
        state.count += 1
        if state.count == 1:
            state.before = sys.getswitchinterval()
            if state.before > SECONDS:
                sys.setswitchinterval(SECONDS)
            state.own = sys.getswitchinterval()  # Python keeps whole microseconds
    try:
        yield
    finally:
        with state.lock:
            state.count -= 1
            if state.count == 0 and state.before > SECONDS and sys.getswitchinterval() == state.own:
                sys.setswitchinterval(state.before)
