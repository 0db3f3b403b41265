"""Packing: every pair of a token and its successor occurs once, without overlap.

Each row is as full as best fit makes it.
"""

import itertools

import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_examples import examples_of

from zerojax import data


@st.composite
def packed(draw):
    seq = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(2, seq + 1), min_size=1, max_size=60))
    flags = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    counted = np.asarray(flags, bool)
    counted[np.cumsum(lengths) - 1] = True  # each example has a target
    return seq, examples_of(lengths, counted)


@settings(max_examples=80, deadline=None)
@given(packed())
def test_every_pair_is_in_the_rows_once(case):
    seq, examples = case
    rows = data.pack(examples, seq)
    seen = []
    for row in (rows[i] for i in range(len(rows))):
        assert all(a.dtype == np.int32 and a.shape == (seq,) for a in row.values())
        padding = row["segment_ids"] == 0
        assert (row["targets"][padding] == -1).all()
        assert not padding[: seq - padding.sum()].any()  # at the end
        for segment in range(1, row["segment_ids"].max() + 1):
            at = np.flatnonzero(row["segment_ids"] == segment)
            tokens, targets = row["tokens"][at], row["targets"][at]
            assert (np.diff(at) == 1).all()
            assert (np.diff(tokens) == 1).all()  # one example, in order
            assert row["positions"][at].tolist() == list(range(len(at)))
            assert (
                targets.tolist() == np.where(examples.counted[tokens + 1], tokens + 1, -1).tolist()
            )
            seen += tokens.tolist()
    expected = np.concatenate(
        [np.arange(a, b - 1) for a, b in zip(examples.starts, examples.starts[1:], strict=False)]
    )
    assert sorted(seen) == expected.tolist()
    assert rows.counts.positions == len(seen)
    assert rows.counts.counted == sum(
        int((rows[i]["targets"] >= 0).sum()) for i in range(len(rows))
    )


def plain_best_fit(lengths, seq):
    """Pack by best fit, longest first, examining every row; returns how full the rows are."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= seq]
        row = max(fitting, key=sum, default=None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    # which of two rows with equal space is taken makes no difference here
    return sorted(map(sum, rows))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 50).flatmap(
        lambda seq: st.tuples(st.just(seq), st.lists(st.integers(1, seq), min_size=1, max_size=80))
    )
)
def test_rows_are_those_of_best_fit(case):
    seq, lengths = case
    order, starts = data.best_fit(lengths, seq)
    rows = [[lengths[i] for i in order[a:b]] for a, b in itertools.pairwise(starts)]
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert sorted(map(sum, rows)) == plain_best_fit(lengths, seq)


def test_too_long_is_refused_truncated_or_dropped_and_counted():
    examples = examples_of([5, 9, 30, 12])
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:2: 9 tokens take 8 positions, but a row has seq=7; 3 of 4 .* has 30 tokens",
    ):
        data.pack(examples, 7)
    cut, left = data.pack(examples, 7, too_long="truncate"), data.pack(examples, 7, too_long="drop")
    assert (
        cut.counts.examples,
        cut.counts.truncated,
        cut.counts.cut_tokens,
        cut.counts.dropped,
    ) == (4, 3, 1 + 22 + 4, 0)
    assert (
        left.counts.examples,
        left.counts.truncated,
        left.counts.cut_tokens,
        left.counts.dropped,
    ) == (1, 0, 0, 3)
    long = next(cut[i] for i in range(len(cut)) if 14 in cut[i]["tokens"])
    assert long["tokens"].tolist() == list(range(14, 21))
    assert long["targets"].tolist() == list(range(15, 22))
    with pytest.raises(ValueError, match="all 4 examples have more than seq"):
        data.pack(examples, 3, too_long="drop")
    with pytest.raises(ValueError, match="is unknown: choose from refuse, truncate, drop"):
        data.pack(examples, 3, too_long="cut")


def test_truncation_that_leaves_nothing_to_count_is_an_error():
    counted = np.ones(14, bool)
    counted[5:13] = False  # only the last token of the second example counts
    examples = examples_of([5, 9], counted)
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:2: of its 9 tokens only the first seq \+ 1 = 8 are kept, and none of them counts",
    ):
        data.pack(examples, 7, too_long="truncate")
    assert data.pack(examples, 8).counts.counted == 4 + 1


def test_rows_of_a_file(tmp_path):
    records = [{"prompt": "ab", "completion": "c"}, {"text": "xyz"}]
    tokenizer = byte_tokenizer()
    row = data.pack(data.tokenize(write(tmp_path / "a.jsonl", records), tokenizer), 8)[0]
    a, b, c, x, y, z = tokenizer.convert_tokens_to_ids(list("abcxyz"))
    end = tokenizer.eos_token_id
    assert row["tokens"].tolist() == [a, b, c, x, y, z, 0, 0]
    assert row["targets"].tolist() == [-1, c, end, y, z, end, -1, -1]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
