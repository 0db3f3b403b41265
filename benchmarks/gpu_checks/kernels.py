"""The kernels of pallas_kernels: errors and times of every case, or programs compiled."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_checks.jobs import platform_name
from gpu_checks.mixes import Sizes
from gpu_checks.rows import Row, attempt, skipped


def check_kernels(sizes: Sizes) -> Iterator[Row]:
    """Run every case of benchmarks/kernels.py."""
    import kernels

    on_cpu = platform_name() == "cpu"
    small = sizes.few or on_cpu
    if on_cpu:
        yield Row("times", kernels.NO_MEASUREMENT)
    peak = kernels.peaks(small)
    for unit, rate in peak.items():
        yield Row(f"peak, {unit} a second", f"{rate:.4g}", values={"rate": rate})
    for case in kernels.cases(small):

        def rows(case: Any = case) -> Iterator[Row]:
            found = kernels.measure(case, sizes.rounds)
            for name, one in found.items():
                title = f"{case.name}: {name}"
                if isinstance(one, str):
                    yield skipped(title, one)
                    continue
                words = kernels.words(case, name, found, peak)
                told = dict(zip(("time", "rate", "of the peak", "over XLA's", "extra", "error over bound"), words, strict=True))
                figure = ", ".join(word if key in ("time", "rate") else f"{key} {word}" for key, word in told.items())
                values = {"error": one.error, "seconds": min(one.seconds), "extra_bytes": one.extra_bytes}
                yield Row(title, figure, "error over bound at most 1", one.error <= 1, values)

        yield from attempt(case.name, rows)


def compile_kernels(mesh: Any, sizes: Sizes, judged: Callable[[str, Any, float], Row]) -> Iterator[Row]:
    """Compile the kernel of every case, or XLA's form of an op that has none."""
    import jax
    import kernels

    from zerojax.sharding import named

    for case in kernels.cases(sizes.few):

        def rows(case: Any = case) -> Iterator[Row]:
            start = time.perf_counter()
            with jax.set_mesh(mesh):
                arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named(mesh, ())) for a in case.arrays]
                [step] = case.programs.get("mosaic") or case.programs["xla"]
                total = arrays[-1] if case.accumulates else None
                compiled = jax.jit(step, donate_argnums=1).lower(tuple(arrays), total).compile()
            yield judged(case.name, compiled, time.perf_counter() - start)

        yield from attempt(case.name, rows)
