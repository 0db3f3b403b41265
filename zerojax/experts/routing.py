"""Which experts each token visits, with which weights, and how even the choice is.

    logits[B, T, E] = x[B, T, H] router[H, E]            in float32
    p[B, T, E]      = softmax(logits)
    chosen[B, T, k] = the k experts with the largest p; ties go to the lower expert
    w[B, T, k]      = p of the chosen experts, divided by their sum if normalized

Published models vary this (`Routing`):

    p      = sigmoid(logits)                              DeepSeek V3, GLM 4.5
    ranks  = p + correction                               chosen by these, weighted by p
    ranks  = -inf outside of the m best groups            DeepSeek V2 and V3
    w      = scale w

Top-k of the logits followed by a softmax over the chosen ones (gpt-oss) is the same as normalized
probabilities.

The derivative goes through p, not through the choice. All of this is written on global arrays, so
the means over a microbatch are the same on any mesh.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
_SMALLEST = 1e-20
"""Smallest sum of weights that others are divided by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits become choices and weights.

    Attributes:
      top_k: number of experts k of a token.
      score: function from logits to probabilities, over a token's experts or of each by itself.
      normalize: whether the weights of a token's experts add up to 1.
      scale: factor of the weights.
      groups: number of equal groups of neighboring experts.
      top_groups: number of groups that a token may choose from.
      of_group: number of a group's best experts whose ranks add up to the group's rank.
      weighs_inputs: whether weights multiply the experts' inputs instead of their outputs, for
        top_k=1.
    """

    top_k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    of_group: int = 1
    weighs_inputs: bool = False


class Scores(NamedTuple):
    """What the router says about each token.

    Attributes:
      logits: f32[B, T, E].
      probabilities: f32[B, T, E], the logits' softmax, or sigmoid.
      ranks: f32[B, T, E]: the largest are chosen; -inf for experts that a token may not choose.
    """

    logits: Array
    probabilities: Array
    ranks: Array


def score_tokens(
    x: Array,
    router: Array,
    routing: Routing,
    *,
    bias: Array | None = None,
    correction: Array | None = None,
) -> Scores:
    """Return the router's scores of tokens x[B, T, H], in float32.

    Args:
      x: tokens [B, T, H].
      router: weight [H, E].
      routing: options.
      bias: what is added to the logits, [E], or None.
      correction: what is added to the ranks, [E], or None.
    """
    logits = jnp.einsum(
        "bth,he->bte",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if routing.score == "sigmoid":
        probabilities = jax.nn.sigmoid(logits)
        ranks = logits  # in the same order, without ties of sigmoids that round to 1
    else:
        probabilities = ranks = jax.nn.softmax(logits, -1)
    if correction is not None:
        ranks = probabilities + correction.astype(jnp.float32)
    return Scores(logits, probabilities, _in_best_groups(ranks, routing))


def _in_best_groups(ranks: Array, routing: Routing) -> Array:
    """Return the ranks, with -inf for the experts outside of a token's best groups."""
    if routing.top_groups >= routing.groups:
        return ranks
    grouped = ranks.reshape(*ranks.shape[:-1], routing.groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, routing.of_group)[0], -1)  # [B, T, groups]
    chosen = jax.lax.top_k(best, routing.top_groups)[1]
    is_open = jnp.any(_is_chosen(best, chosen), -2)
    return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(ranks.shape)


def choose_experts(ranks: Array, top_k: int) -> Array:
    """Return the experts of each token, i32[..., k], the best one first.

    Ties go to the lower expert. Experts whose rank is -inf are not chosen: they are E, which is the
    number of no expert.

    Args:
      ranks: f32[..., E].
      top_k: number of experts of a token.
    """
    values, chosen = jax.lax.top_k(ranks, top_k)
    return jnp.where(values == -jnp.inf, ranks.shape[-1], chosen)


def weigh_experts(probabilities: Array, chosen: Array, routing: Routing) -> Array:
    """Return the weights of the chosen experts, f32[B, T, k].

    Args:
      probabilities: f32[B, T, E].
      chosen: the experts of each token, i32[B, T, k].
      routing: options.
    """
    # A sum over a mask instead of a look-up: its derivative needs no scatter, and both fuse.
    weights = jnp.sum(
        jnp.where(_is_chosen(probabilities, chosen), probabilities[:, :, None], 0), -1
    )
    if routing.normalize:
        # Sigmoids may all be 0.
        weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), _SMALLEST)
    return weights if routing.scale == 1 else weights * routing.scale


def measure_balance(probabilities: Array, chosen: Array) -> Array:
    """Return E sum_e share_e probability_e, f32[], which is 1 if the experts are used evenly.

    The share of an expert is its part of the choices, and its probability the mean over tokens
    (Switch, arXiv:2101.03961, equation 4, for the k choices of each token).

    Args:
      probabilities: f32[B, T, E].
      chosen: the experts of each token, i32[B, T, k].
    """
    num_experts = probabilities.shape[-1]
    shares = jnp.mean(_is_chosen(probabilities, chosen).astype(jnp.float32), (0, 1, 2))
    return num_experts * jnp.sum(shares * jnp.mean(probabilities, (0, 1)))


def count_choices(chosen: Array, num_experts: int) -> Array:
    """Return how many of a row's tokens chose each expert, f32[B, E].

    Args:
      chosen: the experts of each token, i32[B, T, k].
      num_experts: number of experts E.
    """
    is_chosen = chosen[..., None] == jnp.arange(num_experts)
    return jnp.sum(is_chosen.astype(jnp.float32), (1, 2))


def measure_z(logits: Array) -> Array:
    """Return the mean of logsumexp(logits)^2, f32[] (ST-MoE, arXiv:2202.08906, equation 5)."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits, -1)))


def _is_chosen(probabilities: Array, chosen: Array) -> Array:
    """Return whether a choice of a token is an expert, bool[B, T, k, E]."""
    return chosen[..., None] == jnp.arange(probabilities.shape[-1])
