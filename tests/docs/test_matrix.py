"""The compatibility matrix of the documentation is what `build_train_step` says."""

import itertools
import random
import re
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
    lines = generate_matrix.PAGE.read_text().splitlines()
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| ")
    ]
    reasons = {row[0]: row[3] for row in rows if len(row) == 4}
    column = str(names.index(other) + 1)
    (start,) = [n for n, row in enumerate(rows) if column in row[1:] and row[0] == ""]
    row = rows[start + 1 + names.index(one)]
    assert row[0] == f"{names.index(one) + 1} {one}"
    cell = row[rows[start].index(column)]
    return None if cell == "✓" else reasons.get(cell, cell)


@pytest.mark.parametrize("pair", QUICK, ids=" with ".join)
def test_a_pair_of_settings_does_what_the_page_says(pair):
    assert generate_matrix.combine(*pair) == said(*pair)


def test_the_page_says_which_settings_a_reason_refuses():
    text = generate_matrix.PAGE.read_text()
    assert re.search(r"\| update in backward \| clipping \| .*clip_norm", text)


def test_clipping_in_backward_is_said_to_be_refused():
    assert "clip_norm" in (said("update in backward", "clipping") or "")


@pytest.mark.exhaustive
def test_every_pair_of_settings_does_what_the_page_says():
    wrong = [pair for pair in ALL if generate_matrix.combine(*pair) != said(*pair)]
    assert not wrong
