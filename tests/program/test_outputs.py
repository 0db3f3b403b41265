"""Outputs, gradients, and losses of batches of any size equal the plain model's.

The state stays in its tiers.
"""

import dataclasses

import full_model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.models import init_params, init_state
from zerojax.sharding import Rows

HOST = "pinned_host"
TX = optax.adam(1e-2)
CASES = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    "remat": {"activations": "remat"},
    "opt_state": {"stage": 1, "opt_state": HOST},
    "opt_on_disk": {"stage": 2, "opt_state": "nvme"},
    "on_host": {"stage": 2, "opt_state": HOST, "update_on": "host"},
    "selective": {"stage": 1, "activations": "selective"},
    "gather_ahead": {"gather_ahead": True, "params": HOST},
    "host": {"params": HOST, "opt_state": HOST, "activations": HOST},
    "nvme": {"params": "nvme", "opt_state": "nvme", "activations": "nvme"},
    "frozen": {"frozen": "nvme", "opt_state": HOST},
}
KINDS = {"layered": full_model.model, "model": full_model.unlayered}
REFUSED = {"grads": HOST, "update": "in_backward", "update_on": "host"}
STREAMED = ("selective", "gather_ahead", "host", "nvme", "frozen")


def assert_trees_close(actual, expected, rtol=0.0, atol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


def plain_gradients(params, batch, state, count, layered):
    """Return the loss and gradients of a loop over microbatches that pass the state on."""
    whole, grads, total = batch["counts"].sum(), jax.tree.map(jnp.zeros_like, params), 0.0

    @jax.jit
    def of_microbatch(params, piece, state):
        def value(params):
            loss, after, added = full_model.forward(params, piece, state)
            # The Model adds its layers' additions to its total, with its weight.
            return loss.total / whole + added.total * (
                1 / count if layered else loss.weight / whole
            ), after

        return jax.value_and_grad(value, has_aux=True)(params)

    for number in range(count):
        piece = jax.tree.map(lambda a, number=number: jnp.asarray(a[number::count]), batch)
        (one, state), g = of_microbatch(params, piece, state)
        total, grads = total + one, jax.tree.map(jnp.add, grads, g)
    return total, grads


@pytest.mark.by_default("layered-stage3-2")
@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        (k, n, c)
        for k in KINDS
        for n in CASES
        for c in (1, 2)
        if n not in (STREAMED if k == "model" else ("on_host",))
    ],
)
def test_outputs_losses_and_gradients_equal_the_plain_models(kind, name, count, tmp_path):
    model, key = KINDS[kind](), jax.random.key(0)
    if name == "frozen":
        model = dataclasses.replace(
            model, frozen={"embed": True, "block": {"w": False, "router": True}}
        )
    params, state = jax.jit(
        lambda key: (init_params(model, key), init_state(full_model.model(), key))
    )(key)
    config = zj.ZeroConfig(
        **{"stage": 3, "num_microbatches": count, "swap_dir": tmp_path, **CASES[name]}
    )
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with zj.build_train_step(model, TX, config, mesh) as program:
        now = program.init(key)
        (batch,), (odd,), (few,) = (full_model.batches(1, size) for size in (16, 5, 1))
        loss, grads = program.grads(now, batch)
        outputs = program.apply(now, odd)  # 5 rows do not divide by 2 devices, and 1 is fewer
        assert_trees_close(outputs, jax.jit(full_model.plain_outputs)(params, odd, state))
        got = program.eval(now, few)
        assert_trees_close(
            got["loss"], jax.jit(full_model.plain_loss)(params, few, state), rtol=1e-5
        )
        total, want = plain_gradients(params, batch, state, count, kind == "layered")
        np.testing.assert_allclose(loss["loss"], total, rtol=1e-5)
        if name == "frozen":
            grads = dict(grads)
            assert grads["embed"] == {"table": None}
            assert grads["blocks"].pop("router") is None
            want = {"blocks": {"w": want["blocks"]["w"]}, "head": want["head"]}
            del grads["embed"]
        assert_trees_close(grads, want, atol=1e-6)
        if name not in ("nvme", "frozen"):
            at = jax.tree.map(lambda s: s.with_memory_kind("device"), program.shardings.params)
            assert jax.tree.map(lambda g: g.sharding, grads) == at
        if count == 2:
            return
        outputs = program.apply(now, batch)
        assert outputs.sharding.spec == P(("data", "fsdp"))
        assert_trees_close(outputs, full_model.plain_outputs(params, batch, state))
        got = program.eval(now, odd)
        assert_trees_close(got["loss"], full_model.plain_loss(params, odd, state), rtol=1e-5)
        assert_trees_close(program.apply(now, few), full_model.plain_outputs(params, few, state))
        # Nothing was donated, so training continues.
        now, metrics = program.step(now, batch)
        jax.block_until_ready(now)
        np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-5)


