"""Describe the machine: a GPU and its memory, the limits of host memory, disks.

A separate process looks up the GPU and ends: any process that starts JAX on a GPU takes memory that
workers then lack.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_checks.parts import POOL, Context
from gpu_checks.rows import Row

GIB = 1 << 30
SHARE = 0.92
"""Share of device memory for workers of large steps (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
SPARE = 12 * GIB
"""Bytes of host memory left free in addition to pinned memory.

They are for the system, the process itself and its page tables.
"""
OVER_NEED = 1.05
"""Limit of XLA's pool of pinned memory, over what a program keeps there.

The pool rounds sizes and fragments.
"""
LEAST_POOL = 4
"""GiB in the pool of a process whose programs keep little or nothing in host memory."""
_MEMINFO = pathlib.Path("/proc/meminfo")
_GROUPS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the memory limit of a container's control group, in versions 2 and 1."""
_UNLIMITED = 1 << 60
"""Bytes from which a limit means no limit: version 1 prints a number near 2**63."""
_PAGE = 4096
_PATIENCE = 20.0
"""Seconds after which `grow` stops touching memory."""
_LOOK = f"""
import json, os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "{SHARE}"
import jax
device = jax.devices()[0]
stats = device.memory_stats() or {{}}
print("LOOK " + json.dumps([jax.default_backend(), device.device_kind, stats.get("bytes_limit")]))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine that runs are fitted to.

    Attributes:
      platform: "gpu" or "cpu".
      device_kind: JAX's name of the device.
      device_bytes: device memory that a program can get; None if the device does not report it.
      host_bytes: host memory for all processes together: --host-memory, or else the smaller of the
        control group's limit and MemTotal; None if unknown.
      pool_gib: limit in GiB of XLA's pool that the user set, or None.
    """

    platform: str
    device_kind: str
    device_bytes: int | None
    host_bytes: int | None
    pool_gib: int | None

    @property
    def key(self) -> str:
        """Key of measured rates: the device's name and the version of jax."""
        return f"{self.device_kind}, jax {importlib.metadata.version('jax')}"

    def pool(self, needed: float) -> int:
        """Return the limit in GiB of the pool of a process that pins `needed` bytes.

        The pool grows by pieces that double in size, and its last piece takes everything up to the
        limit. The limit is therefore the amount that will be pinned. It is no larger than the need,
        the limit that the user set, and the host's memory.
        """
        limits = [max(LEAST_POOL, math.ceil(needed * OVER_NEED / GIB))]
        limits += [] if self.pool_gib is None else [self.pool_gib]
        limits += [] if self.host_bytes is None else [max(1, (self.host_bytes - SPARE) // GIB)]
        return min(limits)


def look(host_memory: int | None) -> Machine:
    """Return a description of this machine.

    Args:
      host_memory: bytes of host memory that the user claims; None uses the system's figures.

    Raises:
      RuntimeError: if JAX does not start.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False
    )
    said = next((line for line in done.stdout.splitlines() if line.startswith("LOOK ")), None)
    if said is None:
        raise RuntimeError(f"JAX does not start: {done.stderr.strip()[-400:]}")
    platform, kind, limit = json.loads(said.removeprefix("LOOK "))
    given = os.environ.get(POOL, "")
    return Machine(
        platform="cpu" if platform == "cpu" else "gpu",
        device_kind=kind,
        device_bytes=limit,
        host_bytes=host_memory or host_limit(),
        pool_gib=int(given) if given.isdigit() else None,
    )


def described(chip: str, host_memory: int | None) -> Machine:
    """Return a hypothetical machine with one GPU, named as in `zerojax.aot.CHIPS`."""
    from zerojax.aot import CHIPS

    of = CHIPS[chip]
    room = int(SHARE * of.allocatable_bytes)
    return Machine(
        platform="gpu",
        device_kind=of.device_kinds[0],
        device_bytes=room,
        host_bytes=host_memory or 128 * GIB,
        pool_gib=None,
    )


def meminfo(name: str) -> int | None:
    """Return an entry of /proc/meminfo in bytes, or None if there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def group_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes, or None."""
    for path in _GROUPS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # "max" means no limit
            continue
        if limit < _UNLIMITED:
            return limit
    return None


def host_limit() -> int | None:
    """Return the bytes of host memory that the system reports, or None.

    A virtual machine may add memory as it is taken, so its MemTotal can be below its control
    group's limit. The smaller of the two is used, since a limit above the memory of the machine
    says nothing about that memory. `--host-memory` sets what will be available.
    """
    return min(
        (size for size in (meminfo("MemTotal"), group_limit()) if size is not None), default=None
    )


def told(size: int | None) -> str:
    """Return a number of bytes as text."""
    return "not told" if size is None else f"{size / GIB:.4g} GiB"


def grow(
    size: int, threads: int | None = None, seconds: float = _PATIENCE
) -> tuple[int, int | None]:
    """Touch host memory page by page, then free it.

    A machine that adds memory as it is taken has this memory from then on. The kernel clears each
    page, at a few GB/s per thread.

    Args:
      size: bytes to touch.
      threads: number of threads that touch them; one per core by default.
      seconds: time after which no more is touched.

    Returns:
      The number of touched bytes, and MemTotal in bytes while they were held.
    """
    pages, ends = mmap.mmap(-1, size), time.monotonic() + seconds
    step = -(-size // (threads or len(os.sched_getaffinity(0))))
    touched: list[int] = []

    def touch(start: int) -> None:
        of_pages, stop = np.frombuffer(pages, np.uint8), min(size, start + step)
        for at in range(start, stop, 1 << 28):
            if time.monotonic() > ends:
                return
            piece = of_pages[at : min(stop, at + (1 << 28))]
            piece[::_PAGE] = 1  # numpy lets other threads run in the meantime
            touched.append(piece.nbytes)

    workers = [threading.Thread(target=touch, args=(start,)) for start in range(0, size, step)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total = meminfo("MemTotal")
    pages.close()
    return sum(touched), total


def capacity_row(name: str, context: Context, *, device: int, pinned: int, beside: int) -> Row:
    """Report whether a compiled program fits into device and host memory.

    Args:
      name: name of the program.
      context: the context with the memory limits.
      device: bytes of device memory, by the compiler's count.
      pinned: bytes that the program keeps in XLA's pool of pinned memory.
      beside: bytes that callbacks pin outside the pool.
    """
    pool = max(LEAST_POOL * GIB, math.ceil(OVER_NEED * pinned / GIB) * GIB)
    device_most, host_most = context.device_bytes, context.host_bytes
    fits = (device_most is None or device <= device_most) and (
        host_most is None or pool + beside <= host_most - SPARE
    )
    return Row(
        f"{name}: device, host, pool",
        f"{told(device)} of {told(device_most)}; {told(pinned + beside)} of {told(host_most)}; "
        f"{told(pool)}",
        f"within the memory of {context.chip} and host",
        fits,
        {"device": float(device), "host": float(pinned + beside), "pool": float(pool)},
    )


def check_machine(context: Context) -> Iterator[Row]:
    """Report the machine's memory, cores, disks and tools.

    If the user claims more host memory than the system reports, touch it first to make it grow.
    """
    import jax

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    yield Row(
        "device",
        f"{device.device_kind}, {told(limit)} for a program",
        values={"bytes_limit": float(limit or 0)},
    )
    total, group = meminfo("MemTotal"), group_limit()
    text = (
        f"MemTotal {told(total)}, MemAvailable {told(meminfo('MemAvailable'))}, "
        f"control group {told(group)}"
    )
    text += f"; steps are fitted to {told(context.host_bytes)}"
    if group is not None and context.host_bytes is not None and group > 1.05 * context.host_bytes:
        text += f". If memory is added as it is taken, give --host-memory {group // GIB}"
    yield Row("host memory", text, values={"total": float(total or 0), "group": float(group or 0)})
    if (
        context.host_bytes is not None
        and total is not None
        and total < 0.95 * context.host_bytes
        and not context.sizes.few
    ):
        wanted = context.host_bytes - SPARE
        held, after = grow(wanted)
        text = (
            f"MemTotal {told(after)} while {told(held)} were held, "
            f"of {told(wanted)} that were wanted"
        )
        yield Row(
            "host memory, taken", text, values={"total": float(after or 0), "held": float(held)}
        )
    import resource

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit_text = "unlimited" if locked == resource.RLIM_INFINITY else told(locked)
    cores = len(os.sched_getaffinity(0))
    yield Row(
        "cores, memory that may be locked", f"{cores}; {limit_text}", values={"cores": float(cores)}
    )
    for name, path in (("disk", context.swap_dir), ("RAM disk", context.ram_dir)):
        free = shutil.disk_usage(path).free if pathlib.Path(path).is_dir() else None
        yield Row(
            f"{name}, free",
            "not there" if free is None else told(free),
            values={"bytes": float(free or 0)},
        )
    yield Row("ptxas", _where_ptxas())
    yield Row("nvidia-smi", "found" if shutil.which("nvidia-smi") else "not on PATH")
    yield from _driver_rows()


def _where_ptxas() -> str:
    """Return where XLA may find CUDA's assembler: on PATH, or in one of NVIDIA's wheels."""
    if shutil.which("ptxas"):
        return "found on PATH"
    spec = importlib.util.find_spec("nvidia")  # a namespace package, with a folder per wheel
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        if any(pathlib.Path(folder).glob("*/bin/ptxas")):
            return "found in a wheel"
    return "neither on PATH nor in a wheel"


def _driver_rows() -> Iterator[Row]:
    """Report nvidia-smi's figures of the driver and the link."""
    if shutil.which("nvidia-smi") is None:
        return
    fields = (
        "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
        "clocks.max.sm,power.limit"
    )
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done: Any = subprocess.run(query, capture_output=True, text=True, check=False)
    yield Row(
        "driver; link now, at most, lanes; clock; power",
        done.stdout.strip().split("\n")[0] or done.stderr.strip()[:200],
    )
