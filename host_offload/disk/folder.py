"""A process's private folder below the user's swap_dir, removed when the process ends.

The folder holds model state, so only its user may read it (0700). Two programs in one folder would
overwrite each other's records, so the program that uses it locks a file in it. The kernel releases
the lock (flock) when the process ends, for whatever reason. So a folder with a free lock was left
by a killed process, and is emptied and reused.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import weakref
from types import TracebackType

from host_offload.disk.errors import NotRegularError, SwapError, explain
from host_offload.disk.regular_file import open_regular

logger = logging.getLogger(__name__)
_LOCK = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class SwapFolder:
    """The folder `root/zerojax-swap-{process}`; a context manager.

    Attributes:
      path: absolute path of the folder.
    """

    def __init__(self, root: str, process: int = 0) -> None:
        """Create the folder, or take over a folder that a killed process left.

        Args:
          root: the user's swap_dir, ideally on a dedicated disk. It must exist, because a mistyped
            path could fill another disk.
          process: index of the process, `jax.process_index()`; processes of one machine may share
            `root`.

        Raises:
          ValueError: `root` does not exist or is not a folder.
          SwapError: the folder cannot be created or written, or another program uses it.
        """
        try:
            mode = os.stat(root).st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        except OSError as error:
            raise explain(error, doing="looking for swap_dir", file=root) from error
        if not stat.S_ISDIR(mode):
            what = "is not a folder" if mode else "does not exist"
            raise ValueError(
                f"swap_dir={root!r} {what}: give an existing folder of a fast local disk, or "
                "create it (mkdir -p)"
            )
        self.path = os.path.join(os.path.abspath(root), f"zerojax-swap-{process}")
        self._take()
        this = weakref.ref(self)
        # A forked child inherits the finalizer and the locked descriptor, but must neither remove
        # the folder nor keep the lock.
        os.register_at_fork(
            after_in_child=lambda: None if (folder := this()) is None else folder._forget()
        )

    def _take(self) -> None:
        try:
            fd = _lock(self.path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise SwapError(
                    f"making the swap folder, {self.path} failed: ENOENT ({error.errno}); users "
                    "cannot create folders on that file system: set swap_dir to a folder of a "
                    "local disk",
                    file=self.path,
                    errno=error.errno,
                ) from error
            raise explain(error, doing="making the swap folder", file=self.path) from error
        self._fd, self._close = fd, weakref.finalize(self, _remove, self.path, fd)  # at exit too
        try:
            self._begin(fd)
        except OSError as error:
            self._close()
            raise explain(error, doing="emptying the swap folder", file=self.path) from error

    def _begin(self, fd: int) -> None:
        # The umask may have reduced mkdir's mode, and a folder taken over has any mode.
        os.chmod(self.path, 0o700)
        before = os.pread(fd, 64, 0).decode(errors="replace").strip()
        if before:
            logger.warning(
                "%s was left by process %s, which is gone: it is emptied and used again",
                self.path,
                before,
            )
        _empty(self.path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def free_bytes(self) -> int:
        """Return the number of bytes that this user can still write to the file system."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def renew(self) -> None:
        """Remove the folder and create it again, empty; also if it was removed or taken over.

        Raises:
          SwapError: another program uses the folder now, or it cannot be created.
        """
        self.close()
        self._take()

    def close(self) -> None:
        """Remove the folder with its contents; further calls do nothing.

        Close everything that uses the folder before.
        """
        self._close()

    def _forget(self) -> None:
        """Leave the folder to the parent process, in a forked child.

        The child's copy of the descriptor would keep the lock, so it is closed.
        """
        if self._close.detach() is not None:
            os.close(self._fd)

    def __enter__(self) -> "SwapFolder":
        """Return this folder."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the folder."""
        self.close()


def _lock(path: str) -> int:
    """Return the locked descriptor of the folder's lock file; create both if necessary."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            _check_folder(path)
            fd = _open_lock(os.path.join(path, _LOCK))
        except FileNotFoundError:  # another process has just removed the folder: try again
            continue
        if fd is not None:
            return fd


def _check_folder(path: str) -> None:
    """Check that a path names a folder that is empty or was made by this module.

    Raises:
      SwapError: it is not such a folder.
      FileNotFoundError: the path does not exist.
    """
    # lstat, because a symbolic link of this name could redirect the state to another user's folder.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        if stat.S_ISDIR(status.st_mode):
            what = f"a folder of another user (uid {status.st_uid}, this one is {os.geteuid()})"
        raise SwapError(
            f"{path} is {what}: remove it, or set swap_dir to another folder", file=path
        )
    # Only a lock file proves that one of our processes made the folder, so that it may be emptied.
    # One listing is enough: an owner that is removing the folder removes the lock file last.
    if (names := os.listdir(path)) and _LOCK not in names:
        raise SwapError(
            f"{path} holds files, but no lock file of a program that made them: move them away if "
            "you need them, remove the folder, or set swap_dir to another folder",
            file=path,
        )


def _open_lock(name: str) -> int | None:
    """Return the locked descriptor of a lock file, created if necessary.

    The result is None if the file's owner has just removed it.
    """
    path = os.path.dirname(name)
    try:
        fd = open_regular(name, os.O_RDWR | os.O_CREAT)
    except NotRegularError as error:
        raise SwapError(
            f"{name}: {error}: remove {path}, or set swap_dir to another folder", file=name
        ) from error
    try:
        # With a second name it may be a file of the user, which must not be overwritten.
        if os.fstat(fd).st_nlink > 1:
            raise SwapError(
                f"{name} has another name too: remove {path}, or set swap_dir to another folder",
                file=name,
            )
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # flock locks the file, not its name: the owner may have unlinked it since it was opened.
        if os.stat(name).st_ino == os.fstat(fd).st_ino:
            return fd
    except BlockingIOError as error:
        owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise _in_use(path, owner) from error
    except FileNotFoundError:  # the owner removed the file just before it released the lock
        pass
    except OSError as error:
        os.close(fd)
        if error.errno not in _NO_LOCKS:
            raise
        # It is unknown whether another program uses this folder: neither use nor remove it.
        raise SwapError(
            f"locking {name} failed: {errno.errorcode[error.errno]} ({error.errno}), "
            f"{os.strerror(error.errno)}; without a lock two programs could overwrite each other's "
            "records: set swap_dir to a folder of a local disk (ext4, xfs)",
            file=name,
            errno=error.errno,
        ) from error
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _in_use(path: str, owner: str) -> SwapError:
    if owner == str(os.getpid()):
        remedy = (
            f"this process (pid {owner}): close that program first (program.close()), or give this "
            "one another swap_dir"
        )
    else:
        remedy = (
            f"process {owner or 'unknown'}: wait for it or end it (kill {owner or 'PID'}), or set "
            "another swap_dir"
        )
    return SwapError(f"{path} is in use by {remedy}", file=path, errno=errno.EWOULDBLOCK)


def _empty(path: str) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != _LOCK:
                os.unlink(entry.path)


def _remove(path: str, fd: int) -> None:
    try:
        # Hold the lock until the folder is gone: the descriptor is closed last.
        _empty(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, _LOCK))
        os.rmdir(path)
    except OSError as error:
        # ENOENT: removed by hand. ENOTEMPTY: taken over after the lock file was removed.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            logger.warning("%s was not removed: %s; remove it by hand", path, error)
    finally:
        with contextlib.suppress(OSError):  # nothing to lose: only the process id was written
            os.close(fd)
