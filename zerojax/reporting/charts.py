"""Charts of a run's figures over its steps, as HTML figures with inline SVG.

A chart can be read without colour: its lines differ in dashes and dots, and the key below it shows
both. In a long run, each point is the mean of several steps, and a pale band shows their range from
least to largest. Values that are not finite are crosses at the bottom, and the key counts them.

Colours, dashes and sizes of text are in the page's style sheet (`zerojax.reporting.page`).
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zerojax.planner import element, round_ticks, text
from zerojax.program import FAULT
from zerojax.reporting.history import Point, Series

PLOT_WIDTH = 340
PLOT_HEIGHT = 170
LEFT = 56
TOP = 10
RIGHT = 14
BOTTOM = 36
"""Room around the plot in pixels, for the numbers of the axes."""
MOST_POINTS = 480
"""Most points of a line."""
NUM_STYLES = 6
"""Number of line styles in the style sheet."""
CROSS = "\N{MULTIPLICATION SIGN}"
"""Sign of a value that is not finite, in a chart's key."""
_SMALLEST = 1e-100
_LARGEST = 1e100
"""Smaller ranges are drawn as if they were zero, larger values as if they were not finite."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
      name: name in the chart's key.
      points: its points, in the order of their steps.
      has_dots: whether to draw a dot at each point, for figures that few steps have.
    """

    name: str
    points: Sequence[Point]
    has_dots: bool = False

    @property
    def drawn(self) -> list[Point]:
        """Points that can be drawn: their values are finite."""
        return [point for point in self.points if abs(point.value) < _LARGEST]

    @property
    def missing(self) -> list[Point]:
        """Points that cannot be drawn."""
        return [point for point in self.points if not abs(point.value) < _LARGEST]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
      heading: text above the chart.
      lines: lines to draw.
      unit: unit of the vertical axis, with a space before it, or "".
      from_zero: whether the vertical axis begins at zero; otherwise it begins at the least value.
    """

    heading: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False


# --- which charts ---------------------------------------------------------------------------------


def build_charts(series: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of a run's figures: common ones, and one per metric of the model.

    Charts without a value that can be drawn are left out.
    """
    losses = [
        _build_line(series, "train/loss", "training"),
        _build_line(series, "validation/loss", "validation", has_dots=True),
    ]
    charts = [
        Chart("Loss", losses),
        _build_rate(series, "Tokens per second", "speed/tokens_per_second", "each step"),
        _build_rate(series, "Seconds per step", "speed/seconds_per_step", "each step"),
        _build_rate(
            series, "Utilization (MFU)", "speed/mfu", "share of the vendor's peak", " %", 100.0
        ),
        _build_rate(series, "Waiting for the disk", "speed/stall", "share of time", " %", 100.0),
        _build_rate(
            series,
            "Disk traffic",
            "speed/swap_bytes_per_second",
            "read and written",
            " GB/s",
            1e-9,
        ),
        _build_rate(series, "Gradient norm", "train/grad_norm", "before clipping"),
        Chart("Learning rate", _build_learning_rates(series), from_zero=True),
    ]
    for name in _list_other_figures(series):
        label = name.partition("/")[2]
        is_validation = name.startswith("validation/")
        heading = f"{label} (validation)" if is_validation else label
        charts.append(Chart(heading, [_build_line(series, name, label, has_dots=is_validation)]))
    return [chart for chart in charts if any(line.drawn for line in chart.lines)]


def _build_line(
    series: Mapping[str, Series], key: str, name: str, scale: float = 1.0, has_dots: bool = False
) -> Line:
    points = [Point(point.step, point.value * scale) for point in series.get(key, ())]
    return Line(name, points, has_dots)


def _build_rate(
    series: Mapping[str, Series],
    heading: str,
    key: str,
    name: str,
    unit: str = "",
    scale: float = 1.0,
) -> Chart:
    return Chart(heading, [_build_line(series, key, name, scale)], unit, from_zero=True)


def _build_learning_rates(series: Mapping[str, Series]) -> list[Line]:
    prefix = "train/learning_rate"
    lines = []
    for key in series:
        if key.startswith(prefix):
            name = key.removeprefix(prefix).removeprefix("/") or "all parameters"
            lines.append(_build_line(series, key, name))
    return lines


