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


@pytest.mark.exhaustive  # by default test_over_tokens.py sums over tiles
@pytest.mark.parametrize("place", ["alone", "device", "pinned_host", "nvme"])
@pytest.mark.parametrize("case", list(CASES))
def test_steps_and_their_metrics_are_those_of_whole_rows(tmp_path, case, place):
    write(case, tmp_path / "model")
    has_blocks = place == "alone" and "llama4" not in case  # whose chunks are masks
    tiled = {"seq_tiles": TILES, "attention": "blocks" if has_blocks else "auto"}
    found = []
    for options in ({"attention": "xla"}, tiled):
        model = model_of(tmp_path / "model", **options)
        with program_of(model, place, tmp_path) as program:
            state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
            metrics_of_steps = []
            for step in range(3):
                state, metrics = jax.block_until_ready(program.step(state, batch_of(step)))
                metrics_of_steps.append(jax.tree.map(float, metrics))
        found.append(metrics_of_steps)
    for whole, in_tiles in zip(*found, strict=True):
        assert {"loss", "grad_norm"} <= whole.keys() == in_tiles.keys()
        names = [name for name in whole if not name.startswith(("swap", "seconds"))]
        for name in names:
            np.testing.assert_allclose(in_tiles[name], whole[name], rtol=2e-5, err_msg=name)
    assert ("balance_loss" in found[0][0]) == ("router_aux_loss_coef" in CASES[case][1])


def test_a_capacity_is_refused_beside_tiles(tmp_path):
    write("mixtral-window", tmp_path)
    with pytest.raises(ValueError, match=r"capacity_factor=1.5: cells would be counted in each"):
        model_of(tmp_path, seq_tiles=2, capacity_factor=1.5)
