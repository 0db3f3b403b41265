"""Measure the cost of the disk: zerojax's nvme tier, and DeepSpeed ZeRO-3 with NVMe.

Each is compared with its own framework in memory, zerojax or plain torch.

    # PEER is an environment with torch and deepspeed
    python benchmarks/nvme_peers.py --swap-dir /mnt/disk --peer-python PEER/bin/python
    # zerojax alone
    python benchmarks/nvme_peers.py --swap-dir /mnt/disk
    python benchmarks/nvme_peers.py ... --precision bf16 --save benchmarks/results/NAME.md

Every contender trains the same GPT from the same weights on the same tokens, in its own process, on
one device with all cores (torch: one rank with as many threads). A round runs each contender once,
and

    slowdown = time of a step with state on disk
               / time of the same framework's step in memory, in the same round

so neither a slow minute of the machine nor a faster compiler affects the comparison. Both
frameworks bypass the page cache by O_DIRECT; the table shows the bytes that the kernel counts at
the disk for each process (/proc/self/io). The losses of all contenders must agree at every step;
otherwise the exit status is 1.

Measure on an idle machine: if other work takes a core, torch's threads spin while they wait for
each other, and plain torch takes many times as long unless OMP_WAIT_POLICY=passive is set.

DeepSpeed keeps activations in memory. So does the contender "state on disk", which stores
parameters and optimizer state on disk and keeps gradients, one layer's at a time, in no tier. "all
on disk" also stores activations there, and recomputes each layer from its input.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
from typing import Any

import numpy as np
from contenders import WARMUP, Contender, cpu_name, run_process
from problem import Problem, add_arguments, from_arguments
from problem_in_jax import born_with_weights, gpt_config, optimizer, time_steps

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = {"fp32": 1e-4, "bf16": 2**-8}
"""Largest relative difference of losses; in bf16 it is the rounding of one number."""

BASE, TORCH, DEEPSPEED = "zerojax, in memory", "torch, in memory", "DeepSpeed ZeRO-3, NVMe"
STATE = {"params": "nvme", "opt_state": "nvme", "grads": "nvme"}
FIELDS: dict[str, dict[str, Any]] = {
    BASE: {},
    "zerojax, state on disk": {**STATE, "update": "in_backward"},
    "zerojax, all on disk": {**STATE, "activations": "nvme", "update": "in_backward"},
}

Result = dict[str, Any]


# --- one contender, in its own process ------------------------------------------------------------


def run_zerojax(name: str, p: Problem, folder: str) -> Result:
    """Train one contender of FIELDS on one device and return its results."""
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    import gpt

    import zerojax as zj

    key = jax.random.key(p.seed)
    model = born_with_weights(gpt.layered_gpt(gpt_config(p)), p, key)
    fields: dict[str, Any] = {"precision": p.precision, "swap_dir": folder, **FIELDS[name]}
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    with zj.build_train_step(
        model, optimizer(p), zj.ZeroConfig(stage=3, **fields), mesh
    ) as program:
        return time_steps(program.step, program.init(key), p)


# --- all contenders, in rounds --------------------------------------------------------------------


def contenders(p: Problem, folder: str, peer_python: str | None) -> list[Contender]:
    """Return a round's contenders in order, each disk contender close to its base."""
    worker = [
        sys.executable,
        str(HERE / "nvme_peers.py"),
        *p.arguments(),
        "--swap-dir",
        folder,
        "--worker",
    ]
    found = [Contender(name, 1, [*worker, name]) for name in FIELDS]
    if peer_python is not None:
        peer = [str(HERE / "peer.py"), *p.arguments(), "--swap-dir", folder, "--mode"]
        launch = [
            peer_python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=1",
            *peer,
        ]
        found.append(Contender(TORCH, 1, [peer_python, *peer, "plain"]))
        found.append(Contender(DEEPSPEED, 1, [*launch, "deepspeed3-nvme"]))
    return found


def base_of(name: str) -> str:
    """Return the contender of the same framework that keeps everything in memory."""
    return BASE if name in FIELDS else TORCH


def step_seconds(result: Result) -> float:
    """Return the median seconds of a step, without the warm-up steps."""
    return statistics.median(result["seconds"][WARMUP:])


def moved(result: Result) -> str:
    """Return the average megabytes read from disk and written to it per step, as text.

    The warm-up steps are left out.
    """
    if result["disk_bytes"][-1] is None:
        return "not told"
    spent = np.subtract(result["disk_bytes"][-1], result["disk_bytes"][WARMUP - 1]) / (
        len(result["disk_bytes"]) - WARMUP
    )
    return f"{spent[0] / 1e6:.0f}, {spent[1] / 1e6:.0f}"


def slowdowns(rounds: list[dict[str, Result]], name: str) -> list[float]:
    """Return the contender's step time over its base's, for each round."""
    return [step_seconds(r[name]) / step_seconds(r[base_of(name)]) for r in rounds]


def difference(rounds: list[dict[str, Result]], name: str) -> float:
    """Return a loss's largest relative difference from the base's; NaN if one is not finite."""
    losses = np.array([[r[name]["losses"], r[BASE]["losses"]] for r in rounds])
    return float(np.abs(losses[:, 0] / losses[:, 1] - 1).max())


