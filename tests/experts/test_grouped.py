"""A dropless mixture on one device multiplies the rows that its routing needs.

Expected values are those of every token visiting its experts one by one, and counts are those of
the choices, counted in numpy.
"""

import functools
from typing import Any

import expert_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax as zj
from zerojax.experts.grouped import choose_rows, count_blocks, grouped_mlp, multiplies_fewer
from zerojax.experts.weights import Experts
from zerojax.jaxprs import count_flops

N, H, F, E, K = 96, 8, 16, 32, 2


def operands(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Return x[n, H], chosen[n, k], weights[n, k] and arrays of E experts; token 3 has none."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.5 * rng.standard_normal(shape), dtype)

    chosen = np.stack([rng.permutation(E)[:K] for _ in range(N)]).astype(np.int32)
    chosen[3] = E
    shapes = {"up": (H, F), "gate": (H, F), "down": (F, H)}
    shapes |= {"up_bias": (F,), "gate_bias": (F,), "down_bias": (H,)}
    arrays = {name: normal(E, *shape) for name, shape in shapes.items()}
    weights = jnp.asarray(rng.uniform(0.2, 1, (N, K)), jnp.float32)
    return normal(N, H), jnp.asarray(chosen), weights, arrays


def gated(raised: jax.Array, gate: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * raised


def every_expert(x: Any, chosen: Any, weights: Any, arrays: Any, first: int) -> jax.Array:
    """Return the sum with every expert multiplying every token."""
    numbers = first + jnp.arange(arrays["up"].shape[0])
    weight = jnp.sum(jnp.where(chosen[..., None] == numbers, weights[..., None], 0), 1)  # [n, E]

    def one(arrays: dict[str, jax.Array]) -> jax.Array:
        up = x @ arrays["up"] + arrays["up_bias"]
        gate = x @ arrays["gate"] + arrays["gate_bias"]
        return gated(up, gate) @ arrays["down"] + arrays["down_bias"]

    made = jax.vmap(one)(arrays).astype(jnp.float32)
    return jnp.einsum("ne,enh->nh", weight, made)


def blocks(x: Any, chosen: Any, weights: Any, arrays: Any, first: Any) -> jax.Array:
    return grouped_mlp(x, chosen, weights, Experts(**arrays, combine=gated), first)


@pytest.mark.by_default("float32-5-9-True")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, E), (5, 9)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_equal_every_expert_on_every_token(dtype, first, count, remat):
    x, chosen, weights, arrays = operands(jnp.dtype(dtype))
    arrays = {name: a[first : first + count] for name, a in arrays.items()}
    target = jax.random.normal(jax.random.key(1), x.shape)

    def derived(layer: Any, cast: Any, first: Any) -> Any:
        def loss(x: Any, weights: Any, arrays: Any) -> jax.Array:
            return jnp.vdot(target, layer(x, chosen, weights, arrays, first))

        loss = jax.checkpoint(loss) if remat else loss
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*cast((x, weights, arrays)))

    actual = derived(blocks, lambda a: a, jnp.int32(first))
    in_float32 = functools.partial(jax.tree.map, lambda a: a.astype(jnp.float32))
    expected = derived(every_expert, in_float32, first)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.max(np.abs(b))
        np.testing.assert_allclose(np.float32(a) / scale, b / scale, atol=tolerance)


def test_only_the_blocks_that_a_routing_needs_are_multiplied():
    x, chosen, weights, arrays = operands()
    num_rows = choose_rows(N, K, E)
    shapes = []

    def counted(raised: jax.Array, gate: jax.Array) -> jax.Array:
        jax.debug.callback(lambda a: shapes.append(a.shape), raised)
        return gated(raised, gate)

    @jax.jit
    def run(chosen: jax.Array) -> jax.Array:
        return grouped_mlp(x, chosen, weights, Experts(**arrays, combine=counted))

    few = np.where(np.arange(N)[:, None] < 2, chosen, E)  # as in decoding: two tokens choose
    for choices in (np.asarray(chosen), few):
        shapes.clear()
        jax.block_until_ready(run(jnp.asarray(choices)))
        jax.effects_barrier()
        sizes = np.bincount(choices[choices < E], minlength=E)
        assert shapes == [(num_rows, F)] * int(np.sum(-(-sizes // num_rows)))
        assert len(shapes) <= count_blocks(N, K, E, num_rows)
    assert len(shapes) * num_rows * 4 < N * E


def count_products(function: Any, *operands: Any) -> int:
    text = jax.jit(function).lower(*operands).compile().as_text()
    return text.count(" dot(")


@pytest.mark.exhaustive
def test_frozen_experts_have_no_products_for_their_gradients():
    x, chosen, weights, arrays = operands()

    def loss(x: Any, arrays: Any) -> jax.Array:
        return jnp.sum(blocks(x, chosen, weights, arrays, 0) ** 2)

    trained = count_products(jax.grad(loss, (0, 1)), x, arrays)
    frozen = count_products(jax.grad(loss), x, arrays)
    # forward: up, gate, down; backward: up, gate, and 3 for the rows' cotangents
    assert (frozen, trained) == (8, 8 + 3)


def test_a_dropless_layer_counts_a_fraction_of_the_products_of_cells():
    count, top_k, num_experts = 128, 2, 32
    p = {"router": (H, num_experts), "up": (num_experts, H, F), "down": (num_experts, F, H)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in p.items()}
    x = jax.ShapeDtypeStruct((1, count, H), jnp.float32)
    layer = functools.partial(zj.moe, top_k=top_k, capacity_factor=None)
    jaxpr = jax.make_jaxpr(lambda x, p: layer(x, **p)[0])(x, shapes)
    num_rows = choose_rows(count, top_k, num_experts)
    most = count_blocks(count, top_k, num_experts, num_rows)
    router = 2 * count * H * num_experts
    assert sum(map(count_flops, jaxpr.eqns)) == router + 2 * 2 * most * num_rows * H * F
    assert most * num_rows <= 2 * top_k * count  # E / k = 16 times fewer are needed
    assert multiplies_fewer(count, top_k, num_experts)
    assert not multiplies_fewer(count, num_experts, num_experts)


MESHES: dict[str, dict[str, int]] = {
    "one": {"fsdp": 1},
    "fsdp4": {"fsdp": 4},
    "data2_fsdp2_context2": {"data": 2, "fsdp": 2, "context": 2},
}


@pytest.mark.by_default("fsdp4")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_of_blocks_equals_experts_one_by_one(mesh):
    rows = 7  # they do not divide by the devices
    x, p = layers.tokens(rows), layers.weights(True)
    options = {"top_k": 1}
    layer = functools.partial(zj.moe, capacity_factor=None, **options)
    expected = layers.derived(functools.partial(layers.one_by_one, **options), x, p)

    def loops(x: jax.Array) -> bool:
        return "while[" in str(jax.make_jaxpr(lambda x: layer(x, **p)[0])(x))

    assert layers.on_mesh(MESHES[mesh], lambda: loops(x))
    actual = layers.on_mesh(MESHES[mesh], lambda: layers.derived(layer, x, p))
    layers.assert_close(actual, expected, 2e-6)
