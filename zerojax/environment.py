"""The environment of a run, for a bug report or a first look: versions, devices, memory and disk.

`zerojax env` prints it. Nothing is measured, and the only file written is a temporary one in
`swap_dir`, which shows whether its file system takes direct I/O.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import resource
import tempfile

import jax

from host_offload.device import (
    HOST_VARIABLE,
    LIMIT_VARIABLE,
    available_bytes,
    host_bytes,
    pinned_pool_bytes,
)

_PACKAGES = (
    "zerojax",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "numba",
    "transformers",
)
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_MOUNTS = pathlib.Path("/proc/self/mounts")


def report_environment(swap_dir: str | None = None) -> str:
    """Return what a bug report about this machine should say, as a table of text.

    Args:
      swap_dir: an existing folder on the disk that will be swapped to; None leaves the disk out.

    Raises:
      ValueError: `swap_dir` is not a folder.
    """
    rows = read_environment(swap_dir)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def read_environment(swap_dir: str | None = None) -> list[tuple[str, str]]:
    """Return (name, value) of each fact of the environment, as `report_environment` shows them.

    Args:
      swap_dir: an existing folder on the disk that will be swapped to; None leaves the disk out.

    Raises:
      ValueError: `swap_dir` is not a folder.
    """
    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append((package, importlib.metadata.version(package)))
    rows += _devices()
    rows += _memory()
    if swap_dir is not None:
        rows += _disk(swap_dir)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", LIMIT_VARIABLE, HOST_VARIABLE):
        if name in os.environ:
            rows.append((name, os.environ[name]))
    return rows


def _devices() -> list[tuple[str, str]]:
    """Return the devices of this process by kind, with their memory, and NVIDIA's driver."""
    counts: dict[tuple[str, str], int] = {}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        memory = "" if limit is None else f", {_size(limit)} for JAX"
        key = (device.platform, f"{device.device_kind}{memory}")
        counts[key] = counts.get(key, 0) + 1
    rows = [("devices", f"{n} x {kind} ({name})") for (name, kind), n in counts.items()]
    if jax.process_count() > 1:
        rows.append(("process", f"{jax.process_index()} of {jax.process_count()}"))
    with contextlib.suppress(OSError):
        rows.append(("driver", _DRIVER.read_text().splitlines()[0].strip()))
    return rows


def _memory() -> list[tuple[str, str]]:
    """Return host memory, and the limits of memory that is page-locked."""
    total = host_bytes()
    free = available_bytes()
    pool = pinned_pool_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    usable_cores = len(os.sched_getaffinity(0))
    if pool is None:
        pinned = "no limit on this platform"
    else:
        pinned = f"{_size(pool)} per process ({LIMIT_VARIABLE})"
    return [
        ("cores", f"{usable_cores} usable of {os.cpu_count()}"),
        ("host memory", f"{_size(total)}, {_size(free)} available"),
        ("pinned memory", pinned),
        ("ulimit -l", f"{_limit(soft)}, hard limit {_limit(hard)}"),
    ]


def _disk(swap_dir: str) -> list[tuple[str, str]]:
    """Return the file system of a folder, its free bytes, and whether it takes direct I/O."""
    folder = os.path.realpath(os.path.expanduser(swap_dir))
    if not os.path.isdir(folder):
        raise ValueError(f"swap_dir={swap_dir!r} is not a folder: create it, or name another")
    usage = os.statvfs(folder)
    mount, kind = _find_mount(folder)
    return [
        ("swap_dir", folder),
        ("file system", f"{kind}, mounted at {mount}"),
        ("free on disk", _size(usage.f_bavail * usage.f_frsize)),
        ("direct I/O", _direct_io(folder)),
    ]


def _find_mount(folder: str) -> tuple[str, str]:
    """Return the mount point that holds a folder, and its file system's type."""
    longest = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            _, mount, kind, *_ = line.split()
            # The kernel writes a space in a path as \040.
            mount = mount.encode().decode("unicode_escape")
            is_above = folder == mount or folder.startswith(mount.rstrip("/") + "/")
            if is_above and len(mount) >= len(longest[0]):
                longest = (mount, kind)
    return longest


def _direct_io(folder: str) -> str:
    """Return whether a file in a folder can be opened for direct I/O, and why not."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="zerojax-env-") as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        return f"no ({error.strerror}): transfers go through the page cache"
    return "yes"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else _size(value)


def _size(num_bytes: int | None) -> str:
    """Return bytes in the unit that suits them."""
    if num_bytes is None:
        return "unknown"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
