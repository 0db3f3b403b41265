"""Write docs/start/settings.md: what the planner chooses for eight machines and four models.

python docs/generate_settings.py
"""

import dataclasses
import pathlib
from typing import Any

from pictures.reference_machine import DISK, HOST

import zerojax as zj

MACHINES = ("l4", "rtx4090", "rtx5090", "l40s", "a100-80", "h100", "h200", "b200")
MODELS: dict[str, dict[str, Any]] = {
    "1.6 B": {"layers": 48, "hidden": 1600, "heads": 25, "vocab": 50304},
    "6.7 B": {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000},
    "13 B": {"layers": 40, "hidden": 5120, "heads": 40, "vocab": 32000},
    "66 B": {"layers": 80, "hidden": 8192, "heads": 64, "vocab": 32000},
}
"""Transformers with MLPs of four times the hidden size."""
SEQ, BATCH = 2048, 8
FIGURES = "".join(
    f"    {name}={figure / 1e12:g}e12,\n" if figure >= 1e12 else f"    {name}={figure / 1e9:g}e9,\n"
    for name, figure in (HOST | DISK).items()
)
MACHINE = (
    f"{HOST['host_bytes'] / 1e9:g} GB of host memory and an SSD "
    f"({DISK['disk_bytes'] / 1e12:g} TB,\n"
    f"{DISK['disk_read'] / 1e9:g} GB/s of reads, {DISK['disk_write'] / 1e9:g} GB/s of writes)."
)
HEAD = f"""\
# Which settings for my machine

This table shows what the planner chooses for one GPU with {MACHINE} \
Each step trains {BATCH} sequences of {SEQ} tokens in bf16 with
AdamW. A cell says where parameters (P), gradients (G) and optimizer state (O) are stored, if not on
the device, and the predicted tokens per second. "on CPU" means that the host runs the optimizer.

These are predictions from vendors' figures, not measurements. Steps measured on an H200 took 9 to
23 % longer than plans said ([performance](../performance.md#on-one-h200)). Plan with your own
figures before you buy or rent a machine:

```sh no-run: plans for a machine with a measured disk
zerojax probe --swap-dir /mnt/disk --out machine.toml
zerojax plan --layers 32 --hidden 4096 --heads 32 --seq {SEQ} --batch {BATCH} --vocab 32000 \\
    --machine machine.toml
```

Or plan from Python. This is the cell of the table for 1.6 B on an RTX 5090:

```python no-run: plans for several seconds; docs/planner.md runs a plan
import dataclasses

import zerojax as zj

machine = dataclasses.replace(
    zj.machine("rtx5090"),
{FIGURES})
sizes = zj.Sizes(layers=48, hidden=1600, heads=25, seq={SEQ}, batch={BATCH}, vocab=50304)
plan = zj.plan(sizes, machine=machine, fixed={{"precision": "bf16", "swap_dir": "/mnt/disk"}})
print(plan.config)
```

"""
TAIL = """\

Optimizer state on a disk wears it. At 13 B, a step on the RTX 4090 reads and writes 153 GB. That is
258 TB a day at the planned pace: a drive rated for 2400 TB lasts nine days. The plan prints this.
`zerojax plan --min-disk-days` refuses such settings, and moments in bfloat16
(`moments="bfloat16"`) write less.

To train your own model with a plan, give `zj.plan` the model instead of `zj.Sizes`, and pass
`plan.config` to `zj.build_train_step` ([planner](../planner.md)). The example scripts plan for
themselves with `--auto True`.

`python docs/generate_settings.py` writes this page.
"""


def machine_of(name: str) -> zj.Machine:
    """Return one GPU of a named machine, with the host memory and the disk of this page."""
    machine = zj.machine(name, devices_per_node=1)
    return dataclasses.replace(machine, **HOST, **DISK)


def cell(name: str, model: str) -> str:
    """Return what the planner chooses for a model on a machine, in a few words."""
    sizes = zj.Sizes(**MODELS[model], seq=SEQ, batch=BATCH)
    fixed = {"precision": "bf16", "swap_dir": "/mnt/disk"}
    try:
        plan = zj.plan(sizes, machine=machine_of(name), fixed=fixed)
    except zj.PlanError:
        return "does not fit"
    config, places = plan.config, dict[str, str]()
    for letter, kind in (("P", "params"), ("G", "grads"), ("O", "opt_state")):
        tier = getattr(config, kind)
        if tier != "device":
            words = "disk" if tier == "nvme" else "host"
            places[words] = places.get(words, "") + letter
    parts = [f"{letters} on {words}" for words, letters in places.items()]
    if config.update_on == "host":
        parts.append("on CPU")
    where = ", ".join(parts) or "all on the GPU"
    return f"{where}: {plan.tokens_per_second:,.0f}"


def page() -> str:
    """Return the page."""
    rows = [f"| GPU | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for name in MACHINES:
        rows.append(f"| `{name}` | {' | '.join(cell(name, model) for model in MODELS)} |")
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    target = pathlib.Path(__file__).parent / "start/settings.md"
    target.write_text(page())
