"""Small models with every kind of awkward leaf, and the plain program that they must equal.

The toy has odd shapes (7 x 3), a scalar, a tied embedding, a frozen leaf, and matrices annotated
for `tensor`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import zerojax as zj
from host_offload.schedule import Schedule

LAYERS, HIDDEN, INNER, VOCAB, SEQ, BATCH = 3, 16, 40, 24, 5, 32

BLOCK_SPECS = {
    "w1": P(None, "tensor"),
    "b1": P("tensor"),
    "w2": P("tensor", None),
    "scale": P(),
    "gate": P(),
}


def draw(key: jax.Array, shape: tuple[int, ...], leaf: int = 0) -> jax.Array:
    """Return float32 numbers of mean 0 and variance 1, different for each `leaf`.

    They come from a hash of a few operations: most programs that tests compile create parameters,
    and `jax.random.normal` takes several times as long to compile.
    """
    first, second = jax.random.key_data(key)
    n = (
        jax.lax.iota(jnp.uint32, math.prod(shape))
        + (first ^ second * jnp.uint32(0x9E3779B1))
        + jnp.uint32(leaf * 0x85EBCA77 % 2**32)
    )
    for shift, factor in (
        (16, 0x7FEB352D),
        (15, 0x846CA68B),
    ):  # the finalizer "lowbias32" of C. Wellons's hash-prospector
        n = (n ^ n >> shift) * jnp.uint32(factor)
    signed = (
        jax.lax.bitcast_convert_type(n ^ n >> 16, jnp.int32) >> 8
    )  # 24 bits, which float32 holds
    return (signed.astype(jnp.float32) * (3**0.5 / 2**23)).reshape(shape)


def init_embed(key: jax.Array) -> Any:
    return {"table": 0.3 * draw(key, (VOCAB, HIDDEN)), "odd": draw(key, (7, 3), 1)}


def embed(p: Any, batch: Any, key: Any) -> jax.Array:
    del key
    x = p["table"][batch["tokens"]]  # [B, T, H]
    return x + jnp.sum(jnp.tanh(batch["features"] @ p["odd"]), -1)[:, None, None].astype(x.dtype)


def init_block(key: jax.Array) -> Any:
    return {
        "w1": draw(key, (HIDDEN, INNER)) / 4,
        "b1": jnp.zeros(INNER),
        "w2": draw(key, (INNER, HIDDEN), 1) / 6,
        "scale": jnp.ones(HIDDEN),
        "gate": jnp.ones(()),
    }


def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
    del key
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
    return (x + p["gate"] * (jax.nn.gelu(y @ p["w1"] + p["b1"]) @ p["w2"])).astype(x.dtype)


def init_head(key: jax.Array) -> Any:
    return {"frozen": draw(key, (HIDDEN,)), "bias": jnp.zeros(VOCAB)}


def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    del key
    return cross_entropy(
        (x * (1 + 0.1 * p["frozen"])) @ p_embed["table"].T + p["bias"], batch
    )  # tied


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    )
    return jnp.mean(losses) * batch["weight"]


def layered(tensor: bool = False) -> zj.LayeredModel:
    specs = {"block": BLOCK_SPECS} if tensor else None
    return zj.LayeredModel(
        LAYERS, init_embed, embed, init_block, block, init_head, head, specs=specs
    )


def small() -> zj.LayeredModel:
    """Return a model with one matrix per part.

    It compiles faster than `layered` and reads the same batches.
    """
    return zj.LayeredModel(
        LAYERS,
        lambda key: {"table": 0.3 * draw(key, (VOCAB, HIDDEN))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {"w": draw(key, (HIDDEN, HIDDEN)) / 4},
        lambda p, x, key: x + jnp.tanh(x @ p["w"]),
        lambda key: {"out": draw(key, (HIDDEN, VOCAB)) / 4},
        lambda p, p_embed, x, batch, key: cross_entropy(x @ p["out"], batch),
    )


def unrolled(tensor: bool = False) -> zj.Model:
    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, LAYERS + 2)
        return {
            "embed": init_embed(keys[0]),
            "layers": [init_block(k) for k in keys[2:]],
            "head": init_head(keys[1]),
        }

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = embed(params["embed"], batch, key)
        for p in params["layers"]:
            x = block(p, x, key)
        return head(params["head"], params["embed"], x, batch, key)

    specs = {"embed": None, "layers": [BLOCK_SPECS] * LAYERS, "head": None} if tensor else None
    return zj.Model(init, loss, specs=specs)


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss for both parameter trees: layers in a Python loop, nothing sharded."""
    x = embed(params["embed"], batch, None)
    for i in range(LAYERS):
        p = (
            params["layers"][i]
            if "layers" in params
            else jax.tree.map(lambda a, i=i: a[i], params["blocks"])
        )
        x = block(p, x, None)
    return head(params["head"], params["embed"], x, batch, None)


def optimizer(clip: float | None = None) -> optax.GradientTransformation:
    """Return AdamW with one frozen leaf; `clip` bounds the norm of the trainable gradients."""

    def frozen(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" in jax.tree_util.keystr(path), tree
        )

    def trained(tree: Any) -> Any:
        return jax.tree.map(lambda f: not f, frozen(tree))

    tx = (
        optax.adamw(1e-2)
        if clip is None
        else optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1e-2))
    )
    return optax.chain(optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen))


def batches(count: int, size: int = BATCH) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {
            "tokens": random.integers(0, VOCAB, (size, SEQ)),
            "targets": random.integers(0, VOCAB, (size, SEQ)),
            "features": random.standard_normal((size, 7), dtype=np.float32),
            "weight": np.float32(1),
        }
        for _ in range(count)
    ]


@functools.cache
def _plain_step(clip: float) -> tuple[Any, Any]:
    tx = optimizer(clip)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx, step


def plain_run(params: Any, data: list[Any], clip: float) -> tuple[list[float], Any]:
    """Train on one device with optax alone; returns losses and parameters."""
    tx, step = _plain_step(clip)
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    opt_state, losses = tx.init(params), []
    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def run(program: zj.Program, state: Any, data: list[Any]) -> tuple[list[float], Any]:
    """Train with a program, blocking at each step; returns losses and the last state."""
    losses = []
    for batch in data:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def trained_bytes(program: zj.Program, itemsize: int) -> int:
    """Return the bytes of all parameters, over all devices.

    Parameters that `fsdp` does not split count on each of its devices.
    """
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.layout.abstract_params)[0]:
        spec = program.layout.specs[jax.tree_util.keystr(path)]
        total += (
            leaf.size * itemsize * (program.mesh.shape["fsdp"] if spec.sharded == spec.base else 1)
        )
    return total


def layer_schedule(program: zj.Program) -> Schedule:
    """Return the schedule of a program without pipeline stages."""
    schedule = program.schedule
    assert isinstance(schedule, Schedule)
    return schedule


def assert_trees_close(actual: Any, expected: Any, atol: float) -> None:
    flat, expected_flat = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (actual, expected))
    assert [p for p, _ in flat] == [p for p, _ in expected_flat]
    for (path, a), (_, b) in zip(flat, expected_flat, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )
