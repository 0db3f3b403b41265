"""Models whose activations are split over `tensor`, in every form in which users write them.

Their training results are here too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import zerojax as zj

VOCAB, SEQ, WIDTH, HEADS, ROWS, STEPS = 32, 16, 32, 4, 12, 5
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "t2": {"tensor": 2},
    "t4": {"tensor": 4},
    "f2t2": {"fsdp": 2, "tensor": 2},
    "d2f2t2": {"data": 2, "fsdp": 2, "tensor": 2},
}
COLUMN, ROW = P(None, "tensor"), P("tensor", None)


def gpt_config(**changes: Any) -> gpt.GPTConfig:
    sizes = {"vocab": VOCAB, "seq": SEQ, "hidden": WIDTH, "layers": 2, "heads": HEADS}
    return gpt.GPTConfig(**sizes, tensor_axis="tensor", loss_tiles=0, **changes)


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    ).mean()


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    ) * scale


def functions(dropout: float = 0.0, stacks: bool = False) -> zj.LayeredModel:
    """Return a model of plain functions without annotations.

    It has RMSNorm, 2 key heads for 4 query heads, SwiGLU, and an untied head.
    """
    width, hidden, kv = WIDTH // HEADS, 2 * WIDTH, 2

    def init_block(key: jax.Array) -> Any:
        shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, kv * width), "v": (WIDTH, kv * width), "o": (WIDTH, WIDTH),
                  "gate": (WIDTH, hidden), "up": (WIDTH, hidden), "down": (hidden, WIDTH)}  # fmt: skip
        p = {
            name: 0.1 * toys.draw(key, shape, leaf)
            for leaf, (name, shape) in enumerate(shapes.items())
        }
        return p | {"n1": jnp.ones(WIDTH), "n2": jnp.ones(WIDTH)}

    def drop(x: jax.Array, key: Any, number: int) -> jax.Array:
        if key is None or not dropout:
            return x
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - dropout, x.shape)
        return jnp.where(kept, x / (1 - dropout), 0)

    def block(p: Any, x: jax.Array, key: Any, *given: Any) -> jax.Array:
        z = rms(x, p["n1"])
        q, k, v = ((z @ p[name]).reshape(*x.shape[:2], -1, width) for name in "qkv")
        x = x + drop(gpt.attention(q, k, v).reshape(x.shape) @ p["o"], key, 0)
        z = rms(x, p["n2"])
        y = x + drop((jax.nn.silu(z @ p["gate"]) * (z @ p["up"])) @ p["down"], key, 1)
        return (
            y * given[0]["scale"][:, None, None].astype(y.dtype)
            if given and given[0] is not None
            else y
        )

    def enter(p_embed: Any, x: jax.Array, batch: Any, key: Any) -> Any:
        table = p_embed["token"]
        return x + table[batch["targets"]].astype(x.dtype), {
            "scale": 1 + 0 * batch["tokens"][:, 0].astype(jnp.float32)
        }

    layers: dict[str, Any] = {"num_layers": 2, "init_block": init_block, "block": block}
    if stacks:
        two = [
            zj.Stack("first", 1, init_block, lambda p, x, key: block(p, x, key)),
            zj.Stack("last", 2, init_block, block, enter),
        ]
        layers = {"stacks": two}
    model = zj.LayeredModel(
        **layers,
        init_embed=lambda key: {"token": 0.1 * toys.draw(key, (VOCAB, WIDTH))},
        embed=lambda p, batch, key: p["token"][batch["tokens"]],
        init_head=lambda key: {
            "norm": jnp.ones(WIDTH),
            "out": 0.1 * toys.draw(key, (WIDTH, VOCAB)),
        },
        head=lambda p, p_embed, x, batch, key: cross_entropy(rms(x, p["norm"]) @ p["out"], batch),
        stochastic=dropout > 0,
    )
    return zj.with_specs(
        model, {r"/[qkv]$|gate|up|out": COLUMN, r"/o$|down": ROW, "token": P("tensor", None)}
    )


class LinenEmbed(nn.Module):
    @nn.compact
    def __call__(self, batch):
        return nn.Embed(VOCAB, WIDTH)(batch["tokens"])


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(width: int, split: Any, name: str) -> nn.Dense:
            init = nn.with_partitioning(nn.initializers.normal(0.1), split)
            return nn.Dense(width, use_bias=name == "in", kernel_init=init, name=name)

        z = nn.LayerNorm()(x)
        q, k, v = (
            dense(WIDTH, (None, "tensor"), name)(z).reshape(*x.shape[:2], HEADS, -1)
            for name in "qkv"
        )
        x = x + dense(WIDTH, ("tensor", None), "o")(gpt.attention(q, k, v).reshape(x.shape))
        z = nn.gelu(dense(2 * WIDTH, (None, "tensor"), "in")(nn.LayerNorm()(x)))
        return x + dense(WIDTH, ("tensor", None), "down")(z)


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def linen() -> zj.LayeredModel:
    return zj.from_flax(
        embed=LinenEmbed(), block=LinenBlock(), head=LinenHead(), num_layers=2, example_batch=BATCH,
        loss=lambda head, embed, x, batch: cross_entropy(head(x), batch),
    )  # fmt: skip


MODELS: dict[str, Callable[[Any], zj.LayeredModel]] = {
    "gpt": lambda dtype: gpt.layered_gpt(gpt_config(dtype=dtype)),
    "gpt-untied": lambda dtype: gpt.layered_gpt(gpt_config(dtype=dtype, tied=False)),
    "gpt-dropout": lambda dtype: gpt.layered_gpt(gpt_config(dtype=dtype, dropout=0.2)),
    "gpt-tiles": lambda dtype: gpt.layered_gpt(gpt_config(dtype=dtype, mlp_tiles=2)),
    "functions": lambda dtype: functions(),
    "functions-dropout": lambda dtype: functions(dropout=0.2),
    "stacks": lambda dtype: functions(stacks=True),
    "linen": lambda dtype: linen(),
}
"""Models by name, as functions of the compute dtype; all weights but the Flax module's have it."""


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    return zj.make_mesh(
        data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor]
    )


