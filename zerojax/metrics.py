"""Metrics that a step reports: replicated float32 scalars by name, plus the loss function's own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.precision import LossScale


def step_metrics(
    loss: jax.Array,
    grad_norm: jax.Array,
    finite: jax.Array,
    skipped: jax.Array,
    loss_scale: LossScale | None,
) -> dict[str, jax.Array]:
    """Return the metrics of one step, as replicated float32 scalars.

    "loss" is the mean over the batch. "grad_norm" is the norm before clipping of the gradients that
    the optimizer uses; it is not finite if one of these gradients is not. "grads_finite" is 1 if
    that norm is finite in float32, else 0. "skipped_steps" counts the updates skipped so far,
    including this one. "loss_scale" (fp16 only) is the scale that this step used.

    Args:
      loss: mean loss.
      grad_norm: global gradient norm before clipping.
      finite: whether that norm is finite.
      skipped: number of updates skipped so far.
      loss_scale: state of loss scaling in this step, or None.
    """
    metrics = {
        "loss": loss.astype(jnp.float32),
        "grad_norm": grad_norm,
        "grads_finite": finite.astype(jnp.float32),
        "skipped_steps": skipped.astype(jnp.float32),
    }
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale.scale
    return metrics


_PREFIX = "swap_"  # prefix of the disk's metrics
OURS = ("loss", "grad_norm", "grads_finite", "skipped_steps", "loss_scale", "learning_rate")


def with_own(metrics: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step or evaluation together with the loss function's own metrics.

    Args:
      metrics: metrics by name.
      own: metrics that the model's loss returned, by name.

    Raises:
      ValueError: the loss function uses a reserved name.
    """
    reserved = sorted(name for name in own if name in OURS or name.startswith(_PREFIX))
    if reserved:
        raise ValueError(
            f"the loss returns metrics {reserved}, but these names are reserved for the step "
            f"({', '.join(OURS)}, {_PREFIX}...): give them other names"
        )
    return {**metrics, **own}


def evaluation(loss: jax.Array, own: Mapping[str, Any]) -> Any:
    """Return an evaluation's loss, f32[], or a dict of the loss and the model's own metrics.

    The result is a dict only if the model has metrics of its own.
    """
    return with_own({"loss": loss}, own) if own else loss