def table(p: Problem, rounds: list[dict[str, Result]], command: str) -> tuple[str, bool]:
    """Return the report in Markdown, and whether the losses agree."""
    first, names = rounds[0], list(rounds[0])
    versions = sorted({result["version"] for result in first.values()})
    threads = first[TORCH]["threads"] if TORCH in first else os.cpu_count()
    agree = all(difference(rounds, name) <= TOLERANCE[p.precision] for name in names)
    lines = [
        f"# The nvme tier and its peer, {p.precision}, {datetime.date.today():%Y-%m}",
        "",
        f"{p.layers} layers x {p.hidden}, {p.num_params / 1e6:.1f} M parameters, "
        f"batch {p.batch} x {p.seq}, "
        f"vocabulary {p.vocab}, AdamW, learning rate {p.learning_rate:g}.",
        f"Hardware: {first[BASE]['hardware']}, {os.cpu_count()} cores of {cpu_name()}. "
        f"Versions: {', '.join(versions)}, "
        f"Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
        f"{len(rounds)} rounds; each runs every contender once, in a process of its own, "
        f"for {p.steps} steps, the first "
        f"{WARMUP} of which (compilation, DeepSpeed's first trace) are left out. "
        "JAX has one device with all cores, torch one "
        f"rank with {threads} threads. Files are read and written past the page cache (O_DIRECT). "
        "Slowdown is the time over "
        "that of the same framework in memory, within a round; median and range over rounds.",
        "",
        "| contender | ms a step | tokens/s | slowdown | range | MB read, written a step "
        "| peak resident GB | last loss "
        "| largest loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        seconds = statistics.median(step_seconds(r[name]) for r in rounds)
        ratio, resident = slowdowns(rounds, name), max(r[name]["resident_bytes"] for r in rounds)
        lines.append(
            f"| {name} | {1e3 * seconds:.0f} | {p.batch * p.seq / seconds:.0f} "
            f"| {statistics.median(ratio):.2f} "
            f"| {min(ratio):.2f}-{max(ratio):.2f} | {moved(first[name])} | {resident / 1e9:.2f} "
            f"| {first[name]['losses'][-1]:.5f} | {difference(rounds, name):.1e} |"
        )
    lines += [
        "",
        f"Losses {'agree' if agree else 'DO NOT agree'} within "
        f"{TOLERANCE[p.precision]:.1g} of {BASE}'s, relative, at each of "
        f"the {p.steps} steps.",
    ]
    if DEEPSPEED in first:
        for name in [n for n in names if n in FIELDS and n != BASE]:
            pairs = list(zip(slowdowns(rounds, name), slowdowns(rounds, DEEPSPEED), strict=True))
            fewer = sum(ours < theirs for ours, theirs in pairs)
            lines.append(
                f"{name}: a smaller slowdown than {DEEPSPEED} in {fewer} of {len(rounds)} rounds."
            )
    return "\n".join(lines) + "\n", agree


def main() -> None:
    """Run all rounds, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--swap-dir", required=True, help="folder on the disk; the run removes all its files"
    )
    parser.add_argument("--peer-python", help="Python of an environment with torch and deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="*",
        help="run only contenders whose names contain one of these, and those in memory",
    )
    parser.add_argument("--save", help="file for the table; in a temporary folder by default")
    parser.add_argument("--worker", choices=FIELDS, help=argparse.SUPPRESS)
    add_arguments(parser)
    # At larger rates the loss of 24 layers jumps in the first steps (Adam, no warm-up), and a jump
    # magnifies rounding.
    parser.set_defaults(layers=24, learning_rate=3e-5)
    options = parser.parse_args()
    p = from_arguments(options)
    if options.worker:
        print("RESULT " + json.dumps(run_zerojax(options.worker, p, options.swap_dir)))
        return
    if p.precision not in TOLERANCE:
        parser.error(f"--precision {p.precision}: choose from {', '.join(TOLERANCE)}")
    if p.steps <= WARMUP:
        parser.error(f"--steps {p.steps}: give more than the {WARMUP} warm-up steps")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    if not os.path.isdir(options.swap_dir):
        parser.error(f"--swap-dir {options.swap_dir} is not a folder; give an existing one")
    # Contenders run in their own folder, so the path must be absolute.
    peer_python = options.peer_python and os.path.abspath(options.peer_python)
    rounds: list[dict[str, Result]] = []
    with (
        tempfile.TemporaryDirectory() as here,
        tempfile.TemporaryDirectory(dir=os.path.abspath(options.swap_dir)) as folder,
    ):
        entries = [
            entry
            for entry in contenders(p, folder, peer_python)
            if entry.name in (BASE, TORCH)
            or options.only is None
            or any(part in entry.name for part in options.only)
        ]
        for index in range(options.rounds):
            results: dict[str, Result] = {}
            for entry in entries:
                results[entry.name] = run_process(entry, here, peer_python)
                print(
                    f"round {index + 1}: {entry.name}: "
                    f"{step_seconds(results[entry.name]):.3f} s a step",
                    flush=True,
                )
            rounds.append(results)
    hidden = {options.peer_python: "PEER/bin/python", options.swap_dir: "DISK"}
    words = [hidden.get(word, word) for word in sys.argv[1:]]
    text, agree = table(p, rounds, " ".join(["python benchmarks/nvme_peers.py", *words]))
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "nvme_peers.md")
    target.write_text(text)
    print(f"saved as {target}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
