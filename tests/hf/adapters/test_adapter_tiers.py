"""Adapters of each kind train over a base in any tier and dtype as over one on the device."""

import jax
import numpy as np
import pytest
from hf_models import batch_of, losses_of, need, program_of, write

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 96}
KINDS = {
    "rslora": ({"use_rslora": True}, {}),
    "dora": ({"use_dora": True, "targets": ("q_proj", "down_proj")}, {}),
    "pissa": ({"init": "pissa", "targets": ("k_proj", "down_proj")}, {}),
    "ends": ({"targets": ("q_proj", "embed_tokens", "lm_head")}, {}),
    "saved": ({"modules_to_save": ("norm", "lm_head")}, {}),
    "neftune": ({}, {"neftune_noise_alpha": 5.0}),
    "tiles": ({"targets": "all"}, {"mlp_tiles": 4}),
    "dropout": ({"targets": ("o_proj", "up_proj"), "use_dora": True, "dropout": 0.25}, {}),
}
PLACES = {
    "frozen-host": {"frozen": "pinned_host"},
    "frozen-nvme": {"frozen": "nvme"},
    "host": {"params": "pinned_host", "grads": "pinned_host", "opt_state": "pinned_host"},
    "nvme": {"params": "nvme", "grads": "nvme", "opt_state": "nvme"},
}


@pytest.mark.exhaustive  # by default, test_adapter_kinds.py trains DoRA over a base on disk
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("name", list(KINDS))
def test_kind_trains_in_a_tier_as_on_the_device(tmp_path, name, base, place):
    options, model = KINDS[name]
    fields = {} if base == "float32" else {"frozen_dtype": "nf4"}
    write("llama", tmp_path / "model", num_hidden_layers=2, **SIZES)
    lora = zj.Lora(**{"rank": 2, "alpha": 5, **options})
    losses = []
    for tiers in ({}, PLACES[place]):
        program = program_of(
            model_of(tmp_path / "model", lora=lora, **model),
            "device",
            tmp_path,
            2,
            **fields,
            **tiers,
        )
        with program:
            state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(1))
            found, state = losses_of(program, state, steps=3)
            losses.append([*found, float(program.eval(state, batch_of(7)))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=2e-5)
    assert losses[0][0] != losses[0][1]
