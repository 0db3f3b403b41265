"""A block with stacks of tiles for three kinds of loops, and models that use it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys

import zerojax as zj
from zerojax.tiling import tiled_dense, tiled_mlp

LAYERS, D, H, SEQ = 2, 16, 32, 6
STEPS = 10
TILED = {
    "scale": False,
    "mix": {"kernel": True, "bias": False},
    "first": True,
    "second": {"up": True, "down": True},
}


def draw(key, *shape, leaf=0):
    return toys.draw(key, shape, leaf) / np.sqrt(shape[-2])


def init_block(key):
    """Three groups of tiles with different counts.

    They are a dense kernel in 2 x 2 tiles, a gated MLP with biases in 4, and an MLP without biases
    in 2.
    """
    first = {
        "up": draw(key, 4, D, H // 4, leaf=0),
        "gate": draw(key, 4, D, H // 4, leaf=1),
        "down": draw(key, 4, H // 4, D, leaf=2),
    }
    biases = {"up_bias": 0.1 * draw(key, 4, H // 4, leaf=3), "gate_bias": jnp.zeros((4, H // 4))}
    return {
        "scale": jnp.ones(D),
        "mix": {"kernel": draw(key, 4, D // 2, D // 2, leaf=4), "bias": jnp.zeros(D)},
        "first": first | biases,
        "second": {"up": draw(key, 2, D, H // 2, leaf=5), "down": draw(key, 2, H // 2, D, leaf=6)},
    }


def block(p, x, key):
    """Each loop reads the output of the loop before it, so backward runs loops again.

    The last tiles read `scale` as well.
    """
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
    x = x + jnp.tanh(tiled_dense(x * p["scale"], p["mix"]["kernel"], p["mix"]["bias"], in_tiles=2))
    x = x + tiled_mlp(x * p["scale"], p["first"], jax.nn.silu, seq_tiles=2)
    return x + tiled_mlp(x, p["second"], lambda h: jnp.tanh(h) * jnp.sum(p["scale"]) / D)


def embed(p, batch, key):
    return batch["x"].astype(p["w"].dtype) @ p["w"]


def head(p, p_embed, x, batch, key):
    return jnp.mean(jnp.square((x @ p["out"]).astype(jnp.float32) - batch["y"]))


def model(tiles=TILED, specs=None, stochastic=True, block=block):
    return zj.LayeredModel(
        LAYERS, lambda k: {"w": draw(k, 8, D)}, embed, init_block, block, lambda k: {"out": jnp.ones(D) / D}, head,
        tiles=tiles, specs=specs, stochastic=stochastic,
    )  # fmt: skip


def batches(count=STEPS, size=16):
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape, dtype=np.float32)  # noqa: E731
    two = [{"x": normal(size, SEQ, 8), "y": normal(size, SEQ)} for _ in range(2)]
    return [two[i % 2] for i in range(count)]


def build(config, axes, built):
    size = int(np.prod(list(axes.values())))
    return zj.build_train_step(
        built,
        optax.sgd(1e-4, momentum=0.9),
        config,
        zj.make_mesh(**axes, devices=jax.devices()[:size]),
    )
