"""Gather on use, for control flow and derivatives that a user's model may contain."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax.resident import ResidentStep

H = 16
MESH = {"data": 2, "fsdp": 4}


def stack(n: int) -> Any:
    return lambda key: {
        "w": jax.random.normal(key, (n, H, H)) / 4,
        "b": jnp.full((H,), 0.1),
        "s": jnp.ones((H,)),
    }


def dense(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    return {
        name: jax.random.normal(k, (H, H)) / 4 for name, k in zip("abcd", keys, strict=True)
    } | {"gain": jnp.float32(1.5)}


@jax.custom_vjp
def scaled_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


# The rule is wrong on purpose (twice the gradient of w), so that a lost rule shows.
scaled_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, 2 * r[0].T @ g))


@jax.custom_jvp
def softened(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.maximum(x @ w, 0)


@softened.defjvp
def _softened_jvp(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return softened(x, w), 0.5 * (dx @ w + x @ dw)


def scan_layers(p, batch, key):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + p["b"]), None), batch["x"], p["w"])
    return jnp.mean(x**2)


def scan_reversed_with_outputs(p, batch, key):
    def body(x, w):
        y = jnp.tanh(x @ w) * p["s"]
        return y, jnp.sum(y * p["b"])

    x, ys = jax.lax.scan(body, batch["x"], p["w"], reverse=True)
    # squares: values that cancel have large relative errors
    return jnp.mean(x**2) + jnp.mean(ys**2)


def scan_over_time_with_shared_weights(p, batch, key):
    x, _ = jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ p["a"]) @ p["b"], None), batch["x"], None, length=5
    )
    return jnp.mean(x**2)


def remat_layers(p, batch, key):
    x = batch["x"]
    for name in "abcd":
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p[name], x)
    return jnp.mean(x**2)


def frozen_remat_saving_everything(p, batch, key):
    def layer(w, x):
        return jnp.tanh(x @ jax.lax.stop_gradient(w))

    # Except what is computed from shards, which may be saved, and also has a weight's shape.
    layer = jax.checkpoint(layer, policy=lambda prim, *args, **params: prim.name != "stop_gradient")
    return jnp.mean(layer(p["b"], layer(p["a"], batch["x"] @ p["c"])) @ p["d"])


def remat_whole_model_saving_products(p, batch, key):
    def model(p, x):
        for name in "abcd":
            x = jnp.tanh(x @ p[name])
        return x

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jnp.mean(jax.checkpoint(model, policy=policy)(p, batch["x"]) ** 2)


def scan_of_remat(p, batch, key):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w + p["b"]), None), prevent_cse=False)
    return jnp.mean(jax.lax.scan(body, batch["x"], p["w"])[0] ** 2)


def cond_branches(p, batch, key):
    def pick(x, flag):
        return jax.lax.cond(
            flag > 0, lambda: jnp.tanh(x @ p["a"]), lambda: jnp.sin(x @ p["b"]) @ p["c"]
        )

    return jnp.mean(pick(batch["x"], batch["x"][0, 0]) ** 2) + jnp.mean(
        pick(batch["x"], -1.0) * p["d"][0]
    )


def switch_inside_scan(p, batch, key):
    def body(x, i):
        return jax.lax.switch(
            i, [lambda x: x @ p["a"], lambda x: jnp.tanh(x @ p["b"]), lambda x: x * p["c"][0]], x
        ), None

    return jnp.mean(jax.lax.scan(body, batch["x"], jnp.array([0, 1, 2, 1]))[0] ** 2)


def custom_vjp_product(p, batch, key):
    return jnp.mean(scaled_product(jnp.tanh(batch["x"] @ p["a"]), p["b"]) ** 2)


def custom_jvp_product(p, batch, key):
    return jnp.mean(softened(jnp.tanh(batch["x"] @ p["a"]), p["b"]) ** 2)


def param_only_expressions(p, batch, key):
    gain = jax.nn.softplus(p["gain"])  # a custom derivative over a replicated leaf
    normed = gain * p["a"] / jnp.linalg.norm(p["a"], axis=0, keepdims=True)  # weight norm
    merged = p["b"] + 0.1 * (p["c"] @ p["d"])  # LoRA
    x = jnp.tanh(batch["x"] @ normed) @ merged.T.reshape(2, H // 2, H).reshape(H, H)
    return jnp.mean(x**2) + 1e-3 * sum(
        jnp.sum(jnp.square(w)) for w in p.values()
    )  # weight decay in the loss


def indexed_stack(p, batch, key):
    x = batch["x"]
    for i in range(4):
        x = jnp.tanh(x @ p["w"][i]) * (1 + p["s"]) + p["b"]
    return jnp.mean(x**2)


def jitted_layers(p, batch, key):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    x = batch["x"]
    for name in "abcd":
        x = layer(p[name], x)
    return jnp.mean(x**2)


def vmapped_experts(p, batch, key):
    return jnp.mean(jax.vmap(lambda w: jnp.tanh(batch["x"] @ w))(p["w"]) ** 2)


def traced_index(p, batch, key):
    x = jax.lax.fori_loop(0, 4, lambda i, x: x + jnp.tanh(x @ p["w"][i]), batch["x"])
    return jnp.mean(x**2)


def param_only_network(p, batch, key):
    z = p["a"]
    for _ in range(30):
        z = z + jnp.tanh(z @ p["b"]) / 30
    return jnp.mean((batch["x"] @ z) ** 2)


def penalties(p, batch, key):
    squares = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in p.values())
    between = jnp.sum((p["a"] - p["b"]) ** 2)
    return (
        jnp.mean((batch["x"] @ p["a"]) ** 2)
        + 1e-2 * squares
        + 1e-2 * between
        + 1e-2 * optax.global_norm(p)
    )


def tied_twice(p, batch, key):
    return jnp.mean((jnp.tanh(batch["x"] @ p["a"]) @ p["a"].T) ** 2)


def lookup(p, batch, key):
    return jnp.mean(p["a"][batch["ids"]] @ p["b"] + jnp.take(p["c"], batch["ids"], axis=0))


CASES = {
    f.__name__: (f, init)
    for f, init in [
        (scan_layers, stack(4)),
        (scan_reversed_with_outputs, stack(4)),
        (scan_over_time_with_shared_weights, dense),
        (remat_layers, dense),
        (frozen_remat_saving_everything, dense),
        (remat_whole_model_saving_products, dense),
        (scan_of_remat, stack(4)),
        (cond_branches, dense),
        (switch_inside_scan, dense),
        (custom_vjp_product, dense),
        (custom_jvp_product, dense),
        (param_only_expressions, dense),
        (indexed_stack, stack(4)),
        (jitted_layers, dense),
        (vmapped_experts, stack(4)),
        (traced_index, stack(4)),
        (param_only_network, dense),
        (penalties, dense),
        (tied_twice, dense),
        (lookup, dense),
    ]
}


def build(loss, init, stage=3, **config) -> zj.Program:
    # the stacked leaf [4, H, H] would be split over its first dim only if that were the largest
    return zj.build_train_step(
        zj.Model(init, loss),
        optax.sgd(0.1),
        zj.ZeroConfig(stage=stage, **config),
        zj.make_mesh(**MESH),
    )


def batch(size: int = 8) -> Any:
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((size, H), dtype=np.float32),
        "ids": random.integers(0, H, (size,)),
    }


def cases():
    """Every model at stage 3.

    Without `-m exhaustive`, models alternate between saving and recomputing, and every eighth model
    is also tested at stage 1.
    """
    for number, name in enumerate(CASES):
        yield pytest.param(name, 1, "save", marks=[pytest.mark.exhaustive] if number % 8 else [])
        yield pytest.param(name, 3, "remat", marks=[] if number % 2 else [pytest.mark.exhaustive])
        yield pytest.param(name, 3, "save", marks=[pytest.mark.exhaustive] if number % 2 else [])


@pytest.mark.parametrize(("name", "stage", "activations"), cases())
def test_gradients_equal_plain_autodiff(name, stage, activations):
    loss, init = CASES[name]
    program = build(loss, init, stage, activations=activations)
    state = program.init(jax.random.key(0))
    params = jax.device_get(program.params(state))
    data = batch()
    expected, grads = jax.value_and_grad(lambda p: loss(p, data, None))(
        jax.device_put(params, jax.devices()[0])
    )
    state, metrics = program.step(state, data)
    np.testing.assert_allclose(float(metrics["loss"]), float(expected), rtol=1e-6)
    for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
        key = path[0].key
        got = (params[key] - np.asarray(program.params(state)[key])) / 0.1
        np.testing.assert_allclose(got, g, atol=2e-6, err_msg=key)
    assert all("in one equation" in sentence for sentence in program.gathered_early)


def weight_shaped_residuals(f: Any, params: Any) -> int:
    """Count the weight-shaped values that f keeps for backward, except its own arguments."""
    jaxpr = jax.make_jaxpr(lambda p, b: jax.tree.leaves(jax.vjp(lambda p: f(p, b, None), p)[1]))(
        params, batch(8)
    ).jaxpr
    kept: Any = {v for v in jaxpr.outvars if isinstance(v, jex.Var)} - set(jaxpr.invars)
    return sum(v.aval.shape[-2:] == (H, H) for v in kept)


# Except the branches of a cond, which return the shards that they hold.
@pytest.mark.parametrize("name", sorted(set(CASES) - {"cond_branches", "switch_inside_scan"}))
def test_no_gathered_parameter_is_a_residual(name):
    loss, init = CASES[name]
    program = build(loss, init)
    assert isinstance(program._step, ResidentStep)
    step = program._step
    with jax.set_mesh(program.mesh):
        assert (
            weight_shaped_residuals(
                lambda p, b, k: step.evaluated(p, b, k, None)[0].total,
                program.layout.abstract_params,
            )
            == 0
        )


def test_the_residual_test_can_fail():
    """Parameters that are computed from parameters are residuals of the plain program."""
    loss, init = CASES["param_only_expressions"]
    assert weight_shaped_residuals(loss, jax.eval_shape(init, jax.random.key(0))) > 0


def test_unknown_control_flow_is_gathered_before_and_reported():
    def loss(p, batch, key):
        def body(state):
            i, x = state
            return i + 1, jnp.tanh(x @ jax.lax.stop_gradient(p["a"]))

        _, x = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, jax.lax.stop_gradient(batch["x"])))
        return jnp.mean((x @ p["b"]) ** 2)

    program = build(loss, dense)
    state = program.init(jax.random.key(0))
    expected = loss(jax.device_get(program.params(state)), batch(), None)
    _, metrics = program.step(state, batch())
    np.testing.assert_allclose(float(metrics["loss"]), float(expected), rtol=1e-6)
    assert len(program.gathered_early) == 1
    assert "['a']" in program.gathered_early[0]
    assert "while" in program.gathered_early[0]


def test_param_only_chains_are_traced_once():
    """Thirty layers over parameters alone.

    If operands were evaluated again, their count would double with each layer.
    """
    program = build(param_only_network, dense)
    data = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch())
    assert program.lower(data).as_text().count("stablehlo.tanh") < 200


def test_any_pytree_of_parameters():
    def init(key):
        return (None, jax.random.normal(key, (H, H)), {"s": 1.0, "none": None, "empty": {}})

    def loss(p, batch, key):
        return jnp.mean((batch["x"] @ p[1]) ** 2) * p[2]["s"]

    program = build(loss, init)
    state = program.init(jax.random.key(0))
    expected = float(loss(jax.device_get(program.params(state)), batch(), None))
    _, metrics = program.step(state, batch())
    np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-6)


def test_scan_over_a_sharded_layer_dim_is_reported():
    def init(key):
        return {"w": jax.random.normal(key, (64, H, H)) / 4}

    def loss(p, batch, key):
        return jnp.mean(
            jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], p["w"])[0] ** 2
        )

    program = build(loss, init)
    state = program.init(jax.random.key(0))
    program.step(state, batch())
    assert "scanned over a dim that is sharded" in program.gathered_early[0]


def test_bf16_parameters_are_gathered_narrow_where_the_model_widens_them():
    def loss(p, batch, key):
        return jnp.mean((batch["x"] @ p["a"].astype(jnp.float32)) ** 2)

    program = build(loss, dense, precision="bf16")
    data = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch())
    text = program.lower(data).as_text()
    constraints = [
        line
        for line in text.splitlines()
        if "sharding_constraint" in line and f"tensor<{H}x{H}x" in line
    ]
    assert any("bf16" in line for line in constraints)


def test_one_equations_bytes_are_those_that_are_gathered():
    """Bytes count in bfloat16, even if the equation widens the leaf.

    The largest leaf alone is no larger than a layer may be.
    """

    def loss(p, batch, key):
        return jnp.mean((batch["x"] @ p["w"].astype(jnp.float32)) ** 2)

    program = build(loss, lambda key: {"w": jax.random.normal(key, (H, H))}, precision="bf16")
    program.lower(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch()))
    assert not program.gathered_early
