"""A hidden folder beside its destination, in which an export is written; what killed exports left is removed.

    .NAME.xxxxxxxx.tmp/NAME          what is written, renamed to NAME once it is on disk
    .NAME.xxxxxxxx.tmp/NAME.owner    locked (flock) by the process that writes, with its number and machine

A kill leaves such a folder, of up to the size of a whole model. The kernel drops the lock with the process, so the next export
beside it can tell a dead folder from one that another process writes. The lock's file gets its name when it is locked.

A folder of another machine stays, and a warning names it, because not all network file systems share locks between machines.
So does one without a lock, as an earlier version or a file system without locks leaves it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator

from host_offload.disk import open_regular

logger = logging.getLogger("zerojax")

_ROOM = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")
"""As `tempfile.mkdtemp` makes it."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""What flock says on file systems without locks."""


@contextlib.contextmanager
def own_room(parent: str, name: str) -> Iterator[str]:
    """Yield a new folder in `parent`, which is removed at the end; first remove those of killed exports.

    Args:
      parent: folder of the destination.
      name: of the destination.

    Raises:
      OSError: the folder cannot be made.
    """
    _remove_dead(parent)
    room = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent)
    lock: int | None = None
    try:
        lock = _locked(room, name)
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _owner(room: str, name: str) -> str:
    return os.path.join(room, f"{name}.owner")


def _locked(room: str, name: str) -> int | None:
    """Return the descriptor of the lock of a room, or None where the file system has none."""
    path = os.path.join(room, f"{name}.new")
    lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()} {socket.gethostname()}\n".encode())
        os.rename(path, _owner(room, name))
    except OSError as error:
        os.close(lock)
        if error.errno not in _NO_LOCKS:
            raise
        os.unlink(path)
        return None
    return lock


def _remove_dead(parent: str) -> None:
    """Remove the rooms of killed exports in a folder, and log rooms that may be such."""
    with os.scandir(parent) as entries:
        rooms = [(entry.path, match[1]) for entry in entries if (match := _ROOM.fullmatch(entry.name))]
    for room, name in rooms:
        if os.path.islink(room) or not os.path.isdir(room):
            continue
        try:
            _remove_if_dead(room, name)
        except FileNotFoundError:
            pass  # its export has ended meanwhile
        except OSError as error:
            logger.warning("%s was left by an export, and cannot be removed: %s", room, error)


def _remove_if_dead(room: str, name: str) -> None:
    """Remove a room whose process is dead.

    Raises:
      OSError: it cannot be looked at or removed.
    """
    try:
        lock = open_regular(_owner(room, name), os.O_RDWR)
    except FileNotFoundError:
        # Another process may be making it at this moment.
        if set(os.listdir(room)) - {f"{name}.new"}:
            logger.warning("%s was left by an export, or one is under way: remove it if none is", room)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, _, machine = os.pread(lock, 1024, 0).decode(errors="replace").strip().partition(" ")
        if machine != socket.gethostname():
            logger.warning(
                "%s was left by an export on %s, or one is under way there: remove it if none is", room, machine or "?"
            )
            return
        logger.warning("%s was left by an export that was killed, and is removed", room)
        # The lock's file goes last, so that a room that is removed in part is still known for dead.
        for entry in os.listdir(room):
            path = os.path.join(room, entry)
            if path == _owner(room, name):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        os.unlink(_owner(room, name))
        os.rmdir(room)
    except BlockingIOError:
        return  # its process lives
    finally:
        os.close(lock)
