"""The report of a run: one page of HTML with its curves, its memory by tier, and its settings.

Memory is compared with the capacity of each tier. The page needs no script and no other file. Its
pictures are SVG, drawn with the same elements as a plan's picture.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence

from zerojax.planner import draw_parts, draw_tiers
from zerojax.program import FAULT
from zerojax.reporting.folder import replace_file
from zerojax.reporting.series import Chart, Line, draw_charts

Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]
_ORANGE, _GREEN, _PURPLE = "#c2571a", "#2b8a4b", "#7a4fa3"
_COLOURS = ("#1f6fb4", _ORANGE, _GREEN, _PURPLE, "#a8324a", "#6b6b2a")
_STYLE = """
body { background: #fff; color: #222; font-family: sans-serif; font-size: 13px;
  max-width: 1200px; margin: 16px auto; }
h1 { font-size: 20px; margin: 0 16px 8px; } h2 { font-size: 14px; margin: 0 0 6px; }
.tables { display: flex; flex-wrap: wrap; gap: 28px; margin: 8px 16px; align-items: flex-start; }
td { padding: 1px 14px 1px 0; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: #666; white-space: nowrap; }
section { max-width: 560px; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of the page.

    Attributes:
      name: name of the run.
      summary: how the run ended, and its last figures.
      series: {name of a figure: (steps, values)}.
      tiers: bytes per device, {tier: {kind: bytes}}; None if unknown.
      capacity: bytes of each tier that one device may use.
      tables: settings of the run, by heading.
    """

    name: str
    summary: Mapping[str, str]
    series: Series
    tiers: Mapping[str, Mapping[str, int]] | None
    capacity: Mapping[str, float | None]
    tables: Mapping[str, Mapping[str, str]]


def page_of(report: Report) -> str:
    """Return the page as HTML."""
    parts = [draw_charts(charts_of(report.series))]
    if report.tiers is not None:
        parts.append(draw_tiers(report.tiers, report.capacity))
    tables = "".join(_table(heading, rows) for heading, rows in report.tables.items() if rows)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{html.escape(report.name)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{html.escape(report.name)}</h1>\n"
        f'<div class="tables">{_table("", report.summary)}</div>\n'
        f'{draw_parts("", parts)}\n<div class="tables">{tables}</div>\n</body>\n</html>\n'
    )


def write_page(path: str, report: Report) -> None:
    """Replace the page's file by a rename, so that a reader sees the old page or the new one.

    Args:
      path: path of the file.
      report: contents of the page.

    Raises:
      OSError: the file could not be written, for example on a full disk; the old page remains.
    """
    replace_file(path, [page_of(report).encode()])


def charts_of(series: Series) -> list[Chart]:
    """Return the charts of a run's figures: common ones, and one per metric of the model."""

    def line(
        key: str, name: str, colour: str = _COLOURS[0], scale: float = 1.0, has_dots: bool = False
    ) -> Line:
        steps, values = series.get(key, ((), ()))
        return Line(name, steps, [value * scale for value in values], colour, has_dots)

    validations = [key for key in series if key.startswith("validation/")]
    losses = [
        line("train/loss", "training"),
        line("validation/loss", "validation", _ORANGE, has_dots=True),
    ]
    known = [
        Chart("Loss", losses),
        Chart(
            "Tokens a second",
            [line("speed/tokens_per_second", "all devices", _GREEN)],
            from_zero=True,
        ),
        Chart(
            "Seconds a step",
            [line("speed/seconds_per_step", "mean since the last pause", _GREEN)],
            from_zero=True,
        ),
        Chart(
            "Utilization (MFU)",
            [line("speed/mfu", "of the vendor's peak", _GREEN, 100.0)],
            " %",
            from_zero=True,
        ),
        Chart(
            "Waiting for the disk",
            [line("speed/stall", "stall", _PURPLE, 100.0)],
            " %",
            from_zero=True,
        ),
        Chart(
            "Swapped",
            [line("speed/swap_bytes_per_second", "read and written", _PURPLE, 1e-9)],
            " GB/s",
            from_zero=True,
        ),
        Chart("Gradient norm", [line("train/grad_norm", "before clipping")], from_zero=True),
        Chart("Learning rate", _rates(series), from_zero=True),
    ]
    shown = {"train/loss", "train/grad_norm", "train/grads_finite", "validation/loss"}
    own = [
        key
        for key in series
        if key.startswith("train/") and not key.startswith(("train/swap_", "train/learning_rate"))
    ]
    # These are zero in most runs.
    shown |= {
        key
        for key in own
        if key.startswith(("train/skipped_steps", f"train/{FAULT}")) and not any(series[key][1])
    }
    others = [key for key in (*own, *validations) if key not in shown]
    return [
        *known,
        *(
            Chart(key, [line(key, key.partition("/")[2], has_dots=key in validations)])
            for key in others
        ),
    ]


def _rates(series: Series) -> list[Line]:
    keys = [key for key in series if key.startswith("train/learning_rate")]
    named = [
        key.removeprefix("train/learning_rate").removeprefix("/") or "all parameters"
        for key in keys
    ]
    return [
        Line(name, *series[key], _COLOURS[n % len(_COLOURS)])
        for n, (key, name) in enumerate(zip(keys, named, strict=True))
    ]


def _table(heading: str, rows: Mapping[str, str]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>"
        for key, value in rows.items()
    )
    title = f"<h2>{html.escape(heading)}</h2>" if heading else ""
    return f"<section>{title}<table>{cells}</table></section>"
