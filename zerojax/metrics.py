"""What a step reports: float32 scalars, replicated, by name; and beside them what the model's loss
reports.
"""

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
    """Return the metrics of one step.

    Returns:
      "loss": mean over the batch. "grad_norm": before clipping, of the gradients that the optimizer
        uses; not finite where
      one of these is not. "grads_finite": 1 if that norm is finite in float32, else 0.
      "skipped_steps": updates skipped so far, this one included. "loss_scale": the scale this step
        used (fp16 only).
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


_PREFIX = "swap_"  # of the metrics of the disk
OURS = ("loss", "grad_norm", "grads_finite", "skipped_steps", "loss_scale", "learning_rate")


def with_own(metrics: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of a step or an evaluation, and those of the model's own beside them.

    Raises:
      ValueError: the model takes a name that is used.
    """
    if wrong := sorted(name for name in own if name in OURS or name.startswith(_PREFIX)):
        raise ValueError(
            f"the loss returns metrics {wrong}, whose names are those of the step itself ({', '.join(OURS)}, {_PREFIX}...): "
            "give them other names"
        )
    return {**metrics, **own}


def evaluation(loss: jax.Array, own: Mapping[str, Any]) -> Any:
    """Return what an evaluation returns: the loss, f32[], or a dict of it and the model's own
    metrics if there are any.
    """
    return with_own({"loss": loss}, own) if own else loss
