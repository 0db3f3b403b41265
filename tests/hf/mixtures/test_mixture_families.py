"""Mixtures of experts from a Hugging Face folder compute, train and export as in transformers."""

import dataclasses
import pathlib
from typing import Any

import hf_models
import jax
import numpy as np
import pytest
from hf_models import need, torch_logits
from mixture_models import CASES, batch_of, program_of, torch_losses, write
from safetensors.numpy import load_file

import zerojax as zj
from zerojax.hf import config_of, model_of

need("torch", "transformers")

LOGITS, STEPS = 1e-4, 1e-4
"""Largest allowed differences."""
PLACES = ("alone", "device", "pinned_host", "nvme")
PROMPTS = [[7, 3, 90, 41, 5], [11], [64, 2, 2, 8, 30, 77, 12, 9, 1], [5, 5]]


def bits(folder):
    """Return the bytes of each tensor of a folder."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name: a.tobytes() for name, a in load_file(file).items()}
    return tensors


def load(folder):
    """Return a folder's model in transformers, without missing or unexpected keys."""
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype="float32",
        trust_remote_code=False,
    )
    model, info = loaded
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.by_default("qwen3_moe-device")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", list(CASES))
def test_logits_steps_and_exports_are_those_of_transformers(tmp_path, case, place):
    like = tmp_path / "model"
    theirs = write(case, like)
    logits = torch_logits(theirs, batch_of()).detach().numpy()
    assert np.abs(logits).max() > 1  # weights that matter
    assert config_of(like).num_params == sum(p.numel() for p in theirs.parameters())
    with program_of(model_of(like), place, tmp_path) as program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
            ckpt.save(program, state)
        ours = np.asarray(program.apply(state, batch_of()))
        assert np.abs(ours - logits).max() < LOGITS
        losses = []
        for step in range(5):
            state, metrics = program.step(state, batch_of(step))
            losses.append(float(jax.block_until_ready(metrics["loss"])))
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    assert bits(tmp_path / "out") == bits(like)
    exported = torch_logits(load(tmp_path / "out"), batch_of()).detach().numpy()
    np.testing.assert_allclose(exported, logits, rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, torch_losses(theirs), rtol=0, atol=STEPS)
    assert abs(losses[0] - losses[-1]) > STEPS


@pytest.mark.exhaustive  # by default test_config.py adds a dense family
def test_a_family_that_the_page_adds_computes_what_transformers_does(tmp_path):
    page = (pathlib.Path(__file__).parents[3] / "docs" / "fine_tuning.md").read_text()
    block = next(b for b in page.split("```python\n") if b.startswith("glm = "))
    names = {"zj": zj, "dataclasses": dataclasses}
    exec(block.split("```")[0], names)
    sizes = {**CASES["glm4_moe"][1], "sliding_window": None, "n_shared_experts": 1}
    theirs = hf_models.write(("Dots1Config", sizes), tmp_path, shard="1MB")
    model = model_of(tmp_path, families=names["families"])
    program = program_of(model, "device", tmp_path)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0), families=names["families"])
    logits = torch_logits(theirs, batch_of()).detach().numpy()
    assert np.abs(np.asarray(program.apply(state, batch_of())) - logits).max() < LOGITS


@pytest.mark.exhaustive  # by default test_capacity.py drops tokens
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe"])  # with a balance loss, and dense layers
def test_a_capacity_that_is_large_enough_changes_nothing_and_a_small_one_drops(tmp_path, case):
    write(case, tmp_path)
    found = []
    for factor in (None, 4.0, 0.5):
        model = model_of(tmp_path, capacity_factor=factor)
        program = program_of(model, "device", tmp_path)
        state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
        _, metrics = program.step(state, batch_of())
        found.append(jax.tree.map(float, metrics))
    np.testing.assert_allclose(found[1]["loss"], found[0]["loss"], rtol=0, atol=1e-5)
    assert "dropped_fraction" not in found[0]
    assert found[1]["dropped_fraction"] == 0 < 0.3 < found[2]["dropped_fraction"]


@pytest.mark.exhaustive  # by default the test above compares logits
@pytest.mark.parametrize("place", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("case", list(CASES))
def test_greedy_tokens_of_mixtures_are_those_of_transformers(tmp_path, case, place):
    import torch

    # Large weights: otherwise a random model repeats the same token.
    theirs = write(case, tmp_path / "model", initializer_range=0.3)
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    # A mesh with `expert` generates nothing.
    with program_of(model_of(tmp_path / "model"), place, tmp_path, has_experts=False) as program:
        state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
        found = zj.generate(program, state, PROMPTS, 16)
        assert [row.tolist() for row in found] == expected
    assert max(len(set(row)) for row in expected) > 4
