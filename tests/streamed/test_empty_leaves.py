"""Empty parameters and activations live in any tier; streamed and resident steps are equal."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

WIDTH = 16
EVERYTHING = ("params", "grads", "opt_state", "activations")


def model(name: str) -> zj.LayeredModel:
    """Return a model in which every part has an empty leaf called `name`.

    The parts are the embedding, the blocks, the head and the activations.
    """

    def init_weight(key: jax.Array) -> Any:
        return {"weight": toys.draw(key, (WIDTH, WIDTH)) / 4, name: jnp.zeros((0, 4))}

    def embed(p: Any, batch: Any, key: Any) -> Any:
        return {"weighted": batch["x"] @ p["weight"], name: batch["x"][:, :0]}

    def block(p: Any, x: Any, key: Any) -> Any:
        return {
            "weighted": x["weighted"] + jnp.tanh(x["weighted"] @ p["weight"]) + jnp.sum(p[name]),
            name: x[name],
        }

    def head(p: Any, p_embed: Any, x: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.mean(jnp.square(x["weighted"] @ p["weight"])) + jnp.sum(p[name])

    return zj.LayeredModel(3, init_weight, embed, init_weight, block, init_weight, head)


def optimizer() -> optax.GradientTransformation:
    """Return Adam with a rate per element of each leaf, computed from the loss."""

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: u * jnp.full(u.shape, 1 / (1 + value)), updates), state

    by_loss = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    return optax.chain(optax.adam(1e-2), by_loss)


@functools.cache
def resident(name: str) -> tuple[list[float], Any]:
    return train(name)


def train(name: str, **fields: Any) -> tuple[list[float], Any]:
    config = zj.ZeroConfig(stage=3, **fields)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    batch = {"x": np.random.default_rng(0).standard_normal((8, WIDTH), dtype=np.float32)}
    with zj.build_train_step(model(name), optimizer(), config, mesh) as program:
        state, losses = program.init(jax.random.key(0)), []
        for _ in range(3):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, {piece: jax.device_get(tree) for piece, tree in program.iter_params(state)}


AXES = {
    "name": ("empty", "zero"),  # before and after the other leaves
    "tier": ("pinned_host", "nvme"),
    "update_on": ("device", "host"),
    "update": ("after_backward", "in_backward"),
}


def cases():
    """Every combination; without `-m exhaustive`, two combinations that cover every value."""
    return itertools.product(*AXES.values())


@pytest.mark.by_default("empty-nvme-device-in_backward")
@pytest.mark.parametrize(tuple(AXES), cases())
def test_a_leaf_of_no_elements_trains_in_every_tier(name, tier, update_on, update, tmp_path):
    fields = dict.fromkeys(EVERYTHING, tier) | {
        "update_on": update_on,
        "update": update,
        "swap_dir": str(tmp_path),
    }
    expected_losses, expected = resident(name)
    losses, params = train(name, **fields)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert all(tree[name].shape == (0, 4) for tree in params.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, expected)
