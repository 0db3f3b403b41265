"""Draw which lane works in which tick, as text or as SVG.

A strip is one loop. A lane is one of the activities that run at the same time in it (a copy, a
collective, a computation, a buffer). A box shows the ticks in which a lane works for a layer. One
column is one tick. All ticks have equal width, because their order is known and their seconds are
not: a box shows what can overlap, never for how long. Ticks below 0 precede the loop.

The text fits a terminal and shows both ends of a long strip. The SVG shows everything and needs no
other file.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COLOURS = {
    "params": "#9ecae1",
    "frozen": "#c6dbef",
    "grads": "#fdbe6f",
    "opt_state": "#b5dfa4",
    "activations": "#e7b8d8",
    "gathered": "#b0a4e3",
    "compute": "#d4d4d4",
}
_FILLS = COLOURS | {"forward": "#a9d3f0", "backward": "#f8c98b"}
"""Colours of the kinds of all boxes: records that are moved or held, and units of a pipeline."""

# Pixels of a picture.
LEFT = 84  # margin that holds the names of the lanes
RIGHT = 24  # margin
ROW = 26  # height of a lane
DIGIT = 8  # width of a digit
LEGEND = 104  # width of an entry of the legend


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A lane's work for one layer, in ticks start .. stop-1.

    Attributes:
      layer: number in the box; text for anything but a layer.
      start: first tick.
      stop: tick after the last.
      kinds: kinds that are moved or held, as keys of COLOURS, or "forward" and "backward"; one
        stripe each.
      details: text of the tooltip; "" names the layer and the kinds.
    """

    layer: int | str
    start: int
    stop: int
    kinds: tuple[str, ...]
    details: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Consecutive boxes; an empty lane is not drawn.

    Attributes:
      name: name of the lane.
      boxes: boxes of the lane.
    """

    name: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Lanes over the same ticks.

    Attributes:
      name: name of the loop, such as "forward".
      note: text after the name in the heading.
      start: first tick, 0 or less.
      stop: tick after the last.
      lanes: lanes from top to bottom.
    """

    name: str
    note: str
    start: int
    stop: int
    lanes: tuple[Lane, ...]

    @property
    def drawn(self) -> tuple[Lane, ...]:
        """Lanes with at least one box."""
        return tuple(lane for lane in self.lanes if lane.boxes)


def draw_text(title: str, strips: Iterable[Strip], width: int = 80) -> str:
    """Return the strips as text: layer numbers, `.` for an idle lane, `..` for omitted ticks.

    Args:
      title: first line.
      strips: strips to draw.
      width: characters per line.
    """
    lines = [title]
    for strip in strips:
        lines += ["", strip.name + strip.note, *_rows(strip, width)]
    return "\n".join(lines)


def fits(strip: Strip, width: int) -> bool:
    """Return whether `draw_text` shows every tick of a strip.

    Args:
      strip: strip to draw.
      width: characters per line.
    """
    return strip.stop - strip.start <= _measure(_list_cells(strip), width).num_shown


def _list_cells(strip: Strip) -> dict[str, dict[int, str]]:
    """Return the text of each row in each tick: the numbers of the ticks, then the lanes."""
    rows = {"tick": {tick: str(tick) for tick in range(strip.start, strip.stop)}}
    for lane in strip.drawn:
        rows[lane.name] = {
            tick: str(box.layer) for box in lane.boxes for tick in range(box.start, box.stop)
        }
    return rows


class _Columns(NamedTuple):
    """Characters of a row's name and of each tick, and the most ticks that fit a line."""

    label: int
    cell: int
    num_shown: int


