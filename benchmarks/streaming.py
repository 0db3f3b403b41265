"""Time the streamed step, tier by tier, over the resident step.

    # 24 layers x 512 on 2 simulated devices
    python benchmarks/streaming.py
    # and with states in a folder on a disk
    python benchmarks/streaming.py --swap-dir /mnt/disk
    # with clipping, which shows what an update in forward saves
    python benchmarks/streaming.py --clip-norm 1
    python benchmarks/streaming.py --save benchmarks/results/NAME.md

Every program trains the same GPT, in one process and in turns. A round runs each program once, and
ratios are taken within a round, so a slow minute of the machine affects all of them. On a CPU, host
memory and device memory are the same, so the ratio is the cost of streaming itself: slices, copies,
loops. Only a GPU shows the cost of a link: see benchmarks/gpu_check.py.

For a step from disk, the table also shows the time that its bytes take at the disk's own speed
(measured before the rounds with plain preadv and pwritev), the devices' average wait for the disk,
and the hidden share of the disk's time:

    hidden = 1 - stall / (bytes read / read bandwidth + bytes written / write bandwidth)
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
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import gpt  # noqa: E402
from contenders import cpu_name  # noqa: E402

import zerojax as zj  # noqa: E402
from host_offload.disk import PLAIN, Bench, Rates, SwapFolder, tune  # noqa: E402

HOST = "pinned_host"
BASE = "resident, remat"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
PROGRAMS: dict[str, dict[str, Any]] = {
    BASE: {"activations": "remat"},
    "all in host memory": ALL,
    "all in host memory, update in backward": {**ALL, "update": "in_backward"},
    "all in host memory, update in forward": {**ALL, "update": "in_forward"},
    "all in host memory, gather ahead": {**ALL, "gather_ahead": True},
    "all in host memory, update on host": {**ALL, "update_on": "host"},
    "optimizer state in host memory": {"activations": "remat", "opt_state": HOST},
}
DISK = {"params": "nvme", "grads": "nvme", "opt_state": "nvme", "activations": "nvme"}
ON_DISK: dict[str, dict[str, Any]] = {
    "all on disk": DISK,
    "all on disk, update in backward": {**DISK, "update": "in_backward"},
    "all on disk, update in forward": {**DISK, "update": "in_forward"},
    "params and optimizer state on disk, update in backward": {
        "params": "nvme", "opt_state": "nvme", "activations": "remat", "update": "in_backward",
    },
    "optimizer state on disk": {"activations": "remat", "opt_state": "nvme"},
}  # fmt: skip


def disk_rates(folder: str) -> Rates:
    """Return the disk's own bandwidth, the best of three rounds."""
    with SwapFolder(folder) as swap, Bench(swap.path, tune(swap.path)) as bench:
        rounds = [bench.round()[PLAIN] for _ in range(3)]
    return Rates(read=max(r.read for r in rounds), write=max(r.write for r in rounds))


