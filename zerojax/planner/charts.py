"""Parts of a drawing in SVG: elements, texts that fit their place, ticks at round numbers, colours
of what a plan has.

A drawing is `WIDTH` pixels wide: names stand left of `LEFT`, numbers right of `RIGHT`, what is
drawn to scale between them. Nobody knows the font of whoever looks at it, so a text is taken to be
as wide as in DejaVu Sans, the widest that is common: `CHAR` pixels a character, in the mean. A text
that does not fit is left out, or goes on in the next row.
"""

import html
import math
import textwrap
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from host_offload.schedule import COLOURS

WIDTH, LEFT, RIGHT, EDGE = 1200, 110, 1020, 16
CHAR, ROW = 7.2, 26
"""Pixels of a character of 12 px, and of a row."""
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
"""Colours of kinds of bytes and of work, in the order in which they are drawn."""
OTHER = "#efefef"
"""The colour of a kind that has none."""


class Part(NamedTuple):
    """A part of a drawing, from y = 0 downwards."""

    heading: str
    note: str
    body: list[str]
    height: float


def element(name: str, *inside: str, **attributes: object) -> str:
    """Return an element: `class_` is "class", other underscores are dashes, and numbers have six
    digits.

    Args:
      name: of the element.
      *inside: markup.
      **attributes: escaped here.
    """
    pairs = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    shown = {
        key: f"{value:.6g}" if isinstance(value, float) else html.escape(str(value))
        for key, value in pairs.items()
    }
    head = name + "".join(f' {key}="{value}"' for key, value in shown.items())
    return f"<{head}>{''.join(inside)}</{name}>" if inside else f"<{head}/>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Return a text whose foot is at y."""
    return element("text", html.escape(words), x=float(x), y=float(y), **attributes)


def box(
    x: float, y: float, width: float, height: float, tooltip: str = "", **attributes: object
) -> str:
    """Return a rectangle, with a tooltip."""
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
    """Return a straight line."""
    return element(
        "path", d=f"M{x1:.6g} {y1:.6g}L{x2:.6g} {y2:.6g}", **{"stroke": LIGHT, **attributes}
    )


def number(seconds: float) -> str:
    """Return seconds in four digits, or of less than a millisecond in microseconds."""
    return f"{seconds:.4g}" if seconds >= 1e-3 else f"{seconds:.6f}".rstrip("0").rstrip(".")


def fits(words: str, width: float) -> bool:
    """Tell whether a text fits so many pixels."""
    return len(words) * CHAR + 4 <= width


def rows_of(words: str, width: float, size: float = 12) -> list[str]:
    """Return a text in rows that fit so many pixels."""
    return textwrap.wrap(words, max(1, int(width / (CHAR * size / 12)))) or [""]


def colour(kind: str) -> str:
    """Return the colour of a kind."""
    return KINDS.get(kind, OTHER)


def darker(kind: str) -> str:
    """Return a darker shade of a kind's colour, for what is so thin that its colour would pale."""
    plain = colour(kind).removeprefix("#")
    return "#" + "".join(f"{int(int(plain[i : i + 2], 16) * 0.68):02x}" for i in (0, 2, 4))


def in_order(kinds: Iterable[str]) -> list[str]:
    """Return kinds, each once, in the order of `KINDS`; others last."""
    order = {kind: n for n, kind in enumerate(KINDS)}
    return sorted(dict.fromkeys(kinds), key=lambda kind: order.get(kind, len(order)))


def legend(kinds: Iterable[str]) -> tuple[list[str], float]:
    """Return what the colours mean, from y = 0 downwards, and its height."""
    body, x, y = list[str](), float(LEFT), 0.0
    for kind in in_order(kinds):
        width = 40 + len(kind) * CHAR
        if x + width > WIDTH - EDGE:
            x, y = float(LEFT), y + 22
        body.append(box(x, y, 14, 14, fill=colour(kind), stroke="#555"))
        body.append(text(x + 20, y + 11.5, kind))
        x += width
    return [element("g", *body, class_="legend")], y + 22


def round_ticks(stop: float, most: int = 10) -> list[float]:
    """Return at most `most` + 1 numbers from 0 to `stop`, in steps of 1, 2 or 5 times a power of
    ten.
    """
    if stop <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(stop / most))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * most >= stop * (1 - 1e-9))
    return [step * n for n in range(math.floor(stop / step * (1 + 1e-9)) + 1)]
