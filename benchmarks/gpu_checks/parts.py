"""What a check, a group of checks and a part are, and what a check is given."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from gpu_checks.mixes import Sizes
from gpu_checks.rows import Row

TIME_LIMIT = 480.0
"""Seconds of a part."""
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The variable that names the most GiB of host memory that XLA pins; a worker's is what its checks
keep there, and a little.
"""
LEAST = 0.35
"""The share of the seconds which later checks need that is kept for them, so that they run in their
short forms.
"""
START = 5.0
"""Seconds in which a process starts: with less, a check that needs more is not begun."""
KNOWN = "known."
"""What a row's value is called, before its name, that later checks of the part are told."""


@dataclasses.dataclass(kw_only=True)
class Context:
    """What a check is given.

    Attributes:
      sizes: of everything.
      peer_python: an environment with torch, or None.
      keep: the folder for files that the part keeps, such as profiles.
      swap_dir: a folder on a disk.
      ram_dir: a folder on a RAM disk.
      part: the name of the part, with which the files that it keeps begin.
      chip: the device, by its name in `zerojax.chips`: whose rates are assumed.
      device_bytes: that a program can get of the device; None where it does not say.
      host_bytes: of host memory that there are; None where nobody says.
      is_short: fewer seconds are left than the check needs: fewer layers and steps, no profile.
      known: what earlier checks of the part found, by name: rates, seconds.
      shared: what checks of one process leave to each other.
      check: the one that is run.
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
    """Seconds that a check is said to need, with the start of its process.

    If fewer are left it runs all the same, in its short form; what it has found when its time is
    over stays.

    Attributes:
      gpu: on one H200 with 16 cores; measured for the checks that one has run, and assumed for the
        others.
      compiled: by --compile-only, measured on 2 cores and rounded up.
      small: by --small, with or without --compile-only; the same.
    """

    gpu: float
    compiled: float
    small: float = 20.0


def _nothing(_: Sizes) -> int:
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that is looked at.

    Attributes:
      name: unique in its part.
      run: context -> rows, each written as soon as it is there.
      compiled: the same for an H200 that is not there; None where there is nothing to compile.
      needs: its time.
      pinned: bytes that it keeps in XLA's pool of pinned memory.
      shares: what it keeps there together with the checks of its process that name the same; empty:
        nothing.
      measures: what it tells later checks it also tells later parts, of the same device and version
        of jax.
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
    """Checks that share a process while none of them crashes, hangs or breaks the device.

    Attributes:
      checks: in order.
      env: of the process.
    """

    checks: tuple[Check, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one command runs within `TIME_LIMIT`.

    Attributes:
      name: for --part.
      what: in words.
      groups: in order, what decides most first.
    """

    name: str
    what: str
    groups: tuple[Group, ...]

    @property
    def checks(self) -> list[Check]:
        """All checks, in order."""
        return [check for group in self.groups for check in group.checks]


def seconds_of(needs: Needs, mode: str) -> float:
    """Return what a check needs in a mode: "run", "compile-only", or either with "small" before it."""
    return (
        needs.small
        if mode.startswith("small")
        else needs.compiled
        if mode == "compile-only"
        else needs.gpu
    )
