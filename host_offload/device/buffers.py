"""Host memory for records on their way between disk and device: a fixed ring of buffers, allocated
before step 1.

O_DIRECT pins the pages that it transfers to, one by one, so their size decides its speed: into
  pages of 2 MB a disk reads at
full speed, into pages of 4 KB at a third of it. Memory is therefore private and anonymous (shared
memory gets no huge pages), aligned to 2 MB, and touched when it is allocated. A ring has as many
buffers as the schedule has records in flight. When all of them are in use, a caller waits: a slow
disk makes the step slower, and never takes more memory.
"""

import ctypes
import functools
import logging
import mmap
import os
import resource
import threading
import time
from typing import Literal

import numpy as np

from host_offload.device.cuda_driver import driver

logger = logging.getLogger(__name__)
HUGE_BYTES = 2 << 20
PAGE_BYTES = 4096


def allocate(num_bytes: int) -> np.ndarray:
    """Return uint8[num_bytes] of private zeroed memory, aligned to 2 MB, in huge pages where the
    kernel has them.

    All pages are resident. The memory is freed with the last view of it.

    Raises:
      ValueError: num_bytes < 1.
      MemoryError: there is not enough memory.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: 1 or more is needed")
    multiple = (
        HUGE_BYTES if num_bytes >= HUGE_BYTES // 2 else PAGE_BYTES
    )  # room for the last huge page to be whole
    # mmap aligns to 4 KB only: one huge page more lets the buffer start at the next multiple of 2
    # MB.
    room = -(-num_bytes // multiple) * multiple + HUGE_BYTES
    try:
        # Python's default is MAP_SHARED, and shared anonymous memory never gets huge pages.
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for a buffer of {num_bytes} bytes: {error}; use fewer buffers, or more devices"
        ) from error
    # The advice must precede the first touch: the kernel chooses the size of a page when it is
    # faulted in.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: slower, nothing else
            logger.debug("this kernel has no transparent huge pages")
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    buffer = whole[start : start + num_bytes]
    # Fault every page in now, and not during the first transfers of step 1.
    buffer[::PAGE_BYTES] = 0
    return buffer


def lock_pages(buffer: np.ndarray) -> bool:
    """Lock a buffer's pages in memory (mlock), where the limit allows; return whether they are
    locked.

    They are unlocked when the memory is freed. The first refusal is logged.
    """
    try:
        libc = _libc()
        if libc.mlock(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes)) == 0:
            return True
        reason = os.strerror(ctypes.get_errno())
    except (OSError, AttributeError) as error:
        reason = str(error)
    # The limit is often 8 MB: that is a reason to warn, not to refuse to train.
    _warn_unlocked(buffer.nbytes, reason)
    return False


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_warned = threading.Event()


def _warn_unlocked(num_bytes: int, reason: str) -> None:
    if _warned.is_set():
        return
    _warned.set()
    limit, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    logger.warning(
        "a buffer of %d bytes is not page-locked (%s), and may be swapped out where memory is short: RLIMIT_MEMLOCK is %s, "
        "hard limit %s; raise it with `ulimit -l unlimited`, `memlock` in /etc/security/limits.conf, systemd's LimitMEMLOCK=, "
        "or a container's --ulimit memlock=-1",
        num_bytes,
        reason,
        "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
        "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} bytes",
    )


class Ring:
    """A fixed number of buffers of one size, taken and given back by any thread; a context manager.

    Attributes:
      num_buffers: number of buffers.
      num_bytes: size of each.
      locked: whether all are page-locked.
    """

    def __init__(
        self, num_buffers: int, num_bytes: int, *, pin: Literal["lock", "cuda", "none"] = "lock"
    ) -> None:
        """Allocate all the memory.

        Args:
          num_buffers: number of buffers.
          num_bytes: size of each.
          pin: "lock" locks pages where the limit allows, "cuda" registers them with the driver,
            "none" does neither.

        Raises:
          ValueError: a size below 1, or an unknown `pin`.
          MemoryError: there is not enough memory.
          NotImplementedError, RuntimeError: as `host_offload.device.cuda_driver`, with pin="cuda".
        """
        if num_buffers < 1 or pin not in ("lock", "cuda", "none"):
            raise ValueError(
                f"num_buffers={num_buffers}, pin={pin!r}: 1 or more, and 'lock', 'cuda' or 'none' are needed"
            )
        self.num_buffers, self.num_bytes = num_buffers, num_bytes
        self._pin, self._registered = pin, []
        self._changed = threading.Condition()
        self._out: dict[int, np.ndarray] = {}  # address -> buffer
        self._seconds_waited, self._closed = 0.0, False
        buffers = [allocate(num_bytes) for _ in range(num_buffers)]
        # With their addresses, which callbacks of a running program would else ask numpy for.
        self._free = [(buffer.ctypes.data, buffer) for buffer in buffers]
        locked = [lock_pages(b) for b in buffers] if pin == "lock" else [False]
        self.locked = all(locked)
        if pin == "cuda":
            try:
                # A registration that fails halfway must undo the others: memory that is freed while
                # registered stays pinned.
                for buffer in buffers:
                    driver().register(buffer)
                    self._registered.append(buffer)
            except BaseException:
                self.close()
                raise
            self.locked = True

    @property
    def free(self) -> int:
        """Number of buffers that are not taken."""
        with self._changed:
            return len(self._free)

    @property
    def seconds_waited(self) -> float:
        """Seconds that callers of `take` have waited, summed."""
        with self._changed:
            return self._seconds_waited

    def take(self, timeout: float | None = None) -> np.ndarray:
        """Return a buffer, uint8[num_bytes], for the caller alone until it is given back. Its
        contents are arbitrary.

        Waits while all buffers are taken.

        Args:
          timeout: seconds to wait at most; None waits without end.

        Raises:
          TimeoutError: no buffer was given back in that time.
          RuntimeError: the ring is closed, or was closed during the wait.
        """
        with self._changed:
            if not self._free and not self._closed:
                start = time.monotonic()
                # `close` wakes the waiters too, so that no callback sleeps on a ring that is gone.
                came = self._changed.wait_for(lambda: self._free or self._closed, timeout)
                self._seconds_waited += time.monotonic() - start
                if not came:
                    raise TimeoutError(
                        f"no buffer came back within {timeout} s: all {self.num_buffers} of {self.num_bytes} bytes are out; "
                        f"give some back before taking more, or make the ring larger"
                    )
            if self._closed:
                raise RuntimeError(f"this ring of {self.num_buffers} buffers is closed")
            return self._pop()

    def take_free(self) -> np.ndarray | None:
        """Return a buffer, as `take` does, or None if all are taken or the ring is closed."""
        with self._changed:
            return self._pop() if self._free else None

    def _pop(self) -> np.ndarray:
        address, buffer = self._free.pop()  # the one given back last: its pages are in the caches
        self._out[address] = buffer
        return buffer

    def give(self, buffer: np.ndarray) -> None:
        """Give a buffer back; nothing may read or write it afterwards. If the ring is closed, its
        memory is freed.

        Raises:
          ValueError: it is not of this ring, or not taken.
        """
        with self._changed:
            # By address, not by identity: a caller may return a shorter view, of which only the
            # start is the same.
            whole_buffer = self._out.pop(address := buffer.ctypes.data, None)
            if whole_buffer is None:
                raise ValueError(
                    "this buffer is not out: it was given back already, or is not of this ring"
                )
            if not self._closed:
                self._free.append((address, whole_buffer))
                self._changed.notify()
                return
        # The ring was closed while this buffer was out: `close` left its memory to us.
        self._release(whole_buffer)

    def close(self) -> None:
        """Free every buffer that is not taken, and end all waits with an error; a second call does
        nothing.

        The memory of a buffer that is taken, or of which views are left, is freed with the last of
        them.
        """
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
            self._changed.notify_all()
        for _, buffer in free:
            self._release(buffer)

    def _release(self, buffer: np.ndarray) -> None:
        """Unregister a buffer; its memory is freed with the last reference."""
        others = [b for b in self._registered if b is not buffer]
        if len(others) < len(self._registered):
            self._registered = others
            driver().unregister(buffer)

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
