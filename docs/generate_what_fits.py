"""Write docs/start/what_fits.md and README's table from a file of planned rows.

python benchmarks/what_fits.py --save benchmarks/results/what_fits_planned_202611.md
python docs/generate_what_fits.py
"""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/what_fits_planned_202611.md"
PAGE = ROOT / "docs/start/what_fits.md"
README = ROOT / "README.md"
KINDS = ("LoRA over nf4", "all weights")
FULL = "Llama 3.1 8B"
"""Model whose training of all weights README shows beside the adapters."""
_CELLS = 9
_NOTHING = "-"
_HEAD = "| GPU, host memory |"
"""Beginning of the table in README."""

Row = tuple[str, ...]
Rows = dict[Row, Row]


def read() -> Rows:
    """Return the planned rows by machine, model and kind."""
    rows = Rows()
    for line in RESULTS.read_text().splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == _CELLS and cells[2] in KINDS:
            rows[cells[:3]] = cells
    return rows


def list_distinct(rows: Rows, column: int) -> list[str]:
    """Return the machines (column 0) or models (column 1) of rows, in their order."""
    return list(dict.fromkeys(key[column] for key in rows))


def cell(row: Row) -> str:
    """Return where a row's base or state is stored, and its tokens per second."""
    stored, speed = row[3:5]
    return f"{stored}: {speed}" if speed else _NOTHING


def table(rows: Rows, columns: list[tuple[str, str, str]], head: str = _HEAD) -> list[str]:
    """Return a table of machines.

    Args:
      rows: planned rows.
      columns: heading, model and kind of each column.
      head: beginning of the first line.
    """
    lines = [f"{head} {' | '.join(heading for heading, _, _ in columns)} |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for machine in list_distinct(rows, 0):
        cells = [cell(rows[machine, model, kind]) for _, model, kind in columns]
        lines.append(f"| {machine} | {' | '.join(cells)} |")
    return lines


def in_readme(rows: Rows) -> str:
    """Return the table of README."""
    lora, full = KINDS
    columns = [(model, model, lora) for model in list_distinct(rows, 1)]
    return "\n".join(table(rows, [*columns, (f"{FULL}, {full}", FULL, full)])) + "\n"


def page(rows: Rows) -> str:
    """Return the page."""
    parts = [_TOP]
    for kind, title, text in zip(KINDS, _TITLES, _TEXTS, strict=True):
        columns = [(model, model, kind) for model in list_distinct(rows, 1)]
        parts.append(f"## {title}\n\n{text}\n\n" + "\n".join(table(rows, columns)) + "\n")
    return "\n".join([*parts, _END])


def replaced(readme: str, rows: Rows) -> str:
    """Return README with its table replaced."""
    start = readme.index(_HEAD)
    return readme[:start] + in_readme(rows) + readme[readme.index("\n\n", start) + 1 :]


_TOP = """\
# What fits: fine-tuning on twelve machines

These tables show which models of Hugging Face folders can be fine-tuned on one GPU, and how fast. A
machine is a GPU with its memory, then the host's memory, and a drive of 2 TB (6 GB/s to read and
4 GB/s to write). Each step trains 16 sequences of 2048 tokens in bf16 with AdamW. A cell says where
weights are stored, and the predicted tokens per second; - means that nothing fits.

These are predictions from vendors' figures, not measurements: nothing has run on these machines.
Steps measured on an H200 took 9 to 23 % longer than plans said
([performance](../performance.md#on-one-h200)). The
[file of the rows](../../benchmarks/results/what_fits_planned_202611.md) has the bytes in each tier,
the seconds of a step, and how they were planned.
"""
_TITLES = ("Adapters over a base in 4 bits", "All weights")
_TEXTS = (
    """\
LoRA of rank 16 beside all projections, in mixtures of experts beside attention's. The base is
frozen in nf4, on the GPU, in host memory or on the disk. The rows of mixtures are optimistic:
launching the kernels of each [block of their products](../experts.md#capacity) is not counted.""",
    """\
Parameters (P) and optimizer state (O) are stored on the GPU unless the cell says otherwise.""",
)
_END = """\
The longest sequences that fit a machine are another question, which
[`zj.plan(..., longest=True)`](../planner.md#the-longest-sequence) answers. Plan with your own
figures before you buy or rent a machine:

```python no-run: reads a folder; docs/planner.md runs a plan
import dataclasses

import jax
import jax.numpy as jnp
import optax

import zerojax as zj
from zerojax import aot

machine = dataclasses.replace(zj.machine("rtx4090"), host_bytes=64e9, host_kernel=50e9)
model = zj.hf.model_of("Qwen3-14B", lora=zj.Lora(rank=16, alpha=32, targets="all"))
batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 2048), jnp.int32))
mesh = aot.gpu_mesh("h200", gpus_per_host=1)  # any one GPU; `machine` has its memory and rates
fixed = {"precision": "bf16", "frozen_dtype": "nf4"}
print(zj.plan(model, optax.adamw(1e-4), mesh, batch, machine, fixed=fixed))
```

`python benchmarks/what_fits.py` plans the rows, and `python docs/generate_what_fits.py` writes this
page and the README's table from them.
"""

if __name__ == "__main__":
    rows = read()
    PAGE.write_text(page(rows))
    README.write_text(replaced(README.read_text(), rows))
