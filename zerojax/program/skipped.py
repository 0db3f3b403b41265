"""Explain skipped steps by name, without waiting for a device.

A step whose gradients are not finite leaves its state as it was, and only its metrics show it. A
run in which every step is skipped looks like one that trains. Two messages are given, each once per
row of skipped steps:

    at the first one     if the batch has a fault (`zerojax.models.FAULT`): its metric names what is
                         out of range
    at the Nth one       something else is wrong with the run: what to check

The metrics of a step are read at a later step, after it has ended, so that neither the device nor
the host waits for the other.
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
"""Number of skipped steps in a row after which a message is given."""
IN_A_ROW_SCALED = 20
"""Number of skipped steps in a row after which a message is given, with a loss scale.

The first steps halve the scale until it fits: 16 times from 2^16 to 1.
"""
logger = logging.getLogger("zerojax")


class SkippedSteps:
    """Count skipped steps in a row, and say what to check."""

    def __init__(self, config: ZeroConfig) -> None:
        """Count for a run with this config; its loss scaling sets the number of steps."""
        self._scaling = config.loss_scaling if PRECISIONS[config.precision].scales_loss else None
        self._most = IN_A_ROW if self._scaling is None else IN_A_ROW_SCALED
        self._count = 0
        self._has_fault = False

    def add(self, metrics: Mapping[str, Any]) -> str | None:
        """Add the metrics of the next step; return the message that they call for, or None.

        Args:
          metrics: metrics from `program.step`; values are read only when they are needed.
        """
        if float(metrics.get("grads_finite", 1)):
            self._count = 0
            self._has_fault = False
            return None
        self._count += 1
        faults = found_faults(metrics)
        is_new = bool(faults) and not self._has_fault
        self._has_fault = self._has_fault or bool(faults)
        if self._count == self._most:
            return self._advice(metrics, faults)
        if not is_new:
            return None
        return f"a step was skipped, and its state is unchanged: {worded(faults)}"

    def _advice(self, metrics: Mapping[str, Any], faults: Mapping[str, float]) -> str:
        loss = float(metrics.get("loss", 0))
        cause = worded(faults) if faults else f"their gradients were not finite (loss {loss:.4g})"
        looks = [
            "the batches" if faults else "the data",
            "the learning rate, which may have let weights grow without bound before",
            "the base weights: program.eval(state, batch) is not finite if one of them is not",
        ]
        if self._scaling is not None and "loss_scale" in metrics:
            scale = float(metrics["loss_scale"])
            least = self._scaling.least
            looks.append(
                f"the loss scale, {scale:g} of at least {least:g}: at its least value, float16 "
                "overflows even without scaling, as with weights or activations above 65504; "
                "precision='bf16' does not"
            )
        return (
            f"{self._count} steps in a row were skipped: {cause}. Weights and optimizer state are "
            f"unchanged. Check {'; '.join(looks)}"
        )


def found_faults(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the faults of a batch, by the names of their metrics."""
    checks, _ = split_faults(metrics)
    faults = dict[str, float]()
    for name, value in checks.items():
        # Most faults are one number. For a tree of arrays, the largest value counts.
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(value))]
        largest = max((float(abs(leaf).max()) for leaf in leaves), default=0.0)
        if largest != 0:
            faults[name] = largest
    return faults


def worded(faults: Mapping[str, float]) -> str:
    """Return the faults of a batch in words."""
    return "its batch has " + ", ".join(f"{name} = {value:.4g}" for name, value in faults.items())


class SkipWarnings:
    """Log the messages of `SkippedSteps` in process 0, once the metrics of a step are known."""

    def __init__(self, config: ZeroConfig) -> None:
        """Watch the steps of a run with this config."""
        self._skipped = SkippedSteps(config)
        self._steps = collections.deque[Mapping[str, Any]]()
        self._evaluations = collections.deque[Mapping[str, Any]]()
        self._is_first = jax.process_index() == 0

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step that was started."""
        if self._is_first:
            metrics["grads_finite"].copy_to_host_async()
            self._steps.append(metrics)
            self.look()

    def add_evaluation(self, faults: Mapping[str, Any]) -> None:
        """Add the faults of a batch that is being evaluated."""
        if self._is_first and faults:
            self._evaluations.append(faults)
            self.look()

    def look(self, *, waits: bool = False) -> None:
        """Log the messages of all metrics that are known by now.

        Args:
          waits: whether to wait for the metrics of everything that was started.
        """
        while self._steps and (waits or self._steps[0]["grads_finite"].is_ready()):
            # a failed step raises the error from its own results
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                message = self._skipped.add(self._steps.popleft())
                if message is not None:
                    logger.warning("%s", message)
        while self._evaluations and (waits or _is_ready(self._evaluations[0])):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                faults = found_faults(self._evaluations.popleft())
                if faults:
                    logger.warning("an evaluated loss is NaN: %s", worded(faults))


def _is_ready(values: Any) -> bool:
    return all(a.is_ready() for a in jax.tree.leaves(values))
