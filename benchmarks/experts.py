"""Compare a GPT with experts and a dense GPT of the same active parameters, on the same tokens.

    python benchmarks/experts.py --save benchmarks/results/experts_cpu2.md

A token visits k of E experts, each 1 / k as wide as the dense MLP, so both models multiply equally
often per token, apart from the router. Both see the same batches, for several seeds of the weights.
Losses are of the tokens alone, without the losses that balance the experts. Experts need steps
before they pay, since each sees only a part of the tokens, so short runs favor the dense model. The
text is the source of Python's standard library (examples/text_data.py).
"""

import argparse
import dataclasses
import datetime
import pathlib
import platform
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import gpt  # noqa: E402
from text_data import batches, load_corpus, validation_batches  # noqa: E402

import zerojax as zj  # noqa: E402

EVAL_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Found:
    """Results of one run.

    Attributes:
      losses: loss of the tokens in each step.
      dropped: fraction of the choices that were dropped in each step; 0 without experts.
      validation: held-out loss after the last step.
      seconds: seconds of the steps after the first, which compiles.
    """

    losses: np.ndarray
    dropped: np.ndarray
    validation: float
    seconds: float


def build_configs(options: argparse.Namespace) -> dict[str, gpt.GPTConfig]:
    """Return the sizes of both models by name.

    Raises:
      ValueError: the MLP's width does not divide by top_k.
    """
    if 4 * options.hidden % options.top_k:
        raise ValueError(
            f"an MLP of width 4 x {options.hidden} does not divide by --top-k {options.top_k}"
        )
    dense = gpt.GPTConfig(layers=options.layers, hidden=options.hidden, heads=4, seq=options.seq)
    sparse = dataclasses.replace(
        dense,
        experts=options.experts,
        top_k=options.top_k,
        capacity_factor=options.capacity_factor,
        expert_hidden=4 * options.hidden // options.top_k,
    )
    return {"dense": dense, f"{options.experts} experts": sparse}


def read_loss(out: Any) -> float:
    """Return the loss of the tokens, from a step's metrics or what `program.eval` returned."""
    if not isinstance(out, dict):
        return float(out)
    return float(out["cross_entropy"] if "cross_entropy" in out else out["loss"])


def train(c: gpt.GPTConfig, seed: int, options: argparse.Namespace) -> Found:
    """Train on one device, from the weights of a seed, and return the results."""
    text, held_out = load_corpus(options.data)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, 3e-3, max(1, options.steps // 10), options.steps, 3e-4
    )
    tx = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    config = zj.ZeroConfig(stage=3, clip_norm=1.0)
    mesh = zj.make_mesh(devices=jax.devices()[:1])
    data = batches(text, c.seq, options.batch, 0)
    losses, dropped = [], []
    with zj.build_train_step(gpt.layered_gpt(c), tx, config, mesh) as program:
        state = program.init(jax.random.key(seed))
        start = time.monotonic()
        for step in range(options.steps):
            state, metrics = program.step(state, next(data))
            losses.append(read_loss(metrics))
            dropped.append(float(metrics.get("dropped_fraction", 0)))
            if step == 0:
                start = time.monotonic()
        seconds = time.monotonic() - start
        held = [
            read_loss(program.eval(state, batch))
            for batch in validation_batches(held_out, c.seq, options.batch, EVAL_BATCHES)
        ]
    return Found(np.asarray(losses), np.asarray(dropped), float(np.mean(held)), seconds)


def format_range(values: list[float], form: str) -> str:
    """Return the mean of some figures and their range."""
    low, mean, high = (format(f(values), form) for f in (min, np.mean, max))
    return f"{mean} ({low} to {high})"


def table(
    found: dict[str, list[Found]], options: argparse.Namespace, command: str, seconds: float
) -> str:
    """Return the table in Markdown; `found` has a result for each seed, by the model's name."""
    configs = build_configs(options)
    last = max(1, options.steps // 5)
    lines = [
        f"# Experts against a dense MLP, {datetime.date.today():%Y-%m}",
        "",
        f"GPT of {options.layers} layers x {options.hidden}, {options.steps} steps of "
        f"{options.batch} x {options.seq} bytes of source text, float32, AdamW (3e-3 as a cosine, "
        "decay 0.1), clipped at norm 1, on one device. A token visits "
        f"{options.top_k} experts, each 1 / {options.top_k} as wide as the MLP, with a capacity "
        f"factor of {options.capacity_factor}.",
        f"jax {jax.__version__}, Python {platform.python_version()}, {seconds / 60:.0f} min on "
        f"{jax.devices()[0].device_kind}. Command: `{command}`.",
        "",
        f"Means over {options.seeds} seeds of the weights, and the range over them. Losses are of "
        f"the tokens alone: the training loss of the last {last} steps, and the held-out loss of "
        f"{EVAL_BATCHES} batches after the last. Differences are between runs of one seed.",
        "",
        "| model | parameters | FLOP per token | dropped | loss | held-out loss | minus dense | "
        "ms per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        c = configs[name]
        pairs = zip(runs, found["dense"], strict=True)
        cells = [
            f"{c.num_params:,}",
            f"{c.flops_per_token:.4g}",
            f"{100 * np.mean([run.dropped[-last:].mean() for run in runs]):.1f} %",
            format_range([float(run.losses[-last:].mean()) for run in runs], ".4f"),
            format_range([run.validation for run in runs], ".4f"),
            format_range([run.validation - dense.validation for run, dense in pairs], "+.4f"),
            f"{1e3 * np.mean([run.seconds for run in runs]) / max(1, options.steps - 1):.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed options.

    Args:
      arguments: command-line arguments; None: use `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token visits")
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the weights")
    parser.add_argument(
        "--data", help="folder of text files; the Python standard library's source by default"
    )
    parser.add_argument("--save", help="file for the table")
    return parser.parse_args(arguments)


def main() -> None:
    """Train every run, and print and save the table."""
    options = parse()
    began, found = time.monotonic(), {}
    for name, c in build_configs(options).items():
        found[name] = []
        for seed in range(options.seeds):
            found[name].append(train(c, seed, options))
            print(
                f"{name}, seed {seed}: held-out loss {found[name][-1].validation:.4f}, "
                f"{time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    command = " ".join(["python benchmarks/experts.py", *sys.argv[1:]])
    text = table(found, options, command, time.monotonic() - began)
    print(text)
    if options.save:
        pathlib.Path(options.save).write_text(text)


if __name__ == "__main__":
    main()
