"""A layer of experts in which every token visits its experts one by one, and a model with it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.experts import ExpertStats

ROWS, TOKENS, WIDTH, INNER, EXPERTS = 8, 8, 16, 24, 8
LAYERS, VOCAB = 2, 24
SPECS = {
    "mix": None,
    "router": None,
    "up": P("expert", None, "tensor"),
    "down": P("expert", "tensor", None),
}
Weights = dict[str, jax.Array]


def weights(gated: bool = False) -> Weights:
    """Return the router and the experts' weights."""
    shapes = {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    if gated:
        shapes["gate"] = (EXPERTS, WIDTH, INNER)
    key = jax.random.key(1)
    return {
        name: toys.draw(key, shape, leaf) * shape[-2] ** -0.5
        for leaf, (name, shape) in enumerate(shapes.items())
    }


def tokens(rows: int = ROWS, count: int = TOKENS) -> jax.Array:
    """Return tokens x[B, T, H]."""
    return toys.draw(jax.random.key(2), (rows, count, WIDTH))


def one_by_one(
    x: jax.Array,
    router: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    gate: jax.Array | None = None,
    top_k: int = 2,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    normalize: bool = True,
    kept: Any = True,
) -> tuple[jax.Array, ExpertStats]:
    """Return what `zj.moe` returns: each expert computes all tokens, and its choosers read them.

    Args:
      x: tokens [B, T, H].
      router: weight [H, E].
      up: weights [E, H, F].
      down: weights [E, F, H].
      gate: weights [E, H, F], or None.
      top_k: number of experts of a token.
      activation: activation function.
      normalize: whether weights are normalized.
      kept: bool[B, T, k], which choices are not dropped.
    """
    num_experts = router.shape[1]
    logits = jnp.einsum(
        "bth,he->bte", x.astype(jnp.float32), router.astype(jnp.float32), precision="highest"
    )
    probabilities = jax.nn.softmax(logits, -1)
    largest, chosen = jax.lax.top_k(probabilities, top_k)
    if normalize:
        largest = largest / jnp.sum(largest, -1, keepdims=True)
    largest = jnp.where(kept, largest, 0)
    y = jnp.zeros(x.shape, jnp.float32)
    for expert in range(num_experts):
        hidden = x @ up[expert]
        hidden = activation(hidden) if gate is None else activation(x @ gate[expert]) * hidden
        weight = jnp.sum(jnp.where(chosen == expert, largest, 0), -1, keepdims=True)
        y = y + weight * (hidden @ down[expert]).astype(jnp.float32)
    shares = jnp.mean((chosen[..., None] == jnp.arange(num_experts)).astype(jnp.float32), (0, 1, 2))
    balance = num_experts * jnp.sum(shares * jnp.mean(probabilities, (0, 1)))
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    dropped = 1 - jnp.mean(jnp.broadcast_to(kept, chosen.shape).astype(jnp.float32))
    return y.astype(x.dtype), ExpertStats(balance, z, dropped)


def derived(layer: Callable[..., Any], x: jax.Array, p: Weights) -> Any:
    """Return a layer's gradients for x and the weights, its result, and its statistics."""

    def loss(x: jax.Array, p: Weights) -> Any:
        y, stats = layer(x, **p)
        directions = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        total = jnp.sum(y.astype(jnp.float32) * directions) / 8
        return total + stats.balance + stats.z, (y, stats)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, p)


def on_mesh(axes: dict[str, int], run: Callable[[], Any]) -> Any:
    """Return a function's result on the host, under a mesh of CPU devices."""
    size = int(np.prod(list(axes.values())))
    mesh = zj.make_mesh(**{"fsdp": 1, **axes}, devices=jax.devices()[:size])
    with jax.set_mesh(mesh):
        return jax.device_get(jax.block_until_ready(run()))


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Check that leaves differ by at most `tolerance` of their largest number."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        largest = max(float(np.max(np.abs(b))), 1e-3)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path)
        )


# --- a model --------------------------------------------------------------------------------------


def norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype)


def init_block(key: jax.Array) -> Any:
    shapes = {
        "mix": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    return {
        name: toys.draw(key, shape, leaf) * shape[-2] ** -0.5
        for leaf, (name, shape) in enumerate(shapes.items())
    }


def model(layer: Callable[..., Any], num_layers: int = LAYERS) -> zj.LayeredModel:
    """Return a model whose blocks have experts; `layer` is `zj.moe` or `one_by_one`."""

    def init_embed(key: jax.Array) -> Any:
        return {"table": toys.draw(key, (VOCAB, WIDTH))}

    def embed(p: Any, batch: Any, key: Any) -> jax.Array:
        del key
        return p["table"][batch["tokens"]]

    def block(p: Any, x: jax.Array, key: Any) -> Any:
        del key
        x = x + jnp.tanh(norm(x) @ p["mix"])
        y, stats = layer(norm(x), p["router"], p["up"], p["down"])
        return x + y, zj.expert_loss(stats, balance=0.1, z=0.01)

    def init_head(key: jax.Array) -> Any:
        return {"out": toys.draw(key, (WIDTH, VOCAB)) / 4}

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        del p_embed, key
        logits = (norm(x) @ p["out"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    return zj.LayeredModel(
        num_layers, init_embed, embed, init_block, block, init_head, head, specs={"block": SPECS}
    )


def batches(count: int, rows: int = 16) -> list[dict[str, np.ndarray]]:
    """Return batches for the model."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = random.integers(0, VOCAB, (rows, TOKENS + 1)).astype(np.int32)
        found.append({"tokens": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()})
    return found
