"""bf16, fp16 with dynamic loss scaling, and non-finite gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import zerojax as zj
from zerojax.precision import LossScaling, init_loss_scale, update_loss_scale

MESH = {"data": 2, "fsdp": 4}


def reference_fp16(
    params: Any, data: list[Any], scaling: LossScaling, lr: float
) -> tuple[list[float], list[float], Any]:
    """Train in mixed precision in a plain Python loop on one device.

    numpy makes the decisions, and nothing is shared with zerojax.
    """
    master = jax.device_put(jax.device_get(params), jax.devices()[0])
    tx = optax.adam(lr)
    opt_state = tx.init(master)
    scale, good = scaling.initial, 0

    @jax.jit
    def grads_of(master: Any, batch: Any, scale: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.float16), master)
        scaled = jax.grad(lambda p: toys.plain_loss(p, batch).astype(jnp.float32) * scale)(half)
        return toys.plain_loss(half, batch), jax.tree.map(
            lambda g: g.astype(jnp.float32) / scale, scaled
        )

    losses, scales = [], []
    for batch in data:
        loss, grads = grads_of(master, batch, jnp.float32(scale))
        losses.append(float(loss))
        scales.append(scale)
        if all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads)):
            updates, opt_state = tx.update(grads, opt_state, master)
            master, good = optax.apply_updates(master, updates), good + 1
            if good == scaling.growth_interval:
                scale, good = scale * scaling.growth_factor, 0
        else:
            scale, good = scale * scaling.backoff_factor, 0
    return losses, scales, jax.device_get(master)


@pytest.mark.by_default("3-2")
@pytest.mark.parametrize(
    ("stage", "num_microbatches"),
    [
        (0, 1),
        (1, 2),
        (3, 1),
        (3, 2),
        pytest.param(0, 2, marks=pytest.mark.exhaustive),
        pytest.param(1, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_fp16_overflow_skips_the_update_and_training_follows_the_reference(stage, num_microbatches):
    scaling = LossScaling(initial=2.0**10, growth_interval=3)
    config = zj.ZeroConfig(
        stage=stage, precision="fp16", loss_scaling=scaling, num_microbatches=num_microbatches
    )
    program = zj.build_train_step(toys.layered(), optax.adam(1e-2), config, zj.make_mesh(**MESH))
    state = program.init(jax.random.key(0))
    data = toys.batches(10)
    data[4]["weight"] = np.float32(1e6)  # overflows float16 in backward
    expected_losses, expected_scales, expected = reference_fp16(
        program.master_params(state), data, scaling, 1e-2
    )
    losses, scales, metrics = [], [], {}
    for index, batch in enumerate(data):
        before = jax.device_get(program.master_params(state))
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        scales.append(float(metrics["loss_scale"]))
        assert float(metrics["grads_finite"]) == (index != 4)
        assert np.isfinite(float(metrics["grad_norm"])) == (index != 4)
        if index == 4:
            toys.assert_trees_close(jax.device_get(program.master_params(state)), before, atol=0)
    assert scales == expected_scales
    assert scales[4:6] == [2.0**11, 2.0**10]  # grew after 3 good steps, halved after the overflow
    assert float(metrics["skipped_steps"]) == 1
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-3)  # float16 has 11 bits
    toys.assert_trees_close(program.master_params(state), expected, atol=2e-2)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_non_finite_gradient_never_reaches_the_weights(precision):
    config = zj.ZeroConfig(stage=3, precision=precision, clip_norm=1.0)
    program = zj.build_train_step(toys.layered(), optax.adam(1e-2), config, zj.make_mesh(**MESH))
    state = program.init(jax.random.key(0))
    good, bad = toys.batches(2)
    bad["weight"] = np.float32(np.nan)
    state, _ = program.step(state, good)
    before = jax.device_get((program.master_params(state), state.opt_state))
    state, metrics = program.step(state, bad)
    assert float(metrics["grads_finite"]) == 0
    assert float(metrics["skipped_steps"]) == 1
    toys.assert_trees_close(
        jax.device_get((program.master_params(state), state.opt_state)), before, atol=0
    )
    state, metrics = program.step(state, good)
    assert float(metrics["grads_finite"]) == 1
    assert int(state.step) == 3


@pytest.mark.by_default("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_has_float32_masters_and_follows_float32(stage):
    data, mesh = toys.batches(8), zj.make_mesh(**MESH)
    curves = {}
    for precision in ("fp32", "bf16"):
        config = zj.ZeroConfig(stage=stage, precision=precision, clip_norm=1.0)
        program = zj.build_train_step(toys.layered(), optax.adamw(1e-2), config, mesh)
        state = program.init(jax.random.key(0))
        curves[precision], state = toys.run(program, state, data)
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(program.params(state)))
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(program.master_params(state)))
    rounded = jax.tree.map(
        lambda m: np.asarray(m).astype(jnp.bfloat16), program.master_params(state)
    )
    toys.assert_trees_close(
        jax.tree.map(lambda a: a.astype(jnp.float32), program.params(state)), rounded, atol=0
    )
    np.testing.assert_allclose(curves["bf16"], curves["fp32"], rtol=2e-2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_loss_scale_follows_its_rules(finite, growth_interval, hysteresis):
    config = LossScaling(
        initial=64.0, growth_interval=growth_interval, hysteresis=hysteresis, most=256.0
    )
    state = init_loss_scale(config)
    scale, good, patience = 64.0, 0, hysteresis
    for ok in finite:
        state = update_loss_scale(config, state, jnp.asarray(ok))
        if ok:
            good += 1
            if good == growth_interval:
                scale, good, patience = min(scale * 2, 256.0), 0, hysteresis
        else:
            good, patience = 0, patience - 1
            if patience == 0:
                scale, patience = max(scale / 2, 1.0), hysteresis
        assert (float(state.scale), int(state.good_steps), int(state.patience)) == (
            scale,
            good,
            patience,
        )
