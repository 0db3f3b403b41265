"""Measure a layer's saved activations, a step's collectives, and step times.

Programs are compiled for H200s without having any; steps are timed on 8 simulated devices.

    # all parts, about 15 minutes
    python benchmarks/activations.py --save benchmarks/results/activations_cpu2_202611.md
    # some of them
    python benchmarks/activations.py --parts kept paper

    kept         bytes that a layer saves for backward on each device, read from the stacks that
                 compiled loops carry, next to the closed form
                 `zerojax.memory.layer_activation_bytes` and the closed form of Korthikanti et al.
                 (arXiv:2205.05198)
    paper        both closed forms for the paper's four models, at tensor 8
    collectives  bytes of unsharded operands in one compiled step, by mesh axis
    time         step time over fsdp alone with the same global batch; one process runs each
                 program once per round

Saved bytes must be within 1 % of the closed form and must never exceed Korthikanti's; otherwise the
exit status is 1. Simulated devices share a CPU's memory, so a collective there is a copy: the times
show the cost of the extra computation, not the cost of a network. Needs zerojax[aot,examples].
"""

import argparse
import dataclasses
import datetime
import itertools
import os
import pathlib
import platform
import statistics
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
jax.config.update("jax_num_cpu_devices", 8)

import gpt  # noqa: E402

import zerojax as zj  # noqa: E402
from zerojax import aot, hlo, memory  # noqa: E402

ROWS, LAYERS = 3, 5
"""Numbers that no other dimension of a program has.

The leading dims of a stack therefore show that it holds saved activations.
"""
MODES = ("save", "selective", "remat")
SIZES = ("22b", "175b")
PAPER = ("22b", "175b", "530b", "1t")
SMALL = gpt.GPTConfig(vocab=1024, seq=256, hidden=256, layers=4, heads=8, loss_tiles=0)
BATCH = 8


def model_of(c: gpt.GPTConfig, tensor: int, **fields: Any) -> tuple[gpt.GPTConfig, zj.LayeredModel]:
    """Return `c` with `fields` replaced, annotated for tensor > 1, and its model."""
    c = dataclasses.replace(
        c, tensor_axis="tensor" if tensor > 1 else None, loss_tiles=0, attention="xla", **fields
    )
    return c, gpt.layered_gpt(c)


def compiled(c: gpt.GPTConfig, mesh: Any, rows: int, **settings: Any) -> str:
    """Return the HLO of a step compiled for a mesh of H200s."""
    c, model = model_of(c, mesh.shape["tensor"], dtype=jnp.bfloat16)
    program = zj.build_train_step(
        model, optax.sgd(1e-3), zj.ZeroConfig(precision="bf16", **settings), mesh
    )
    tokens = jax.ShapeDtypeStruct((rows, c.seq), jnp.int32)
    return program.lower({"tokens": tokens, "targets": tokens}).compile().as_text() or ""


def h200s(fsdp: int, tensor: int) -> Any:
    """Return a mesh of H200s on one host."""
    return aot.gpu_mesh("h200", hosts=1, gpus_per_host=fsdp * tensor, fsdp=fsdp, tensor=tensor)


# --- saved activations ----------------------------------------------------------------------------


def kept_bytes(c: gpt.GPTConfig, tensor: int, **settings: Any) -> float:
    """Return the bytes per device that a layer saves of ROWS sequences, compiled for H200s."""
    c = dataclasses.replace(c, layers=LAYERS)
    text = compiled(c, h200s(1, tensor), ROWS, stage=1, **settings)

    def is_kept(dims: tuple[int, ...]) -> bool:
        return dims[:1] == (LAYERS,) and ROWS in dims[1:3]

    return (
        max(
            sum(a.num_bytes for a in arrays if is_kept(a.dims))
            for arrays in hlo.carried_arrays(text)
        )
        / LAYERS
    )


