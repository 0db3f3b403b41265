"""What defines a run, in a file beside its checkpoints: a run that goes on is compared with it
before anything is loaded.

    {checkpoint_dir}/run.json    {"format": 1, "refuses": {name: value}, "tells": {name: value}}

A checkpoint holds the weights that a run began with, so that one which goes on reads none of a
folder, and shapes are all that would tell another folder. Names in `refuses` must have the values
that they had; of those in `tells` another is legitimate, and is said in a line, each time beside
the value with which the run began. The first process writes the file when the run has its state, by
a rename: it is there as a whole or not at all, and a run that could not go on changes nothing.
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
    """The file of one run; in a run of several processes all make one, and call its methods at the
    same places.
    """

    def __init__(self, folder: str | None, is_begun: bool, mesh: jax.sharding.Mesh) -> None:
        """Read the file of the run that goes on, if one does.

        Args:
          folder: of the checkpoints; None: there are none, and nothing is compared.
          is_begun: there is a checkpoint from which the run goes on.
          mesh: of the run.

        Raises:
          ValueError: the file cannot be read.
        """
        self.path = None if folder is None else os.path.join(folder, NAME)
        self._together = AllProcesses(
            mesh, "comparing the run with that of its checkpoints", ValueError
        )
        self._is_begun = self.path is not None and is_begun
        self._found: dict[str, Any] | None = None
        self._is_written = False
        self._here: dict[str, dict[str, Any]] = {"refuses": {}, "tells": {}}
        self._together.do(self._read)

    def _read(self) -> None:
        if jax.process_index() or not self._is_begun or self.path is None:
            return
        try:
            with open(self.path, encoding="utf-8") as file:
                found = json.load(file)
            if found["format"] != FORMAT or not all(
                isinstance(found[kind], dict) for kind in self._here
            ):
                raise ValueError(f"of format {found['format']!r}, and {FORMAT} is read")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{self.path}, which tells what the run began with, cannot be read: {error}. Remove it to go on without "
                "comparing"
            ) from error
        self._found = found

    def check(self, refuses: Mapping[str, Any], tells: Mapping[str, Any]) -> None:
        """Compare what defines the run, as far as it is known by now; values are those of JSON.

        Raises:
          ValueError: a value that must not differ does, or processes were started with other
            values; what differs is named.
        """
        here = json.loads(json.dumps({"refuses": dict(refuses), "tells": dict(tells)}))
        for kind, values in here.items():
            self._here[kind] |= values
        if self.path is not None:
            self._together.do(lambda: self._compare(here["refuses"]))
            number = int(
                hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:7], 16
            )
            if self._together.least(number) != -self._together.least(-number):
                raise ValueError(
                    f"the processes of this run have other options or folders: {', '.join([*refuses, *tells])}"
                )

    def _compare(self, here: Mapping[str, Any]) -> None:
        if self._found is None:
            return
        there = self._found["refuses"]
        if told := [
            _difference(name, there[name], value)
            for name, value in here.items()
            if name in there and _differs(there[name], value)
        ]:
            raise ValueError(
                f"{os.path.dirname(self.path or '')} holds the checkpoints of another run: {'; '.join(told)}. Go on with what "
                "it began with, or begin another in another --checkpoint-dir"
            )

    def begin(self) -> list[str]:
        """Return what is to be told, in the first process; what there is to write is written beside
        the file.

        Raises:
          ValueError: it cannot be written.
        """
        lines: list[str] = []
        self._together.do(lambda: lines.extend(self._begin()))
        return lines

    def _begin(self) -> Sequence[str]:
        if self.path is None or jax.process_index():
            return []
        lines, found = [], self._found or {"refuses": {}, "tells": {}}
        unknown = [
            name
            for kind, values in self._here.items()
            for name in values
            if name not in found[kind]
        ]
        if self._found is None and self._is_begun:
            lines = [
                f"there is no {self.path}, which older versions did not write: nothing was compared with the run so far"
            ]
        elif self._is_begun and unknown:
            lines = [
                f"{self.path} does not tell {', '.join(map(_option, unknown))}: not compared with the run so far"
            ]
        lines += [
            f"goes on with {_option(name)} {_value(value)}, and began with {_value(found['tells'][name])}"
            for name, value in self._here["tells"].items()
            if found["tells"].get(name, value) != value
        ]
        # What is there stays: it is what the run began with.
        told = {"format": FORMAT} | {
            kind: values | found[kind] for kind, values in self._here.items()
        }
        if told != self._found:
            try:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                with open(self._new, "w", encoding="utf-8") as file:
                    json.dump(told, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ValueError(
                    f"--checkpoint-dir: {self.path} cannot be written: {error}"
                ) from error
            self._is_written = True
        return lines

    def keep(self) -> None:
        """Put what `begin` wrote in the file's place: the run has its state.

        Raises:
          ValueError: it cannot be.
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


def _differs(there: Any, here: Any) -> bool:
    """Tell whether values differ; of two dicts what both tell, since another version may tell more
    or less.
    """
    if isinstance(there, dict) and isinstance(here, dict):
        return any(there[key] != here[key] for key in there.keys() & here.keys())
    return there != here


def _difference(name: str, there: Any, here: Any) -> str:
    """Return what differs; of two dicts the first key alone."""
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(key for key in sorted(there.keys() & here.keys()) if there[key] != here[key])
        name, there, here = f"{name} {key}", there[key], here[key]
    return f"{_option(name)} {_value(there)}, and here {_value(here)}"


def _option(name: str) -> str:
    """Return how a name is told; one without spaces is that of an option."""
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
