"""Derivatives rewritten to sum gradients in float32.

Values are compared with float64, and everything else is unchanged.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.grads import float32_grads
from zerojax.jaxprs import flatten

N, D, F, V, LAYERS = 512, 8, 12, 10, 2
BF16 = jnp.bfloat16


def dense(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"]) * p["s"]


def merged(p: Any, x: Any) -> Any:
    """Return a product with a matrix that is computed from parameters only.

    The matrix comes from a product, casts and layout changes.
    """
    w = (p["w"] + (p["a"].T @ p["c"]) * jnp.asarray(2, x.dtype)).reshape(D, F // 4, 4)
    return jnp.einsum("nd,dfg->ngf", x, w).reshape(len(x), F)


def looked_up(p: Any, x: Any) -> Any:
    rows = p["table"][jnp.arange(len(x)) % V]
    return jnp.concatenate([rows * x[:, :1], x[:, 1:] * p["other"][3, 0]], 1)


def attended(p: Any, x: Any) -> Any:
    """Return attention with a bias on the values.

    The bias's gradient sums a cotangent of data that a product of data computes.
    """
    x = x.reshape(8, -1, D)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ p["q"], x) / D)
    return jnp.einsum("bqk,bkf->bqf", weights, x @ p["w"] + p["b"]).reshape(N, F)


def scanned(p: Any, x: Any) -> Any:
    """Return a scan over layers that share one parameter."""
    step = lambda x, w: (jnp.tanh(x @ w * p["s"] + x), None)  # noqa: E731
    return jax.lax.scan(step, x, p["layers"])[0]


def rematted(p: Any, x: Any) -> Any:
    return jax.lax.scan(
        lambda x, w: (jax.checkpoint(lambda w, x: jnp.tanh(x @ w) + x)(w, x), None), x, p["layers"]
    )[0]


def branched(p: Any, x: Any) -> Any:
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ p["w"] + p["b"], lambda x: x @ p["w"], x)


def ruled(p: Any, x: Any) -> Any:
    """Return a product with a derivative of its own."""

    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, dy: (kept[1].T @ dy, dy @ kept[0].T))
    return product(p["w"], x) + p["b"]


def in_cells(p: Any, x: Any) -> Any:
    """Return a product over 8 devices that each psum the gradient."""
    mesh = zj.make_mesh(data=1, fsdp=8, tensor=1)
    cells = jax.shard_map(
        lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp")
    )
    return cells(p["w"], x) + p["b"]


def convolved(p: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x.reshape(32, 16, D), p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


MODELS = [dense, merged, looked_up, attended, scanned, rematted, branched, ruled, convolved]
SHAPES = {
    dense: {"w": (D, F), "b": (F,), "s": (F,)},
    merged: {"w": (D, F), "a": (3, D), "c": (3, F)},
    looked_up: {"table": (V, D), "other": (V, D)},
    attended: {"q": (D, D), "w": (D, F), "b": (F,)},
    scanned: {"layers": (LAYERS, D, D), "s": (D,)},
    rematted: {"layers": (LAYERS, D, D)},
    convolved: {"kernel": (3, D, F)},
}


def setup(*models: Any) -> tuple[Any, Any]:
    """Return parameters by model and name, and data."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape) / 2, BF16)  # noqa: E731
    shapes = {model.__name__: SHAPES.get(model, {"w": (D, F), "b": (F,)}) for model in models}
    params = {
        model: {name: draw(*shape) for name, shape in leaves.items()}
        for model, leaves in shapes.items()
    }
    return params, 0.5 + draw(N, D)


def derivative_of(*models: Any) -> Any:
    def derivative(seed: Any, x: Any, params: Any) -> Any:
        def loss(params: Any) -> Any:
            return sum(
                jnp.mean(jnp.square(m(params[m.__name__], x).astype(seed.dtype) - 1))
                for m in models
            )

        value, pullback = jax.vjp(loss, params)
        return pullback(seed)[0], value

    return derivative


def errors(grads: Any, exact: Any) -> dict[str, Any]:
    pairs = zip(jax.tree_util.tree_flatten_with_path(exact)[0], jax.tree.leaves(grads), strict=True)
    return {
        jax.tree_util.keystr(path): np.linalg.norm(np.float64(g) - e) / np.linalg.norm(e)
        for (path, e), g in pairs
    }


@pytest.mark.parametrize("models", [MODELS, [in_cells]], ids=["one_device", "in_cells"])
def test_gradients_are_float32_and_nearer_to_float64(models):
    params, x = setup(*models)
    derivative, one = derivative_of(*models), jnp.float32(1)
    narrow, loss = jax.jit(derivative)(one, x, params)
    wide, same_loss = jax.jit(float32_grads(derivative, "cpu"))(one, x, params)
    assert loss == same_loss
    assert {g.dtype for g in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    # In float32 from where they are summed: some bits do not exist in bfloat16.
    assert all(np.any(np.asarray(g).view(np.uint32) & 0xFFFF) for g in jax.tree.leaves(wide))
    with jax.enable_x64(True):
        exact = jax.jit(derivative)(
            jnp.float64(1), *jax.tree.map(lambda a: a.astype(jnp.float64), (x, params))
        )[0]
        exact = jax.device_get(exact)
    before, after = errors(narrow, exact), errors(wide, exact)
    assert {path: error for path, error in after.items() if error >= before[path]} == {}


def test_forward_is_left_as_it_was():
    models = (scanned, looked_up)
    params, x = setup(*models)

    def forward(derivative: Any) -> collections.Counter[str]:
        """Return the equations that the cotangent does not reach, without casts.

        Casts are left out because the zeros from which sums start are cast.
        """
        closed = jax.make_jaxpr(derivative)(jnp.float32(1), x, params)
        program = flatten(closed.jaxpr, closed.consts)
        later = program.reached(program.inputs[:1])
        eqns = [i.eqn for i in program.instructions if later.isdisjoint(i.outs)]
        return collections.Counter(
            f"{e.primitive} {[v.aval for v in e.invars]} {[v.aval for v in e.outvars]} {e.params.get('jaxpr')}"
            for e in eqns
            if e.primitive.name not in ("convert_element_type", "broadcast_in_dim")
        )

    derivative = derivative_of(*models)
    before = forward(derivative)
    assert before.total() > 10
    assert sum(line.startswith("scan") for line in before) == 1
    assert forward(float32_grads(derivative, "cpu")) == before


def test_products_for_other_platforms_take_16_bits():
    """On a GPU, a 16-bit product with a 32-bit result is one product on tensor cores.

    Its operands are not cast.
    """
    params, x = setup(attended)
    closed = jax.make_jaxpr(float32_grads(derivative_of(attended), "gpu"))(
        jnp.float32(1), x, params
    )
    program = flatten(closed.jaxpr, closed.consts)
    eqns = [i.eqn for i in program.instructions if i.eqn.primitive.name == "dot_general"]
    avals: list[list[Any]] = [[v.aval for v in (*e.invars, *e.outvars)] for e in eqns]
    products = [[str(aval.dtype) for aval in of_eqn] for of_eqn in avals]
    assert products.count(["bfloat16", "bfloat16", "float32"]) == 2  # of q, and of w
    assert all(p[:2] == ["bfloat16", "bfloat16"] for p in products)
    assert products.count(["bfloat16"] * 3) == len(products) - 2
