"""Parts of an SVG drawing: elements, texts that fit their space, round ticks, and colours by kind.

A drawing is `WIDTH` pixels wide: names are left of `LEFT`, numbers right of `RIGHT`, and everything
drawn to scale is between them. The viewer's font is unknown, so a text is assumed to be as wide as
in DejaVu Sans, the widest common font: `CHAR` pixels per character on average. A text that does not
fit is omitted or wrapped.
"""

import html
import math
import textwrap
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from host_offload.schedule import COLOURS

WIDTH = 1200
LEFT = 110
RIGHT = 1020
EDGE = 16
CHAR = 7.2
ROW = 26
"""Width of a 12 px character and height of a row, in pixels."""
DARK, GREY, LIGHT = "#222", "#666", "#ddd"
KINDS: Mapping[str, str] = MappingProxyType(
    COLOURS
    | {
        "master": "#6fc0a5",
        "in_flight": "#f2a49b",
        "working": "#ffe28a",
        "buffers": "#cdb38b",
        "slots": "#e0c9a6",
        "batch": "#a3dbe3",
        "model_state": "#d7e3a0",
        "pending": "#f7cfdc",
        "scalars": "#e8e8e8",
        "forward": "#dedede",
        "backward": "#b9b9b9",
        "update": "#8fb7a0",
        "embedding, head": "#e3d5bd",
    }
)
"""Colours of kinds of bytes and of work, in drawing order."""
OTHER = "#efefef"
"""Colour of kinds without an entry in `KINDS`."""


class Part(NamedTuple):
    """A part of a drawing, laid out from y = 0 downwards.

    Attributes:
      heading: heading of the part.
      note: note next to the heading.
      body: SVG elements of the part.
      height: height in pixels.
    """

    heading: str
    note: str
    body: list[str]
    height: float


def element(name: str, *inside: str, **attributes: object) -> str:
    """Return an SVG element.

    Numbers are written with six digits. In attribute names, a trailing underscore is removed
    (`class_`) and other underscores become dashes.

    Args:
      name: name of the element.
      *inside: markup inside the element.
      **attributes: attributes, which are escaped here.
    """
    pairs = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    shown = {
        key: f"{value:.6g}" if isinstance(value, float) else html.escape(str(value))
        for key, value in pairs.items()
    }
    head = name + "".join(f' {key}="{value}"' for key, value in shown.items())
    return f"<{head}>{''.join(inside)}</{name}>" if inside else f"<{head}/>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Return an SVG text element.

    Args:
      x: left end of the text, in pixels.
      y: baseline of the text, in pixels.
      words: text, which is escaped here.
      **attributes: attributes, as in `element`.
    """
    return element("text", html.escape(words), x=float(x), y=float(y), **attributes)


def box(
    x: float, y: float, width: float, height: float, tooltip: str = "", **attributes: object
) -> str:
    """Return a rectangle, with an optional tooltip."""
    about = [element("title", html.escape(tooltip))] if tooltip else []
    return element(
        "rect",
        *about,
        x=float(x),
        y=float(y),
        width=float(width),
        height=float(height),
        **attributes,
    )


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """Return a straight line from (x1, y1) to (x2, y2), in pixels.

    Args:
      x1: horizontal position of the first end.
      y1: vertical position of the first end.
      x2: horizontal position of the second end.
      y2: vertical position of the second end.
      **attributes: attributes, as in `element`; the line is light grey unless they say otherwise.
    """
    return element(
        "path", d=f"M{x1:.6g} {y1:.6g}L{x2:.6g} {y2:.6g}", **{"stroke": LIGHT, **attributes}
    )


def number(seconds: float) -> str:
    """Return seconds as text with four digits; below a millisecond, rounded to microseconds."""
    return f"{seconds:.4g}" if seconds >= 1e-3 else f"{seconds:.6f}".rstrip("0").rstrip(".")


def fits(words: str, width: float) -> bool:
    """Return whether a text fits into a width in pixels."""
    return len(words) * CHAR + 4 <= width


def wrap_text(words: str, width: float, size: float = 12) -> list[str]:
    """Return a text wrapped to rows of a width in pixels."""
    return textwrap.wrap(words, max(1, int(width / (CHAR * size / 12)))) or [""]


def colour(kind: str) -> str:
    """Return the colour of a kind."""
    return KINDS.get(kind, OTHER)


def darker(kind: str) -> str:
    """Return a darker shade of a kind's colour, for shapes so thin that they would look pale."""
    plain = colour(kind).removeprefix("#")
    return "#" + "".join(f"{int(int(plain[i : i + 2], 16) * 0.68):02x}" for i in (0, 2, 4))


def in_order(kinds: Iterable[str]) -> list[str]:
    """Return unique kinds in the order of `KINDS`, unknown kinds last."""
    order = {kind: n for n, kind in enumerate(KINDS)}
    return sorted(dict.fromkeys(kinds), key=lambda kind: order.get(kind, len(order)))


def legend(kinds: Iterable[str]) -> tuple[list[str], float]:
    """Return the elements of a colour legend, from y = 0 downwards, and its height in pixels."""
    body = list[str]()
    x = float(LEFT)
    y = 0.0
    for kind in in_order(kinds):
        width = 40 + len(kind) * CHAR
        if x + width > WIDTH - EDGE:
            x = float(LEFT)
            y = y + 22
        body.append(box(x, y, 14, 14, fill=colour(kind), stroke="#555"))
        body.append(text(x + 20, y + 11.5, kind))
        x += width
    return [element("g", *body, class_="legend")], y + 22


def round_ticks(stop: float, most: int = 10) -> list[float]:
    """Return at most `most` + 1 tick values from 0 to `stop`.

    The step between ticks is 1, 2 or 5 times a power of ten.
    """
    if stop <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(stop / most))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * most >= stop * (1 - 1e-9))
    return [step * n for n in range(math.floor(stop / step * (1 + 1e-9)) + 1)]
