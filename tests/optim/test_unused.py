"""Gradients that an optimizer never uses: which they are.

No tier clips by them or skips a step because of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.models import init_params
from zerojax.optim import keep_in_bfloat16, unused_grads
from zerojax.state import call_update

PARAMS = {"a": jnp.ones((4, 3)), "b": jnp.ones(3), "c": jnp.ones(())}
LABELS = {"a": "trained", "b": "frozen", "c": "trained"}
IS_FROZEN = {"a": False, "b": True, "c": False}


def by_label(trained):
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, LABELS)


def only(mask, tx):
    return optax.masked(tx, mask)


CASES = {
    "adamw": (optax.adamw(1e-2), ()),
    "partition": (by_label(optax.adamw(1e-2)), (1,)),
    "multi_transform": (optax.multi_transform({"trained": optax.lamb(1e-2), "frozen": optax.set_to_zero()}, LABELS), (1,)),
    # its moments only feed moments
    "masked": (optax.chain(optax.adam(1e-2), only(IS_FROZEN, optax.set_to_zero())), (1,)),
    "masked twice": (
        optax.chain(only(jax.tree.map(lambda f: not f, IS_FROZEN), optax.adam(1e-2)), only(IS_FROZEN, optax.set_to_zero())),
        (1,),
    ),
    "sgd before": (optax.chain(optax.sgd(1e-2), only(IS_FROZEN, optax.set_to_zero())), (1,)),
    "decay alone": (
        optax.chain(optax.sgd(1e-2), only(IS_FROZEN, optax.set_to_zero()), optax.add_decayed_weights(-1e-3)), (1,)
    ),
    "norm of the trained": (by_label(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))), (1,)),
    "norm of all": (optax.chain(optax.clip_by_global_norm(1.0), by_label(optax.sgd(1e-2))), ()),
    "norm of all, masked": (
        optax.chain(only({"a": True, "b": True, "c": True}, optax.clip_by_global_norm(1.0)), by_label(optax.sgd(1e-2))), ()
    ),
    # 0 x NaN is NaN
    "times zero": (optax.chain(optax.sgd(1e-2), only(IS_FROZEN, optax.scale(0.0))), ()),
    "skipping": (optax.apply_if_finite(by_label(optax.sgd(1e-2)), 3), ()),
    "moments in bfloat16": (keep_in_bfloat16(by_label(optax.adam(1e-2))), (1,)),
    "freeze": (optax.chain(optax.sgd(1e-2), optax.transforms.freeze(IS_FROZEN)), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_unused_gradients_are_those_that_no_update_depends_on(name):
    tx, expected = CASES[name]
    abstract = jax.eval_shape(lambda: PARAMS)
    update = jax.make_jaxpr(functools.partial(call_update, tx))
    jaxpr = update(
        abstract, jax.eval_shape(tx.init, abstract), abstract, jax.ShapeDtypeStruct((), jnp.float32)
    )
    assert unused_grads(jaxpr, len(PARAMS)) == frozenset(expected)

    # A non-finite gradient leaves no trace in any update, of this step or of the next.
    def updates(grads):
        first, state = call_update(tx, grads, tx.init(PARAMS), PARAMS, jnp.float32(1))
        return first, call_update(
            tx, jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS, jnp.float32(1)
        )[0]

    for i, name in enumerate(PARAMS):
        grads = jax.tree.map(jnp.ones_like, PARAMS)
        results = [updates(grads | {name: grads[name] * x}) for x in (1.0, jnp.nan)]
        is_equal = all(
            np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, results), strict=True)
        )
        assert is_equal == (i in expected)


# --- in a step ------------------------------------------------------------------------------------

LAYERS, WIDTH = 2, 8


def init_part(key):
    return {"w": toys.draw(key, (WIDTH, WIDTH)) / 3, "frozen": jnp.zeros(WIDTH)}


def layer(p, x, key):
    return jnp.tanh(x @ p["w"]) + jnp.sqrt(p["frozen"])  # its derivative at 0 is infinite


def mse(p, p_embed, x, batch, key):
    return jnp.mean((layer(p, x, key) - batch["y"]) ** 2)


def layered():
    return zj.LayeredModel(
        LAYERS, init_part, lambda p, b, k: layer(p, b["x"], k), init_part, layer, init_part, mse
    )


def plain_loss(params, batch):
    x = layer(params["embed"], batch["x"], None)
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, None)
    return mse(params["head"], None, x, batch, None)


def whole():
    def init(key):
        part = init_part(key)
        return {
            "embed": part,
            "blocks": jax.tree.map(lambda a: jnp.stack([a] * LAYERS), part),
            "head": part,
        }

    return zj.Model(init, lambda params, batch, key: plain_loss(params, batch))


def partitioned(trained):
    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if "frozen" in str(path[-1]) else "trained", params
        )

    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)


CLIP = 0.05
HOST, DISK = "pinned_host", "nvme"
STEPS = {
    "model": (whole, {"clip_norm": CLIP}),
    "model_by_record": (whole, {"clip_norm": CLIP, "opt_state": HOST}),
    "model_on_host": (whole, {"clip_norm": CLIP, "opt_state": HOST, "update_on": "host"}),
    "whole_tree": (layered, {"clip_norm": CLIP, "activations": HOST}),
    "by_layers": (layered, {"clip_norm": CLIP, "params": HOST, "opt_state": HOST, "grads": HOST}),
    "in_backward": (layered, {"opt_state": HOST, "update": "in_backward"}),
    "on_host": (
        layered,
        {"clip_norm": CLIP, "opt_state": HOST, "grads": HOST, "update_on": "host"},
    ),
    "on_host_in_backward": (
        layered,
        {"opt_state": HOST, "update_on": "host", "update": "in_backward"},
    ),
    "delayed": (
        layered,
        {
            "clip_norm": CLIP,
            "opt_state": HOST,
            "grads": HOST,
            "params": HOST,
            "update_on": "host",
            "delayed_update": True,
        },
    ),
    "disk": (layered, {"clip_norm": CLIP, "params": DISK, "opt_state": DISK, "grads": DISK}),
}


@pytest.mark.by_default("model", "by_layers", "in_backward")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_neither_clips_by_frozen_weights_nor_is_stopped_by_them(name, tmp_path):
    make, fields = STEPS[name]
    extra = {"swap_dir": str(tmp_path)} if DISK in fields.values() else {}
    program = zj.build_train_step(
        make(),
        partitioned(optax.sgd(0.5, 0.9)),
        zj.ZeroConfig(stage=3, **fields, **extra),
        zj.make_mesh(devices=jax.devices()[:1]),
    )
    state = program.init(jax.random.key(0))
    params = init_params(make(), jax.random.key(0))
    clip = [optax.clip_by_global_norm(CLIP)] if "clip_norm" in fields else []
    tx = partitioned(optax.chain(*clip, optax.sgd(0.5, 0.9)))
    opt_state, random, pending = tx.init(params), np.random.default_rng(0), None
    for _ in range(3):
        batch = {k: random.standard_normal((4, WIDTH), dtype=np.float32) for k in "xy"}
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        now, pending = (pending, grads) if name == "delayed" else (grads, None)
        if now is not None:
            updates, opt_state = tx.update(now, opt_state, params)
            params = optax.apply_updates(params, updates)
        state, metrics = program.step(state, batch)
        trained = [
            g
            for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]
            if "frozen" not in str(path[-1])
        ]
        assert float(metrics["skipped_steps"]) == 0
        np.testing.assert_allclose(
            float(metrics["grad_norm"]), float(optax.global_norm(trained)), rtol=1e-5
        )
        np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=1e-5)
    program.close()
