"""Draw what every lane of a step does, in seconds: a box is as long as the work that it stands for.

A step has thousands of pieces of work, and a drawing a thousand pixels. So pieces of one lane are
drawn as one box where nobody could tell them apart. With a grain g of one pixel, a piece joins the
box before it if

    the pauses within the box stay below g, all of them together, and
    it has the box's label, or it and the box are both shorter than g

A box begins when its first piece does, and is as long as its pieces are without their pauses. So
the boxes of a lane sum to its busy seconds exactly, and none is further than g from where its work
is. Wide boxes have a tooltip and, if it fits, a name. All narrow boxes of one lane and colour are
one element, for a browser is slow with many.
"""

import collections
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerojax.costs import LANES, PhaseTime, Span, StepTime
from zerojax.planner.charts import (
    CHAR,
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
    darker,
    element,
    fits,
    legend,
    line,
    number,
    round_ticks,
    text,
)

NARROW = 6.0
"""Pixels of a box below which it has no tooltip of its own."""
MOST = 1200
"""Elements of all wide boxes together; of more, those twice as wide are narrow."""
TALL = ROW - 4
_MOVES = ("load", "store", "read", "write")
_WORK = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "gather": "gathered",
    "reduce": "grads",
    "gradients": "grads",
    "parameters": "params",
}
_ENDS = "embedding, head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Pieces of work of one lane that are drawn as one.

    Attributes:
      lane: that does them.
      labels: of the pieces, each once.
      start: when the first begins, in seconds.
      stop: when the last ends.
      seconds: of all, without pauses.
      layers: the first and the last; -1 of what is no layer.
    """

    lane: str
    labels: tuple[str, ...]
    start: float
    stop: float
    seconds: float
    layers: tuple[int, int]

    def with_(self, span: Span) -> "Box":
        """Return the box with one more piece."""
        return Box(
            lane=self.lane,
            labels=tuple(dict.fromkeys([*self.labels, span.label])),
            start=self.start,
            stop=span.stop,
            seconds=self.seconds + span.stop - span.start,
            layers=(min(self.layers[0], span.layer), max(self.layers[1], span.layer)),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is moved or computed: keys of `KINDS`."""
        return tuple(dict.fromkeys(kind for label in self.labels for kind in kinds_of(label)))

    @property
    def name(self) -> str:
        """Labels and layers."""
        first, last = self.layers
        layers = "" if first < 0 else f" {first}" if first == last else f" {first} to {last}"
        return "; ".join(self.labels) + layers


def kinds_of(label: str) -> tuple[str, ...]:
    """Return what the work of a label moves or computes: keys of `KINDS`, and kinds that are not
    there.
    """
    first, _, rest = label.partition(" ")
    if first in _MOVES:
        return tuple(_ENDS if kind == "ends" else kind for kind in rest.split(", "))
    return (_WORK.get(label, _ENDS),)


def boxes_of(spans: Iterable[Span], grain: float) -> list[Box]:
    """Return the boxes of one lane; `grain` is the seconds of a pixel."""
    boxes = list[Box]()
    for span in sorted(spans, key=lambda span: span.start):
        if boxes and _joins(boxes[-1], span, grain):
            boxes[-1] = boxes[-1].with_(span)
        else:
            seconds, layers = span.stop - span.start, (span.layer, span.layer)
            boxes.append(
                Box(
                    lane=span.lane,
                    labels=(span.label,),
                    start=span.start,
                    stop=span.stop,
                    seconds=seconds,
                    layers=layers,
                )
            )
    return boxes


def _joins(last: Box, span: Span, grain: float) -> bool:
    pauses = span.start - last.start - last.seconds
    is_short = max(last.seconds, span.stop - span.start) < grain
    return pauses < grain and (last.labels == (span.label,) or is_short)


def draw_step(time: StepTime) -> Part:
    """Return a lane for each of `LANES` that does something, under the parts of the step, over an
    axis of seconds.
    """
    stop = max([time.seconds, *(span.stop for span in time.spans)])
    scale = (RIGHT - LEFT) / stop
    lanes = {lane: boxes_of([s for s in time.spans if s.lane == lane], 1 / scale) for lane in LANES}
    lanes = {lane: boxes for lane, boxes in lanes.items() if boxes}
    body, top = legend(kind for boxes in lanes.values() for box in boxes for kind in box.kinds)
    headings, top = _headings([phase for phase in time.phases if phase.seconds > 0], scale, top + 4)
    bottom = top + ROW * len(lanes)
    body += _axis(stop, scale, top, bottom)
    narrow = _narrow([box for boxes in lanes.values() for box in boxes], scale)
    for row, (lane, boxes) in enumerate(lanes.items()):
        body += _lane(lane, boxes, time, scale, narrow, top + ROW * row)
    for phase in time.phases:
        at = LEFT + phase.stop * scale
        body.append(line(at, top, at, bottom, stroke=GREY, stroke_dasharray="3 3"))
    note = "of one device, predicted"
    if stop > time.seconds:
        note += f"; what is behind {number(time.seconds)} s happens beside the next step"
    return Part("Seconds of the step", note, [*body, *headings], bottom + ROW)


