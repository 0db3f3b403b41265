"""Draw the work of every lane of a step, in seconds: a box is as long as the work it represents.

A step has thousands of pieces of work, but a drawing has about a thousand pixels. So pieces of one
lane that could not be told apart are drawn as one box. With a grain g of one pixel, a piece joins
the box before it if

    the pauses within the box stay below g in total, and
    it has the box's label, or both it and the box are shorter than g

A box begins with its first piece, and is as long as its pieces without their pauses. So the boxes
of a lane sum to exactly its busy seconds, and none is further than g from its work. Wide boxes have
a tooltip and, if it fits, a name. All narrow boxes of one lane and colour form one element, because
browsers are slow with many elements.
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
"""Width in pixels below which a box has no tooltip of its own."""
MOST = 1200
"""Most elements of all wide boxes together; if exceeded, the width limit is doubled."""
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
_UNSTACKED = "embedding, head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Pieces of work of one lane that are drawn as one box.

    Attributes:
      lane: lane that does the work.
      labels: unique labels of the pieces.
      start: second at which the first piece begins.
      stop: second at which the last piece ends.
      seconds: seconds of all pieces, without pauses.
      layers: first and last layer of the pieces; -1 for work that belongs to no layer.
    """

    lane: str
    labels: tuple[str, ...]
    start: float
    stop: float
    seconds: float
    layers: tuple[int, int]

    def with_(self, span: Span) -> "Box":
        """Return the box extended by one piece."""
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
        """Kinds that are moved or computed, as keys of `KINDS`."""
        return tuple(dict.fromkeys(kind for label in self.labels for kind in parse_kinds(label)))

    @property
    def name(self) -> str:
        """Labels and layers of the box, as text."""
        first, last = self.layers
        labels = "; ".join(self.labels)
        if first < 0:
            return labels
        return f"{labels} {first}" if first == last else f"{labels} {first} to {last}"


def parse_kinds(label: str) -> tuple[str, ...]:
    """Return the kinds that a label's work moves or computes: keys of `KINDS`, or other kinds."""
    verb, _, kinds = label.partition(" ")
    if verb in _MOVES:
        return tuple(_UNSTACKED if kind == "unstacked" else kind for kind in kinds.split(", "))
    return (_WORK.get(label, _UNSTACKED),)


def build_boxes(spans: Iterable[Span], grain: float) -> list[Box]:
    """Return the boxes of one lane's spans; `grain` is the seconds per pixel."""
    boxes = list[Box]()
    for span in sorted(spans, key=lambda span: span.start):
        if boxes and _joins(boxes[-1], span, grain):
            boxes[-1] = boxes[-1].with_(span)
        else:
            seconds = span.stop - span.start
            layers = (span.layer, span.layer)
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
    """Return the timeline of a step.

    It has the parts of the step at the top, one row per busy lane, and an axis of seconds.
    """
    stop = max([time.seconds, *(span.stop for span in time.spans)])
    scale = (RIGHT - LEFT) / stop
    lanes = {
        lane: build_boxes([s for s in time.spans if s.lane == lane], 1 / scale) for lane in LANES
    }
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
    note = "per device, predicted"
    if stop > time.seconds:
        note += f"; work after {number(time.seconds)} s overlaps the next step"
    return Part("Seconds of the step", note, [*body, *headings], bottom + ROW)


def _narrow(boxes: Sequence[Box], scale: float) -> float:
    """Return the width limit in pixels below which boxes are narrow.

    It is chosen so that wide boxes have at most `MOST` elements.
    """
    narrow = NARROW
    while sum(3 + len(box.kinds) for box in boxes if box.seconds * scale >= narrow) > MOST:
        narrow *= 2
    return narrow


def _headings(phases: Sequence[PhaseTime], scale: float, top: float) -> tuple[list[str], float]:
    """Return the headings of a step's parts, and the y position at which the lanes begin.

    Each heading has a line down to the start of its part. A heading that starts below another one
    moves down a row, so that its line does not cross that heading.
    """
    placed = list[tuple[int, float]]()
    lines = list[tuple[float, float]]()
    words = list[str]()
    for phase in phases:
        heading = f"{phase.name} {number(phase.seconds)} s, bound by {phase.bound_by}"
        begin = LEFT + phase.start * scale
        width = len(heading) * CHAR
        x = min(begin + 4, WIDTH - EDGE - width)
        row = max((1 + row for row, end in placed if end > min(x, begin)), default=0)
        placed.append((row, x + width + 8))
        lines.append((begin, top + 16 * row + 2))
        # The white rim keeps a heading readable if lack of room moves it left, across its line.
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
    """Return one element per colour for narrow boxes."""
    outlines = collections.defaultdict[str, list[str]](list)
    labels = collections.defaultdict[str, dict[str, None]](dict)
    for narrow in boxes:
        x = LEFT + narrow.start * scale
        width = narrow.seconds * scale
        stripe = TALL / len(narrow.kinds)
        for i, kind in enumerate(narrow.kinds):
            outlines[kind].append(
                f"M{x:.6g} {i * stripe:.4g}h{width:.4g}v{stripe:.4g}h-{width:.4g}z"
            )
            labels[kind].update(dict.fromkeys(narrow.labels))
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
    """Return a box: its tooltip, a stripe for each kind, and its name if that fits."""
    x = LEFT + one.start * scale
    width = one.seconds * scale
    stripe = TALL / len(one.kinds)
    tooltip = (
        f"{one.lane}: {one.name}, {number(one.start)} s to {number(one.stop)} s, "
        f"{number(one.seconds)} s of work"
    )
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
