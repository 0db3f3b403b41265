"""Keys and modes: losses and modules are passed what their signatures ask for."""

from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import models_of_others as others
import numpy as np
import pytest
from flax import nnx

import zerojax as zj
from zerojax.models import build_objective, init_params
from zerojax.models.flax_calls import takes_key

KEY = jax.random.key(1)


def test_a_loss_takes_a_key_by_its_signature():
    assert takes_key(lambda model, batch, key: 0, "model", "batch")
    assert takes_key(lambda model, batch, *, key=None: 0, "model", "batch")
    assert takes_key(lambda model, batch, rng: 0, "model", "batch")
    assert not takes_key(lambda model, batch: 0, "model", "batch")
    assert not takes_key(lambda model, batch, smoothing=0.1: 0, "model", "batch")
    assert not takes_key(lambda head, embed, x, batch: 0, "head", "embed", "x", "batch")


def test_the_key_of_a_loss_is_none_in_evaluation():
    seen = []

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        seen.append(key)
        return jnp.mean(model(batch) ** 2)

    model = zj.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss)
    assert model.stochastic
    params = model.init(KEY)
    model.loss(params, jnp.ones((2, 4)), None)
    model.loss(params, jnp.ones((2, 4)), KEY)
    assert seen[0] is None
    assert jnp.issubdtype(seen[1].dtype, jax.dtypes.prng_key)
    assert (seen[1] != KEY).all()


class Drops(nnx.Module):
    """A module that takes its random streams at the call, and x or a batch that holds it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x: Any, rngs: nnx.Rngs) -> jax.Array:
        return self.drop(self.dense(x["x"] if isinstance(x, dict) else x), rngs=rngs)


class MayDrop(Drops):
    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> jax.Array:
        return super().__call__(x, rngs)


@pytest.mark.parametrize("kind", [Drops, MayDrop])
def test_layers_that_take_rngs_at_the_call_draw_anew_in_each_layer(kind):
    model = zj.from_flax(
        embed=lambda rngs: kind(rngs),
        block=lambda rngs: kind(rngs),
        head=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        num_layers=2,
        loss=lambda head, embed, x, batch: jnp.mean((head(x) - batch["x"]) ** 2),
    )
    assert model.stochastic
    batch = {"x": jnp.ones((4, 8))}
    params, objective = init_params(model, KEY), build_objective(model)
    loss = jax.jit(lambda params, batch, key: objective(params, batch, key, None)[0].total)
    first, again, other, evaluated = (
        float(loss(params, batch, k)) for k in (KEY, KEY, jax.random.key(2), None)
    )
    assert first == again != other != evaluated
    p, x, block = model.init_block(KEY), jnp.ones((4, 8)), jax.jit(model.block)
    zeros = [np.asarray(block(p, x, k)) == 0 for k in jax.random.split(KEY, 2)]
    assert zeros[0].any()
    assert (zeros[0] != zeros[1]).any()
    assert not (np.asarray(block(p, x, None)) == 0).any()


class ByArgument(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))


class ByDefault(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return nn.Dropout(0.5)(nn.Dense(8)(x), deterministic=deterministic)


class LeftOpen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5)(nn.Dense(8)(x))


class ByAttribute(nn.Module):
    deterministic: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.remat(LeftOpen)()(x)
        return nn.Dropout(0.5, deterministic=self.deterministic)(x)


class InSetup(nn.Module):
    training: bool = True

    def setup(self) -> None:
        self.dense, self.drop = nn.Dense(8), nn.Dropout(0.5, deterministic=not self.training)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.dense(x))


@pytest.mark.parametrize("kind", [ByArgument, ByDefault, LeftOpen, ByAttribute, InSetup])
def test_linen_modules_train_and_evaluate_without_has_rng(kind):
    module, batch = kind(), {"x": jnp.ones((2, 3, 8))}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.sum(model(batch["x"]) == 0) + jnp.mean(model(batch["x"]))

    model = zj.from_flax(module, loss, example_batch=batch, rngs=("dropout",))
    params, of = model.init(KEY), jax.jit(model.loss)
    assert float(of(params, batch, KEY)) != float(of(params, batch, jax.random.key(2)))
    assert float(of(params, batch, None)) < 1  # nothing was dropped
    assert module == kind()  # its attributes are reset


def test_a_config_that_trains_evaluates():
    (batch,) = others.tokens(1)
    model = others.lm1b(batch)
    params, of = jax.jit(model.init)(KEY), jax.jit(model.loss)
    module = others.LM1B(others.LM1BConfig(deterministic=True))
    expected = jax.jit(lambda p: others.of_tokens(module.bind({"params": p}), batch))(params)
    np.testing.assert_allclose(float(of(params, batch, None)), float(expected), rtol=1e-6)
    assert abs(float(of(params, batch, KEY)) - float(expected)) > 1e-3


def test_a_linen_module_without_streams_and_state_has_one_mode():
    batch = {"x": jnp.ones((2, 8))}
    model = zj.from_flax(ByDefault(), lambda m, b: jnp.mean(m(b["x"])), example_batch=batch)
    assert not model.stochastic
    with pytest.raises(flax.errors.InvalidRngError):  # the written value stays, and it would draw
        zj.from_flax(
            ByDefault(), lambda m, b: jnp.mean(m(b["x"], deterministic=False)), example_batch=batch
        )