def _narrow(boxes: Sequence[Box], scale: float) -> float:
    """Return below how many pixels boxes are narrow, so that the others have at most `MOST`
    elements.
    """
    narrow = NARROW
    while sum(3 + len(box.kinds) for box in boxes if box.seconds * scale >= narrow) > MOST:
        narrow *= 2
    return narrow


def _headings(phases: Sequence[PhaseTime], scale: float, top: float) -> tuple[list[str], float]:
    """Return the headings of a step's parts, each with a line down to its begin, and where the
    lanes begin.

    A heading that begins below another one goes a row down, so that its line does not cross that
    one.
    """
    placed, lines, words = list[tuple[int, float]](), list[tuple[float, float]](), list[str]()
    for phase in phases:
        heading = f"{phase.name} {number(phase.seconds)} s, bound by {phase.bound_by}"
        begin, width = LEFT + phase.start * scale, len(heading) * CHAR
        x = min(begin + 4, WIDTH - EDGE - width)
        row = max((1 + row for row, end in placed if end > min(x, begin)), default=0)
        placed.append((row, x + width + 8))
        lines.append((begin, top + 16 * row + 2))
        # A white rim, where it is left of its begin for lack of room.
        words.append(
            text(
                x,
                top + 16 * row + 12,
                heading,
                class_="phase",
                stroke="#fff",
                stroke_width=4,
                paint_order="stroke",
            )
        )
    bottom = top + 16 * (1 + max((row for row, _ in placed), default=0)) + 6
    return [*(line(x, y, x, bottom, stroke=GREY) for x, y in lines), *words], bottom


def _axis(stop: float, scale: float, top: float, bottom: float) -> list[str]:
    """Return the axis of seconds below the lanes, with its grid."""
    body = [text(EDGE, bottom + 17, "seconds", fill=GREY)]
    for tick in round_ticks(stop):
        x = LEFT + tick * scale
        body.append(line(x, top, x, bottom + 4))
        body.append(
            text(x, bottom + 17, f"{tick:.6g}", class_="tick", fill=GREY, text_anchor="middle")
        )
    return [*body, line(LEFT, bottom, RIGHT, bottom, stroke=GREY)]


def _lane(
    lane: str, boxes: Sequence[Box], time: StepTime, scale: float, narrow: float, top: float
) -> list[str]:
    """Return one lane with its busy seconds."""
    busy = sum(box.seconds for box in boxes)
    wide = [box for box in boxes if box.seconds * scale >= narrow]
    drawn = _narrow_boxes([box for box in boxes if box.seconds * scale < narrow], scale)
    drawn += [part for box in wide for part in _wide_box(box, scale)]
    return [
        text(EDGE, top + 17, lane),
        element("g", *drawn, id=f"step-{lane}", transform=f"translate(0 {top + 2:g})"),
        text(
            RIGHT + 12, top + 17, f"{number(busy)} s busy, {busy / time.seconds:.0%}", class_="busy"
        ),
    ]


def _narrow_boxes(boxes: Sequence[Box], scale: float) -> list[str]:
    """Return an element for each colour of some boxes."""
    outlines, labels = (
        collections.defaultdict[str, list[str]](list),
        collections.defaultdict[str, dict[str, None]](dict),
    )
    for one in boxes:
        x, width, stripe = LEFT + one.start * scale, one.seconds * scale, TALL / len(one.kinds)
        for i, kind in enumerate(one.kinds):
            outlines[kind].append(
                f"M{x:.6g} {i * stripe:.4g}h{width:.4g}v{stripe:.4g}h-{width:.4g}z"
            )
            labels[kind].update(dict.fromkeys(one.labels))
    about = {
        kind: html.escape(f"{boxes[0].lane}: {'; '.join(names)}") for kind, names in labels.items()
    }
    return [
        element(
            "path",
            element("title", about[kind]),
            d="".join(outline),
            class_="boxes",
            fill=colour(kind),
            stroke=darker(kind),
            stroke_width=0.25,
        )
        for kind, outline in outlines.items()
    ]


def _wide_box(one: Box, scale: float) -> list[str]:
    """Return a box: its tooltip, a stripe for each kind, and its name where that fits."""
    x, width, stripe = LEFT + one.start * scale, one.seconds * scale, TALL / len(one.kinds)
    tooltip = f"{one.lane}: {one.name}, {number(one.start)} s to {number(one.stop)} s, {number(one.seconds)} s of work"
    body = [element("title", html.escape(tooltip))]
    body += [
        box(x, i * stripe, width, stripe, fill=colour(kind), stroke="#555", stroke_width=0.4)
        for i, kind in enumerate(one.kinds)
    ]
    words = next((words for words in (one.name, "; ".join(one.labels)) if fits(words, width)), "")
    if words:
        body.append(
            text(x + width / 2, 15, words, fill=DARK, text_anchor="middle", pointer_events="none")
        )
    return [element("g", *body, class_="box")]
