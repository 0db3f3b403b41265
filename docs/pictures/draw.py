"""Draw the pictures of the documentation from plans.

    python docs/pictures/draw.py

Each picture shows what the lanes of one GPU do during a step, as `zj.plan` predicts it. The model
is small enough that single layers can be seen.
"""

import dataclasses
import pathlib
from typing import Any

import zerojax as zj
from zerojax.planner import draw_parts
from zerojax.planner.lanes import draw_step

HERE = pathlib.Path(__file__).resolve().parent
SIZES = {"layers": 6, "hidden": 6144, "heads": 48, "seq": 2048, "batch": 8, "vocab": 32000}
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


if __name__ == "__main__":
    for name, (title, fixed) in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(title, fixed))
