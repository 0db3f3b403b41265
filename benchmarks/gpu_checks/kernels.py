"""Run or compile every case of pallas_kernels; report errors and times."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_checks.jobs import platform_name
from gpu_checks.mixes import Sizes
from gpu_checks.parts import Context
from gpu_checks.rows import Row, attempt, skipped

KINDS = ("matmul", "linear_cross_entropy", "quantize", "nf4")
"""Kinds of the cases in benchmarks/kernels.py, from their names; each kind is a check."""


def cases_of(kind: str, small: bool) -> list[Any]:
    """Return the cases of a kind."""
    import kernels

    def kind_of(name: str) -> str:
        op = name.split()[0]
        return "nf4" if op.endswith("nf4") else "quantize" if op.endswith("quantize") else op

    return [case for case in kernels.cases(small) if kind_of(case.name) == kind]


def check_kernels(kind: str, sizes: Sizes) -> Iterator[Row]:
    """Run the cases of a kind and report each program's time and error."""
    import kernels

    on_cpu = platform_name() == "cpu"
    small = sizes.few or on_cpu
    if on_cpu:
        yield Row("times", kernels.NO_MEASUREMENT)
    peak = kernels.peaks(small)
    for unit, rate in peak.items():
        yield Row(f"peak, {unit} a second", f"{rate:.4g}", values={"rate": rate})
    for case in cases_of(kind, small):

        def rows(case: Any = case) -> Iterator[Row]:
            found = kernels.measure(case, sizes.rounds)
            for name, one in found.items():
                title = f"{case.name}: {name}"
                if isinstance(one, str):
                    yield skipped(title, one)
                    continue
                words = kernels.words(case, name, found, peak)
                told = dict(
                    zip(
                        ("time", "rate", "of the peak", "over XLA's", "extra", "error over bound"),
                        words,
                        strict=True,
                    )
                )
                figure = ", ".join(
                    word if key in ("time", "rate") else f"{key} {word}"
                    for key, word in told.items()
                )
                values = {
                    "error": one.error,
                    "seconds": min(one.seconds),
                    "extra_bytes": one.extra_bytes,
                }
                yield Row(title, figure, "error over bound at most 1", one.error <= 1, values)

        yield from attempt(case.name, rows)


SWEPT = "matmul_measured.json"
"""Suffix of the file that keeps the sweep's rows for `pallas_kernels/matmul/measured.json`."""
SWEEP_SECONDS = 330.0
"""Seconds after which the sweep starts no further product."""


def check_sweep(context: Context) -> Iterator[Row]:
    """Find the fastest sizes of matmul's kernel, product by product.

    The kernel is compared with XLA's form (cuBLAS) and with JAX's own kernel. Each winner is
    written immediately to a table in the form of `pallas_kernels/matmul/measured.json`.
    """
    import kernels

    small = context.sizes.few or platform_name() == "cpu"
    path = context.keep / f"{context.part}.{SWEPT}"
    if not small:
        path.parent.mkdir(parents=True, exist_ok=True)
    for outcome in kernels.sweep_outcomes(
        small, context.sizes.rounds, None if small else path, SWEEP_SECONDS
    ):
        name = outcome.product.name
        if outcome.row is None:
            yield (
                skipped(name, outcome.note)
                if outcome.is_right
                else Row(name, outcome.note, "within its bound", ok=False)
            )
            continue
        took, rate, over_xla, over_jax, takes, sizes = outcome.words()
        row = outcome.row
        yield Row(
            name,
            f"{took}, {rate}; {over_xla} of XLA's time, {over_jax or 'not comparable with'} "
            "that of JAX's kernel; None takes "
            f"{takes}; {sizes}",
            values={
                "seconds": row.seconds,
                "xla_seconds": row.xla_seconds,
                "jax_seconds": row.jax_seconds or float("nan"),
            },
        )


def compile_kernels(
    kind: str, mesh: Any, sizes: Sizes, judged: Callable[[str, Any, float], Row]
) -> Iterator[Row]:
    """Compile the kernel of every case of a kind, or XLA's form of an op without a kernel."""
    import jax

    from zerojax.sharding import named

    for case in cases_of(kind, sizes.few):

        def rows(case: Any = case) -> Iterator[Row]:
            start = time.perf_counter()
            with jax.set_mesh(mesh):
                arrays = [
                    jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named(mesh, ()))
                    for a in case.arrays
                ]
                [step] = case.programs.get("mosaic") or case.programs["xla"]
                total = arrays[-1] if case.accumulates else None
                compiled = jax.jit(step, donate_argnums=1).lower(tuple(arrays), total).compile()
            yield judged(case.name, compiled, time.perf_counter() - start)

        yield from attempt(case.name, rows)
