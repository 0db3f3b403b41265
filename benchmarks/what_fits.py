"""Plan fine-tuning of six models on twelve machines: what fits, where it is stored, tokens/s.

    # all rows; about 15 minutes of one CPU core
    python benchmarks/what_fits.py --save benchmarks/results/what_fits_planned_202611.md
    # plan the rows of one model again, and keep the others of the file
    python benchmarks/what_fits.py --only Qwen3-30B-A3B --save benchmarks/results/...

No weights are created: `zerojax.hf.model_of` reads a config.json that is written here with the
sizes of the released model, and the planner chooses tiers, recomputation and microbatches, the same
for all layers. Seconds are predicted at the assumed rates of the machines below; no run has
confirmed them. `docs/generate_what_fits.py` makes the tables of README and docs from the file.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from lengths import GPT_OSS_20B, LLAMA_8B, LORA

import zerojax as zj
from zerojax import aot
from zerojax.hf import model_of
from zerojax.planner import plan_uniform

ROWS, SEQ = 16, 2048
DESKTOP, SERVER = 5e10, 1.5e11
"""Bytes per second of host memory that the host's update moves."""
GPUS: Mapping[str, tuple[str, float, float]] = {
    "RTX 3060 12 GB, 32 GB": ("rtx3060", 32e9, DESKTOP),
    "RTX 4060 Ti 16 GB, 32 GB": ("rtx4060ti-16", 32e9, DESKTOP),
    "RTX 3090 24 GB, 64 GB": ("rtx3090", 64e9, DESKTOP),
    "RTX 4090 24 GB, 64 GB": ("rtx4090", 64e9, DESKTOP),
    "RTX 4090 24 GB, 128 GB": ("rtx4090", 128e9, DESKTOP),
    "RTX 5090 32 GB, 128 GB": ("rtx5090", 128e9, DESKTOP),
    "L4 24 GB, 64 GB": ("l4", 64e9, DESKTOP),
    "L40S 48 GB, 256 GB": ("l40s", 256e9, SERVER),
    "A100 40 GB, 256 GB": ("a100-40", 256e9, SERVER),
    "A100 80 GB, 256 GB": ("a100-80", 256e9, SERVER),
    "H100 80 GB, 256 GB": ("h100", 256e9, SERVER),
    "H200 141 GB, 512 GB": ("h200", 512e9, SERVER),
}
"""Machines by GPU and host memory: name in `zj.machine`, host memory in bytes, rate of the host."""
SSD = {
    "disk_bytes": 2e12,
    "disk_read": 6e9,
    "disk_write": 4e9,
    "disk_both": 6e9,
    "disk_tbw_bytes": 1.2e15,
}
"""A 2 TB drive on PCIe 4, as its kind is specified by manufacturers."""
SYSTEM_BYTES = 8e9
"""Host memory that the system keeps, which cannot be pinned."""
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_size": 5120,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen3-14B": _QWEN3
    | {"intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "gpt-oss-20b": GPT_OSS_20B,
    "Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Qwen3-32B": _QWEN3
    | {"intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Llama 3.3 70B": LLAMA_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
KINDS = ("LoRA over nf4", "all weights")
HEADS = (
    "machine",
    "model",
    "trained",
    "stored",
    "tokens/s",
    "s a step",
    "GPU GB",
    "host GB",
    "disk GB",
)
FIXED: Mapping[str, Any] = {
    "precision": "bf16",
    "swap_dir": "SWAP_DIR",
    "moments": "float32",
    "prefetch_distance": 2,
    "gather_ahead": False,
}
"""Fields that are not chosen: how far ahead layers are fetched, which one device need not vary."""


def machine_of(name: str) -> zj.Machine:
    """Return one of `GPUS`, with its host memory and its drive."""
    chip, host, rate = GPUS[name]
    return dataclasses.replace(
        zj.machine(chip, devices_per_node=1),
        host_bytes=host,
        pinned_bytes=host - SYSTEM_BYTES,
        host_kernel=rate,
        **SSD,
    )


def plan(machine: str, model: str, kind: str) -> zj.Plan | None:
    """Return the fastest plan whose layers are all alike; None if nothing fits."""
    is_lora = kind == KINDS[0]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        built = model_of(folder, lora=LORA if is_lora else None)
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)  # the machine gives the seconds and the memory
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32))
    fixed = {**FIXED, "frozen_dtype": "nf4" if is_lora else None}
    return plan_uniform(built, optax.adamw(1e-4), mesh, batch, machine_of(machine), fixed=fixed)


