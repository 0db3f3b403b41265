"""What a build traces.

The user's functions are traced once for a batch's check, `init`, `step` and `lower` together.
"""

import collections
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax as zj

BATCH = np.ones((8, 16), np.float32)


class Calls:
    """An optimizer and models that count the calls of their functions.

    These calls happen during tracing.
    """

    def __init__(self) -> None:
        self.count: collections.Counter[str] = collections.Counter()

    def optimizer(self) -> optax.GradientTransformation:
        adamw = optax.adamw(1e-3)

        def init(params: Any) -> Any:
            self.count["tx.init"] += 1
            return adamw.init(params)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            self.count["tx.update"] += 1
            return adamw.update(grads, state, params)

        return optax.GradientTransformation(init, update)

    def loss(self, model: Any, batch: Any) -> jax.Array:
        self.count["loss"] += 1
        return jnp.mean(model(batch) ** 2)

    def nnx(self) -> zj.Model:
        count = self.count

        class Module(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                count["init"] += 1
                self.dense = nnx.Linear(16, 16, rngs=rngs)
                self.table = jnp.arange(16.0)  # a constant, created by the build

            def __call__(self, x: jax.Array) -> jax.Array:
                return jnp.tanh(self.dense(x)) + self.table

        return zj.from_flax(lambda rngs: Module(rngs), self.loss)

    def linen(self) -> zj.Model:
        count = self.count

        class Module(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                count["init"] += self.is_initializing()
                return jnp.tanh(nn.Dense(16)(x))

        return zj.from_flax(Module(), self.loss, example_batch=BATCH)


@pytest.mark.parametrize("form", ["nnx", "linen"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_build_traces_each_function_of_the_user_once(form, stage):
    calls = Calls()
    model = getattr(calls, form)()
    calls.count.pop("loss", None)  # Linen creates its parameters by calling the loss
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    program = zj.build_train_step(
        model, calls.optimizer(), zj.ZeroConfig(stage=stage), mesh, batch=BATCH
    )
    state = program.init(jax.random.key(0))
    state, _ = jax.block_until_ready(program.step(state, BATCH))
    program.lower(BATCH)
    jax.block_until_ready(program.step(state, BATCH))
    # The optimizer's init runs once for shapes and once for the state.
    assert calls.count == {"init": 1, "loss": 1, "tx.init": 2, "tx.update": 1}


@pytest.mark.parametrize("config", [{}, {"opt_state": "pinned_host"}], ids=["resident", "streamed"])
def test_a_step_is_traced_when_the_batch_is_checked_and_not_again(config):
    calls = Calls()

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        calls.count["block"] += 1
        return jnp.tanh(x @ p["w"])

    model = zj.LayeredModel(
        3,
        lambda key: {"w": jnp.ones((16, 16))},
        lambda p, batch, key: batch @ p["w"],
        lambda key: {"w": jax.random.normal(key, (16, 16)) / 4},
        block,
        lambda key: {"w": jnp.ones((16, 1))},
        lambda p, p_embed, x, batch, key: jnp.mean((x @ p["w"]) ** 2),
    )
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    program = zj.build_train_step(
        model, calls.optimizer(), zj.ZeroConfig(**config), mesh, batch=BATCH
    )
    state = program.init(jax.random.key(0))
    traced = dict(calls.count)
    state, _ = jax.block_until_ready(program.step(state, BATCH))
    program.lower(BATCH)
    assert calls.count["block"] == traced["block"]
    assert calls.count["tx.update"] == traced["tx.update"]


@pytest.mark.parametrize("large", [False, True])
def test_parameters_are_those_that_the_module_makes_of_the_key(large):
    table = np.linspace(0, 1, 1 << 19 if large else 16, dtype=np.float32)

    class Module(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(4, 4, rngs=rngs)
            self.table = nnx.Param(jnp.asarray(table))

    model = zj.from_flax(
        lambda rngs: Module(rngs), lambda module, batch: jnp.mean(module.dense(batch))
    )
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        made = jax.jit(model.init)(key)
        expected = nnx.to_pure_dict(nnx.state(Module(nnx.Rngs(key)), nnx.Param))
        jax.tree.map(np.testing.assert_array_equal, made, expected)
