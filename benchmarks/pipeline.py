r"""Compile a GPT in pipeline stages for H200s without having any: bytes, collectives, bubble.

    python benchmarks/pipeline.py --save benchmarks/results/pipeline_h200_aot_202611.md
    python benchmarks/pipeline.py --preset 1t --vocab 51200 --pipe 16 --fsdp 4 --tensor 8 \
        --microbatches 64 --chunks 1 2 --save benchmarks/results/pipeline_1t_h200_aot_202611.md

The table has one row for each number of microbatches and chunks: the bytes of a device's arguments
and temporary memory, next to `program.memory`, and what a steady tick sends over `pipe`. Nothing is
measured. XLA was not run on a GPU, and does not tune its kernels here. Needs zerojax[aot,examples].
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections import Counter
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

import gpt  # noqa: E402

import zerojax as zj  # noqa: E402
from zerojax import aot, hlo  # noqa: E402
from zerojax.pipeline import build_pipeline_schedule  # noqa: E402


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="6.7b", choices=gpt.PRESETS)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--pipe", type=int, default=4)
    parser.add_argument("--fsdp", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--activations", default="selective")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--save", type=pathlib.Path)
    return parser.parse_args()


def list_sent(text: str, mesh: jax.sharding.Mesh, num_ticks: int) -> str:
    """Return the large collectives over `pipe` of each steady tick, by kind.

    Args:
      text: the program.
      mesh: the mesh.
      num_ticks: number of steady ticks.
    """
    kinds = Counter[str]()
    for each in hlo.collectives(text, 1, mesh=mesh):
        is_large = each.num_bytes > 2**20
        if each.axes == "pipe" and each.times == num_ticks and is_large:
            kinds[each.op] += 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def compile_step(options: argparse.Namespace, count: int, chunks: int) -> list[str]:
    """Return the row of a number of microbatches and chunks."""
    c = dataclasses.replace(
        gpt.PRESETS[options.preset], vocab=options.vocab, dtype=jnp.bfloat16, tied=False
    )
    is_split = options.tensor > 1
    if is_split:
        c = dataclasses.replace(c, tensor_axis="tensor")
    sizes = {name: getattr(options, name) for name in ("pipe", "fsdp", "tensor")}
    gpus = options.pipe * options.fsdp * options.tensor
    mesh = aot.gpu_mesh("h200", hosts=max(1, gpus // 8), gpus_per_host=min(gpus, 8), **sizes)
    config = zj.ZeroConfig(
        stage=options.stage,
        precision="bf16",
        activations=options.activations,
        num_microbatches=count,
        pipe_chunks=chunks,
        sequence_parallel=is_split,
    )
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((count * options.fsdp, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = program.lower(batch).compile()
    seconds = time.perf_counter() - start
    stats: Any = compiled.memory_analysis()
    report = program.memory(batch)
    assert report.argument_bytes == stats.argument_size_in_bytes
    arguments = ("params", "master", "opt_state", "batch", "scalars", "frozen")
    account = sum(n for kind, n in report.tiers["device"].items() if kind not in arguments)
    table = build_pipeline_schedule(options.pipe, count, chunks)
    steady = table.phase("steady").num_ticks
    row = [
        f"{count}",
        f"{chunks}",
        f"{100 * table.bubble:.1f} %",
        f"{table.num_slots}",
        f"{stats.argument_size_in_bytes / 1e9:.2f}",
        f"{stats.temp_size_in_bytes / 1e9:.2f}",
        f"{account / 1e9:.2f}",
        f"{stats.temp_size_in_bytes / account:.2f}",
        list_sent(compiled.as_text() or "", mesh, steady),
        f"{seconds:.0f}",
    ]
    print(" | ".join(row), flush=True)
    return row


def main() -> None:
    """Compile each step, and print or save the table."""
    options = parse()
    heads = [
        "microbatches",
        "chunks",
        "bubble",
        "slots",
        "arguments, GB",
        "temporary, GB",
        "`program.memory` without arguments, GB",
        "ratio",
        "over pipe in a steady tick",
        "compile, s",
    ]
    rows = []
    for chunks in options.chunks:
        rows += [compile_step(options, count, chunks) for count in options.microbatches]
    table = ["| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)]
    gpus = options.pipe * options.fsdp * options.tensor
    c = dataclasses.replace(gpt.PRESETS[options.preset], vocab=options.vocab, tied=False)
    shapes = jax.eval_shape(lambda: gpt.layered_gpt(c).init_block(jax.random.key(0)))
    num_block = sum(a.size for a in jax.tree.leaves(shapes))
    num_params = c.layers * num_block + 2 * c.vocab * c.hidden
    setting = (
        f"GPT {options.preset} with {options.vocab:,} tokens, {num_params / 1e9:,.1f} B "
        f"parameters, bf16, sequences of {c.seq:,} tokens, pipe {options.pipe} x fsdp "
        f"{options.fsdp} x tensor {options.tensor} on {gpus} absent H200s, stage "
        f"{options.stage}, one sequence of each "
        f"microbatch for each of the {options.fsdp} shards of the batch, "
        f"activations={options.activations!r}"
        f"{', sequence_parallel' if options.tensor > 1 else ''}. Bytes are those of one device."
    )
    command = f"python benchmarks/pipeline.py {' '.join(sys.argv[1:])}"
    lines = [
        "# Pipeline stages: compiled for H200s, 2026-11",
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
