"""Read a process's use of memory and disk on Linux.

Uses only the standard library, so that it runs in every contender's environment.
"""

import pathlib
import resource


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux reports KiB


def disk_bytes() -> tuple[int, int] | None:
    """Return the bytes that this process has read from disks and written to them so far.

    Reads from the page cache do not count; writes to it do. The result is None if the system has no
    counters.
    """
    counters = pathlib.Path("/proc/self/io")
    if not counters.exists():
        return None
    values = dict(line.split(": ") for line in counters.read_text().splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])
