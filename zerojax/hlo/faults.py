"""Texts that are not what XLA writes: errors that name the line and the reason, for every function that reads a program.

What is known to go wrong is checked before a program is read (`zerojax.hlo.check`). `reads_program` is for the rest: whatever a
reader stumbles over in a text is the text's fault, so it becomes a ValueError with the line that was read. The cause stays
attached.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_STUMBLES = (
    LookupError, AttributeError, TypeError, AssertionError, ArithmeticError, RecursionError, StopIteration, MemoryError,
)  # fmt: skip


class ProgramTextError(ValueError):
    """A text is not a program as XLA writes it. The message has the line and the reason."""


def fault(line: int, reason: str) -> ProgramTextError:
    """Return the error of a line of a program's text, counted from 1; 0: of no single line."""
    return ProgramTextError(f"line {line} of the program's text: {_short(reason)}" if line else _short(reason))


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}.."


def reads_program(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that reads the text of a program raise ValueError, with a line, for all that it stumbles over."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ProgramTextError:
            raise
        except _STUMBLES as error:
            line, name = _place(error)
            said = f"{type(error).__name__}: {error}"
            raise fault(line, f"{name or 'the text'} is not what XLA writes ({said})") from error

    return checked


def _place(error: BaseException) -> tuple[int, str]:
    """Return line and name of the instruction that was being read: of the innermost call that has one as `i`."""
    found, trace = (0, ""), error.__traceback__
    while trace is not None:
        i = trace.tb_frame.f_locals.get("i")
        line, result = getattr(i, "line", None), getattr(i, "result", None)
        if isinstance(line, int) and isinstance(result, str):
            found = (line, result)
        trace = trace.tb_next
    return found
