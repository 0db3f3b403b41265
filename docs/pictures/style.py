"""What all pictures share: their width, texts, and textures.

A picture is 480 units wide, so that its texts can be read on a telephone. It has a white background
of its own, so that it can be read on a dark page. Every texture has a pattern as well as a colour,
and shapes have their names beside them: no picture needs colour to be understood.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

from zerojax.planner.charts import element, line, rows_of, text

WIDTH, EDGE, SIZE = 480.0, 12.0, 12.0
"""Width of a picture, its margin, and the size of its texts."""
SHOWN = 1.25
"""Pixels per unit on a wide page."""
INK, GREY, RULE, PAPER = "#1f2328", "#57606a", "#d0d7de", "#ffffff"
CHAR = 0.6
"""Width of a character over its size: DejaVu Sans, the widest common font."""


class Texture(NamedTuple):
    """A fill: a colour, and a pattern of 6 x 6 units drawn on it."""

    colour: str
    ink: str
    pattern: str = ""


TEXTURES = {
    "device": Texture("#a9cdea", "#2f6d9e"),
    "host": Texture("#dcedcb", "#6d9a48", "M-1 1L1 -1M0 6L6 0M5 7L7 5"),
    "disk": Texture("#fbd9a5", "#b26a12", "M1 1h1.6v1.6h-1.6zM4 4h1.6v1.6h-1.6z"),
    "waits": Texture("#57606a", "#57606a"),
    "plain": Texture("#f2f4f6", "#57606a"),
    "peer": Texture("#ffffff", "#8a939c", "M-1 5L1 7M0 0L6 6M5 -1L7 1"),
    "slower": Texture("#f7c3ad", "#b04a22", "M0 1.5h6M0 4.5h6"),
}
"""Fills by what they stand for."""


def label(
    x: float,
    y: float,
    words: str,
    *,
    size: float = SIZE,
    anchor: str = "start",
    fill: str = INK,
    bold: bool = False,
    halo: bool = False,
) -> str:
    """Return a text with its baseline at y; a halo keeps it readable on a pattern."""
    more: dict[str, object] = {"font_weight": "bold"} if bold else {}
    if halo:
        more |= {"stroke": PAPER, "stroke_width": 3, "paint_order": "stroke"}
    return text(x, y, words, font_size=size, text_anchor=anchor, fill=fill, **more)


def filled(x: float, y: float, width: float, height: float, texture: str, **more: object) -> str:
    """Return a rectangle with a texture."""
    edge = {"stroke": TEXTURES[texture].ink, "stroke_width": 0.6} | more
    return element("rect", x=x, y=y, width=width, height=height, fill=f"url(#{texture})", **edge)


def rule(x1: float, y1: float, x2: float, y2: float, **more: object) -> str:
    """Return a thin line."""
    return line(x1, y1, x2, y2, **{"stroke": RULE, "fill": "none", **more})


def wrapped(
    x: float, y: float, words: str, width: float, *, size: float = SIZE, **more: object
) -> tuple[list[str], float]:
    """Return a text in rows of at most `width`, and the y position below them."""
    rows = rows_of(words, width, size)
    drawn = [
        label(x, y + size * (1 + 1.3 * n), row, size=size, **more)  # type: ignore[arg-type]
        for n, row in enumerate(rows)
    ]
    return drawn, y + size * 1.3 * len(rows)


def legend(names: Sequence[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Return a key of (texture, words) in rows, and the y position below it."""
    body, x = list[str](), EDGE
    for texture, words in names:
        width = 34 + CHAR * SIZE * len(words)
        if x + width > WIDTH and x > EDGE:
            x, y = EDGE, y + 18
        body += [filled(x, y, 16, 11, texture), label(x + 21, y + 10, words)]
        x += width
    return body, y + 22


def _pattern(name: str) -> str:
    colour, ink, pattern = TEXTURES[name]
    drawn = [element("rect", width=6, height=6, fill=colour)]
    if pattern:
        is_shape = pattern.endswith("z")
        paint = {"fill": ink} if is_shape else {"stroke": ink, "stroke_width": 0.9}
        drawn.append(element("path", d=pattern, **paint))
    units = "userSpaceOnUse"
    return element("pattern", *drawn, id=name, width=6, height=6, patternUnits=units)


def picture(title: str, body: Sequence[str], height: float, top: Sequence[str] = ()) -> str:
    """Return an SVG document.

    Args:
      title: title for readers of the file; it is not drawn.
      body: elements.
      height: height in units.
      top: elements below the others, such as a grid.
    """
    drawn = "".join([*top, *body])
    used = [name for name in TEXTURES if f"url(#{name})" in drawn]
    patterns = [_pattern(name) for name in used]
    inside = [element("title", html.escape(title))]
    if patterns:
        inside.append(element("defs", *patterns))
    inside.append(element("rect", width=WIDTH, height=height, fill=PAPER, rx=4))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * SHOWN:g}" '
        f'height="{height * SHOWN:g}" viewBox="0 0 {WIDTH:g} {height:g}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">'
    )
    return "\n".join([head, *inside, *top, *body, "</svg>\n"])


def heading(title: str) -> tuple[list[str], float]:
    """Return a picture's title, drawn at the top, and the y position below it."""
    return wrapped(EDGE, 8, title, WIDTH - 2 * EDGE, size=13.5, bold=True)
