"""Progress of long operations, reported to an optional display.

    with working("restore", total=num_records) as advance:      # where the work is done
        for record in records:
            ...
            advance(1)

    with shown_by(show):       # where it is displayed: `zerojax.reporting` draws bars
        state = ckpt.restore(program)

A program reports `init` and its first step (`compile`); a checkpointer reports the records that it
verifies and restores; imports report records, exports report tensors, and `zerojax.data.tokenize`
reports the records of a file.

The display is a context variable, so the working code needs no knowledge of bars, and the threads
that write checkpoints during the steps show none.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

Advance = Callable[[int], None]


class Show(Protocol):
    """Displays an operation while its context lasts.

    The context's value is called with the amount of each progress.
    """

    def __call__(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """Return the context in which one operation is displayed.

        Args:
          what: name of the operation, such as "restore".
          total: number of pieces; None if unknown.
        """
        ...


_SHOW: contextvars.ContextVar[Show | None] = contextvars.ContextVar("zerojax_show", default=None)


def _unseen(count: int) -> None:
    del count


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Display the operations in this context by `show`."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextlib.contextmanager
def working(what: str, total: int | None = None) -> Iterator[Advance]:
    """Yield a function to call with the number of pieces just done.

    Args:
      what: name of the operation: "init", "compile", "restore".
      total: number of pieces; None if unknown, as inside a compiled program.
    """
    show = _SHOW.get()
    if show is None:
        yield _unseen
        return
    with show(what, total) as advance:
        yield advance
