"""Describe what a run runs on: memory of each tier, devices, peak memory."""

import os
import platform
import resource
import shutil
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.environment import read_environment
from zerojax.machines import format_bytes, probe_memories


def measure_capacity(mesh: Mesh, swap_dir: str | None) -> dict[str, float | None]:
    """Return the bytes of each tier that one device may use.

    A device's share of pinned host memory and of free disk space is its part of this process's
    node. Call it before the program makes its files.
    """
    devices = mesh.local_devices
    memories, _ = probe_memories(devices)
    has_disk = swap_dir is not None and os.path.isdir(swap_dir)
    free_bytes = shutil.disk_usage(swap_dir).free if swap_dir is not None and has_disk else None
    return {
        "device": memories.get("device_bytes"),
        "pinned_host": _divide(memories.get("pinned_bytes"), len(devices)),
        "nvme": _divide(free_bytes, len(devices)),
    }


def describe_machine(mesh: Mesh) -> dict[str, str]:
    """Return the run's devices, this host, and the versions that a run's numbers depend on."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    machine = {
        "mesh": f"{mesh.size} x {device.device_kind} ({device.platform}), {axes}",
        "processes": str(jax.process_count()),
        "host": f"{platform.node()}, {platform.machine()}",
    }
    for name, value in read_environment():
        machine[name] = f"{machine[name]}; {value}" if name in machine else value
    return machine


def measure_peaks(devices: Iterable[Any]) -> dict[str, str]:
    """Return the peak memory use so far: of the devices that report it, and of this process."""
    device_peaks = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            device_peaks.append(stats["peak_bytes_in_use"])
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = {"Peak resident memory of this process": format_bytes(resident_bytes)}
    if device_peaks:
        peaks["Peak memory in use on a device"] = format_bytes(max(device_peaks))
    return peaks


def _divide(num_bytes: float | None, count: int) -> float | None:
    return None if num_bytes is None else num_bytes / count
