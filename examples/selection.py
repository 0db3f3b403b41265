"""Keep the best checkpoint by its validation loss, and stop a run that no longer improves.

    {checkpoint_dir}/validations.json    {"format": 1, "losses": {step: loss}}

The losses are recorded next to the checkpoints, so a resumed run counts its evaluations from the
beginning: it forgets losses of later steps than the one it resumes from, and stops where an
uninterrupted run stops. The loss before the first step is not recorded, because there is no
checkpoint of it. The first process writes the file, and renames it into place.
"""

import json
import math
import os

import jax

NAME = "validations.json"
FORMAT = 1
METRIC = "validation/loss"
"""The metric by which a `zj.Checkpointer` keeps checkpoints."""


class Selection:
    """Validation losses of a run so far.

    Attributes:
      patience: number of evaluations without a new lowest loss after which the run stops; None: it
        does not stop early.
      losses: loss by step.
    """

    def __init__(self, folder: str | None, patience: int | None) -> None:
        """Read the losses of a run that began earlier.

        Args:
          folder: folder of the checkpoints, or None.
          patience: see the attributes.

        Raises:
          ValueError: the file cannot be read.
        """
        self.patience = patience
        self.losses: dict[int, float] = {}
        self._path = None if folder is None else os.path.join(folder, NAME)
        if self._path is not None and os.path.exists(self._path):
            self.losses = _read(self._path)

    def resume(self, step: int) -> None:
        """Forget the losses of later steps than `step`, from which the run continues."""
        self.losses = {number: loss for number, loss in self.losses.items() if number <= step}

    def add(self, step: int, loss: float) -> bool:
        """Record a loss, and return whether it is the lowest so far."""
        is_lowest = loss < self.lowest
        self.losses[step] = loss
        if self._path is not None and jax.process_index() == 0:
            _write(self._path, self.losses)
        return is_lowest

    @property
    def lowest(self) -> float:
        """The lowest loss, or infinity if there is none; NaN does not count."""
        return min((loss for loss in self.losses.values() if loss == loss), default=math.inf)

    @property
    def lowest_step(self) -> int:
        """The first step with the lowest loss, or 0 if there is none."""
        return next((step for step, loss in self.losses.items() if loss == self.lowest), 0)

    @property
    def is_exhausted(self) -> bool:
        """Whether as many evaluations as the patience allows came after the lowest loss."""
        later = sum(step > self.lowest_step for step in self.losses)
        return self.patience is not None and later >= self.patience


def _read(path: str) -> dict[int, float]:
    try:
        with open(path, encoding="utf-8") as file:
            recorded = json.load(file)
        if recorded["format"] != FORMAT:
            raise ValueError(f"its format is {recorded['format']!r}, but {FORMAT} is needed")
        return {int(step): float(loss) for step, loss in recorded["losses"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}, which records the run's validation losses, cannot be read: {error}. Remove "
            "it to count evaluations from here on"
        ) from error


def _write(path: str, losses: dict[int, float]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "losses": losses}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
