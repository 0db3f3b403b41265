"""Draw the pictures of the documentation.

    python docs/pictures/draw.py

`architecture.svg` shows the tiers and the step's list of operations. The other pictures show what
the lanes of one GPU do during a step, as `zj.plan` predicts it, for a model small enough that
single layers can be seen.
"""

import dataclasses
import pathlib
from typing import Any

import zerojax as zj
from zerojax.planner import draw_parts
from zerojax.planner.lanes import draw_step

ARROW = 'fill="none" stroke="#333" stroke-width="1.5"'
HERE = pathlib.Path(__file__).resolve().parent
SIZES: dict[str, Any] = {
    "layers": 6,
    "hidden": 6144,
    "heads": 48,
    "seq": 2048,
    "batch": 8,
    "vocab": 32000,
}
HOST = {"host_bytes": 128e9, "pinned_bytes": 120e9, "host_kernel": 50e9}
DISK = {"disk_bytes": 2e12, "disk_read": 6e9, "disk_write": 4e9, "disk_both": 6e9}
STREAMED = {"stage": 3, "precision": "bf16", "update": "in_backward", "prefetch_distance": 1}
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "step_host": (
        "A step with parameters and optimizer state in host memory",
        STREAMED | {"params": "pinned_host", "opt_state": "pinned_host"},
    ),
    "step_disk": (
        "A step with parameters and optimizer state on a disk",
        STREAMED | {"params": "nvme", "opt_state": "nvme", "swap_dir": "/mnt/disk"},
    ),
}


def draw(title: str, fixed: dict[str, Any]) -> str:
    """Return the timeline of a step on one RTX 4090, as an SVG document."""
    machine = dataclasses.replace(zj.machine("rtx4090"), **HOST, **DISK)
    plan = zj.plan(zj.Sizes(**SIZES), machine=machine, fixed=fixed)
    return draw_parts(title, [draw_step(plan.time)])


def architecture() -> str:
    """Return the picture of where records are stored and what moves them, as an SVG document."""
    boxes = [
        # x, y, width, height, heading, lines, fill
        (20, 60, 250, 250, "Your code", [
            "Flax model, loss", "optax optimizer", "mesh, ZeroConfig", "", "zj.build_train_step",
            "  -> program.step(state, batch)",
        ], "#f7f7f7"),
        (310, 60, 290, 110, "Device memory", [
            "gathered layer, saved activations", "ring of prefetched records",
            "shards of this device",
        ], "#d4e6f4"),
        (310, 200, 290, 110, "Host memory (pinned)", [
            "params, grads, opt_state, activations", "the CPU's optimizer kernels",
        ], "#d9efcf"),
        (310, 340, 290, 90, "NVMe disk", ["one file per record: layer x kind"], "#fde3c0"),
        (640, 60, 250, 370, "One step, as a list of operations", [
            "forward   layer 0 .. L-1", "  fetch, gather, compute, store",
            "backward  layer L-1 .. 0", "  fetch, gather, compute,", "  reduce, store",
            "update    layer 0 .. L-1", "  load, update, store", "", "read by:",
            "  the jitted loops", "  the disk's reads ahead", "  program.memory", "  zj.plan",
            "  tables and pictures",
        ], "#f7f7f7"),
    ]  # fmt: skip
    body = []
    for x, y, width, height, heading, lines, fill in boxes:
        body.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            'stroke="#555"/>'
        )
        body.append(f'<text x="{x + 14}" y="{y + 24}" font-weight="bold">{heading}</text>')
        for n, line in enumerate(lines):
            words = line.replace(">", "&gt;")
            indent = 14 + 8 * (len(line) - len(line.lstrip()))
            body.append(f'<text x="{x + indent}" y="{y + 48 + 20 * n}">{words.strip()}</text>')
    for x, y, words in ((330, 190, "load, store: the host link"), (330, 330, "read, write: swap")):
        body.append(f'<path d="M{x - 4} {y - 18} v26 M{x - 10} {y - 12} l6 -6 l6 6" {ARROW}/>')
        body.append(f'<path d="M{x - 10} {y + 2} l6 6 l6 -6" {ARROW}/>')
        body.append(f'<text x="{x + 14}" y="{y}" fill="#333">{words}</text>')
    body.append(f'<path d="M270 150 h38 M302 144 l6 6 l-6 6" {ARROW}/>')
    body.append(f'<path d="M640 150 h-38 M608 144 l-6 6 l6 6" {ARROW}/>')
    title = "zerojax: where records are stored, and the list of operations that moves them"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="910" height="450" viewBox="0 0 910 450" '
        f'font-family="sans-serif" font-size="13"><title>{title}</title>'
        '<rect width="910" height="450" fill="#fff"/>'
        f'<text x="20" y="32" font-size="16" font-weight="bold">{title}</text>'
        f"{''.join(body)}</svg>\n"
    )


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(architecture())
    for name, (title, fixed) in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(title, fixed))
