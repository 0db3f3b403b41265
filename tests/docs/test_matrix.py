"""The compatibility matrix of the documentation is what `build_train_step` says."""

import itertools
import random
import sys

import blocks
import pytest

sys.path.insert(0, str(blocks.ROOT / "docs"))
import generate_matrix

ALL = list(itertools.combinations(generate_matrix.FEATURES, 2))
QUICK = random.Random(0).sample(ALL, 8)


def said(one: str, other: str) -> str | None:
    """Return what the page says of a pair, as `generate_matrix.combine` returns it."""
    names = list(generate_matrix.FEATURES)
    rows = [line.split(" | ") for line in generate_matrix.PAGE.read_text().splitlines()]
    reasons = {
        row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows if len(row) == 2
    }
    row = next(row for row in rows if row[0] == f"| {names.index(one) + 1} {one}")
    cell = row[1 + names.index(other)].removesuffix(" |")
    return None if cell == "✓" else reasons.get(cell, cell)


@pytest.mark.parametrize("pair", QUICK, ids=" with ".join)
def test_a_pair_of_settings_does_what_the_page_says(pair):
    assert generate_matrix.combine(*pair) == said(*pair)


def test_clipping_in_backward_is_said_to_be_refused():
    assert "clip_norm" in (said("update in backward", "clipping") or "")


@pytest.mark.exhaustive
def test_every_pair_of_settings_does_what_the_page_says():
    wrong = [pair for pair in ALL if generate_matrix.combine(*pair) != said(*pair)]
    assert not wrong
