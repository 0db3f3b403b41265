"""Time AdamW on the host over memory bandwidth: the fused kernel, jax.jit, torch and DeepSpeed.

    # 100 M parameters, 4 GB of memory
    python benchmarks/host_adam.py
    # PEER is an environment with torch and deepspeed
    python benchmarks/host_adam.py --peer-python PEER/bin/python
    python benchmarks/host_adam.py --out benchmarks/results/NAME.md

The kernel is built from `optax.adamw(1e-3)` itself, traced on one float32 array, and first compared
with the jitted rule on a million elements. The bound is an in-place `a *= c` by numba's `prange`,
the fastest access to this memory that was seen, scaled from its 8 bytes to the bytes that a
contender must touch. Each round runs every contender once, right after its bound. A time is the
best of a few calls, and a ratio is taken within a round. All contenders use the same cores. All
except jax.jit, which allocates its own arrays, also use numpy's memory, in huge pages if the system
has them.
"""

import argparse
import contextlib
import datetime
import importlib
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LEARNING_RATE, WEIGHT_DECAY, COUNT = 1e-3, 1e-4, 3
TOLERANCE = 1e-6  # over an array's largest element, after one update
NUM_CALLS = 5  # a time is the best of these
# Bytes per element. float32: gradients are read; moments and parameters are read and written.
# bfloat16: the gradients take half as much, and the parameters' copy adds as much again.
NUM_BYTES = 28
Contender = Callable[[], float]  # returns its seconds


def best_seconds(call: Callable[[], Any]) -> float:
    """Return the best time of a few calls."""
    found = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def fill(n: int) -> tuple[np.ndarray, ...]:
    """Return gradients, two moments and parameters of `n` cheap random numbers each."""
    few = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
    return np.resize(few, n), np.resize(few[::-1], n), np.resize(few**2, n), np.resize(few[1:], n)


def to_low(a: np.ndarray) -> np.ndarray:
    """Return an array in bfloat16."""
    import jax.numpy as jnp

    return np.asarray(a, jnp.bfloat16)


# --- torch and DeepSpeed, in their own environment ------------------------------------------------


