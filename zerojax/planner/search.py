"""The search for the fastest config that fits, best first by a lower bound of its seconds.

    candidates, by bound -> estimate: does it fit? -> walk through its schedule -> fastest so far

A candidate whose bound is not below the fastest config so far cannot beat it, and neither can any
later candidate. So the result is the fastest of all uniform configs, although few are walked
through. A config that does not fit is examined only once, even if the search runs again after a
program was refused. Among configs that differ only in how far ahead they fetch and gather, none
fits if the one with the fewest bytes in flight does not.

`exact`, if given, decides about bytes: it counts the bytes of the real program for the configs that
were found, best first. A config is returned only if its program fits. After `MOST_EXACT` programs
that do not fit, each further one lowers the memory that an estimate may fill, so the search ends.

Then layers may differ (`zerojax.planner.segments`). The result is the plainest config that is at
most 3 % slower than the fastest: a plan that is harder to read must be worth it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from host_offload.tiers import TIERS
from zerojax.config import ZeroConfig
from zerojax.costs import Estimate, estimate
from zerojax.machines import Machine
from zerojax.planner.candidates import (
    FRACTION,
    MIN_GAIN,
    PARTS,
    SEARCHED,
    Bound,
    Candidate,
    Space,
    complexity,
)

_AHEAD = ("prefetch_distance", "gather_ahead")
"""Fields whose larger values take more bytes in every tier, and that affect no other field."""

MOST_EXACT = 40
"""Programs that are built before estimates must leave room for their underestimation."""
_PHASE_KINDS = ("in_flight", "gathered", "activations", "working")
"""Kinds that an estimate counts in the phase that holds the most.

A program's account has the most of each kind in any phase.
"""
_LEAST_FRACTION = 0.1
"""Least fraction of a device's memory that estimates may fill; below it, the search gives up."""
USABLE = 0.95
"""Fraction of a device's memory that a plan fills; XLA's allocator and libraries need the rest."""
DAY = 86400.0


DAYS = "days of the disk"
BOTH = "device and pinned_host"


class Shortfall(NamedTuple):
    """Something that a config lacks.

    Attributes:
      what: name of a tier; `BOTH` tiers, for a CPU's shared memory; or `DAYS`.
      needed: bytes that one device needs; or days.
      had: bytes that one device may use; or days.
    """

    what: str
    needed: float
    had: float

    @property
    def share(self) -> float:
        """Ratio of the needed amount to the available amount."""
        return self.needed / max(self.had, 1.0 if self.what != DAYS else 1e-9)


