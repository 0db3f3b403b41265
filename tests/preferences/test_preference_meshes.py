"""Pairs in rows: every mesh and number of microbatches gives the losses of one device."""

import jax
import numpy as np
import pytest
from hf_models import adamw, need
from preference_inputs import pair_rows, whole_batch, write_inputs

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers")
pytestmark = pytest.mark.exhaustive

CASES = {
    "microbatches": ({"fsdp": 2}, {"num_microbatches": 2}),
    "tensor": ({"fsdp": 2, "tensor": 2}, {}),
    "context": ({"fsdp": 2, "context": 2}, {}),
    "pipe": ({"fsdp": 2, "pipe": 2}, {"num_microbatches": 2}),
    "in_backward": (
        {"fsdp": 2},
        {"params": "pinned_host", "opt_state": "pinned_host", "update": "in_backward"},
    ),
}


def losses_of(like, loss, batch, axes, fields):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = zj.make_mesh(**axes, devices=devices)
    program = zj.build_train_step(
        model_of(like, loss=loss), adamw(1e-3), zj.ZeroConfig(stage=3, **fields), mesh
    )
    losses = []
    with program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        for _ in range(3):
            state, metrics = program.step(state, batch)
            losses.append(float(jax.block_until_ready(metrics["loss"])))
    return losses


@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
@pytest.mark.parametrize("case", list(CASES))
def test_losses_are_those_of_one_device(tmp_path, case, kind):
    like = write_inputs(tmp_path, count=14, num_hidden_layers=2)
    rows = pair_rows(tmp_path)
    if kind == "sigmoid":
        examples = rows.pairs.examples
        counted = np.add.reduceat(examples.counted, examples.starts[:-1], dtype=np.int64)
        noise = np.random.default_rng(0).normal(0, 2, (14, 2))
        rows = rows.with_reference(noise - 6 * counted.reshape(14, 2))
    batch = whole_batch(rows, 4)
    loss = zj.dpo_loss(0.2, kind)
    axes, fields = CASES[case]
    expected = losses_of(like, loss, batch, {"fsdp": 1}, {})
    assert abs(expected[0] - expected[-1]) > 0.01
    np.testing.assert_allclose(
        losses_of(like, loss, batch, axes, fields), expected, rtol=0, atol=2e-5
    )