def _measure(rows: Mapping[str, Mapping[int, str]], width: int) -> _Columns:
    label = max(map(len, rows))
    cell = 1 + max(len(text) for cells in rows.values() for text in cells.values())
    num_shown = max(4, (width - label - 5) // cell)  # 5: the bar before tick 0, and ".."
    return _Columns(label, cell, num_shown)


def _rows(strip: Strip, width: int) -> list[str]:
    rows = _list_cells(strip)
    label, cell, num_shown = _measure(rows, width)
    spans = [range(strip.start, strip.stop)]
    if strip.stop - strip.start > num_shown:
        # Show both ends of a strip that does not fit.
        first_end = strip.start + (num_shown + 1) // 2
        spans = [range(strip.start, first_end), range(strip.stop - num_shown // 2, strip.stop)]
    lines = []
    for name, cells in rows.items():
        texts = [_row_span(cells, span, cell) for span in spans]
        lines.append(f"{name:<{label}}" + " ..".join(texts))
    return lines


def _row_span(cells: Mapping[int, str], span: range, width: int) -> str:
    """Return the cells of some ticks, with a bar before tick 0."""
    before = "".join(f"{cells.get(tick, '.'):>{width}}" for tick in span if tick < 0)
    within = "".join(f"{cells.get(tick, '.'):>{width}}" for tick in span if tick >= 0)
    return f"{before} |{within}" if before and within else before + within


def draw_svg(title: str, strips: Sequence[Strip]) -> str:
    """Return a standalone SVG document.

    Each lane is a group with id "<strip>-<lane>" (spaces become dashes). It holds one group of
    class "box" per box, with a tooltip, a stripe for each kind, and the layer's number.

    Args:
      title: heading of the picture.
      strips: strips to draw, from top to bottom.
    """
    boxes = [box for strip in strips for lane in strip.drawn for box in lane.boxes]
    digits = max(len(str(n)) for strip in strips for n in (strip.start, strip.stop))
    digits = max([digits, *(len(str(box.layer)) for box in boxes)])
    cell = DIGIT * digits + 12
    body = []
    y = 96
    for strip in strips:
        body += _svg_strip(strip, y, cell)
        # Room for the row of ticks, the lanes, and two rows for the next strip's heading.
        y += ROW * (len(strip.drawn) + 3)
    kinds = {kind for box in boxes for kind in box.kinds}
    legend = [kind for kind in _FILLS if kind in kinds]
    longest = max(len(title), *(len(strip.name + strip.note) for strip in strips))
    columns = max(strip.stop - strip.start for strip in strips)
    width = max(LEFT + cell * columns, LEFT + LEGEND * len(legend), DIGIT * longest) + RIGHT
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 '
        f'{width} {y}" font-family="sans-serif" font-size="12" fill="#222">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{y}" fill="#fff"/>',
        f'<text x="12" y="26" font-size="15" font-weight="bold">{html.escape(title)}</text>',
        '<g id="legend">',
    ]
    for i, kind in enumerate(legend):
        x = 12 + LEGEND * i
        head.append(
            f'<rect x="{x}" y="42" width="16" height="16" fill="{_FILLS[kind]}" stroke="#555"/>'
        )
        head.append(f'<text x="{x + 22}" y="55">{kind}</text>')
    return "\n".join([*head, "</g>", *body, "</svg>", ""])


def _svg_strip(strip: Strip, y: int, cell: int) -> list[str]:
    def left(tick: int) -> int:
        return LEFT + cell * (tick - strip.start)

    bottom = y + ROW * (len(strip.drawn) + 1)
    lines = [
        f'<g id="{strip.name}">',
        f'<text x="12" y="{y - 10}"><tspan '
        f'font-weight="bold">{strip.name}</tspan>{html.escape(strip.note)}</text>',
        f'<g id="{strip.name}-tick" fill="#666" text-anchor="middle">',
        f'<text x="12" y="{y + 17}" text-anchor="start">tick</text>',
    ]
    for tick in range(strip.start, strip.stop):
        lines.append(f'<path d="M{left(tick)} {y + ROW}V{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{left(tick) + cell // 2}" y="{y + 17}">{tick}</text>')
    if strip.start < 0:
        lines.append(f'<path d="M{left(0)} {y}V{bottom}" stroke="#222" stroke-width="2"/>')
    lines.append("</g>")
    for row, lane in enumerate(strip.drawn, start=1):
        top = y + ROW * row
        lines.append(f'<g id="{strip.name}-{lane.name.replace(" ", "-")}" text-anchor="middle">')
        lines.append(f'<text x="12" y="{top + 17}" text-anchor="start">{lane.name}</text>')
        for box in lane.boxes:
            width = cell * (box.stop - box.start) - 2
            lines += _svg_box(lane.name, box, left(box.start) + 1, top + 2, width, ROW - 4)
        lines.append("</g>")
    return [*lines, "</g>"]


def _svg_box(lane: str, box: Box, x: int, y: int, width: int, height: int) -> list[str]:
    ticks = f"tick {box.start}"
    if box.stop - box.start > 1:
        ticks = f"ticks {box.start} to {box.stop - 1}"
    details = box.details or f"layer {box.layer}, {', '.join(box.kinds)}"
    lines = ['<g class="box">', f"<title>{lane}, {ticks}: {html.escape(details)}</title>"]
    stripe = height / len(box.kinds)
    for i, kind in enumerate(box.kinds):
        lines.append(
            f'<rect x="{x}" y="{y + i * stripe:g}" width="{width}" height="{stripe:g}" '
            f'fill="{_FILLS[kind]}"/>'
        )
    # One frame around all stripes.
    lines.append(
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="none" '
        'stroke="#555"/>'
    )
    return [*lines, f'<text x="{x + width / 2:g}" y="{y + 15}">{box.layer}</text>', "</g>"]


def draw_html(title: str, strips: Sequence[Strip], table: str) -> str:
    """Return a standalone HTML file with the SVG and, below it, `table` as preformatted text.

    Args:
      title: title of the page and of the picture.
      strips: strips to draw, from top to bottom.
      table: text below the picture.
    """
    svg = draw_svg(title, strips)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title></head>\n"
        '<body style="background: #fff; color: #222">\n<div style="overflow-x: auto">\n'
        f"{svg}</div>\n"
        f"<pre>{html.escape(table)}</pre>\n</body>\n</html>\n"
    )
