"""A mixture whose experts are used group by group equals one that uses all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax as zj
from zerojax.experts import Experts, Routing, mix, mix_groups, score_tokens

E, H, F = 8, 16, 8
NAMES = ("up", "gate", "up_bias", "gate_bias", "down", "down_bias")
SHAPES = [(E, H, F), (E, H, F), (E, F), (E, F), (E, F, H), (E, H)]
ROUTINGS = {
    "all_kept": (Routing(top_k=3), None),
    "some_dropped": (Routing(top_k=2), 0.7),
    "weighed_inputs": (Routing(top_k=1, score="sigmoid", weighs_inputs=True), None),
}


@pytest.mark.by_default("some_dropped")
@pytest.mark.parametrize("name", list(ROUTINGS))
def test_groups_add_up_to_all_experts(name):
    routing, capacity_factor = ROUTINGS[name]
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)

    weights = {key: draw(*shape) for key, shape in zip(NAMES, SHAPES, strict=True)}
    operands = (draw(2, 5, H), draw(H, E), weights)

    def derive(run, x, router, weights):
        def total(x, router, weights):
            if run is mix_groups:
                weights = {key: a.reshape(4, E // 4, *a.shape[1:]) for key, a in weights.items()}
            experts = Experts(**weights, combine=lambda up, gate: jax.nn.silu(gate) * up)
            scores = score_tokens(x, router, routing)
            mixed = run(x, experts, scores, routing, capacity_factor)
            return jnp.sum(jnp.sin(mixed.y)), mixed

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(x, router, weights)

    @jax.jit
    def both(*operands):
        return derive(mix, *operands), derive(mix_groups, *operands)

    expected, found = jax.device_get(both(*operands))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )
    assert (expected[0][1].dropped > 0) == (capacity_factor is not None)


@pytest.mark.exhaustive
def test_moe_takes_weights_in_groups():
    rng = np.random.default_rng(0)
    shapes = ((2, 5, H), (H, E), (E, H, F), (E, F, H))
    x, router, up, down = (jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for s in shapes)
    y, stats = zj.moe(x, router, up, down)
    grouped = up.reshape(4, 2, H, F), down.reshape(4, 2, F, H)
    of_groups, of_group_stats = zj.moe(x, router, *grouped)
    np.testing.assert_allclose(of_groups, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jnp.stack(of_group_stats), jnp.stack(stats))
    with pytest.raises(
        ValueError, match=r"for up\[G, E / G, H, F\] = .*, down must be \[4, 2, 8, 16\]"
    ):
        zj.moe(x, router, grouped[0], down)
    with pytest.raises(ValueError, match=r"or \[G, E / G, H, F\] in groups"):
        zj.moe(x, router, up[0], down)