def serve_peers(n: int, threads: int) -> None:
    """Print the names of the peers' contenders, then time the contender that each line names."""
    with contextlib.redirect_stdout(sys.stderr):  # deepspeed prints
        torch = importlib.import_module("torch")
        torch.set_num_threads(threads)
        contenders: dict[str, Contender] = {}
        g, _, _, p = (torch.from_numpy(a) for a in fill(n))

        def time_steps(adam: Any) -> Contender:
            parameter.grad = g
            adam.step()
            for state in adam.state.values():  # numpy's memory, as for the kernel
                state.update(
                    {
                        k: torch.from_numpy(s.numpy().copy())
                        for k, s in state.items()
                        if k.startswith("exp_avg")
                    }
                )
            return lambda: best_seconds(adam.step)

        parameter = torch.nn.Parameter(p)
        options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
        contenders[f"torch {torch.__version__} AdamW, fused"] = time_steps(
            torch.optim.AdamW([parameter], fused=True, **options)
        )
        with contextlib.suppress(ImportError):
            deepspeed = importlib.import_module("deepspeed")
            adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
                [parameter], adamw_mode=True, **options
            )
            name = f"DeepSpeed {deepspeed.__version__} CPUAdam"
            contenders[name] = time_steps(adam)
            low_g, low_p = g.bfloat16(), p.bfloat16()

            def step_low() -> None:
                g.copy_(low_g)
                adam.step()
                low_p.copy_(parameter.data)

            contenders[f"{name}, bf16: cast, step, copy"] = lambda: best_seconds(step_low)
    print("\t".join(contenders), flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            seconds = contenders[line.rstrip("\n")]()
        print(seconds, flush=True)


@contextlib.contextmanager
def peers(python: str | None, n: int, threads: int) -> Iterator[dict[str, Contender]]:
    """Start `serve_peers` in the environment of `python`, and yield its contenders."""
    if python is None:
        yield {}
        return
    command = [python, __file__, "--serve", "--params", str(n), "--threads", str(threads)]
    env = os.environ | {
        "PATH": f"{pathlib.Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": str(threads),
    }
    env |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        send, receive = process.stdin, process.stdout

        def ask(name: str) -> float:
            send.write(f"{name}\n")
            send.flush()
            return float(receive.readline())

        yield {
            name: lambda name=name: ask(name)
            for name in receive.readline().rstrip("\n").split("\t")
        }
        send.close()


# --- the kernel, jax.jit and the bound ------------------------------------------------------------


def adamw_rule(low: bool) -> tuple[Callable[..., Any], Any]:
    """Return optax's update of one array as a function, and its jaxpr.

    The function takes parameters, state and gradients, and returns parameters and state. If `low`,
    gradients are bfloat16, and the parameters are also returned in bfloat16. With this order jit
    reuses each donated buffer in its own place.
    """
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def rule(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads.astype(jnp.float32), opt_state, params)
        new: Any = optax.apply_updates(params, updates)
        return (new, opt_state, new.astype(jnp.bfloat16)) if low else (new, opt_state)

    params = jax.ShapeDtypeStruct((8,), jnp.float32)
    grads = jax.ShapeDtypeStruct((8,), jnp.bfloat16 if low else jnp.float32)
    return rule, jax.make_jaxpr(rule)(params, jax.eval_shape(tx.init, params), grads)


def build_adamw(low: bool) -> Callable[..., None]:
    """Return the kernel as a function of arrays and a number of threads.

    The arrays are parameters, two moments, gradients, and the bfloat16 copy of the parameters.
    """
    from host_offload.host_update import build_kernel

    kernel = build_kernel(adamw_rule(low)[1], [(0, 0), (2, 2), (3, 3)])
    assert kernel.bytes_per_element == NUM_BYTES
    count = np.zeros((), np.int32)

    def update(params: Any, m: Any, v: Any, grads: Any, copy: Any, threads: int) -> None:
        kernel(
            [params, COUNT, m, v, grads],
            [None, count, None, None, *([copy] if low else [])],
            threads,
        )

    return update


def jit_state(m: Any, v: Any) -> Any:
    """Return the state of optax.adamw with moments m and v."""
    import jax.numpy as jnp
    import optax

    return (
        optax.ScaleByAdamState(jnp.int32(COUNT), jnp.array(m), jnp.array(v)),
        optax.EmptyState(),
        optax.EmptyState(),
    )


def largest_difference(n: int = 1_000_000) -> float:
    """Return how far the kernel's update of `n` elements is from the jitted rule's.

    Differences are divided by an array's largest element.
    """
    import jax
    import jax.numpy as jnp

    found = []
    for low in (False, True):
        g, m, v, p = fill(n)
        g = to_low(g) if low else g
        new, (state, *_), *_ = jax.jit(adamw_rule(low)[0])(jnp.array(p), jit_state(m, v), g)
        copy = np.zeros(n, jnp.bfloat16)
        build_adamw(low)(p, m, v, g, copy, 2)
        found += [
            np.abs(a - b).max() / np.abs(b).max()
            for a, b in ((p, new), (m, state.mu), (v, state.nu))
        ]
        assert not low or (copy == p.astype(jnp.bfloat16)).all()
    return float(max(found))


def own_contenders(n: int, threads: int) -> tuple[Contender, dict[str, Contender]]:
    """Return the bound (seconds for 8 bytes per element) and this environment's contenders."""
    import jax
    import jax.numpy as jnp
    import numba

    @numba.njit(parallel=True)
    def multiply(a: Any, c: Any) -> None:
        for i in numba.prange(a.size):
            a[i] *= c

    numba.set_num_threads(threads)
    grads, m, v, params = fill(n)
    low_grads, low_params = to_low(grads), to_low(params)
    version = jax.__version__
    contenders: dict[str, Contender] = {}
    for low, name in ((False, "fp32"), (True, "bf16 gradients in, parameters out")):
        update = build_adamw(low)
        args = (params, m, v, low_grads if low else grads, low_params, threads)
        contenders[f"fused kernel, {name}"] = lambda update=update, args=args: best_seconds(
            lambda: update(*args)
        )
    for low, name in ((False, "fp32"), (True, "bf16 gradients in, parameters out")):
        jitted = jax.jit(adamw_rule(low)[0], donate_argnums=(0, 1))

        def run_jitted(low: bool = low, jitted: Any = jitted) -> float:
            # Allocated per round: keeping them would double this program's memory.
            held = [jnp.array(params), jit_state(m, v)]
            given = jnp.asarray(low_grads if low else grads)

            def step() -> None:
                held[0], held[1], *_ = jax.block_until_ready(jitted(*held, given))

            step()
            return best_seconds(step)

        contenders[f"jax {version} jit, donated, {name}"] = run_jitted
    one = np.float32(1)
    multiply(grads, one)
    return lambda: best_seconds(lambda: multiply(grads, one)), contenders


# --- all contenders, in rounds --------------------------------------------------------------------


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system reports no name."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def table(n: int, threads: int, bounds: Any, seconds: Any, difference: float, command: str) -> str:
    """Return the report in Markdown.

    Args:
      n: number of parameters.
      threads: number of threads.
      bounds: seconds of the bound per round, by contender.
      seconds: seconds of the contender per round, by contender.
      difference: largest difference of the kernel from the jitted rule.
      command: command that ran the benchmark.
    """
    versions = [
        f"{name} {importlib.import_module(name).__version__}"
        for name in ("jax", "numba", "numpy", "optax")
    ]
    rounds = len(next(iter(seconds.values())))
    bandwidth = [NUM_BYTES * n / t / 1e9 for times in bounds.values() for t in times]
    lines = [
        f"# AdamW on the host, {datetime.date.today():%Y-%m}",
        "",
        f"{n / 1e6:g} M parameters, float32 parameters and moments, {threads} threads.",
        f"Hardware: {threads} cores of {cpu_name()}. "
        f"Versions: {', '.join(versions)}, Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
        f"{rounds} rounds; a round runs every contender once (the best of {NUM_CALLS} calls), "
        "and just before it the bound: an "
        f"in-place multiply, scaled to {NUM_BYTES} bytes a parameter. "
        f"Its bandwidth was {statistics.median(bandwidth):.0f} "
        f"GB/s ({min(bandwidth):.0f}-{max(bandwidth):.0f}). "
        "A ratio is taken within a round; the median and the range over "
        "rounds are shown. Largest difference of the kernel from the jitted rule, "
        "after one update of 1 M elements, over the "
        f"array's largest element: {difference:.1e}.",
        "",
        "| contender | ms | over the bound | range |",
        "|---|---|---|---|",
    ]
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, bounds[name], strict=True)]
        lines.append(
            f"| {name} | {1e3 * statistics.median(times):.1f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f}-{max(ratios):.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare the kernel with the rule, run all rounds, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="cores that every contender uses",
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--peer-python", help="Python of an environment with torch and, optionally, deepspeed"
    )
    parser.add_argument("--out", help="file for the table")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    n, threads = options.params, options.threads
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < threads <= len(cores):
        parser.error(f"--threads {threads}: choose 1 to {len(cores)}, the cores that are available")
    os.sched_setaffinity(0, cores[:threads])  # before XLA counts the cores
    if options.serve:
        serve_peers(n, threads)
        return
    # The bound's threads must not spin while others are timed.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "passive"}
    difference = largest_difference()
    bound, contenders = own_contenders(n, threads)
    bounds: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    with peers(options.peer_python, n, threads) as others:
        contenders |= others
        for index in range(options.rounds):
            for name, contender in contenders.items():
                time.sleep(0.2)  # the previous contender's threads may spin for a while
                bounds.setdefault(name, []).append(bound() * NUM_BYTES / 8)
                seconds.setdefault(name, []).append(contender())
            parts = [f"{name}: {seconds[name][-1] / bounds[name][-1]:.2f}" for name in contenders]
            print(f"round {index + 1}: {'; '.join(parts)}", flush=True)
    words = [w if w != options.peer_python else "PEER/bin/python" for w in sys.argv[1:]]
    text = table(
        n,
        threads,
        bounds,
        seconds,
        difference,
        " ".join(["python benchmarks/host_adam.py", *words]),
    )
    print(f"\n{text}")
    if options.out:
        pathlib.Path(options.out).write_text(text)
    if difference > TOLERANCE:
        sys.exit(
            f"the kernel differs from the jitted rule by {difference:.1e}, more than {TOLERANCE:g}"
        )


if __name__ == "__main__":
    main()
