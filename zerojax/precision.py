"""Dtypes of a train step, and dynamic loss scaling.

    precision   params, gathers, grads   master weights, moments      loss scaling
    fp32        float32                  the parameters themselves    none
    bf16        bfloat16                 float32                      none (float32's exponent range)
    fp16        float16                  float32                      dynamic

Moments may also rest in bfloat16, whatever the precision: see `zerojax.optim.moments`.

Mixed precision as in Micikevicius et al. (arXiv:1710.03740) and section 3.1 of ZeRO. With a loss scale S the derivative of
S * loss is taken in float16, and divided by S in float32. A non-finite gradient means that S was too large: the update is
skipped, and S backs off at the `hysteresis`-th overflow since it last changed; after `growth_interval` good steps in a row S
grows.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Dtype names of one precision."""

    compute_dtype: str
    has_master: bool
    scales_loss: bool


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision("float32", has_master=False, scales_loss=False),
        "bf16": Precision("bfloat16", has_master=True, scales_loss=False),
        "fp16": Precision("float16", has_master=True, scales_loss=True),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Dynamic loss scaling for float16.

    Attributes:
      initial: the first scale.
      growth_factor: the scale is multiplied by it after `growth_interval` finite steps in a row.
      backoff_factor: the scale is multiplied by it when an overflow exhausts the hysteresis.
      growth_interval: steps.
      hysteresis: overflows it takes to back off; restored when the scale grows or backs off.
      least: the scale never falls below it.
      most: the scale never grows above it.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.initial <= self.most < float("inf"):
            raise ValueError(f"loss scaling needs 0 < least <= initial <= most, got {self.least}, {self.initial}, {self.most}")
        if self.growth_factor <= 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                "loss scaling needs growth_factor > 1 and 0 < backoff_factor < 1, "
                f"got {self.growth_factor}, {self.backoff_factor}"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"loss scaling needs growth_interval >= 1 and hysteresis >= 1, got {self.growth_interval}, {self.hysteresis}"
            )


class LossScale(NamedTuple):
    """State of dynamic loss scaling; three scalars."""

    scale: jax.Array  # f32[]
    good_steps: jax.Array  # i32[], finite steps since the scale last changed
    patience: jax.Array  # i32[], overflows left before the scale backs off


def init_loss_scale(config: LossScaling) -> LossScale:
    """Return the state before the first step."""
    return LossScale(jnp.float32(config.initial), jnp.int32(0), jnp.int32(config.hysteresis))


def update_loss_scale(config: LossScaling, state: LossScale, finite: jax.Array) -> LossScale:
    """Return the state after a step whose gradients were all finite, or not."""
    # The step at hand counts: `good_steps` does not include it yet.
    grows = finite & (state.good_steps + 1 >= config.growth_interval)
    # Patience counts the overflow at hand too: at 1, this one exhausts it.
    backs_off = ~finite & (state.patience <= 1)
    grown = jnp.minimum(state.scale * config.growth_factor, config.most)
    reduced = jnp.maximum(state.scale * config.backoff_factor, config.least)
    spent = state.patience - jnp.where(finite, 0, 1)
    return LossScale(
        scale=jnp.where(grows, grown, jnp.where(backs_off, reduced, state.scale)),
        # An overflow that is forgiven also interrupts the run of good steps.
        good_steps=jnp.where(finite & ~grows, state.good_steps + 1, 0),
        patience=jnp.where(grows | backs_off, config.hysteresis, spent).astype(jnp.int32),
    )
