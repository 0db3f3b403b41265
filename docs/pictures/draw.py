"""Draw the pictures of the documentation.

    python docs/pictures/draw.py

`architecture` shows the tiers and the step's list of operations. `step_host` and `step_disk` show
what the lanes of one GPU do during a step, as `zj.plan` predicts it, for a model small enough that
single layers can be seen. The other pictures show figures of runs and counts: from data/, which
`measure.py` writes, and from benchmarks/results/.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import architecture
import losses
import peers
import plans_and_runs
import tiers
import timelines

HERE = pathlib.Path(__file__).resolve().parent


def data(name: str) -> dict[str, Any]:
    """Return what `measure.py` stored."""
    return json.loads((HERE / f"data/{name}.json").read_text())


PICTURES: dict[str, Callable[[], str]] = {
    "architecture": architecture.draw,
    "step_host": lambda: timelines.predicted(*timelines.PREDICTED["step_host"]),
    "step_disk": lambda: timelines.predicted(*timelines.PREDICTED["step_disk"]),
    "step_tiers": lambda: timelines.measured(data("timelines")),
    "bytes_by_tier": lambda: tiers.draw(data("bytes")),
    "losses": lambda: losses.draw(data("losses")),
    "planned": plans_and_runs.draw,
    "peers": peers.draw,
}
"""Pictures by name, each as an SVG document."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())
