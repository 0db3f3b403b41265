"""Losses with weights and metrics, untrained state, and what blocks read and add.

All equal a plain loop.
"""

import dataclasses
import functools
import itertools

import full_model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.models import build_objective, init_params, init_state

STEPS = 8
HOST = "pinned_host"
STEPS_OF = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    "remat": {"activations": "remat"},
    "opt_state": {"stage": 1, "opt_state": HOST},
    "selective": {"activations": "selective"},
    "gather_ahead": {"gather_ahead": True},
    "host": {"params": HOST, "opt_state": HOST, "activations": HOST},
    "nvme": {"params": "nvme", "grads": "nvme", "opt_state": "nvme", "activations": "nvme"},
    "in_backward": {"params": "nvme", "opt_state": "nvme", "update": "in_backward"},
}
TX = optax.adam(1e-2)


@functools.cache
def expected(count):
    return full_model.plain_run(full_model.batches(STEPS), count, TX)


@pytest.mark.by_default("in_backward-2")
@pytest.mark.parametrize(("name", "count"), [*itertools.product(STEPS_OF, (1, 2, 4))])
def test_a_model_that_uses_everything_equals_a_plain_loop(name, count, tmp_path):
    data, (metrics, params, state) = full_model.batches(STEPS), expected(count)
    config = zj.ZeroConfig(
        **{"stage": 3, "num_microbatches": count, "swap_dir": tmp_path, **STEPS_OF[name]}
    )
    with zj.build_train_step(
        full_model.model(), TX, config, zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    ) as program:
        now = program.init(jax.random.key(0))
        for batch, want in zip(data, metrics, strict=True):
            now, got = program.step(now, batch)
            jax.block_until_ready(now)
            for metric, value in want.items():
                np.testing.assert_allclose(got[metric], value, rtol=1e-5, atol=1e-6, err_msg=metric)
        for piece, tree in program.iter_params(now):
            part, _, layer = piece.partition("/")
            want = (
                params[part]
                if not layer
                else jax.tree.map(lambda a, layer=layer: a[int(layer)], params[part])
            )
            toys.assert_trees_close(tree, want, atol=1e-4)
        toys.assert_trees_close(now.model_state, state, atol=1e-5)
        of_eval = program.eval(now, data[0])  # drops the state that its functions return
        assert set(of_eval) == {"loss", "accuracy", "use", "first"}
        assert int(now.model_state["head"]["tokens"]) == sum(
            int(batch["counts"].sum()) for batch in data
        )


