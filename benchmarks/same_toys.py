"""Define small models of every form that zerojax accepts, for bit-for-bit comparisons."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.tiling import tiled_dense, tiled_mlp


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a toy; not all default sizes are divisible by 8."""

    layers: int = 3
    hidden: int = 16
    inner: int = 40
    vocab: int = 24
    seq: int = 5
    batch: int = 32


TOY, LARGE = Sizes(), Sizes(layers=4, hidden=1024, inner=4096, vocab=512, seq=64, batch=32)
HEADS = 2
BLOCK_SPECS = {
    "scale": P(), "qkv": P(None, "tensor"), "out": P("tensor", None), "w1": P(None, "tensor"),
    "b1": P("tensor"), "w2": P("tensor", None), "gate": P(),
}  # fmt: skip


def draw(key: Any, *shape: int) -> Any:
    """Return random weights for x @ w."""
    return jax.random.normal(key, shape) / np.sqrt(shape[-2])


def init_ends(s: Sizes, key: Any) -> tuple[Any, Any]:
    """Return the parameters of an embedding and of a head.

    The embedding has a tied table and a leaf that no axis divides; the head has a frozen leaf.
    """
    k = jax.random.split(key, 3)
    embed = {
        "table": 0.3 * jax.random.normal(k[0], (s.vocab, s.hidden)),
        "odd": jax.random.normal(k[1], (7, 3)),
    }
    return embed, {"frozen": jax.random.normal(k[2], (s.hidden,)), "bias": jnp.zeros(s.vocab)}


def init_block(s: Sizes, key: Any) -> Any:
    """Return the parameters of a transformer block, one of which is a scalar."""
    k = jax.random.split(key, 4)
    return {
        "scale": jnp.ones(s.hidden), "qkv": draw(k[0], s.hidden, 3 * s.hidden),
        "out": draw(k[1], s.hidden, s.hidden),
        "w1": draw(k[2], s.hidden, s.inner), "b1": jnp.zeros(s.inner),
        "w2": draw(k[3], s.inner, s.hidden),
        "gate": jnp.ones(()),
    }  # fmt: skip


