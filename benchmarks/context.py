"""Compare the methods of `zj.attention` for long sequences, compiled for H200s without having any.

    python benchmarks/context.py --save benchmarks/results/context_h200_aot_202611.md

A GPT of 6.7 B parameters is compiled with sequences of 262,144 tokens over context 16 x fsdp 4,
once for each method. The table has the bytes of a device's arguments and temporary memory, next to
`program.memory`, and what it sends over `context` and over the other axes in a step.

Seconds are lower bounds: the step's FLOP at the chip's peak, and the bytes over `context` at the
rate of a device's network link, since 16 devices span two nodes. Nothing is measured. XLA was not
run on a GPU, and does not tune its kernels here. Needs zerojax[aot,examples]; a compile takes about
a minute.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

import gpt  # noqa: E402

import zerojax as zj  # noqa: E402
from zerojax import aot, hlo  # noqa: E402
from zerojax.chips import CHIPS  # noqa: E402

NETWORK = 50e9
"""Bytes per second of a device's network link in one direction: 400 Gb/s for each GPU."""


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="6.7b", choices=gpt.PRESETS)
    parser.add_argument("--seq", type=int, default=262_144)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--activations", default="selective")
    parser.add_argument("--methods", nargs="+", default=["ring", "ulysses", "gather"])
    parser.add_argument("--save", type=pathlib.Path)
    return parser.parse_args()


def sent_bytes(text: str, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Return the bytes that a device sends in a step, over `context` alone and over other axes."""
    sent = {"context": 0.0, "other": 0.0}
    for each in hlo.collectives(text, 1, mesh=mesh):
        axes = (each.axes or "").split("+")
        count = int(np.prod([mesh.shape.get(axis, 1) for axis in axes]))
        if each.op == "collective-permute":
            share = 1.0
        elif each.op == "all-reduce":
            share = 2 * (count - 1) / count
        else:
            share = (count - 1) / count
        sent["context" if axes == ["context"] else "other"] += each.num_bytes * share * each.times
    return sent


def compile_step(options: argparse.Namespace, method: Any) -> list[str]:
    """Return a method's row of the table."""
    c = dataclasses.replace(
        gpt.PRESETS[options.preset], seq=options.seq, dtype=jnp.bfloat16, attention=method
    )
    gpus = options.context * options.fsdp
    mesh = aot.gpu_mesh("h200", hosts=gpus // 8, fsdp=options.fsdp, context=options.context)
    config = zj.ZeroConfig(precision="bf16", clip_norm=1.0, activations=options.activations)
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((options.fsdp, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = program.lower(batch).compile()
    seconds = time.perf_counter() - start
    stats: Any = compiled.memory_analysis()
    report = program.memory(batch)
    assert report.argument_bytes == stats.argument_size_in_bytes
    arguments = ("params", "master", "opt_state", "batch", "scalars", "frozen")
    account = sum(n for kind, n in report.tiers["device"].items() if kind not in arguments)
    sent = sent_bytes(compiled.as_text() or "", mesh)
    flops = c.flops_per_token * options.seq * options.fsdp / gpus
    row = [
        method,
        f"{stats.argument_size_in_bytes / 1e9:.2f}",
        f"{stats.temp_size_in_bytes / 1e9:.1f}",
        f"{account / 1e9:.1f}",
        f"{sent['context'] / 1e9:.0f}",
        f"{sent['other'] / 1e9:.0f}",
        f"{flops / CHIPS['h200'].peak['bf16']:.1f}",
        f"{sent['context'] / NETWORK:.1f}",
        f"{seconds:.0f}",
    ]
    print(" | ".join(row), flush=True)
    return row


def main() -> None:
    """Compile each method's step, and print or save the table."""
    options = parse()
    heads = [
        "method",
        "arguments, GB",
        "temporary, GB",
        "`program.memory` without arguments, GB",
        "sent over context, GB",
        "sent over other axes, GB",
        "FLOP at the peak, s",
        "bytes over context at 50 GB/s, s",
        "compile, s",
    ]
    rows = [compile_step(options, method) for method in options.methods]
    table = ["| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)]
    command = f"python benchmarks/context.py {' '.join(sys.argv[1:])}"
    gpus = options.context * options.fsdp
    setting = (
        f"GPT {options.preset}, bf16, sequences of {options.seq:,} tokens, context "
        f"{options.context} x fsdp {options.fsdp} on {gpus} absent H200s, "
        f"one sequence for each of the {options.fsdp} shards of the batch, "
        f"activations={options.activations!r}. Bytes are those of one device; seconds are lower "
        "bounds at the stated rates, not measured."
    )
    lines = [
        "# Long context: compiled for H200s, 2026-11",
        "",
        f"jax {jax.__version__}. Command: `{command}`.",
        "",
        setting,
        "",
        *table,
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
