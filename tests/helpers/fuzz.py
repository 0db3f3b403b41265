"""Run one drawn input after the other: each has to end by an allowed outcome, in time and in
bounded memory.
"""

import collections
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_SECONDS = 10.0
MOST_MIB = 1536
"""By which the process may grow in all, with what JAX keeps."""
_ALARM_SECONDS = 90
"""Of real time: a process that waits for others' work is not one that hangs."""


class HangError(BaseException):
    """The time is over. No `except Exception` takes it for an error of the input."""


@contextmanager
def alarm(what: str) -> Iterator[None]:
    """Raise HangError in what takes too long: by the clock, or of processor time."""

    def ring(signum: int, frame: object) -> None:
        del signum, frame
        raise HangError(what)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _ALARM_SECONDS)
    start = time.thread_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if (took := time.thread_time() - start) > MOST_SECONDS:
        raise HangError(f"{took:.1f} s of a processor: {what}")


def run_all(cases: list[tuple[str, Callable[[], str]]]) -> collections.Counter[str]:
    """Run cases, each described and a function that returns its outcome, and count the outcomes.

    Raises:
      AssertionError: some raised what they may not, hung, or took too much memory; the first ten
        are named.
    """
    outcomes, wrong = collections.Counter[str](), list[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, case in cases:
        try:
            with alarm(what):
                outcomes[case()] += 1
        except (Exception, HangError) as error:
            outcomes[type(error).__name__] += 1
            wrong.append(f"{what}\n    {type(error).__name__}: {error}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert not wrong, f"{len(wrong)} of {len(cases)}, {outcomes}:\n" + "\n".join(wrong[:10])
    assert grown < MOST_MIB, f"{grown:.0f} MiB"
    return outcomes
