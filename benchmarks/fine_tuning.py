"""Plan fine-tuning of models with 8 B and 70 B parameters on one GPU.

Each row shows memory by tier, bytes moved, seconds per step, and wear of the disk.

    # 16 rows; some minutes
    JAX_PLATFORMS=cpu python benchmarks/fine_tuning.py
    # compile each step for an H200 as well
    JAX_PLATFORMS=cpu python benchmarks/fine_tuning.py --only 8B --compile

No weights are created: `zerojax.hf.model_of` reads a config.json that is written here with the
sizes of Llama 3.1, and `zj.plan` chooses tiers and recomputation. Seconds are predicted at the
assumed rates of the machines below; no run has confirmed them.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zerojax as zj
from zerojax import aot
from zerojax.hf import model_of

ROWS, SEQ = 16, 2048
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    "8B": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
LORA = zj.Lora(rank=16, alpha=32, targets="all")
KINDS: Mapping[str, tuple[zj.Lora | None, str | None]] = {
    "all weights": (None, None), "LoRA, bf16": (LORA, None),
    "LoRA, int8": (LORA, "int8"), "LoRA, nf4": (LORA, "nf4"),
}  # fmt: skip
"""Adapters that are trained (None: all weights), and the storage dtype of the frozen weights."""
SSD = {"disk_bytes": 4e12, "disk_read": 7e9, "disk_write": 5e9, "disk_tbw_bytes": 2.4e15}
"""A 4 TB drive on PCIe 4, as its kind is specified by manufacturers."""
MACHINES = {
    "H200": dataclasses.replace(
        zj.machine("h200", devices_per_node=1), host_bytes=256e9, host_kernel=1.5e11, **SSD
    ),
    "RTX 4090": dataclasses.replace(
        zj.machine("rtx4090", devices_per_node=1), host_bytes=64e9, host_kernel=4e10, **SSD
    ),
}


def planned(name: str, kind: str, machine: zj.Machine, compiles: bool) -> zj.Plan:
    """Return the plan of a row."""
    lora, frozen_dtype = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODELS[name], file)
        model = model_of(folder, lora=lora)
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)  # `machine` gives the seconds and the memory
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32))
    fixed: dict[str, Any] = {
        "precision": "bf16",
        "swap_dir": "SWAP_DIR",
        "frozen_dtype": frozen_dtype,
    }
    return zj.plan(model, optax.adamw(1e-4), mesh, batch, machine, fixed=fixed, validate=compiles)


def row_of(plan: zj.Plan) -> list[str]:
    """Return a plan's cells: memory by tier, bytes per step, seconds, and wear of the disk."""
    held = [sum(plan.bytes[tier].values()) / 1e9 for tier in ("device", "pinned_host", "nvme")]
    moved = [
        plan.link_bytes["up"],
        plan.link_bytes["down"],
        plan.disk_bytes["read"],
        plan.disk_bytes["write"],
    ]
    days = "" if plan.disk_days is None else f" ({plan.disk_days:,.0f} days)"
    assert plan.mfu is not None
    return [
        *(f"{n:.1f}" if n else "0" for n in held),
        *(f"{n / 1e9:.1f}" if n else "0" for n in moved),
        f"{plan.seconds:.2f}",
        f"{plan.tokens_per_second:,.0f}",
        f"{100 * plan.mfu:.0f} %",
        f"{plan.disk_bytes_a_day / 1e12:.3g}{days}" if plan.disk_bytes_a_day else "0",
    ]


def described(fields: Mapping[str, Any]) -> str:
    """Return the chosen settings in words."""
    shown = {
        name: value
        for name, value in fields.items()
        if name not in ("precision", "swap_dir", "frozen_dtype")
    }
    # The values of tuples (segments and names) would fill the line.
    return ", ".join(
        name if isinstance(value, tuple) else f"{name}={value}" for name, value in shown.items()
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only rows whose title (machine, model, kind) contains this"
    )
    parser.add_argument("--compile", action="store_true", help="compile the steps for the H200")
    options = parser.parse_args()
    print(
        f"jax {importlib.metadata.version('jax')}; {ROWS} sequences of {SEQ} tokens a step; "
        "predicted\n"
    )
    columns = (
        "device GB | host GB | disk GB | up GB | down GB | read GB | written GB | s a step "
        "| tokens/s | MFU | TB written a day"
    )
    print(f"| machine, model, trained | {columns} | compiled | chosen |")
    print("|---" * 14 + "|")
    for machine, name, kind in itertools.product(MACHINES, MODELS, KINDS):
        title = f"{machine}, {name}, {kind}"
        if options.only not in title:
            continue
        compiles = options.compile and machine == "H200"
        try:
            plan = planned(name, kind, MACHINES[machine], compiles)
        except zj.PlanError as error:
            print(f"| {title} | {' | ' * 11} does not fit: {error} |", flush=True)
            continue
        found = plan.validated
        off = (
            ""
            if found is None
            else f"{found.device_bytes / 1e9:.1f} GB "
            f"({found.planned_bytes / found.device_bytes - 1:+.1%})"
        )
        print(
            f"| {title} | {' | '.join(row_of(plan))} | {off} | {described(plan.fields)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
