"""Long work tells how far it is, to whoever wants to show it; to nobody by default.

    with working("restore", total=num_records) as advance:      # where the work is done
        for record in records:
            ...
            advance(1)

    with shown_by(show):                                        # where it is to be seen: `zerojax.reporting` draws bars
        state = ckpt.restore(program)

A program reports `init` and its first step (`compile`), a checkpointer what it verifies and
restores, imports their records, exports their tensors, and `zerojax.data.tokenize` the records of a
file.

Who shows it is a variable of the context, so work knows nothing of bars, and the threads that write
checkpoints beside the steps show none.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

Advance = Callable[[int], None]


class Show(Protocol):
    """Shows a piece of work for as long as its context lasts; the context's value is called with
    each progress made.
    """

    def __call__(self, what: str, total: int | None) -> AbstractContextManager[Advance]: ...


_SHOW: contextvars.ContextVar[Show | None] = contextvars.ContextVar("zerojax_show", default=None)


def _unseen(count: int) -> None:
    del count


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Let `show` see the work that is done in this context."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextlib.contextmanager
def working(what: str, total: int | None = None) -> Iterator[Advance]:
    """Yield a function that is told what was done.

    Args:
      what: is done: "init", "compile", "restore".
      total: pieces of it; None where they are not seen from here, as inside of a compiled program.
    """
    show = _SHOW.get()
    if show is None:
        yield _unseen
        return
    with show(what, total) as advance:
        yield advance
