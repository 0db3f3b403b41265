"""Record in a file what defines a run, and compare a resumed run with it before loading anything.

    {checkpoint_dir}/run.json    {"format": 1, "refuses": {name: value}, "tells": {name: value}}

Checkpoints include the weights that a run began with, so a resumed run does not read the model's
folder again, and only shapes would reveal a different folder. Values in `refuses` must be
unchanged. Values in `tells` may change; each change is reported in one line, together with the
value that the run began with. The first process writes the file once the run has its state, and
renames it into place: the file is complete or missing, and a run that cannot resume changes
nothing.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zerojax.runtime import AllProcesses

NAME = "run.json"
FORMAT = 1


class RunRecord:
    """The file of one run.

    Every process creates a record and calls its methods at the same places.
    """

    def __init__(self, folder: str | None, is_begun: bool, mesh: jax.sharding.Mesh) -> None:
        """Read the file of a resumed run.

        Args:
          folder: folder of the checkpoints; None if there are none, and nothing is compared.
          is_begun: whether there is a checkpoint from which the run resumes.
          mesh: mesh of the run.

        Raises:
          ValueError: the file cannot be read.
        """
        self.path = None if folder is None else os.path.join(folder, NAME)
        self._together = AllProcesses(
            mesh, "comparing the run with that of its checkpoints", ValueError
        )
        self._is_begun = self.path is not None and is_begun
        self._recorded: dict[str, Any] | None = None
        self._is_written = False
        self._current: dict[str, dict[str, Any]] = {"refuses": {}, "tells": {}}
        self._together.do(self._read)

    def _read(self) -> None:
        if jax.process_index() or not self._is_begun or self.path is None:
            return
        try:
            with open(self.path, encoding="utf-8") as file:
                recorded = json.load(file)
            if recorded["format"] != FORMAT or not all(
                isinstance(recorded[kind], dict) for kind in self._current
            ):
                raise ValueError(f"its format is {recorded['format']!r}, but {FORMAT} is needed")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{self.path}, which records what the run began with, cannot be read: {error}. "
                "Remove it to continue without comparing"
            ) from error
        self._recorded = recorded

    def check(self, refuses: Mapping[str, Any], tells: Mapping[str, Any]) -> None:
        """Compare the values that define the run and are known so far.

        Args:
          refuses: values that must be unchanged, in JSON types, by name.
          tells: values that may change, in JSON types, by name.

        Raises:
          ValueError: a value in `refuses` changed, or processes have different values; the message
            names them.
        """
        current = json.loads(json.dumps({"refuses": dict(refuses), "tells": dict(tells)}))
        for kind, values in current.items():
            self._current[kind] |= values
        if self.path is not None:
            self._together.do(lambda: self._compare(current["refuses"]))
            number = int(
                hashlib.sha256(json.dumps(current, sort_keys=True).encode()).hexdigest()[:7], 16
            )
            if self._together.least(number) != -self._together.least(-number):
                raise ValueError(
                    "the processes of this run have different options or folders: "
                    f"{', '.join([*refuses, *tells])}"
                )

    def _compare(self, current: Mapping[str, Any]) -> None:
        if self._recorded is None:
            return
        recorded = self._recorded["refuses"]
        differences = [
            _difference(name, recorded[name], value)
            for name, value in current.items()
            if name in recorded and _differs(recorded[name], value)
        ]
        if differences:
            folder = os.path.dirname(self.path or "")
            raise ValueError(
                f"{folder} holds the checkpoints of another run: {'; '.join(differences)}. Use the "
                "values that it began with, or start a new run in another --checkpoint-dir"
            )

    def begin(self) -> list[str]:
        """Return the lines to print, in the first process; write the new file next to the old file.

        Raises:
          ValueError: the file cannot be written.
        """
        lines: list[str] = []
        self._together.do(lambda: lines.extend(self._begin()))
        return lines

    def _begin(self) -> Sequence[str]:
        if self.path is None or jax.process_index():
            return []
        lines: list[str] = []
        recorded = self._recorded or {"refuses": {}, "tells": {}}
        unknown = [
            name
            for kind, values in self._current.items()
            for name in values
            if name not in recorded[kind]
        ]
        if self._recorded is None and self._is_begun:
            lines = [
                f"there is no {self.path}, which older versions did not write: nothing was "
                "compared with the run so far"
            ]
        elif self._is_begun and unknown:
            lines = [
                f"{self.path} does not record {', '.join(map(_option, unknown))}: not compared "
                "with the run so far"
            ]
        lines += [
            f"continues with {_option(name)} {_value(value)}, and began with "
            f"{_value(recorded['tells'][name])}"
            for name, value in self._current["tells"].items()
            if recorded["tells"].get(name, value) != value
        ]
        # Keep existing values: the run began with them.
        merged = {"format": FORMAT} | {
            kind: values | recorded[kind] for kind, values in self._current.items()
        }
        if merged != self._recorded:
            try:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                with open(self._new, "w", encoding="utf-8") as file:
                    json.dump(merged, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ValueError(
                    f"--checkpoint-dir: {self.path} cannot be written: {error}"
                ) from error
            self._is_written = True
        return lines

    def keep(self) -> None:
        """Move the file that `begin` wrote into place, once the run has its state.

        Raises:
          ValueError: the file cannot be replaced.
        """
        self._together.do(self._keep)

    def _keep(self) -> None:
        if self.path is None or not self._is_written:
            return
        try:
            os.replace(self._new, self.path)
        except OSError as error:
            raise ValueError(f"--checkpoint-dir: {self.path} cannot be written: {error}") from error

    @property
    def _new(self) -> str:
        return f"{self.path}.new"


def _differs(recorded: Any, current: Any) -> bool:
    """Return whether values differ.

    Dicts are compared in their common keys only, since another version may record other keys.
    """
    if isinstance(recorded, dict) and isinstance(current, dict):
        return any(recorded[key] != current[key] for key in recorded.keys() & current.keys())
    return recorded != current


def _difference(name: str, recorded: Any, current: Any) -> str:
    """Return the difference in words; for dicts, only that of the first key that differs."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        key = next(
            key for key in sorted(recorded.keys() & current.keys()) if recorded[key] != current[key]
        )
        name, recorded, current = f"{name} {key}", recorded[key], current[key]
    return f"{_option(name)} {_value(recorded)}, and here {_value(current)}"


def _option(name: str) -> str:
    """Return how a message shows a name: a name without spaces is an option's."""
    return name if " " in name else f"--{name.replace('_', '-')}"


def _value(value: Any) -> str:
    text = (
        " ".join(map(str, value))
        if isinstance(value, list) and all(isinstance(v, str) for v in value)
        else str(value)
    )
    if re.fullmatch("[0-9a-f]{64}", text):  # a fingerprint
        return text[:12]
    return text if len(text) < 80 else f"{text[:60]} .."
