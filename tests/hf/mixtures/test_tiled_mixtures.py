"""Experts over tiles of the tokens compute what they compute for all tokens at once."""

import jax
import numpy as np
import pytest
from hf_models import need
from mixture_models import CASES, batch_of, program_of, write

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers")

TILES = 5
"""Tiles of the 10 tokens of a row."""


@pytest.mark.by_default("gpt_oss-alone")  # with a balance loss, sinks and windows
@pytest.mark.parametrize("place", ["alone", "device", "pinned_host", "nvme"])
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_and_balance_are_those_of_whole_rows(tmp_path, case, place):
    write(case, tmp_path / "model")
    found = []
    for options in ({"attention": "xla"}, {"seq_tiles": TILES, "attention": "auto"}):
        if TILES in options.values() and place == "alone":
            options["attention"] = "blocks"
        model = model_of(tmp_path / "model", **options)
        with program_of(model, place, tmp_path) as program:
            state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
            grads = jax.device_get(program.grads(state, batch_of())) if place == "alone" else None
            losses = []
            for step in range(3):
                state, metrics = jax.block_until_ready(program.step(state, batch_of(step)))
                losses.append(jax.tree.map(float, metrics))
        found.append((grads, losses))
    (whole, expected), (tiled, losses) = found
    for a, b in zip(jax.tree.leaves(tiled), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    for a, b in zip(losses, expected, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=2e-5, atol=1e-7)
    assert ("balance_loss" in expected[0]) == ("router_aux_loss_coef" in CASES[case][1])


def test_a_capacity_is_refused_beside_tiles(tmp_path):
    write("mixtral-window", tmp_path)
    with pytest.raises(ValueError, match=r"capacity_factor=1.5: cells would be counted in each"):
        model_of(tmp_path, seq_tiles=2, capacity_factor=1.5)
