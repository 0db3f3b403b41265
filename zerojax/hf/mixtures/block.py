"""A decoder's block whose MLP is a mixture of experts, and the balance loss over all blocks.

    z                 = norm(x)
    x[l+1]            = x + sum over a token's experts of w W_down[e] (f(W_gate[e] z) * (W_up[e] z))
    usage[l+1]        = usage[l] + (choices, probabilities) of the layer's tokens
    loss              = cross entropy + balance_weight E sum_e share_e probability_e

Experts are `zerojax.experts.mix`, without a capacity by default: no token is dropped, as these
models were trained. Share and probability are means over the tokens of all layers together, so a
block cannot add its own part to the loss. It adds its layer's sums to the activations, which are
then {"hidden": x, "usage": f32[B, 2, E]}; without a balance loss they are x.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.experts import (
    DOWN_AXES,
    UP_AXES,
    Experts,
    count_choices,
    mix,
    mix_groups,
    score_tokens,
)
from zerojax.hf.config import DecoderConfig
from zerojax.hf.decoder import ACTIVATIONS, MLP, Batch, Block, Cached, Embed, Norm, Options
from zerojax.hf.mixtures.chunked import ChunkedAttention
from zerojax.hf.mixtures.config import MixtureConfig
from zerojax.hf.mixtures.latent import LatentAttention
from zerojax.models import Loss
from zerojax.sharding import EXPERT, TENSOR
from zerojax.tiling import over_tokens_and_sums
from zerojax.trees import Context

HIDDEN = "hidden"
USAGE = "usage"
"""Keys of the activations if there is a balance loss. Hidden states come first in their order."""
_INIT = nnx.initializers.normal(0.02)


class Untrained(nnx.Param[jax.Array]):
    """A parameter that no optimizer changes, as a correction of ranks."""


class Router(nnx.Module):
    """The router: x[B, T, H] -> scores of the experts."""

    def __init__(self, hidden: int, m: MixtureConfig, *, rngs: nnx.Rngs) -> None:
        """Create the weight [H, E], and the bias and the correction [E] if any."""
        self.routing = m.routing
        self.kernel = nnx.Param(_INIT(rngs.params(), (hidden, m.experts)))
        self.bias: Any = nnx.data(nnx.Param(jnp.zeros(m.experts)) if m.biases else None)
        self.correction: Any = nnx.data(Untrained(jnp.zeros(m.experts)) if m.correction else None)

    def __call__(self, x: jax.Array) -> Any:
        """Return the scores of the experts in float32."""
        return score_tokens(
            x,
            self.kernel[...],
            self.routing,
            bias=_array(self.bias),
            correction=_array(self.correction),
        )


class ExpertWeights(nnx.Module):
    """The weights of a layer's experts, split over the axes `expert` and `tensor`.

    In T groups, they are stacks of T tiles, [T, E / T, ..].
    """

    def __init__(
        self,
        hidden: int,
        m: MixtureConfig,
        combine: Callable[[jax.Array, Any], jax.Array],
        num_groups: int = 1,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        """Create gate and up [E, H, F], down [E, F, H], and biases [E, F] and [E, H] if any."""
        self.combine = combine

        def create(shape: tuple[int, ...], axes: Any) -> nnx.Param[jax.Array]:
            value = _INIT(rngs.params(), shape)
            marks: dict[str, Any] = {}
            if num_groups > 1:
                value = value.reshape(num_groups, -1, *shape[1:])
                axes = (None, *axes)
                # Number of tiles along the first dim, and number of dims.
                marks["tiles"] = (num_groups, value.ndim)
            return nnx.Param(value, out_sharding=axes, eager_sharding=False, **marks)

        up_shape = (m.experts, hidden, m.intermediate)
        self.gate_proj = create(up_shape, UP_AXES)
        self.up_proj = create(up_shape, UP_AXES)
        self.down_proj = create((m.experts, m.intermediate, hidden), DOWN_AXES)
        has_biases = m.biases

        def create_bias(width: int, axis: str | None) -> Any:
            if not has_biases:
                return nnx.data(None)
            return create((m.experts, width), (EXPERT, axis))

        self.gate_bias = create_bias(m.intermediate, TENSOR)
        self.up_bias = create_bias(m.intermediate, TENSOR)
        self.down_bias = create_bias(hidden, None)

    def __call__(self) -> Experts:
        """Return the weights."""
        return Experts(
            up=self.up_proj[...],
            down=self.down_proj[...],
            gate=self.gate_proj[...],
            up_bias=_array(self.up_bias),
            gate_bias=_array(self.gate_bias),
            down_bias=_array(self.down_bias),
            combine=self.combine,
        )


def _array(param: nnx.Param[jax.Array] | None) -> jax.Array | None:
    return None if param is None else param[...]


def build_combine(c: DecoderConfig) -> Callable[[jax.Array, Any], jax.Array]:
    """Return the function of an expert's two products, up and gate, that `down` multiplies."""
    assert c.mixture is not None
    activation = ACTIVATIONS[c.activation]
    if c.mixture.clamp is None:
        return lambda up, gate: activation(gate) * up
    limit, alpha = c.mixture.clamp

    def combine(up: jax.Array, gate: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)

    return combine


