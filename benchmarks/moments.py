"""Show the effect of bfloat16 moments on the loss of a GPT trained on real text.

The moments are float32, or bfloat16 with stochastic or nearest rounding.

    python benchmarks/moments.py --save benchmarks/results/moments_cpu2_202611.md

The three settings start from the same weights and see the same batches, for several seeds of the
weights: a difference matters if it exceeds the differences between seeds. Rounding to nearest is
not a setting of zerojax; it is included to show why rounding is stochastic. The text is the source
of Python's standard library (examples/text_data.py).
"""

import argparse
import dataclasses
import datetime
import itertools
import pathlib
import platform
import sys
import time

import jax
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import gpt  # noqa: E402
from text_data import batches, load_corpus, validation_batches  # noqa: E402

import zerojax as zj  # noqa: E402
from zerojax.optim import keep_in_bfloat16  # noqa: E402

RUNS = FLOAT32, STOCHASTIC, NEAREST = "float32", "bfloat16, stochastic", "bfloat16, nearest"


@dataclasses.dataclass(frozen=True)
class Found:
    """Results of one run.

    Attributes:
      losses: loss of each step.
      validation: held-out loss after the last step.
    """

    losses: np.ndarray
    validation: float


def train(name: str, b2: float, seed: int, options: argparse.Namespace) -> Found:
    """Train on one device, from the weights of a seed, and return the results."""
    c = gpt.GPTConfig(layers=options.layers, hidden=options.hidden, heads=4, seq=options.seq)
    text, held_out = load_corpus(options.data)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, 3e-3, max(1, options.steps // 10), options.steps, 3e-4
    )
    tx = optax.adamw(rate, b2=b2, weight_decay=0.1)
    tx = keep_in_bfloat16(tx, nearest=True) if name == NEAREST else tx
    config = zj.ZeroConfig(
        stage=3, clip_norm=1.0, moments="bfloat16" if name == STOCHASTIC else "float32"
    )
    data, losses = batches(text, c.seq, options.batch, 0), []
    with zj.build_train_step(
        gpt.layered_gpt(c), tx, config, zj.make_mesh(devices=jax.devices()[:1])
    ) as program:
        state = program.init(jax.random.key(seed))
        for _ in range(options.steps):
            state, metrics = program.step(state, next(data))
            losses.append(float(metrics["loss"]))
        held = [
            float(program.eval(state, batch))
            for batch in validation_batches(held_out, c.seq, options.batch, 16)
        ]
    return Found(np.asarray(losses), float(np.mean(held)))


def spread(values: list[float], form: str) -> str:
    """Return the mean of some figures and their range, as text."""
    return (
        f"{format(float(np.mean(values)), form)} "
        f"({format(min(values), form)} to {format(max(values), form)})"
    )


def table(
    found: dict[tuple[float, str, int], Found],
    options: argparse.Namespace,
    command: str,
    seconds: float,
) -> str:
    """Return the table in Markdown."""
    c = gpt.GPTConfig(layers=options.layers, hidden=options.hidden, heads=4, seq=options.seq)
    last = max(1, options.steps // 5)
    lines = [
        f"# Moments in bfloat16, {datetime.date.today():%Y-%m}",
        "",
        f"GPT of {c.layers} layers x {c.hidden}, {c.num_params:,} parameters, "
        f"{options.steps} steps of "
        f"{options.batch} x {c.seq} bytes of source text, float32, "
        "AdamW (3e-3 as a cosine, decay 0.1), clipped at norm 1.",
        f"jax {jax.__version__}, Python {platform.python_version()}, "
        f"{seconds / 60:.0f} min on a CPU. Command: `{command}`.",
        "",
        f"Means over {options.seeds} seeds of the weights, and the range over them. "
        f"A loss is the mean of the last {last} "
        "steps; the held-out loss, of 16 batches, is that after the last. "
        "Differences are between runs of one seed.",
        "",
        "| b2 | moments | loss | minus float32 | held-out loss | minus float32 |",
        "|---|---|---|---|---|---|",
    ]
    for b2, name in dict.fromkeys(key[:2] for key in found):
        runs, exact = (
            [found[b2, which, seed] for seed in range(options.seeds)] for which in (name, FLOAT32)
        )
        losses, right = (
            [float(run.losses[-last:].mean()) for run in each] for each in (runs, exact)
        )
        held, right_held = ([run.validation for run in each] for each in (runs, exact))
        cells = [
            spread(losses, ".4f"),
            spread([a - b for a, b in zip(losses, right, strict=True)], "+.4f"),
        ]
        cells += [
            spread(held, ".4f"),
            spread([a - b for a, b in zip(held, right_held, strict=True)], "+.4f"),
        ]
        lines.append(f"| {b2} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train every run, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--b2",
        type=float,
        nargs="+",
        default=[0.999, 0.95],
        help="values of AdamW's b2; each is a set of runs",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the weights")
    parser.add_argument(
        "--data", help="folder of text files; the Python standard library's source by default"
    )
    parser.add_argument("--save", help="file for the table")
    options = parser.parse_args()
    began, found = time.monotonic(), {}
    for b2, name, seed in itertools.product(options.b2, RUNS, range(options.seeds)):
        found[b2, name, seed] = train(name, b2, seed, options)
        print(
            f"b2 {b2}, {name}, seed {seed}: {time.monotonic() - began:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    text = table(
        found,
        options,
        " ".join(["python benchmarks/moments.py", *sys.argv[1:]]),
        time.monotonic() - began,
    )
    print(text)
    if options.save:
        pathlib.Path(options.save).write_text(text)


if __name__ == "__main__":
    main()
