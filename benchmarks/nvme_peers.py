"""What the disk costs: zerojax's nvme tier over zerojax in memory, beside DeepSpeed ZeRO-3 with
NVMe over plain torch.

    python benchmarks/nvme_peers.py --swap-dir /mnt/disk --peer-python PEER/bin/python      # PEER: torch and deepspeed
    python benchmarks/nvme_peers.py --swap-dir /mnt/disk                                    # zerojax alone
    python benchmarks/nvme_peers.py ... --precision bf16 --save benchmarks/results/NAME.md

Every contender trains the same GPT from the same weights on the same tokens, in a process of its
own, on one device with all cores (torch: one rank with as many threads). A round runs each of them
once, and

    slowdown = time of a step with state on disk / time of the same framework's step in memory, of the same round

so that neither a slow minute of the machine nor a faster compiler counts for either. Both sides
pass the page cache by O_DIRECT; the bytes in the table are those that the kernel counts at the disk
for each process (/proc/self/io). Losses of all contenders must agree at every step, else the exit
status is 1.

Measure on an idle machine: where other work takes a core, torch's threads spin while they wait for
each other, and plain torch takes many times as long, unless OMP_WAIT_POLICY=passive is set.

DeepSpeed keeps activations in memory. So does the contender "state on disk", whose parameters and
optimizer state are there, and whose gradients, of a layer at a time, rest nowhere. "all on disk"
has the activations there as well, and recomputes each layer from its input.
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
"""Largest relative difference of losses. In bf16 it is the rounding of one number."""

BASE, TORCH, DEEPSPEED = "zerojax, in memory", "torch, in memory", "DeepSpeed ZeRO-3, NVMe"
STATE = {"params": "nvme", "opt_state": "nvme", "grads": "nvme"}
FIELDS: dict[str, dict[str, Any]] = {
    BASE: {},
    "zerojax, state on disk": {**STATE, "update": "in_backward"},
    "zerojax, all on disk": {**STATE, "activations": "nvme", "update": "in_backward"},
}

Result = dict[str, Any]


# --- one contender, in a process of its own -------------------------------------------------------


def run_zerojax(name: str, p: Problem, folder: str) -> Result:
    """Train one of FIELDS on one device."""
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
    """Return what a round runs, in order: each disk contender near the one it is compared with."""
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
    """Return the contender that holds everything in memory, of the same framework."""
    return BASE if name in FIELDS else TORCH


def step_seconds(result: Result) -> float:
    """Return the median time of a step, the first ones left out."""
    return statistics.median(result["seconds"][WARMUP:])


def moved(result: Result) -> str:
    """Return the megabytes read from disk and written to it in a step, on average, the first ones
    left out.
    """
    if result["disk_bytes"][-1] is None:
        return "not told"
    spent = np.subtract(result["disk_bytes"][-1], result["disk_bytes"][WARMUP - 1]) / (
        len(result["disk_bytes"]) - WARMUP
    )
    return f"{spent[0] / 1e6:.0f}, {spent[1] / 1e6:.0f}"


def slowdowns(rounds: list[dict[str, Result]], name: str) -> list[float]:
    """Return, for each round, the time over the base's."""
    return [step_seconds(r[name]) / step_seconds(r[base_of(name)]) for r in rounds]


def difference(rounds: list[dict[str, Result]], name: str) -> float:
    """Return the largest difference of a loss from the base's, relative to it; NaN where one is not
    finite.
    """
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
        f"{p.layers} layers x {p.hidden}, {p.num_params / 1e6:.1f} M parameters, batch {p.batch} x {p.seq}, "
        f"vocabulary {p.vocab}, AdamW, learning rate {p.learning_rate:g}.",
        f"Hardware: {first[BASE]['hardware']}, {os.cpu_count()} cores of {cpu_name()}. Versions: {', '.join(versions)}, "
        f"Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
        f"{len(rounds)} rounds; each runs every contender once, in a process of its own, for {p.steps} steps, the first "
        f"{WARMUP} of which (compilation, DeepSpeed's first trace) are left out. JAX has one device with all cores, torch one "
        f"rank with {threads} threads. Files are read and written past the page cache (O_DIRECT). Slowdown is the time over "
        "that of the same framework in memory, within a round; median and range over rounds.",
        "",
        "| contender | ms a step | tokens/s | slowdown | range | MB read, written a step | peak resident GB | last loss "
        "| largest loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        seconds = statistics.median(step_seconds(r[name]) for r in rounds)
        ratio, resident = slowdowns(rounds, name), max(r[name]["resident_bytes"] for r in rounds)
        lines.append(
            f"| {name} | {1e3 * seconds:.0f} | {p.batch * p.seq / seconds:.0f} | {statistics.median(ratio):.2f} "
            f"| {min(ratio):.2f}-{max(ratio):.2f} | {moved(first[name])} | {resident / 1e9:.2f} "
            f"| {first[name]['losses'][-1]:.5f} | {difference(rounds, name):.1e} |"
        )
    lines += [
        "",
        f"Losses {'agree' if agree else 'DO NOT agree'} within {TOLERANCE[p.precision]:.1g} of {BASE}'s, relative, at each of "
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
    """Run all rounds, print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--swap-dir", required=True, help="a folder on the disk; all files in it end with the run"
    )
    parser.add_argument("--peer-python", help="python of an environment with torch and deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="*",
        help="parts of the names of the contenders to run beside those in memory",
    )
    parser.add_argument("--save", help="write the table here; a temporary folder by default")
    parser.add_argument("--worker", choices=FIELDS, help=argparse.SUPPRESS)
    add_arguments(parser)
    # At larger rates the loss of 24 layers leaps in the first steps (Adam, no warm-up), and a leap
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
        parser.error(f"--steps {p.steps}: more than the {WARMUP} that warm up are needed")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least one is needed")
    if not os.path.isdir(options.swap_dir):
        parser.error(f"--swap-dir {options.swap_dir} is no folder")
    peer_python = options.peer_python and os.path.abspath(
        options.peer_python
    )  # contenders run in a folder of their own
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
                    f"round {index + 1}: {entry.name}: {step_seconds(results[entry.name]):.3f} s a step",
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
