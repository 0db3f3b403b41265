"""Small models written as their authors write them, without any zerojax code.

lm1b        Flax's example: Linen, logical axes, dropout set by a config, masks
gemma       Flax's example: NNX, a sharding config over axes "fsdp" and "tp" for parameters and
            activations
qwen3       as bonsai writes it: NNX, a ShardConfig, and `reshard` wherever there is a mesh
maxtext     Linen: nn.scan over nn.remat with a name for the layer axis, logical axes of parameters
            and activations
diffusion   NNX: a loss that draws noise, modules that take `rngs` at the call
recurrent   NNX: nnx.RNN over LSTM and GRU cells
stacked     NNX: nnx.vmap and nnx.scan with a name for the layer axis, dropout
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh, reshard

import zerojax as zj

VOCAB, WIDTH, INNER, HEADS, SEQ, BATCH = 32, 16, 32, 2, 4, 8


def tokens(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    draws = random.integers(1, VOCAB, (count, BATCH, SEQ + 1))
    return [{"tokens": d[:, :-1], "targets": d[:, 1:]} for d in draws]


def vectors(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {name: random.standard_normal((BATCH, SEQ, WIDTH), dtype=np.float32) for name in ("x", "y")}
        for _ in range(count)
    ]


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    ).mean()


def of_tokens(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch)


def of_vectors(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


# lm1b


@struct.dataclass
class LM1BConfig:
    deterministic: bool = False
    dropout_rate: float = 0.1
    kernel_init: Any = nn.initializers.xavier_uniform()
    bias_init: Any = nn.initializers.normal(stddev=1e-6)


class LM1BBlock(nn.Module):
    config: LM1BConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, decoder_mask: Any = None) -> jax.Array:
        c, named = self.config, nn.with_logical_partitioning
        norm = {
            "bias_init": named(nn.initializers.zeros, ("embed",)),
            "scale_init": named(nn.initializers.ones, ("embed",)),
        }
        x = nn.LayerNorm(**norm)(inputs)
        x = nn.SelfAttention(
            num_heads=HEADS,
            qkv_features=WIDTH,
            kernel_init=named(c.kernel_init, ("embed", "kv")),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=c.dropout_rate,
            deterministic=c.deterministic,
        )(x, decoder_mask)
        x = inputs + nn.Dropout(rate=c.dropout_rate)(x, deterministic=c.deterministic)
        z = nn.LayerNorm(**norm)(x)
        z = nn.Dense(
            INNER,
            kernel_init=named(c.kernel_init, ("embed", "mlp")),
            bias_init=named(c.bias_init, ("mlp",)),
        )(z)
        z = nn.Dropout(rate=c.dropout_rate)(nn.relu(z), deterministic=c.deterministic)
        z = nn.Dense(
            WIDTH,
            kernel_init=named(c.kernel_init, ("mlp", "embed")),
            bias_init=named(c.bias_init, ("embed",)),
        )(z)
        return x + z


class LM1B(nn.Module):
    config: LM1BConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        c, named = self.config, nn.with_logical_partitioning
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs)
        )
        y = nn.Embed(
            VOCAB,
            WIDTH,
            embedding_init=named(nn.initializers.normal(stddev=1.0), ("vocab", "embed")),
        )(inputs)
        y = nn.Dropout(rate=c.dropout_rate)(y, deterministic=c.deterministic)
        y = LM1BBlock(c, name="encoderdecoderblock_0")(y, mask)
        kernel, bias = named(c.kernel_init, ("embed", "vocab")), named(c.bias_init, ("vocab",))
        return nn.Dense(VOCAB, kernel_init=kernel, bias_init=bias, name="logitdense")(y)


LM1B_RULES = (("vocab", "tensor"), ("mlp", "tensor"), ("kv", "tensor"), ("embed", None))


def lm1b(batch: Any) -> Any:
    return zj.from_flax(
        LM1B(LM1BConfig()), of_tokens, example_batch=batch, rngs=("dropout",), axis_rules=LM1B_RULES
    )


# gemma


@dataclasses.dataclass(frozen=True)
class GemmaSharding:
    emb_vd: P
    ffw_weight_df: P
    ffw_weight_fd: P
    rms_norm_weight: P
    act_btd: P
    act_btf: P

    @staticmethod
    def fsdp_tp_sharding(fsdp: str = "fsdp", tp: str = "tp") -> "GemmaSharding":
        act = P(fsdp, None, tp)
        return GemmaSharding(P(tp, fsdp), P(fsdp, tp), P(tp, fsdp), P(tp), P(fsdp, None, None), act)


def constrained(x: jax.Array, spec: P) -> jax.Array:
    return x if get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, spec)


class GemmaBlock(nnx.Module):
    def __init__(self, shd: GemmaSharding, shard: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.shd, self.shard = shd, shard
        init = nnx.initializers.lecun_normal()
        self.scale = nnx.Param(jnp.zeros(WIDTH), sharding=shd.rms_norm_weight)
        up, down = (
            nnx.with_partitioning(init, shd.ffw_weight_df),
            nnx.with_partitioning(init, shd.ffw_weight_fd),
        )
        self.gate_proj = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs, kernel_init=up)
        self.up_proj = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs, kernel_init=up)
        self.down_proj = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs, kernel_init=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + self.scale)
        y = self.shard(nnx.gelu(self.gate_proj(y)) * self.up_proj(y), self.shd.act_btf)
        return self.shard(x + self.down_proj(y), self.shd.act_btd)


class Gemma(nnx.Module):
    def __init__(self, shd: GemmaSharding, shard: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(
            nnx.initializers.normal(0.3)(rngs.params(), (VOCAB, WIDTH)), sharding=shd.emb_vd
        )
        self.blocks = nnx.List([GemmaBlock(shd, shard, rngs) for _ in range(2)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[(ids,)] * jnp.sqrt(WIDTH)
        for block in self.blocks:
            x = block(x)
        return jnp.dot(x, self.table[...].T)


def gemma(batch: Any) -> Any:
    del batch
    make = lambda rngs: Gemma(GemmaSharding.fsdp_tp_sharding(), constrained, rngs)  # noqa: E731
    return zj.from_flax(make, of_tokens, mesh_axes={"fsdp": "fsdp", "tp": "tensor"})


# qwen3, as bonsai writes it


def resharded(x: jax.Array, spec: P) -> jax.Array:
    mesh = get_abstract_mesh()
    if not mesh.empty and len(mesh.axis_names) > 0:
        return reshard(x, spec)
    return x


def qwen3(batch: Any) -> Any:
    del batch
    make = lambda rngs: Gemma(GemmaSharding.fsdp_tp_sharding(), resharded, rngs)  # noqa: E731
    return zj.from_flax(make, of_tokens, axis_rules=(("tp", "tensor"),), mesh_axes={})


# maxtext


class MaxTextLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        named, init = nn.with_logical_partitioning, nn.initializers.lecun_normal()
        x = with_logical_constraint(
            x, ("activation_batch", "activation_length", "activation_embed")
        )
        y = nn.RMSNorm(scale_init=named(nn.initializers.ones, ("norm",)))(x)
        y = nn.Dense(INNER, use_bias=False, kernel_init=named(init, ("embed", "mlp")))(y)
        y = with_logical_constraint(
            nn.gelu(y), ("activation_batch", "activation_length", "activation_mlp")
        )
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=named(init, ("mlp", "embed")))(
            y
        ), None


class MaxText(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        named = nn.with_logical_partitioning
        table = nn.Embed(
            VOCAB, WIDTH, embedding_init=named(nn.initializers.normal(0.3), ("vocab", "embed"))
        )
        stack = nn.scan(
            nn.remat(MaxTextLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.meta.PARTITION_NAME: "layers"},
        )
        x, _ = stack(name="layers")(table(ids), None)
        return table.attend(x)


MAXTEXT_RULES = (
    ("activation_batch", ("data", "fsdp")),
    ("activation_mlp", "tensor"),
    ("vocab", "tensor"),
    ("mlp", "tensor"),
    ("embed", "fsdp"),
    ("norm", "tensor"),
)


def maxtext(batch: Any) -> Any:
    with nn.logical_axis_rules(MAXTEXT_RULES):
        return zj.from_flax(MaxText(), of_tokens, example_batch=batch)


# diffusion


class Denoiser(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = (
            nnx.Linear(WIDTH + 1, INNER, rngs=rngs),
            nnx.Linear(INNER, WIDTH, rngs=rngs),
        )
        self.drop = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, t: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = jnp.concatenate([x, jnp.broadcast_to(t, (*x.shape[:-1], 1))], -1)
        return self.down(self.drop(nnx.gelu(self.up(x)), rngs=rngs))


def denoising(model: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    """Without a key, as in evaluation, the noise is always the same."""
    noise_key, time_key, drop_key = jax.random.split(jax.random.key(0) if key is None else key, 3)
    noise = jax.random.normal(noise_key, batch["x"].shape)
    t = jax.random.uniform(time_key, (batch["x"].shape[0], 1, 1))
    return jnp.mean(
        (model((1 - t) * batch["x"] + t * noise, t, rngs=nnx.Rngs(drop_key)) - noise) ** 2
    )


def diffusion(batch: Any) -> Any:
    del batch
    return zj.from_flax(lambda rngs: Denoiser(rngs), denoising)


# recurrent


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.RNN(nnx.LSTMCell(WIDTH, INNER, rngs=rngs), rngs=rngs)
        self.second = nnx.RNN(
            nnx.GRUCell(INNER, WIDTH, rngs=rngs), reverse=True, keep_order=True, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))  # pyright: ignore[reportReturnType]


def recurrent(batch: Any) -> Any:
    del batch
    return zj.from_flax(lambda rngs: Recurrent(rngs), of_vectors)


# stacked


class StackedLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            WIDTH, INNER, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs
        )
        self.down = nnx.Linear(
            INNER, WIDTH, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs
        )
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(self.down(nnx.gelu(self.up(x))))


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        names = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(
            lambda rngs: StackedLayer(rngs), in_axes=0, out_axes=0, transform_metadata=names
        )
        self.layers = make(rngs.fork(split=3))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(
            nnx.remat(lambda x, layer: layer(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        return run(x, self.layers)  # pyright: ignore[reportReturnType]


def stacked(batch: Any) -> Any:
    del batch
    return zj.from_flax(
        lambda rngs: Stacked(rngs), of_vectors, axis_rules=(("mlp", "tensor"), ("embed", "data"))
    )


# layered


class Embedded(nn.Module):
    """Linen under NNX blocks and an NNX head."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        named = nn.with_logical_partitioning
        return nn.Embed(
            VOCAB, WIDTH, embedding_init=named(nn.initializers.normal(0.3), ("vocab", "embed"))
        )(batch["tokens"])