def _list_other_figures(series: Mapping[str, Series]) -> list[str]:
    """Return the figures that no other chart shows: the model's own metrics, and validations."""
    common = ("train/loss", "train/grad_norm", "train/grads_finite", "validation/loss")
    prefixes = ("train/swap_", "train/learning_rate")
    zero_in_most_runs = ("train/skipped_steps", f"train/{FAULT}")
    others = []
    for name, points in series.items():
        if name in common or name.startswith(prefixes):
            continue
        if name.startswith(zero_in_most_runs) and not any(point.value for point in points):
            continue
        if name.startswith(("train/", "validation/")):
            others.append(name)
    return others


# --- drawing --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scale:
    """The range of steps and values of a plot, and their places in pixels."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        """Return the place of a step."""
        return LEFT + PLOT_WIDTH * (step - self.first) / max(self.last - self.first, 1)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        return TOP + PLOT_HEIGHT * (self.high - value) / (self.high - self.low)

    def place(self, point: tuple[float, float]) -> str:
        """Return the place of (step, value) as SVG writes it."""
        step, value = point
        return f"{self.x(step):.5g},{self.y(value):.5g}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive points that are drawn as one: mean step and value, least and largest value."""

    step: float
    mean: float
    least: float
    largest: float


def draw_chart(chart: Chart) -> str:
    """Return a chart as an HTML figure: heading, SVG and key.

    At least one line must have a value that can be drawn.
    """
    lines = [line for line in chart.lines if line.points]
    values = [0.0] if chart.from_zero else []
    steps: list[int] = []
    for line in lines:
        values += [point.value for point in line.drawn]
        steps += [point.step for point in line.points]
    ticks = choose_ticks(min(values), max(values))
    scale = Scale(min(steps), max(steps), min(ticks[0], *values), max(ticks[-1], *values))
    body = _draw_axes(scale, ticks)
    for number, line in enumerate(lines):
        body += _draw_line(line, number, scale)
    label = f"{chart.heading} over steps. {'. '.join(describe_line(line) for line in lines)}."
    svg = element(
        "svg",
        *body,
        viewBox=f"0 0 {LEFT + PLOT_WIDTH + RIGHT} {TOP + PLOT_HEIGHT + BOTTOM}",
        role="img",
        aria_label=label,
    )
    key = "".join(
        f"<li>{_draw_sample(line, number)} {html.escape(_describe_key(line, chart.unit))}</li>"
        for number, line in enumerate(lines)
    )
    unit = f",{chart.unit}" if chart.unit else ""
    caption = html.escape(f"{chart.heading}{unit}")
    return (
        f'<figure class="chart"><figcaption>{caption}</figcaption>\n{svg}\n'
        f'<ul class="key">{key}</ul></figure>\n'
    )


def _draw_axes(scale: Scale, ticks: Iterable[float]) -> list[str]:
    """Return grid lines, and the numbers of both axes."""
    body = []
    right = LEFT + PLOT_WIDTH
    bottom = TOP + PLOT_HEIGHT
    labels = label_ticks(ticks)
    for tick, label in labels.items():
        y = scale.y(tick)
        body.append(element("path", d=f"M{LEFT} {y:.5g}H{right}", class_="grid"))
        body.append(text(LEFT - 6, y + 4, label, text_anchor="end"))
    for step in choose_steps(scale.first, scale.last):
        x = scale.x(step)
        body.append(element("path", d=f"M{x:.5g} {bottom}v5", class_="axis"))
        body.append(text(x, bottom + 18, f"{step:,}", text_anchor="middle"))
    body.append(element("path", d=f"M{LEFT} {TOP}V{bottom}H{right}", class_="axis"))
    body.append(text(LEFT + PLOT_WIDTH / 2, bottom + 33, "step", text_anchor="middle"))
    return body


def _draw_line(line: Line, number: int, scale: Scale) -> list[str]:
    """Return a line, its dots, the band behind it, and crosses for missing values."""
    style = f"s{number % NUM_STYLES}"
    groups = group_points(line.drawn, MOST_POINTS)
    body = []
    if len(groups) < len(line.drawn):
        upper = [scale.place((group.step, group.largest)) for group in groups]
        lower = [scale.place((group.step, group.least)) for group in groups]
        outline = " ".join([*upper, *reversed(lower)])
        body.append(element("polygon", points=outline, class_=f"band {style}"))
    places = " ".join(scale.place((group.step, group.mean)) for group in groups)
    body.append(element("polyline", points=places, class_=f"line {style}"))
    if line.has_dots or len(groups) == 1:
        for group in groups:
            x = scale.x(group.step)
            y = scale.y(group.mean)
            body.append(element("circle", cx=x, cy=y, r=3, class_=f"dot {style}"))
    bottom = TOP + PLOT_HEIGHT
    for x in sorted({round(scale.x(point.step)) for point in line.missing}):
        cross = f"M{x - 3} {bottom - 7}l6 6m0 -6l-6 6"
        body.append(element("path", d=cross, class_=f"cross {style}"))
    return body


