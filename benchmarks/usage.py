"""What a process has used, as Linux tells it: memory and disk.

Of the standard library, for every contender's environment.
"""

import pathlib
import resource


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had resident."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux tells KiB


def disk_bytes() -> tuple[int, int] | None:
    """Return what this process has read from disks and written to them until now; None where the
    system does not tell.

    What the page cache answers is not read from a disk; what goes into it is counted as written.
    """
    counters = pathlib.Path("/proc/self/io")
    if not counters.exists():
        return None
    values = dict(line.split(": ") for line in counters.read_text().splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])