@pytest.mark.by_default("3-4")
@pytest.mark.parametrize(("stage", "count"), [*itertools.product(range(4), (1, 2, 4))])
def test_gradients_do_not_depend_on_how_masked_tokens_are_split(stage, count):
    """Take one step of gradient descent over the same batch.

    One of the four microbatches has nothing that counts, and must not cause a NaN.
    """

    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["v"], batch["y"])
        return zj.Loss(jnp.sum(losses * batch["counts"]), jnp.sum(batch["counts"]))

    def init(key):
        return {"w": toys.draw(key, (8, 16)) / 3, "v": toys.draw(key, (16, 8)) / 4}

    rng = np.random.default_rng(0)
    counts = np.asarray(
        [1, 0, 1, 0] * 4 + [0, 0, 1, 1] * 4, np.float32
    )  # one of the four microbatches has nothing that counts
    batch = {
        "x": rng.standard_normal((32, 8), np.float32),
        "y": rng.integers(0, 8, 32),
        "counts": counts,
    }
    config = zj.ZeroConfig(stage=stage, num_microbatches=count)
    program = zj.build_train_step(
        zj.Model(init, loss), optax.sgd(1.0), config, zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    before = jax.device_get(program.params(state))
    grads = jax.grad(lambda p: loss(p, batch, None).total / counts.sum())(before)
    state, metrics = program.step(state, batch)
    moved = jax.tree.map(lambda a, b: a - b, before, jax.device_get(program.params(state)))
    toys.assert_trees_close(moved, grads, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-5)


def simple(loss, **fields):
    return zj.Model(lambda key: {"w": jnp.ones(8)}, loss, **fields)


def build(model, **fields):
    batch = {"x": np.ones((8, 8), np.float32)}
    program = zj.build_train_step(
        model, optax.sgd(0.1), zj.ZeroConfig(stage=1, **fields), zj.make_mesh(fsdp=8), batch=batch
    )
    return program, batch


def mean(params, batch):
    return jnp.mean(batch["x"] @ params["w"])


def test_aux_of_any_form_is_in_the_metrics():
    def loss(params, batch, key):
        return mean(params, batch), {"rows": batch["x"][0, :2], "nested": {"ones": jnp.int32(1)}}

    program, batch = build(simple(loss), num_microbatches=1)
    state = program.init(jax.random.key(0))
    of_eval = program.eval(state, batch)
    state, metrics = program.step(state, batch)
    for found in (of_eval, metrics):
        np.testing.assert_array_equal(found["rows"], [1, 1])
        assert float(found["nested"]["ones"]) == 1
    program, batch = build(
        simple(lambda params, batch, key: (mean(params, batch), batch["x"].max()))
    )
    assert float(program.step(program.init(jax.random.key(0)), batch)[1]["aux"]) == 1


WRONG = {
    "ours": (
        lambda p, b, k: (mean(p, b), {"grad_norm": 1.0}),
        "reserved for the step",
    ),
    "swap": (
        lambda p, b, k: (mean(p, b), {"swap_misses": 1.0}),
        "reserved for the step",
    ),
    "three": (lambda p, b, k: (mean(p, b), 1, 2), "must be one scalar, .scalar, aux. or a zj.Loss"),
    "vector": (
        lambda p, b, k: (p["w"], {}),
        "must be a floating scalar, got shape .8,.*take its mean",
    ),
    "weight": (
        lambda p, b, k: zj.Loss(mean(p, b), p["w"]),
        "the weight of the loss must be a floating scalar",
    ),
    "text": (lambda p, b, k: (mean(p, b), {"name": "me"}), "metric 'name' must hold real numbers"),
    "twice": (
        lambda p, b, k: (zj.Loss(mean(p, b)), {}),
        "pass aux as the third field of zj.Loss",
    ),
    "nested": (
        lambda p, b, k: zj.Loss(mean(p, b), None, {"a": zj.Loss(mean(p, b), 1.0, {"b": 1.0})}),
        "metric 'a' is a zj.Loss with metrics of its own",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_loss_may_not_return(name):
    loss, error = WRONG[name]
    with pytest.raises(ValueError, match=error):
        build(simple(loss))


def test_a_state_keeps_its_form_and_a_weight_does_not_read_it():
    count = lambda key: {"n": jnp.int32(0)}  # noqa: E731
    with pytest.raises(
        ValueError,
        match=r"the loss must return its state in the structure.*\['n'\].*int32.*float32",
    ):
        build(simple(lambda p, b, k, s: (mean(p, b), {"n": s["n"] + 0.5}), init_state=count))
    with pytest.raises(
        ValueError,
        match=r"the loss must return \(result, new state\), such as \(\(loss, aux\), new state\)",
    ):
        build(simple(lambda p, b, k, s: mean(p, b), init_state=count))
    batch, config = {"x": np.ones((16, 8), np.float32)}, zj.ZeroConfig(stage=1, num_microbatches=2)
    model = simple(
        lambda p, b, k, s: (zj.Loss(mean(p, b), 1.0 + s["n"]), {"n": s["n"] + 1}), init_state=count
    )
    with pytest.raises(ValueError, match="the weight of the loss depends on the model's state"):
        zj.build_train_step(model, TX, config, zj.make_mesh(fsdp=8), batch=batch)


def test_a_block_that_changes_its_state_is_refused_by_a_streamed_step():
    def block(p, x, key, context, layer, state):
        out, _ = full_model.block(p, x, key, context, layer, state)
        return out, {"shift": state["shift"] + 1}

    model, (batch,) = dataclasses.replace(full_model.model(), block=block), full_model.batches(1)
    params, state = jax.jit(lambda key: (init_params(model, key), init_state(model, key)))(
        jax.random.key(0)
    )
    _, after = jax.jit(build_objective(model))(params, batch, None, state)  # from a resident step
    np.testing.assert_allclose(after["blocks"]["shift"], state["blocks"]["shift"] + 1)
    config = zj.ZeroConfig(stage=3, params=HOST)
    with pytest.raises(
        ValueError, match=r"the block changes its state .'shift'.*a streamed step.*LayerNorm"
    ):
        zj.build_train_step(model, TX, config, zj.make_mesh(fsdp=8), batch=batch)


def test_a_blocks_loss_has_no_weight_and_names_of_its_own():
    def block_with(**fields):
        def block(p, x, key, context, layer, state):
            (y, added), state = full_model.block(p, x, key, context, layer, state)
            return (y, dataclasses.replace(added, **fields)), state

        return dataclasses.replace(full_model.model(), block=block)

    (batch,) = full_model.batches(1)
    with pytest.raises(ValueError, match="has a weight, but its addition to the loss"):
        zj.build_train_step(
            block_with(weight=1.0), TX, zj.ZeroConfig(), zj.make_mesh(fsdp=8), batch=batch
        )
    with pytest.raises(
        ValueError, match=r"the loss and the blocks both return metrics \['accuracy'\]"
    ):
        zj.build_train_step(
            block_with(metrics={"accuracy": 1.0}),
            TX,
            zj.ZeroConfig(),
            zj.make_mesh(fsdp=8),
            batch=batch,
        )


def test_what_no_weight_counts_is_nothing():
    model = simple(
        lambda p, b, k: zj.Loss(
            mean(p, b), b["x"].sum() - 64, {"of_none": zj.Loss(mean(p, b), 0.0)}
        )
    )
    program, batch = build(model)
    _, metrics = program.step(program.init(jax.random.key(0)), batch)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["of_none"]) == 0
    assert float(metrics["grads_finite"]) == 1


def test_a_block_that_returns_a_scalar_or_takes_too_little_is_told_so():
    (batch,) = toys.batches(1)
    scalar = dataclasses.replace(
        toys.layered(), block=lambda p, x, key: (toys.block(p, x, key), x.mean())
    )
    with pytest.raises(ValueError, match=r"must return \(x, zerojax.Loss"):
        zj.build_train_step(scalar, TX, zj.ZeroConfig(stage=0), zj.make_mesh(fsdp=8), batch=batch)
    with pytest.raises(
        ValueError,
        match=r"called as block\(p, x, key, context, layer\) .* it is block\(p: .*, x: .*, key",
    ):
        dataclasses.replace(toys.layered(), context=lambda batch: batch)
    with pytest.raises(ValueError, match="context must be a function of the batch, got dict"):
        dataclasses.replace(full_model.model(), context={})


def test_per_layer_and_init_state_are_checked_when_the_model_is_made():
    for wrong in (lambda key: {}, {"embed": {"n": 0}}):
        with pytest.raises(ValueError, match="init_state must be a dict of functions"):
            dataclasses.replace(full_model.model(), init_state=wrong)
    with pytest.raises(
        ValueError,
        match=r"per_layer\['scale'\] has shape \(2,\): dim 0 must be the number of layers, 3",
    ):
        dataclasses.replace(full_model.model(), per_layer={"scale": np.ones(2)})
    with pytest.raises(ValueError, match=r"init_state has keys \['blocks'\]"):
        dataclasses.replace(full_model.model(), init_state={"blocks": lambda key: {}})


def test_a_checkpoint_holds_the_state_and_an_import_makes_it_anew(tmp_path):
    first = lambda key: {"n": jnp.int32(0), "mean": jnp.zeros((5, 3)), "key": key}  # noqa: E731

    def after(s):
        return {
            "n": s["n"] + 1,
            "mean": s["mean"] + 0.5,
            "key": jax.random.fold_in(s["key"], 1),
        }

    model = simple(lambda p, b, k, s: (mean(p, b), after(s)), init_state=first)
    (program, batch), (other, _) = build(model), build(model, opt_state=HOST)
    key = jax.random.key(2)
    state, _ = program.step(program.init(key), batch)
    with zj.Checkpointer(tmp_path / "run") as checkpoint:
        checkpoint.save(program, state)
        checkpoint.wait()
        restored = checkpoint.restore(other)
    imported = zj.import_params(other, {"w": np.ones(8)}, key=key)
    for found, want in ((restored, after(first(key))), (imported, first(key))):
        numbers = [jax.tree.map(jax.random.key_data, s["key"]) for s in (found.model_state, want)]
        np.testing.assert_array_equal(*numbers)
        assert int(found.model_state["n"]) == int(want["n"])
        np.testing.assert_array_equal(found.model_state["mean"], want["mean"])


def test_a_skipped_step_leaves_the_state_as_it_was():
    loss = lambda p, b, k, s: (mean(p, b) / b["zero"].sum(), {"n": s["n"] + 1})  # noqa: E731
    model = simple(loss, init_state=lambda key: {"n": jnp.int32(0)})
    program = zj.build_train_step(model, TX, zj.ZeroConfig(stage=1), zj.make_mesh(fsdp=8))
    state, x = program.init(jax.random.key(0)), np.ones((8, 8), np.float32)
    for zero, count in ((0.0, 0), (1.0, 1)):
        state, _ = program.step(state, {"x": x, "zero": np.full(8, zero, np.float32)})
        assert int(state.model_state["n"]) == count


def test_state_that_a_gradient_overwrites():
    """As in Flax's 8-bit layers, a value's "gradient" is its next value; no optimizer sees it."""

    @jax.custom_vjp
    def scaled(x, scale):
        return x * scale

    scaled.defvjp(
        lambda x, scale: (x * scale, (x, scale)),
        lambda saved, dy: (dy * saved[1], saved[1] + jnp.max(saved[0])),
    )

    def loss(p, b, k, state):
        scale = state["_overwrite_with_gradient"]["scale"]
        return jnp.mean(scaled(b["x"] @ p["w"], scale)), {**state, "calls": state["calls"] + 1}

    model = simple(
        loss,
        init_state=lambda key: {
            "_overwrite_with_gradient": {"scale": jnp.ones(())},
            "calls": jnp.int32(0),
        },
    )
    program = zj.build_train_step(
        model,
        optax.sgd(0.0),
        zj.ZeroConfig(stage=3, num_microbatches=2),
        zj.make_mesh(fsdp=4, devices=jax.devices()[:4]),
    )
    state = program.init(jax.random.key(0))
    state, _ = program.step(state, {"x": np.ones((8, 8), np.float32)})
    assert (
        float(state.model_state["_overwrite_with_gradient"]["scale"]) == 1 + 8 + 8
    )  # each microbatch's maximum is 8
    assert int(state.model_state["calls"]) == 2


def test_a_models_state_is_born_of_the_key_of_its_parameters():
    layered = full_model.model()
    state = init_state(layered, jax.random.key(3))
    keys = jax.random.split(jax.random.split(jax.random.key(3), 3)[1], full_model.LAYERS)
    np.testing.assert_array_equal(
        state["blocks"]["shift"][1], toys.draw(keys[1], (full_model.HIDDEN,))
    )
    assert init_params(layered, jax.random.key(3)).keys() == {"embed", "blocks", "head"}
