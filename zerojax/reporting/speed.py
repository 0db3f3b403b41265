"""Rates of a run's steps, measured since the last pause.

    tokens/s   steps * tokens per step / seconds
    MFU        FLOPs of the model per second / the vendor's peak of all devices
    stall      seconds that devices waited for the disk / (devices of this process * seconds)

The first step compiles, and work between steps, such as a validation, is not step time: after both,
a new window begins.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from zerojax.machines import machine, machine_of


def peak_flops(mesh: Mesh, precision: str) -> float | None:
    """Return the vendor's peak FLOP/s of a mesh, or None if unknown.

    It is None for float32 too, because float32 products may or may not run as TF32.
    """
    name = machine_of(mesh.devices.flat[0].device_kind)
    peak = machine(name).peak_flops.get(precision) if name and precision != "fp32" else None
    return peak and peak * mesh.size


@dataclasses.dataclass(kw_only=True)
class Speed:
    """Rates of the steps in a window of time.

    Attributes:
      tokens: tokens per step, over all processes; None if unknown.
      flops_per_token: FLOPs of the model per token, without recomputation; None if unknown.
      peak: peak FLOP/s of all devices; None if unknown.
      devices: number of devices of this process.
      since: start of the window in seconds; None before the first step has ended.
    """

    tokens: int | None = None
    flops_per_token: float | None = None
    peak: float | None = None
    devices: int = 1
    since: float | None = None
    _steps: int = 0
    _swapped: float = 0.0
    _stall: float = 0.0

    def restart(self, now: float) -> None:
        """Begin a new window."""
        self.since, self._steps, self._swapped, self._stall = now, 0, 0.0, 0.0

    def add(self, metrics: Mapping[str, Any], now: float) -> dict[str, float]:
        """Count a finished step, and return the figures of the window by name.

        The first step, which compiled, returns none. `now` is in seconds.
        """
        if self.since is None:
            self.restart(now)
            return {}
        self._steps += 1
        if "swap_stall_seconds" in metrics:
            self._swapped += float(metrics["swap_read_bytes"]) + float(metrics["swap_write_bytes"])
            self._stall += float(metrics["swap_stall_seconds"])
        seconds = max(now - self.since, 1e-9)
        figures = {"speed/seconds_per_step": seconds / self._steps}
        if self._swapped:
            figures["speed/stall"] = self._stall / (self.devices * seconds)
            figures["speed/swap_bytes_per_second"] = self._swapped / seconds
        if self.tokens is not None:
            rate = figures["speed/tokens_per_second"] = self._steps * self.tokens / seconds
            if self.flops_per_token is not None:
                figures["speed/model_flops_per_second"] = rate * self.flops_per_token
                if self.peak is not None:
                    figures["speed/mfu"] = rate * self.flops_per_token / self.peak
        return figures


def describe(figures: Mapping[str, float]) -> str:
    """Return the figures as one line of progress."""
    parts = [f"loss {figures['train/loss']:.3f}"] if "train/loss" in figures else []
    if "train/grad_norm" in figures:
        parts.append(f"norm {figures['train/grad_norm']:.2f}")
    if "speed/tokens_per_second" in figures:
        parts.append(f"{figures['speed/tokens_per_second']:,.0f} tokens/s")
    elif "speed/seconds_per_step" in figures:
        parts.append(f"{figures['speed/seconds_per_step']:.3g} s a step")
    if "speed/model_flops_per_second" in figures:
        parts.append(f"{figures['speed/model_flops_per_second'] / 1e9:,.1f} GFLOP/s")
    if "speed/mfu" in figures:
        parts.append(f"MFU {100 * figures['speed/mfu']:.1f} %")
    if "speed/stall" in figures:
        parts.append(f"stall {100 * figures['speed/stall']:.0f} %")
        parts.append(f"{figures['speed/swap_bytes_per_second'] / 1e9:.2f} GB/s swapped")
    if figures.get("train/skipped_steps"):
        parts.append(f"skipped {figures['train/skipped_steps']:.0f}")
    return "  ".join(parts)
