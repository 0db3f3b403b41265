"""Draw ratios beside peers and plain programs, from benchmarks/results/, won or lost."""

from collections.abc import Sequence
from typing import NamedTuple

from result_tables import number, table, tables
from style import EDGE, GREY, INK, filled, heading, label, legend, picture, rule

LEFT, RIGHT, ROW, TALL, MOST = 226.0, 412.0, 19.0, 12.0, 4.0
PLAIN = {
    # contender and what it is beside, in beside_plain: words of the row
    ("the same, with a clipped norm", "optax's, clipped"): "AdamW, clipped / optax",
    ("the update of stage 0", "optax's update"): "AdamW / optax",
    ("LayeredModel, stage 0", "plain, a scan"): "step, stage 0 / plain scan",
    ("LayeredModel, stage 2", "sharded by hand, as stage 2"): "step, stage 2 / by hand",
    ("LayeredModel, stage 3", "sharded by hand, as stage 3"): "step, stage 3 / by hand",
    ("Model, stage 3: gathered on use", "sharded by hand, as stage 3"): "gathered on use / by hand",
    ("TiledMLP in 4 tiles", "two dense layers"): "tiled MLP / dense layers",
    ("Checkpointer.save: the step waits", "a copy of the bytes"): "save waits / plain copy",
    ("zerojax, stage 3", "plain jit"): "build, compile / plain jit",
    (
        "all weights, zerojax.hf",
        "all weights, torch and transformers",
    ): "fine-tune all / torch",
    ("adapters, zerojax.hf", "adapters, torch and PEFT"): "fine-tune LoRA / torch, PEFT",
}
KERNELS = {
    "fused kernel, fp32": ("zerojax, fp32", True),
    "torch 2.13.0+cpu AdamW, fused": ("torch fused, fp32", False),
    "DeepSpeed 0.19.8 CPUAdam": ("DeepSpeed, fp32", False),
    "jax 0.10.2 jit, donated, fp32": ("plain jax, fp32", False),
    "fused kernel, bf16 gradients in, parameters out": ("zerojax, bf16 in and out", True),
    "DeepSpeed 0.19.8 CPUAdam, bf16: cast, step, copy": ("DeepSpeed, bf16", False),
    "jax 0.10.2 jit, donated, bf16 gradients in, parameters out": ("plain jax, bf16", False),
}
"""Contenders of host_adam: words of the row, and whether it is zerojax's."""


class Bar(NamedTuple):
    """A ratio with its range, or without one."""

    words: str
    ratio: float
    low: float
    high: float
    own: bool


def on_disk() -> list[Bar]:
    """Return a step with all states on a disk over the same framework's step in memory."""
    bars = list[Bar]()
    for precision in ("fp32", "bf16"):
        _, rows = next(tables(f"nvme_peers_{precision}_cpu2_202611"))
        for name, words in (
            ("zerojax, all on disk", f"zerojax, {precision}"),
            ("DeepSpeed ZeRO-3, NVMe", f"DeepSpeed ZeRO-3, {precision}"),
        ):
            row = next(row for row in rows if row["contender"] == name)
            low, high = (float(end) for end in row["range"].split("-"))
            own = name.startswith("zerojax")
            bars.append(Bar(words, number(row["slowdown"]), low, high, own))
    return bars


def beside() -> list[Bar]:
    """Return zerojax's milliseconds over the peer's, in memory and on a disk."""
    bars = list[Bar]()
    for precision in ("fp32", "bf16"):
        _, rows = next(tables(f"nvme_peers_{precision}_cpu2_202611"))
        times = {row["contender"]: number(row["ms a step"]) for row in rows}
        for name, peer, words in (
            ("zerojax, in memory", "torch, in memory", "memory / torch"),
            ("zerojax, all on disk", "DeepSpeed ZeRO-3, NVMe", "disk / DeepSpeed"),
        ):
            ratio = times[name] / times[peer]
            bars.append(Bar(f"{words}, {precision}", ratio, ratio, ratio, own=True))
    return bars


def plain() -> list[Bar]:
    """Return zerojax over plain programs that do the same work."""
    bars = dict[str, Bar]()
    for above, rows in tables("beside_plain_cpu2_202611"):
        for row in rows:
            words = PLAIN.get((row["contender"], row["beside"]))
            if words is not None and words not in bars and above.startswith("**"):
                # The newest table of each part is the first.
                ratio, ends = row["ratio or difference"].split(" (")
                low, high = (float(end) for end in ends.rstrip(")").split(" to "))
                bars[words] = Bar(words, float(ratio), low, high, own=True)
    return [bars[words] for words in PLAIN.values()]


def kernels() -> list[Bar]:
    """Return AdamW on the host over the time that the bandwidth of memory allows."""
    rows = {row["contender"]: row for row in table("host_adam_cpu2_202611", "10 rounds")}
    bars = list[Bar]()
    for name, (words, own) in KERNELS.items():
        low, high = (float(end) for end in rows[name]["range"].split("-"))
        bars.append(Bar(words, number(rows[name]["over the bound"]), low, high, own))
    return bars


def group(name: str, bars: Sequence[Bar], y: float) -> tuple[list[str], float]:
    """Return a heading and its bars below y, and the y position below them."""
    body = [label(EDGE, y + 12, name, bold=True)]
    y += 19
    scale = (RIGHT - LEFT) / MOST
    for bar in bars:
        body.append(label(LEFT - 8, y + 10, bar.words, anchor="end"))
        slower = bar.own and round(bar.ratio, 2) > 1
        texture = "slower" if slower else "device" if bar.own else "peer"
        body.append(filled(LEFT, y, bar.ratio * scale, TALL, texture))
        if bar.high > bar.low:
            a, b, middle = LEFT + bar.low * scale, LEFT + bar.high * scale, y + TALL / 2
            body.append(rule(a, middle, b, middle, stroke=INK, stroke_width=1.4))
            body += [rule(x, middle - 3, x, middle + 3, stroke=INK) for x in (a, b)]
        x = LEFT + max(bar.ratio, bar.high, 1.0) * scale + 5
        body.append(label(x, y + 10, f"{bar.ratio:.2f}", bold=slower))
        y += ROW
    return body, y + 6


def draw() -> str:
    """Return the picture as an SVG document."""
    title = "Time over a peer's time: below 1 is faster"
    body, y = heading(title)
    words, y = legend(
        [("device", "zerojax, at most 1"), ("slower", "zerojax, above 1"), ("peer", "others")],
        y + 6,
    )
    body += words
    top = y
    for name, bars in (
        ("All on disk / in memory, own framework", on_disk()),
        ("A step, zerojax / peer", beside()),
        ("zerojax / a plain program or torch", plain()),
        ("AdamW on the host / what memory allows", kernels()),
    ):
        drawn, y = group(name, bars, y)
        body += drawn
    scale, grid = (RIGHT - LEFT) / MOST, list[str]()
    for tick in range(int(MOST) + 1):
        x = LEFT + tick * scale
        stroke = {"stroke": INK, "stroke_dasharray": "4 3"} if tick == 1 else {}
        grid.append(rule(x, top + 16, x, y, **stroke))
        body.append(label(x, y + 14, f"{tick}", anchor="middle", fill=GREY))
    note = "Lines: ranges over rounds. Bold: zerojax takes more time."
    body.append(label(EDGE, y + 34, note, fill=GREY, size=11))
    return picture(title, body, y + 44, grid)
