"""What a loss returns, in one form: a total, the weight that it is divided by, and metrics beside
it.

    loss of a step = sum(total) / sum(weight)        over microbatches, layers and devices; divided once

So a token counts alike however a batch is split, also where masks leave more of them in one
microbatch than in another. A scalar is a mean already, and microbatches count alike: their losses
are averaged. Metrics are averaged in the same way, or are a `Loss` each, and are divided by a
weight of their own.

A metric whose name begins with "fault/" says what is wrong with the batch, such as the share of its
tokens that are out of range. Where one is not 0 the loss becomes NaN, with all of its gradient, so
that the step is skipped wherever its state is:

    total -> total * NaN        a factor, and no choice: the derivative of a value that is not chosen would be 0
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
    """A loss as a sum and its weight; what a model's loss, head or block may return.

        zj.Loss(jnp.sum(mask * cross_entropy), jnp.sum(mask), {"accuracy": zj.Loss(num_correct,
        jnp.sum(mask))})

    Attributes:
      total: f[], summed over whatever the weight counts. Of a block: what it adds to the loss, a
        mean.
      weight: f[], not negative, such as the number of tokens that count; a constant to the
        derivative. None: `total` is a mean, and microbatches count alike. Where all weights are 0
        the loss is 0, and so is its gradient: the optimizer still makes a step, with what it
        decays.
      metrics: by name, a tree of arrays, averaged over microbatches (and layers, of a block), each
        a `Loss` of its own where another weight applies. One whose name begins with "fault/" is a
        check of the batch: where it is not 0 the step is skipped, and `program.step` logs a warning
        with the name and the number.
    """

    total: Any
    weight: Any = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAULT = "fault/"
"""What the names of metrics begin with that are 0 unless the batch is wrong."""
Metrics = dict[str, Any]
"""By name, trees of `Loss`, each with its weight: what is summed before it is divided."""


class Terms(NamedTuple):
    """The loss of one microbatch, its parts not divided yet.

    Attributes:
      total: f[].
      weight: f32[], or None where the total is a mean.
      added: f[], the mean that blocks add, or None.
      metrics: of all parts.
    """

    total: Array
    weight: Array | None
    added: Array | None
    metrics: Metrics

    def value(self, whole: Array | None = None, count: int = 1) -> Array:
        """Return the loss, f32[]; the mean of it over `count` microbatches is that of the step.

        Args:
          whole: the weight of all microbatches together; by default there is one microbatch.
          count: microbatches.
        """
        total = self.total.astype(jnp.float32)
        if self.weight is not None:
            total = (
                quotient(total, self.weight) if whole is None else quotient(total * count, whole)
            )
        return total if self.added is None else total + self.added.astype(jnp.float32)


def as_loss(out: Any, what: str = "the loss") -> Loss:
    """Return what a loss returned as a Loss whose metrics are each a Loss with a weight.

    Args:
      out: a scalar, (scalar, aux), or a Loss.
      what: returned it, for errors.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(out, tuple) and len(out) == 2 and not isinstance(out[0], tuple | list | Mapping):
        if isinstance(out[0], Loss):
            raise ValueError(
                f"{what} returned (zj.Loss, aux): metrics of a zj.Loss are its third field"
            )
        aux = {} if out[1] is None else out[1]
        is_named = isinstance(aux, Mapping) and all(isinstance(name, str) for name in aux)
        out = Loss(out[0], None, aux if is_named else {"aux": aux})
    if not isinstance(out, Loss):
        leaves = jax.tree.leaves(out)
        if len(leaves) != 1 or leaves[0] is not out:
            raise ValueError(
                f"{what} must be one scalar, (scalar, aux) or a zj.Loss, got {jax.tree.structure(out)}; return the mean loss "
                "alone, or with a tree of metrics beside it"
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
    metrics = {
        name: jax.tree.map(
            lambda a, name=name: _weighed(a, name),
            value,
            is_leaf=lambda node: isinstance(node, Loss),
        )
        for name, value in out.metrics.items()
    }
    weight = (
        None if out.weight is None else jax.lax.stop_gradient(jnp.asarray(out.weight, jnp.float32))
    )
    return _without_faults(Loss(out.total, weight, metrics))


def _without_faults(loss: Loss) -> Loss:
    """Return a loss that is NaN where one of its metrics finds a fault."""
    has_fault = any_fault(loss.metrics)
    if has_fault is None:
        return loss
    total = loss.total * jnp.where(has_fault, jnp.nan, 1).astype(loss.total.dtype)
    if loss.weight is None:
        return dataclasses.replace(loss, total=total)
    # A weight of 0 would make the loss 0 again.
    return dataclasses.replace(
        loss, total=total, weight=jnp.where(has_fault, jnp.maximum(loss.weight, 1), loss.weight)
    )


def any_fault(metrics: Mapping[str, Any]) -> Array | None:
    """Return whether a batch has a fault, bool[], by metrics that are not divided yet; None where
    none of them is a fault.
    """
    faults, _ = split_faults(metrics)
    totals = [
        loss.total for loss in jax.tree.leaves(faults, is_leaf=lambda node: isinstance(node, Loss))
    ]
    return jnp.stack([jnp.any(total != 0) for total in totals]).any() if totals else None


def split_faults(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics that are faults of a batch, and the others."""
    faults = {name: value for name, value in metrics.items() if name.startswith(FAULT)}
    return faults, {name: value for name, value in metrics.items() if name not in faults}


def _check_scalar(out: Any, what: str) -> None:
    if not hasattr(out, "shape") or not hasattr(out, "dtype"):
        raise ValueError(
            f"{what} must be an array computed from the parameters, got {type(out).__name__} {out!r}"
        )
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{what} must be a floating scalar, got shape {out.shape} {out.dtype}; take its mean"
        )


def _weighed(a: Any, name: str) -> Loss:
    """Return a metric as a Loss with a weight."""
    if isinstance(a, Loss) and jax.tree.leaves(a.metrics):
        raise ValueError(
            f"metric {name!r} is a zj.Loss with metrics of its own: name these beside it"
        )
    total, weight = (a.total, a.weight) if isinstance(a, Loss) else (a, None)

    def number(value: Any) -> Array:
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if not (
            jnp.issubdtype(dtype, jnp.bool_)
            or jnp.issubdtype(dtype, jnp.integer)
            or jnp.issubdtype(dtype, jnp.floating)
        ):
            raise ValueError(
                f"metric {name!r} must be of real numbers, which are averaged, got {dtype}"
            )
        # Metrics are read and not trained on: nothing of them is kept for backward.
        return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))

    return Loss(number(total), number(1.0 if weight is None else weight))


def quotient(total: Array, weight: Array) -> Array:
    """Return total / weight; 0 where the weight is 0, and so is the derivative: what has no weight
    counts for nothing.
    """
    return jnp.where(weight == 0, 0, total) / jnp.where(weight == 0, 1, weight)


def summed(stacked: Any) -> Any:
    """Return the sum over dim 0 of a tree of metrics: over layers or microbatches."""
    return jax.tree.map(lambda a: jnp.sum(a, 0), stacked)


def joined(first: Metrics, second: Metrics) -> Metrics:
    """Return the metrics of a loss and of its blocks.

    Raises:
      ValueError: both name one.
    """
    if both := sorted(set(first) & set(second)):
        raise ValueError(
            f"the loss and the blocks both give metrics {both}: choose other names for one of them"
        )
    return {**first, **second}


def together(added: Sequence["Loss | None"]) -> "Loss | None":
    """Return what several stacks of blocks add to a loss: a metric that more than one has is
    averaged over the layers of all.

    Raises:
      ValueError: such a metric is another tree, or has other shapes, in each.
    """
    given = [loss for loss in added if loss is not None]
    if len(given) < 2:
        return given[0] if given else None
    metrics: Metrics = {}
    for loss in given:
        for name, value in loss.metrics.items():
            shapes = [jax.tree.map(jnp.shape, tree) for tree in (metrics.get(name, value), value)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"stacks give metric {name!r} in different shapes, {shapes}: choose other names for one of them"
                )
            metrics[name] = (
                jax.tree.map(jnp.add, metrics[name], value) if name in metrics else value
            )
    return Loss(sum(loss.total.astype(jnp.float32) for loss in given), None, metrics)


def divided(metrics: Metrics) -> dict[str, Any]:
    """Return metrics as users read them: each divided by its weight."""
    return jax.tree.map(
        lambda m: quotient(m.total, m.weight), metrics, is_leaf=lambda node: isinstance(node, Loss)
    )
