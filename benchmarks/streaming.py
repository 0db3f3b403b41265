"""Step time of the streamed step, tier by tier, over the resident step.

    python benchmarks/streaming.py                                       # 24 layers x 512 on 2 simulated devices
    python benchmarks/streaming.py --save benchmarks/results/NAME.md

Every program trains the same GPT, in one process, in turns: a round runs each once, and a ratio is taken within a round, so
that a slow minute of the machine falls on all. On a CPU host memory and device memory are the same, so the ratio is what
streaming costs by itself: slices, copies, loops. What a link costs only a GPU tells: benchmarks/gpu_check.py.
"""

import argparse
import datetime
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import gpt  # noqa: E402
from step_time import cpu_name  # noqa: E402

import zerojax as zj  # noqa: E402

HOST = "pinned_host"
BASE = "resident, remat"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
PROGRAMS: dict[str, dict[str, Any]] = {
    BASE: {"activations": "remat"},
    "all in host memory": ALL,
    "all in host memory, update in backward": {**ALL, "update": "in_backward"},
    "all in host memory, gather ahead": {**ALL, "gather_ahead": True},
    "all in host memory, update on host": {**ALL, "update_on": "host"},
    "optimizer state in host memory": {"activations": "remat", "opt_state": HOST},
}


def main() -> None:
    """Run all rounds, print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("layers", 24), ("hidden", 512), ("seq", 128), ("batch", 8), ("devices", 2), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="*", help="parts of the names of the programs to run beside the base")
    parser.add_argument("--save", help="write the table here; a temporary folder by default")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = zj.make_mesh(fsdp=options.devices, devices=jax.devices()[: options.devices])
    c = gpt.GPTConfig(layers=options.layers, hidden=options.hidden, heads=options.hidden // 64 or 1, seq=options.seq)
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, c.vocab, (options.batch, c.seq)) for name in ("tokens", "targets")}
    wanted = [n for n in PROGRAMS if n == BASE or options.only is None or any(part in n for part in options.only)]
    programs, states = {}, {}
    for name in wanted:
        config = zj.ZeroConfig(stage=3, **PROGRAMS[name])
        programs[name] = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
        states[name] = programs[name].init(jax.random.key(0))
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    losses: dict[str, list[float]] = {name: [] for name in wanted}
    for turn in range(options.rounds + 1):
        for name in wanted:
            start = time.monotonic()
            states[name], metrics = programs[name].step(states[name], batch)
            jax.block_until_ready(states[name])
            if turn:  # the first compiles
                seconds[name].append(time.monotonic() - start)
            losses[name].append(float(metrics["loss"]))
        print(f"round {turn}: " + ", ".join(f"{name} {seconds[name][-1]:.2f} s" for name in wanted if turn), flush=True)
    lines = [
        f"# The streamed step, {datetime.date.today():%Y-%m}",
        "",
        f"GPT of {c.layers} layers x {c.hidden}, {c.num_params / 1e6:.1f} M parameters, batch {options.batch} x {c.seq}, "
        f"float32, AdamW, stage 3 over {options.devices} devices.",
        f"Hardware: {jax.devices()[0].device_kind}, {os.cpu_count()} cores of {cpu_name()}. jax {jax.__version__}, "
        f"Python {platform.python_version()}.",
        f"Command: `{' '.join(['python benchmarks/streaming.py', *sys.argv[1:]])}`",
        "",
        f"{options.rounds} rounds in one process; a ratio is taken within a round. Below 1 is faster than the resident step.",
        "",
        "| program | ms a step | time over resident, median | range | largest loss difference |",
        "|---|---|---|---|---|",
    ]
    for name in wanted:
        ratio = [a / b for a, b in zip(seconds[name], seconds[BASE], strict=True)]
        away = max(abs(a - b) for a, b in zip(losses[name], losses[BASE], strict=True))
        lines.append(
            f"| {name} | {1e3 * statistics.median(seconds[name]):.0f} | {statistics.median(ratio):.2f} "
            f"| {min(ratio):.2f}-{max(ratio):.2f} | {away:.1e} |"
        )
    text = "\n".join(lines) + "\n"
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "streaming.md")
    target.write_text(text)
    print(f"saved as {target}")


if __name__ == "__main__":
    main()
