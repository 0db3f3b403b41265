"""Measure, for a second, with how many transfers at once, of how many bytes, a folder's disk is
fastest.

One file is written, and read again with each pair of settings in turn until the time is over; the
best rate of a pair counts, since other work on the machine only slows it down. The result is kept
for the process, and in a small file beside the folder for later ones, until the disk or the number
of cores changes. Others may write beside the folder: a file that this user did not write, or
another can, is not read, and none is ever written through a name that was there before.
"""

import concurrent.futures
import dataclasses
import functools
import json
import logging
import os
import pathlib
import stat
import tempfile
import time

import numpy as np

from host_offload.device import allocate
from host_offload.disk.direct_file import DirectFile
from host_offload.disk.record_format import BLOCK_BYTES
from host_offload.disk.regular_file import open_regular

logger = logging.getLogger(__name__)
_MIB = 1 << 20
_PROBE_BYTES = 64 * _MIB
_MOST_THREADS, _MOST_BYTES = 256, 1 << 30
_CACHE, _MOST_CACHE_BYTES = "zerojax-swap-io.json", 4096


@dataclasses.dataclass(frozen=True)
class IoSettings:
    """How a folder is read and written fastest; `tune` finds it.

    Attributes:
      num_threads: transfers at once.
      block_bytes: bytes of each at most, a multiple of 4096.
    """

    num_threads: int
    block_bytes: int

    def __post_init__(self) -> None:
        are_whole = isinstance(self.num_threads, int) and isinstance(self.block_bytes, int)
        fits = (
            1 <= self.num_threads <= _MOST_THREADS
            and BLOCK_BYTES <= self.block_bytes <= _MOST_BYTES
        )
        if not are_whole or not fits or self.block_bytes % BLOCK_BYTES:
            raise ValueError(
                f"num_threads={self.num_threads}, block_bytes={self.block_bytes}: 1 to {_MOST_THREADS}, and a multiple of "
                f"{BLOCK_BYTES} up to {_MOST_BYTES} are needed"
            )


DEFAULT = IoSettings(num_threads=4, block_bytes=8 * _MIB)
"""What reads at the full speed of most NVMe disks; the probe begins with it, and another must be 5
% faster.
"""
_CANDIDATES = (
    DEFAULT,
    *(s for n in (1, 2, 4, 8) for b in (1, 4, 8, 16) if (s := IoSettings(n, b * _MIB)) != DEFAULT),
)


def tune(folder_path: str, seconds: float = 1.0) -> IoSettings:
    """Return the settings with which a folder is read fastest, measured now or before.

    Args:
      folder_path: of a `SwapFolder`. The probe's file of 64 MiB is made in it, and removed; the
        answer is kept beside it.
      seconds: that the probe takes, about. Where it fails, for want of space or for any reason,
        four transfers of 8 MiB are the answer, and the reason is logged.
    """
    path = os.path.abspath(folder_path)
    try:
        return _tune(path, _identity(path), seconds)
    except (OSError, MemoryError) as error:
        logger.warning(
            "the speed of %s was not measured (%s): it is read and written with %s threads, %s bytes at a time",
            path,
            error,
            DEFAULT.num_threads,
            DEFAULT.block_bytes,
        )
        return DEFAULT


@functools.cache
def _tune(path: str, identity: tuple[int, ...], seconds: float) -> IoSettings:
    cache = pathlib.Path(path).parent / _CACHE
    settings = _load(cache, identity)
    if settings is None:
        settings, rate = _probe(pathlib.Path(path) / f"probe-{os.getpid()}", seconds)
        logger.info("%s reads %.2f GB/s with %s", path, rate / 1e9, settings)
        _save(cache, identity, settings)
    return settings


def _identity(path: str) -> tuple[int, ...]:
    """Return values that differ between disks and machines."""
    space = os.statvfs(path)
    return os.stat(path).st_dev, space.f_blocks * space.f_frsize, os.cpu_count() or 1


def _load(path: pathlib.Path, identity: tuple[int, ...]) -> IoSettings | None:
    try:
        with open(open_regular(str(path), os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(
                    f"it is not this user's alone to write (uid {status.st_uid}, mode {status.st_mode:o})"
                )
            entry = json.loads(file.read(_MOST_CACHE_BYTES))
        settings = IoSettings(entry["num_threads"], entry["block_bytes"])
        # Numbers that no probe can have found are not taken from a file either.
        if entry["identity"] == list(identity) and settings in _CANDIDATES:
            return settings
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.debug("%s has no settings: %s", path, error)
    return None


def _save(path: pathlib.Path, identity: tuple[int, ...], settings: IoSettings) -> None:
    new = None
    try:
        # A new file of a name that nobody guesses. Renamed, it is there whole or not at all, and a
        # link of that name goes.
        fd, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with open(fd, "w") as file:
            json.dump({"identity": list(identity), **dataclasses.asdict(settings)}, file)
        os.replace(new, path)
    except OSError as error:
        logger.debug("%s was not kept: %s", path, error)
        if new is not None:
            pathlib.Path(new).unlink(missing_ok=True)


def _probe(path: pathlib.Path, seconds: float) -> tuple[IoSettings, float]:
    """Return the best settings and their rate, in bytes a second."""
    deadline = time.monotonic() + seconds
    buffer = allocate(_PROBE_BYTES)
    best: dict[IoSettings, float] = {}
    try:
        with concurrent.futures.ThreadPoolExecutor(max(s.num_threads for s in _CANDIDATES)) as pool:
            # Writing the file may take a third of the time.
            size = _fill(path, buffer, deadline - seconds / 3 * 2)
            while True:
                for settings in _CANDIDATES:
                    rate = _rate(path, buffer[:size], settings, pool)
                    best[settings] = max(best.get(settings, 0.0), rate)
                    if time.monotonic() > deadline:
                        winner = max(best, key=lambda s: best[s])
                        # A gain of less than 5 % is noise: keep the default.
                        winner = winner if best[winner] > 1.05 * best[DEFAULT] else DEFAULT
                        return winner, best[winner]
    finally:
        path.unlink(missing_ok=True)


def _fill(path: pathlib.Path, buffer: np.ndarray, deadline: float) -> int:
    """Write the file, on a slow disk only as much as it takes until the deadline; return its bytes."""
    block = DEFAULT.block_bytes
    with DirectFile(str(path), writes=True) as file:
        for start in range(0, buffer.nbytes, block):
            file.write(buffer[start : start + block], start)
            if time.monotonic() > deadline:
                return start + block
    return buffer.nbytes


def _rate(
    path: pathlib.Path,
    buffer: np.ndarray,
    settings: IoSettings,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> float:
    starts = iter(range(0, buffer.nbytes, settings.block_bytes))  # next() of it is atomic
    with DirectFile(str(path), writes=False) as file:

        def read_blocks() -> None:
            for start in starts:
                file.read(buffer[start : start + settings.block_bytes], start)

        began = time.monotonic()
        jobs = [pool.submit(read_blocks) for _ in range(settings.num_threads)]
        for job in jobs:
            job.result()
        return buffer.nbytes / (time.monotonic() - began)
