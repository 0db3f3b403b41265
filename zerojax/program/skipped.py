"""Why steps are skipped, said by name, without waiting for a device.

A step whose gradients are not finite leaves its state as it was, and only its metrics say so: a run
  in which every step is
skipped looks like one that trains. Two things are said, each once for a row of skipped steps:

    at the first one     the batch has a fault (`zerojax.models.FAULT`): its metric names what is out of range
    at the Nth one       something else is wrong with the run: what to look at

A metric is read when its step has ended: at a later step, so that neither the device nor the host
  waits for the other.
"""

import collections
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.config import ZeroConfig
from zerojax.models import FAULT as FAULT
from zerojax.models import split_faults
from zerojax.precision import PRECISIONS

IN_A_ROW = 10
"""Skipped steps in a row after which something is said."""
IN_A_ROW_SCALED = 20
"""The same with a loss scale, which the first steps halve until it fits: 16 times from 2^16 to 1.
"""
logger = logging.getLogger("zerojax")


class SkippedSteps:
    """Counts skipped steps in a row, and words what to look at."""

    def __init__(self, config: ZeroConfig) -> None:
        self._scaling = config.loss_scaling if PRECISIONS[config.precision].scales_loss else None
        self._most = IN_A_ROW if self._scaling is None else IN_A_ROW_SCALED
        self._count, self._has_fault = 0, False

    def add(self, metrics: Mapping[str, Any]) -> str | None:
        """Take the metrics of the next step; returns what there is to say, or None.

        Args:
          metrics: of `program.step`, whose values are read where they are needed.
        """
        if float(metrics.get("grads_finite", 1)):
            self._count, self._has_fault = 0, False
            return None
        self._count += 1
        found = found_faults(metrics)
        is_new = bool(found) and not self._has_fault
        self._has_fault = self._has_fault or bool(found)
        if self._count == self._most:
            return self._advice(metrics, found)
        return (
            f"a step was skipped, and its state is as it was: {worded(found)}" if is_new else None
        )

    def _advice(self, metrics: Mapping[str, Any], found: Mapping[str, float]) -> str:
        loss = float(metrics.get("loss", 0))
        cause = worded(found) if found else f"their gradients were not finite (loss {loss:.4g})"
        looks = [
            "the batches" if found else "the data",
            "the learning rate, under which weights may have grown without bound before",
            "the base weights: program.eval(state, batch) is not finite where one of them is not",
        ]
        if self._scaling is not None and "loss_scale" in metrics:
            scale, least = float(metrics["loss_scale"]), self._scaling.least
            looks.append(
                f"the loss scale, {scale:g} of at least {least:g}: where it is the least, float16 "
                "overflows without it, as with weights or activations above 65504; precision='bf16' does not"
            )
        return (
            f"{self._count} steps in a row were skipped: {cause}. Weights and optimizer state are as they "
            f"were. Look at {'; '.join(looks)}"
        )


def found_faults(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the faults that a batch has, by the names of their metrics."""
    faults, _ = split_faults(metrics)
    found = dict[str, float]()
    for name, value in faults.items():
        # Most faults are one number; the largest stands for a tree of arrays.
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(value))]
        largest = max((float(abs(leaf).max()) for leaf in leaves), default=0.0)
        if largest != 0:
            found[name] = largest
    return found


def worded(found: Mapping[str, float]) -> str:
    """Return the faults of a batch in words."""
    return "its batch has " + ", ".join(f"{name} = {value:.4g}" for name, value in found.items())


class SkipWarnings:
    """Logs what `SkippedSteps` says, in process 0, as the metrics of earlier steps become known."""

    def __init__(self, config: ZeroConfig) -> None:
        self._skipped = SkippedSteps(config)
        self._steps = collections.deque[Mapping[str, Any]]()
        self._evaluations = collections.deque[Mapping[str, Any]]()
        self._is_first = jax.process_index() == 0

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step that was started."""
        if self._is_first:
            metrics["grads_finite"].copy_to_host_async()
            self._steps.append(metrics)
            self.look()

    def add_evaluation(self, faults: Mapping[str, Any]) -> None:
        """Take the faults of a batch that is evaluated."""
        if self._is_first and faults:
            self._evaluations.append(faults)
            self.look()

    def look(self, *, waits: bool = False) -> None:
        """Log what is known by now; with `waits`, of all that was started."""
        while self._steps and (waits or self._steps[0]["grads_finite"].is_ready()):
            with contextlib.suppress(
                jax.errors.JaxRuntimeError
            ):  # of a step that failed, which its own results raise
                if (said := self._skipped.add(self._steps.popleft())) is not None:
                    logger.warning("%s", said)
        while self._evaluations and (waits or _is_ready(self._evaluations[0])):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if found := found_faults(self._evaluations.popleft()):
                    logger.warning("a loss that was evaluated is NaN: %s", worded(found))


def _is_ready(values: Any) -> bool:
    return all(a.is_ready() for a in jax.tree.leaves(values))
