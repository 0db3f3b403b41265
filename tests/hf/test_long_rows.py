"""Long rows: MLPs over tiles of the tokens, and attention in blocks, compute the same numbers."""

import functools
import logging

import jax
import numpy as np
import pytest
from hf_models import batch_of, need, program_of, write
from test_packed_rows import packed_and_alone

import zerojax as zj
from zerojax.hf import attend, model_of
from zerojax.hf import attention as of_hf

need("torch", "transformers")

LONG = {"seq_tiles": 4, "attention": "blocks"}
ONE_OF_A_FAMILY = (
    *("llama-biases", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "smollm3"),
    *("granite", "glm4", "ministral3", "cohere2", "starcoder2"),
)
TIERS = {
    "device": {"activations": "selective"},
    "pinned_host": {"activations": "remat"},
    "nvme": {"activations": "remat", "frozen": "nvme"},
}


@pytest.mark.by_default("cohere2-packed")
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("case", ONE_OF_A_FAMILY)
def test_gradients_are_those_of_whole_rows(tmp_path, case, is_packed):
    write(case, tmp_path)
    batch = packed_and_alone()[0] if is_packed else batch_of()
    found = []
    for options in ({"attention": "xla"}, LONG):
        with program_of(model_of(tmp_path, **options), "device", tmp_path) as program:
            state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
            found.append(jax.device_get(program.grads(state, batch)))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen_dtype", [None, "nf4"])
@pytest.mark.parametrize("tier", TIERS)
def test_adapters_train_as_on_whole_rows(tmp_path, tier, frozen_dtype):
    write("qwen3", tmp_path, hidden_size=64, intermediate_size=256)
    found = []
    for options in ({"attention": "xla"}, LONG):
        model = model_of(tmp_path, lora=zj.Lora(rank=3, alpha=6, targets="all"), **options)
        fields = {**TIERS[tier], "frozen_dtype": frozen_dtype}
        with program_of(model, tier, tmp_path, **fields) as program:
            state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
            losses = []
            for step in range(4):
                state, metrics = jax.block_until_ready(program.step(state, batch_of(step)))
                losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)


def test_attention_runs_in_blocks_where_scores_would_take_too_much(monkeypatch, caplog):
    rng = np.random.default_rng(0)
    q, k, v = (jax.numpy.asarray(rng.standard_normal((2, 40, n, 8)), "float32") for n in (4, 2, 2))
    run = functools.partial(attend, q, k, v, scale=0.4, window=7)
    expected = run()
    with caplog.at_level(logging.INFO, "zerojax"):
        monkeypatch.setattr(of_hf, "_MOST_SCORES", 4 * 2 * 4 * 40 * 40)
        run()
        assert "in blocks" not in caplog.text
        monkeypatch.setattr(of_hf, "_MOST_SCORES", 4 * 2 * 4 * 40 * 40 - 1)
        text = str(jax.make_jaxpr(run)())
        assert "attention runs in blocks: rows have 40 tokens" in caplog.text
    assert "custom_vjp" in text
    np.testing.assert_allclose(run(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_tiles": 0}, "seq_tiles=0: an integer of at least 1 is needed"),
        ({"seq_tiles": 2, "mlp_tiles": 2}, "cannot be combined with mlp_tiles=2"),
        (
            {"seq_tiles": 2, "lora": zj.Lora(rank=2, alpha=2, targets="all", dropout=0.1)},
            "dropout of adapters would be the same in all tiles",
        ),
        ({"attention": "ring"}, "choose from auto, xla, cudnn, blocks"),
    ],
)
def test_what_cannot_be_combined_is_refused(tmp_path, options, message):
    write("llama", tmp_path)
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path, **options)


def test_tokens_that_do_not_divide_are_refused(tmp_path):
    write("llama", tmp_path)
    program = program_of(model_of(tmp_path, seq_tiles=5), "device", tmp_path)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"12 tokens do not divide by num_tiles=5: .* to 15 tokens"
    ):
        program.step(state, batch_of())
