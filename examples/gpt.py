"""A GPT in Flax NNX, both as one module and as embedding, block and head.

It is a pre-norm decoder with learned positions, like GPT-2. The module is ordinary Flax and knows
nothing of sharding. With `tensor_axis` its matrices carry Megatron's annotations
(arXiv:1909.08053): columns of qkv and fc, rows of proj and out, and the vocabulary of the token
embedding and of the head:

    # one all_reduce; the gradient of E stays on the devices that hold its rows
    x[B, T, H]{U_t}   = E[V_t, H][tokens]
    # the loss reduces a maximum and sums, [B, T] each
    logits[B, T, V_t] = x[B, T, H] @ E[V_t, H].T

With `experts`, each MLP is a mixture of experts, `zj.MoE`, and a block also returns what balances
them. The loss of the tokens alone is then the metric "cross_entropy":

    x, zj.expert_loss(stats) = block(x)
    loss                     = cross_entropy + expert losses of all blocks
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj
from zerojax import memory
from zerojax.hf import attend
from zerojax.planner import flops_per_token

Batch = dict[str, jax.Array]
Attention = Literal["auto", "xla", "cudnn", "ring", "ulysses", "gather"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
      vocab: number of tokens in the vocabulary.
      seq: tokens per sequence.
      hidden: width of the stream.
      layers: number of blocks.
      heads: number of attention heads.
      dropout: dropout rate.
      tied: whether the head uses the token embedding's matrix.
      dtype: dtype of activations and products; the parameters arrive in the dtype of the
        ZeroConfig's precision.
      tensor_axis: mesh axis for tensor parallelism, or None. Its size must divide heads and
        vocabulary (`check_tensor`).
      loss_tiles: number of tiles of the vocabulary in which the loss is computed, without logits[B,
        T, V]; 0 computes the full logits. None uses tiles if that lowers peak memory
        (`zerojax.memory.tiled_loss_pays`), and chooses their number by size.
      mlp_tiles: number of tiles of the hidden dim in which a block's MLP is stored and used, one at
        a time; 0 uses two dense layers.
      attention: "xla" computes scores [B, heads, T, T] as arrays. "cudnn" keeps the scores on the
        chip and needs NVIDIA GPUs, a 16-bit `dtype`, and heads of a width of at most 128 in
        multiples of 8. "auto" uses cuDNN where it applies, else XLA, and logs the reason. "ring",
        "ulysses" and "gather" are methods of `zj.attention` for a mesh whose axis `context` splits
        the sequence; "auto" lets it choose one there.
      mlp_implementation: implementation of the tiles' products, as in `zj.TiledMLP`; "mosaic" is
        the kernel for Hopper GPUs.
      experts: number of experts in each block; 0 uses an MLP.
      top_k: number of experts that a token visits.
      capacity_factor: an expert takes at most capacity_factor x top_k / experts of a device's
        tokens (`zj.moe`); None drops no token.
      expert_hidden: width of an expert's hidden dim; by default an MLP's, 4 hidden.

    Raises:
      ValueError: experts is negative, or set together with mlp_tiles.
    """

    vocab: int = 256
    seq: int = 128
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    tied: bool = True
    dtype: Any = jnp.float32
    tensor_axis: str | None = None
    loss_tiles: int | None = None
    mlp_tiles: int = 0
    attention: Attention = "auto"
    mlp_implementation: Literal["mosaic", "xla", "reference"] | None = None
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = 1.25
    expert_hidden: int | None = None

    def __post_init__(self) -> None:
        """Check the number of experts, and that nothing else replaces the MLP."""
        if self.experts < 0:
            raise ValueError(f"experts={self.experts}: at least 1 is needed, or 0 for an MLP")
        if self.experts and self.mlp_tiles:
            raise ValueError(
                f"mlp_tiles={self.mlp_tiles} cuts an MLP that experts={self.experts} replaces: use "
                "mlp_tiles=0 with experts"
            )

    @property
    def expert_width(self) -> int:
        """Width of an expert's hidden dim."""
        return 4 * self.hidden if self.expert_hidden is None else self.expert_hidden

    @property
    def num_params(self) -> int:
        """Number of parameters, all experts included.

        A block has 4 h^2 + 8 h, and an MLP 8 h^2 + 5 h more, or E experts of width F and a router
        2 E h F + E h. Embeddings, the final norm, and an untied head add to them.
        """
        h = self.hidden
        mlp_params = 8 * h * h + 5 * h
        if self.experts:
            mlp_params = self.experts * (2 * h * self.expert_width + h)
        return (
            self.layers * (4 * h * h + 8 * h + mlp_params)
            + (self.vocab * (1 if self.tied else 2) + self.seq) * h
            + 2 * h
        )

    @property
    def tiles_loss(self) -> bool:
        """Whether the loss is computed in tiles."""
        if self.loss_tiles is not None:
            return self.loss_tiles > 0
        itemsize = jnp.dtype(self.dtype).itemsize
        return memory.tiled_loss_pays(
            vocab=self.vocab, seq=self.seq, hidden=self.hidden, heads=self.heads, itemsize=itemsize
        )

    @property
    def flops_per_token(self) -> float:
        """Model FLOP of forward and backward per token, without recomputation.

        A token's products are those of the router and of its own `top_k` experts.
        """
        h = self.hidden
        mlp_weights = 8 * h * h
        if self.experts:
            mlp_weights = self.top_k * 2 * h * self.expert_width + self.experts * h
        return flops_per_token(
            self.layers,
            h,
            self.seq,
            layer_weights=4 * h * h + mlp_weights,
            head_weights=self.vocab * h,
        )


