"""Which experts each token visits, with which weights, and how even the choice is.

    logits[B, T, E] = x[B, T, H] router[H, E]            in float32
    p[B, T, E]      = softmax(logits)
    chosen[B, T, k] = the k experts with the largest p; ties go to the lower expert
    w[B, T, k]      = p of the chosen experts, divided by their sum if normalized

The derivative goes through p, not through the choice. All of this is written on global arrays, so
the means over a microbatch are the same on any mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Scores(NamedTuple):
    """What the router says about each token.

    Attributes:
      logits: f32[B, T, E].
      probabilities: f32[B, T, E], the softmax of the logits.
    """

    logits: Array
    probabilities: Array


def score_tokens(x: Array, router: Array) -> Scores:
    """Return the router's scores of tokens x[B, T, H], in float32.

    Args:
      x: tokens [B, T, H].
      router: weight [H, E].
    """
    logits = jnp.einsum(
        "bth,he->bte",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return Scores(logits, jax.nn.softmax(logits, -1))


def choose_experts(probabilities: Array, top_k: int) -> Array:
    """Return the experts of each token, i32[..., k], the most probable one first.

    Ties go to the lower expert. Experts whose "probability" is negative are not chosen: they are
    E, which is the number of no expert.

    Args:
      probabilities: f32[..., E].
      top_k: number of experts of a token.
    """
    values, chosen = jax.lax.top_k(probabilities, top_k)
    return jnp.where(values < 0, probabilities.shape[-1], chosen)


def weigh_experts(probabilities: Array, chosen: Array, normalize: bool) -> Array:
    """Return the weights of the chosen experts, f32[B, T, k].

    Args:
      probabilities: f32[B, T, E].
      chosen: the experts of each token, i32[B, T, k].
      normalize: whether the weights of a token add up to 1.
    """
    # A sum over a mask instead of a look-up: its derivative needs no scatter, and both fuse.
    weights = jnp.sum(
        jnp.where(_is_chosen(probabilities, chosen), probabilities[:, :, None], 0), -1
    )
    return weights / jnp.sum(weights, -1, keepdims=True) if normalize else weights


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


def measure_z(logits: Array) -> Array:
    """Return the mean of logsumexp(logits)^2, f32[] (ST-MoE, arXiv:2202.08906, equation 5)."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits, -1)))


def _is_chosen(probabilities: Array, chosen: Array) -> Array:
    """Return whether a choice of a token is an expert, bool[B, T, k, E]."""
    return chosen[..., None] == jnp.arange(probabilities.shape[-1])
