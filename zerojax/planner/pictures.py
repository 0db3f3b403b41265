"""A plan as a picture: bytes by tier, the step's timeline, and efficiency at other bandwidths.

The SVG needs no script and no other file; boxes and stripes have tooltips. The HTML page contains
the SVG, followed by the plan as text.

All bars have the same length, which stands for the tier's capacity: tiers differ by orders of
magnitude, and what matters is how full each one is. If a tier needs more than its capacity, the bar
stands for the needed bytes, and a line inside it marks the capacity.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Protocol

from host_offload.tiers import TIERS
from zerojax.costs import Estimate, StepTime
from zerojax.machines import format_bytes
from zerojax.planner.charts import (
    DARK,
    EDGE,
    GREY,
    LEFT,
    RIGHT,
    ROW,
    WIDTH,
    Part,
    box,
    colour,
    element,
    fits,
    in_order,
    legend,
    line,
    text,
    wrap_text,
)
from zerojax.planner.curves import draw_efficiency
from zerojax.planner.lanes import draw_step


class Drawable(Protocol):
    """Interface of a plan that can be drawn; implemented by `zerojax.planner.plans.Plan`."""

    @property
    def title(self) -> str:
        """Title of the drawing."""
        ...

    @property
    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes per device: {tier: {kind: bytes}}."""
        ...

    @property
    def capacity(self) -> Mapping[str, float | None]:
        """Bytes of each tier that one device may use; None if unknown."""
        ...

    @property
    def time(self) -> StepTime:
        """Predicted seconds of the step, by lane."""
        ...

    @property
    def estimate(self) -> Estimate:
        """Estimate that the prediction is based on."""
        ...


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
    """Return parts, one below the other with headings, as a standalone SVG document.

    Args:
      title: title above the parts; empty for none.
      parts: drawings with their headings.
    """
    titles = wrap_text(title, WIDTH - 2 * EDGE, size=16) if title else []
    body = [
        text(EDGE, 30 + 20 * n, row, font_size=16, font_weight="bold")
        for n, row in enumerate(titles)
    ]
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
    font = {
        "font_family": "sans-serif",
        "font_size": 12,
        "fill": DARK,
        "style": "max-width: 100%; height: auto",
    }
    return element(
        "svg",
        "\n",
        *(f"{one}\n" for one in inside),
        xmlns="http://www.w3.org/2000/svg",
        **size,
        **font,
    )


def build_page(plan: Drawable) -> str:
    """Return a plan as a standalone HTML page: the SVG, and `str(plan)` below it."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{html.escape(plan.title)}</title></head>\n"
        f'<body style="background: #fff; color: #222">\n{draw_plan(plan)}\n'
        f'<pre style="white-space: pre-wrap">{html.escape(str(plan))}</pre>\n</body>\n</html>\n'
    )


# --- bytes of each tier ---------------------------------------------------------------------------

BAR = 22


def draw_tiers(
    bytes_by_tier: Mapping[str, Mapping[str, int]], capacity: Mapping[str, float | None]
) -> Part:
    """Return a bar for each tier that is used, or whose capacity is known.

    Args:
      bytes_by_tier: bytes per device, {tier: {kind: bytes}}.
      capacity: bytes of each tier that one device may use; None if unknown.
    """
    drawn = [
        tier for tier in TIERS if sum(bytes_by_tier.get(tier, {}).values()) or capacity.get(tier)
    ]
    body, top = legend(
        kind for tier in drawn for kind, n in bytes_by_tier.get(tier, {}).items() if n
    )
    for row, tier in enumerate(drawn):
        bar = _bar(tier, bytes_by_tier.get(tier, {}), capacity.get(tier))
        body.append(
            element(
                "g",
                *bar,
                id=f"bytes-{tier}",
                transform=f"translate(0 {top + 6 + row * (ROW + 6):g})",
            )
        )
    note = "per device; the full length of a bar is what a device may use of the tier"
    return Part("Bytes", note, body, top + 6 + len(drawn) * (ROW + 6))


def _bar(tier: str, kinds: Mapping[str, int], had: float | None) -> list[str]:
    """Return the bar of a tier, from y = 0 downwards."""
    used = sum(kinds.values())
    scale = (RIGHT - LEFT) / max(used, had or 0.0, 1.0)
    body = [text(EDGE, 15, tier), box(LEFT, 0, RIGHT - LEFT, BAR, fill="#f7f7f7")]
    x = float(LEFT)
    for kind in in_order(kind for kind, n in kinds.items() if n):
        width = kinds[kind] * scale
        words = f"{kind} {format_bytes(kinds[kind])}"
        body.append(
            box(
                x,
                0,
                width,
                BAR,
                f"{tier}: {words}",
                class_="stripe",
                fill=colour(kind),
                stroke="#555",
                stroke_width=0.5,
            )
        )
        if fits(words, width):
            body.append(text(x + width / 2, 15, words, text_anchor="middle", pointer_events="none"))
        x += width
    if had is not None:
        at = LEFT + had * scale
        body.append(line(at, -4, at, BAR + 4, class_="capacity", stroke="#b00", stroke_width=2))
    of = "" if had is None else f" of {format_bytes(had)}"
    return [*body, text(RIGHT + 12, 15, format_bytes(used) + of)]
