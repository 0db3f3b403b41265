"""Evaluations in pipeline stages: microbatches pass through the layers, and rows keep their order."""

import dataclasses
import functools
from typing import Any

import jax
import long_decoder
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

LAYERS, CHUNKS, MICROBATCHES = 8, 2, 4
MODEL = dataclasses.replace(
    toys.small(),
    num_layers=LAYERS,
    predict=lambda p, p_embed, x, batch: x @ p["out"],
)


def outputs(params: Any, batch: Any) -> Any:
    """Return the model's outputs by its own functions, layer after layer."""
    x = MODEL.embed(params["embed"], batch, None)
    for layer in range(LAYERS):
        x = MODEL.block(jax.tree.map(lambda a, n=layer: a[n], params["blocks"]), x, None)
    return x @ params["head"]["out"]


@pytest.mark.by_default("microbatches")
@pytest.mark.parametrize(
    ("rows", "num_ticks"),
    [(toys.BATCH, CHUNKS * MICROBATCHES + 1), (12, 2 * CHUNKS)],
    ids=["microbatches", "one"],
)
def test_outputs_and_loss_are_those_of_the_batch(rows, num_ticks):
    mesh = zj.make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])
    config = zj.ZeroConfig(num_microbatches=MICROBATCHES, pipe_chunks=CHUNKS, stage=1)
    program = zj.build_train_step(MODEL, optax.sgd(1e-2), config, mesh)
    state = program.init(jax.random.key(0))
    batch = toys.batches(1, rows)[0]
    wanted = outputs(jax.device_get(program.params(state)), batch)
    np.testing.assert_allclose(program.apply(state, batch), wanted, rtol=0, atol=2e-6)
    loss = float(program.eval(state, batch))
    assert loss == pytest.approx(float(toys.cross_entropy(wanted, batch)), rel=2e-6)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(program._step.eval)(state.params, None, batch)
    lengths = [eqn.params["length"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert num_ticks in lengths


MESHES: dict[str, dict[str, int]] = {
    "tensor": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "stream": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "context": {"pipe": 2, "fsdp": 2, "context": 2},
    "expert": {"pipe": 2, "fsdp": 2, "expert": 2},
    "data": {"pipe": 2, "data": 2, "fsdp": 2},
    "pipe4": {"pipe": 4, "fsdp": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_evaluates_as_one_device(name, stage):
    results = []
    for axes in (MESHES[name], {"fsdp": 1}):
        attend = long_decoder.plain_attention
        if "context" in axes:
            attend = functools.partial(long_decoder.split_attention, "ring")
        model = long_decoder.model(attend, name == "expert", layers=LAYERS)
        size = int(np.prod(list(axes.values())))
        program = zj.build_train_step(
            model,
            optax.sgd(1e-2),
            zj.ZeroConfig(
                num_microbatches=MICROBATCHES,
                stage=stage,
                sequence_parallel=name == "stream" and "tensor" in axes,
            ),
            zj.make_mesh(**axes, devices=jax.devices()[:size]),
        )
        state = program.init(jax.random.key(0))
        batch = long_decoder.batches(1)[0]
        results.append(jax.device_get(program.eval(state, batch)))
    assert results[0]["counted"] == results[1]["counted"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=2e-6)