PRESETS = {
    "tiny": GPTConfig(layers=4, hidden=128, heads=4, seq=128),
    "small": GPTConfig(layers=6, hidden=384, heads=6, seq=256),
    "124m": GPTConfig(layers=12, hidden=768, heads=12, seq=1024),
    "350m": GPTConfig(layers=24, hidden=1024, heads=16, seq=1024),
    "1.3b": GPTConfig(layers=24, hidden=2048, heads=16, seq=2048),
    "6.7b": GPTConfig(layers=32, hidden=4096, heads=32, seq=2048),
    "13b": GPTConfig(layers=40, hidden=5120, heads=40, seq=2048),
    "22b": GPTConfig(
        layers=48, hidden=6144, heads=64, seq=2048
    ),  # from here on: Korthikanti et al. (arXiv:2205.05198), table 3
    "175b": GPTConfig(layers=96, hidden=12288, heads=96, seq=2048),
    "530b": GPTConfig(layers=105, hidden=20480, heads=128, seq=2048),
    "1t": GPTConfig(layers=128, hidden=25600, heads=160, seq=2048),
}
"""Sizes by name, with a vocabulary of bytes; the last four have 51,200 tokens in the paper."""


def check_heads(heads: int, tensor: int) -> None:
    """Raise ValueError unless `tensor` devices can each have an equal number of complete heads."""
    if heads % tensor:
        fits = max(n for n in range(1, tensor) if heads % n == 0)
        raise ValueError(
            f"heads={heads} do not divide by tensor={tensor}, and heads cannot be split: choose a "
            f"multiple of {tensor} heads, or a tensor axis that divides them, such as {fits}"
        )


def check_tensor(c: GPTConfig, tensor: int) -> None:
    """Raise ValueError unless a GPT can be split over `tensor` devices."""
    check_heads(c.heads, tensor)
    if c.vocab % tensor:
        raise ValueError(
            f"vocab={c.vocab} does not divide by tensor={tensor}, over which the embedding is "
            f"split: pad it to {-(-c.vocab // tensor) * tensor}, with rows that no token uses"
        )


