"""The facts at the top of a run's page: time, steps, losses, rates, and what went wrong."""

import dataclasses
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence

from zerojax.memory import MemoryReport
from zerojax.planner import StepWatch
from zerojax.reporting.charts import format_number
from zerojax.reporting.history import Point, Series
from zerojax.reporting.sessions import RUNNING, Session
from zerojax.reporting.speed import Speed

FINISHED = "finished"
_MINUTE = 60
_HOUR = 3600
_DAY = 86400


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error that ended a run.

    Attributes:
      message: type and message of the error.
      trace: its traceback.
    """

    message: str
    trace: str


def describe_failure(error: BaseException) -> Failure:
    """Return an error in words; if a script exits because of an error, return that error's."""
    cause = error
    if isinstance(error, SystemExit) and error.__context__ is not None:
        cause = error.__context__
    message = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    return Failure(message, "".join(traceback.format_exception(cause)))


def describe_end(last_step: int, num_steps: int | None) -> str:
    """Return how a run ended that neither failed nor said how it ended."""
    if num_steps is None or last_step >= num_steps:
        return FINISHED
    return f"ended early, after {last_step:,} of {num_steps:,} steps"


def build_facts(
    series: Mapping[str, Series],
    sessions: Sequence[Session],
    num_steps: int | None,
    speed: Speed,
    watch: StepWatch,
    memory: MemoryReport | None,
) -> dict[str, str]:
    """Return the facts of a run by name, in their order on the page.

    Args:
      series: figures of the run.
      sessions: sessions of the run; the last one is this process's.
      num_steps: number of steps of the full run; None if unknown.
      speed: rates of this session.
      watch: comparison with the plan, and wear of the disk.
      memory: memory report of a step.
    """
    current = sessions[-1]
    planned = "" if num_steps is None else f" of {num_steps:,}"
    facts = _describe_times(sessions)
    facts["Steps"] = f"{max(current.last_step, 0):,}{planned}"
    facts |= _describe_losses(series)
    facts |= _describe_rates(speed, watch)
    if "train/skipped_steps" in series:
        facts["Skipped steps"] = f"{series['train/skipped_steps'][-1].value:,.0f}"
    if memory is not None:
        facts["Parameters"] = f"{memory.num_params:,}"
    return facts


def find_problems(
    series: Mapping[str, Series], notices: Iterable[str], failure: Failure | None
) -> list[str]:
    """Return what went wrong, in words: the error, skipped steps, losses that are not finite."""
    problems = [] if failure is None else [failure.message]
    problems += notices
    names = {"train/loss": "training loss", "validation/loss": "validation loss"}
    for key, name in names.items():
        missing = [point for point in series.get(key, ()) if not math.isfinite(point.value)]
        if missing:
            count = f"at {len(missing):,} steps" if len(missing) > 1 else "at one step"
            problems.append(
                f"The {name} was not finite {count}, first at step {missing[0].step:,}."
            )
    return problems


def format_duration(seconds: float) -> str:
    """Return seconds as text with the two largest units, such as "3 h 05 min"."""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02} h"


def _describe_times(sessions: Sequence[Session]) -> dict[str, str]:
    current = sessions[-1]
    total = sum(session.seconds for session in sessions)
    facts = {"Started": sessions[0].started, "Duration": format_duration(total)}
    if len(sessions) > 1:
        facts["Duration"] += f" in {len(sessions)} sessions"
        facts["Resumed"] = f"{current.started}, at step {current.first_step:,}"
    elif current.first_step > 1:
        facts["Resumed"] = f"at step {current.first_step:,}"
    if current.state == RUNNING:
        facts["Duration"] += " so far"
    return facts


def _describe_losses(series: Mapping[str, Series]) -> dict[str, str]:
    facts = {}
    training = series.get("train/loss")
    if training:
        facts["Training loss"] = (
            f"{_format_loss(training[-1])} (first {format_number(training[0].value)})"
        )
    validations = series.get("validation/loss")
    if not validations:
        return facts | {"Validation loss": "not measured"}
    finite = [point for point in validations if math.isfinite(point.value)]
    best = min(finite, key=lambda point: point.value, default=None)
    facts["Best validation loss"] = "none is finite"
    if best is not None:
        facts["Best validation loss"] = _format_loss(best)
    facts["First validation loss"] = _format_loss(validations[0])
    facts["Last validation loss"] = _format_loss(validations[-1])
    return facts


def _format_loss(point: Point) -> str:
    return f"{point.value:.4f} at step {point.step:,}"


def _describe_rates(speed: Speed, watch: StepWatch) -> dict[str, str]:
    """Return the rates of the last interval, each with its steps."""
    rates = speed.measure_interval()
    interval = speed.interval
    if interval is None:
        return {}
    steps = f"in steps {interval.first_step:,} to {interval.last_step:,}"
    if interval.num_steps == 1:
        steps = f"in step {interval.last_step:,}"
    facts = {}
    if "speed/tokens_per_second" in rates:
        facts["Tokens per second"] = f"{rates['speed/tokens_per_second']:,.0f} {steps}"
    facts["Seconds per step"] = f"{format_number(rates['speed/seconds_per_step'])} {steps}"
    if watch.plan is not None:
        facts["Seconds per step"] += f"; the plan predicts {format_number(watch.plan.seconds)}"
    if "speed/model_flops_per_second" in rates:
        flops = rates["speed/model_flops_per_second"]
        facts["Model FLOP per second"] = f"{flops / 1e9:,.1f} G {steps}"
    if "speed/mfu" in rates:
        facts["Utilization (MFU)"] = f"{100 * rates['speed/mfu']:.1f} % {steps}"
    if "speed/stall" in rates:
        facts["Waiting for the disk"] = f"{100 * rates['speed/stall']:.1f} % of the time {steps}"
        traffic = rates["speed/swap_bytes_per_second"] / 1e9
        facts["Disk traffic"] = f"{traffic:.2f} GB/s {steps}"
    if watch.written_a_day:
        facts["Written to the disk"] = describe_wear(watch)
    return facts


def describe_wear(watch: StepWatch) -> str:
    """Return the bytes written to the disk per day, and how long the disk lasts if known."""
    words = f"{watch.written_a_day / 1e12:.3g} TB a day"
    if watch.disk_days is not None:
        words += f", {watch.disk_days:,.0f} days to its TBW"
    return words
