"""Rates of a run's steps: of each step, and of the last interval.

    tokens/s   steps * tokens per step / seconds
    MFU        FLOPs of the model per second / the vendor's peak of all devices
    stall      seconds that devices waited for the disk / (devices of this process * seconds)

An interval ends at a pause, or after `LONGEST` steps. Rates are therefore never means over the
whole run, which would hide that a run has become slower. The first step compiles, and work between
steps, such as a validation, is not step time: neither is part of an interval.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from zerojax.machines import machine, machine_of

LONGEST = 100
"""Most steps of an interval."""


def peak_flops(mesh: Mesh, precision: str) -> float | None:
    """Return the vendor's peak FLOP/s of a mesh, or None if unknown.

    It is None for float32 too, because float32 products may or may not run as TF32.
    """
    name = machine_of(mesh.devices.flat[0].device_kind)
    peak = machine(name).peak_flops.get(precision) if name and precision != "fp32" else None
    return peak and peak * mesh.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """Consecutive steps, and what they did.

    Attributes:
      first_step: number of the first step.
      last_step: number of the last step.
      num_steps: number of steps.
      seconds: seconds of these steps.
      swap_bytes: bytes read from and written to the disk.
      stall_seconds: seconds that devices waited for the disk, summed over devices.
    """

    first_step: int
    last_step: int
    num_steps: int
    seconds: float
    swap_bytes: float
    stall_seconds: float

    def extend(self, other: "Interval") -> "Interval":
        """Return the interval with a later one added to it."""
        return Interval(
            first_step=self.first_step,
            last_step=other.last_step,
            num_steps=self.num_steps + other.num_steps,
            seconds=self.seconds + other.seconds,
            swap_bytes=self.swap_bytes + other.swap_bytes,
            stall_seconds=self.stall_seconds + other.stall_seconds,
        )


@dataclasses.dataclass(kw_only=True)
class Speed:
    """Rates of steps.

    Attributes:
      tokens: tokens per step, over all processes; None if unknown.
      flops_per_token: FLOPs of the model per token, without recomputation; None if unknown.
      peak: peak FLOP/s of all devices; None if unknown.
      devices: number of devices of this process.
      interval: the current interval, or the last one while there is no step after it; None before
        the second step.
    """

    tokens: int | None = None
    flops_per_token: float | None = None
    peak: float | None = None
    devices: int = 1
    interval: Interval | None = None
    _step_start: float | None = None
    _is_closed: bool = False

    @property
    def is_started(self) -> bool:
        """Whether the first step has ended."""
        return self._step_start is not None

    def restart(self, now: float) -> None:
        """End the interval, and exclude the time before `now` from the next step."""
        if self.is_started:
            self._step_start = now
        self._is_closed = True

    def add(self, step: int, metrics: Mapping[str, Any], now: float) -> dict[str, float]:
        """Count a finished step, and return its own rates by name.

        The first step, which compiled, has none. `now` is in seconds.
        """
        start = self._step_start
        self._step_start = now
        if start is None:
            return {}
        swap_bytes = 0.0
        if "swap_stall_seconds" in metrics:
            swap_bytes = float(metrics["swap_read_bytes"]) + float(metrics["swap_write_bytes"])
        own = Interval(
            first_step=step,
            last_step=step,
            num_steps=1,
            seconds=max(now - start, 1e-9),
            swap_bytes=swap_bytes,
            stall_seconds=float(metrics.get("swap_stall_seconds", 0.0)),
        )
        is_new = self._is_closed or self.interval is None or self.interval.num_steps >= LONGEST
        if is_new or self.interval is None:
            self.interval = own
        else:
            self.interval = self.interval.extend(own)
        self._is_closed = False
        return self._measure(own)

    def measure_interval(self) -> dict[str, float]:
        """Return the rates of the last interval by name; none before the second step."""
        return {} if self.interval is None else self._measure(self.interval)

    def _measure(self, interval: Interval) -> dict[str, float]:
        rates = {"speed/seconds_per_step": interval.seconds / interval.num_steps}
        if interval.swap_bytes:
            device_seconds = self.devices * interval.seconds
            rates["speed/stall"] = interval.stall_seconds / device_seconds
            rates["speed/swap_bytes_per_second"] = interval.swap_bytes / interval.seconds
        if self.tokens is None:
            return rates
        tokens_per_second = interval.num_steps * self.tokens / interval.seconds
        rates["speed/tokens_per_second"] = tokens_per_second
        if self.flops_per_token is None:
            return rates
        flops_per_second = tokens_per_second * self.flops_per_token
        rates["speed/model_flops_per_second"] = flops_per_second
        if self.peak is not None:
            rates["speed/mfu"] = flops_per_second / self.peak
        return rates


def describe(figures: Mapping[str, float]) -> str:
    """Return the figures as one line of progress."""
    words = []
    if "train/loss" in figures:
        words.append(f"loss {figures['train/loss']:.3f}")
    if "train/grad_norm" in figures:
        words.append(f"norm {figures['train/grad_norm']:.2f}")
    if "speed/tokens_per_second" in figures:
        words.append(f"{figures['speed/tokens_per_second']:,.0f} tokens/s")
    elif "speed/seconds_per_step" in figures:
        words.append(f"{figures['speed/seconds_per_step']:.3g} s a step")
    if "speed/model_flops_per_second" in figures:
        words.append(f"{figures['speed/model_flops_per_second'] / 1e9:,.1f} GFLOP/s")
    if "speed/mfu" in figures:
        words.append(f"MFU {100 * figures['speed/mfu']:.1f} %")
    if "speed/stall" in figures:
        words.append(f"stall {100 * figures['speed/stall']:.0f} %")
        words.append(f"{figures['speed/swap_bytes_per_second'] / 1e9:.2f} GB/s swapped")
    if figures.get("train/skipped_steps"):
        words.append(f"skipped {figures['train/skipped_steps']:.0f}")
    return "  ".join(words)
