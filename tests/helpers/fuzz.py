"""Run drawn inputs in turn; each must end in an allowed outcome, in time and in bounded memory."""

import collections
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_SECONDS = 10.0
MOST_MIB = 1536
"""Limit on the total growth of the process, in MiB, including what JAX keeps."""
_ALARM_SECONDS = 90
"""Wall-clock limit: a process that waits for other processes' work has not hung."""


class HangError(BaseException):
    """The time limit has passed; `except Exception` does not take it for an error of the input."""


@contextmanager
def alarm(what: str) -> Iterator[None]:
    """Raise HangError if the body takes too long, in wall-clock or in processor time."""

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
    """Run cases, and count the outcomes.

    Each case is a description and a function that returns its outcome.

    Raises:
      AssertionError: if a case raised a forbidden error, hung, or took too much memory. The message
        names the first ten.
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
    assert grown < MOST_MIB, f"the process grew by {grown:.0f} MiB"
    return outcomes
