"""Preferences in TRL's columns become the same sequences, in rows that hold complete pairs."""

import numpy as np
import pytest
from chat_tokenizers import PLAIN, byte_tokenizer, write
from hf_models import need
from preference_inputs import records

from zerojax.data import batches, pack_pairs, read_preferences

need("transformers")

USER = {"role": "user", "content": "Colour of the sky?"}
BLUE = {"role": "assistant", "content": "blue"}
GREEN = {"role": "assistant", "content": "green!"}
TEXT = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
TALK = {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}
SAME = {
    "text": (TEXT, {"chosen": "The sky is blue.", "rejected": "The sky is green."}),
    "talk": (TALK, {"chosen": [USER, BLUE], "rejected": [USER, GREEN]}),
    "text beside": (
        TALK,
        {**TALK, "prompt": "?", "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
    ),
}


def read(tmp_path, *lines, template=PLAIN):
    tokenizer = byte_tokenizer(template)
    return read_preferences(write(tmp_path / "pairs.jsonl", list(lines)), tokenizer), tokenizer


def texts(pairs, tokenizer):
    """Return (all text, counted text) of each sequence."""
    out = []
    for i in range(len(pairs.examples)):
        begin, end = pairs.examples.starts[i : i + 2]
        tokens, counted = pairs.examples.tokens[begin:end], pairs.examples.counted[begin:end]
        out.append((tokenizer.decode(tokens), tokenizer.decode(tokens[counted])))
    return out


@pytest.mark.parametrize("form", list(SAME))
def test_explicit_and_implicit_prompts_are_the_same(tmp_path, form):
    explicit, implicit = SAME[form]
    ours, tokenizer = read(tmp_path, explicit)
    other, _ = read(tmp_path, implicit)
    assert texts(ours, tokenizer) == texts(other, tokenizer)
    end = "<|im_end|>"
    if form == "text":
        assert texts(ours, tokenizer)[0] == (f"The sky is blue.{end}", f" blue.{end}")
    else:
        answers = [counted for _, counted in texts(ours, tokenizer)]
        assert answers == [f"blue{end}\n", f"green!{end}\n"]
        assert texts(ours, tokenizer)[1][0].startswith("<|im_start|>user\nColour of the sky?")


def test_labelled_answers_and_unpaired_pairs_are_the_same(tmp_path):
    single = [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is", "completion": " green.", "label": False},
    ]
    ours, tokenizer = read(tmp_path, *single)
    pairs, _ = read(tmp_path, TEXT)
    assert not ours.is_paired
    assert pairs.is_paired
    assert ours.labels.tolist() == pairs.unpaired().labels.tolist() == [1, -1]
    assert texts(ours, tokenizer) == texts(pairs.unpaired(), tokenizer)
    both = ours.with_mismatches()
    end = "<|im_end|>"
    assert [text for text, _ in texts(both, tokenizer)] == [
        f"The sky is blue.{end}", f"The sky is green.{end}", f"The sky is green.{end}", f"The sky is blue.{end}",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="single answers with labels: use with_mismatches"):
        pack_pairs(ours, 64)


@pytest.mark.parametrize("with_last", [False, True])
def test_rows_hold_both_sequences_of_a_pair(tmp_path, with_last):
    pairs, _ = read(tmp_path, *records(20))
    rows = pack_pairs(pairs, 40, with_last=with_last)
    reference = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    rows = rows.with_reference(reference)
    seen = []
    for index in range(len(rows)):
        row = rows[index]
        assert (row["labels"] != 0).sum() == len(rows.members(index))
        for slot, pair in enumerate(rows.members(index)):
            seen.append(pair)
            np.testing.assert_array_equal(row["reference"][2 * slot :][:2], reference[pair])
            for side in (0, 1):
                at = np.flatnonzero(row["segment_ids"] == 2 * slot + side + 1)
                begin, end = pairs.examples.starts[2 * pair + side :][:2]
                tokens, counted = (
                    pairs.examples.tokens[begin:end],
                    pairs.examples.counted[begin:end],
                )
                assert (np.diff(at) == 1).all()
                assert row["positions"][at].tolist() == list(range(len(at)))
                assert row["tokens"][at].tolist() == tokens[: len(at)].tolist()
                assert len(at) == len(tokens) - (not with_last)
                targets = np.where(counted[1:], tokens[1:], -1).tolist() + [-1] * with_last
                assert row["targets"][at].tolist() == targets
    assert sorted(seen) == list(range(20))
    assert rows.counts.rows < 20
    assert rows.room > 1
    batch = next(batches(rows, 2, part=0, num_parts=1))
    assert batch["labels"].shape == (2, rows.room)
    assert batch["reference"].shape == (2, 2 * rows.room)


def test_long_pairs_are_refused_cut_or_left_out(tmp_path):
    long = {"prompt": "p", "chosen": "c" * 30, "rejected": "r" * 5}
    both = {"prompt": "p", "chosen": "c" * 40, "rejected": "r" * 35}
    pairs, _ = read(tmp_path, *records(3), long, both)
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl:4: the pair takes 31 \+ 6 positions, but a"
    ):
        pack_pairs(pairs, 30)
    assert pack_pairs(pairs, 30, too_long="drop").counts.dropped == 4
    cut = pack_pairs(pairs, 30, too_long="truncate")
    assert (cut.counts.truncated, cut.counts.cut_tokens) == (3, 31 - 24 + 41 - 15 + 36 - 15)
    assert cut.fingerprint() != pack_pairs(pairs, 90).fingerprint()
    assert pack_pairs(pairs, 90).fingerprint() == pack_pairs(pairs, 100).fingerprint()
    prompt = {"prompt": "p" * 40, "chosen": "c", "rejected": "r"}
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl:1: of 42 tokens only the first 16 are kept"
    ):
        pack_pairs(read(tmp_path, prompt)[0], 30, too_long="truncate")


def test_records_are_held_out_with_both_answers(tmp_path):
    pairs, tokenizer = read(tmp_path, *records(10))
    train, held_out = pairs.hold_out(5)
    assert (len(train), len(held_out)) == (8, 2)
    assert texts(held_out, tokenizer) == [texts(pairs, tokenizer)[i] for i in (8, 9, 18, 19)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"chosen": "a"}], "'chosen' and 'rejected' are needed, with or without 'prompt', or"),
        ([TEXT, {"prompt": "p", "completion": "c", "label": True}], "another form than the first"),
        ([{"prompt": "p", "completion": "c", "label": 2}], "'label' is 2: true"),
        ([{"chosen": "same", "rejected": "same"}], "are equal, so they do not show where"),
        ([{"chosen": [USER], "rejected": [USER, BLUE]}], "1 common messages of 1 and 2"),
        ([{**TEXT, "chosen": [BLUE]}], "both be texts, or both lists of messages"),
        ([{"chosen": 1, "rejected": 2}], "'chosen' must be a text or a list of messages, got int"),
    ],
)
def test_records_of_other_forms_are_refused_by_line(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as refusal:
        read(tmp_path, *lines)
    assert f"pairs.jsonl:{len(lines)}: " in str(refusal.value)
