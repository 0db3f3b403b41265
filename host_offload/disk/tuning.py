"""Measure, for about a second, how many concurrent transfers of which size suit a disk best.

A file is written, then read with each pair of settings in turn until the time is over. The best
rate of a pair counts, because other work on the machine can only slow it down. The result is kept
for this process, and in a small file next to the folder for later processes, until the disk or the
number of cores changes. Other users may be able to write next to the folder, so the file is read
only if this user owns it and nobody else can write it, and it is always written as a new file,
never through an existing name.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
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
_MOST_THREADS = 256
_MOST_BYTES = 1 << 30
_CACHE = "zerojax-swap-io.json"
_MOST_CACHE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class IoSettings:
    """Settings for reading and writing a folder; `tune` finds the fastest.

    Attributes:
      num_threads: number of concurrent transfers, 1 to 256.
      block_bytes: maximum bytes per transfer, a multiple of 4096, up to 1 GiB.

    Raises:
      ValueError: a value is out of range.
    """

    num_threads: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Check the values."""
        are_integers = isinstance(self.num_threads, int) and isinstance(self.block_bytes, int)
        fits = (
            1 <= self.num_threads <= _MOST_THREADS
            and BLOCK_BYTES <= self.block_bytes <= _MOST_BYTES
        )
        if not are_integers or not fits or self.block_bytes % BLOCK_BYTES:
            raise ValueError(
                f"num_threads={self.num_threads}, block_bytes={self.block_bytes}: 1 to "
                f"{_MOST_THREADS}, and a multiple of {BLOCK_BYTES} up to {_MOST_BYTES} are needed"
            )


DEFAULT = IoSettings(num_threads=4, block_bytes=8 * _MIB)
"""Settings that reach the full read speed of most NVMe disks.

The probe starts with them; other settings must be 5 % faster to be chosen.
"""
_GRID = [
    IoSettings(num_threads, mib * _MIB)
    for num_threads, mib in itertools.product((1, 2, 4, 8), (1, 4, 8, 16))
]
_CANDIDATES = tuple(dict.fromkeys([DEFAULT, *_GRID]))


def tune(folder_path: str, seconds: float = 1.0) -> IoSettings:
    """Return the settings with which a folder is read fastest, measured now or earlier.

    If the probe fails, for lack of space or any other reason, the result is four concurrent
    transfers of 8 MiB, and the reason is logged.

    Args:
      folder_path: path of a `SwapFolder`. The probe creates a file of 64 MiB in it and removes it;
        the result is kept in a file next to the folder.
      seconds: approximate duration of the probe, in seconds.
    """
    path = os.path.abspath(folder_path)
    try:
        return _tune(path, _identity(path), seconds)
    except (OSError, MemoryError) as error:
        logger.warning(
            "the speed of %s was not measured (%s): it is read and written with %s threads, "
            "%s bytes at a time",
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
                    "other users own it or can write it "
                    f"(uid {status.st_uid}, mode {status.st_mode:o})"
                )
            entry = json.loads(file.read(_MOST_CACHE_BYTES))
        settings = IoSettings(entry["num_threads"], entry["block_bytes"])
        # Only accept settings that a probe can have found.
        if entry["identity"] == list(identity) and settings in _CANDIDATES:
            return settings
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.debug("%s has no settings: %s", path, error)
    return None


def _save(path: pathlib.Path, identity: tuple[int, ...], settings: IoSettings) -> None:
    new = None
    try:
        # A new file with an unpredictable name. The rename makes it appear complete or not at all,
        # and replaces a link of the final name instead of following it.
        fd, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with open(fd, "w") as file:
            json.dump({"identity": list(identity), **dataclasses.asdict(settings)}, file)
        os.replace(new, path)
    except OSError as error:
        logger.debug("%s was not kept: %s", path, error)
        if new is not None:
            pathlib.Path(new).unlink(missing_ok=True)


def _probe(path: pathlib.Path, seconds: float) -> tuple[IoSettings, float]:
    """Return the best settings and their rate, in bytes per second."""
    deadline = time.monotonic() + seconds
    buffer = allocate(_PROBE_BYTES)
    best_rates: dict[IoSettings, float] = {}
    most_threads = max(settings.num_threads for settings in _CANDIDATES)
    try:
        with concurrent.futures.ThreadPoolExecutor(most_threads) as pool:
            # Writing the file may take a third of the time.
            size = _fill(path, buffer, deadline - seconds / 3 * 2)
            for settings in itertools.cycle(_CANDIDATES):
                rate = _rate(path, buffer[:size], settings, pool)
                best_rates[settings] = max(best_rates.get(settings, 0.0), rate)
                if time.monotonic() > deadline:
                    break
    finally:
        path.unlink(missing_ok=True)
    fastest = max(best_rates, key=lambda settings: best_rates[settings])
    # A gain of less than 5 % is noise: keep the default.
    if best_rates[fastest] <= 1.05 * best_rates[DEFAULT]:
        fastest = DEFAULT
    return fastest, best_rates[fastest]


def _fill(path: pathlib.Path, buffer: np.ndarray, deadline: float) -> int:
    """Write the file until it is full or the deadline has passed; return the bytes written."""
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
    starts = iter(range(0, buffer.nbytes, settings.block_bytes))  # its next() is atomic
    with DirectFile(str(path), writes=False) as file:

        def read_blocks() -> None:
            for start in starts:
                file.read(buffer[start : start + settings.block_bytes], start)

        began = time.monotonic()
        jobs = [pool.submit(read_blocks) for _ in range(settings.num_threads)]
        for job in jobs:
            job.result()
        return buffer.nbytes / (time.monotonic() - began)