def _draw_sample(line: Line, number: int) -> str:
    """Return a piece of a line for the key."""
    style = f"s{number % NUM_STYLES}"
    body = [element("polyline", points="0,6 32,6", class_=f"line {style}")]
    if line.has_dots:
        body.append(element("circle", cx=16, cy=6, r=3, class_=f"dot {style}"))
    return element("svg", *body, width=32, height=12, viewBox="0 0 32 12", aria_hidden="true")


def _describe_key(line: Line, unit: str) -> str:
    drawn = line.drawn
    missing = line.missing
    words = line.name
    if drawn:
        words += f", last {format_number(drawn[-1].value)}{unit}"
    if missing:
        words += f"; {CROSS} {len(missing):,} not finite, first at step {missing[0].step:,}"
    return words


def describe_line(line: Line) -> str:
    """Return a line in words, for readers who do not see it."""
    drawn = line.drawn
    missing = line.missing
    facts = []
    if drawn:
        least = min(drawn, key=lambda point: point.value)
        facts = [
            f"{format_number(drawn[0].value)} at step {drawn[0].step:,}",
            f"least {format_number(least.value)} at step {least.step:,}",
            f"last {format_number(drawn[-1].value)} at step {drawn[-1].step:,}",
        ]
    if missing:
        facts.append(f"{len(missing):,} values are not finite")
    return f"{line.name}: {', '.join(facts)}"


def group_points(points: Sequence[Point], most: int) -> list[Group]:
    """Return at most `most` groups of consecutive points of nearly equal size."""
    size = max(1, math.ceil(len(points) / most))
    groups = []
    for start in range(0, len(points), size):
        members = points[start : start + size]
        values = [point.value for point in members]
        step = math.fsum(point.step for point in members) / len(members)
        mean = math.fsum(values) / len(members)
        groups.append(Group(step, mean, min(values), max(values)))
    return groups


# --- numbers of the axes --------------------------------------------------------------------------


class Prefix(NamedTuple):
    """A decimal prefix: letter after a number, and the factor that it stands for."""

    letter: str
    factor: float


_PREFIXES = (Prefix("", 1.0), Prefix(" M", 1e6), Prefix(" G", 1e9), Prefix(" T", 1e12))


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round numbers that cover the range from `low` to `high`."""
    # A range too small for floating-point ticks is widened.
    if high - low <= max(_SMALLEST, 1e-9 * max(abs(low), abs(high))):
        high = low + (abs(low) if abs(low) > _SMALLEST else 1.0)
    ticks = round_ticks(high - low, 5)
    distance = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    start = math.floor(low / distance + 1e-9)
    stop = math.ceil(high / distance - 1e-9)
    return [distance * number for number in range(start, stop + 1)]


def choose_steps(first: int, last: int) -> list[int]:
    """Return at most six round step numbers from `first` to `last`."""
    if last <= first:
        return [first]
    distance = max(1, round(choose_ticks(0.0, float(last - first))[1]))
    start = -(-first // distance) * distance
    return list(range(start, last + 1, distance)) or [first]


def label_ticks(ticks: Iterable[float]) -> dict[float, str]:
    """Return the text of each tick, with as many decimals as their distance needs."""
    ticks = list(ticks)
    distance = ticks[1] - ticks[0]
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    prefix = _choose_prefix(largest)
    if not 1e-3 <= largest / prefix.factor < 1e6:
        digits = max(3, math.ceil(math.log10(largest / distance)) + 1)
        return {tick: f"{tick:.{digits}g}" for tick in ticks}
    distance /= prefix.factor
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return {tick: f"{tick / prefix.factor + 0.0:,.{decimals}f}{prefix.letter}" for tick in ticks}


def format_number(value: float) -> str:
    """Return a number with four digits, or as a whole number up to a million."""
    prefix = _choose_prefix(abs(value))
    scaled = value / prefix.factor
    is_whole = not prefix.letter and 1e3 <= abs(scaled) < 1e6
    return f"{scaled:,.0f}" if is_whole else f"{scaled:.4g}{prefix.letter}"


def _choose_prefix(value: float) -> Prefix:
    """Return the largest prefix that is below a value from a million on; otherwise no prefix."""
    if not 1e6 <= value < 1e15:
        return _PREFIXES[0]
    return max((one for one in _PREFIXES if one.factor <= value), key=lambda one: one.factor)
