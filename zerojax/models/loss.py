"""Losses in one form: a total, the weight that it is divided by, and metrics.

    loss of a step = sum(total) / sum(weight)    over microbatches, layers and devices; divided once

So each token counts equally however a batch is split, even if masks leave more tokens in one
microbatch than in another. A scalar is already a mean: the losses of microbatches are averaged with
equal weights. Metrics are averaged in the same way, unless a metric is a `Loss`, which is divided
by its own weight.

A metric whose name begins with "fault/" shows what is wrong with the batch, such as the fraction of
tokens that are out of range. If it is not 0, the loss and all of its gradient become NaN, so that
the step is skipped wherever its state is stored:

    total -> total * NaN

A factor is used instead of a select, because the derivative of a value that is not selected is 0.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a sum and its weight; a model's loss, head or block may return it.

        zj.Loss(jnp.sum(mask * cross_entropy), jnp.sum(mask),
                {"accuracy": zj.Loss(num_correct, jnp.sum(mask))})

    Attributes:
      total: f[], sum over everything that the weight counts. For a block: its addition to the loss,
        a mean.
      weight: f[], not negative, such as the number of tokens that count; a constant for the
        derivative. None: `total` is a mean, and microbatches count equally. If all weights are 0,
        the loss and its gradient are 0: the optimizer still makes a step, which applies weight
        decay.
      metrics: trees of arrays by name, averaged over microbatches (and, for a block, over layers).
        An array may be replaced by a `Loss` with its own weight. A name that begins with "fault/"
        marks a check of the batch: if it is not 0, the step is skipped, and `program.step` logs a
        warning with the name and the number.
    """

    total: Any
    weight: Any = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAULT = "fault/"
"""Prefix of the names of metrics that are 0 unless the batch is wrong."""
Metrics = dict[str, Any]
"""Trees of `Loss` by name, each with its weight: they are summed before they are divided."""


class Terms(NamedTuple):
    """The loss of one microbatch, whose parts are not divided yet.

    Attributes:
      total: f[], sum or mean of the loss.
      weight: f32[], or None if the total is a mean.
      added: f[], mean that the blocks add, or None.
      metrics: metrics of all parts.
    """

    total: Array
    weight: Array | None
    added: Array | None
    metrics: Metrics

    def value(self, whole: Array | None = None, count: int = 1) -> Array:
        """Return the loss, f32[]; its mean over `count` microbatches is the loss of the step.

        Args:
          whole: weight of all microbatches together; None: there is only this microbatch.
          count: number of microbatches.
        """
        total = self.total.astype(jnp.float32)
        if self.weight is not None:
            if whole is None:
                total = quotient(total, self.weight)
            else:
                total = quotient(total * count, whole)
        return total if self.added is None else total + self.added.astype(jnp.float32)


def as_loss(out: Any, what: str = "the loss") -> Loss:
    """Return the output of a loss function as a Loss, in which each metric is a weighted Loss.

    Args:
      out: scalar, (scalar, aux), or Loss.
      what: description of the function, for errors.

    Raises:
      ValueError: `out` is something else.
    """
    if isinstance(out, tuple) and len(out) == 2 and not isinstance(out[0], tuple | list | Mapping):
        if isinstance(out[0], Loss):
            raise ValueError(
                f"{what} returned (zj.Loss, aux): pass aux as the third field of zj.Loss, metrics"
            )
        aux = {} if out[1] is None else out[1]
        is_named = isinstance(aux, Mapping) and all(isinstance(name, str) for name in aux)
        out = Loss(out[0], None, aux if is_named else {"aux": aux})
    if not isinstance(out, Loss):
        leaves = jax.tree.leaves(out)
        if len(leaves) != 1 or leaves[0] is not out:
            raise ValueError(
                f"{what} must be one scalar, (scalar, aux) or a zj.Loss, got "
                f"{jax.tree.structure(out)}; return only the mean loss, or with it a tree of "
                "metrics"
            )
        out = Loss(out)
    _check_scalar(out.total, what)
    if out.weight is not None:
        _check_scalar(jnp.asarray(out.weight, jnp.float32), f"the weight of {what}")
    if not isinstance(out.metrics, Mapping) or not all(
        isinstance(name, str) for name in out.metrics
    ):
        raise ValueError(
            f"the metrics of {what} must be a dict by name, got {type(out.metrics).__name__}"
        )
    metrics = {name: _weighed(value, name) for name, value in out.metrics.items()}
    weight = None
    if out.weight is not None:
        weight = jax.lax.stop_gradient(jnp.asarray(out.weight, jnp.float32))
    return _without_faults(Loss(out.total, weight, metrics))