def norm(x: Any) -> Any:
    """Return x divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


def embed(p: Any, batch: Any, key: Any) -> Any:
    """Return the embedded tokens x[B, T, H]."""
    del key
    x = p["table"][batch["tokens"]]
    return x + jnp.sum(jnp.tanh(batch["features"].astype(x.dtype) @ p["odd"]), -1)[
        :, None, None
    ].astype(x.dtype)


def block(p: Any, x: Any, key: Any) -> Any:
    """Return x after attention and an MLP; with a key, x is dropped out first."""
    b, t, h = x.shape
    if key is not None:
        x = (x * jax.random.bernoulli(key, 0.9, x.shape)).astype(x.dtype)
    q, k, v = jnp.moveaxis(
        (norm(x) * p["scale"] @ p["qkv"]).reshape(b, t, 3, HEADS, h // HEADS), 2, 0
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(h // HEADS)
    mixed = jnp.einsum(
        "bhts,bshd->bthd", jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), v
    )
    x = x + mixed.reshape(b, t, h) @ p["out"]
    hidden = checkpoint_name(jax.nn.gelu(norm(x) @ p["w1"] + p["b1"]), "hidden")
    return (x + checkpoint_name(p["gate"] * (hidden @ p["w2"]), "mlp")).astype(x.dtype)


def head(p: Any, p_embed: Any, x: Any, batch: Any, key: Any) -> Any:
    """Return the loss, with logits from the embedding's table."""
    del key
    logits = (x * (1 + 0.1 * p["frozen"])).astype(x.dtype) @ p_embed["table"].T + p["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    )
    return jnp.mean(losses) * batch["weight"]


def layered(s: Sizes = TOY, *, tensor: bool = False, stochastic: bool = False) -> Any:
    """Return a LayeredModel of these functions."""
    init_embed, init_head = (lambda key, i=i: init_ends(s, key)[i] for i in range(2))
    specs = {"block": BLOCK_SPECS} if tensor else None
    init = functools.partial(init_block, s)
    return zj.LayeredModel(
        s.layers,
        init_embed,
        embed,
        init,
        block,
        init_head,
        head,
        specs=specs,
        stochastic=stochastic,
    )


def unrolled(
    s: Sizes = TOY, *, tensor: bool = False, stochastic: bool = False, tiled_loss: bool = False
) -> Any:
    """Return the same layers as a plain model, optionally with a loss that never stores logits."""

    def init(key: Any) -> Any:
        first, *rest = jax.random.split(key, s.layers + 1)
        return dict(zip(("embed", "head"), init_ends(s, first), strict=True)) | {
            "layers": [init_block(s, k) for k in rest]
        }

    def loss(params: Any, batch: Any, key: Any) -> Any:
        x = embed(params["embed"], batch, key)
        for p in params["layers"]:
            x = block(p, x, key)
        if tiled_loss:
            table = params["embed"]["table"].T
            return (
                zj.linear_cross_entropy(x, table, batch["targets"], ignore_index=0, z_loss=1e-3)
                * batch["weight"]
            )
        return head(params["head"], params["embed"], x, batch, key)

    specs = {"embed": None, "head": None, "layers": [BLOCK_SPECS] * s.layers} if tensor else None
    return zj.Model(init, loss, specs=specs, stochastic=stochastic)


def tiled(s: Sizes = TOY, *, tensor: bool = False) -> Any:
    """Return a LayeredModel with two groups of tiles.

    They are a dense kernel in 2 x 2 tiles and a gated MLP in 4 tiles.
    """
    d, h = s.hidden, s.inner // 4

    def init(key: Any) -> Any:
        k = jax.random.split(key, 4)
        mlp = {
            "up": draw(k[0], 4, d, h),
            "gate": draw(k[1], 4, d, h),
            "down": draw(k[2], 4, h, d),
            "up_bias": jnp.zeros((4, h)),
        }
        return {
            "scale": jnp.ones(d),
            "mix": {"kernel": draw(k[3], 4, d // 2, d // 2), "bias": jnp.zeros(d)},
            "mlp": mlp,
        }

    def layer(p: Any, x: Any, key: Any) -> Any:
        del key
        x = x + jnp.tanh(
            tiled_dense(norm(x) * p["scale"], p["mix"]["kernel"], p["mix"]["bias"], in_tiles=2)
        )
        return (x + tiled_mlp(norm(x), p["mlp"], jax.nn.silu)).astype(x.dtype)

    columns = P(None, None, "tensor")
    mlp = {
        "up": columns,
        "gate": columns,
        "down": P(None, "tensor", None),
        "up_bias": P(None, "tensor"),
    }
    return dataclasses.replace(
        layered(s),
        init_block=init,
        block=layer,
        tiles={"scale": False, "mix": {"kernel": True, "bias": False}, "mlp": True},
        specs={"block": {"scale": P(), "mix": P(), "mlp": mlp}} if tensor else None,
    )


class Ends(nnx.Module):
    """Embedding and head of a stack of modules, which share a table."""

    def __init__(self, s: Sizes, dtype: Any, *, rngs: nnx.Rngs) -> None:
        """Make the table."""
        self.table = nnx.Embed(s.vocab, s.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        """Return the embedded tokens of a batch."""
        return self.table(batch["tokens"])


class Block(nnx.Module):
    """Layer of modules with tiled operators, and with dropout if its rate is positive."""

    def __init__(self, s: Sizes, dtype: Any, rate: float, *, rngs: nnx.Rngs) -> None:
        """Make the layer's modules."""
        self.norm = nnx.RMSNorm(s.hidden, dtype=dtype, rngs=rngs)
        self.dense = zj.TiledDense(s.hidden, s.hidden, num_tiles=2, dtype=dtype, rngs=rngs)
        self.mlp = zj.TiledMLP(
            s.hidden,
            s.inner,
            num_tiles=4,
            gated=True,
            activation=jax.nn.silu,
            dtype=dtype,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: Any) -> Any:
        """Return the layer's output for x[B, T, H]."""
        x = x + self.dense(self.norm(x))
        x = x + self.mlp(self.norm(x))
        return x if self.dropout is None else self.dropout(x)


def flax_loss(ends: Ends, x: Any, batch: Any) -> Any:
    """Return the loss of x, with logits from the table of `ends`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        ends.table.attend(x).astype(jnp.float32), batch["targets"]
    )
    return jnp.mean(losses) * batch["weight"]


def flax_layered(s: Sizes = TOY, *, dtype: Any = jnp.bfloat16) -> Any:
    """Return a stack of NNX modules."""
    return zj.from_flax(
        embed=lambda rngs: Ends(s, dtype, rngs=rngs),
        block=lambda rngs: Block(s, dtype, 0.0, rngs=rngs),
        head=lambda rngs: Ends(s, dtype, rngs=rngs),
        num_layers=s.layers,
        loss=lambda head, embed, x, batch: flax_loss(head, x, batch),
    )


class Net(nnx.Module):
    """Separate NNX modules with dropout."""

    def __init__(self, s: Sizes, *, rngs: nnx.Rngs) -> None:
        """Make the ends and the blocks."""
        self.ends = Ends(s, jnp.float32, rngs=rngs)
        self.blocks = nnx.List([Block(s, jnp.float32, 0.1, rngs=rngs) for _ in range(s.layers)])


def flax_whole(s: Sizes = TOY) -> Any:
    """Return a model of separate NNX modules that draws random numbers."""

    def loss(net: Net, batch: Any) -> Any:
        x = net.ends(batch)
        for layer in net.blocks:
            x = layer(x)
        return flax_loss(net.ends, x, batch)

    return zj.from_flax(lambda rngs: Net(s, rngs=rngs), loss)


class LinenNet(nn.Module):
    """A Linen module with dropout."""

    s: Sizes

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        """Return the logits of a batch."""
        x = nn.Embed(self.s.vocab, self.s.hidden)(batch["tokens"])
        for _ in range(self.s.layers):
            y = zj.linen.TiledMLP(self.s.inner, num_tiles=2)(nn.RMSNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=not self.has_rng("dropout"))(y)
        return nn.Dense(self.s.vocab)(x)


def linen(s: Sizes = TOY) -> Any:
    """Return a model of one Linen module that draws random numbers."""

    def loss(net: Any, batch: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(net(batch), batch["targets"])
        return jnp.mean(losses) * batch["weight"]

    return zj.from_flax(LinenNet(s), loss, example_batch=batches(s, 1)[0], rngs=("dropout",))


def optimizer() -> optax.GradientTransformation:
    """Return AdamW with a schedule; it leaves leaves named "frozen" unchanged."""

    def frozen(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" in jax.tree_util.keystr(path), tree
        )

    def trained(tree: Any) -> Any:
        return jax.tree.map(lambda f: not f, frozen(tree))

    adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1)
    return optax.chain(optax.masked(adamw, trained), optax.masked(optax.set_to_zero(), frozen))


def batches(s: Sizes, count: int, overflows: bool = False) -> list[Any]:
    """Return `count` batches; if `overflows`, the second one may overflow float16."""
    random, found = np.random.default_rng(0), []
    for i in range(count):
        tokens, targets = random.integers(0, s.vocab, (2, s.batch, s.seq)).astype(np.int32)
        features, weight = (
            random.standard_normal((s.batch, 7), dtype=np.float32),
            1e9 if overflows and i == 1 else 1,
        )
        found.append(
            {
                "tokens": tokens,
                "targets": targets,
                "features": features,
                "weight": np.float32(weight),
            }
        )
    return found


def matrices() -> Any:
    """Return a LayeredModel of 3 layers with 3 matrices each, and ends with one matrix each."""

    def init(key: Any) -> Any:
        return {f"w{i}": draw(k, 16, 16) for i, k in enumerate(jax.random.split(key, 3))}

    def layer(p: Any, x: Any, key: Any) -> Any:
        del key
        for w in p.values():
            x = x + jnp.tanh(x @ w)
        return x

    def loss(p: Any, p_embed: Any, x: Any, batch: Any, key: Any) -> Any:
        del p_embed, batch, key
        return jnp.mean(jnp.square(x @ p["w"]))

    return zj.LayeredModel(
        3, lambda key: {"w": draw(key, 8, 16)}, lambda p, batch, key: batch["x"] @ p["w"],
        init, layer,
        lambda key: {"w": draw(key, 16, 1)}, loss,
    )  # fmt: skip
