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
from zerojax.models import build_objective

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


RANDOM = {"lm1b", "diffusion", "recurrent", "stacked", "layered"}
SPECS = {
    "lm1b": lambda p: p["encoderdecoderblock_0"]["Dense_0"]["kernel"] == P(None, "tensor"),
    "gemma": lambda p: (
        p["blocks"][0]["up_proj"]["kernel"] == P(None, "tensor") and p["table"] == P("tensor", None)
    ),
    "qwen3": lambda p: p["blocks"][0]["down_proj"]["kernel"] == P("tensor", None),
    "maxtext": lambda p: p["layers"]["Dense_0"]["kernel"] == P(None, None, "tensor"),
    "stacked": lambda p: p["layers"]["down"]["kernel"] == P(None, "tensor", None),
}


STAGES = [(stage, "device") for stage in range(4)] + [(3, "pinned_host"), (3, "nvme")]


def params_of(program: zj.Program, state: Any, model: Any) -> Any:
    """Return the parameters as a tree, including those on disk."""
    if not isinstance(model, zj.LayeredModel):
        return jax.device_get(program.params(state))
    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    layers = [pieces[f"blocks/{i}"] for i in range(model.num_layers)]
    return {
        "embed": pieces["embed"],
        "blocks": jax.tree.map(lambda *a: np.stack(a), *layers),
        "head": pieces["head"],
    }


def differences(name: str, stage: int, tier: str, swap_dir: Any) -> tuple[float, float]:
    """Train with a program and with plain optax.

    Returns the largest relative difference of losses, and of parameters.
    """
    make, batches = others.MODELS[name]
    data = batches(STEPS)
    model = make(data[0])
    assert name not in SPECS or SPECS[name](model.specs)
    assert model.stochastic is (name in RANDOM)
    # A layered model's parameters may be stored elsewhere; for other models, only the optimizer's
    # state.
    moved = (
        ("params", "grads", "opt_state") if isinstance(model, zj.LayeredModel) else ("opt_state",)
    )
    config = zj.ZeroConfig(
        stage=stage,
        **dict.fromkeys(moved, tier),
        swap_dir=str(swap_dir) if tier == "nvme" else None,
    )
    with zj.build_train_step(model, optax.adamw(1e-2), config, MESH) as program:
        state = program.init(jax.random.key(0))
        params, key = (
            params_of(program, state, model),
            jax.random.wrap_key_data(np.asarray(jax.random.key_data(state.key))),
        )
        losses, state = toys.run(program, state, data)
        if name in RANDOM:  # nothing is drawn in evaluation
            assert float(program.eval(state, data[0])) == float(program.eval(state, data[0]))
        expected, after = plain_run(
            lambda p, b, k: build_objective(model)(p, b, k, None)[0].value(), params, key, data
        )
        pairs = zip(
            jax.tree.leaves(params_of(program, state, model)), jax.tree.leaves(after), strict=True
        )
        of_params = max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)
    return float(np.max(np.abs(np.subtract(losses, expected)) / np.abs(expected))), of_params


@pytest.mark.by_default("3-device-gemma", "2-device-maxtext", "3-device-diffusion")
@pytest.mark.parametrize("name", others.MODELS)
@pytest.mark.parametrize(("stage", "tier"), STAGES)
def test_models_of_others_train_with_the_numbers_of_plain_optax(name, stage, tier, tmp_path):
    of_losses, of_params = differences(name, stage, tier, tmp_path)
    assert of_losses <= 1e-5
    assert of_params <= 1e-4
