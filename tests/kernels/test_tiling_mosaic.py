"""Tiled layers on the interpreted matmul kernel.

Values, gradients and training steps equal those of XLA's products.
"""

from typing import Any

import jax
import jax.numpy as jnp
import matmul_in_float64 as float64
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import zerojax as zj
from zerojax import tiling

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("kernels"),
]  # the interpreter takes seconds per kernel
D, H = 64, 128


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 8, jnp.bfloat16)


def test_a_tiled_dense_layer_interpreted_adds_up_in_place_without_races(races):
    x, w, bias = draw(0, 8, 2 * D), draw(1, 2 * D, D), draw(2, D)
    with races():
        y = jax.jit(
            lambda x, w: tiling.tiled_dense(x, w, bias, in_tiles=2, implementation="mosaic")
        )(x, tiling.tile_kernel(w, in_tiles=2))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(bias, np.float64)
    float64.assert_close(y, expected, float64.TOLERANCE["bfloat16"])


@pytest.mark.parametrize(("gated", "seq_tiles"), [(True, 1), (False, 2)])
def test_a_tiled_mlp_interpreted_has_the_value_and_gradient_of_xlas_products(
    races, gated, seq_tiles
):
    names = ("up", "gate") if gated else ("up",)
    w = {n: draw(i, D, H) for i, n in enumerate(names)} | {
        f"{n}_bias": draw(9 + i, H) for i, n in enumerate(names)
    }
    w = tiling.tile_mlp(w | {"down": draw(5, H, D), "down_bias": draw(6, D)}, 2)

    def loss(implementation):
        def f(w, x):
            y = tiling.tiled_mlp(
                x, w, jax.nn.silu, seq_tiles=seq_tiles, implementation=implementation
            )
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(w, draw(7, 2, 4, D))

    with races():
        found = jax.block_until_ready(loss("mosaic"))
    expected = jax.tree.map(lambda a: np.asarray(a, np.float64), loss("xla"))
    float64.assert_close(
        jax.tree.leaves(found), jax.tree.leaves(expected), float64.TOLERANCE["bfloat16"]
    )


class Net(nnx.Module):
    def __init__(self, implementation, rngs):
        sizes = {"dtype": jnp.bfloat16, "implementation": implementation, "rngs": rngs}
        self.mlp = zj.TiledMLP(D, H, num_tiles=2, **sizes)
        self.out = zj.TiledDense(D, D, num_tiles=1, in_tiles=2, **sizes)

    def __call__(self, x):
        return self.out(x + self.mlp(x))


class LinenNet(nn.Module):
    implementation: str | None

    @nn.compact
    def __call__(self, x):
        sizes = {"dtype": jnp.bfloat16, "implementation": self.implementation}
        x = x + zj.linen.TiledMLP(H, num_tiles=2, **sizes)(x)
        return zj.linen.TiledDense(D, num_tiles=1, in_tiles=2, **sizes)(x)


@pytest.mark.parametrize("form", ["nnx", "linen"])
def test_a_training_step_of_tiled_layers_interpreted_is_that_of_xlas_products(races, form):
    batch = {"x": np.asarray(draw(0, 2, 4, D), np.float32)}

    def losses(implementation):
        if form == "nnx":
            model = zj.from_flax(
                lambda rngs: Net(implementation, rngs),
                lambda net, b: jnp.mean(jnp.square(net(b["x"]).astype(jnp.float32))),
            )
        else:
            net: Any = LinenNet(implementation)
            model = zj.Model(
                lambda key: net.init(key, batch["x"])["params"],
                lambda p, b, key: jnp.mean(
                    jnp.square(net.apply({"params": p}, b["x"]).astype(jnp.float32))
                ),
            )
        mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
        program = zj.build_train_step(model, optax.adam(1e-2), zj.ZeroConfig(), mesh)
        state, found = program.init(jax.random.key(0)), []
        for _ in range(2):
            state, metrics = program.step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    with races():
        found = losses("mosaic")
    np.testing.assert_allclose(found, losses("xla"), rtol=1e-3)
    assert found[-1] < found[0]
