"""The search for the fastest config that fits: best first by a bound of its seconds, until no bound
is below what was found.

    candidates, by their bound  ->  estimate: does it fit?  ->  walk through its schedule  ->  the fastest so far

A candidate whose bound is not below the fastest so far cannot beat it, nor can any after it. So the
result is the fastest uniform config of all, although few are walked through. What does not fit is
looked at once, also where the search runs again after a program was refused. Of configs that differ
only in how far ahead they fetch and gather, none fits if the one with the least on its way does
not. `exact`, where it is given, has the last word on bytes: it counts the bytes of the real program
for the configs that were found, best first. A config is returned only if its program fits. After
`MOST_EXACT` programs that do not, each further one lowers the memory that an estimate may fill, so
the search ends.

Then layers may differ (`zerojax.planner.segments`). Of all that was found, the plainest config
stays that is no more than 3 % slower than the fastest: a plan that is harder to read has to earn
it.
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
    PARTS,
    SEARCHED,
    WORTH,
    Bound,
    Candidate,
    Space,
    complexity,
)

_AHEAD = ("prefetch_distance", "gather_ahead")
"""Fields of which more takes more bytes of each tier, and no others change with them."""

MOST_EXACT = 40
"""Programs that are built before estimates have to leave room for what programs take beyond them.
"""
_PHASE_KINDS = ("in_flight", "gathered", "activations", "working")
"""Kinds of an estimate that it counts in the phase that holds the most, where a program's account
has the most of each.
"""
_LEAST_PART = 0.1
"""Of a device's memory: where estimates may fill no more of it, nothing is looked at again."""
USABLE = 0.95
"""The part of a device's memory that a plan fills: XLA's allocator and its libraries need the rest.
"""
DAY = 86400.0


DAYS, BOTH = "days of the disk", "device and pinned_host"


class Lack(NamedTuple):
    """What a config lacks: of a tier, or of a CPU's memory `BOTH` tiers, bytes that one device
    needs and has; or `DAYS`.
    """

    what: str
    needed: float
    had: float

    @property
    def share(self) -> float:
        """How often what there is would have to be there."""
        return self.needed / max(self.had, 1.0 if self.what != DAYS else 1e-9)