class ClosestInfeasible(NamedTuple):
    """The config that comes nearest to fitting.

    Attributes:
      lacks: everything that it lacks, the largest share first.
      config: the config.
      tiles: number of tiles of its layers' MLPs.
    """

    lacks: tuple[Shortfall, ...]
    config: ZeroConfig
    tiles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that one device may use of each tier, and the life of the disk.

    Attributes:
      device: bytes of device memory.
      pinned_host: the device's part of a node's host memory, in bytes; None if unknown.
      nvme: the device's part of a node's disks, in bytes; None if unknown.
      both: bytes of device and host memory together, if a CPU's devices share the host's memory.
      devices_per_node: number of devices that share a node's disks.
      disk_tbw: bytes that may be written to a node's disks over their lifetime.
      min_disk_days: days that the disks must last; None for any.
    """

    device: float
    pinned_host: float | None = None
    nvme: float | None = None
    both: float | None = None
    devices_per_node: int = 1
    disk_tbw: float | None = None
    min_disk_days: float | None = None

    def of(self, tier: str) -> float:
        """Return the usable bytes of a tier; 0 if unknown."""
        num_bytes = getattr(self, tier)
        return 0.0 if num_bytes is None else num_bytes

    def missing(self, bytes_by_tier: Mapping[str, float]) -> list[Shortfall]:
        """Return everything that is lacking, the largest share first; nothing if all fits.

        Args:
          bytes_by_tier: needed bytes per device of each tier.
        """
        shortfalls = [
            Shortfall(tier, bytes_by_tier[tier], self.of(tier))
            for tier in TIERS
            if bytes_by_tier[tier] > self.of(tier)
        ]
        together = bytes_by_tier["device"] + bytes_by_tier["pinned_host"]
        if self.both is not None and together > self.both:
            shortfalls.append(Shortfall(BOTH, together, self.both))
        return sorted(shortfalls, key=lambda lack: -lack.share)


def compute_limits(
    machine: Machine, shares_cores: bool, min_disk_days: float | None = None
) -> Limits:
    """Return what one device of a machine may use.

    Args:
      machine: machine whose figures are used.
      shares_cores: whether the devices are threads of a CPU.
      min_disk_days: days that the disks must last; None for any.

    Raises:
      ValueError: the device's memory is unknown, or the disk's endurance although days are
        required.
    """
    figures = machine.figures
    devices = machine.devices_per_node
    device = USABLE * machine.need("device_bytes")
    host = figures.get("host_bytes")
    disk = figures.get("disk_bytes")
    pinned = [n for n in (host, figures.get("pinned_bytes")) if n is not None]
    disk_tbw = figures.get("disk_tbw_bytes")
    if min_disk_days is not None:
        disk_tbw = machine.need("disk_tbw_bytes")
    return Limits(
        device=device,
        pinned_host=USABLE * min(pinned) / devices if pinned else None,
        nvme=None if disk is None else disk / devices,
        both=USABLE * host / devices if shares_cores and host is not None else None,
        devices_per_node=devices,
        disk_tbw=disk_tbw,
        min_disk_days=min_disk_days,
    )


def disk_days(limits: Limits, written: float, seconds: float) -> float | None:
    """Return the days until a node's disks have written their TBW; None if unknown.

    Args:
      limits: limits with the disks' rating.
      written: bytes that one device writes per step.
      seconds: seconds of a step.
    """
    if limits.disk_tbw is None or not written:
        return None
    return limits.disk_tbw / (written * limits.devices_per_node / seconds * DAY)


class Exact(NamedTuple):
    """Bytes of a program.

    Attributes:
      bytes: bytes per device, by tier and kind (`program.memory`).
      swapped: bytes that one device reads from disk and writes to disk per step, or None.
    """

    bytes: Mapping[str, Mapping[str, int]]
    swapped: tuple[int, int] | None

    def peak_bytes(self, of_config: Estimate) -> int:
        """Return the peak bytes of the device: its states, and the estimate's largest phase."""
        states = sum(n for kind, n in self.bytes["device"].items() if kind not in _PHASE_KINDS)
        return states + sum(of_config.bytes["device"].get(kind, 0) for kind in _PHASE_KINDS)

    def needed(self, of_config: Estimate) -> dict[str, float]:
        """Return the bytes of each tier that a machine must have.

        They are the program's own account, and on the device the peak, if that is more.
        """
        of_tiers = _sums(self.bytes)
        of_tiers["device"] = max(of_tiers["device"], float(self.peak_bytes(of_config)))
        return of_tiers


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A config that fits.

    Attributes:
      estimate: estimate of the config.
      seconds: predicted seconds of its step.
      complexity: distance from the plainest config.
      exact: bytes of the real program, or None.
    """

    estimate: Estimate
    seconds: float
    complexity: float
    exact: Exact | None = None

    @property
    def config(self) -> ZeroConfig:
        """The config."""
        return self.estimate.config

    @property
    def peak_bytes(self) -> int:
        """Estimated peak bytes of the device, including working memory of a layer or the head."""
        if self.exact is None:
            return self.estimate.needed("device")
        return self.exact.peak_bytes(self.estimate)


@dataclasses.dataclass
class SearchStats:
    """Statistics of a search.

    Attributes:
      candidates: number of configs in total.
      estimated: number of configs whose bytes were estimated.
      walked: number of configs whose schedules were walked through.
      exact: number of configs whose programs were built.
      solver: method that chose among layers, or "".
      nearest: config that lacks the least, among those that did not fit.
      refused: reasons why programs could not be built.
      seconds: seconds of the search.
    """

    candidates: int = 0
    estimated: int = 0
    walked: int = 0
    exact: int = 0
    solver: str = ""
    nearest: ClosestInfeasible | None = None
    refused: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


class Search:
    """A search. Its results are in `found`, the fastest first."""

    def __init__(
        self,
        space: Space,
        limits: Limits,
        exact: Callable[[ZeroConfig, int], Exact] | None = None,
        most_exact: int | None = None,
    ) -> None:
        """Prepare a search, which `run` starts.

        Args:
          space: configs to choose among.
          limits: limits that a config must keep.
          exact: function that returns the bytes of the program of a config and a number of tiles,
            or raises an error if it cannot be built.
          most_exact: most programs that may be built to settle on a config; None for any number.
        """
        self.space = space
        self.limits = limits
        self.exact = exact
        self.tally = SearchStats()
        self.bound = Bound(space)
        self.most_exact = most_exact
        self.found: list[Found] = []
        # Whether a config was kept (True) or refused by `exact` (False).
        self._known: dict[tuple[ZeroConfig, int], bool] = {}
        self._estimates: dict[tuple[ZeroConfig, int], Estimate] = {}
        self._programs: dict[tuple[ZeroConfig, int], Exact | None] = {}
        # Fraction of the device's memory that an estimate may fill.
        self._usable_fraction = 1.0
        # Least ratio of a program's bytes to its estimate, by kind of config.
        self._factors: dict[tuple[Any, ...], float] = {}
        self._candidates: list[Candidate] | None = None
        # Numbers of the candidates that do not fit.
        self._unfit = set[int]()
        # For candidates that differ only in `_AHEAD`: whether the least takes too much.
        self._groups: dict[tuple[Any, ...], bool] = {}

    def run(self, below: float = math.inf) -> None:
        """Examine all candidates, except for those that take `below` seconds or more."""
        begin = time.perf_counter()
        if self._candidates is None:
            self._candidates = sorted(self.space, key=lambda c: (c.seconds, c.complexity))
        self.tally.candidates = len(self._candidates)
        fitted = set[tuple[Any, ...]]()
        for number, candidate in enumerate(self._candidates):
            if candidate.seconds >= below or (
                self.found and candidate.seconds * (1 - MIN_GAIN) > self.found[0].seconds
            ):
                break
            if number in self._unfit or not self._may_matter(
                candidate.seconds, candidate.complexity
            ):
                continue
            # More microbatches or tiles never save time; they only help configs that do not fit
            # with fewer. The exception is a fraction that is still to be found, as they leave room
            # for more of the optimizer state.
            has_fraction = self.space.leaves_fraction(candidate.fields)
            key = tuple(
                value for name, value in candidate.fields.items() if name != "num_microbatches"
            )
            if not has_fraction and key in fitted:
                continue
            fits = self.consider_candidate(candidate)
            if fits is False:
                self._unfit.add(number)
            elif fits and not has_fraction:
                fitted.add(key)
        self.tally.seconds += time.perf_counter() - begin

    def consider_candidate(self, candidate: Candidate) -> bool | None:
        """Consider a candidate, unless its bound already shows that it cannot fit.

        Returns:
          Whether it fits; None if that does not matter.
        """
        least = self.bound.resting(candidate.fields)
        lacks = self.limits.missing({tier: n * (1 - 1e-6) for tier, n in least.items()})
        nearest = self.tally.nearest
        if lacks and nearest is not None and lacks[0].share >= nearest.lacks[0].share:
            return False
        try:
            config = self.space.built(candidate.fields)
        except (ValueError, NotImplementedError) as error:
            self.tally.refused.append(str(error))
            return False
        if self.space.leaves_fraction(candidate.fields):
            return self._consider_largest_fraction(candidate, config)
        ahead = _fields_ahead(candidate.fields["update"])
        fields = candidate.fields.items()
        group = (candidate.tiles, *(value for name, value in fields if name not in ahead))
        if self._groups.get(group):
            return False
        fits = self.consider(config, candidate.tiles)
        if not fits and group not in self._groups:
            self._groups[group] = self._takes_too_much(config, candidate.tiles)
        return fits

    def _takes_too_much(self, config: ZeroConfig, tiles: int) -> bool:
        """Return whether a config takes too much even with the least possible fetching ahead."""
        least = {name: min(self.space.choices(name)) for name in _fields_ahead(config.update)}
        try:
            config = dataclasses.replace(config, **least)
        except (ValueError, NotImplementedError):
            return False
        of_config = self.estimate(config, tiles)
        return not self._fits_by_estimate(of_config)

    def _consider_largest_fraction(self, candidate: Candidate, config: ZeroConfig) -> bool | None:
        """Consider a candidate with the most optimizer state on the device that fits.

        The more state stays on the device, the less is moved. The fraction follows from the bytes
        of an estimate.

        Returns:
          Whether any fraction fits; None if that does not matter.
        """
        fields = candidate.fields
        part, rounded = self.bound.part_bytes(fields)
        if not part:  # frozen layers have no optimizer state
            return False
        free = self.limits.device - self.bound.resting(fields)["device"]
        parts = min(PARTS - 1, int((free + rounded) / part)) if free > 0 else 0
        while parts > 0:
            fraction = parts / PARTS
            least = self.bound.seconds({**fields, FRACTION: fraction})
            if not self._may_matter(least, candidate.complexity):
                return None
            config = dataclasses.replace(config, opt_state_device_fraction=fraction)
            of_config = self.estimate(config, candidate.tiles)
            over = of_config.needed("device") - self.limits.device
            if over <= 0 and self.consider(config, candidate.tiles):
                return True
            parts -= max(1, math.ceil((over - rounded) / part))
        return False

    def estimate(self, config: ZeroConfig, tiles: int = 1) -> Estimate:
        """Return the estimate of a config, which is computed once."""
        known = self._estimates.get((config, tiles))
        if known is not None:
            return known
        space = self.space
        new = estimate(
            space.workload,
            config,
            space.grid,
            space.machine,
            shares_cores=space.shares_cores,
            tiles=tiles,
        )
        self._estimates[config, tiles] = new
        return new

    def consider(self, config: ZeroConfig, tiles: int = 1) -> bool:
        """Estimate a config, and return whether it fits.

        It is kept if it may be the fastest, or the plainest of the fast ones.
        """
        is_kept = self._known.get((config, tiles))
        if is_kept is not None:
            return is_kept
        self.tally.estimated += 1
        of_config = self.estimate(config, tiles)
        if not self._fits_by_estimate(of_config):
            return False
        config_complexity = self._complexity(config, tiles)
        # A closer bound than the candidate's.
        if not self._may_matter(of_config.least, config_complexity):
            return True
        self.tally.walked += 1
        seconds = of_config.time.seconds
        days = self._lacking_days(of_config)
        if days is not None:
            self._note([days], of_config)
            return False
        found = Found(of_config, seconds, config_complexity)
        self.found = sorted([*self.found, found], key=lambda f: (f.seconds, f.complexity))
        self._known[config, tiles] = True
        return True

    def _lacking_days(self, of_config: Estimate) -> Shortfall | None:
        """Return by how much the disk fails to last long enough, or None if it does not fail."""
        least = self.limits.min_disk_days
        if least is None:
            return None
        days = disk_days(self.limits, of_config.moved["write"], of_config.time.seconds)
        return Shortfall(DAYS, least, days) if days is not None and days < least else None

    def _may_matter(self, seconds: float, complexity: float) -> bool:
        """Return whether a config may be the fastest, or the plainest of about equally fast ones.

        Args:
          seconds: lower bound of its seconds.
          complexity: its complexity.
        """
        if not self.found or seconds < self.found[0].seconds:
            return True
        plainest = self.plainest()
        is_near = seconds * (1 - MIN_GAIN) <= self.found[0].seconds
        return is_near and (complexity, seconds) < (plainest.complexity, plainest.seconds)

    def settle(self) -> Found | None:
        """Return the plainest config within `MIN_GAIN` of the fastest whose program fits, or None.

        Programs of found configs are built best first. A config whose program cannot be built or
        does not fit is dropped, and configs that were passed over because of it are examined again.
        """
        while self.found and (self.most_exact is None or self.tally.exact < self.most_exact):
            first = self._settled(self.found[0])
            plainest = first and self._settled(self.plainest())
            if plainest is not None:
                return plainest
        return None

    def _settled(self, found: Found) -> Found | None:
        """Return a config with the bytes of its program, or drop it and search again.

        Returns None if the config was dropped.
        """
        if self.exact is None or found.exact is not None:
            return found
        exact = self.program_that_fits(found.config, found.estimate.tiles)
        if exact is None:
            self.leave_out(found.config, found.estimate.tiles)
            self._correct(found.estimate)
            self._leave_more_room()
            self.run()
            return None
        settled = dataclasses.replace(found, exact=exact)
        self.found[self.found.index(found)] = settled
        return settled

    def leave_out(self, config: ZeroConfig, tiles: int) -> None:
        """Drop a config whose program does not fit, permanently."""
        self.found = [f for f in self.found if (f.config, f.estimate.tiles) != (config, tiles)]
        self._known[config, tiles] = False

    def _correct(self, of_config: Estimate) -> None:
        """Learn from a program that takes more device memory than its estimate.

        The least ratio seen applies to all configs with the same tiers and activations, so that few
        programs of a kind are built in vain.
        """
        exact = self._programs[of_config.config, of_config.tiles]
        if exact is None:
            return
        taken = exact.needed(of_config)["device"]
        estimated = of_config.needed("device")
        if taken <= max(estimated, self.limits.device):
            return
        kind = _kind(of_config.config)
        self._factors[kind] = min(taken / estimated, self._factors.get(kind, math.inf))
        self.found = [f for f in self.found if f.exact is not None or self._has_room(f.estimate)]

    def _has_room(self, of_config: Estimate) -> bool:
        """Return whether the device has room for a corrected estimate."""
        factor = self._factors.get(_kind(of_config.config), 1.0)
        return of_config.needed("device") * factor <= self._usable_fraction * self.limits.device

    def _leave_more_room(self) -> None:
        """Drop configs whose estimates leave too little room, after many programs did not fit."""
        if self.tally.exact < MOST_EXACT:
            return
        if self._usable_fraction > _LEAST_FRACTION:
            self._usable_fraction *= 0.9
        else:
            self._usable_fraction = 0.0
        self.found = [f for f in self.found if f.exact is not None or self._has_room(f.estimate)]

    def program_that_fits(self, config: ZeroConfig, tiles: int) -> Exact | None:
        """Return the bytes of a config's program if it fits, or None."""
        of_config = self.estimate(config, tiles)
        exact = self._of_program(config, tiles)
        if exact is None or not self._fits(exact.needed(of_config), of_config):
            return None
        return exact

    def _of_program(self, config: ZeroConfig, tiles: int) -> Exact | None:
        """Return the bytes of the real program, or None if it cannot be built.

        It is built only once.
        """
        assert self.exact is not None
        if (config, tiles) not in self._programs:
            self.tally.exact += 1
            try:
                self._programs[config, tiles] = self.exact(config, tiles)
            except (ValueError, NotImplementedError) as error:
                self.tally.refused.append(str(error))
                self._programs[config, tiles] = None
        return self._programs[config, tiles]

    def lacks_of_program(self, config: ZeroConfig, tiles: int = 1) -> list[Shortfall]:
        """Return what a config lacks by its program's bytes; nothing if no program can be built."""
        exact = None if self.exact is None else self._of_program(config, tiles)
        if exact is None:
            return []
        return self.limits.missing(exact.needed(self.estimate(config, tiles)))

    def _fits(self, of_tiers: Mapping[str, float], of_config: Estimate) -> bool:
        lacks = self.limits.missing(of_tiers)
        if lacks:
            self._note(lacks, of_config)
        return not lacks

    def _fits_by_estimate(self, of_config: Estimate) -> bool:
        fits = self._fits(_sums(of_config.bytes), of_config)
        return fits and self._has_room(of_config)

    def _note(self, lacks: Sequence[Shortfall], of_config: Estimate) -> None:
        """Remember the config that lacks the least."""
        nearest = self.tally.nearest
        if nearest is not None and lacks[0].share >= nearest.lacks[0].share:
            return
        if lacks[0].what != DAYS:  # would the disk last if memory sufficed?
            days = self._lacking_days(of_config)
            if days is not None:
                lacks = sorted([*lacks, days], key=lambda lack: -lack.share)
        if nearest is None or lacks[0].share < nearest.lacks[0].share:
            self.tally.nearest = ClosestInfeasible(tuple(lacks), of_config.config, of_config.tiles)

    def _complexity(self, config: ZeroConfig, tiles: int) -> float:
        names = (*SEARCHED, "saved_names", "offloaded_names")
        return complexity({name: getattr(config, name) for name in names}, tiles)

    def plainest(self) -> Found:
        """Return the plainest config that is within `MIN_GAIN` of the fastest."""
        near = [f for f in self.found if f.seconds * (1 - MIN_GAIN) <= self.found[0].seconds]
        return min(near, key=lambda f: (f.complexity, f.seconds))


def _fields_ahead(update: str | None) -> tuple[str, ...]:
    """Return the fields of `_AHEAD` that an order of updates makes comparable.

    A forward that updates and gathers ahead takes the first layer before its ticks, so few layers
    need less memory with `gather_ahead`.
    """
    return ("prefetch_distance",) if update == "in_forward" else _AHEAD


def _kind(config: ZeroConfig) -> tuple[Any, ...]:
    """Return the fields that determine how far an estimate is from its program."""
    return (
        config.stage,
        config.params,
        config.grads,
        config.opt_state,
        config.activations,
        config.update,
        config.update_on,
        config.delayed_update,
    )


def _sums(tiers: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the bytes of each tier, summed over kinds."""
    return {tier: float(sum(kinds.values())) for tier, kinds in tiers.items()}