class DroppedLayer(nnx.Module):
    """A module that takes its random streams at the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.drop = StackedLayer(rngs), nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return x + self.drop(self.layer(x) - x, rngs=rngs)


def masked(head: Any, embed: Any, x: jax.Array, batch: Any, key: jax.Array | None) -> jax.Array:
    """Return the loss over a drawn part of the tokens; in evaluation, over all of them."""
    del embed
    losses = optax.softmax_cross_entropy_with_integer_labels(
        head(x).astype(jnp.float32), batch["targets"]
    )
    return jnp.mean(
        losses if key is None else losses * jax.random.bernoulli(key, 0.7, losses.shape)
    )


def layered(batch: Any) -> Any:
    return zj.from_flax(
        embed=Embedded(),
        block=lambda rngs: DroppedLayer(rngs),
        head=lambda rngs: nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        num_layers=3,
        loss=masked,
        example_batch=batch,
        axis_rules=(("vocab", "tensor"), ("mlp", "tensor"), ("embed", "fsdp")),
    )


MODELS: dict[str, tuple[Callable[[Any], Any], Callable[[int], list[Any]]]] = {
    "lm1b": (lm1b, tokens),
    "gemma": (gemma, tokens),
    "qwen3": (qwen3, tokens),
    "maxtext": (maxtext, tokens),
    "diffusion": (diffusion, vectors),
    "recurrent": (recurrent, vectors),
    "layered": (layered, tokens),
    "stacked": (stacked, vectors),
}