def _without_faults(loss: Loss) -> Loss:
    """Return a loss that is NaN if one of its metrics finds a fault."""
    has_fault = any_fault(loss.metrics)
    if has_fault is None:
        return loss
    total = loss.total * jnp.where(has_fault, jnp.nan, 1).astype(loss.total.dtype)
    if loss.weight is None:
        return dataclasses.replace(loss, total=total)
    # With a weight of 0, the loss would be 0 again.
    return dataclasses.replace(
        loss, total=total, weight=jnp.where(has_fault, jnp.maximum(loss.weight, 1), loss.weight)
    )


def any_fault(metrics: Mapping[str, Any]) -> Array | None:
    """Return whether undivided metrics show a fault, bool[]; None if none is a fault check."""
    faults, _ = split_faults(metrics)
    losses = jax.tree.leaves(faults, is_leaf=_is_loss)
    if not losses:
        return None
    return jnp.stack([jnp.any(loss.total != 0) for loss in losses]).any()


def split_faults(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (metrics that are faults of a batch, all other metrics)."""
    faults = {name: value for name, value in metrics.items() if name.startswith(FAULT)}
    return faults, {name: value for name, value in metrics.items() if name not in faults}


def _check_scalar(out: Any, what: str) -> None:
    if not hasattr(out, "shape") or not hasattr(out, "dtype"):
        raise ValueError(
            f"{what} must be an array computed from the parameters, got {type(out).__name__} "
            f"{out!r}"
        )
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{what} must be a floating scalar, got shape {out.shape} {out.dtype}; take its mean"
        )


def _is_loss(node: Any) -> bool:
    return isinstance(node, Loss)


def _weighed(metric: Any, name: str) -> Any:
    """Return a metric in which each leaf is a Loss with a weight."""
    return jax.tree.map(lambda a: _weighed_leaf(a, name), metric, is_leaf=_is_loss)


def _weighed_leaf(a: Any, name: str) -> Loss:
    """Return a leaf of a metric as a Loss with a weight; `name` is the metric's, for errors."""
    if isinstance(a, Loss) and jax.tree.leaves(a.metrics):
        raise ValueError(
            f"metric {name!r} is a zj.Loss with metrics of its own: list these next to it instead"
        )
    total, weight = (a.total, a.weight) if isinstance(a, Loss) else (a, None)

    def number(value: Any) -> Array:
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if not any(jnp.issubdtype(dtype, k) for k in (jnp.bool_, jnp.integer, jnp.floating)):
            raise ValueError(
                f"metric {name!r} must hold real numbers, which are averaged, got {dtype}"
            )
        # Metrics are not differentiated, so nothing is saved for backward.
        return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))

    return Loss(number(total), number(1.0 if weight is None else weight))


def quotient(total: Array, weight: Array) -> Array:
    """Return total / weight, or 0 with a derivative of 0 if the weight is 0."""
    return jnp.where(weight == 0, 0, total) / jnp.where(weight == 0, 1, weight)


def summed(stacked: Any) -> Any:
    """Return the sum of a tree of metrics over dim 0, the layers or microbatches."""
    return jax.tree.map(lambda a: jnp.sum(a, 0), stacked)


def joined(first: Metrics, second: Metrics) -> Metrics:
    """Return the metrics of a loss and of its blocks.

    Raises:
      ValueError: both have a metric of the same name.
    """
    both = sorted(set(first) & set(second))
    if both:
        raise ValueError(
            f"the loss and the blocks both return metrics {both}: rename them in one of the two"
        )
    return {**first, **second}


def together(added: Sequence["Loss | None"]) -> "Loss | None":
    """Return the additions of several stacks of blocks to a loss, combined.

    A metric that several stacks have is averaged over the layers of all these stacks.

    Raises:
      ValueError: such a metric has another structure or other shapes in each stack.
    """
    losses = [loss for loss in added if loss is not None]
    if len(losses) < 2:
        return losses[0] if losses else None
    metrics: Metrics = {}
    for loss in losses:
        for name, value in loss.metrics.items():
            shapes = [jax.tree.map(jnp.shape, tree) for tree in (metrics.get(name, value), value)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"stacks return metric {name!r} in different shapes, {shapes}: rename it in "
                    "one of them"
                )
            if name in metrics:
                value = jax.tree.map(jnp.add, metrics[name], value)
            metrics[name] = value
    return Loss(sum(loss.total.astype(jnp.float32) for loss in losses), None, metrics)


def divided(metrics: Metrics) -> dict[str, Any]:
    """Return metrics as users read them, each divided by its weight."""
    return jax.tree.map(lambda m: quotient(m.total, m.weight), metrics, is_leaf=_is_loss)
