"""Open regular files alone, and at once.

Whatever else has a file's name is neither followed nor waited for: a symbolic link leads to any
file of the user, `open` of a FIFO waits for its other end, and a device does whatever it does. So
no link is followed (O_NOFOLLOW), nothing is waited for (O_NONBLOCK, which means nothing to a
regular file), and what was opened is looked at before it is used. Only who reads files of others
may follow links: a download is often a folder of them.
"""

import errno
import os
import stat

from host_offload.disk.errors import NotRegularError

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_REFUSALS = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""What `open` says to a link, a folder, a socket or a FIFO that nobody reads, and a device that is
not there.
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
    """Return a descriptor of a regular file, as os.open does; a file that is made is this user's
    alone.

    Args:
      path: of the file.
      flags: of os.open.
      mode: of a file that is made.
      follow: a link to a regular file is taken for one.

    Raises:
      NotRegularError: something else has that name.
      OSError: as os.open.
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
    """Raise NotRegularError where something else than a regular file has a name; none at all is
    left to who opens it.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except FileNotFoundError:
        return
    _check(mode)


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegularError(
            f"{_KINDS.get(stat.S_IFMT(mode), 'something else')} is in its place, and no regular file"
        )
