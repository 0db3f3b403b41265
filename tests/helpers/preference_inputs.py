"""Preferences in tests: records, a tiny model with its tokenizer, and packed rows."""

import pathlib
from typing import Any

import numpy as np
from chat_tokenizers import byte_tokenizer, write
from hf_models import write as write_model

from zerojax.data import PairRows, pack_pairs, read_preferences

VOCAB = 260
SEQ = 32


def records(count: int) -> list[dict[str, Any]]:
    """Return sums with a right answer, and a wrong and longer one."""
    return [
        {"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} or so"[: 4 + a % 5]}
        for a in range(count)
    ]


def write_inputs(
    folder: pathlib.Path, case: str = "llama", count: int = 8, **sizes: Any
) -> pathlib.Path:
    """Write a tiny model, its tokenizer and `pairs.jsonl`; return the model's folder."""
    write_model(case, folder / "model", vocab_size=VOCAB, **sizes)
    byte_tokenizer().save_pretrained(folder / "model")
    write(folder / "pairs.jsonl", records(count))
    return folder / "model"


def pair_rows(folder: pathlib.Path, kind: str = "sigmoid", **options: Any) -> PairRows:
    """Return the packed rows of `pairs.jsonl`."""
    pairs = read_preferences(folder / "pairs.jsonl", byte_tokenizer())
    if kind == "kto":
        pairs = pairs.unpaired().with_mismatches()
    return pack_pairs(pairs, SEQ, **options)


def whole_batch(rows: PairRows, multiple: int = 2) -> dict[str, np.ndarray]:
    """Return all rows as one batch, filled up to a multiple."""
    count = -len(rows) % multiple
    listed = [rows[i] for i in range(len(rows))] + [rows.empty()] * count
    return {name: np.stack([row[name] for row in listed]) for name in listed[0]}
