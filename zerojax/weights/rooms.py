"""A hidden folder next to the destination, in which an export is written.

The next export there removes the folders of killed exports.

    .NAME.xxxxxxxx.tmp/NAME            the output, renamed to NAME once it is on disk
    .NAME.xxxxxxxx.tmp/NAME.owner      owner file, locked (flock) by the writing process, with its
                                       process ID and machine
    .NAME.xxxxxxxx.tmp/NAME.new        the owner file, before it is locked and renamed
    .NAME.xxxxxxxx.tmp/NAME.unlocked   the owner file on a file system without locks

A killed export leaves such a folder, as large as a full model. The kernel releases the lock with
the process, so the next export there can distinguish a dead folder from one that another process is
writing.

An export may also be killed before the owner file has its name. Such a folder holds nothing yet, so
the next export removes it even if its process is alive: that process finds it gone, and creates
another one. A process writes only once the owner file has its name.

A folder of another machine stays, and a warning names it, because not all network file systems
share locks between machines. A folder without locks stays too: an earlier version left it, or the
file system has no locks.
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
"""Name that `tempfile.mkdtemp` gives the folder."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of flock on file systems without locks."""
_MOST_ATTEMPTS = 100
"""Number of folders that an export creates before it gives up.

Others remove a new folder only in the moment before it has an owner.
"""


@contextlib.contextmanager
def own_room(parent: str, name: str) -> Iterator[str]:
    """Yield a new folder in `parent`, which is removed at the end.

    Folders of killed exports are removed first.

    Args:
      parent: folder of the destination.
      name: name of the destination.

    Raises:
      OSError: the folder cannot be created.
    """
    _remove_dead(parent)
    room, lock = _new_room(parent, name)
    try:
        yield room
    finally:
        # A kill during the removal must leave a folder that is recognized as dead.
        try:
            with contextlib.suppress(OSError):
                _remove(room, name)
        finally:
            if lock is not None:
                os.close(lock)


def _owner(room: str, name: str) -> str:
    return os.path.join(room, f"{name}.owner")


def _unnamed(room: str, name: str) -> str:
    """Return the path of the owner file before it is locked."""
    return os.path.join(room, f"{name}.new")


def _new_room(parent: str, name: str) -> tuple[str, int | None]:
    """Return a new folder and the descriptor of its lock, or None if the file system has no locks.

    Raises:
      OSError: the folder cannot be created.
    """
    for _ in range(_MOST_ATTEMPTS):
        room = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent)
        try:
            return room, _locked(room, name)
        except (FileNotFoundError, BlockingIOError):
            # Another export took the folder for a dead one, and removes it.
            shutil.rmtree(room, ignore_errors=True)
        except BaseException:
            shutil.rmtree(room, ignore_errors=True)
            raise
    raise OSError(errno.EBUSY, f"other exports removed {_MOST_ATTEMPTS} new folders", parent)


def _locked(room: str, name: str) -> int | None:
    """Return the descriptor of a folder's lock, or None if the file system has no locks.

    Raises:
      FileNotFoundError: another export has removed the folder.
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
        # The folder must not look as if it had no owner yet.
        os.rename(path, os.path.join(room, f"{name}.unlocked"))
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_dead(parent: str) -> None:
    """Remove the hidden folders of killed exports in a folder, and log folders that may be dead."""
    with os.scandir(parent) as entries:
        rooms = []
        for entry in entries:
            match = _ROOM.fullmatch(entry.name)
            if match is not None:
                rooms.append((entry.path, match[1]))
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
    """Remove a hidden folder whose process is dead, or has not begun to write.

    Raises:
      OSError: the folder cannot be examined or removed.
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
                "%s was left by an export, or one is running: remove it if none is", room
            )
            return
        lock = open_regular(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, _, machine = os.pread(lock, 1024, 0).decode(errors="replace").strip().partition(" ")
        is_unnamed = path == _unnamed(room, name)
        # The owner file is empty between its lock and its first byte: nothing was written in the
        # folder.
        if machine != socket.gethostname() and not (is_unnamed and not machine):
            logger.warning(
                "%s was left by an export on %s, or one is running there: remove it if none is",
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
        return  # its process is alive
    finally:
        os.close(lock)


def _remove(room: str, name: str) -> None:
    """Remove a hidden folder, the owner file last.

    So a partly removed folder is still recognized as dead.

    Raises:
      OSError: an entry cannot be removed.
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
