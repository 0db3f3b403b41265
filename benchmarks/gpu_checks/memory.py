"""Compare peak device memory with the closed form and the compiler's count."""

import concurrent.futures
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from contenders import WARMUP, Contender, run_process

from gpu_checks.jobs import Job, one_device
from gpu_checks.mixes import MEMORY_MIXES, SMALL, Sizes, chosen
from gpu_checks.rows import Row, attempt, skipped

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "gpu_check.py"
# Largest peak over program.memory, which leaves out what one layer allocates and frees.
ACCOUNT_RATIO = 1.15
COMPILED_RATIO = 1.1  # over the compiler's count, which leaves out its libraries' workspace


def memory_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "memory"."""
    return [
        Job(name=name, problem=sizes.lean, fields=f)
        for name, f in chosen("memory", MEMORY_MIXES, sizes).items()
    ]


def peak_of(job: Job) -> dict[str, float]:
    """Train a few steps in a fresh process and return its peak device memory in bytes.

    The result also holds the peak after init, `program.memory` and the compiler's count.
    """
    import jax

    mesh = one_device()
    device = mesh.devices.flat[0]
    with job.build(mesh) as program:
        batch = job.data()[0]
        report, stats = program.memory(batch), program.lower(batch).compile().memory_analysis()
        state = jax.block_until_ready(program.init(jax.random.key(0)))
        after_init = device.memory_stats()["peak_bytes_in_use"]
        for _ in range(WARMUP):
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
        return {
            "peak": device.memory_stats()["peak_bytes_in_use"],
            "peak_of_init": after_init,
            "account": sum(report.tiers["device"].values()),
            "compiled": stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        }


def memory_row(
    name: str, figure: str, ratio: float, bound: float, sizes: Sizes, values: Mapping[str, float]
) -> Row:
    """Return a row that is judged only at sizes whose states outweigh a layer's temporaries."""
    if sizes.few:
        return Row(name, figure, values=values)
    return Row(name, figure, f"{bound:g}", ratio <= bound, {**values, "ratio": ratio})


def check_memory(sizes: Sizes) -> Iterator[Row]:
    """Compare each mix's peak with the closed form and with the compiler's count.

    Each mix runs in its own process.
    """
    import jax

    if not jax.devices()[0].memory_stats():
        yield skipped("peak device memory", f"{jax.default_backend()} devices do not count theirs")
        return
    words = [sys.executable, str(SCRIPT), *(["--small"] if sizes is SMALL else []), "--peak"]
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool,
    ):
        all_jobs = memory_jobs(sizes)
        peaks = [
            pool.submit(run_process, Contender(job.name, 1, [*words, job.name]), folder, None)
            for job in all_jobs
        ]
        for job, peak in zip(all_jobs, peaks, strict=True):

            def rows(job: Job = job, peak: Any = peak) -> Iterator[Row]:
                seen = peak.result()
                what = f"{seen['peak'] / 2**30:.3g} GiB" + (
                    " (of init)" if seen["peak"] == seen["peak_of_init"] else ""
                )
                for against, bound in (("account", ACCOUNT_RATIO), ("compiled", COMPILED_RATIO)):
                    ratio = seen["peak"] / seen[against]
                    told = {"account": "program.memory", "compiled": "the compiler's count"}[
                        against
                    ]
                    text = f"{ratio:.3f} ({what} over {seen[against] / 2**30:.3g})"
                    yield memory_row(
                        f"{job.name}: peak over {told}", text, ratio, bound, sizes, seen
                    )

            yield from attempt(job.name, rows)