def dense():
    """Return a layered model with dropout and a mean as its loss, without weights."""

    def block(p, x, key):
        y = x + jnp.tanh(x @ p["w"])
        return y if key is None else y * jax.random.bernoulli(key, 0.5, y.shape)

    init = lambda key: {"w": toys.draw(key, (8, 8)) / 4}  # noqa: E731
    embed = lambda p, batch, key: batch["x"] @ p["w"]  # noqa: E731
    head = lambda p, p_embed, x, batch, key: jnp.mean((x @ p["w"] - batch["y"]) ** 2)  # noqa: E731
    predict = lambda p, p_embed, x, batch: x @ p["w"]  # noqa: E731
    return zj.LayeredModel(
        2, init, embed, init, block, init, head, stochastic=True, predict=predict
    )


def whole(program, state):
    """Return the parameters of a layered model from any tier."""
    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    layers = [pieces.pop(f"blocks/{number}") for number in range(program.model.num_layers)]
    return {**pieces, "blocks": jax.tree.map(lambda *a: np.stack(a), *layers)}


@pytest.mark.by_default("nvme")
@pytest.mark.parametrize("name", ["stage3", "nvme"])
def test_gradients_have_the_next_steps_keys_and_a_mean_over_odd_rows_is_one(name, tmp_path):
    config = zj.ZeroConfig(
        **{"stage": 3, "num_microbatches": 2, "swap_dir": tmp_path, **CASES[name]}
    )
    rng = np.random.default_rng(0)
    program = zj.build_train_step(
        dense(), optax.sgd(1.0), config, zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    )
    state = program.init(jax.random.key(0))
    batch = {
        "x": rng.standard_normal((8, 8), np.float32),
        "y": rng.standard_normal((8, 8), np.float32),
    }
    value, grads = program.grads(state, batch)
    before = whole(program, state)
    seven = jax.tree.map(lambda a: a[:7], batch)
    x = seven["x"] @ before["embed"]["w"]
    for w in before["blocks"]["w"]:
        x = x + np.tanh(x @ w)
    outputs = x @ before["head"]["w"]
    assert_trees_close(program.apply(state, seven), outputs)
    want = np.mean((outputs - seven["y"]) ** 2)
    np.testing.assert_allclose(program.eval(state, seven), want, rtol=1e-5)
    state, metrics = program.step(state, batch)
    jax.block_until_ready(state)
    moved = jax.tree.map(lambda a, b: a - b, before, whole(program, state))
    program.close()
    assert_trees_close(moved, jax.device_get(grads), atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)


def test_gradients_of_float16_have_no_loss_scale():
    model = zj.Model(
        lambda key: {"w": jnp.ones(8)},
        lambda p, batch, key: (batch["x"] @ p["w"]).mean(dtype=jnp.float32),
    )
    program = zj.build_train_step(
        model, TX, zj.ZeroConfig(stage=1, precision="fp16"), zj.make_mesh(fsdp=8)
    )
    _, grads = program.grads(
        program.init(jax.random.key(0)), {"x": np.full((8, 8), 0.25, np.float16)}
    )
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], np.full(8, 0.25))
    assert grads["w"].sharding.is_fully_replicated  # like the parameters of stage 1


def test_outputs_of_other_shapes_are_on_every_device():
    def predict(p, batch):
        return {
            "rows": batch["x"] @ p["w"],
            "norm": jnp.sum(p["w"] ** 2),
            "w": 2 * p["w"],
        }

    model = zj.Model(
        lambda key: {"w": jnp.ones(8)},
        lambda p, batch, key: jnp.mean(batch["x"] @ p["w"]),
        predict=predict,
    )
    program = zj.build_train_step(
        model, TX, zj.ZeroConfig(stage=3), zj.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    )
    state = program.init(jax.random.key(0))
    outputs = program.apply(state, {"x": np.ones((4, 8), np.float32)})
    assert outputs["rows"].sharding.spec == P(("data", "fsdp"))
    assert outputs["norm"].sharding.is_fully_replicated
    np.testing.assert_array_equal(outputs["w"], np.full(8, 2))
    odd = program.apply(state, {"x": np.ones((5, 8), np.float32)})
    np.testing.assert_array_equal(odd["rows"], np.full(5, 8))
    assert odd["rows"].sharding.is_fully_replicated


