"""Describe what a run runs on: memory of each tier, hardware, versions."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.machines import format_bytes, probe_memories

_PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "numpy")


def capacity_of(mesh: Mesh, swap_dir: str | None) -> dict[str, float | None]:
    """Return the bytes of each tier that one device may use.

    A device's share of pinned host memory and of free disk space is its part of this process's
    node. Call it before the program makes its files.
    """
    devices = mesh.local_devices
    memories, _ = probe_memories(devices)
    pinned = memories.get("pinned_bytes")
    free = shutil.disk_usage(swap_dir).free if swap_dir and os.path.isdir(swap_dir) else None
    shares = {"pinned_host": pinned, "nvme": free}
    return {"device": memories.get("device_bytes")} | {
        t: n and n / len(devices) for t, n in shares.items()
    }


def hardware_of(mesh: Mesh) -> dict[str, str]:
    """Return a description of the run's devices and of this host."""
    device, memories = mesh.devices.flat[0], probe_memories(mesh.local_devices)[0]
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    found = {
        "devices": f"{mesh.size} x {device.device_kind} ({device.platform}), {axes}",
        "processes": str(jax.process_count()),
        "host": f"{platform.node()}, {os.cpu_count()} CPUs, {platform.machine()}",
    }
    if memories["host_bytes"]:
        found["host memory"] = format_bytes(memories["host_bytes"])
    return found


def peaks_of(devices: Iterable[Any]) -> dict[str, str]:
    """Return the peak memory use so far: of the devices that report it, and of this process."""
    peaks = [
        stats["peak_bytes_in_use"]
        for d in devices
        if "peak_bytes_in_use" in (stats := d.memory_stats() or {})
    ]
    found = {"most memory in use on a device": format_bytes(max(peaks))} if peaks else {}
    return found | {
        "most resident memory of this process": format_bytes(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers depend on."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source"
    return found