def main() -> None:
    """Run all rounds, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (
        ("layers", 24),
        ("hidden", 512),
        ("seq", 128),
        ("batch", 8),
        ("devices", 2),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--distance", type=int, default=1, help="layers fetched ahead")
    parser.add_argument(
        "--clip-norm", type=float, help="clip gradients, which an update in backward cannot"
    )
    parser.add_argument("--swap-dir", help="folder of the nvme tier; also runs its programs")
    parser.add_argument(
        "--only", nargs="*", help="run only programs whose names contain one of these, and the base"
    )
    parser.add_argument("--save", help="file for the table; in a temporary folder by default")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = zj.make_mesh(fsdp=options.devices, devices=jax.devices()[: options.devices])
    c = gpt.GPTConfig(
        layers=options.layers, hidden=options.hidden, heads=options.hidden // 64 or 1,
        seq=options.seq,
        dtype=jnp.bfloat16 if options.precision == "bf16" else jnp.float32,
    )  # fmt: skip
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(0, c.vocab, (options.batch, c.seq)) for name in ("tokens", "targets")
    }
    known = PROGRAMS | (ON_DISK if options.swap_dir else {})
    rates = disk_rates(options.swap_dir) if options.swap_dir else None
    wanted = [
        n
        for n in known
        if n == BASE or options.only is None or any(part in n for part in options.only)
    ]
    if options.clip_norm is not None:
        wanted = [n for n in wanted if known[n].get("update") != "in_backward"]
    programs, states = {}, {}
    for name in wanted:
        folder = tempfile.mkdtemp(dir=options.swap_dir) if name in ON_DISK else None
        config = zj.ZeroConfig(
            stage=3,
            precision=options.precision,
            prefetch_distance=options.distance,
            clip_norm=options.clip_norm,
            swap_dir=folder,
            **known[name],
        )
        programs[name] = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
        states[name] = programs[name].init(jax.random.key(0))
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    losses: dict[str, list[float]] = {name: [] for name in wanted}
    told: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    for turn in range(options.rounds + 1):
        for name in wanted:
            start = time.monotonic()
            states[name], metrics = programs[name].step(states[name], batch)
            jax.block_until_ready(states[name])
            if turn:  # the first round compiles
                seconds[name].append(time.monotonic() - start)
            losses[name].append(float(metrics["loss"]))
            told[name].append({key: float(value) for key, value in metrics.items()})
        print(
            f"round {turn}: "
            + ", ".join(f"{name} {seconds[name][-1]:.2f} s" for name in wanted if turn),
            flush=True,
        )
    clipping = "" if options.clip_norm is None else f"clip_norm {options.clip_norm:g}, "
    lines = [
        f"# The streamed step, {datetime.date.today():%Y-%m}",
        "",
        f"GPT of {c.layers} layers x {c.hidden}, {c.num_params / 1e6:.1f} M parameters, "
        f"batch {options.batch} x {c.seq}, "
        f"{options.precision}, AdamW, {clipping}stage 3 over {options.devices} devices, "
        f"prefetch_distance {options.distance}.",
        f"Hardware: {jax.devices()[0].device_kind}, {os.cpu_count()} cores of {cpu_name()}. "
        f"jax {jax.__version__}, "
        f"Python {platform.python_version()}.",
        f"Command: `{' '.join(['python benchmarks/streaming.py', *sys.argv[1:]])}`",
        "",
        f"{options.rounds} rounds in one process; a ratio is taken within a round. "
        "Below 1 is faster than the resident step.",
        "",
        "| program | ms a step | time over resident, median | range | largest loss difference "
        "| MB read, written | disk alone, ms | stall, ms | hidden |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if rates is not None:
        disk = (
            f"The disk by itself: {rates.read / 1e9:.2f} GB/s read, "
            f"{rates.write / 1e9:.2f} GB/s written."
        )
        lines.insert(lines.index("", 3), disk)
    for name in wanted:
        ratio = [a / b for a, b in zip(seconds[name], seconds[BASE], strict=True)]
        away = max(abs(a - b) for a, b in zip(losses[name], losses[BASE], strict=True))
        lines.append(
            f"| {name} | {1e3 * statistics.median(seconds[name]):.0f} "
            f"| {statistics.median(ratio):.2f} "
            f"| {min(ratio):.2f}-{max(ratio):.2f} | {away:.1e} "
            f"| {swapped(told[name][1:], rates, options.devices)} |"
        )
    text = "\n".join(lines) + "\n"
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "streaming.md")
    target.write_text(text)
    print(f"saved as {target}")
    for program in programs.values():
        program.close()
        if program.config.swap_dir:
            pathlib.Path(program.config.swap_dir, "zerojax-swap-io.json").unlink(missing_ok=True)
            os.rmdir(program.config.swap_dir)


def swapped(steps: list[dict[str, float]], rates: Rates | None, devices: int) -> str:
    """Return the disk's cells of a program's row, medians over its steps."""
    if rates is None or "swap_read_bytes" not in steps[0]:
        return " | | |"
    read, written, stall = (
        statistics.median(step[f"swap_{key}"] for step in steps)
        for key in ("read_bytes", "write_bytes", "stall_seconds")
    )
    alone, stall = read / rates.read + written / rates.write, stall / devices
    return (
        f"{read / 1e6:.0f}, {written / 1e6:.0f} | {1e3 * alone:.0f} | {1e3 * stall:.0f} "
        f"| {1 - stall / alone:.2f}"
    )


if __name__ == "__main__":
    main()
