"""Open regular files only, without following links and without blocking.

Other things with a file's name are dangerous: a symbolic link may lead to any file of the user,
opening a FIFO waits for its other end, and opening a device may have side effects. So links are not
followed (O_NOFOLLOW), opening never blocks (O_NONBLOCK, which has no effect on a regular file), and
the type of the opened file is checked before it is used. Only code that reads files made by others
may follow links, because a download is often a folder of links.
"""

import errno
import os
import stat

from host_offload.disk.errors import NotRegularError

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_REFUSALS = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""Errors of `open` for a link, a folder, a socket or a FIFO without a reader, and a missing device.
"""
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str, flags: int, mode: int = 0o600, *, follow: bool = False) -> int:
    """Open a regular file like os.open, and return its descriptor.

    Args:
      path: path of the file.
      flags: flags for os.open.
      mode: permissions of a newly created file; by default only this user has access.
      follow: whether a symbolic link to a regular file is accepted.

    Raises:
      NotRegularError: the path names something other than a regular file.
      OSError: os.open failed.
    """
    try:
        fd = os.open(path, flags | (_FLAGS & ~os.O_NOFOLLOW if follow else _FLAGS), mode)
    except OSError as error:
        if error.errno in _REFUSALS:
            check_regular(path, follow=follow)
        raise
    try:
        _check(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(path: str, *, follow: bool = False) -> None:
    """Check that a path names a regular file or nothing.

    Args:
      path: path to check.
      follow: whether a symbolic link to a regular file is accepted.

    Raises:
      NotRegularError: the path names something other than a regular file.
      OSError: the path cannot be looked up, for another reason than that nothing has this name.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except FileNotFoundError:
        return
    _check(mode)


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegularError(
            f"{_KINDS.get(stat.S_IFMT(mode), 'something else')} is in its place, and no regular "
            "file"
        )
