"""Which checkpoints are kept: the newest, or those with the best metric.

    max_to_keep=3                        the three newest
    max_to_keep=3, best_metric="loss"    the three with the smallest loss (ties: the newest),
                                         and the newest of all

The newest is always kept, whatever its metric: a run continues from there. The metrics are JSON
that Orbax writes next to the state. A step with missing or damaged metrics is never removed in
favor of another: it may be the best.
"""

import dataclasses
import logging
import math
import os
from typing import Literal

from host_offload.disk import ReadFile
from host_offload.fields import parse_json
from zerojax.checkpoint.directory import METRICS, Directory, is_folder
from zerojax.checkpoint.errors import DamagedError, unreadable

logger = logging.getLogger("zerojax")
_MOST_BYTES = 1 << 20
"""Largest size of a file of metrics."""


def metrics_file(folder: str) -> str:
    """Return the file in a step's folder in which Orbax's JsonSave writes the metrics."""
    return os.path.join(folder, METRICS, METRICS)


def read_metrics(folder: str) -> dict[str, float] | None:
    """Return the metrics of a step's folder, or None if it was saved without metrics.

    Raises:
      DamagedError: the file does not hold numbers by name.
      CheckpointError: the file cannot be read now.
    """
    path = metrics_file(folder)
    try:
        if not is_folder(os.path.dirname(path)):
            return None
        metrics = parse_json(ReadFile(path).read_all(_MOST_BYTES))
    except OSError as error:
        raise unreadable(error, f"reading {path}", f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if not isinstance(metrics, dict) or not all(_is_number(value) for value in metrics.values()):
        raise DamagedError(f"{path} does not hold numbers by name")
    return {name: float(value) for name, value in metrics.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1000)


@dataclasses.dataclass
class Retention:
    """The rule by which a directory's steps are kept.

    Attributes:
      max_to_keep: number of steps to keep; None keeps all.
      best_metric: name of the metric, or None to keep the newest steps.
      best_mode: whether the smallest ("min") or the largest ("max") metric is best.
    """

    max_to_keep: int | None
    best_metric: str | None
    best_mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        """Start with no warnings issued."""
        self._told: set[str] = set()  # files named in a warning so far

    def best(self, directory: Directory) -> int | None:
        """Return the step with the best metric, or the newest step without a metric; None if none.

        Raises:
          CheckpointError: the directory or the metrics cannot be read now.
        """
        if self.best_metric is None:
            return max(directory.steps(), default=None)
        ranked = self._ranked(directory)
        return ranked[-1] if ranked else None

    def surplus(self, directory: Directory) -> list[int]:
        """Return the steps that are no longer kept.

        Raises:
          CheckpointError: the directory or the metrics cannot be read now.
        """
        if self.max_to_keep is None:
            return []
        steps = directory.steps()
        ranked = steps if self.best_metric is None else self._ranked(directory)
        return [step for step in ranked[: -self.max_to_keep] if step != steps[-1]]

    def _ranked(self, directory: Directory) -> list[int]:
        """Return the steps that have the metric, the best one last."""
        values = {step: self._value(directory.step_folder(step)) for step in directory.steps()}
        sign = -1 if self.best_mode == "min" else 1
        known = {step: sign * value for step, value in values.items() if value is not None}
        # NaN is the worst.
        return sorted(
            known, key=lambda step: (-math.inf if math.isnan(known[step]) else known[step], step)
        )

    def _value(self, folder: str) -> float | None:
        """Return the metric of a step; None if it is missing or damaged, which is logged once."""
        assert self.best_metric is not None
        try:
            metrics = read_metrics(folder) or {}
        except DamagedError as error:
            if (path := metrics_file(folder)) not in self._told:
                self._told.add(path)
                logger.warning(
                    "%s; the step counts as one without metrics: it is kept, and never the best",
                    error,
                )
            return None
        return metrics.get(self.best_metric)
