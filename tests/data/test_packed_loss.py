"""Training on packed rows equals training on the separate examples.

This applies to every tier and number of microbatches.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packed_decoder as decoder
import pytest
import toys
from packed_examples import uneven_examples

import zerojax as zj
from zerojax import data
from zerojax.models import init_params

TIERS = {
    "device": {},
    "host": {"params": "pinned_host", "opt_state": "pinned_host"},
    "nvme": {"params": "nvme", "opt_state": "nvme"},
}


def whole(rows, size):
    """Return rows as one batch of a given size, filled with padding."""
    return next(iter(data.batches_once(rows, size)))


def build(tier, folder, count=1):
    config = zj.ZeroConfig(
        stage=3,
        num_microbatches=count,
        **TIERS[tier],
        **({"swap_dir": folder} if tier == "nvme" else {}),
    )
    return zj.build_train_step(
        decoder.model(), optax.sgd(1.0), config, zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    )


@pytest.mark.by_default("device")
@pytest.mark.parametrize("tier", TIERS)
def test_packed_loss_is_the_sum_over_examples(tier, tmp_path):
    made = uneven_examples()
    packed = data.pack(made, decoder.SEQ)
    alone = data.Rows(made, decoder.SEQ, np.arange(40), np.arange(41), packed.counts)
    assert len(packed) < 30  # several in a row
    with build(tier, tmp_path) as program:
        state = program.init(jax.random.key(0))
        together = float(program.eval(state, whole(packed, 40))) * packed.counts.counted
        total = 0.0
        for i in range(40):
            batch = jax.tree.map(lambda a: a[None], alone[i])
            total += float(program.eval(state, batch)) * (batch["targets"] >= 0).sum()
    np.testing.assert_allclose(together, total, rtol=1e-6)


@pytest.mark.by_default("nvme-4")
@pytest.mark.parametrize(("tier", "count"), [*itertools.product(TIERS, (1, 2, 4))])
def test_gradients_do_not_depend_on_microbatches(tier, count, tmp_path):
    batch = whole(data.pack(uneven_examples(), decoder.SEQ), 32)
    in_microbatch = [(batch["targets"][m::4] >= 0).sum() for m in range(4)]
    assert max(in_microbatch) > 1.2 * min(in_microbatch)  # so a mean of means would differ

    def loss(params):
        x = decoder.embed(params["embed"], batch, None)
        for layer in range(decoder.LAYERS):
            x = decoder.block(
                jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"]),
                x,
                None,
                batch["segment_ids"],
                None,
            )
        out = decoder.head(params["head"], None, x, batch, None)
        return out.total / out.weight

    before = init_params(decoder.model(), jax.random.key(0))
    grads = jax.jit(jax.grad(loss))(before)
    with build(tier, tmp_path, count) as program:
        state = program.init(jax.random.key(0))
        state, metrics = program.step(state, jax.tree.map(jnp.asarray, batch))
        after = dict(program.iter_params(state))
    blocks = [after.pop(f"blocks/{layer}") for layer in range(decoder.LAYERS)]
    after["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)
    toys.assert_trees_close(jax.tree.map(lambda a, b: a - b, before, after), grads, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-5)
