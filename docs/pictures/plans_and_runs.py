"""Draw what plans predict against what was compiled and measured, from benchmarks/results/."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from result_tables import number, table, tables
from style import EDGE, GREY, INK, PAPER, RULE, heading, label, legend, picture, rule

from zerojax.planner.charts import element

LEFT, RIGHT, HEIGHT = 56.0, 462.0, 270.0
BANDS = (("plain", 0.10), ("device", 0.05))
SHAPES = {
    "compiled": "M-4 0H4M0 -4V4",
    "drawn": "M-3.2 -3.2L3.2 3.2M-3.2 3.2L3.2 -3.2",
    "H200": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "CPU": "M-4 -4h8v8h-8z",
}


class Point(NamedTuple):
    """A plan: how its counterpart was obtained, its figure, and the counterpart's."""

    kind: str
    planned: float
    real: float


def bytes_planned() -> list[Point]:
    """Return GB of device memory: planned, and compiled or measured."""
    points = list[Point]()
    for kind, name, above in (
        ("compiled", "planned_memory_h200_aot_202611", "## jax 0.12.0"),
        ("drawn", "planned_memory_drawn_h200_aot_202611", "Command"),
    ):
        for row in table(name, above):
            points.append(Point(kind, number(row["device GB, planned"]), number(row["compiled"])))
    for row in table("planned_h200_202611", "jax"):
        planned, real = number(row["device GiB, planned"]), number(row["measured"])
        points.append(Point("H200", planned * 2**30 / 1e9, real * 2**30 / 1e9))
    return points


def seconds_planned() -> list[Point]:
    """Return seconds of a step: planned, and measured on an H200 and on a CPU."""
    points = list[Point]()
    for row in table("planned_h200_202611", "jax"):
        points.append(Point("H200", number(row["s, planned"]), number(row["s, measured"])))
    _, rows = next(tables("planned_cpu2_202611"))
    for row in rows:
        # Predicted before and after the run.
        before, after = (number(words) for words in row["predicted s"].split(", "))
        points.append(Point("CPU", (before + after) / 2, number(row["measured s"])))
    return points


def mark(kind: str, x: float, y: float) -> str:
    """Return a point's mark."""
    fill = PAPER if SHAPES[kind].endswith("z") else "none"
    move = f"translate({x:.1f} {y:.1f})"
    return element("path", d=SHAPES[kind], fill=fill, stroke=INK, stroke_width=1.4, transform=move)


def panel(
    points: Sequence[Point], ticks: Sequence[float], names: tuple[str, str], y: float
) -> tuple[list[str], list[str], float]:
    """Return the grid and the marks of a diagram with logarithmic axes, and the y below it."""
    low, high = math.log(ticks[0] * 0.9), math.log(ticks[-1] * 1.1)
    bottom = y + HEIGHT

    def across(value: float) -> float:
        return LEFT + (math.log(value) - low) / (high - low) * (RIGHT - LEFT)

    def up(value: float) -> float:
        return bottom - (math.log(value) - low) / (high - low) * HEIGHT

    frame = {"x": LEFT, "y": y, "width": RIGHT - LEFT, "height": HEIGHT}
    clip = f"panel{y:.0f}"
    grid = [element("clipPath", element("rect", **frame), id=clip)]
    body = list[str]()
    start, stop = math.exp(low), math.exp(high)
    for texture, share in BANDS:
        corners = [
            (start, start * (1 - share)),
            (stop, stop * (1 - share)),
            (stop, stop * (1 + share)),
            (start, start * (1 + share)),
        ]
        path = "L".join(f"{across(a):.1f} {up(b):.1f}" for a, b in corners)
        grid.append(
            element(
                "path",
                d=f"M{path}z",
                fill=f"url(#{texture})",
                stroke=GREY,
                stroke_width=0.5,
                stroke_dasharray="3 3",
                clip_path=f"url(#{clip})",
            )
        )
    for tick in ticks:
        grid.append(rule(across(tick), y, across(tick), bottom))
        grid.append(rule(LEFT, up(tick), RIGHT, up(tick)))
        body.append(label(across(tick), bottom + 14, f"{tick:g}", anchor="middle", fill=GREY))
        body.append(label(LEFT - 6, up(tick) + 4, f"{tick:g}", anchor="end", fill=GREY))
    grid.append(rule(across(start), up(start), across(stop), up(stop), stroke=GREY))
    grid.append(element("rect", **frame, fill="none", stroke=RULE))
    body += [mark(point.kind, across(point.real), up(point.planned)) for point in points]
    body.append(label(LEFT + 8, y + 16, names[1], bold=True, halo=True))
    body.append(label(RIGHT - 8, bottom - 9, names[0], bold=True, anchor="end", halo=True))
    return grid, body, bottom + 22


def counted(points: Sequence[Point], kind: str) -> str:
    """Return how many of the points of a kind are within 5 and 10 %, in words."""
    own = [abs(point.planned / point.real - 1) for point in points if point.kind == kind]
    # A figure such as 1.05 over 1.00 is within 5 %, in spite of its rounding in binary.
    within = [sum(share < limit + 1e-9 for share in own) for limit in (0.05, 0.10)]
    return f"{within[0]} of {len(own)} within 5 %, {within[1]} within 10 %"


def key(kinds: Sequence[tuple[str, str]], points: Sequence[Point], y: float) -> list[str]:
    """Return a row for each kind of point: its mark, its name, and how near the points are."""
    body = list[str]()
    for n, (kind, words) in enumerate(kinds):
        row = y + 17 * n
        body.append(mark(kind, EDGE + 8, row))
        body.append(label(EDGE + 22, row + 4, f"{words}: {counted(points, kind)}", size=11.5))
    return body


def draw() -> str:
    """Return the picture as an SVG document."""
    title = "Planned against real: device memory and seconds"
    body, y = heading(title)
    words, y = legend([("device", "within 5 %"), ("plain", "within 10 %")], y + 6)
    body += words
    sizes = bytes_planned()
    kinds = [
        ("compiled", "compiled, picked"),
        ("drawn", "compiled, drawn at random"),
        ("H200", "ran on an H200"),
    ]
    body += key(kinds, sizes, y + 6)
    names = ("compiled or measured, GB", "planned, GB")
    grid, marks, y = panel(sizes, (0.5, 1, 2, 5, 10, 20, 35), names, y + 56)
    body += marks
    times = seconds_planned()
    body += key([("H200", "ran on an H200"), ("CPU", "ran on a CPU")], times, y + 20)
    names = ("measured, seconds", "planned, seconds")
    lines, marks, y = panel(times, (0.4, 0.5, 0.7, 1, 1.5, 2, 3), names, y + 54)
    return picture(title, [*body, *marks], y + 6, [*grid, *lines])
