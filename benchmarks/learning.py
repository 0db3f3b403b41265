"""Train a small model from random weights, then fine-tune it by SFT and DPO; a rule judges it.

    JAX_PLATFORMS=cpu python benchmarks/learning.py --save results.md

A Llama of 0.9 million parameters learns the docstrings of Python's standard library from scratch,
then repeats words in small or in capital letters (SFT), and then in capital letters (DPO). Both
fine-tunings train adapters with `examples/finetune.py`, over a base in float32 and over a base in
4 bits on a disk. PEFT and TRL repeat them: from the same folders, the same adapters to start from,
the same examples in the same order, and the same optimizer, with the base decoded from 4 bits where
ours is in 4 bits. The table compares the losses of each step, and what each model answers for
held-out words (`learning_parts.repeating`).
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from learning_parts import repeating, torch_runs, zerojax_runs
from learning_parts.repeating import Score, Words

SEQ = 84
"""Tokens of a row, which holds 4 examples or 2 pairs."""
SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 400)
"""Steps whose losses the table shows, besides the last."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
      config: sizes of the model.
      steps: steps from scratch, of SFT and of DPO.
      rows: rows of a batch.
      num_words: words to train on, and held-out words.
      rank: rank of the adapters.
      rates: learning rates from scratch, of SFT and of DPO.
    """

    config: dict[str, int]
    steps: tuple[int, int, int]
    rows: int
    num_words: tuple[int, int]
    rank: int
    rates: tuple[float, float, float]


FULL = Sizes(repeating.CONFIG, (500, 400, 60), 16, (900, 120), 16, (4e-3, 2e-3, 3e-5))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One fine-tuning by both.

    Attributes:
      tier: where the base is.
      method: "sft" or "dpo".
      ours: loss of each step with zerojax.
      theirs: loss of each step with PEFT and TRL.
      our_score: score of our adapters, whose answers come from `zj.generate`.
      exported_score: score of our exported adapters, whose answers come from transformers.
      their_score: score of their adapters.
    """

    tier: str
    method: str
    ours: Sequence[float]
    theirs: Sequence[float]
    our_score: Score
    exported_score: Score
    their_score: Score

    @property
    def largest_difference(self) -> float:
        """Largest difference of the losses of one step."""
        return float(np.max(np.abs(np.subtract(self.ours, self.theirs))))


def pretrain(folder: pathlib.Path, sizes: Sizes) -> tuple[Words, list[float]]:
    """Write the data, and train `base` from random weights; return the words and the losses."""
    sources = repeating.read_sources()
    words = repeating.choose_words(sources, *sizes.num_words)
    repeating.write_data(folder, repeating.find_docstrings(sources), words)
    repeating.write_model(folder / "random", sizes.config)
    arguments = ["--model", "random", "--data", "texts.jsonl", "--form", "text"]
    arguments += ["--too-long", "truncate", "--seq", "128", "--batch-size", str(sizes.rows)]
    arguments += ["--steps", str(sizes.steps[0]), "--learning-rate", str(sizes.rates[0])]
    losses = zerojax_runs.train(folder, "base", arguments)
    torch_runs.write_adapters(folder / "base", sizes.rank, folder / "start")
    return words, losses


