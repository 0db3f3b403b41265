"""What a step reports: float32 scalars, replicated, by name."""

import jax
import jax.numpy as jnp

from zerojax.precision import LossScale


def step_metrics(
    loss: jax.Array, grad_norm: jax.Array, finite: jax.Array, skipped: jax.Array, loss_scale: LossScale | None
) -> dict[str, jax.Array]:
    """Return the metrics of one step.

    Returns:
      "loss": mean over the batch. "grad_norm": before clipping, of the gradients that the optimizer uses; not finite where
      one of these is not. "grads_finite": 1 if that norm is finite in float32, else 0.
      "skipped_steps": updates skipped so far, this one included. "loss_scale": the scale this step used (fp16 only).
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
