"""Rows of the table."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: what was looked at.
      figure: what was seen, in words.
      bound: what it must be; "" where it is only told.
      ok: whether it is; None where nothing was judged.
      values: the numbers of `figure`.
    """

    name: str
    figure: str
    bound: str = ""
    ok: bool | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)


def skipped(name: str, why: object) -> Row:
    """Return the row of something that could not be looked at."""
    return Row(name, f"skipped: {why}")


def failed(name: str, error: BaseException) -> Row:
    """Return the row of something that raised."""
    text = " ".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None)
    text = " ".join(text.split())
    return Row(name, text if len(text) < 400 else f"{text[:400]} ...", ok=False)


def attempt(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield rows; an exception becomes the last one."""
    try:
        yield from rows()
    except NotImplementedError as e:
        yield skipped(name, e)
    except Exception as e:
        yield failed(name, e)


def line(check: str, row: Row) -> str:
    """Return a row of the table in Markdown."""
    ok = {True: "yes", False: "NO", None: ""}[row.ok]
    return (
        "| "
        + " | ".join(
            text.replace("|", "/") for text in (check, row.name, row.figure, row.bound, ok)
        )
        + " |"
    )
