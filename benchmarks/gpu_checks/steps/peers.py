"""Compare zerojax with FSDP2 and DeepSpeed, with states in host memory.

All contenders use the same GPT, batch, precision and attention.

Each contender stores parameters, gradients and optimizer state on the host, runs the optimizer
there, and keeps activations on the device, as FSDP2's CPUOffloadPolicy and DeepSpeed's ZeRO-3 with
both offloads do. zerojax also runs with the update on the device, which the peers do not have. On
GPUs, all contenders use cuDNN's attention. Each contender runs in its own process, and seconds are
medians after the warm-up.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from contenders import WARMUP, Contender, run_process

from gpu_checks.jobs import Job, one_device, platform_name
from gpu_checks.mixes import BESIDE_PEER, IN_BACKWARD
from gpu_checks.parts import KNOWN, Context
from gpu_checks.rows import Row, skipped
from gpu_checks.speed import HERE
from gpu_checks.turns import step

ON_HOST, ON_DEVICE = "ours, updated on the host", "ours, updated on the device"
OURS = {ON_HOST: BESIDE_PEER, ON_DEVICE: IN_BACKWARD | {"activations": "save"}}
PEERS = {"FSDP2": ("fsdp2-offload", "torch"), "DeepSpeed": ("deepspeed3-offload", "deepspeed")}


def our_jobs(context: Context) -> list[Job]:
    """Return zerojax's jobs, to run or to compile."""
    return [
        Job(name=name, problem=context.sizes.peer, fields=fields) for name, fields in OURS.items()
    ]


def check_ours(name: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check of one of zerojax's contenders."""

    def rows(context: Context) -> Iterator[Row]:
        import jax

        (job,) = (job for job in our_jobs(context) if job.name == name)
        with job.build(one_device()) as program:
            batches = [program.shard_batch(b) for b in job.data()]
            state, seconds, losses = program.init(jax.random.key(0)), [], []
            for batch in batches:
                state, took, metrics = step(program, state, batch)
                seconds.append(took)
                losses.append(metrics["loss"])
            stats = jax.devices()[0].memory_stats()
        peak = stats["peak_bytes_in_use"] if stats else None
        yield contender_row(context, name, seconds, losses, peak, f"jax {jax.__version__}")

    return rows


def check_peer(name: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check of a peer, which runs in its own environment."""

    def rows(context: Context) -> Iterator[Row]:
        mode, package = PEERS[name]
        python = context.peer_python or sys.executable
        if subprocess.run(
            [python, "-c", f"import {package}"], capture_output=True, check=False
        ).returncode:
            yield skipped(
                name,
                f"no {package} in {'the peers' if context.peer_python else 'this'} environment",
            )
            return
        launch = [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=1",
            str(HERE / "peer.py"),
        ]
        words = [*launch, *context.sizes.peer.arguments(), "--mode", mode]
        words += (
            ["--attention", "cudnn"]
            if platform_name() == "gpu" and context.sizes.peer.precision == "bf16"
            else []
        )
        with tempfile.TemporaryDirectory() as folder:
            seen = run_process(Contender(name, 1, words), folder, python)
        row = contender_row(
            context, name, seen["seconds"], seen["losses"], seen["peak_bytes"], seen["version"]
        )
        yield row
        yield from beside_rows(name, row, context)

    return rows


def contender_row(
    context: Context,
    name: str,
    seconds: list[float],
    losses: list[float],
    peak: int | None,
    version: str,
) -> Row:
    """Report a contender's speed and peak device memory."""
    own = statistics.median(seconds[WARMUP:])
    rate = context.sizes.peer.batch * context.sizes.peer.seq / own
    text = f"{1e3 * own:.4g} ms, {rate:.5g} tokens/s" + (
        f", peak {peak / 2**30:.4g} GiB of the device" if peak else ""
    )
    values = {"seconds": own, f"{KNOWN}tokens_per_second.{name}": rate}
    values |= {f"{KNOWN}peak.{name}": float(peak)} if peak else {}
    return Row(
        f"{name} ({version})", text, "finite losses", bool(np.isfinite(losses).all()), values
    )


def beside_rows(name: str, row: Row, context: Context) -> Iterator[Row]:
    """Report which contender is faster, and which takes less device memory."""
    for ours in OURS:
        for what, unit, more_wins in (
            ("tokens_per_second", "tokens/s", True),
            ("peak", "peak device memory", False),
        ):
            own, other = (
                context.known.get(f"{what}.{ours}"),
                row.values.get(f"{KNOWN}{what}.{name}"),
            )
            if own is None or other is None:
                continue
            wins = own > other if more_wins else own < other
            verdict = "ours is ahead" if wins else "WE LOSE"
            yield Row(
                f"{ours} over {name}: {unit}",
                f"{own / other:.2f}; {verdict}",
                values={"ratio": own / other},
            )
