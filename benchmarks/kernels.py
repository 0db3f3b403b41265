"""Time the ops of pallas_kernels: the kernel, XLA's fused form, and the unfused programs.

    # a Hopper GPU; about 2 minutes
    python benchmarks/kernels.py --save benchmarks/results/NAME.md
    # any machine: checks correctness, measures nothing
    python benchmarks/kernels.py --small
    # a Hopper GPU: sizes of matmul's kernel
    python benchmarks/kernels.py sweep --save pallas_kernels/matmul/measured.json

The contenders of each case are

    mosaic     the kernel
    xla        the same op in jnp in one program: cuBLAS for products, and fusions as XLA chooses
    unfused    each operation in its own program, as without a compiler

The table shows the time of a call (the median over rounds, each of which runs every contender in
turn), TFLOP/s or GB/s, their share of the chip's measured peak, the time over XLA's, the bytes in
addition to arguments and results by the compiler's count, and the error against float64 on 64 rows
of random inputs, over the bound that the op states.

The chip's peak is measured, not quoted: for products, the best of `jnp.dot` of bfloat16 over three
sizes; for memory, a copy of 1 GiB, counting bytes read and written. A case that the kernel does not
serve shows the reason. On a CPU the kernel does not run, times say nothing about a GPU, and every
table says so.

`sweep` searches for the fastest sizes of `matmul`'s kernel (`matmul_sweep`), compares them with
XLA's form and with JAX's own kernel, and writes each product's row to the table immediately, so a
sweep that is cut off keeps what it found. After `--seconds` it starts no further product.
"""

import argparse
import dataclasses
import datetime
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matmul_sweep
from kernel_cases import XLA, Case, Step, cases

NO_MEASUREMENT = "Times of a CPU: no measurement of these ops, which are for GPUs."


@dataclasses.dataclass(frozen=True)
class Found:
    """Results of one contender in one case.

    Attributes:
      seconds: seconds of a call in each round.
      extra_bytes: bytes in addition to arguments and result, by the compiler's count.
      error: error over its bound.
    """

    seconds: list[float]
    extra_bytes: int
    error: float


class Contender:
    """The compiled steps of a case, ready for repeated calls.

    Attributes:
      extra_bytes: largest number of bytes that a call takes in addition to its arguments and its
        result, by the compiler's count.

    Raises:
      NotImplementedError: if the kernel cannot serve the case.
    """

    def __init__(self, case: Case, steps: Sequence[Step], arrays: tuple[Any, ...]):
        """Compile a contender's steps for the case's arguments."""
        self.case, self.arrays, self.programs, self.extra_bytes = case, arrays, [], 0
        self.value = jnp.copy(arrays[-1]) if case.accumulates else None
        value = self.value
        for n, step in enumerate(steps):
            with warnings.catch_warnings():
                # A buffer cannot be reused if the result has another shape.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                compiled = jax.jit(step, donate_argnums=1).lower(arrays, value).compile()
            stats: Any = compiled.memory_analysis()
            own = stats.temp_size_in_bytes + (num_bytes(value) if n else 0)
            value = jax.eval_shape(step, arrays, value)
            is_last = n + 1 == len(steps)
            self.extra_bytes = max(
                self.extra_bytes,
                own + (0 if is_last else num_bytes(value)) - stats.alias_size_in_bytes,
            )
            self.programs.append(compiled)

    def __call__(self) -> Any:
        """Run all steps and return the result, without waiting for it."""
        value = self.value
        for program in self.programs:
            value = program(self.arrays, value)
        self.value = value if self.case.accumulates else None
        return value

    def seconds(self, repeats: int) -> float:
        """Return the average seconds of `repeats` calls in a row."""
        start, result = time.perf_counter(), None
        for _ in range(repeats):
            result = self()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / repeats


def num_bytes(tree: Any) -> int:
    """Return the total bytes of a tree of arrays or abstract arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def measure(case: Case, rounds: int) -> dict[str, Found | str]:
    """Return each contender's results, or the reason why it did not run."""
    found: dict[str, Found | str] = {}
    arrays, ready = case.draw(), {}
    for name, steps in case.programs.items():
        try:
            contender = Contender(case, steps, arrays)
        except NotImplementedError as e:
            found[name] = str(e)
            continue
        found[name] = Found([], contender.extra_bytes, case.error(arrays, contender()))
        ready[name] = (contender, max(1, min(50, int(0.05 / contender.seconds(1)))))
    for _ in range(rounds):
        for name, (contender, repeats) in ready.items():
            one: Any = found[name]
            one.seconds.append(contender.seconds(repeats))
    return found


def peaks(small: bool) -> dict[str, float]:
    """Return this device's measured peaks: "flops" of products and "bytes" of copies, per second.

    Products are of bfloat16, and operands are random: equal numbers switch fewer transistors, so a
    GPU at its power limit multiplies ones 13 % faster than random numbers.
    """

    def best(f: Callable[[Any], Any], x: Any) -> float:
        arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
        steps: list[Step] = [lambda arrays, _: f(arrays[0])]
        case = Case(name="peak", work=0, unit="", arrays=arrays, programs={}, error=lambda *_: 0.0)
        contender = Contender(case, steps, (x,))
        jax.block_until_ready(contender())
        return min(contender.seconds(10) for _ in range(3))

    def product(x: Any) -> Any:
        return jnp.dot(x, x, preferred_element_type=jnp.float32).astype(x.dtype)

    def random(*shape: int, dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, dtype)

    sizes = (256,) if small else (4096, 8192, 16384)
    flops = max(2.0 * n**3 / best(product, random(n, n, dtype=jnp.bfloat16)) for n in sizes)
    x = random(1 << (20 if small else 28), dtype=jnp.float32)
    return {"flops": flops, "bytes": 2.0 * x.nbytes / best(jnp.negative, x)}


