"""Draw the bytes that one device needs in each tier, by stage and by the tier of its states."""

from collections.abc import Mapping
from typing import Any

from style import EDGE, GREY, WIDTH, filled, heading, label, legend, picture, rule

from zerojax.planner.charts import round_ticks

LEFT, RIGHT, ROW = 104.0, 330.0, 17.0
COLUMNS = (("device", "device", 374.0), ("pinned_host", "host", 420.0), ("nvme", "disk", 466.0))
"""Tier of the bytes, its texture and heading, and the right end of its column."""


def draw(data: Mapping[str, Any]) -> str:
    """Return the picture as an SVG document."""
    title = "GB per device, by stage and by the tier of its states"
    body, y = heading(title)
    words, y = legend(
        [("device", "device memory"), ("host", "host memory"), ("disk", "disk")], y + 6
    )
    body += words
    rows = {
        name: {tier: sum(kinds.values()) / 1e9 for tier, kinds in tiers.items()}
        for name, tiers in data["bytes"].items()
    }
    most = max(sum(row.values()) for row in rows.values())
    scale, top, stage = (RIGHT - LEFT) / most, y + 14, ""
    body += [label(x, y + 8, name, anchor="end", fill=GREY) for _, name, x in COLUMNS]
    body.append(label(EDGE, y + 8, "stored in", fill=GREY))
    y = top
    for name, row in rows.items():
        own, tier = name.split(", ")
        if own != stage:
            stage = own
            body.append(label(EDGE, y + 15, stage, bold=True))
            y += 20
        body.append(label(LEFT - 6, y + 11, tier, anchor="end"))
        x = LEFT
        for where, texture, end in COLUMNS:
            if row[where] > 0:
                body.append(filled(x, y, row[where] * scale, 13, texture))
                body.append(label(end, y + 11, f"{row[where]:.1f}", anchor="end"))
                x += row[where] * scale
            else:
                body.append(label(end, y + 11, "0", anchor="end", fill=GREY))
        y += ROW
    grid = list[str]()
    for tick in round_ticks(most, 6):
        x = LEFT + tick * scale
        grid.append(rule(x, top, x, y + 3))
        body.append(label(x, y + 16, f"{tick:g}", anchor="middle", fill=GREY))
    body.append(label(WIDTH - EDGE, y + 16, "GB", anchor="end", fill=GREY))
    notes = (
        "Gradients and optimizer state are stored in the tier;",
        "at stage 3 the parameters too. Below it they are whole on each device.",
    )
    for n, words in enumerate(notes):
        body.append(label(EDGE, y + 36 + 14 * n, words, fill=GREY, size=11))
    return picture(title, body, y + 60, grid)