def stored(plan: zj.Plan, kind: str) -> str:
    """Return where the base, or parameters (P) and optimizer state (O), are stored."""
    words = {"device": "GPU", "pinned_host": "host", "nvme": "disk"}
    config = plan.config
    if kind == KINDS[0]:
        return words[config.frozen or config.params]
    places = dict[str, str]()
    for letter, tier in (("P", config.params), ("O", config.opt_state)):
        places[words[tier]] = places.get(words[tier], "") + letter
    where = ", ".join(f"{letters} on {word}" for word, letters in places.items() if word != "GPU")
    return where or "GPU"


def row_of(machine: str, model: str, kind: str) -> list[str]:
    """Return the cells of a row."""
    found = plan(machine, model, kind)
    if found is None:
        return [machine, model, kind, "does not fit", "", "", "", "", ""]
    held = [sum(found.bytes[tier].values()) / 1e9 for tier in ("device", "pinned_host", "nvme")]
    return [
        machine,
        model,
        kind,
        stored(found, kind),
        f"{found.tokens_per_second:,.0f}",
        f"{found.seconds:.1f}",
        *(f"{n:.1f}" if n else "0" for n in held),
    ]


def read(path: pathlib.Path) -> dict[tuple[str, ...], list[str]]:
    """Return the rows of a file by machine, model and kind."""
    rows = dict[tuple[str, ...], list[str]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(HEADS) and cells[2] in KINDS:
            rows[tuple(cells[:3])] = cells
    return rows


def page(rows: Mapping[tuple[str, ...], list[str]]) -> str:
    """Return the text of the file of these rows."""
    ordered = [rows[key] for key in itertools.product(GPUS, MODELS, KINDS) if key in rows]
    table = ["| " + " | ".join(cells) + " |" for cells in (HEADS, ["---"] * len(HEADS), *ordered)]
    return "\n".join(
        [
            "# Fine-tuning six models on twelve machines, planned, 2026-11",
            "",
            f"jax {importlib.metadata.version('jax')}. Command: `python benchmarks/what_fits.py "
            "--save benchmarks/results/what_fits_planned_202611.md`. **Nothing ran on a GPU.**",
            "",
            f"{ROWS} sequences of {SEQ} tokens a step, bf16, AdamW; adapters of rank 16 beside all "
            "projections (in mixtures: attention's). A machine is one GPU and its memory, then "
            f"host memory, of which {SYSTEM_BYTES / 1e9:g} GB are kept for the system; a drive of "
            "2 TB, 6 GB/s to read and 4 GB/s to write. The host's update moves 50 GB/s on "
            "desktops, and beside an L4, and 150 GB/s on servers. The planner chose the settings, "
            "the same for all layers, and predicted bytes and seconds at the assumed rates of the "
            'named GPUs. "Stored" is where the base is, or parameters (P) and optimizer state (O) '
            "if not on the GPU. GB is 1e9 bytes.",
            "",
            *table,
            "",
        ]
    )


def main() -> None:
    """Plan each row, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="only rows that contain this text")
    parser.add_argument("--save", type=pathlib.Path)
    options = parser.parse_args()
    rows = {} if options.save is None else read(options.save)
    for key in itertools.product(GPUS, MODELS, KINDS):
        if options.only in " | ".join(key):
            rows[key] = row_of(*key)
            print(" | ".join(rows[key]), flush=True)
            if options.save:
                options.save.write_text(page(rows))


if __name__ == "__main__":
    main()