def words(
    case: Case, name: str, found: Mapping[str, Found | str], peak: Mapping[str, float]
) -> list[str]:
    """Return the cells of a contender's row.

    They show time, rate, share of the peak, time over XLA's, extra memory, and error.
    """
    one, xla = found[name], found[XLA]
    if isinstance(one, str):
        return [f"not run: {one}", *[""] * 5]
    seconds = statistics.median(one.seconds)
    rate, unit = case.work / seconds, "TFLOP/s" if case.unit == "flops" else "GB/s"
    over = ""
    if isinstance(xla, Found):
        ratios = [a / b for a, b in zip(one.seconds, xla.seconds, strict=True)]
        over = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return [
        f"{1e3 * seconds:.3g} ms",
        f"{rate / (1e12 if case.unit == 'flops' else 1e9):.4g} {unit}",
        f"{rate / peak[case.unit]:.2f}",
        over,
        f"{one.extra_bytes / 2**20:.3g} MiB",
        f"{one.error:.2f}",
    ]


def table(small: bool, rounds: int) -> Iterator[tuple[str, bool]]:
    """Yield the lines of the table, each with whether its error is within its bound."""
    device, peak = jax.devices()[0], peaks(small)
    yield f"# Kernels on {device.device_kind}, {datetime.date.today():%Y-%m}", True
    yield "", True
    if device.platform == "cpu":
        yield NO_MEASUREMENT, True
        yield "", True
    yield (
        f"jax {jax.__version__}; {rounds} rounds; "
        f"peak measured: {peak['flops'] / 1e12:.4g} TFLOP/s (bfloat16), "
        f"{peak['bytes'] / 1e9:.4g} GB/s.",
        True,
    )
    yield "", True
    yield (
        "| case | contender | time | rate | of the peak | time over XLA's | extra memory "
        "| error over bound |",
        True,
    )
    yield "|---|---|---|---|---|---|---|---|", True
    for case in cases(small):
        found = measure(case, rounds)
        for name, one in found.items():
            right = isinstance(one, str) or one.error <= 1
            yield (
                "| " + " | ".join([case.name, name, *words(case, name, found, peak)]) + " |",
                right,
            )


def sweep_outcomes(
    small: bool, rounds: int, save: pathlib.Path | None = None, seconds: float | None = None
) -> Iterator[matmul_sweep.Outcome]:
    """Yield the sweep's outcome for each product, after saving its row.

    Args:
      small: whether to sweep tiny products.
      rounds: number of rounds in which the winner, XLA's form and JAX's kernel take turns.
      save: table like `pallas_kernels/matmul/measured.json`, whose other rows are kept; None writes
        nothing.
      seconds: time after which no further product is started; the remaining products are reported
        as left out.
    """
    start = time.perf_counter()
    for product in matmul_sweep.swept(small):
        if seconds is not None and time.perf_counter() - start > seconds:
            yield matmul_sweep.Outcome(product, None, f"left out: {seconds:.0f} s are over")
            continue
        for outcome in matmul_sweep.sweep(product, Contender, rounds):
            if outcome.row is not None and save is not None:
                matmul_sweep.save_row(save, outcome.row)
            yield outcome


def sweep_table(outcomes: Iterable[matmul_sweep.Outcome]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a sweep's table, each with whether its result is right."""
    device = jax.devices()[0]
    yield (
        f"# Sizes of matmul's kernel on {device.device_kind}, {datetime.date.today():%Y-%m}, "
        f"jax {jax.__version__}",
        True,
    )
    yield "", True
    yield "| product | time | rate | over XLA's | over JAX's kernel | None takes | sizes |", True
    yield "|---|---|---|---|---|---|---|", True
    for outcome in outcomes:
        yield "| " + " | ".join([outcome.product.name, *outcome.words()]) + " |", outcome.is_right


def main() -> None:
    """Print and save the table; the exit status is 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "command",
        nargs="?",
        choices=["sweep"],
        help="search for the fastest sizes of matmul's kernel",
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes: check correctness, measure nothing"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, help="for sweep: time after which no further product is started"
    )
    parser.add_argument(
        "--save", type=pathlib.Path, help="file for the table; for sweep, for the rows as JSON"
    )
    options = parser.parse_args()
    if jax.default_backend() == "cpu" and not options.small:
        parser.error(
            "this is a CPU; give --small, which runs every case there and measures nothing"
        )
    if options.small and options.command and options.save:
        parser.error(
            "--small measures nothing, so it cannot be saved in a table of measurements; "
            "leave out --save"
        )
    if options.command:
        written = sweep_table(
            sweep_outcomes(options.small, options.rounds, options.save, options.seconds)
        )
    else:
        written = table(options.small, options.rounds)
    lines, right = [], True
    for text, holds in written:
        print(text, flush=True)
        lines.append(text)
        right &= holds
    if options.save and not options.command:
        options.save.write_text("\n".join(lines) + "\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
