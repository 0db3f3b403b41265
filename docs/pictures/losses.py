"""Draw the losses of one model, trained in every tier and at stages 1 to 3."""

from collections.abc import Mapping
from typing import Any

from style import EDGE, GREY, INK, PAPER, WIDTH, heading, label, picture, rule, wrapped

from zerojax.planner.charts import element, round_ticks

LEFT, RIGHT = 56.0, 462.0
HEIGHT, LOW = 190.0, 80.0
"""Heights of the losses and of their differences."""
LINE = "stage 3, device"
"""The run that is drawn as a line."""
INKS = {"device": "#2f6d9e", "pinned_host": "#55822f", "nvme": "#b26a12"}
SHAPES = {"1": "M-4 -4h8v8h-8z", "2": "M0 -5L5 4H-5z", "3": "M0 -5.5L5.5 0L0 5.5L-5.5 0z"}
"""Colours of marks by tier, and their shapes by stage."""


def mark(x: float, y: float, name: str) -> str:
    """Return the mark of a run: its shape is the stage, and its filling the tier."""
    stage, tier = name.removeprefix("stage ").split(", ")
    ink = INKS[tier]
    more = {"stroke": ink, "stroke_width": 1.4, "transform": f"translate({x:.1f} {y:.1f})"}
    fill = ink if tier == "nvme" else PAPER
    if tier == "pinned_host":
        dot = element("circle", r=1.6, fill=ink, transform=f"translate({x:.1f} {y:.1f})")
        return element("path", d=SHAPES[stage], fill=fill, **more) + dot
    return element("path", d=SHAPES[stage], fill=fill, **more)


def curve(numbers: list[float], x: float, y: float, most: float) -> str:
    """Return a path through numbers; x and y are units per step and per number."""
    points = (f"{LEFT + n * x:.1f} {y - v / most:.1f}" for n, v in enumerate(numbers))
    return element("path", d="M" + "L".join(points), fill="none", stroke=INK, stroke_width=1.6)


def draw(data: Mapping[str, Any]) -> str:
    """Return the picture as an SVG document."""
    losses = data["losses"]
    line, others = losses[LINE], [name for name in losses if name != LINE]
    away = [max(abs(losses[name][n] - loss) for name in others) for n, loss in enumerate(line)]
    title = f"One model, trained {len(losses)} times: three stages, three tiers"
    body, y = heading(title)
    body.append(rule(EDGE, y + 12, EDGE + 20, y + 12, stroke=INK, stroke_width=1.6))
    body.append(label(EDGE + 27, y + 16, f"{LINE} (line); the others are marks:"))
    y += 30
    for n, name in enumerate(others):
        x, row = EDGE + 8 + 153 * (n % 3), y + 17 * (n // 3)
        body += [mark(x, row, name), label(x + 12, row + 4, name)]
    top = y + 17 * ((len(others) + 2) // 3) + 6
    bottom, step = top + HEIGHT, (RIGHT - LEFT) / (len(line) - 1)
    most, grid = max(line), list[str]()
    unit = most / HEIGHT
    for tick in round_ticks(most, 6):
        grid.append(rule(LEFT, bottom - tick / unit, RIGHT, bottom - tick / unit))
        body.append(label(LEFT - 6, bottom - tick / unit + 4, f"{tick:g}", anchor="end", fill=GREY))
    body.append(curve(line, step, bottom, unit))
    every = len(others)
    for n in range(0, len(line), 6):
        name = others[(n // 6) % every]
        body.append(mark(LEFT + n * step, bottom - losses[name][n] / unit, name))
    body.append(label(RIGHT, top + 14, "loss", anchor="end", bold=True, halo=True))
    start = bottom + 30
    end, largest = start + LOW, max(away)
    for share in (0.0, 0.5, 1.0):
        grid.append(rule(LEFT, end - share * LOW, RIGHT, end - share * LOW))
        words = f"{share * largest:.1e}" if share else "0"
        body.append(label(LEFT - 6, end - share * LOW + 4, words, size=11, anchor="end", fill=GREY))
    body.append(curve(away, step, end, largest / LOW))
    words = "largest difference from the line"
    body.append(label(LEFT + 4, start - 5, words, bold=True))
    for tick in round_ticks(len(line), 8):
        x = LEFT + tick * step
        if x <= RIGHT + 2:
            body.append(label(x, end + 15, f"{tick:g}", anchor="middle", fill=GREY))
    body.append(label(LEFT - 12, end + 15, "step", anchor="end", fill=GREY))
    at = away.index(largest)
    relative = max(a / loss for a, loss in zip(away, line, strict=True))
    note = (
        f"Largest difference: {largest:.1e} at step {at}, where the loss is {line[at]:.2f}. "
        f"Relative to the loss: at most {relative:.1e}."
    )
    rows, bottom = wrapped(EDGE, end + 24, note, WIDTH - 2 * EDGE, size=11.5)
    return picture(title, [*body, *rows], bottom + 10, grid)