def kept_table(sizes: list[str], tensors: list[int]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether all byte counts are within their bounds."""
    lines = [
        f"MiB a layer keeps on each device, {ROWS} sequences of 2048 tokens, bf16; "
        "compiled for H200s.", "",
        "| layer | tensor | stream | activations | compiled | closed form "
        "| Korthikanti et al. | ours / theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    are_right = True
    for size, tensor, is_split, mode in itertools.product(sizes, tensors, (False, True), MODES):
        if is_split and tensor == 1:
            continue
        c = gpt.PRESETS[size]
        given: dict[str, Any] = {
            "tensor": tensor,
            "sequence_parallel": is_split,
            "activations": mode,
        }
        found = kept_bytes(c, tensor, activations=mode, sequence_parallel=is_split)
        ours, theirs = (f(c.seq, ROWS, c.hidden, c.heads, **given) for f in BOTH)
        are_right &= abs(found / ours - 1) <= 0.01 and found <= theirs * 1.01
        cells = " | ".join(f"{n / 2**20:,.1f}" for n in (found, ours, theirs))
        lines.append(
            f"| {size} | {tensor} | {'split' if is_split else 'whole'} | {mode} | {cells} "
            f"| {found / theirs:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines, are_right


BOTH = (memory.layer_activation_bytes, memory.korthikanti_layer_bytes)


def paper_table() -> list[str]:
    """Return a table of both closed forms for the paper's models."""
    lines = [
        "MiB a layer keeps on each device at tensor 8, by the closed forms, for one sequence; "
        "in brackets over tensor "
        "parallelism alone with everything kept by Korthikanti et al., "
        "the 100 % of their figure 7.", "",
        "| model | h | a | whole stream, save | split, save | whole, selective "
        "| split, selective | split, remat |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for size, (name, form) in itertools.product(
        PAPER, zip(("zerojax", "Korthikanti et al."), BOTH, strict=True)
    ):
        c = gpt.PRESETS[size]
        args = (c.seq, 1, c.hidden, c.heads)
        base = memory.korthikanti_layer_bytes(*args, tensor=8)
        cells = []
        for is_split, mode in (
            (False, "save"),
            (True, "save"),
            (False, "selective"),
            (True, "selective"),
            (True, "remat"),
        ):
            n = form(*args, tensor=8, sequence_parallel=is_split, activations=mode)
            cells.append(f"{n / 2**20:,.0f} ({100 * n / base:.0f} %)")
        lines.append(f"| {size}, {name} | {c.hidden} | {c.heads} | {' | '.join(cells)} |")
    return lines


# --- collectives and step times -------------------------------------------------------------------


def cases() -> dict[str, tuple[dict[str, int], dict[str, Any]]]:
    """Return the mesh and the settings of each case, by name."""
    split = {"fsdp": 2, "tensor": 4}
    return {
        "fsdp alone": ({"fsdp": 8, "tensor": 1}, {}),
        "tensor 4": (split, {}),
        "tensor 4, sequence_parallel": (split, {"sequence_parallel": True}),
        "tensor 4, partition_activations": (split, {"partition_activations": True}),
    }


def build(mesh: dict[str, int], settings: dict[str, Any]) -> zj.Program:
    """Return a case's program on simulated devices."""
    _, model = model_of(SMALL, mesh["tensor"])
    config = zj.ZeroConfig(stage=3, activations="selective", **settings)
    return zj.build_train_step(
        model, optax.adamw(1e-3), config, zj.make_mesh(fsdp=mesh["fsdp"], tensor=mesh["tensor"])
    )


def collectives_table() -> list[str]:
    """Return a table of the bytes of each case's collectives, by mesh axis."""
    h = SMALL
    lines = [
        f"MiB of whole operands in a step, by mesh axis; {h.layers} layers, h {h.hidden}, "
        f"a {h.heads}, s {h.seq}, V {h.vocab}, "
        f"batch {BATCH}, stage 3, bf16, selective; compiled for 8 H200s.", "",
        "| | axis | all_gather | reduce_scatter | all_reduce | others |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    ops = ("all-gather", "reduce-scatter", "all-reduce")
    for name, (mesh, settings) in cases().items():
        devices = h200s(**mesh)
        text = compiled(SMALL, devices, BATCH, stage=3, activations="selective", **settings)
        for axis, moved in sorted(
            hlo.collective_bytes(text, unknown_trips=1, mesh=devices).items()
        ):
            cells = [moved.get(op, 0) for op in ops] + [
                sum(n for op, n in moved.items() if op not in ops)
            ]
            if sum(cells) >= 2**14:
                lines.append(
                    f"| {name} | {axis} | {' | '.join(f'{n / 2**20:,.2f}' for n in cells)} |"
                )
    return lines


def time_table(rounds: int) -> list[str]:
    """Return a table of all cases' step times; each case runs once per round."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, SMALL.vocab, (BATCH, SMALL.seq + 1), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    programs = {name: build(*case) for name, case in cases().items()}
    states = {name: program.init(jax.random.key(0)) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    kept = {name: program.kept(batch).num_bytes for name, program in programs.items()}
    losses: dict[str, float] = {}
    for number in range(rounds + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            states[name], metrics = jax.block_until_ready(program.step(states[name], batch))
            # The first two rounds compile and warm up.
            seconds[name] += [time.perf_counter() - start] * (number > 1)
            losses[name] = float(metrics["loss"])
    base = statistics.median(seconds["fsdp alone"])
    lines = [
        "Step time on 8 simulated devices, float32, sizes and settings of the table below; "
        f"{rounds} rounds of one step each, "
        f"in turn. Ratio of medians; losses after {rounds + 2} steps agree within "
        f"{max(losses.values()) - min(losses.values()):.1e}. "
        f"Load average after them: {os.getloadavg()[0]:.0f}.", "",
        "| | median s | range | over fsdp alone | MiB kept a device |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, times in seconds.items():
        m = statistics.median(times)
        span = f"{min(times):.2f} to {max(times):.2f}"
        lines.append(f"| {name} | {m:.2f} | {span} | {m / base:.2f} | {kept[name] / 2**20:.2f} |")
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("kept", "paper", "collectives", "time"))
    parser.add_argument("--sizes", nargs="+", choices=list(gpt.PRESETS), default=list(SIZES))
    parser.add_argument("--tensors", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=pathlib.Path, help="file to write")
    options = parser.parse_args()
    parts, are_right = options.parts or ("kept", "paper", "collectives", "time"), True
    lines = [
        f"# Activations: kept, sent, timed, {datetime.date.today():%Y-%m}", "",
        f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores, "
        "which other work may share: "
        f"compare ratios within a table. Command: `python {' '.join(sys.argv)}`.", "",
    ]  # fmt: skip
    if "time" in parts:
        lines += [*time_table(options.rounds), ""]
    if "collectives" in parts:
        lines += [*collectives_table(), ""]
    if "paper" in parts:
        lines += [*paper_table(), ""]
    if "kept" in parts:
        found, are_right = kept_table(options.sizes, options.tensors)
        lines += [*found, ""]
    text = "\n".join(lines)
    print(text)
    if options.save:
        options.save.write_text(text.rstrip("\n") + "\n")
    if not are_right:
        print(
            "saved bytes differ from the closed form by more than 1 %, or exceed Korthikanti's",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
