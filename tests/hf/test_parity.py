"""Decoders from a Hugging Face folder compute what transformers computes, in float32.

Logits, losses, and steps of AdamW are compared.
"""

import jax
import numpy as np
import pytest
from hf_models import (
    CASES,
    DENSE,
    FAMILIES,
    batch_of,
    losses_of,
    need,
    program_of,
    renamed,
    torch_logits,
    torch_loss,
    torch_losses,
    write,
)

import zerojax as zj
from zerojax.hf import config_of, model_of

need("torch", "transformers")

LOGITS, LOSS, GRADIENT, STEPS = 1e-4, 1e-5, 1e-5, 1e-4
"""Largest allowed differences."""


@pytest.mark.by_default(*FAMILIES, "phi4-mini", "cohere2")
@pytest.mark.parametrize("case", list(CASES))
def test_logits_loss_and_gradients_are_those_of_transformers(tmp_path, case):
    theirs, batch = write(case, tmp_path), batch_of()
    loss = torch_loss(theirs, batch)
    loss.backward()
    logits = torch_logits(theirs, batch).detach().numpy()
    program = program_of(model_of(tmp_path), "device", tmp_path)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
    ours = np.asarray(program.apply(state, batch))
    assert np.abs(logits).max() > 1  # weights that matter
    assert np.abs(ours - logits).max() < LOGITS
    our_loss, grads = program.grads(state, batch)
    assert abs(float(our_loss) - loss.item()) < LOSS
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in flat
    }
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    for name, there in renamed(tmp_path, gradients).items():
        np.testing.assert_allclose(leaves[name], there, rtol=0, atol=GRADIENT, err_msg=name)
    assert config_of(tmp_path).num_params == sum(p.numel() for p in theirs.parameters())


STEPPED = [
    *((tier, case) for tier in ("device", "pinned_host", "nvme") for case in FAMILIES),
    *(("device", case) for case in DENSE),
]


@pytest.mark.by_default("nvme-gemma3")
@pytest.mark.parametrize(("tier", "case"), STEPPED, ids=map("-".join, STEPPED))
def test_five_steps_of_adamw_track_those_of_torch(tmp_path, case, tier):
    theirs = write(case, tmp_path / "model")
    with program_of(model_of(tmp_path / "model"), tier, tmp_path) as program:
        state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
        untrained = float(program.eval(state, batch_of(4)))
        losses, _ = losses_of(program, state)
    expected = torch_losses(theirs)
    assert abs(untrained - expected[4]) > 10 * STEPS  # the steps change something
    np.testing.assert_allclose(losses, expected, rtol=0, atol=STEPS)
