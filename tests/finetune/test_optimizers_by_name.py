"""Optimizers and schedules by name: their rates, and programs that take them."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
import toys
from optimizers import Optimizer, build_optimizer, build_schedule, check_optimizer

import zerojax as zj


@pytest.mark.parametrize(("name", "end"), [("cosine", 0.2), ("linear", 0.2), ("constant", 1.0)])
def test_rates_rise_and_then_follow_their_schedule(name, end):
    rate: Any = build_schedule(name, 1.0, 100, warmup_steps=4, final_rate=0.2)
    np.testing.assert_allclose([rate(k) for k in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    middle = {"cosine": 0.6, "linear": 0.6, "constant": 1.0}
    np.testing.assert_allclose([rate(52), rate(100)], [middle[name], end], rtol=1e-6)
    assert build_schedule(name, 1.0, 100, warmup_steps=0)(0) == 1.0
    assert build_schedule(name, 1.0, 1)(0) == 0.5  # a run of one step


def test_default_schedule_is_that_of_older_runs():
    rate, older = (
        build_schedule("cosine", 1e-3, 90),
        optax.warmup_cosine_decay_schedule(1e-3 / 4, 1e-3, 3, 90, 1e-4),
    )
    assert [float(rate(k)) for k in range(0, 91, 9)] == [float(older(k)) for k in range(0, 91, 9)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("adamw", None, -1, None), "--warmup-steps -1"),
        (("adamw", None, None, 2.0), "--final-rate 2.0"),
        (("adamw", None, None, float("nan")), "--final-rate nan"),
        (("muon", "constant", None, 0.5), "use --schedule cosine or linear"),
        (("schedule_free", "cosine", None, None), "use --schedule constant"),
        (("schedule_free", None, None, 0.5), "use --schedule cosine or linear"),
    ],
)
def test_options_that_contradict_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        check_optimizer(given[0], given[1], given[2], given[3], zj.ZeroConfig())
    with pytest.raises(ValueError, match="--warmup-steps 5: the run has only 5 steps"):
        build_schedule("linear", 1.0, 5, 5)


def test_schedule_free_is_refused_where_averages_cannot_be_evaluated(tmp_path):
    config = zj.ZeroConfig(params="nvme", swap_dir=str(tmp_path))
    with pytest.raises(ValueError, match="which --params nvme cannot take the place of weights"):
        check_optimizer("schedule_free", None, None, None, config)


def test_all_names_decay_weights_at_the_same_rate_and_move_adapters_from_zero():
    params = {
        "embed": {"w": jnp.ones((4, 4))},
        "blocks": {"a": jnp.ones((6, 4)), "b": jnp.zeros((4, 6)), "scale": jnp.ones(4)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    gradient = jnp.cos(jnp.arange(24.0)).reshape(4, 6)
    grads = zeros | {"blocks": zeros["blocks"] | {"b": gradient}}
    sizes = {}
    for name in get_args(Optimizer):
        tx = build_optimizer(name, optax.constant_schedule(0.1), 0.5)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        sizes[name] = float(jnp.sqrt(jnp.mean(updates["blocks"].pop("b") ** 2)))
        for path, update in jax.tree.leaves_with_path(updates):
            np.testing.assert_allclose(update, -0.05, atol=1e-6, err_msg=f"{name} {path}")
    assert all(0.01 < size < 0.2 for size in sizes.values()), sizes
    muon = optimizers.matrices_of_layers(params)
    assert muon["embed"]["w"] is None
    assert muon["blocks"]["scale"] is None
    assert muon["blocks"]["a"] is not None


def test_schedule_free_is_that_of_optax():
    ours: Any = zj.schedule_free_adamw(0.1, weight_decay=0.1)
    theirs: Any = optax.contrib.schedule_free_adamw(0.1, weight_decay=0.1)
    params: Any = {"w": jnp.linspace(-1, 1, 8)}
    other: Any = params
    state, other_state = ours.init(params), theirs.init(other)
    for k in range(5):
        noise = jnp.sin(jnp.arange(8.0) + k)
        updates, state = ours.update({"w": 3 * params["w"] + noise}, state, params)
        params = optax.apply_updates(params, updates)
        updates, other_state = theirs.update({"w": 3 * other["w"] + noise}, other_state, other)
        other = optax.apply_updates(other, updates)
    average: Any = optax.contrib.schedule_free_eval_params(other_state, other)
    np.testing.assert_allclose(params["w"], other["w"], atol=1e-6)
    np.testing.assert_allclose(state[2].ema_params["w"], average["w"], atol=1e-6)
    assert float(jnp.abs(params["w"] - average["w"]).max()) > 1e-3  # so both are compared
    with pytest.raises(ValueError, match="b1=1 of schedule_free_adamw"):
        zj.schedule_free_adamw(0.1, b1=1)


@pytest.mark.exhaustive  # by default tests/optim runs rules like these in the tiers
@pytest.mark.parametrize("name", get_args(Optimizer))
def test_every_name_gives_the_same_losses_in_every_tier(name, tmp_path):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    host, disk = (
        dict.fromkeys(("params", "grads", "opt_state"), at) for at in ("pinned_host", "nvme")
    )
    losses = []
    for tier in (
        {"stage": 3},
        host,
        {**disk, "swap_dir": str(tmp_path)},
        {"update": "in_backward"},
    ):
        tx = build_optimizer(name, optax.linear_schedule(0.01, 0.03, 3), 0.1)
        with zj.build_train_step(toys.small(), tx, zj.ZeroConfig(**tier), mesh) as program:
            state = program.init(jax.random.key(0))
            losses.append(toys.run(program, state, toys.batches(5))[0])
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=2e-6)
    assert losses[0][-1] < losses[0][0]
