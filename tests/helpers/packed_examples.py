"""Tokenized examples that are generated, not read from a file."""

import pathlib
from collections.abc import Sequence

import numpy as np
import packed_decoder as decoder

from zerojax import data
from zerojax.data.reading import Source


def examples_of(
    lengths: Sequence[int] | np.ndarray,
    counted: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
) -> data.Examples:
    """Return examples of these lengths; by default all tokens count and all differ."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counted = np.ones(starts[-1], bool) if counted is None else counted
    tokens = np.arange(starts[-1], dtype=np.int32) if tokens is None else tokens
    return data.Examples(
        Source(pathlib.Path("a.jsonl")), tokens, counted, starts, np.arange(1, len(lengths) + 1)
    )


def uneven_examples() -> data.Examples:
    """Return 40 examples for `packed_decoder`, with masks of widely varying density."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, decoder.SEQ + 2, 40)
    counted = rng.random(lengths.sum()) < np.repeat(rng.choice([0.05, 0.5, 1.0], 40), lengths)
    counted[np.cumsum(lengths) - 1] = True
    return examples_of(
        lengths, counted, rng.integers(1, decoder.VOCAB, len(counted)).astype(np.int32)
    )
