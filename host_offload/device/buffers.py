"""Host memory for records in flight between disk and device: a fixed ring of buffers.

All buffers are allocated before step 1. O_DIRECT pins the pages of a transfer one by one, so their
size determines its speed: a disk reads into pages of 2 MB at full speed, and into pages of 4 KB at
a third of it. Memory is therefore private and anonymous (shared memory gets no huge pages), aligned
to 2 MB, and touched when it is allocated. A ring has one buffer per record that the schedule has in
flight. If all are in use, a caller waits: a slow disk makes the step slower, but never takes more
memory.
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
    """Return uint8[num_bytes] of private zeroed memory, aligned to 2 MB.

    The memory is in huge pages if the kernel supports them, and all pages are resident. It is freed
    with the last view of it.

    Raises:
      ValueError: num_bytes < 1.
      MemoryError: there is not enough memory.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: 1 or more is needed")
    # A large buffer is rounded up, so that its last huge page is complete.
    multiple = HUGE_BYTES if num_bytes >= HUGE_BYTES // 2 else PAGE_BYTES
    # mmap aligns to 4 KB only: with one extra huge page the buffer can start at a multiple of 2 MB.
    room = -(-num_bytes // multiple) * multiple + HUGE_BYTES
    try:
        # Python's default is MAP_SHARED, and shared anonymous memory never gets huge pages.
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for a buffer of {num_bytes} bytes: {error}; use fewer buffers, or more "
            "devices"
        ) from error
    # Advise before the first touch: the kernel chooses the size of a page when it is faulted in.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: only slower
            logger.debug("this kernel has no transparent huge pages")
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    buffer = whole[start : start + num_bytes]
    # Fault every page in now, and not during the first transfers of step 1.
    buffer[::PAGE_BYTES] = 0
    return buffer


def lock_pages(buffer: np.ndarray) -> bool:
    """Lock a buffer's pages in memory (mlock) if the limit allows, and return whether it did.

    The pages are unlocked when the memory is freed. The first failure is logged.
    """
    try:
        libc = _libc()
        if libc.mlock(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes)) == 0:
            return True
        reason = os.strerror(ctypes.get_errno())
    except (OSError, AttributeError) as error:
        reason = str(error)
    # The limit is often only 8 MB: a reason to warn, not to refuse to train.
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
        "a buffer of %d bytes is not page-locked (%s), and may be swapped out if memory is short: "
        "RLIMIT_MEMLOCK is %s, hard limit %s; raise it with `ulimit -l unlimited`, `memlock` in "
        "/etc/security/limits.conf, systemd's LimitMEMLOCK=, or a container's "
        "--ulimit memlock=-1",
        num_bytes,
        reason,
        "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
        "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} bytes",
    )


class Ring:
    """A fixed number of buffers of one size, taken and given back by any thread; a context manager.

    Attributes:
      num_buffers: number of buffers.
      num_bytes: bytes per buffer.
      locked: whether all buffers are page-locked.
    """

    def __init__(
        self, num_buffers: int, num_bytes: int, *, pin: Literal["lock", "cuda", "none"] = "lock"
    ) -> None:
        """Allocate all buffers.

        Args:
          num_buffers: number of buffers.
          num_bytes: bytes per buffer.
          pin: how to lock pages: "lock" locks them if the limit allows, "cuda" registers them with
            the CUDA driver, "none" does neither.

        Raises:
          ValueError: num_buffers or num_bytes is below 1, or `pin` is unknown.
          MemoryError: there is not enough memory.
          NotImplementedError: pin="cuda", and the package cuda-bindings is missing.
          RuntimeError: pin="cuda", and the driver failed.
        """
        if num_buffers < 1 or pin not in ("lock", "cuda", "none"):
            raise ValueError(
                f"num_buffers={num_buffers}, pin={pin!r}: 1 or more, and 'lock', 'cuda' or 'none' "
                "are needed"
            )
        self.num_buffers = num_buffers
        self.num_bytes = num_bytes
        self._pin = pin
        self._registered = []
        self._changed = threading.Condition()
        self._out: dict[int, np.ndarray] = {}  # address -> buffer
        self._seconds_waited = 0.0
        self._closed = False
        buffers = [allocate(num_bytes) for _ in range(num_buffers)]
        # Store the addresses, so that callbacks of a running program need not ask numpy for them.
        self._free = [(buffer.ctypes.data, buffer) for buffer in buffers]
        locked = [lock_pages(b) for b in buffers] if pin == "lock" else [False]
        self.locked = all(locked)
        if pin == "cuda":
            try:
                # If a registration fails, undo the earlier ones: memory that is freed while it is
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
        """Seconds that callers have waited in `take`, summed over all calls."""
        with self._changed:
            return self._seconds_waited

    def take(self, timeout: float | None = None) -> np.ndarray:
        """Return a buffer, uint8[num_bytes], for exclusive use until it is given back.

        Its contents are arbitrary. This waits while all buffers are taken.

        Args:
          timeout: maximum wait, in seconds; None waits forever.

        Raises:
          TimeoutError: no buffer was given back in that time.
          RuntimeError: the ring is closed, or was closed during the wait.
        """
        with self._changed:
            if not self._free and not self._closed:
                start = time.monotonic()
                # `close` wakes the waiters too, so that no callback waits on a closed ring.
                came = self._changed.wait_for(lambda: self._free or self._closed, timeout)
                self._seconds_waited += time.monotonic() - start
                if not came:
                    raise TimeoutError(
                        f"no buffer came back within {timeout} s: all {self.num_buffers} of "
                        f"{self.num_bytes} bytes are out; give some back before taking more, or "
                        "make the ring larger"
                    )
            if self._closed:
                raise RuntimeError(f"this ring of {self.num_buffers} buffers is closed")
            return self._pop()

    def take_free(self) -> np.ndarray | None:
        """Return a buffer without waiting; None if all are taken or the ring is closed."""
        with self._changed:
            return self._pop() if self._free else None

    def _pop(self) -> np.ndarray:
        address, buffer = self._free.pop()  # given back last, so its pages are still in the caches
        self._out[address] = buffer
        return buffer

    def give(self, buffer: np.ndarray) -> None:
        """Give a buffer back; nothing may read or write it afterwards.

        If the ring is closed, the buffer's memory is freed.

        Args:
          buffer: buffer that `take` or `take_free` returned, or a view that starts with it.

        Raises:
          ValueError: the buffer does not belong to this ring, or is not taken.
        """
        with self._changed:
            # By address, not by identity: a caller may return a shorter view with the same start.
            whole_buffer = self._out.pop(address := buffer.ctypes.data, None)
            if whole_buffer is None:
                raise ValueError(
                    "this buffer is not out: it was given back already, or is not of this ring"
                )
            if not self._closed:
                self._free.append((address, whole_buffer))
                self._changed.notify()
                return
        # The ring was closed while this buffer was taken, so `close` did not release it.
        self._release(whole_buffer)

    def close(self) -> None:
        """Free every buffer that is not taken, and end all waits with an error.

        A taken buffer is freed when it is given back, and a buffer with remaining views when the
        last view is dropped. A second call does nothing.
        """
        with self._changed:
            self._closed = True
            free = self._free
            self._free = []
            self._changed.notify_all()
        for _, buffer in free:
            self._release(buffer)

    def _release(self, buffer: np.ndarray) -> None:
        """Unregister a buffer; its memory is freed with its last reference."""
        others = [b for b in self._registered if b is not buffer]
        if len(others) < len(self._registered):
            self._registered = others
            driver().unregister(buffer)

    def __enter__(self) -> "Ring":
        """Return this ring."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close this ring."""
        self.close()