class RoutedMLP(nnx.Module):
    """A mixture of experts: x[B, T, H] -> [B, T, H]."""

    def __init__(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> None:
        """Create router and experts, and the shared experts if any."""
        assert c.mixture is not None
        self.m = c.mixture
        self.capacity_factor = o.capacity_factor
        self.router = Router(c.hidden, c.mixture, rngs=rngs)
        self.expert_groups = o.expert_groups
        self.experts = ExpertWeights(
            c.hidden, c.mixture, build_combine(c), o.expert_groups, rngs=rngs
        )
        shared = dataclasses.replace(c, intermediate=c.mixture.shared)
        self.shared_experts: Any = nnx.data(MLP(shared, o, rngs=rngs) if c.mixture.shared else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the weighted sum of each token's experts, and keep the statistics."""
        y, statistics = self.route(x)
        self.keep(statistics)
        return y

    def route(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted sum of each token's experts, and statistics.

        With a balance loss, they have the layer's usage, f32[B, 2, E]: the number of a row's tokens
        that chose each expert, and the sum of their probabilities. With a capacity, they have the
        fraction of dropped choices.
        """
        scores = self.router(x)
        run = mix if self.expert_groups == 1 else mix_groups
        mixed = run(x, self.experts(), scores, self.m.routing, self.capacity_factor)
        statistics = dict[str, jax.Array]()
        if self.capacity_factor is not None:
            statistics["dropped"] = mixed.dropped
        if self.m.balance:
            counts = count_choices(mixed.chosen, self.m.experts)
            statistics[USAGE] = jnp.stack([counts, jnp.sum(scores.probabilities, 1)], 1)
        y = mixed.y if self.shared_experts is None else mixed.y + self.shared_experts(x)
        return y, statistics

    def keep(self, statistics: Mapping[str, jax.Array]) -> None:
        """Keep the statistics of a call for the block."""
        for name, value in statistics.items():
            self._keep(name, value)

    def _keep(self, name: str, value: jax.Array) -> None:
        self.sow(nnx.Intermediate, name, value, init_fn=lambda: value, reduce_fn=lambda _, new: new)


class MixtureBlock(Block):
    """One layer with experts: x -> x, or {"hidden": x, "usage": ..} -> the same."""

    def build_attention(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return attention: latent, in chunks, or neither."""
        if c.chunked is not None:
            return ChunkedAttention(c, o, rngs=rngs)
        if c.latent is not None:
            return LatentAttention(c, o, rngs=rngs)
        return super().build_attention(c, o, rngs=rngs)

    def build_mlp(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return the mixture of experts."""
        return RoutedMLP(c, o, rngs=rngs)

    def __call__(self, x: Any, context: Context, layer: Any) -> Any:
        """Return the output of the layer."""
        if self._has_balance:
            hidden = super().__call__(x[HIDDEN], context, layer)
            x = {HIDDEN: hidden, USAGE: x[USAGE] + self._usage()}
        else:
            x = super().__call__(x, context, layer)
        dropped = self._dropped()
        return x if dropped is None else (x, Loss(0.0, metrics={"dropped_fraction": dropped}))

    def compute_mlp(self, norm: Norm | None, x: jax.Array, tiles: int) -> jax.Array:
        """Return the output of the experts, over tiles of the tokens.

        Tokens meet at their experts, and usage is a sum over all tokens.
        """
        if not isinstance(self.mlp, RoutedMLP) or tiles == 1:
            return super().compute_mlp(norm, x, tiles)
        mlp = self.mlp
        y, statistics = over_tokens_and_sums(
            lambda x: mlp.route(self._normed(norm, x)), x, num_tiles=tiles
        )
        mlp.keep(statistics)
        return y

    @property
    def _has_balance(self) -> bool:
        assert self.c.mixture is not None
        return self.c.mixture.balance > 0

    def _usage(self) -> Any:
        """Return the usage of this layer's experts in the last call."""
        return self.mlp.usage[...]

    def _dropped(self) -> jax.Array | None:
        """Return the fraction of dropped choices in the last call; None without a capacity."""
        return None if self.mlp.capacity_factor is None else self.mlp.dropped[...]

    def cached(self, x: Any, cache: Cached, context: Context, layer: Any) -> tuple[Any, Cached]:
        """Return the layer's output for the next tokens of each row, and the updated cache."""
        if not self._has_balance:
            return super().cached(x, cache, context, layer)
        hidden, cache = super().cached(x[HIDDEN], cache, context, layer)
        return {**x, HIDDEN: hidden}, cache


class DenseBlock(MixtureBlock):
    """One layer without experts, between layers with experts: its usage is 0."""

    def build_mlp(self, c: DecoderConfig, o: Options, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return the MLP."""
        return Block.build_mlp(self, c, o, rngs=rngs)

    def _usage(self) -> Any:
        return 0.0

    def _dropped(self) -> jax.Array | None:
        return None


class CountingEmbed(Embed):
    """The embedding of a model with a balance loss: tokens[B, T] -> {"hidden": x, "usage": 0}."""

    def __init__(self, c: DecoderConfig, o: Options | None = None, *, rngs: nnx.Rngs) -> None:
        """Create the embedding [V, H]."""
        assert c.mixture is not None
        super().__init__(c, o, rngs=rngs)
        self.num_experts = c.mixture.experts

    def __call__(self, batch: Batch) -> Any:
        """Return the embeddings, and no usage yet."""
        x = super().__call__(batch)
        return {HIDDEN: x, USAGE: jnp.zeros((x.shape[0], 2, self.num_experts), jnp.float32)}


class Parts(NamedTuple):
    """The modules of a decoder, and functions of its last activations.

    Attributes:
      embed: class of the embedding.
      blocks: class of a layer, by whether it has experts.
      hidden: function from activations to hidden states.
      with_usage: function of the loss, activations and batch that returns the full loss.
    """

    embed: type[Embed]
    blocks: Mapping[bool, type[Block]]
    hidden: Callable[[Any], jax.Array] = lambda x: x
    with_usage: Callable[[Loss, Any, Batch], Loss] = lambda loss, x, batch: loss


def choose_parts(c: DecoderConfig) -> Parts:
    """Return the modules of a decoder."""
    if c.mixture is None:
        return Parts(Embed, {False: Block})
    blocks = {True: MixtureBlock, False: DenseBlock}
    if not c.mixture.balance:
        return Parts(Embed, blocks)
    return Parts(
        CountingEmbed,
        blocks,
        lambda x: x[HIDDEN],
        lambda loss, x, batch: add_balance(loss, x[USAGE], batch, c),
    )


def add_balance(loss: Loss, usage: jax.Array, batch: Batch, c: DecoderConfig) -> Loss:
    """Return the loss with the balance loss of all layers, which is also the metric `balance_loss`.

    Args:
      loss: the head's loss, a sum and its weight.
      usage: usage of all layers, f32[B, 2, E].
      batch: batch with tokens.
      c: decoder with experts.
    """
    assert c.mixture is not None
    num_tokens = batch["tokens"].size * sum(c.mixture.sparse)
    shares, probabilities = jnp.sum(usage, 0) / num_tokens  # [E]
    balance = c.mixture.experts * jnp.sum(shares * probabilities)
    total = loss.total + c.mixture.balance * balance * loss.weight
    return Loss(total, loss.weight, {**loss.metrics, "balance_loss": balance})
