"""Draw figures over the steps of a run: two charts per row, each with an axis at round numbers.

In a long run, each point is the mean of several steps, and a pale band shows their range from least
to largest. Values that are not finite are left out, and the chart's key shows how many.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

from zerojax.planner import DARK, EDGE, GREY, WIDTH, Part, element, line, round_ticks, text

WIDE, HIGH, LEFT = 480, 170, 80
"""Pixels of a chart's plot, and of the room for numbers to its left."""
ROW, COLUMN = HIGH + 84, (WIDTH - EDGE) // 2
MOST = 480
"""Most points of a line."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
      name: name in the chart's key.
      steps: step numbers, in order.
      values: values at these steps.
      colour: colour of the line.
      has_dots: whether to draw a dot at each point, for figures that few steps have.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: str = "#1f6fb4"
    has_dots: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
      heading: text above the chart.
      lines: lines to draw.
      unit: unit after the numbers of the vertical axis.
      from_zero: whether the vertical axis begins at zero; otherwise it begins at the least value.
    """

    heading: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False


def draw_charts(charts: Sequence[Chart]) -> Part:
    """Return the charts, two per row; charts without any finite value are left out."""
    drawn = [
        chart
        for chart in charts
        if any(math.isfinite(v) for one in chart.lines for v in one.values)
    ]
    body = []
    for n, chart in enumerate(drawn):
        place = f"translate({COLUMN * (n % 2)} {ROW * (n // 2)})"
        body.append(element("g", *_draw(chart), class_="chart", transform=place))
    return Part(
        "Steps", "figures of each step, over the steps", body, float(ROW * -(-len(drawn) // 2))
    )


def _draw(chart: Chart) -> list[str]:
    """Return the elements of a chart, positioned relative to its upper left corner."""
    points = [
        (s, v)
        for one in chart.lines
        for s, v in zip(one.steps, one.values, strict=True)
        if math.isfinite(v)
    ]
    first, last = min(s for s, _ in points), max(s for s, _ in points)
    low, high = min(v for _, v in points), max(v for _, v in points)
    low = min(0.0, low) if chart.from_zero else low
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def at(step: float, value: float) -> tuple[float, float]:
        share = (step - first) / max(last - first, 1)
        return LEFT + WIDE * share, 24 + HIGH * (1 - (value - low) / (high - low))

    body = [text(LEFT, 12, chart.heading, font_weight="bold")]
    for tick in ticks:
        y = at(first, tick)[1]
        body += [
            line(LEFT, y, LEFT + WIDE, y),
            text(LEFT - 6, y + 4, f"{_number(tick)}{chart.unit}", fill=GREY, text_anchor="end"),
        ]
    for step in [
        round(tick) for tick in _ticks(first, last) if first <= tick <= last and tick == round(tick)
    ] or [first]:
        x, y = at(step, low)
        body.append(line(x, y, x, y + 4, stroke=GREY))
        body.append(text(x, y + 17, f"{step:,}", fill=GREY, text_anchor="middle"))
    x = float(LEFT)
    for one in chart.lines:
        kept = [(s, v) for s, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        if not kept:
            continue
        body += _line(one, kept, at)
        words = f"{one.name}, last {_number(kept[-1][1])}{chart.unit}"
        if missing := len(one.values) - len(kept):
            words += f", {missing} not finite"
        y = 24 + HIGH + 36
        body += [
            line(x, y - 4, x + 16, y - 4, stroke=one.colour, stroke_width=2.5),
            text(x + 22, y, words, fill=DARK),
        ]
        x += 40 + 7.2 * len(words)
    return body


def _line(
    one: Line, kept: Sequence[tuple[int, float]], at: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    """Return the line and, if a point represents several steps, the band behind it."""
    size = -(-len(kept) // MOST)
    groups = [kept[i : i + size] for i in range(0, len(kept), size)]
    body = []
    if size > 1:
        upper = [at(group[0][0], max(v for _, v in group)) for group in groups]
        lower = [at(group[0][0], min(v for _, v in group)) for group in groups]
        body.append(
            element(
                "polygon", points=_points([*upper, *reversed(lower)]), fill=one.colour, opacity=0.18
            )
        )
    means = [at(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]
    tooltip = element("title", html.escape(f"{one.name}: {len(kept)} points"))
    body.append(
        element(
            "polyline",
            tooltip,
            points=_points(means),
            fill="none",
            stroke=one.colour,
            stroke_width=1.6,
            class_="series",
            stroke_linejoin="round",
        )
    )
    if one.has_dots or len(means) == 1:
        body += [element("circle", cx=x, cy=y, r=2.5, fill=one.colour) for x, y in means]
    return body


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.5g},{y:.5g}" for x, y in places)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that cover the range from `low` to `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    ticks = round_ticks(high - low, 5)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    return [
        step * n for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
