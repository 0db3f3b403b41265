"""A plan as a picture: bytes by tier against capacity, the step in seconds, and its efficiency at other bandwidths.

The SVG needs no script and no file beside it; boxes and stripes have tooltips. The page holds it, and the plan as text below.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Protocol

from zerojax.costs import Estimate, StepTime
from zerojax.planner.bars import draw_tiers
from zerojax.planner.charts import DARK, EDGE, GREY, WIDTH, Part, element, rows_of, text
from zerojax.planner.curves import draw_efficiency
from zerojax.planner.lanes import draw_step


class Drawable(Protocol):
    """What is drawn of a plan (`zerojax.planner.plans.Plan`, which offers the drawing itself)."""

    @property
    def title(self) -> str: ...
    @property
    def bytes(self) -> Mapping[str, Mapping[str, int]]: ...
    @property
    def capacity(self) -> Mapping[str, float | None]: ...
    @property
    def time(self) -> StepTime: ...
    @property
    def estimate(self) -> Estimate: ...


def draw_plan(plan: Drawable) -> str:
    """Return a plan as a standalone SVG document."""
    estimate = plan.estimate
    parts = [
        draw_tiers(plan.bytes, plan.capacity),
        draw_step(plan.time),
        draw_efficiency(plan.time, estimate.wires, estimate.seconds_with),
    ]
    return draw_parts(plan.title, parts)


def draw_parts(title: str, parts: Sequence[Part]) -> str:
    """Return parts below each other, each under its heading, as a standalone SVG document."""
    titles = rows_of(title, WIDTH - 2 * EDGE, size=16) if title else []
    body = [text(EDGE, 30 + 20 * n, row, font_size=16, font_weight="bold") for n, row in enumerate(titles)]
    y = 20.0 * len(titles) + 40
    for part in parts:
        note = element("tspan", html.escape(part.note), fill=GREY, dx=10)
        heading = element("tspan", html.escape(part.heading), font_size=14, font_weight="bold")
        body.append(element("text", heading, note, x=EDGE, y=y))
        body.append(element("g", *part.body, transform=f"translate(0 {y + 14:g})"))
        y += 14 + part.height + 36
    size = {"width": WIDTH, "height": f"{y:g}", "viewBox": f"0 0 {WIDTH} {y:g}"}
    ground = element("rect", width=WIDTH, height=y, fill="#fff")
    inside = [element("title", html.escape(title)), ground, *body]
    font = {"font_family": "sans-serif", "font_size": 12, "fill": DARK, "style": "max-width: 100%; height: auto"}
    return element("svg", "\n", *(f"{one}\n" for one in inside), xmlns="http://www.w3.org/2000/svg", **size, **font)


def page_of(plan: Drawable) -> str:
    """Return a plan as a standalone HTML page: the SVG, and `str(plan)` below it."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(plan.title)}</title></head>\n'
        f'<body style="background: #fff; color: #222">\n{draw_plan(plan)}\n'
        f'<pre style="white-space: pre-wrap">{html.escape(str(plan))}</pre>\n</body>\n</html>\n'
    )
