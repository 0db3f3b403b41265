"""What to change if nothing fits: the nearest change with which a search finds a plan.

    without a fixed field               "Without opt_state='device' a plan fits."
    moments in bfloat16                 which rounds them, so that only a user may choose it
    a machine with more of each tier    that the nearest config lacks

A change is reported only if a search with it finds a plan. A config's needs are first estimated and
then counted from its program, which may need more. In a machine that satisfies them, another config
may come nearest and lack something else. So missing figures accumulate until a plan is found.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.machines import Machine, format_bytes
from zerojax.planner.candidates import SEARCHED
from zerojax.planner.search import BOTH, DAYS, USABLE, ClosestInfeasible, Found, Search, Shortfall

_MOST_ROUNDS = 12
_MOMENTS = {"moments": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the request.

    Attributes:
      without: name of a fixed field that is left to the planner instead.
      fixed: additional fixed fields.
      figures: machine figures that replace the machine's own.
      min_disk_days: days that the disk must last; None keeps the request.
    """

    without: str | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    min_disk_days: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repairs:
    """Changes that may make something fit.

    Attributes:
      tries: function that runs a search with a change and returns the search and its result, if
        anything fits.
      machine: requested machine.
      fixed: requested fixed fields.
      filled: fraction of the device's memory that a plan fills.
    """

    tries: Callable[[Change], tuple[Search, Found | None]]
    machine: Machine
    fixed: Mapping[str, Any]
    filled: float

    def nearest(self, search: Search) -> str:
        """Return what to change, as a sentence, given a search that found nothing."""
        for name in self.fixed:
            if name in SEARCHED and self._fits(Change(without=name)):
                return f"Without {name}={self.fixed[name]!r} a plan fits."
        if self.fixed.get("moments") != "bfloat16":
            found = self._fits(Change(without="moments", fixed=_MOMENTS))
            if found:
                return (
                    f"With moments='bfloat16' fixed, which rounds the optimizer's moments, a plan "
                    f"fits: {found.seconds:.4g} s a step, predicted."
                )
        return self._larger_machine(search)

    def _fits(self, change: Change) -> Found | None:
        return self.tries(change)[1]

    def _larger_machine(self, search: Search) -> str:
        """Return the figures that the machine would need, or the days that could be requested."""
        figures = dict[str, int]()
        days = None
        for _ in range(_MOST_ROUNDS):
            near = search.tally.nearest
            if near is None:
                break
            for lack in list_shortfalls(search, near):
                if lack.what == DAYS:
                    lasts = _rounded_down(lack.had)
                    days = lasts if days is None else min(lasts, days)
                    continue
                for name, least in self._needed_figures(lack).items():
                    figures[name] = max(least, figures.get(name, 0))
            search, found = self.tries(Change(figures=figures, min_disk_days=days))
            if found is not None:
                return _describe_machine(figures, days)
        return (
            f"No change with which a plan fits was found in {_MOST_ROUNDS} tries: "
            "use more devices, or a smaller batch."
        )

    def _needed_figures(self, lack: Shortfall) -> dict[str, int]:
        """Return the figures that a machine would need to provide what is missing in a tier."""
        machine = self.machine
        if lack.what == "device":
            return {"device_bytes": _whole_bytes(lack.needed, self.filled)}
        node_needs = lack.needed * machine.devices_per_node
        if lack.what == "nvme":
            return {"disk_bytes": _whole_bytes(node_needs, 1.0)}
        least = _whole_bytes(node_needs, USABLE)
        fields = ["host_bytes"]
        if lack.what == "pinned_host" and machine.pinned_bytes is not None:
            fields = ["host_bytes", "pinned_bytes"]
            fields = [field for field in fields if machine.figures.get(field, 0) < least]
        return dict.fromkeys(fields, least)


def _whole_bytes(needed: float, usable: float) -> int:
    """Return the bytes of which a usable fraction is enough.

    They include one extra byte, because the usable fraction of the figure is rounded.
    """
    return math.ceil(needed / usable) + 1


def list_shortfalls(search: Search, near: ClosestInfeasible) -> list[Shortfall]:
    """Return everything that the nearest config lacks.

    Each need is the larger of the estimate and the program's account.
    """
    most = {lack.what: lack for lack in near.lacks}
    for lack in search.lacks_of_program(near.config, near.tiles):
        if lack.what not in most or lack.needed > most[lack.what].needed:
            most[lack.what] = lack
    return list(most.values())


def what_lacks(lack: Shortfall) -> str:
    """Return a description of a tier that lacks bytes.

    It has the needed and the available bytes per device.
    """
    subject = f"{lack.what} needs"
    if lack.what == BOTH:
        subject = "device and pinned_host, which share one memory on a CPU, need"
    return (
        f"{subject} {format_bytes(lack.needed)} of a device's {format_bytes(lack.had)} "
        f"({lack.needed:,.0f} and {lack.had:,.0f})"
    )


def _describe_machine(figures: Mapping[str, int], days: float | None) -> str:
    """Return a sentence about the machine, or the days, with which a plan fits."""
    machine = " and ".join(f"{field} of {least:,}" for field, least in figures.items())
    if not machine:
        return f"With min_disk_days={days} it fits."
    condition = "" if days is None else f", and min_disk_days={days},"
    return f"A machine with {machine}{condition} would fit it."


def _rounded_down(days: float) -> float:
    """Return days rounded down to three digits, which a plan can be sure to keep."""
    unit = 10.0 ** (math.floor(math.log10(days)) - 2)
    return float(f"{math.floor(days / unit) * unit:.3g}")
