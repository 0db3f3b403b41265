"""What there is to run on: a GPU and its memory, host memory as several files tell it, disks.

It is looked up once, by a process that ends: whoever starts JAX on a GPU takes memory of it, which
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
"""The share of a device's memory that workers of large steps take (XLA_PYTHON_CLIENT_MEM_FRACTION).
"""
SPARE = 12 * GIB
"""Bytes of host memory that are left free beside what is pinned: for the system, the process itself
and its page tables.
"""
OVER_NEED = 1.05
"""How far XLA's pool of pinned memory may grow over what a program keeps there: it rounds and
fragments.
"""
LEAST_POOL = 4
"""GiB of the pool of a process whose programs keep nothing, or little, in host memory."""
_MEMINFO = pathlib.Path("/proc/meminfo")
_GROUPS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The limit of the control group that a container sees as its root, in versions 2 and 1."""
_UNLIMITED = 1 << 60
"""Bytes from which on a limit is none: version 1 prints a number near 2**63."""
_PAGE = 4096
_PATIENCE = 20.0
"""Seconds after which `grow` touches no more memory."""
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
    """What runs are fitted to.

    Attributes:
      platform: "gpu" or "cpu".
      device_kind: as JAX names it.
      device_bytes: that a program can get; None where the device does not say.
      host_bytes: that all processes together can get: as --host-memory says, else the control
        group's limit or MemTotal.
      pool_gib: the limit of XLA's pool that the user set, or None.
    """

    platform: str
    device_kind: str
    device_bytes: int | None
    host_bytes: int | None
    pool_gib: int | None

    @property
    def key(self) -> str:
        """Of what was measured: the device's name and the version of jax."""
        return f"{self.device_kind}, jax {importlib.metadata.version('jax')}"

    def pool(self, needed: float) -> int:
        """Return the limit in GiB of the pool of a process that keeps so many bytes in pinned
        memory.

        The pool grows by pieces that double, and its last piece takes all that the limit leaves. So
        the limit is what will be pinned, and it is not above what is needed; nor above what the
        user set, or what the host has.
        """
        limits = [max(LEAST_POOL, math.ceil(needed * OVER_NEED / GIB))]
        limits += [] if self.pool_gib is None else [self.pool_gib]
        limits += [] if self.host_bytes is None else [max(1, (self.host_bytes - SPARE) // GIB)]
        return min(limits)


def look(host_memory: int | None) -> Machine:
    """Look at this machine.

    Args:
      host_memory: bytes that the host has, as the user says; None: what the system says.

    Raises:
      RuntimeError: JAX does not start.
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
    """Return a machine that is not there, with one GPU of a name in `zerojax.aot.CHIPS`."""
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
    """Return an entry of /proc/meminfo in bytes, or None."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def group_limit() -> int | None:
    """Return the bytes that this process's control group may take, or None."""
    for path in _GROUPS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
        if limit < _UNLIMITED:
            return limit
    return None


def host_limit() -> int | None:
    """Return the bytes of host memory that there are, or None.

    A virtual machine may add memory as it is taken: its MemTotal then is below what its control
    group is promised. The larger one of both is not believed: a limit above what a machine has says
    nothing of it. `--host-memory` says what there will be.
    """
    return min(
        (size for size in (meminfo("MemTotal"), group_limit()) if size is not None), default=None
    )


def told(size: int | None) -> str:
    """Return bytes in words."""
    return "not told" if size is None else f"{size / GIB:.4g} GiB"


def grow(
    size: int, threads: int | None = None, seconds: float = _PATIENCE
) -> tuple[int, int | None]:
    """Touch host memory page by page, and give it back.

    A machine that adds memory as it is taken has it from then on. The kernel clears each page, at a
    few GB/s a thread.

    Args:
      size: bytes to touch.
      threads: that touch them; one a core by default.
      seconds: after which no more is touched.

    Returns:
      The bytes that were touched, and MemTotal while they were held.
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
            piece[::_PAGE] = 1  # numpy lets other threads run meanwhile
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
    """Say whether a compiled program fits.

    Args:
      name: of the program.
      context: what there is.
      device: bytes of the device, by the compiler's count.
      pinned: bytes that it keeps in XLA's pool of pinned memory.
      beside: bytes that callbacks pin by themselves.
    """
    pool = max(LEAST_POOL * GIB, math.ceil(OVER_NEED * pinned / GIB) * GIB)
    device_most, host_most = context.device_bytes, context.host_bytes
    fits = (device_most is None or device <= device_most) and (
        host_most is None or pool + beside <= host_most - SPARE
    )
    return Row(
        f"{name}: device, host, pool",
        f"{told(device)} of {told(device_most)}; {told(pinned + beside)} of {told(host_most)}; {told(pool)}",
        f"within the memory of {context.chip} and host",
        fits,
        {"device": float(device), "host": float(pinned + beside), "pool": float(pool)},
    )


def check_machine(context: Context) -> Iterator[Row]:
    """Say what there is, and grow host memory where the user says that there is more than the
    system does.
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
    text = f"MemTotal {told(total)}, MemAvailable {told(meminfo('MemAvailable'))}, control group {told(group)}"
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
        text = f"MemTotal {told(after)} while {told(held)} were held, of {told(wanted)} that were wanted"
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
    """Say where XLA may find the assembler of CUDA: on PATH, or in a wheel of NVIDIA's."""
    if shutil.which("ptxas"):
        return "found on PATH"
    spec = importlib.util.find_spec("nvidia")  # a namespace, with a folder for each wheel
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        if any(pathlib.Path(folder).glob("*/bin/ptxas")):
            return "found in a wheel"
    return "neither on PATH nor in a wheel"


def _driver_rows() -> Iterator[Row]:
    """Say what nvidia-smi tells of the link."""
    if shutil.which("nvidia-smi") is None:
        return
    fields = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.max.sm,power.limit"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done: Any = subprocess.run(query, capture_output=True, text=True, check=False)
    yield Row(
        "driver; link now, at most, lanes; clock; power",
        done.stdout.strip().split("\n")[0] or done.stderr.strip()[:200],
    )