class Trained(NamedTuple):
    """Results of training: losses of 5 steps, and the parameters before and after them."""

    losses: list[float]
    before: Any
    after: Any


def trained(model: str, mesh: str, **settings: Any) -> Trained:
    """Train for 5 steps."""
    config = zj.ZeroConfig(**settings)
    # A large eps: a key bias's gradient is 0 except for rounding, which Adam would turn into full
    # steps.
    tx = optax.adamw(1e-3, eps=1e-3) if config.precision == "fp32" else optax.adamw(0.1, eps=1.0)
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[config.precision]
    with zj.build_train_step(MODELS[model](dtype), tx, config, mesh_of(**MESHES[mesh])) as program:
        state, losses = program.init(jax.random.key(0)), []
        params = lambda: {name: jax.device_get(tree) for name, tree in program.iter_params(state)}  # noqa: E731
        before = params()
        for _ in range(STEPS):
            state, metrics = jax.block_until_ready(program.step(state, BATCH))
            losses.append(float(metrics["loss"]))
        return Trained(losses, before, params())


@functools.cache
def plain(model: str, num_microbatches: int = 1, precision: str = "fp32") -> Trained:
    """Return the same training results on one device, which keeps all activations."""
    return trained(model, "one", stage=0, num_microbatches=num_microbatches, precision=precision)


def differences(result: Trained, expected: Trained) -> tuple[float, float, float]:
    """Return three relative differences.

    The first is a loss's; the second is a parameter's, relative to its leaf's largest element; the
    third is over all parameters, relative to how far they moved.
    """
    loss = max(abs(a - b) / abs(b) for a, b in zip(result.losses, expected.losses, strict=True))
    found, before, after = (
        jax.tree.leaves(tree) for tree in (result.after, expected.before, expected.after)
    )
    leaf = max(
        float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in zip(found, after, strict=True)
    )

    def norm(some, others):
        return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(some, others, strict=True)))

    return loss, leaf, float(norm(found, after) / norm(before, after))
