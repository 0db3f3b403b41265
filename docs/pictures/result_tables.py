"""Read the tables of benchmarks/results/."""

import pathlib
from collections.abc import Iterator

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/results"
Row = dict[str, str]


def tables(name: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield (line of text above, rows by heading) of each table in a file of results."""
    above, rows, headings = "", list[Row](), list[str]()
    for line in [*(RESULTS / f"{name}.md").read_text().splitlines(), ""]:
        if not line.startswith("|"):
            if rows:
                yield above, rows
                rows = []
            headings = []
            above = line or above
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not headings:
            headings = cells
        elif set(line) - set("|-") and len(cells) == len(headings):
            # A row with fewer cells gives the reason why it was not measured.
            rows.append(named(headings, cells))


def named(headings: list[str], cells: list[str]) -> Row:
    """Return cells by heading; a heading that repeats takes the name of the one before it too."""
    row, last = Row(), ""
    for heading, cell in zip(headings, cells, strict=True):
        key = f"{last}, {heading}" if heading in row else heading
        row[key], last = cell, last if heading in row else heading.split(",")[0]
    return row


def table(name: str, above: str) -> list[Row]:
    """Return the first table below a line of text that starts with `above`."""
    return next(rows for words, rows in tables(name) if words.startswith(above))


def number(words: str) -> float:
    """Return the first number of a cell."""
    return float(words.split(" ")[0].replace(",", ""))
