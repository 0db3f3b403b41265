"""Define checks, groups of checks, parts, and a check's context."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from gpu_checks.mixes import Sizes
from gpu_checks.rows import Row

TIME_LIMIT = 480.0
"""Time limit of a part, in seconds."""
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable with the most GiB of host memory that XLA pins.

A worker's limit is slightly more than its checks keep there.
"""
LEAST = 0.35
"""Share of later checks' seconds that is reserved for them, so that they run in short form."""
START = 5.0
"""Seconds that a process needs to start; a longer check is not begun if fewer are left."""
KNOWN = "known."
"""Prefix of the names of a row's values that later checks of the part receive."""


@dataclasses.dataclass(kw_only=True)
class Context:
    """Inputs of a check.

    Attributes:
      sizes: sizes of every check.
      peer_python: Python of an environment with torch, or None.
      keep: folder for files that the part keeps, such as profiles.
      swap_dir: a folder on a disk.
      ram_dir: a folder on a RAM disk.
      part: name of the part, with which the names of kept files begin.
      chip: name of the device in `zerojax.chips`, whose assumed rates are used.
      device_bytes: device memory that a program can get; None if the device does not report it.
      host_bytes: host memory of the machine; None if unknown.
      is_short: whether fewer seconds are left than the check needs, so that it runs fewer layers
        and steps and no profile.
      known: results of earlier checks of the part (rates, seconds), by name.
      shared: objects that checks of one process hand on to each other.
      check: name of the running check.
    """

    sizes: Sizes
    peer_python: str | None
    keep: pathlib.Path
    swap_dir: str
    ram_dir: str
    part: str = "part"
    chip: str = "h200"
    device_bytes: int | None = None
    host_bytes: int | None = None
    is_short: bool = False
    known: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shared: MutableMapping[Any, Any] = dataclasses.field(default_factory=dict)
    check: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds that a check needs, with the start of its process.

    If fewer are left, the check runs in its short form, and keeps what it has found when its time
    runs out.

    Attributes:
      gpu: seconds on one H200 with 16 cores; measured for the checks that have run on one, and
        assumed for the rest.
      compiled: seconds with --compile-only, measured on 2 cores and rounded up.
      small: seconds with --small, with or without --compile-only, measured on 2 cores and rounded
        up.
    """

    gpu: float
    compiled: float
    small: float = 20.0


def _nothing(_: Sizes) -> int:
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a part.

    Attributes:
      name: name of the check, unique in its part.
      run: function from the context to rows; each row is written as soon as it is yielded.
      compiled: function that compiles the check's programs for a GPU that is not there; None if
        there is nothing to compile.
      needs: seconds that the check needs.
      pinned: bytes that the check keeps in XLA's pool of pinned memory.
      shares: name of the pinned memory that the check shares with other checks of its process;
        empty if it shares none.
      measures: whether later parts on the same device and version of jax reuse the check's results.
    """

    name: str
    run: Callable[[Context], Iterator[Row]]
    compiled: Callable[[Context], Iterator[Row]] | None
    needs: Needs
    pinned: Callable[[Sizes], int] = _nothing
    shares: str = ""
    measures: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Checks that share a process until one of them crashes, hangs or breaks the device.

    Attributes:
      checks: the checks, in order.
      env: environment variables of the process.
    """

    checks: tuple[Check, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Checks that one command runs within `TIME_LIMIT`.

    Attributes:
      name: value of --part.
      what: description in words.
      groups: groups of checks, most decisive first.
    """

    name: str
    what: str
    groups: tuple[Group, ...]

    @property
    def checks(self) -> list[Check]:
        """Checks of all groups, in order."""
        return [check for group in self.groups for check in group.checks]


def seconds_of(needs: Needs, mode: str) -> float:
    """Return the seconds that a check needs in a mode.

    The modes are "run" and "compile-only", and each with "small " in front.
    """
    return (
        needs.small
        if mode.startswith("small")
        else needs.compiled
        if mode == "compile-only"
        else needs.gpu
    )
