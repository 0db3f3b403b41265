"""Draw the bytes of each tier against what a device may use of it: a bar a tier, a stripe a kind.

A bar is as long as its tier's capacity, whatever that is: tiers differ by orders of magnitude, and what matters of each is how
full it is. Where more is needed than there is, the bar is as long as that, and the line at the capacity stands inside of it.
"""

from collections.abc import Mapping

from host_offload.tiers import TIERS
from zerojax.machines import size_of
from zerojax.planner.charts import (
    EDGE,
    LEFT,
    RIGHT,
    ROW,
    Part,
    box,
    colour,
    element,
    fits,
    in_order,
    legend,
    line,
    text,
)

BAR = 22


def draw_tiers(bytes_by_tier: Mapping[str, Mapping[str, int]], capacity: Mapping[str, float | None]) -> Part:
    """Return a bar for each tier that is used, or whose capacity is known.

    Args:
      bytes_by_tier: {tier: {kind: bytes}} of one device.
      capacity: bytes of each tier that one device may use; None where nobody told.
    """
    drawn = [tier for tier in TIERS if sum(bytes_by_tier.get(tier, {}).values()) or capacity.get(tier)]
    body, top = legend(kind for tier in drawn for kind, n in bytes_by_tier.get(tier, {}).items() if n)
    for row, tier in enumerate(drawn):
        bar = _bar(tier, bytes_by_tier.get(tier, {}), capacity.get(tier))
        body.append(element("g", *bar, id=f"bytes-{tier}", transform=f"translate(0 {top + 6 + row * (ROW + 6):g})"))
    note = "of one device; each bar is as long as what a device may use of the tier"
    return Part("Bytes", note, body, top + 6 + len(drawn) * (ROW + 6))


def _bar(tier: str, kinds: Mapping[str, int], had: float | None) -> list[str]:
    """Return the bar of a tier, from y = 0 downwards."""
    used = sum(kinds.values())
    scale = (RIGHT - LEFT) / max(used, had or 0.0, 1.0)
    body = [text(EDGE, 15, tier), box(LEFT, 0, RIGHT - LEFT, BAR, fill="#f7f7f7")]
    x = float(LEFT)
    for kind in in_order(kind for kind, n in kinds.items() if n):
        width = kinds[kind] * scale
        words = f"{kind} {size_of(kinds[kind])}"
        body.append(
            box(x, 0, width, BAR, f"{tier}: {words}", class_="stripe", fill=colour(kind), stroke="#555", stroke_width=0.5)
        )
        if fits(words, width):
            body.append(text(x + width / 2, 15, words, text_anchor="middle", pointer_events="none"))
        x += width
    if had is not None:
        at = LEFT + had * scale
        body.append(line(at, -4, at, BAR + 4, class_="capacity", stroke="#b00", stroke_width=2))
    of = "" if had is None else f" of {size_of(had)}"
    return [*body, text(RIGHT + 12, 15, size_of(used) + of)]
