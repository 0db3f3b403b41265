"""Rows of the results' table."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      name: what was examined.
      figure: the result, in words.
      bound: the required result; "" if there is no requirement.
      ok: whether the result meets the bound; None if it was not judged.
      values: the numbers in `figure`, by name.
    """

    name: str
    figure: str
    bound: str = ""
    ok: bool | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)


def skipped(name: str, why: object) -> Row:
    """Return the row of a result that could not be obtained."""
    return Row(name, f"skipped: {why}")


def failed(name: str, error: BaseException) -> Row:
    """Return the row of a check that raised an exception."""
    text = " ".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None)
    text = " ".join(text.split())
    return Row(name, text if len(text) < 400 else f"{text[:400]} ...", ok=False)


def attempt(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows of a call; an exception becomes the last row."""
    try:
        yield from rows()
    except NotImplementedError as e:
        yield skipped(name, e)
    except Exception as e:
        yield failed(name, e)


def line(check: str, row: Row) -> str:
    """Return a row of the table in Markdown, with the name of its check."""
    ok = {True: "yes", False: "NO", None: ""}[row.ok]
    return (
        "| "
        + " | ".join(
            text.replace("|", "/") for text in (check, row.name, row.figure, row.bound, ok)
        )
        + " |"
    )
