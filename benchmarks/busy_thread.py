"""Time steps with callbacks, alone and next to a busy Python thread.

The difference shows what Python's switch interval costs such a step.

    # about a minute
    python benchmarks/busy_thread.py --save benchmarks/results/busy_thread_cpu2_202611.md

The model has 24 small layers, so callbacks take most of a step. The thread counts in a loop, as a
tokenizer written in Python would keep the interpreter busy. Each round times every case; figures
are medians over the rounds, with their range.
"""

import argparse
import contextlib
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from contenders import cpu_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import zerojax as zj  # noqa: E402
from zerojax.runtime import quick_switches  # noqa: E402

LAYERS, HIDDEN, VOCAB = 24, 128, 512
BATCH, SEQ = 4, 32
STEPS = 8
PYTHONS = 0.005
"""Python's default switch interval, in seconds."""


def model() -> zj.LayeredModel:
    """Return a model whose layers have two matrix products each."""

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        logits = (x @ p).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    return zj.LayeredModel(
        num_layers=LAYERS,
        init_embed=lambda key: jax.random.normal(key, (VOCAB, HIDDEN)),
        embed=lambda p, batch, key: p[batch["tokens"]],
        init_block=lambda key: {name: jax.random.normal(key, (HIDDEN, HIDDEN)) for name in "ab"},
        block=lambda p, x, key: x + jnp.tanh(x @ p["a"]) @ p["b"],
        init_head=lambda key: jax.random.normal(key, (HIDDEN, VOCAB)),
        head=head,
    )


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Run a thread that holds Python's interpreter lock whenever it can."""
    ends = threading.Event()

    def count() -> None:
        n = 0
        while not ends.is_set():
            for _ in range(1000):
                n += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def ours() -> float:
    """Return the switch interval during steps with callbacks, in seconds."""
    with quick_switches():
        return round(sys.getswitchinterval(), 6)


def measure(config: dict[str, Any], rounds: int) -> dict[tuple[bool, float], list[float]]:
    """Return each round's seconds per step, by (is a thread busy, switch interval in seconds)."""
    batch = {name: jnp.zeros((BATCH, SEQ), jnp.int32) for name in ("tokens", "targets")}
    found: dict[tuple[bool, float], list[float]] = {}
    with zj.build_train_step(
        model(), optax.adamw(1e-3), zj.ZeroConfig(**config), zj.make_mesh()
    ) as program:
        state = program.init(jax.random.key(0))
        for _ in range(3):
            state, _ = jax.block_until_ready(program.step(state, batch))
        for _ in range(rounds):
            for is_busy in (False, True):
                for interval in (PYTHONS, ours()):
                    with quick_switches(), busy_thread() if is_busy else contextlib.nullcontext():
                        sys.setswitchinterval(interval)  # the steps inside leave it unchanged
                        seconds = []
                        for _ in range(STEPS):
                            start = time.perf_counter()
                            state, _ = jax.block_until_ready(program.step(state, batch))
                            seconds.append(time.perf_counter() - start)
                    sys.setswitchinterval(PYTHONS)
                    found.setdefault((is_busy, interval), []).append(statistics.median(seconds))
    return found


def main() -> None:
    """Measure, print the table, and write it to --save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=pathlib.Path, help="file to write")
    options = parser.parse_args()
    rows = [
        "| states | switch interval | alone, ms | beside a busy thread, ms | over alone |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        on_disk = {
            "params": "nvme",
            "grads": "nvme",
            "opt_state": "nvme",
            "update": "in_backward",
            "swap_dir": folder,
        }
        on_host = {"opt_state": "pinned_host", "update_on": "host", "update": "in_backward"}
        for name, config in (
            ("all on disk", on_disk),
            ("opt_state in host memory, updated there", on_host),
        ):
            found = measure(config, options.rounds)
            for interval, whose in ((PYTHONS, "Python's"), (ours(), "ours")):
                alone, busy = found[False, interval], found[True, interval]
                ratios = [b / a for a, b in zip(alone, busy, strict=True)]
                cells = [name, f"{1e3 * interval:g} ms, {whose}"]
                cells += [
                    f"{1e3 * statistics.median(s):.0f} ({1e3 * min(s):.0f}-{1e3 * max(s):.0f})"
                    for s in (alone, busy)
                ]
                cells += [f"{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})"]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    text = "\n".join(
        [
            "# Steps that call back, beside a busy thread, 2026-11",
            "",
            f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}; {versions}. "
            f"{LAYERS} layers of width {HIDDEN}, "
            f"{BATCH} x {SEQ} tokens. Medians of {options.rounds} rounds, with the range; "
            f"each is the median of {STEPS} steps.",
            "",
            f"Command: `python benchmarks/busy_thread.py --rounds {options.rounds} --save FILE`.",
            "",
            *rows,
            "",
        ]
    )
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
