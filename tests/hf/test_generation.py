"""Greedy tokens equal those of transformers' generate.

They are generated with a cache on the device, and without one from disk.
"""

import jax
import numpy as np
import pytest
from hf_models import CASES, DENSE, need, program_of, write

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers")

COUNT = 32
PROMPTS = [[7, 3, 90, 41, 5], [11], [64, 2, 2, 8, 30, 77, 12, 9, 1]]


def theirs(model, use_cache=True):
    """Return what transformers generates for each prompt separately."""
    import torch

    found = []
    for prompt in PROMPTS:
        if not use_cache:  # forget the longest row so far, for "dynamic" rotations
            model(torch.tensor([[1]]))
        tokens = torch.tensor([prompt])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=use_cache,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


TIERS = ("device", "pinned_host", "nvme")
GENERATED = [
    *((tier, case) for tier in TIERS for case in CASES if case not in DENSE),
    *(("device", case) for case in DENSE),
    ("nvme", "phi3.5"),
    ("nvme", "llama-dynamic"),
]


@pytest.mark.by_default("nvme-gemma3")
@pytest.mark.parametrize(("tier", "case"), GENERATED, ids=map("-".join, GENERATED))
def test_greedy_tokens_are_those_of_transformers(tmp_path, case, tier):
    # Large weights and an untied head: otherwise a random model repeats the same token.
    sizes = {"initializer_range": 0.3} | (
        {"tie_word_embeddings": False} if case.startswith("gemma") else {}
    )
    sizes |= (
        {"attn_logit_softcapping": 2.0} if case == "gemma2" else {}
    )  # a cap that the scores reach
    if case in DENSE:
        sizes |= {"tie_word_embeddings": False}
    # A cache would keep keys that were rotated for a shorter row.
    use_cache = case != "llama-dynamic"
    noise = 0.5 if case in DENSE else 0.1
    expected = theirs(write(case, tmp_path / "model", noise=noise, **sizes), use_cache)
    with program_of(model_of(tmp_path / "model"), tier, tmp_path) as program:
        state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
        found = zj.generate(program, state, PROMPTS, COUNT)
        assert [row.tolist() for row in found] == expected
    assert min(len(set(row)) for row in expected) > (2 if case in DENSE else 8)


OTHERS = {
    "nf4": ("llama", {"lora": zj.Lora(rank=4, alpha=8)}, {"frozen_dtype": "nf4"}),
    "tiles": ("qwen3", {"mlp_tiles": 2}, {}),
    "stage1": ("mistral", {}, {"stage": 1}),
}
"""A case, options of its model, and options of its program."""


# by default the tests compare tokens with and without a cache to transformers'
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_changes_no_token(tmp_path, name):
    case, options, fields = OTHERS[name]
    write(case, tmp_path, initializer_range=0.3)
    program = program_of(model_of(tmp_path, **options), "device", tmp_path, **fields)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
    found, again = (
        zj.generate(program, state, PROMPTS, COUNT, use_cache=cached) for cached in (True, False)
    )
    assert [row.tolist() for row in found] == [row.tolist() for row in again]


def test_logits_of_one_position_are_those_of_all(tmp_path):
    write("qwen3", tmp_path)
    program = program_of(model_of(tmp_path), "device", tmp_path)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
    tokens, last = np.arange(24, dtype=np.int32).reshape(2, 12), np.asarray([3, 11], np.int32)
    every, one = (
        program.apply(state, {"tokens": tokens}),
        program.apply(state, {"tokens": tokens, "last": last}),
    )
    assert one.shape == (2, 96)
    np.testing.assert_allclose(one, np.asarray(every)[np.arange(2), last], atol=1e-5)
