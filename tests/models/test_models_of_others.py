"""Models as their authors write them train with the numbers of plain optax, and evaluate."""

from typing import Any

import jax
import models_of_others as others
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj

STEPS = 8
MESH = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])


def plain_run(loss: Any, params: Any, key: jax.Array, data: list[Any]) -> tuple[list[float], Any]:
    """Train on one device with optax alone, with the keys of a program's steps."""
    tx = optax.adamw(1e-2)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, key = jax.device_put((params, key), jax.devices()[0])
    opt_state, losses = tx.init(params), []
    for number, batch in enumerate(data):
        params, opt_state, value = step(params, opt_state, batch, jax.random.fold_in(key, number))
        losses.append(float(value))
    return losses, jax.device_get(params)


RANDOM = {"lm1b", "diffusion", "recurrent", "stacked"}
SPECS = {
    "lm1b": lambda p: p["encoderdecoderblock_0"]["Dense_0"]["kernel"] == P(None, "tensor"),
    "gemma": lambda p: p["blocks"][0]["up_proj"]["kernel"] == P(None, "tensor") and p["table"] == P("tensor", None),
    "qwen3": lambda p: p["blocks"][0]["down_proj"]["kernel"] == P("tensor", None),
    "maxtext": lambda p: p["layers"]["Dense_0"]["kernel"] == P(None, None, "tensor"),
    "stacked": lambda p: p["layers"]["down"]["kernel"] == P(None, "tensor", None),
}


@pytest.mark.by_default("lm1b-3", "gemma-3", "maxtext-2", "diffusion-3", "recurrent-3")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", others.MODELS)
def test_models_of_others_train_with_the_numbers_of_plain_optax(name, stage):
    make, batches = others.MODELS[name]
    data = batches(STEPS)
    model = make(data[0])
    assert name not in SPECS or SPECS[name](model.specs)
    program = zj.build_train_step(model, optax.adamw(1e-2), zj.ZeroConfig(stage=stage), MESH)
    state = program.init(jax.random.key(0))
    params, key = jax.device_get(program.params(state)), jax.random.wrap_key_data(np.asarray(jax.random.key_data(state.key)))
    losses, state = toys.run(program, state, data)
    expected, after = plain_run(model.loss, params, key, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), after, atol=1e-4)
    assert model.stochastic is (name in RANDOM)
    if name in RANDOM:  # nothing is drawn
        assert float(program.eval(state, data[0])) == float(program.eval(state, data[0]))
