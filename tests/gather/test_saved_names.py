"""A model's own `jax.checkpoint` keeps the values that it names.

This includes parameters that are gathered on use.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj

WIDTH, LAYERS, BATCH = 16, 2, 8
SAVE_WAVE = jax.checkpoint_policies.save_only_these_names("wave")


def init(key):
    keys = jax.random.split(key, (LAYERS, 2))
    return [
        {
            "up": jax.random.normal(up, (WIDTH, WIDTH)),
            "down": jax.random.normal(down, (WIDTH, WIDTH)),
        }
        for up, down in keys
    ]


def layer(p, x):
    return x + checkpoint_name(jnp.sin(x @ p["up"]), "wave") @ p["down"]


def each_layer(params, x, policy):
    for p in params:
        x = jax.checkpoint(layer, policy=policy)(p, x)
    return x


def all_layers(params, x, policy):
    """One region that holds most of the model, which is gathered unit by unit."""
    return jax.checkpoint(
        lambda params, x: functools.reduce(lambda x, p: layer(p, x), params, x), policy=policy
    )(params, x)


def run(regions, policy):
    """Return how often the compiled step computes the named value, and the norm of its gradient."""
    model = zj.Model(init, lambda params, batch, key: jnp.mean(regions(params, batch, policy) ** 2))
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    program = zj.build_train_step(model, optax.sgd(0.1), zj.ZeroConfig(activations="remat"), mesh)
    batch = np.random.default_rng(0).standard_normal((BATCH, WIDTH), dtype=np.float32)
    text = program.lower(batch).compile().as_text()
    _, metrics = program.step(program.init(jax.random.key(0)), batch)
    return text.count(" sine("), float(metrics["grad_norm"])


@pytest.mark.by_default("each_layer")
@pytest.mark.parametrize("regions", [each_layer, all_layers], ids=["each_layer", "all_layers"])
def test_named_values_are_kept_and_not_computed_again(regions):
    recomputed, kept = run(regions, None), run(regions, SAVE_WAVE)
    assert (recomputed[0], kept[0]) == (2 * LAYERS, LAYERS)
    assert kept[1] == pytest.approx(recomputed[1], rel=1e-6)
