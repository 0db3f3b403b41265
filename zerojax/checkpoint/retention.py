"""Which checkpoints are kept: the newest, or those whose metric is best.

    max_to_keep=3                           the three newest
    max_to_keep=3, best_metric="loss"       the three with the least loss, of equal ones the newest; and the newest of all

The newest is kept whatever its metric is: a run goes on from there. The metrics are JSON that Orbax
  writes beside the state. A
step whose metrics are not there, or are damaged, is never removed for another one: it may be the
  best.
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
"""Of the file of a step's metrics."""


def metrics_file(folder: str) -> str:
    """Return the file in the folder of a step in which Orbax's JsonSave writes its metrics."""
    return os.path.join(folder, METRICS, METRICS)


def read_metrics(folder: str) -> dict[str, float] | None:
    """Return the metrics in the folder of a step; None if it was saved without.

    Raises:
      DamagedError: they are no numbers by name.
      CheckpointError: they cannot be read now.
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
        raise DamagedError(f"{path} holds no numbers by name")
    return {name: float(value) for name, value in metrics.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1000)


@dataclasses.dataclass
class Retention:
    """The rule by which a directory's steps are kept.

    Attributes:
      max_to_keep: steps; None keeps all.
      best_metric: name of the metric, or None for the newest.
      best_mode: whether the least or the greatest is best.
    """

    max_to_keep: int | None
    best_metric: str | None
    best_mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        self._told: set[str] = set()  # files that a warning has named

    def best(self, directory: Directory) -> int | None:
        """Return the step of the best metric, or the newest where there is no metric; None if there
        is no such step.

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
          CheckpointError: as `best` does.
        """
        if self.max_to_keep is None:
            return []
        steps = directory.steps()
        ranked = steps if self.best_metric is None else self._ranked(directory)
        return [step for step in ranked[: -self.max_to_keep] if step != steps[-1]]

    def _ranked(self, directory: Directory) -> list[int]:
        """Return the steps that have the metric, the best last."""
        values = {step: self._value(directory.step_folder(step)) for step in directory.steps()}
        sign = -1 if self.best_mode == "min" else 1
        known = {step: sign * value for step, value in values.items() if value is not None}
        # What is no number is the worst.
        return sorted(
            known, key=lambda step: (-math.inf if math.isnan(known[step]) else known[step], step)
        )

    def _value(self, folder: str) -> float | None:
        """Return the metric of a step; None if it is not there or is damaged, which is told once."""
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
