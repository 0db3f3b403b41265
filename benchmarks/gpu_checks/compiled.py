"""Compile the checks' programs for a GPU, without having one."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_checks.jobs import Job
from gpu_checks.kernels import KINDS, compile_kernels
from gpu_checks.link.slices import compile_forms
from gpu_checks.machine import capacity_row
from gpu_checks.memory import ACCOUNT_RATIO, memory_row
from gpu_checks.parts import Context
from gpu_checks.rows import Row, attempt


def compile_rows(check: str, jobs: Sequence[Job], context: Context) -> Iterator[Row]:
    """Compile a check's jobs, forms or kernels for a chip, and report their host slices.

    A row fails if the indices of a host slice are not provably right.
    """
    import jax

    from zerojax import aot, hlo

    mesh, sizes = aot.gpu_mesh(context.chip, gpus_per_host=1), context.sizes

    def judged(name: str, compiled: Any, seconds: float) -> Row:
        text = compiled.as_text()
        slices, unsafe = (
            hlo.host_slices(text, unknown_trips=1),
            hlo.unsafe_host_slices(text, unknown_trips=1),
        )
        figure = f"{len(slices)} host slices, {len(unsafe)} not provably right; {seconds:.1f} s"
        return Row(
            name,
            figure,
            "0",
            not unsafe,
            {"slices": len(slices), "unsafe": len(unsafe), "seconds": seconds},
        )

    def compile_job(job: Job) -> Iterator[Row]:
        start, program = time.perf_counter(), job.build(mesh)
        batch = job.data()[0]
        with jax.default_matmul_precision("highest" if check not in ("memory", "speed") else None):
            compiled = program.lower(batch).compile()
        yield judged(job.name, compiled, time.perf_counter() - start)
        stats, tiers = compiled.memory_analysis(), program.memory(batch).tiers
        taken = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        pinned = sum(tiers["pinned_host"].values())
        yield capacity_row(
            job.name, context, device=taken, pinned=job.state_bytes if pinned else 0, beside=0
        )
        if check == "memory":
            ratio = taken / sum(tiers["device"].values())
            figure = f"{ratio:.3f} ({taken / 2**30:.3g} GiB)"
            yield memory_row(
                f"{job.name}: compiled over program.memory",
                figure,
                ratio,
                ACCOUNT_RATIO,
                sizes,
                {"bytes": taken},
            )

    for job in jobs:
        yield from attempt(job.name, lambda job=job: compile_job(job))
    if check == "slices":
        yield from compile_forms(mesh, judged)
    if check in KINDS:
        yield from compile_kernels(check, mesh, sizes, judged)
