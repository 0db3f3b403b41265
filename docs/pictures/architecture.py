"""Draw where records are stored, and the list of operations that moves them."""

from style import EDGE, GREY, INK, TEXTURES, WIDTH, filled, heading, label, picture, rule

from zerojax.planner.charts import box

TITLE = "Where records are stored, and the list that moves them"
STEP = [
    "forward   layer 0 .. L-1",
    "  fetch, gather, compute,",
    "  store",
    "backward  layer L-1 .. 0",
    "  fetch, gather, compute,",
    "  reduce, store",
    "update    layer 0 .. L-1",
    "  load, update, store",
    "",
    "read by:",
    "  the jitted loops",
    "  the disk's reads ahead",
    "  program.memory, zj.plan",
    "  tables and pictures",
]
BOXES = [
    # x, y, width, height, heading, lines, texture
    (12, 0, 456, 60, "Your code", [
        "Flax model and loss, optax optimizer, mesh, ZeroConfig",
    ], "plain"),
    (12, 96, 218, 96, "Device memory", [
        "gathered layer, activations", "ring of prefetched records", "shards of this device",
    ], "device"),
    (12, 232, 218, 96, "Host memory, pinned", [
        "params, grads, opt_state,", "activations", "CPU's optimizer kernels",
    ], "host"),
    (12, 368, 218, 60, "NVMe disk", ["a file per layer and kind"], "disk"),
    (262, 96, 206, 332, "One step is one list", STEP, "plain"),
]  # fmt: skip


def arrow(path: str, *heads: str) -> list[str]:
    """Return a line with arrow heads."""
    return [
        f'<path d="{d}" fill="none" stroke="{INK}" stroke-width="1.4"/>' for d in (path, *heads)
    ]


def draw() -> str:
    """Return the picture as an SVG document."""
    body, top = heading(TITLE)
    top += 8
    for x, y, width, height, name, lines, texture in BOXES:
        # Texts are on plain colour; the pattern is a strip beside them.
        fill, ink = TEXTURES[texture].colour, TEXTURES[texture].ink
        body.append(box(x, top + y, width, height, fill=fill, stroke=ink, stroke_width=0.6))
        if texture != "plain":
            body.append(filled(x, top + y, 8, height, texture))
        body.append(label(x + 18, top + y + 20, name, bold=True, size=12.5))
        for n, words in enumerate(lines):
            if words:
                indent = 18 + 7 * (len(words) - len(words.lstrip()))
                body.append(label(x + indent, top + y + 42 + 18 * n, words.strip()))
    for y, words in ((192, "load, store: the host link"), (328, "read, write: swap")):
        a, b = top + y + 4, top + y + 36
        body += arrow(f"M30 {a}V{b}", f"M25 {a + 6}l5 -6l5 6", f"M25 {b - 6}l5 6l5 -6")
        body.append(label(44, top + y + 24, words))
    y = top + 60
    body += arrow(f"M365 {y + 4}V{y + 32}", f"M360 {y + 26}l5 6l5 -6")
    body.append(label(356, y + 22, "zj.build_train_step makes the program", anchor="end"))
    y = top + 150
    body += arrow(f"M234 {y}H258", f"M240 {y - 5}l-6 5l6 5", f"M252 {y - 5}l6 5l-6 5")
    bottom = top + 436
    body.append(rule(EDGE, bottom, WIDTH - EDGE, bottom))
    body.append(label(EDGE, bottom + 15, "L: number of layers", fill=GREY, size=11))
    return picture(f"zerojax: {TITLE.lower()}", body, bottom + 24)
