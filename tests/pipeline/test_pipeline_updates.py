"""Updates in pipeline stages: skipped steps, loss scaling, frozen weights, gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import long_decoder
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

LAYERS, MICROBATCHES = 8, 4


def build(model: zj.LayeredModel, mesh: dict[str, int], **fields: Any) -> zj.Program:
    size = int(np.prod(list(mesh.values())))
    return zj.build_train_step(
        model,
        optax.adam(1e-2, eps=1e-2),
        zj.ZeroConfig(num_microbatches=MICROBATCHES, **fields),
        zj.make_mesh(**mesh, devices=jax.devices()[:size]),
    )


def both(model: zj.LayeredModel, chunks: int = 1, **fields: Any) -> tuple[zj.Program, zj.Program]:
    """Return the program of 2 stages, and that of one device."""
    pipelined = build(model, {"pipe": 2, "fsdp": 2}, pipe_chunks=chunks, **fields)
    return pipelined, build(model, {"fsdp": 1}, **{**fields, "stage": 0})


def with_poison(model: zj.LayeredModel, layer: int) -> zj.LayeredModel:
    """Return a model in which one layer's gradient is infinite if a batch asks for it."""

    def context(batch: Any) -> Any:
        return batch["segment_ids"], batch["poison"]

    def block(p: Any, x: Any, key: Any, context: Any, number: Any) -> Any:
        segment_ids, poison = context
        y = model.block(p, x, key, segment_ids, None)
        factor = jnp.where((number == layer) & (poison[:, None, None] > 0), jnp.inf, 1.0)
        # The derivative is infinite, and the value is not.
        return y + (factor - 1) * (y - jax.lax.stop_gradient(y)).astype(y.dtype)

    numbers = np.arange(LAYERS, dtype=np.int32)
    return dataclasses.replace(model, context=context, block=block, per_layer=numbers)


def test_a_gradient_of_one_stage_that_is_not_finite_skips_the_update():
    model = with_poison(long_decoder.model(layers=LAYERS), layer=5)
    program, _ = both(model, precision="fp16", stage=1)
    state = program.init(jax.random.key(0))
    good, bad = long_decoder.batches(2)
    good["poison"] = np.zeros(len(good["tokens"]), np.float32)
    bad["poison"] = np.ones(len(bad["tokens"]), np.float32)
    state, metrics = jax.block_until_ready(program.step(state, good))
    before = jax.device_get((state.master, state.opt_state))
    scale = float(state.loss_scale.scale)
    state, metrics = jax.block_until_ready(program.step(state, bad))
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.skipped) == 1
    assert float(state.loss_scale.scale) < scale
    after = jax.device_get((state.master, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    _, metrics = jax.block_until_ready(program.step(state, good))
    assert np.isfinite(metrics["grad_norm"])


def test_frozen_weights_stay_and_the_others_equal_one_device():
    flags = {name: name not in ("out", "down") for name in long_decoder.SPECS}
    model = dataclasses.replace(
        long_decoder.model(layers=LAYERS), frozen={"embed": True, "block": flags}
    )
    programs = both(model, chunks=2, stage=3, activations="save")
    results = []
    for program in programs:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in long_decoder.batches(3):
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses.append(float(metrics["loss"]))
        results.append((losses, jax.device_get(program.params(state))))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=2e-6)
    toys.assert_trees_close(results[0][1], results[1][1], atol=5e-6)


def test_gradients_equal_one_device():
    results = []
    for program in both(long_decoder.model(layers=LAYERS), stage=2, activations="remat"):
        state = program.init(jax.random.key(0))
        loss, grads = program.grads(state, long_decoder.batches(1)[0])
        results.append((float(loss["loss"]), jax.device_get(grads)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=2e-6)
    toys.assert_trees_close(results[0][1], results[1][1], atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("opt_state", ["device", "pinned_host"])
def test_masks_by_dims_see_single_layers(opt_state):
    def mask(params: Any) -> Any:
        return jax.tree.map(lambda a: a.ndim > 1, params)

    model = dataclasses.replace(toys.layered(), num_layers=LAYERS)
    results = []
    for axes, tier in (({"pipe": 2, "fsdp": 2}, opt_state), ({"fsdp": 1}, "device")):
        program = zj.build_train_step(
            model,
            optax.adamw(1e-2, eps=1e-2, weight_decay=0.5, mask=mask),
            zj.ZeroConfig(num_microbatches=MICROBATCHES, opt_state=tier),
            zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))]),
        )
        state = program.init(jax.random.key(0))
        for batch in toys.batches(3):
            state, _ = jax.block_until_ready(program.step(state, batch))
        results.append(jax.device_get(program.params(state)))
    toys.assert_trees_close(*results, atol=2e-6)
