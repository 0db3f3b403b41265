"""Files that this process holds open, to find those left open by a test.

Garbage of other tests that is collected in the meantime does not count.
"""

import collections
import contextlib
import gc
import os


def descriptors() -> collections.Counter[str]:
    """Return how often each open file is open, once garbage is collected.

    Garbage matters because an error's traceback holds open files.
    """
    gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found
