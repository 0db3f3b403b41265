"""Draw how efficient a step would be at other bandwidths of the host link and of the disk.

    efficiency(m) = seconds of compute / seconds of the step with m times the bandwidth

ZeRO-Infinity's figure 3 (arXiv:2104.07857, section 4.2) draws its equation 6, ait * bw /
(ait * bw + peak), in which no transfer is hidden. Here each point is a new walk through the step's
schedule, so overlap counts: a curve is flat where a wire is hidden, and falls where the cores wait
for it. A curve that ends below 100 % is bound by another lane.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from zerojax.costs import StepTime, Wires
from zerojax.planner.charts import DARK, GREY, LEFT, Part, element, line, number, text

MULTIPLES = tuple(2.0 ** (n / 4) for n in range(-12, 13))
"""Multiples of the machine's bandwidth at which a curve is computed."""
_TICKS = {2.0**n: f"x{2**n}" if n >= 0 else f"x1/{2**-n}" for n in range(-3, 4)}
WIDE = 560
HIGH = 220
"""Width and height of the chart in pixels."""


class Curve(NamedTuple):
    """Efficiency over bandwidth.

    Attributes:
      name: wire that varies, "link" or "disk".
      rates: the machine's bytes per second, in each direction.
      seconds: seconds of the step at each of `MULTIPLES`.
    """

    name: str
    rates: tuple[float, float]
    seconds: tuple[float, ...]


_COLOURS = {"link": "#1f6fb4", "disk": "#c2571a"}
_WAYS = {"link": ("up", "down"), "disk": ("read", "write")}


def build_curves(
    time: StepTime, wires: Wires, seconds_with: Callable[[Wires], float]
) -> list[Curve]:
    """Return a curve for each of link and disk that the step uses; the other is unchanged."""
    curves = list[Curve]()
    for name, ways in _WAYS.items():
        if any(time.busy[way] for way in ways):
            seconds = tuple(seconds_with(wires.times(**{name: multiple})) for multiple in MULTIPLES)
            curves.append(Curve(name, (getattr(wires, ways[0]), getattr(wires, ways[1])), seconds))
    return curves


def draw_efficiency(time: StepTime, wires: Wires, seconds_with: Callable[[Wires], float]) -> Part:
    """Return the chart, or a sentence if nothing moves over link or disk.

    Args:
      time: predicted step at the machine's bandwidths.
      wires: the machine's bandwidths.
      seconds_with: function that returns the seconds of the step with other wires.
    """
    heading = "Efficiency by bandwidth"
    curves = build_curves(time, wires, seconds_with)
    compute = time.busy["compute"]
    if not curves:
        return Part(
            heading,
            "",
            [
                text(
                    LEFT, 16, "Nothing moves over the link or the disk, so bandwidth is irrelevant."
                )
            ],
            24,
        )
    body = _axes(curves)
    for curve in curves:
        points = [
            f"{_x(m):.6g},{_y(compute / s):.6g}"
            for m, s in zip(MULTIPLES, curve.seconds, strict=True)
        ]
        name = curve.name
        body.append(
            element(
                "polyline",
                points=" ".join(points),
                id=f"curve-{name}",
                fill="none",
                stroke=_COLOURS[name],
                stroke_width=2.5,
                **({"stroke_dasharray": "7 3"} if name == "disk" else {}),
            )
        )
    share = compute / time.seconds
    body.append(element("circle", id="machine", cx=_x(1.0), cy=_y(share), r=5, fill=DARK))
    note = "seconds of compute alone over seconds of the step; each curve changes one bandwidth"
    return Part(heading, note, [*body, *_key(curves, time)], HIGH + 30 + 18 * len(curves) + 12)


def _x(multiple: float) -> float:
    """Return the x position of a multiple of the bandwidth, on a logarithmic axis."""
    low = MULTIPLES[0]
    high = MULTIPLES[-1]
    return LEFT + WIDE * math.log(multiple / low) / math.log(high / low)


def _y(share: float) -> float:
    """Return the y position of an efficiency."""
    return 8 + HIGH * (1 - share)


def _axes(curves: list[Curve]) -> list[str]:
    """Return the grid with its labels: percent at the left, multiples and bandwidths below."""
    body = list[str]()
    foot = _y(0.0)
    for percent in range(0, 101, 25):
        y = _y(percent / 100)
        body += [
            line(LEFT, y, LEFT + WIDE, y),
            text(LEFT - 8, y + 4, f"{percent} %", fill=GREY, text_anchor="end"),
        ]
    for multiple, words in _TICKS.items():
        x = _x(multiple)
        body += [
            line(x, _y(1.0), x, foot + 4),
            text(x, foot + 18, words, class_="tick", fill=GREY, text_anchor="middle"),
        ]
        for row, curve in enumerate(curves):
            at = f"{curve.rates[0] * multiple / 1e9:.3g}"
            body.append(
                text(x, foot + 36 + 18 * row, at, fill=_COLOURS[curve.name], text_anchor="middle")
            )
    for row, curve in enumerate(curves):
        words = f"{curve.name} GB/s"
        body.append(
            text(
                LEFT - 30, foot + 36 + 18 * row, words, fill=_COLOURS[curve.name], text_anchor="end"
            )
        )
    return body


def _key(curves: list[Curve], time: StepTime) -> list[str]:
    """Return the key at the right of the chart.

    It has this machine's dot, each curve's rates, and the result at twice these rates.
    """
    x = LEFT + WIDE + 40
    y = 26.0
    compute = time.busy["compute"]
    dot = element("circle", cx=x + 12, cy=y - 4, r=5, fill=DARK)
    words = (
        f"this machine: {number(time.seconds)} s a step, {compute / time.seconds:.1%}; "
        f"compute alone {number(compute)} s"
    )
    body = [dot, text(x + 34, y, words)]
    for curve in curves:
        y += 40
        rates = ", ".join(
            f"{rate / 1e9:.3g} GB/s {way}"
            for way, rate in zip(_WAYS[curve.name], curve.rates, strict=True)
        )
        twice = curve.seconds[MULTIPLES.index(2.0)]
        dash = {"stroke_dasharray": "7 3"} if curve.name == "disk" else {}
        body.append(
            line(x, y - 4, x + 24, y - 4, stroke=_COLOURS[curve.name], stroke_width=2.5, **dash)
        )
        body.append(text(x + 34, y, f"{curve.name}: {rates}, per device"))
        body.append(
            text(
                x + 34,
                y + 17,
                f"at twice that: {number(twice)} s a step, {compute / twice:.1%}",
                fill=GREY,
            )
        )
    return body