def compare(folder: pathlib.Path, sizes: Sizes, words: Words, tier: str) -> list[Comparison]:
    """Fine-tune by SFT and then by DPO, each with zerojax and with PEFT and TRL."""
    prefix = f"tier{list(zerojax_runs.TIERS).index(tier)}"
    base, their_base = folder / "base", folder / "base"
    prompts = [repeating.prompt_of(word) for word in words.held_out]
    fields = zerojax_runs.TIERS[tier]
    options: list[str] = []
    if fields:
        their_base = folder / f"{prefix}_decoded"
        zerojax_runs.write_decoded(base, tier, their_base)
        (folder / "swap").mkdir(exist_ok=True)
        options += ["--swap-dir", str(folder / "swap")]
        for name, value in fields.items():
            options += [f"--{name.replace('_', '-')}", str(value)]
    found = []
    starts = folder / "start", folder / "start"
    for method, steps, rate in zip(("sft", "dpo"), sizes.steps[1:], sizes.rates[1:], strict=True):
        name = f"{prefix}_{method}"
        arguments = ["--model", str(base), "--data", str(folder / f"{method}.jsonl")]
        arguments += ["--method", method, "--seq", str(SEQ), "--batch-size", str(sizes.rows)]
        arguments += ["--steps", str(steps), "--learning-rate", str(rate), *options]
        arguments += ["--adapters", str(starts[0])]
        if method == "sft":
            arguments += ["--form", "prompt"]
        ours = zerojax_runs.train(folder, name, arguments)

        batches = zerojax_runs.list_examples(arguments, steps)
        style = {word: i % 2 == 0 for i, word in enumerate(words.train)}
        lines = [repeating.record(method, word, style[word]) for batch in batches for word in batch]
        theirs = torch_runs.train(
            method, their_base, starts[1], lines, len(batches[0]), rate, folder / f"{name}_theirs"
        )
        starts = folder / name, folder / f"{name}_theirs"
        answers = zerojax_runs.answer(base, starts[0], tier, words.held_out)
        exported = torch_runs.answer(their_base, starts[0], prompts)
        their_answers = torch_runs.answer(their_base, starts[1], prompts)
        scores = [repeating.judge(words.held_out, a) for a in (answers, exported, their_answers)]
        found.append(Comparison(tier, method, ours, theirs, *scores))
        print(found[-1], flush=True)
    return found


def run(folder: pathlib.Path, sizes: Sizes) -> tuple[list[float], Score, list[Comparison]]:
    """Return the losses from scratch, the score before fine-tuning, and all comparisons."""
    words, losses = pretrain(folder, sizes)
    print(f"from scratch: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    before = zerojax_runs.answer(folder / "base", None, "float32", words.held_out)
    score = repeating.judge(words.held_out, before)
    found = []
    for tier in zerojax_runs.TIERS:
        found += compare(folder, sizes, words, tier)
    return losses, score, found


def format_table(
    sizes: Sizes, losses: Sequence[float], before: Score, found: Sequence[Comparison]
) -> str:
    """Return the results as Markdown."""
    num_held_out = sizes.num_words[1]
    lines = [
        f"From scratch, {sizes.steps[0]} steps on docstrings: loss {losses[0]:.3f} -> "
        f"{np.mean(losses[-10:]):.3f} (mean of the last 10 steps).",
        "",
        f"Fractions of {num_held_out} held-out words that are repeated correctly, and in capital "
        "letters (greedy):",
        "",
        "| base | after | zerojax: correct | capitals | exported, in transformers: correct | "
        "capitals | PEFT and TRL: correct | capitals |",
        "|---|---|---|---|---|---|---|---|",
        f"| float32 | nothing | {before.correct:.3f} | {before.capitals:.3f} | | | | |",
    ]
    for c in found:
        scores = (c.our_score, c.exported_score, c.their_score)
        cells = " | ".join(f"{s.correct:.3f} | {s.capitals:.3f}" for s in scores)
        lines.append(f"| {c.tier} | {c.method.upper()} | {cells} |")
    for c in found:
        steps = [step for step in SHOWN if step < len(c.ours)] + [len(c.ours)]
        lines += [
            "",
            f"Losses of {c.method.upper()}, base in {c.tier}; the largest difference of a step is "
            f"{c.largest_difference:.2g}:",
            "",
            "| step | " + " | ".join(map(str, steps)) + " |",
            "|---" * (len(steps) + 1) + "|",
            "| zerojax | " + " | ".join(f"{c.ours[step - 1]:.5f}" for step in steps) + " |",
            "| PEFT and TRL | " + " | ".join(f"{c.theirs[step - 1]:.5f}" for step in steps) + " |",
        ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--save", type=pathlib.Path, help="file to write the table to")
    save = parser.parse_args().save
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = run(pathlib.Path(folder), FULL)
    minutes = (time.monotonic() - start) / 60
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "torch", "transformers", "peft", "trl")
    )
    text = (
        f"# A task learned from scratch, by SFT and by DPO, {time.strftime('%Y-%m')}\n\n"
        f"{versions}, Python {platform.python_version()}, {minutes:.0f} min on a CPU. Command: "
        f"`python benchmarks/learning.py`. `benchmarks/learning_parts/repeating.py` describes the "
        f"task.\n\n{format_table(FULL, *results)}\n"
    )
    print(text)
    if save is not None:
        save.write_text(text)


if __name__ == "__main__":
    main()
