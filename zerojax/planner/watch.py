"""A run beside its plan: a step that is 20 % off is told once, with what is at fault; and what the
run does to the disk.

    watch = zj.StepWatch(plan)                     # or zj.StepWatch(machine=machine), of a run without a plan
    for batch in data:
        state, metrics = program.step(state, batch)
        watch.step(metrics)                        # waits for the step

Seconds are those from one call to the next, less what `pause` was told of, such as a validation.
Their median over ten steps is held against the plan's: one slow step is no finding. At fault is the
disk if the devices waited for it for longer than the plan says, by at least half of the difference
(`metrics["swap_stall_seconds"]`); else what computes, or the link, which no metric tells apart.

Bytes written to the disk are counted by the step itself. Over the seconds of these steps they are
bytes a day; the disks' rated bytes (`Machine.disk_tbw_bytes`) over those are the days that they
last.
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
"""The part of the plan's seconds by which a step may differ from them without a word."""
_STEPS = 10
_DAY = 86400.0
logger = logging.getLogger("zerojax")


class StepWatch:
    """Compares steps with a plan, and logs once what is worth knowing.

    Attributes:
      seconds: of a step, the median of the last ones; None before `_STEPS` of them.
      written_a_day: bytes that this process's disk takes in a day at this pace; 0 where nothing is
        on disk.
    """

    def __init__(self, plan: Plan | None = None, *, machine: Machine | None = None) -> None:
        """Watch a run.

        Args:
          plan: of its step, if there is one.
          machine: whose disk's endurance is known; the plan's by default.

        Raises:
          ValueError: one of them is of another kind.
        """
        for name, value, kind in (("plan", plan, Plan), ("machine", machine, Machine)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be a zerojax.{kind.__name__}, got {value!r}")
        self.plan, self.machine = (
            plan,
            machine if machine is not None or plan is None else plan.machine,
        )
        self.seconds: float | None = None
        self.written_a_day = 0.0
        self._times: list[
            tuple[float, float, float]
        ] = []  # seconds, written bytes, seconds of waiting for the disk
        self._last: float | None = None
        self._has_told, self._is_compiled = False, False

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Take note of a step that was started, by its metrics, and wait for it. The first one
        compiles, and does not count.

        Raises:
          ValueError: these are no metrics.
        """
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"metrics={metrics!r}: what program.step returns beside the state is needed"
            )
        jax.block_until_ready(dict(metrics))
        now, last = time.perf_counter(), self._last
        self._last = now
        if last is None or not self._is_compiled:
            self._is_compiled = True
            return
        written, stall = (
            float(metrics.get("swap_write_bytes", 0)),
            float(metrics.get("swap_stall_seconds", 0)),
        )
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
        """Leave out the time from the last step to the next one: something else was done in
        between.
        """
        self._last = None

    @property
    def disk_days(self) -> float | None:
        """Days until the disks have written what they are rated for, at this pace; None where that
        is not known.
        """
        rated = None if self.machine is None else self.machine.disk_tbw_bytes
        return rated / self.written_a_day if rated and self.written_a_day else None

    def _tell(self) -> None:
        if self.written_a_day:
            days = "" if self.disk_days is None else f", {self.disk_days:,.0f} days to its TBW"
            logger.info(
                "the disk takes %.3g TB a day at this pace%s", self.written_a_day / 1e12, days
            )
        if (
            self.plan is None
            or self.seconds is None
            or abs(self.seconds / self.plan.seconds - 1) <= OFF
        ):
            return
        logger.warning(
            "a step takes %.3g s, and its plan says %.3g s (%+.0f %%): %s",
            self.seconds,
            self.plan.seconds,
            100 * (self.seconds / self.plan.seconds - 1),
            self.at_fault(),
        )

    def at_fault(self) -> str:
        """Return what the difference to the plan comes from."""
        assert self.plan is not None
        assert self.seconds is not None
        more, exposed = self.seconds - self.plan.seconds, self.plan.time.exposed
        stall = statistics.median(stall for _, _, stall in self._times) / jax.local_device_count()
        waits = stall - exposed["read"] - exposed["write"]
        if abs(waits) >= abs(more) / 2 and waits * more > 0:
            return f"disk, which is waited for {stall:.3g} s and not {exposed['read'] + exposed['write']:.3g} s"
        return (
            "compute, or the link: no more is waited for the disk than planned"
            if stall
            else "compute, or the link"
        )
