"""Files that this process holds open: to find those that a test left, whatever other tests' garbage
closes beside it.
"""

import collections
import contextlib
import gc
import os


def descriptors() -> collections.Counter[str]:
    """Return the files that are open, and how often each is, once garbage is collected: errors'
    stacks hold what was open.
    """
    gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found
