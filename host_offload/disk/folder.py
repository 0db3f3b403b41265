"""A private folder below the user's swap_dir, for one process, which is removed when the process
ends.

The folder holds model state, so only its user may read it (0700). Two programs in one folder would
overwrite each other's records, so a lock on a file inside tells who uses it. The kernel releases
the lock (flock) with the process, however that ends: a folder whose lock is free was left by a
process that was killed, and is emptied and used again.
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
      path: of the folder.
    """

    def __init__(self, root: str, process: int = 0) -> None:
        """Make the folder, or take over one that a killed process left.

        Args:
          root: the user's swap_dir; best on a disk of its own. It must exist: a mistyped path would
            fill another disk.
          process: `jax.process_index()`; processes of one machine share the root.

        Raises:
          ValueError: root is no folder.
          SwapError: it cannot be written to, or another process or program uses the folder.
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
                f"swap_dir={root!r} {what}: give an existing folder of a fast local disk, or create it (mkdir -p)"
            )
        self.path = os.path.join(os.path.abspath(root), f"zerojax-swap-{process}")
        self._take()
        this = weakref.ref(self)
        # A forked child inherits the finalizer and the locked descriptor: it must neither remove
        # the folder nor hold the lock.
        os.register_at_fork(
            after_in_child=lambda: None if (folder := this()) is None else folder._forget()
        )

    def _take(self) -> None:
        try:
            fd = _lock(self.path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise SwapError(
                    f"making the swap folder, {self.path} failed: ENOENT ({error.errno}); that file system has no room for "
                    "folders of its users: set swap_dir to a folder of a local disk",
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
        # The umask applies to mkdir's mode, and a folder that is taken over has the mode it was
        # left with.
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
        """Return what this user can still write to the file system."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def renew(self) -> None:
        """Empty the folder; create or lock it again if it was removed or taken over.

        Raises:
          SwapError: another program uses it now, or it cannot be created.
        """
        self.close()
        self._take()

    def close(self) -> None:
        """Remove the folder and all in it; once closed, do nothing.

        Whatever uses it must be closed before.
        """
        self._close()

    def _forget(self) -> None:
        """In a forked child: leave the folder to the parent, and close the descriptor, which would
        keep the lock.
        """
        if self._close.detach() is not None:
            os.close(self._fd)

    def __enter__(self) -> "SwapFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _lock(path: str) -> int:
    """Return the descriptor of the folder's lock file, locked; make both if need be."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            _check_folder(path)
            fd = _open_lock(os.path.join(path, _LOCK))
        except FileNotFoundError:  # another process has removed the folder meanwhile: start again
            continue
        if fd is not None:
            return fd


def _check_folder(path: str) -> None:
    """Raise SwapError for what is no folder of this program's, FileNotFoundError where there is
    none.
    """
    # lstat, because a symbolic link of this name could lead the state into the folder of another
    # user.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        if stat.S_ISDIR(status.st_mode):
            what = f"a folder of another user (uid {status.st_uid}, this one is {os.geteuid()})"
        raise SwapError(
            f"{path} is {what}: remove it, or set swap_dir to another folder", file=path
        )
    # A folder is emptied only where a lock file proves that one of our processes made it. One
    # listing tells: its owner, which may be removing it, removes the lock file last.
    if (names := os.listdir(path)) and _LOCK not in names:
        raise SwapError(
            f"{path} holds files, and no lock of a program that made them: move them away if you need them, remove the "
            "folder, or set swap_dir to another one",
            file=path,
        )


def _open_lock(name: str) -> int | None:
    """Return the descriptor of a lock file, made if need be, when it is locked; None if its owner
    has just removed it.
    """
    path = os.path.dirname(name)
    try:
        fd = open_regular(name, os.O_RDWR | os.O_CREAT)
    except NotRegularError as error:
        raise SwapError(
            f"{name}: {error}: remove {path}, or set swap_dir to another folder", file=name
        ) from error
    try:
        if (
            os.fstat(fd).st_nlink > 1
        ):  # the process id that is written to it would go to a file of the user
            raise SwapError(
                f"{name} has another name too: remove {path}, or set swap_dir to another folder",
                file=name,
            )
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # flock locks the file, not its name: its owner may have unlinked it since it was opened
        # here.
        if os.stat(name).st_ino == os.fstat(fd).st_ino:
            return fd
    except BlockingIOError as error:
        owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise _in_use(path, owner) from error
    except FileNotFoundError:  # it was removed just before the lock on it was let go
        pass
    except OSError as error:
        os.close(fd)
        if error.errno not in _NO_LOCKS:
            raise
        # Nothing tells whether another program uses this folder: it is neither used nor removed.
        raise SwapError(
            f"locking {name} failed: {errno.errorcode[error.errno]} ({error.errno}), {os.strerror(error.errno)}; without a "
            "lock two programs could overwrite each other's records: set swap_dir to a folder of a local disk (ext4, xfs)",
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
        remedy = f"this process (pid {owner}): close that program first (program.close()), or give this one another swap_dir"
    else:
        remedy = f"process {owner or 'unknown'}: wait for it or end it (kill {owner or 'PID'}), or set another swap_dir"
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
        # The lock is held until the folder is gone: the descriptor is closed last.
        _empty(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, _LOCK))
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (
            errno.ENOENT,
            errno.ENOTEMPTY,
        ):  # removed by hand; or taken over since the lock file went
            logger.warning("%s was not removed: %s; remove it by hand", path, error)
    finally:
        with contextlib.suppress(OSError):  # the number of this process is all that was written
            os.close(fd)
