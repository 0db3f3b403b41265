"""Where the figures of a run go: TensorBoard, Weights & Biases, and a file of lines of JSON from which the report is drawn.

A package that is missing is told when the run is made, not at its first step. Files come with the first figures: then the step
is known from which a run goes on. What was written of later steps, by a run that ended after its last checkpoint, is dropped.
"""

import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

logger = logging.getLogger("zerojax")

_PACKAGES = {"tensorboard": ("tensorboardX", "zerojax[report]"), "wandb": ("wandb", "wandb")}
"""By a name in `report_to`: the module, and what pip installs it by."""


class Writer(Protocol):
    """Takes figures by name and step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


def module_of(name: str, package: str) -> Any:
    """Import a module that not everyone has.

    Raises:
      ModuleNotFoundError: it is not installed; the message says how.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name not in (top, name):
            raise  # it is there, and lacks something itself
        raise ModuleNotFoundError(f"zj.Run needs {top}: pip install '{package}'", name=top) from error


def modules_of(report_to: Sequence[str]) -> dict[str, Any]:
    """Return the module of each name.

    Raises:
      ValueError: a name is unknown.
      ModuleNotFoundError: its package is not installed.
    """
    if isinstance(report_to, str) or not set(report_to) <= _PACKAGES.keys():
        raise ValueError(f"report_to={report_to!r}: a tuple of {', '.join(map(repr, _PACKAGES))} is needed; () is none")
    return {name: module_of(*_PACKAGES[name]) for name in report_to}


def open_writers(modules: Mapping[str, Any], logdir: str, name: str, config: Mapping[str, Any], first: int) -> list[Writer]:
    """Open them for figures from step `first` on."""
    made: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [made[key](module, logdir, name, config, first) for key, module in modules.items()]


class TensorBoard:
    """An event file in the run's folder."""

    def __init__(self, module: Any, logdir: str, name: str, config: Mapping[str, Any], first: int) -> None:
        del name, config
        self._writer = module.SummaryWriter(logdir, purge_step=first if first > 1 else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        del failed
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose environment variables hold: WANDB_MODE=offline needs no network.

    A run that goes on is a new one there, whose steps go on; WANDB_RUN_ID and WANDB_RESUME make it the same.
    """

    def __init__(self, module: Any, logdir: str, name: str, config: Mapping[str, Any], first: int) -> None:
        del first
        project = os.environ.get("WANDB_PROJECT", "zerojax")
        self._run = module.init(project=project, name=os.environ.get("WANDB_NAME", name), dir=logdir, config=dict(config))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class History:
    """All figures of a run, and of the runs that it goes on from: in memory, and line by line in `metrics.jsonl`.

    Attributes:
      series: by name, the steps and their values, in order.
    """

    def __init__(self, path: str, first: int) -> None:
        """Open the file, and read what it holds of steps before `first`."""
        self.series: dict[str, tuple[list[int], list[float]]] = {}
        lines = _lines_before(path, first) if first > 1 else []
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by `close`
        for line in lines:
            self.write(line.pop("step"), line)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            steps, values = self.series.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
        self._file.write(json.dumps({"step": step, **figures}) + "\n")

    def close(self, failed: bool) -> None:
        del failed
        self._file.close()


def _lines_before(path: str, first: int) -> list[dict[str, Any]]:
    """Return what a file of figures tells of the steps before one; a damaged line, as a killed run leaves it, ends it."""
    found: list[dict[str, Any]] = []
    if not os.path.exists(path):
        return found
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text) if text.endswith("\n") else None
            except ValueError:
                line = None
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                logger.warning("%s is damaged at line %d: the figures from there on are left out", path, number)
                break
            if line["step"] < first:
                found.append(line)
    return found
