"""SIGTERM as an exception, so that a run that a scheduler ends still writes its report."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax


@contextlib.contextmanager
def raise_on_sigterm(received: list[int]) -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143) instead of killing the process, and add it to `received`.

    Python's garbage collector, for example, swallows exceptions raised while it runs, so the next
    step checks `received`.

    An existing handler, such as `zj.Preemption`'s, stays. In a run of several processes the handler
    is JAX's, which Python does not see.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_free = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_free or jax.process_count() > 1:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