def test_a_model_without_predict_is_told_the_argument():
    model = zj.Model(
        lambda key: {"w": jnp.ones(8)}, lambda p, batch, key: jnp.mean(batch["x"] @ p["w"])
    )
    program = zj.build_train_step(model, TX, zj.ZeroConfig(), zj.make_mesh(fsdp=8))
    with pytest.raises(
        ValueError,
        match=r"this Model has none: give it predict=, as Model\(..., predict=...\) or from_flax",
    ):
        program.apply(program.init(jax.random.key(0)), {"x": np.ones((8, 8), np.float32)})


@pytest.mark.by_default("grads")
@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=REFUSED)
def test_gradients_that_are_not_on_the_device_are_refused(name, value):
    config = zj.ZeroConfig(params=HOST, opt_state=HOST, **{name: value})
    program = zj.build_train_step(dense(), TX, config, zj.make_mesh(fsdp=8))
    with pytest.raises(
        NotImplementedError,
        match=rf"program.grads is not supported.*{name}='{value}'.*build a program with",
    ):
        program.grads(program.init(jax.random.key(0)), {})


def test_a_loss_without_logits_takes_odd_rows_whose_tokens_divide():
    """linear_cross_entropy splits tokens itself, in a shard_map.

    5 rows of 4 tokens divide by 4 devices; 5 rows of 3 tokens do not.
    """

    def init(key):
        return {"table": toys.draw(key, (16, 8))}

    def loss(p, batch, key):
        return zj.linear_cross_entropy(
            jnp.tanh(p["table"][batch["tokens"]]), p["table"].T, batch["targets"]
        )

    program = zj.build_train_step(
        zj.Model(init, loss),
        TX,
        zj.ZeroConfig(stage=3),
        zj.make_mesh(fsdp=4, devices=jax.devices()[:4]),
    )
    state, rng = program.init(jax.random.key(0)), np.random.default_rng(0)
    batch = {name: rng.integers(0, 16, (5, 4)) for name in ("tokens", "targets")}
    table = init(jax.random.key(0))["table"]
    logits = jnp.tanh(table[batch["tokens"]]) @ table.T
    want = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    np.testing.assert_allclose(program.eval(state, batch), want, rtol=1e-5)
    with pytest.raises(ValueError, match="T=15 does not divide by 4"):
        program.eval(state, jax.tree.map(lambda a: a[:, :3], batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", [HOST, "nvme"])
def test_blocks_whose_tiles_are_records(tier, tmp_path):
    predict = lambda p, p_embed, x, batch: x @ p["out"]  # noqa: E731
    model = dataclasses.replace(tiled_toys.model(stochastic=False), predict=predict)
    (batch,), results = tiled_toys.batches(1), []
    odd = jax.tree.map(lambda a: a[:5], batch)
    for fields in ({}, {"params": tier, "opt_state": tier, "activations": tier}):
        config = zj.ZeroConfig(stage=3, num_microbatches=2, swap_dir=tmp_path, **fields)
        with tiled_toys.build(config, {"fsdp": 2}, model) as program:
            state = program.init(jax.random.key(0))
            found = [
                program.eval(state, odd),
                program.apply(state, odd),
                program.apply(state, batch),
            ]
            results.append(jax.device_get([*found, program.grads(state, batch)]))
            if fields:
                state, metrics = jax.block_until_ready(program.step(state, batch))
                np.testing.assert_allclose(metrics["loss"], results[0][3][0], rtol=1e-5)
    assert_trees_close(results[1], results[0], atol=1e-6)


def test_rows_that_each_process_padded_are_cut_part_by_part():
    mesh, padded = (
        zj.make_mesh(fsdp=4, devices=jax.devices()[:4]),
        jnp.asarray([0, 1, 2, 2, 3, 4, 5, 5]),
    )
    batch = {
        "rows": padded,
        "weight": jnp.float32(2),
        "whole": jnp.asarray([0, 1, 2, 3, 4, 5, 5, 5]),
    }
    with jax.set_mesh(mesh):
        cut = jax.jit(
            lambda batch: jax.tree.map(lambda a: 1 * a, Rows(6, (2, 1, 1)).cut(batch, mesh)),
            out_shardings=P(),
        )(batch)
    np.testing.assert_array_equal(cut["rows"], np.arange(6))
    np.testing.assert_array_equal(cut["whole"], np.arange(6))
    assert float(cut["weight"]) == 2