def linear(
    c: GPTConfig,
    d_in: int,
    d_out: int,
    std: float,
    split: tuple[str | None, str | None],
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Return a dense layer with kernel [d_in, d_out], annotated for tensor parallelism if any."""
    kernel_init, bias_init = initializers(c, std, split)
    return nnx.Linear(
        d_in, d_out, kernel_init=kernel_init, bias_init=bias_init, dtype=c.dtype, rngs=rngs
    )


def initializers(c: GPTConfig, std: float, split: tuple[str | None, str | None]) -> tuple[Any, Any]:
    """Return initializers of a dense layer's kernel and bias.

    They annotate the arrays for tensor parallelism, if any.
    """
    kernel_init, bias_init = nnx.initializers.normal(std), nnx.initializers.zeros_init()
    if c.tensor_axis is None:
        return kernel_init, bias_init
    return nnx.with_partitioning(kernel_init, split), nnx.with_partitioning(bias_init, split[1:])


def mlp(c: GPTConfig, std: float, rngs: nnx.Rngs) -> zj.TiledMLP:
    """Return a block's MLP in tiles, with the same weights as two dense layers."""
    up_init, up_bias_init = initializers(c, std, (None, c.tensor_axis))
    down_init, down_bias_init = initializers(c, std / (2 * c.layers) ** 0.5, (c.tensor_axis, None))
    return zj.TiledMLP(
        c.hidden,
        4 * c.hidden,
        num_tiles=c.mlp_tiles,
        activation=jax.nn.gelu,
        dtype=c.dtype,
        implementation=c.mlp_implementation,
        up_init=up_init,
        down_init=down_init,
        bias_init=up_bias_init,
        down_bias_init=down_bias_init,
        rngs=rngs,
    )


def mixture(c: GPTConfig, std: float, rngs: nnx.Rngs) -> zj.MoE:
    """Return a block's experts, initialized like dense layers."""
    return zj.MoE(
        c.hidden,
        c.expert_width,
        c.experts,
        top_k=c.top_k,
        capacity_factor=c.capacity_factor,
        dtype=c.dtype,
        router_init=nnx.initializers.normal(std),
        up_init=nnx.initializers.normal(std),
        down_init=nnx.initializers.normal(std / (2 * c.layers) ** 0.5),
        rngs=rngs,
    )


class Embed(nnx.Module):
    """Token and position embedding: tokens[B, T] -> x[B, T, H]."""

    def __init__(self, c: GPTConfig, *, rngs: nnx.Rngs) -> None:
        """Create the embeddings with random weights."""
        over_vocab, _ = initializers(c, 0.02, (c.tensor_axis, None))  # [V, H]
        self.token = nnx.Embed(
            c.vocab, c.hidden, embedding_init=over_vocab, dtype=c.dtype, rngs=rngs
        )
        whole = nnx.initializers.normal(0.02)
        self.position = nnx.Embed(c.seq, c.hidden, embedding_init=whole, dtype=c.dtype, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return x[B, T, H] for batch["tokens"], i32[B, T]."""
        tokens = batch["tokens"]
        return self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, implementation: Attention = "xla"
) -> jax.Array:
    """Return causal attention of q, k, v[B, T, heads, width]: [B, T, heads, width].

    Raises:
      ValueError: the implementation is unknown, cuDNN does not support the arguments, or tokens or
        heads do not divide by the mesh.
      NotImplementedError: cuDNN does not support the arguments on a mesh with `context`.
    """
    if implementation in ("ring", "ulysses", "gather"):
        return zj.attention(q, k, v, method=implementation)
    if implementation not in ("auto", "xla", "cudnn"):
        raise ValueError(
            f"attention={implementation!r} is unknown: choose from auto, xla, cudnn, ring, "
            "ulysses, gather"
        )
    return attend(q, k, v, scale=q.shape[-1] ** -0.5, implementation=implementation)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream: x[B, T, H] -> x[B, T, H].

    With experts in place of the MLP, it also returns their loss.
    """

    def __init__(self, c: GPTConfig, *, rngs: nnx.Rngs) -> None:
        """Create the layers with random weights."""
        h, t, std = c.hidden, c.tensor_axis, 0.02
        self.heads, self.tensor_axis = c.heads, t
        self.attention: Attention = c.attention
        self.ln1 = nnx.LayerNorm(h, epsilon=1e-5, dtype=c.dtype, rngs=rngs)
        self.qkv = linear(c, h, 3 * h, std, (None, t), rngs)
        # As in GPT-2: 2 L matrices add to the stream, so each is initialized smaller by a factor
        # of sqrt(2 L).
        self.proj = linear(c, h, h, std / (2 * c.layers) ** 0.5, (t, None), rngs)
        self.ln2 = nnx.LayerNorm(h, epsilon=1e-5, dtype=c.dtype, rngs=rngs)
        self.tiles_mlp, self.has_experts = c.mlp_tiles > 0, c.experts > 0
        if self.has_experts:
            self.moe = mixture(c, std, rngs)
        elif self.tiles_mlp:
            self.mlp = mlp(c, std, rngs)
        else:
            self.fc = linear(c, h, 4 * h, std, (None, t), rngs)
            self.out = linear(c, 4 * h, h, std / (2 * c.layers) ** 0.5, (t, None), rngs)
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs) if c.dropout else None

    def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, zj.Loss]:
        """Return the block's output x[B, T, H], and with experts what they add to the loss."""
        # Otherwise XLA would split heads, and attention would send scores between devices.
        check_heads(self.heads, jax.sharding.get_abstract_mesh().shape.get(self.tensor_axis, 1))
        batch, seq, hidden = x.shape
        qkv = checkpoint_name(self.qkv(self.ln1(x)), "qkv")
        qkv = qkv.reshape(
            batch, seq, self.heads, 3, hidden // self.heads
        )  # heads first: each shard has complete heads
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]  # [B, T, heads, H / heads]
        a = checkpoint_name(attention(q, k, v, self.attention).reshape(x.shape), "attention")
        x = x + self._drop(checkpoint_name(self.proj(a), "projection"))
        z = self.ln2(x)
        if self.has_experts:
            y, stats = self.moe(z)
            return x + self._drop(checkpoint_name(y, "mlp")), zj.expert_loss(stats)
        return x + self._drop(
            checkpoint_name(self.mlp(z) if self.tiles_mlp else self._dense_mlp(z), "mlp")
        )

    def _dense_mlp(self, z: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.fc(z), "mlp_hidden")
        return self.out(jax.nn.gelu(hidden, approximate=True))

    def _drop(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


class Head(nnx.Module):
    """Final norm and output matrix: x[B, T, H] -> logits[B, T, V].

    A tied head uses the embedding's matrix.
    """

    def __init__(self, c: GPTConfig, *, rngs: nnx.Rngs) -> None:
        """Create the norm, and the output matrix unless it is tied."""
        self.dtype = c.dtype
        self.norm = nnx.LayerNorm(c.hidden, epsilon=1e-5, dtype=c.dtype, rngs=rngs)
        init, _ = initializers(c, 0.02, (None, c.tensor_axis))  # [H, V]
        out = (
            None
            if c.tied
            else nnx.Linear(
                c.hidden, c.vocab, use_bias=False, kernel_init=init, dtype=c.dtype, rngs=rngs
            )
        )
        self.out = nnx.data(out)

    def __call__(self, x: jax.Array, embed: Embed) -> jax.Array:
        """Return logits[B, T, V]."""
        x = self.norm(x)
        return embed.token.attend(x) if self.out is None else self.out(x)

    def loss(self, x: jax.Array, embed: Embed, batch: Batch, num_tiles: int | None) -> jax.Array:
        """Return the mean next-token loss of x[B, T, H], computed in tiles of logits."""
        w = embed.token.embedding[...].T if self.out is None else self.out.kernel[...]  # [H, V]
        return zj.linear_cross_entropy(
            self.norm(x), w.astype(self.dtype), batch["targets"], num_tiles=num_tiles
        )


class GPT(nnx.Module):
    """The full model, with unrolled layers."""

    def __init__(self, c: GPTConfig, *, rngs: nnx.Rngs) -> None:
        """Create the embedding, the blocks and the head."""
        self.embed = Embed(c, rngs=rngs)
        self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.layers)])
        self.head = Head(c, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return logits[B, T, V]."""
        return self.head(self.stream(batch), self.embed)

    def stream(self, batch: Batch) -> jax.Array:
        """Return the head's input, x[B, T, H]."""
        return self.stream_and_losses(batch)[0]

    def stream_and_losses(self, batch: Batch) -> tuple[jax.Array, list[zj.Loss]]:
        """Return the head's input, x[B, T, H], and the losses of the blocks' experts, if any."""
        x, losses = self.embed(batch), []
        for block in self.blocks:
            x, *of_experts = as_tuple(block(x))
            losses += of_experts
        return x, losses


def as_tuple(out: Any) -> tuple[Any, ...]:
    """Return a block's output as a tuple: (x,) or, with experts, (x, loss)."""
    return out if isinstance(out, tuple) else (out,)


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """Return the mean next-token loss in nats, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    )
    return losses.mean()


def head_loss(c: GPTConfig, head: Head, embed: Embed, x: jax.Array, batch: Batch) -> jax.Array:
    """Return the mean next-token loss of x[B, T, H], from full logits or in tiles as `c` says."""
    return (
        head.loss(x, embed, batch, c.loss_tiles)
        if c.tiles_loss
        else cross_entropy(head(x, embed), batch)
    )


def unrolled_gpt(c: GPTConfig) -> zj.Model:
    """Return the GPT as a Model: one module, gathered on use."""

    def loss(model: GPT, batch: Batch) -> jax.Array | zj.Loss:
        x, losses = model.stream_and_losses(batch)
        loss = head_loss(c, model.head, model.embed, x, batch)
        return add_losses(loss, losses) if losses else loss

    return zj.from_flax(lambda rngs: GPT(c, rngs=rngs), loss)


def add_losses(loss: jax.Array, losses: list[zj.Loss]) -> zj.Loss:
    """Return the head's loss plus the blocks' losses, with the metrics of both.

    A `LayeredModel` adds up the losses that its blocks return, and averages their metrics.
    """
    dropped = [block.metrics["dropped_fraction"] for block in losses]
    return zj.Loss(
        loss + sum(block.total for block in losses),
        metrics={"cross_entropy": loss, "dropped_fraction": sum(dropped) / len(dropped)},
    )


def layered_gpt(c: GPTConfig) -> zj.LayeredModel:
    """Return the GPT as a LayeredModel: a scan over equal blocks."""

    def loss(head: Head, embed: Embed, x: jax.Array, batch: Batch) -> jax.Array | zj.Loss:
        loss = head_loss(c, head, embed, x, batch)
        return zj.Loss(loss, metrics={"cross_entropy": loss}) if c.experts else loss

    return zj.from_flax(
        embed=lambda rngs: Embed(c, rngs=rngs),
        block=lambda rngs: Block(c, rngs=rngs),
        head=lambda rngs: Head(c, rngs=rngs),
        num_layers=c.layers,
        loss=loss,
    )


def logits(c: GPTConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """Return logits[B, T, V] of tokens[B, T], from the parameter tree of either form.

    No token is dropped by its experts.
    """
    c = dataclasses.replace(c, dropout=0.0, capacity_factor=None)

    def bind(make: Callable[[nnx.Rngs], nnx.Module], tree: Any) -> Any:
        # Put the tree's leaves into an abstract module's structure: both have the same order.
        # The mesh in scope may lack an axis that annotations name, and none is needed here.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        return nnx.merge(
            graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tree))
        )

    batch = {"tokens": tokens}
    # Otherwise NNX constrains each annotated array to the mesh in scope.
    with nnx.use_eager_sharding(False):
        # nnx.List numbers its modules, so these are the blocks of the unrolled form.
        if isinstance(params["blocks"], dict) and 0 in params["blocks"]:
            return bind(lambda rngs: GPT(c, rngs=rngs), params)(batch)
        embed = bind(lambda rngs: Embed(c, rngs=rngs), params["embed"])
        x, _ = jax.lax.scan(
            lambda x, p: (as_tuple(bind(lambda rngs: Block(c, rngs=rngs), p)(x))[0], None),
            embed(batch),
            params["blocks"],
        )
        return bind(lambda rngs: Head(c, rngs=rngs), params["head"])(x, embed)


def sample(
    c: GPTConfig, params: Any, prompt: bytes, count: int, key: jax.Array, temperature: float = 0.8
) -> jax.Array:
    """Continue a prompt byte by byte; return u8[count].

    Jit this function over `params` and `key`. The window is a buffer of `c.seq` tokens. Attention
    is causal, so positions behind the last token are never read.

    Args:
      c: sizes of the model.
      params: parameter tree, sharded or not.
      prompt: at least one byte; only its last `c.seq` bytes are used.
      count: number of bytes to generate.
      key: random key.
      temperature: temperature of the softmax.
    """
    start = (
        jnp.zeros(c.seq, jnp.int32)
        .at[: len(prompt[-c.seq :])]
        .set(jnp.frombuffer(prompt[-c.seq :], jnp.uint8))
    )

    def body(
        state: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, length = state
        scores = logits(c, params, window[None])[0, length - 1].astype(jnp.float32)
        token = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
        full = length == c.seq
        # A full window moves by one token, and all positions with it.
        window = jnp.where(full, jnp.roll(window, -1), window)
        position = jnp.where(full, c.seq - 1, length)
        return (window.at[position].set(token), position + 1), token

    state = (start, jnp.int32(len(prompt[-c.seq :])))
    _, tokens = jax.lax.scan(body, state, jax.random.split(key, count))
    return tokens.astype(jnp.uint8)
