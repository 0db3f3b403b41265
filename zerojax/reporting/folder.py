"""The folder of one run: locked while the run writes to it, and made of regular files only.

    runs/gpt/.zerojax-run.lock       flocked by the writing process; holds its process number
    runs/gpt/metrics.jsonl           figures, one line per step
    runs/gpt/metrics.dropped.jsonl   lines that a later run replaced
    runs/gpt/sessions.json           start, duration and end of each process of the run
    runs/gpt/report.html             the page

Without the lock, two runs that share a folder would overwrite each other's figures, and a resuming
run would take over the other run's figures. The kernel releases the lock when the process ends,
for whatever reason.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterable

from host_offload.disk import NotRegularError, open_regular

LOCK = ".zerojax-run.lock"
METRICS = "metrics.jsonl"
DROPPED = "metrics.dropped.jsonl"
SESSIONS = "sessions.json"
PAGE = "report.html"
UNFINISHED = ".tmp"
"""Suffix of a file that is about to replace another one."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock on file systems without locks."""
logger = logging.getLogger("zerojax")


class RunFolder:
    """A folder that belongs to one run until `close`.

    Attributes:
      path: absolute path of the folder.
    """

    def __init__(self, path: str) -> None:
        """Make the folder, check its files and lock it.

        Args:
          path: path of the folder.

        Raises:
          ValueError: the folder cannot be made or written, another run writes to it, or one of its
            files is a link, a folder, a FIFO or a device.
        """
        self.path = path
        self._lock: int | None = None
        try:
            os.makedirs(path, exist_ok=True)
            self._check_files()
            self._lock = self._acquire()
        except NotRegularError as error:
            raise ValueError(
                f"logdir={path!r}: {error}: remove it, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _FULL:
                raise ValueError(
                    f"logdir={path!r} cannot be written: {error}: choose another folder"
                ) from error
            logger.warning(
                "logdir=%r: %s; the run continues, and writes its figures once there is room",
                path,
                error.strerror,
            )

    def has_figures(self) -> bool:
        """Return whether the folder has figures or a page of an earlier run."""
        return any(os.path.exists(self.file(name)) for name in (METRICS, PAGE))

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def close(self) -> None:
        """Release the lock on the folder."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            with contextlib.suppress(OSError):  # only the process number was written
                os.close(lock)

    def _check_files(self) -> None:
        replaced = (METRICS, SESSIONS, PAGE)
        unfinished = [name + UNFINISHED for name in replaced]
        for name in (*replaced, *unfinished, DROPPED):
            with contextlib.suppress(FileNotFoundError):
                os.close(open_file(self.file(name), os.O_RDONLY))

    def _acquire(self) -> int | None:
        """Return the descriptor of the locked file, or None if the file system has no locks."""
        fd = open_file(self.file(LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ValueError(
                f"logdir={self.path!r} is in use: another run, of process {owner or 'unknown'}, "
                "writes its figures there; choose another folder for this run"
            ) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "logdir=%r: its file system has no locks, so a second run there goes unnoticed",
                self.path,
            )
            return None
        # On a full disk the number is missing; it only makes the message above clearer.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        os.register_at_fork(after_in_child=lambda: self._forget(fd))
        return fd

    def _forget(self, fd: int) -> None:
        """Close the lock's file in a forked child, which would keep the lock after this process."""
        if self._lock == fd:
            self._lock = None
            os.close(fd)


def open_file(path: str, flags: int) -> int:
    """Return a descriptor of a regular file of the run, which other users may read.

    Args:
      path: path of the file.
      flags: flags of os.open.

    Raises:
      NotRegularError: a link, a folder, a FIFO or a device has that name; the message has the path.
      OSError: os.open failed.
    """
    try:
        return open_regular(path, flags, 0o644)
    except NotRegularError as error:
        raise NotRegularError(f"{path}: {error}") from error


def replace_file(path: str, contents: Iterable[bytes]) -> None:
    """Replace a file by a rename, so that the old or the new file exists after a kill at any time.

    Args:
      path: path of the file.
      contents: new contents, in pieces.

    Raises:
      OSError: the file could not be written, for example on a full disk; the old file remains.
    """
    unfinished = path + UNFINISHED
    fd = open_file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with open(fd, "wb") as file:
            file.writelines(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def set_aside(path: str) -> None:
    """Rename an earlier run's file, such as `report.html` to `report.1.html`.

    The number is the next free one.
    """
    stem, end = os.path.splitext(path)
    number = 1
    while os.path.lexists(f"{stem}.{number}{end}"):
        number += 1
    try:
        os.rename(path, f"{stem}.{number}{end}")
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s of an earlier run will be overwritten: %s", path, error)
