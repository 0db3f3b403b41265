"""The benchmark of a task learned from scratch, in small: both sides take the same steps."""

import dataclasses
import os

import pytest
from hf_models import need

need("torch", "transformers", "peft", "trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import learning  # noqa: E402
from learning_parts import repeating  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # trl, transformers and peft warn about each other
SIZES = learning.Sizes(
    config=repeating.CONFIG
    | {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    steps=(2, 4, 4),
    rows=2,
    num_words=(48, 4),
    rank=4,
    rates=(1e-3, 1e-3, 1e-3),
)


def test_the_rule_judges_repeating_and_style():
    words = ("python", "carbon", "linked", "string")
    answers = (" python", " CARBON", " linker", " STRINg")
    score = repeating.judge(words, answers)
    assert (score.correct, score.capitals) == (0.5, 0.25)


@pytest.mark.exhaustive  # it starts finetune.py five times, and imports torch and trl
def test_losses_of_sft_and_dpo_are_those_of_peft_and_trl(tmp_path):
    losses, before, found = learning.run(tmp_path, SIZES)
    assert losses[-1] < losses[0]
    assert before.correct == 0
    assert [(c.tier, c.method) for c in found] == [
        ("float32", "sft"),
        ("float32", "dpo"),
        ("4 bits on a disk", "sft"),
        ("4 bits on a disk", "dpo"),
    ]
    for comparison in found:
        assert len(comparison.ours) == len(comparison.theirs) == 4
        assert comparison.ours[-1] < comparison.ours[0]
        assert comparison.largest_difference < 1e-4
        assert comparison.our_score == comparison.exported_score
    text = learning.format_table(SIZES, losses, before, found)
    assert text.count("| PEFT and TRL |") == 4

    different = dataclasses.replace(found[0], theirs=[value + 1e-3 for value in found[0].theirs])
    assert different.largest_difference > 9e-4
