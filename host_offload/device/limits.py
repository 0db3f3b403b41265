"""Limits of pinned host memory: checks before an allocation, and explanations after a failed one.

XLA's GPU client takes pinned memory from one pool per process. Regardless of the machine's memory,
the pool grows on demand up to XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB GiB. If the variable is unset, the
limit is 64 GiB, or 16 GiB if XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE allocates the full pool
immediately. Both variables are read when JAX starts. A CPU client has no pool. Both clients are
also limited by the memory that the machine has left, which all its processes share: MemAvailable of
/proc/meminfo, if that file exists.
"""

import contextlib
import math
import os
import pathlib
import re

import jax

HOST_VARIABLE = "ZEROJAX_HOST_MEMORY_GB"
"""Variable with the GiB that the machine will have, if its kernel reports less.

A virtual machine may get its memory only as it uses it.
"""
LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_MEMINFO = pathlib.Path("/proc/meminfo")
_GROUP_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Memory limits of the control group that a container sees as its root: version 2, and 1."""
_GIB = 1 << 30
_EXHAUSTED = re.compile(rf"RESOURCE_EXHAUSTED|pinned host|{LIMIT_VARIABLE}")
_ON_DEVICE = re.compile(r"\bGPU_\w*_bfc\b")  # names of the allocators of device memory


def pinned_pool_bytes(platform: str | None = None) -> int | None:
    """Return XLA's limit of pinned host memory per process, in bytes; None if there is no limit.

    Args:
      platform: "gpu" (or "cuda", "rocm") or "cpu"; by default, the platform of JAX's default
        backend.
    """
    if _platform(platform) != "gpu":
        return None
    default = 16 if os.environ.get(_PREALLOCATE, "").lower() in ("1", "true") else 64
    try:
        return int(os.environ.get(LIMIT_VARIABLE, default)) * _GIB
    except ValueError:  # XLA logs that it cannot read the variable, and takes its default
        return default * _GIB


def available_bytes() -> int | None:
    """Return the bytes that the machine can still give without swapping; None if unknown.

    If `HOST_VARIABLE` promises more memory than the kernel reports, the promise counts.

    Raises:
      ValueError: the variable is not a number.
    """
    available = _meminfo("MemAvailable")
    total = _meminfo("MemTotal")
    try:
        promised = float(os.environ.get(HOST_VARIABLE, 0)) * _GIB
    except ValueError:
        raise ValueError(
            f"{HOST_VARIABLE}={os.environ[HOST_VARIABLE]!r}: a number of GiB is needed"
        ) from None
    if available is None or total is None:
        return available
    return max(available, int(promised) - (total - available))


def _meminfo(name: str) -> int | None:
    """Return an entry of /proc/meminfo in bytes, or None."""
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{name}:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE):
            return int(match.group(1)) << 10
    return None


def host_bytes() -> int | None:
    """Return the bytes of memory of the machine or of its control group, whichever is less.

    The result is None if neither is known.
    """
    total = _meminfo("MemTotal")
    limits = [] if total is None else [total]
    for path in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int(path.read_text()))
    return min(limits, default=None)


def check_host_memory(num_bytes: int, platform: str | None = None) -> None:
    """Refuse an allocation of pinned host memory that cannot succeed.

    Passing the check guarantees nothing: the pool may be partly used, and other processes allocate
    memory too.

    Args:
      num_bytes: bytes that this process is about to allocate.
      platform: platform of the client, as for `pinned_pool_bytes`.

    Raises:
      RuntimeError: the bytes exceed the pool or the memory that the machine has left.
    """
    pool = pinned_pool_bytes(platform)
    available = available_bytes()
    limits = [limit for limit in (pool, available) if limit is not None]
    if limits and num_bytes > min(limits):
        raise RuntimeError(_explain(num_bytes, pool, available))


def host_memory_error(
    error: Exception, num_bytes: int, platform: str | None = None
) -> RuntimeError | None:
    """Explain an error that JAX raised while it allocated pinned host memory.

    Args:
      error: error that JAX raised.
      num_bytes: bytes that were requested.
      platform: platform of the client, as for `pinned_pool_bytes`.

    Returns:
      The error to raise from `error`; None if `error` has another cause, such as a lack of device
      memory.
    """
    text = str(error)
    # XLA reports both memories as RESOURCE_EXHAUSTED: only the name of the allocator shows which
    # one is full.
    is_exhausted = isinstance(error, RuntimeError) and _EXHAUSTED.search(text)
    if not is_exhausted or _ON_DEVICE.search(text):
        return None
    return RuntimeError(_explain(num_bytes, pinned_pool_bytes(platform), available_bytes()))


def _platform(platform: str | None) -> str:
    name = jax.default_backend() if platform is None else platform
    return "gpu" if name in ("gpu", "cuda", "rocm") else name


def _explain(num_bytes: int, pool: int | None, available: int | None) -> str:
    clauses = [f"no room for {_gib(num_bytes)} of pinned host memory in this process"]
    repair = "keep less on the host: more devices, a smaller model, or the 'nvme' tier"
    if available is not None:
        clauses.append(f"the machine has {_gib(available)} available")
    if pool is not None:
        clauses.append(f"XLA's pinned pool holds {_gib(pool)} a process ({LIMIT_VARIABLE})")
        if available is None or num_bytes <= available:
            need = math.ceil(max(num_bytes, pool) / _GIB * 1.25)  # the pool rounds and fragments
            repair = f"set {LIMIT_VARIABLE}={need} before JAX starts, or {repair}"
    return f"{', '.join(clauses)}; {repair}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / _GIB:.1f} GiB)"
