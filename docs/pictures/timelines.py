"""Draw what the lanes of a device do during a step: as `zj.plan` predicts it, and as it ran."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reference_machine import DISK, HOST
from style import EDGE, GREY, INK, filled, heading, label, legend, picture, rule

import zerojax as zj
from zerojax.planner.charts import round_ticks

LEFT, RIGHT, ROW, TALL = 116.0, 424.0, 17.0, 12.0
"""Ends of the time axis, height of a lane, and height of its boxes."""
SIZES: dict[str, Any] = {
    "layers": 6,
    "hidden": 6144,
    "heads": 48,
    "seq": 2048,
    "batch": 8,
    "vocab": 32000,
}
STREAMED = {"stage": 3, "precision": "bf16", "update": "in_backward", "prefetch_distance": 1}
PREDICTED: dict[str, tuple[str, dict[str, Any]]] = {
    "step_host": (
        "Predicted: parameters, optimizer state in host memory",
        STREAMED | {"params": "pinned_host", "opt_state": "pinned_host"},
    ),
    "step_disk": (
        "Predicted: parameters and optimizer state on a disk",
        STREAMED | {"params": "nvme", "opt_state": "nvme", "swap_dir": "/mnt/disk"},
    ),
}
LANES = {
    # (lane, label) of a plan's spans: name and texture of the row
    ("read", "read params"): ("read params", "disk"),
    ("read", "read opt_state"): ("read opt_state", "disk"),
    ("up", "load params"): ("load params", "host"),
    ("compute", "forward"): ("forward", "device"),
    ("compute", "head"): ("head, loss", "device"),
    ("compute", "backward"): ("backward", "device"),
    ("down", "gradients"): ("store grads", "host"),
    ("host", "update"): ("update on CPU", "host"),
    ("write", "write params"): ("write params", "disk"),
    ("write", "write opt_state"): ("write opt_state", "disk"),
}
RAN = {
    "forward": ("forward", "device"),
    "recompute": ("recompute", "device"),
    "backward": ("backward", "device"),
    "update": ("update", "device"),
    "copies": ("copies", "host"),
    "callbacks": ("callbacks", "host"),
    "waits": ("wait for disk", "waits"),
    "read params": ("read params", "disk"),
    "read opt_state": ("read opt_state", "disk"),
    "write params": ("write params", "disk"),
    "write opt_state": ("write opt_state", "disk"),
}
"""Lanes of a measured step: name and texture of the row."""


class Box(NamedTuple):
    """Work from `start` to `stop`, in seconds, with a few characters drawn in it."""

    start: float
    stop: float
    words: str = ""


class Lane(NamedTuple):
    """A row of boxes, which was busy for some seconds."""

    name: str
    texture: str
    boxes: Sequence[Box]
    busy: float


def lanes(rows: Sequence[Lane], scale: float, y: float) -> tuple[list[str], float]:
    """Return rows of boxes below y, and the y position below them."""
    body = list[str]()
    for row in rows:
        body.append(label(LEFT - 6, y + 10, row.name, anchor="end"))
        body.append(rule(LEFT, y + TALL, RIGHT, y + TALL))
        for box in row.boxes:
            x, width = LEFT + box.start * scale, (box.stop - box.start) * scale
            body.append(filled(x, y, max(width, 0.5), TALL, row.texture))
            if width > 5 + 7 * len(box.words) and box.words:
                middle = x + width / 2
                body.append(label(middle, y + 10, box.words, size=10.5, anchor="middle", halo=True))
        body.append(label(RIGHT + 5, y + 10, f"{row.busy:.2f} s", fill=GREY))
        y += ROW
    return body, y


def axis(stop: float, scale: float, top: float, bottom: float) -> tuple[list[str], list[str]]:
    """Return a grid from top to bottom, and its seconds below it."""
    grid, words = list[str](), list[str]()
    for tick in round_ticks(stop, 6):
        x = LEFT + tick * scale
        grid.append(rule(x, top, x, bottom))
        words.append(label(x, bottom + 13, f"{tick:g}", anchor="middle", fill=GREY))
    words.append(label(RIGHT + 8, bottom + 13, "seconds", fill=GREY, size=11))
    return grid, words


def predicted(title: str, fixed: Mapping[str, Any]) -> str:
    """Return the predicted timeline of a step on one RTX 4090, as an SVG document."""
    machine = dataclasses.replace(zj.machine("rtx4090"), **HOST, **DISK)
    time = zj.plan(zj.Sizes(**SIZES), machine=machine, fixed=fixed).time
    stop = max([time.seconds, *(span.stop for span in time.spans)])
    rows = list[Lane]()
    for key, (name, texture) in LANES.items():
        spans = [span for span in time.spans if (span.lane, span.label) == key]
        if spans:
            boxes = [
                Box(span.start, span.stop, "" if span.layer < 0 else str(span.layer))
                for span in spans
            ]
            busy = sum(box.stop - box.start for box in boxes)
            rows.append(Lane(name, texture, boxes, busy))
    body, y = heading(title)
    key = [("device", "GPU"), ("host", "host memory, CPU")]
    if any(row.texture == "disk" for row in rows):
        key.append(("disk", "disk"))
    words, top = legend(key, y + 6)
    scale = (RIGHT - LEFT) / stop
    drawn, bottom = lanes(rows, scale, top + 2)
    grid, ticks = axis(stop, scale, top, bottom)
    note = "Numbers are layers. Right: seconds busy."
    if stop > time.seconds:
        x = LEFT + time.seconds * scale
        grid.append(rule(x, top, x, bottom, stroke=INK, stroke_dasharray="4 3"))
        note += " Dashed: the next step begins."
    below = label(EDGE, bottom + 31, note, fill=GREY, size=11)
    return picture(title, [*body, *words, *drawn, *ticks, below], bottom + 40, grid)


def measured(data: Mapping[str, Any]) -> str:
    """Return the timelines of a step that ran in each tier, as an SVG document."""
    title = "Measured: the same step with its states in each tier"
    body, y = heading(title)
    key = [
        ("device", "compute"),
        ("host", "copies, callbacks"),
        ("disk", "disk"),
        ("waits", "wait for disk"),
    ]
    words, y = legend(key, y + 6)
    stop = max(step["seconds"] for step in data["tiers"].values())
    scale, grid = (RIGHT - LEFT) / stop, list[str]()
    body += words
    for tier, step in data["tiers"].items():
        body.append(label(EDGE, y + 12, f"{tier}: {step['seconds']:.2f} s a step", bold=True))
        rows = [
            Lane(name, texture, [Box(a, b) for a, b in step["lanes"][lane]], step["busy"][lane])
            for lane, (name, texture) in RAN.items()
            if lane in step["lanes"]
        ]
        top = y + 19
        drawn, y = lanes(rows, scale, top)
        lines, ticks = axis(stop, scale, top, y)
        end = LEFT + step["seconds"] * scale
        lines.append(rule(end, top, end, y, stroke=INK, stroke_dasharray="4 3"))
        grid += lines
        body += [*drawn, *ticks]
        y += 24
    note = "Right: seconds in which a lane has work. Dashed: end of the step."
    body.append(label(EDGE, y + 7, note, fill=GREY, size=11))
    return picture(title, body, y + 16, grid)
