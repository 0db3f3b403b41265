"""Dtypes of a train step, and dynamic loss scaling.

    precision  params, gathers, grads  master weights, moments    loss scaling
    fp32       float32                 the parameters themselves  none
    bf16       bfloat16                float32                    none (float32's exponent range)
    fp16       float16                 float32                    dynamic

Moments may also be stored in bfloat16, with any precision: see `zerojax.optim.moments`.

Mixed precision follows Micikevicius et al. (arXiv:1710.03740) and section 3.1 of ZeRO. With a loss
scale S, the derivative of S * loss is computed in float16 and divided by S in float32. A non-finite
gradient means that S was too large: the update is skipped, and S backs off at the `hysteresis`-th
overflow since it last changed. After `growth_interval` good steps in a row S grows.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.user_values import as_integer, as_number, in_float32, shown


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Dtype names of one precision.

    Attributes:
      compute_dtype: dtype of compute, gathers and gradients.
      has_master: whether parameters have float32 masters.
      scales_loss: whether the loss is scaled dynamically.
    """

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


_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
_LARGEST = float(jnp.finfo(jnp.float32).max)
_EPSILON = float(jnp.finfo(jnp.float32).eps)
_LARGEST_COUNT = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Dynamic loss scaling for float16.

    Attributes:
      initial: first scale, the factor by which the loss is multiplied.
      growth_factor: factor applied to the scale after `growth_interval` finite steps in a row.
      backoff_factor: factor applied to the scale when an overflow exhausts the hysteresis.
      growth_interval: number of finite steps in a row before the scale grows.
      hysteresis: number of overflows before the scale backs off; the count restarts when the scale
        grows or backs off.
      least: smallest scale, as a factor of the loss.
      most: largest scale, as a factor of the loss.

    Raises:
      ValueError: a field is not a finite number, does not fit float32 or int32, or not least <=
        initial <= most.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        """Check the fields and convert them to plain Python numbers."""
        for name in ("least", "initial", "most"):
            self._convert(name, _SMALLEST, _LARGEST)
        if not self.least <= self.initial <= self.most:
            raise ValueError(
                f"loss scaling needs least <= initial <= most, got least={self.least}, "
                f"initial={self.initial}, most={self.most}"
            )
        # The limits are the float32 numbers next to 1: a factor closer to 1 would round to 1, and
        # the scale would never change.
        self._convert("growth_factor", 1 + _EPSILON, _LARGEST)
        self._convert("backoff_factor", _SMALLEST, 1 - _EPSILON / 2)
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            count = as_integer(value)
            if count is None or not 1 <= count <= _LARGEST_COUNT:
                raise ValueError(
                    f"{name}={shown(value)} of a LossScaling: an integer from 1 to "
                    f"{_LARGEST_COUNT} is needed, since it is counted in int32"
                )
            object.__setattr__(self, name, count)

    def _convert(self, name: str, least: float, most: float) -> None:
        """Convert a field to a float.

        Raises:
          ValueError: the field is not a finite number in the range that float32 holds.
        """
        value = getattr(self, name)
        number = as_number(value)
        clamped = None if number is None else in_float32(number, least, most)
        if clamped is None:
            raise ValueError(
                f"{name}={shown(value)} of a LossScaling: a number from {least:.9g} to {most:.9g} "
                "is needed, since the scale is a float32"
            )
        object.__setattr__(self, name, clamped)


class LossScale(NamedTuple):
    """State of dynamic loss scaling; three scalars."""

    scale: jax.Array  # f32[]
    good_steps: jax.Array  # i32[], finite steps since the scale last changed
    patience: jax.Array  # i32[], overflows left before the scale backs off


def init_loss_scale(config: LossScaling) -> LossScale:
    """Return the state before the first step."""
    return LossScale(jnp.float32(config.initial), jnp.int32(0), jnp.int32(config.hysteresis))


def update_loss_scale(config: LossScaling, state: LossScale, finite: jax.Array) -> LossScale:
    """Return the state after a step.

    Args:
      config: settings of loss scaling.
      state: state before the step.
      finite: whether all gradients of the step were finite, bool[].
    """
    # Add 1 for the current step, which `good_steps` does not include yet.
    grows = finite & (state.good_steps + 1 >= config.growth_interval)
    # Patience includes the current overflow: at 1, this overflow exhausts it.
    backs_off = ~finite & (state.patience <= 1)
    grown = jnp.minimum(state.scale * config.growth_factor, config.most)
    reduced = jnp.maximum(state.scale * config.backoff_factor, config.least)
    remaining = state.patience - jnp.where(finite, 0, 1)
    return LossScale(
        scale=jnp.where(grows, grown, jnp.where(backs_off, reduced, state.scale)),
        # A tolerated overflow also interrupts the run of good steps.
        good_steps=jnp.where(finite & ~grows, state.good_steps + 1, 0),
        patience=jnp.where(grows | backs_off, config.hysteresis, remaining).astype(jnp.int32),
    )