class Nearest(NamedTuple):
    """The config that comes nearest to fitting, and what it lacks, the most by share first."""

    lacks: tuple[Lack, ...]
    config: ZeroConfig
    tiles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that one device may use of each tier, and the life of the disk.

    Attributes:
      device: bytes of its memory.
      pinned_host: its part of a node's host memory; None: not known.
      nvme: its part of a node's disks; None: not known.
      both: the device's and the host's together, where a CPU's devices share the host's memory.
      devices_per_node: devices that share a node's disks.
      disk_tbw: bytes that may be written to a node's disks.
      min_disk_days: days that they have to last; None: any.
    """

    device: float
    pinned_host: float | None = None
    nvme: float | None = None
    both: float | None = None
    devices_per_node: int = 1
    disk_tbw: float | None = None
    min_disk_days: float | None = None

    def of(self, tier: str) -> float:
        """Return the bytes of a tier; 0 where nobody told."""
        found = getattr(self, tier)
        return 0.0 if found is None else found

    def missing(self, bytes_by_tier: Mapping[str, float]) -> list[Lack]:
        """Return what is lacking, the tier that lacks the most first, by share; nothing where all
        fits.
        """
        wrong = [
            Lack(tier, bytes_by_tier[tier], self.of(tier))
            for tier in TIERS
            if bytes_by_tier[tier] > self.of(tier)
        ]
        together = bytes_by_tier["device"] + bytes_by_tier["pinned_host"]
        if self.both is not None and together > self.both:
            wrong.append(Lack(BOTH, together, self.both))
        return sorted(wrong, key=lambda lack: -lack.share)


def limits_of(machine: Machine, shares_cores: bool, min_disk_days: float | None = None) -> Limits:
    """Return what one device of a machine may use.

    Raises:
      ValueError: the device's memory, or the disk's endurance where days are asked for, is not
        given.
    """
    per, figures = machine.devices_per_node, machine.figures
    host = figures.get("host_bytes")
    pinned = min((n for n in (host, figures.get("pinned_bytes")) if n is not None), default=None)
    disk = figures.get("disk_bytes")
    return Limits(
        device=USABLE * machine.need("device_bytes"),
        pinned_host=None if pinned is None else USABLE * pinned / per,
        nvme=None if disk is None else disk / per,
        both=USABLE * host / per if shares_cores and host is not None else None,
        devices_per_node=per,
        disk_tbw=machine.need("disk_tbw_bytes")
        if min_disk_days is not None
        else figures.get("disk_tbw_bytes"),
        min_disk_days=min_disk_days,
    )


def disk_days(limits: Limits, written: float, seconds: float) -> float | None:
    """Return the days until a node's disks have written their TBW, given a device's bytes of a
    step; None where unknown.
    """
    if limits.disk_tbw is None or not written:
        return None
    return limits.disk_tbw / (written * limits.devices_per_node / seconds * DAY)


class Exact(NamedTuple):
    """What a program takes.

    Attributes:
      bytes: of one device, by tier and kind (`program.memory`).
      swapped: bytes that one device reads from disk and writes to it in a step, or None.
    """

    bytes: Mapping[str, Mapping[str, int]]
    swapped: tuple[int, int] | None

    def peak_bytes(self, of_config: Estimate) -> int:
        """Return the most bytes that the device holds at once: its states, and an estimate of the
        phase that holds the most.
        """
        states = sum(n for kind, n in self.bytes["device"].items() if kind not in _PHASE_KINDS)
        return states + sum(of_config.bytes["device"].get(kind, 0) for kind in _PHASE_KINDS)

    def needed(self, of_config: Estimate) -> dict[str, float]:
        """Return the bytes of each tier that a machine must have: the program's own account, and on
        the device the peak.
        """
        of_tiers = _sums(self.bytes)
        of_tiers["device"] = max(of_tiers["device"], float(self.peak_bytes(of_config)))
        return of_tiers


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A config that fits.

    Attributes:
      estimate: of it.
      seconds: of its step.
      complexity: how far it is from the plainest.
      exact: of the real program, or None.
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
        """The most bytes that the device holds at once, with the working memory of a layer or the
        head; estimated.
        """
        if self.exact is None:
            return self.estimate.needed("device")
        return self.exact.peak_bytes(self.estimate)


@dataclasses.dataclass
class Tally:
    """What a search saw.

    Attributes:
      candidates: configs in all.
      estimated: of which bytes were estimated.
      walked: whose schedules were walked through.
      exact: whose programs were built.
      solver: what chose among layers, or "".
      nearest: the config that lacks least, of those that did not fit.
      refused: why programs could not be built.
      seconds: of the search.
    """

    candidates: int = 0
    estimated: int = 0
    walked: int = 0
    exact: int = 0
    solver: str = ""
    nearest: Nearest | None = None
    refused: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


class Search:
    """One search. Its results are `found`, the fastest first."""

    def __init__(
        self,
        space: Space,
        limits: Limits,
        exact: Callable[[ZeroConfig, int], Exact] | None = None,
        most_exact: int | None = None,
    ) -> None:
        """Search later, by `run`.

        Args:
          space: what may be chosen.
          limits: that it has to keep.
          exact: returns what the program of a config and a number of tiles takes, or raises that it
            cannot be built.
          most_exact: programs that may be built to settle on one, else on none; None: any number.
        """
        self.space, self.limits, self.exact, self.tally, self.bound = (
            space,
            limits,
            exact,
            Tally(),
            Bound(space),
        )
        self.most_exact = most_exact
        self.found: list[Found] = []
        self._known: dict[
            tuple[ZeroConfig, int], bool
        ] = {}  # what was kept, and what `exact` has refused
        self._estimates: dict[tuple[ZeroConfig, int], Estimate] = {}
        self._programs: dict[tuple[ZeroConfig, int], Exact | None] = {}
        self._part = 1.0  # of the device's memory that an estimate may fill
        self._factors: dict[
            tuple[Any, ...], float
        ] = {}  # by kind of config, how much more its programs took at least
        self._candidates: list[Candidate] | None = None
        self._unfit = set[int]()  # of the candidates, by number
        self._groups: dict[
            tuple[Any, ...], bool
        ] = {}  # of candidates alike but for `_AHEAD`: whether the least takes too much

    def run(self, below: float = math.inf) -> None:
        """Look through all candidates, but for those that take `below` seconds or more."""
        begin = time.perf_counter()
        if self._candidates is None:
            self._candidates = sorted(self.space, key=lambda c: (c.seconds, c.complexity))
        self.tally.candidates = len(self._candidates)
        fitted = set[tuple[Any, ...]]()
        for number, candidate in enumerate(self._candidates):
            if candidate.seconds >= below or (
                self.found and candidate.seconds * (1 - WORTH) > self.found[0].seconds
            ):
                break
            if number in self._unfit or not self._may_matter(
                candidate.seconds, candidate.complexity
            ):
                continue
            # More microbatches or tiles take no less time: they are there for what does not fit
            # with fewer. With a fraction that is to be found they may, as more of the state fits
            # beside them.
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
        """Consider a candidate, unless it cannot fit, and others came nearer.

        Returns:
          Whether it fits; None where that does not matter.
        """
        lacks = self.limits.missing(
            {tier: n * (1 - 1e-6) for tier, n in self.bound.resting(candidate.fields).items()}
        )
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
        group = (
            candidate.tiles,
            *(value for name, value in candidate.fields.items() if name not in _AHEAD),
        )
        if self._groups.get(group):
            return False
        fits = self.consider(config, candidate.tiles)
        if not fits and group not in self._groups:
            self._groups[group] = self._takes_too_much(config, candidate.tiles)
        return fits

    def _takes_too_much(self, config: ZeroConfig, tiles: int) -> bool:
        """Tell whether a config that fetches and gathers no further ahead than it has to takes too
        much, too.
        """
        least = {name: min(self.space.choices(name)) for name in _AHEAD}
        try:
            config = dataclasses.replace(config, **least)
        except (ValueError, NotImplementedError):
            return False
        of_config = self.estimate(config, tiles)
        return not self._fits_by_estimate(of_config)

    def _consider_largest_fraction(self, candidate: Candidate, config: ZeroConfig) -> bool | None:
        """Consider a candidate with as much of the optimizer's state on the device as fits, and
        tell whether any does.

        The more is there, the less is moved. How much fits follows from the bytes of an estimate.
        """
        fields, (part, rounded) = candidate.fields, self.bound.part_bytes(candidate.fields)
        if not part:  # layers that are not trained have no such state
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
        """Return the estimate of a config, made once."""
        if (of_config := self._estimates.get((config, tiles))) is None:
            space = self.space
            how = {"shares_cores": space.shares_cores, "tiles": tiles}
            of_config = self._estimates[config, tiles] = estimate(
                space.workload, config, space.grid, space.machine, **how
            )
        return of_config

    def consider(self, config: ZeroConfig, tiles: int = 1) -> bool:
        """Estimate a config, keep it if it may be the fastest or the plainest of fast ones, and
        tell whether it fits.
        """
        if (is_kept := self._known.get((config, tiles))) is not None:
            return is_kept
        self.tally.estimated += 1
        of_config = self.estimate(config, tiles)
        if not self._fits_by_estimate(of_config):
            return False
        harder = self._complexity(config, tiles)
        if not self._may_matter(of_config.least, harder):  # a closer bound than the candidate's
            return True
        self.tally.walked += 1
        seconds = of_config.time.seconds
        days = disk_days(self.limits, of_config.moved["write"], seconds)
        if (
            self.limits.min_disk_days is not None
            and days is not None
            and days < self.limits.min_disk_days
        ):
            self._note([Lack(DAYS, self.limits.min_disk_days, days)], of_config)
            return False
        found = Found(of_config, seconds, harder)
        self.found = sorted([*self.found, found], key=lambda f: (f.seconds, f.complexity))
        self._known[config, tiles] = True
        return True

    def _may_matter(self, seconds: float, harder: float) -> bool:
        """Tell whether a config of at least so many seconds may be the fastest, or the plainest of
        about as fast ones.
        """
        if not self.found or seconds < self.found[0].seconds:
            return True
        plainest = self.plainest()
        is_near = seconds * (1 - WORTH) <= self.found[0].seconds
        return is_near and (harder, seconds) < (plainest.complexity, plainest.seconds)

    def settle(self) -> Found | None:
        """Return the plan: the plainest config of those within `WORTH` of the fastest, whose
        program fits; None if none does.

        What was found is built best first. A program that cannot be built, or that does not fit
        after all, is left out, and what had been passed over because of it is looked at again.
        """
        while self.found and (self.most_exact is None or self.tally.exact < self.most_exact):
            first = self._settled(self.found[0])
            plainest = first and self._settled(self.plainest())
            if plainest is not None:
                return plainest
        return None

    def _settled(self, one: Found) -> Found | None:
        """Return a config with the bytes of its program; or None, leave it out, and look further."""
        if self.exact is None or one.exact is not None:
            return one
        exact = self.program_that_fits(one.config, one.estimate.tiles)
        if exact is None:
            self.leave_out(one.config, one.estimate.tiles)
            self._correct(one.estimate)
            self._leave_more_room()
            self.run()
            return None
        at = self.found.index(one)
        self.found[at] = dataclasses.replace(one, exact=exact)
        return self.found[at]

    def leave_out(self, config: ZeroConfig, tiles: int) -> None:
        """Drop a config whose program does not fit, for good."""
        self.found = [f for f in self.found if (f.config, f.estimate.tiles) != (config, tiles)]
        self._known[config, tiles] = False

    def _correct(self, of_config: Estimate) -> None:
        """Learn from a program that takes more of the device than its estimate: others of its kind
        do, too.

        The least factor that was seen holds for all configs with the same tiers and activations, so
        that few programs of a kind are built in vain.
        """
        exact = self._programs[of_config.config, of_config.tiles]
        if exact is None:
            return
        taken, estimated = exact.needed(of_config)["device"], of_config.needed("device")
        if taken <= max(estimated, self.limits.device):
            return
        kind = _kind(of_config.config)
        self._factors[kind] = min(taken / estimated, self._factors.get(kind, math.inf))
        self.found = [f for f in self.found if f.exact is not None or self._has_room(f.estimate)]

    def _has_room(self, of_config: Estimate) -> bool:
        """Return whether the device has room for a corrected estimate."""
        factor = self._factors.get(_kind(of_config.config), 1.0)
        return of_config.needed("device") * factor <= self._part * self.limits.device

    def _leave_more_room(self) -> None:
        """Once many programs took more than their estimates, drop configs whose estimates leave
        less room than before.
        """
        if self.tally.exact < MOST_EXACT:
            return
        self._part = self._part * 0.9 if self._part > _LEAST_PART else 0.0
        self.found = [f for f in self.found if f.exact is not None or self._has_room(f.estimate)]

    def program_that_fits(self, config: ZeroConfig, tiles: int) -> Exact | None:
        """Return what the program of a config takes if it fits, or None."""
        of_config, exact = self.estimate(config, tiles), self._of_program(config, tiles)
        return (
            exact if exact is not None and self._fits(exact.needed(of_config), of_config) else None
        )

    def _of_program(self, config: ZeroConfig, tiles: int) -> Exact | None:
        """Return what the real program takes, or None where it cannot be built.

        It is built once.
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

    def lacks_of_program(self, config: ZeroConfig, tiles: int = 1) -> list[Lack]:
        """Return what a config lacks by the bytes of its program; nothing where no program is
        built.
        """
        exact = None if self.exact is None else self._of_program(config, tiles)
        return (
            [] if exact is None else self.limits.missing(exact.needed(self.estimate(config, tiles)))
        )

    def _fits(self, of_tiers: Mapping[str, float], of_config: Estimate) -> bool:
        lacks = self.limits.missing(of_tiers)
        if lacks:
            self._note(lacks, of_config)
        return not lacks

    def _fits_by_estimate(self, of_config: Estimate) -> bool:
        fits = self._fits(_sums(of_config.bytes), of_config)
        return fits and self._has_room(of_config)

    def _note(self, lacks: Sequence[Lack], of_config: Estimate) -> None:
        """Keep what lacks the least."""
        nearest = self.tally.nearest
        if nearest is not None and lacks[0].share >= nearest.lacks[0].share:
            return
        least = self.limits.min_disk_days
        if least is not None and lacks[0].what != DAYS:  # would the disk last, if there were room?
            days = disk_days(self.limits, of_config.moved["write"], of_config.time.seconds)
            lacks = (
                [*lacks, Lack(DAYS, least, days)] if days is not None and days < least else lacks
            )
            lacks = sorted(lacks, key=lambda lack: -lack.share)
        if nearest is None or lacks[0].share < nearest.lacks[0].share:
            self.tally.nearest = Nearest(tuple(lacks), of_config.config, of_config.tiles)

    def _complexity(self, config: ZeroConfig, tiles: int) -> float:
        return complexity(
            {name: getattr(config, name) for name in (*SEARCHED, "saved_names", "offloaded_names")},
            tiles,
        )

    def plainest(self) -> Found:
        """Return the plainest config that is within `WORTH` of the fastest."""
        near = [f for f in self.found if f.seconds * (1 - WORTH) <= self.found[0].seconds]
        return min(near, key=lambda f: (f.complexity, f.seconds))


def _kind(config: ZeroConfig) -> tuple[Any, ...]:
    """Return the fields on which it depends how far an estimate is from its program."""
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
    """Return the bytes of each tier."""
    return {tier: float(sum(kinds.values())) for tier, kinds in tiers.items()}
