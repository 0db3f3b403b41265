"""Ctrl-C waits for the program that runs.

Python raises KeyboardInterrupt wherever the main thread is. Inside the call of a jitted program that is a callback, or JAX
itself before it hands over the results: the program then fails or runs on unseen, and its callbacks come in the next one.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold the first SIGINT back until the context ends; a second one is handled at once.

    Does nothing outside of the main thread, which alone handles signals, and where SIGINT has no handler in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handler(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(signal.SIGINT, held[0])
