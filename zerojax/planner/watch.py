"""Compare a run with its plan: log once if steps are 20 % off, with the cause and the disk's wear.

    watch = zj.StepWatch(plan)              # or zj.StepWatch(machine=machine), without a plan
    for batch in data:
        state, metrics = program.step(state, batch)
        watch.step(metrics)                 # waits for the step

Seconds are measured from one call to the next, without intervals marked by `pause`, such as a
validation. Their median over ten steps is compared with the plan's, so a single slow step does not
count. The cause is the disk if the devices waited longer for it than planned, by at least half of
the difference (`metrics["swap_stall_seconds"]`); otherwise it is compute or the link, which no
metric distinguishes.

The step itself counts the bytes written to the disk. Divided by the seconds of these steps, they
give bytes per day; the disks' rated bytes (`Machine.disk_tbw_bytes`) divided by bytes per day give
the days that the disks last.
"""

import logging
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.machines import Machine
from zerojax.planner.plans import Plan

OFF = 0.2
"""Fraction of the plan's seconds by which a step may differ without a warning."""
_STEPS = 10
_DAY = 86400.0
logger = logging.getLogger("zerojax")


class StepWatch:
    """Compares steps with a plan, and logs findings once.

    Attributes:
      plan: plan of the step, or None.
      machine: machine whose disk endurance is used, or None.
      seconds: median seconds of the last steps; None before `_STEPS` of them.
      written_a_day: bytes that this process writes to disk per day at this pace; 0 if nothing is on
        disk.
    """

    def __init__(self, plan: Plan | None = None, *, machine: Machine | None = None) -> None:
        """Watch a run.

        Args:
          plan: plan of the step, if available.
          machine: machine whose disk endurance is used; the plan's by default.

        Raises:
          ValueError: an argument has the wrong type.
        """
        for name, value, kind in (("plan", plan, Plan), ("machine", machine, Machine)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be a zerojax.{kind.__name__}, got {value!r}")
        self.plan = plan
        self.machine = machine if machine is not None or plan is None else plan.machine
        self.seconds: float | None = None
        self.written_a_day = 0.0
        self._times: list[
            tuple[float, float, float]
        ] = []  # (seconds, written bytes, seconds of waiting for the disk)
        self._last: float | None = None
        self._has_told = False
        self._is_compiled = False

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record a step that was started, given its metrics, and wait for it.

        The first step compiles, and is not counted.

        Args:
          metrics: metrics of the step, as `program.step` returns them.

        Raises:
          ValueError: `metrics` is not a mapping.
        """
        if not isinstance(metrics, Mapping):
            raise ValueError(f"metrics={metrics!r}: pass the metrics that program.step returns")
        jax.block_until_ready(dict(metrics))
        now = time.perf_counter()
        last = self._last
        self._last = now
        if last is None or not self._is_compiled:
            self._is_compiled = True
            return
        written = float(metrics.get("swap_write_bytes", 0))
        stall = float(metrics.get("swap_stall_seconds", 0))
        self._times = [*self._times[-_STEPS + 1 :], (now - last, written, stall)]
        if len(self._times) < _STEPS:
            return
        self.seconds = statistics.median(seconds for seconds, _, _ in self._times)
        total = sum(seconds for seconds, _, _ in self._times)
        self.written_a_day = sum(written for _, written, _ in self._times) / total * _DAY
        if not self._has_told:
            self._has_told = True
            self._tell()

    def pause(self) -> None:
        """Exclude the time from the last step to the next one, in which something else runs."""
        self._last = None

    @property
    def disk_days(self) -> float | None:
        """Days until the disks have written their rated bytes at this pace; None if unknown."""
        rated = None if self.machine is None else self.machine.disk_tbw_bytes
        return rated / self.written_a_day if rated and self.written_a_day else None

    def _tell(self) -> None:
        if self.written_a_day:
            days = "" if self.disk_days is None else f", {self.disk_days:,.0f} days to its TBW"
            logger.info(
                "%.3g TB per day are written to disk at this pace%s",
                self.written_a_day / 1e12,
                days,
            )
        if (
            self.plan is None
            or self.seconds is None
            or abs(self.seconds / self.plan.seconds - 1) <= OFF
        ):
            return
        logger.warning(
            "a step takes %.3g s, but its plan predicts %.3g s (%+.0f %%): %s",
            self.seconds,
            self.plan.seconds,
            100 * (self.seconds / self.plan.seconds - 1),
            self.at_fault(),
        )

    def at_fault(self) -> str:
        """Return the cause of the difference to the plan."""
        assert self.plan is not None
        assert self.seconds is not None
        more = self.seconds - self.plan.seconds
        exposed = self.plan.time.exposed
        stall = statistics.median(stall for _, _, stall in self._times) / jax.local_device_count()
        waits = stall - exposed["read"] - exposed["write"]
        if abs(waits) >= abs(more) / 2 and waits * more > 0:
            return (
                f"the disk: the devices wait for it {stall:.3g} s, "
                f"not {exposed['read'] + exposed['write']:.3g} s"
            )
        if stall:
            return "compute or the link: the devices wait no longer for the disk than planned"
        return "compute or the link"
