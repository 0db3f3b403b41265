"""A small LayeredModel and optax on its layers as separate trees.

Each layer has matrices, a vector and a scalar.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys

import zerojax as zj
from zerojax.models import init_params
from zerojax.optim import by_layer
from zerojax.state.opt_state import traced_optimizer

HOST, NVME = "pinned_host", "nvme"
LAYERS, HIDDEN, INNER = 3, 8, 12  # 3 layers do not divide over 2 or 4 devices


def init_block(key):
    up, down = toys.draw(key, (HIDDEN, INNER)) / 3, toys.draw(key, (INNER, HIDDEN), 1) / 4
    return {"b": toys.draw(key, (INNER,), 2) / 2, "down": down, "gate": jnp.ones(()), "up": up}


def block(p, x, key):
    del key
    return x + p["gate"] * jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]


def head(p, p_embed, x, batch, key):
    del p_embed, key
    return jnp.mean((x @ p["out"] - batch["y"]) ** 2)


def layered(specs=None):
    ends = [
        lambda key: {"table": toys.draw(key, (6, HIDDEN))},
        lambda key: {"out": toys.draw(key, (HIDDEN, 4))},
    ]
    embed = lambda p, batch, key: p["table"][batch["x"]]  # noqa: E731
    return zj.LayeredModel(LAYERS, ends[0], embed, init_block, block, ends[1], head, specs=specs)


def batches(count):
    random = np.random.default_rng(0)
    return [
        {"x": random.integers(0, 6, 8), "y": random.standard_normal((8, 4), dtype=np.float32)}
        for _ in range(count)
    ]


def separate(params):
    """Return parameters with their layers as a list."""
    layers = [
        jax.tree.map(lambda a, i=i: np.asarray(a)[i], params["blocks"]) for i in range(LAYERS)
    ]
    return {"embed": params["embed"], "layers": layers, "head": params["head"]}


def plain(tx, params, data):
    """Train separate layers on one device with optax alone."""
    model = layered()

    def loss_of(params, batch):
        x = model.embed(params["embed"], batch, None)
        for p in params["layers"]:
            x = block(p, x, None)
        return head(params["head"], params["embed"], x, batch, None)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = separate(params)
    state, losses = tx.init(params), []
    for batch in data:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def final(program, state):
    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    return {
        "embed": pieces["embed"],
        "layers": [pieces[f"blocks/{i}"] for i in range(LAYERS)],
        "head": pieces["head"],
    }


init = jax.jit(lambda key: init_params(layered(), key))


def first_params():
    return jax.device_get(init(jax.random.key(0)))


def run(program, data, state=None):
    state, losses = state or program.init(jax.random.key(0)), []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_equals_plain(tx, losses, found):
    """Compare a run with optax on separate layers, within the rounding of different fusions."""
    expected, after = plain(tx, first_params(), batches(len(losses)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), found, after)


def applied(tx: Any, params: Any = None) -> Any:
    """Return the optimizer as applied to the full tree."""
    shapes = jax.eval_shape(lambda: params or first_params())
    stacked = [
        "blocks" in jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
    ]
    return by_layer(tx, shapes, traced_optimizer(tx, shapes), stacked)
