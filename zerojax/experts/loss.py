"""What a layer of experts reports about its routing, and the loss that keeps experts in use.

    loss = balance_weight * balance + z_weight * z

balance is Switch's (arXiv:2101.03961, equation 4), z is ST-MoE's (arXiv:2202.08906, equation 5).
"""

from typing import NamedTuple

import jax

from zerojax.models import Loss
from zerojax.user_values import as_number, shown

Array = jax.Array


class ExpertStats(NamedTuple):
    """Statistics of one layer's routing, each a mean over the whole microbatch.

    Attributes:
      balance: f32[], E sum_e share_e probability_e: 1 if the experts are used evenly, and at most
        E. The share of an expert is its part of all choices, dropped ones included.
      z: f32[], mean of the square of the router's logsumexp.
      dropped: f32[], fraction of the choices for which an expert had no cell left.
    """

    balance: Array
    z: Array
    dropped: Array


def expert_loss(stats: ExpertStats, balance: float = 1e-2, z: float = 1e-3) -> Loss:
    """Return what a layer of experts adds to the loss, with the metric `dropped_fraction`.

    A block of a `LayeredModel` returns it beside its activations, and a step adds up the layers:

        y, stats = zj.moe(x, p["router"], p["up"], p["down"])
        return x + y, zj.expert_loss(stats)

    Args:
      stats: statistics that `zj.moe` returned.
      balance: weight of `stats.balance` (Switch uses 1e-2).
      z: weight of `stats.z` (ST-MoE uses 1e-3).

    Raises:
      TypeError: `stats` is not an ExpertStats.
      ValueError: a weight is not a finite number.
    """
    if not isinstance(stats, ExpertStats):
        raise TypeError(
            f"expert_loss: stats must be an ExpertStats, got {type(stats).__name__}: pass the "
            "second result of zj.moe, y, stats = zj.moe(...)"
        )
    for name, weight in {"balance": balance, "z": z}.items():
        if not isinstance(weight, jax.Array) and as_number(weight) is None:
            raise ValueError(
                f"expert_loss: {name}={shown(weight)}: a finite number is needed, or 0 to leave "
                "this part out"
            )
    total = balance * stats.balance + z * stats.z
    return Loss(total, metrics={"dropped_fraction": stats.dropped})
