"""A hidden folder beside its destination, in which an export is written; what killed exports left
is removed.

    .NAME.xxxxxxxx.tmp/NAME            what is written, renamed to NAME once it is on disk
    .NAME.xxxxxxxx.tmp/NAME.owner      locked (flock) by the process that writes, with its number and machine
    .NAME.xxxxxxxx.tmp/NAME.new        the owner's file, before it is locked and renamed
    .NAME.xxxxxxxx.tmp/NAME.unlocked   the owner's file on a file system without locks

A kill leaves such a folder, of up to the size of a whole model. The kernel drops the lock with the
process, so the next export beside it can tell a dead folder from one that another process writes.

A kill may also come before the owner's file has its name. Such a folder holds nothing yet, so the
next export removes it even if its process is alive: that process finds it gone, and makes another
one. It writes only once the owner's file has its name.

A folder of another machine stays, and a warning names it, because not all network file systems
share locks between machines. A folder without locks stays, too: an earlier version left it, or the
file system has none.
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
_MOST_ATTEMPTS = 100
"""Rooms that are made before an export gives up: others remove a new room only in the moment before
it has an owner.
"""


@contextlib.contextmanager
def own_room(parent: str, name: str) -> Iterator[str]:
    """Yield a new folder in `parent`, which is removed at the end; first remove those of killed
    exports.

    Args:
      parent: folder of the destination.
      name: of the destination.

    Raises:
      OSError: the folder cannot be made.
    """
    _remove_dead(parent)
    room, lock = _new_room(parent, name)
    try:
        yield room
    finally:
        # A kill while this runs must leave a folder that is known for dead.
        try:
            with contextlib.suppress(OSError):
                _remove(room, name)
        finally:
            if lock is not None:
                os.close(lock)


def _owner(room: str, name: str) -> str:
    return os.path.join(room, f"{name}.owner")


def _unnamed(room: str, name: str) -> str:
    """Return the path of the owner's file before it is locked."""
    return os.path.join(room, f"{name}.new")


def _new_room(parent: str, name: str) -> tuple[str, int | None]:
    """Return a new room, and the descriptor of its lock or None where the file system has no locks.

    Raises:
      OSError: it cannot be made.
    """
    for _ in range(_MOST_ATTEMPTS):
        room = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent)
        try:
            return room, _locked(room, name)
        except (FileNotFoundError, BlockingIOError):
            # Another export takes the room for a dead one, and removes it.
            shutil.rmtree(room, ignore_errors=True)
        except BaseException:
            shutil.rmtree(room, ignore_errors=True)
            raise
    raise OSError(errno.EBUSY, f"other exports removed {_MOST_ATTEMPTS} new folders", parent)


def _locked(room: str, name: str) -> int | None:
    """Return the descriptor of the lock of a room, or None where the file system has no locks.

    Raises:
      FileNotFoundError: another export has removed the room.
      BlockingIOError: another export is removing it.
    """
    path = _unnamed(room, name)
    lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()} {socket.gethostname()}\n".encode())
        os.rename(path, _owner(room, name))
    except OSError as error:
        os.close(lock)
        if error.errno not in _NO_LOCKS:
            raise
        # The room must not look as if it had no owner yet.
        os.rename(path, os.path.join(room, f"{name}.unlocked"))
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_dead(parent: str) -> None:
    """Remove the rooms of killed exports in a folder, and log rooms that may be such."""
    with os.scandir(parent) as entries:
        rooms = [
            (entry.path, match[1]) for entry in entries if (match := _ROOM.fullmatch(entry.name))
        ]
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
    """Remove a room whose process is dead, or has not begun to write.

    Raises:
      OSError: it cannot be looked at or removed.
    """
    path = _owner(room, name)
    try:
        lock = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        entries = set(os.listdir(room))
        if not entries:
            os.rmdir(room)
            logger.warning("%s was left by an export that was killed, and is removed", room)
            return
        path = _unnamed(room, name)
        if entries != {os.path.basename(path)}:
            logger.warning(
                "%s was left by an export, or one is under way: remove it if none is", room
            )
            return
        lock = open_regular(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, _, machine = os.pread(lock, 1024, 0).decode(errors="replace").strip().partition(" ")
        is_unnamed = path == _unnamed(room, name)
        # The file is empty between its lock and the first byte: nothing was written in the room.
        if machine != socket.gethostname() and not (is_unnamed and not machine):
            logger.warning(
                "%s was left by an export on %s, or one is under way there: remove it if none is",
                room,
                machine or "?",
            )
            return
        if is_unnamed:
            os.unlink(path)
            os.rmdir(room)
        else:
            _remove(room, name)
        logger.warning("%s was left by an export that was killed, and is removed", room)
    except BlockingIOError:
        return  # its process lives
    finally:
        os.close(lock)


def _remove(room: str, name: str) -> None:
    """Remove a room, and the owner's file last, so that a room that is removed in part is still
    known for dead.

    Raises:
      OSError: something in it cannot be removed.
    """
    for entry in os.listdir(room):
        path = os.path.join(room, entry)
        if path == _owner(room, name):
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_owner(room, name))
    os.rmdir(room)
