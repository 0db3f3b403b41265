"""A directory of checkpoints: its contents, its newest intact step, and all changes made in it.

    {step}/state, {step}/config      a checkpoint and its items; Orbax renames it to this name
                                     once all of it is on disk
    {step}/metrics                   metrics of the step, if checkpoints are kept by a metric
    {step}.next                      a complete checkpoint that replaces {step}, which a rolled-back
                                     run left, or which holds an update to apply
    {step}.orbax-checkpoint-tmp-*    a checkpoint that is being written, or whose process was killed
    {step}.set-aside                 a step of a rolled-back run; no reader takes it for a step
    .deleted.*/                      old checkpoints that are being removed
    .zerojax.lock                    locked (flock) by the process that saves here

A step appears by one rename and disappears by one rename, so a reader never lists a partial step.
Nothing is removed before its replacement has appeared and the replacement's name is on disk:

    a step appears as {step} or {step}.next  ->  the folder's entries are flushed
      ->  old and rolled-back steps are removed or set aside

So whenever a process is killed, or a call fails, the newest state whose save was confirmed exists
under a name that readers take for its step.

Readers only list and open. All changes are made by process 0 of the run that saves there, under the
lock: the processes of a run share one directory. In the other processes, the methods that change
the directory do nothing.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from host_offload.disk import NotRegularError, open_regular, sync
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explaining

logger = logging.getLogger("zerojax")

STATE = "state"
CONFIG = "config"
METRICS = "metrics"
"""Items of a checkpoint."""
LOCK = ".zerojax.lock"
ASIDE = ".set-aside"
NEXT = ".next"
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of folders that Orbax has not finished."""
DELETED = ".deleted"
_ELSEWHERE = -1
"""Replaces the file descriptor if process 0 holds the lock, or the file system has no locks."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of flock on file systems that do not lock files."""
# Only the decimal form that str(int) writes: int itself also parses digits of other scripts,
# leading zeros, and numbers of any length.
_STEP = re.compile(rf"(0|[1-9][0-9]{{0,17}})({re.escape(NEXT)})?")

T = TypeVar("T")


class Directory:
    """A directory of checkpoints.

    Attributes:
      path: absolute path of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use a directory, which need not exist yet."""
        self.path = os.path.abspath(os.fspath(path))
        self._lock: int | None = None  # file descriptor, or _ELSEWHERE

    # --- contents ---------------------------------------------------------------------------------

    def listing(self) -> tuple[list[int], list[str]]:
        """Return the steps of all complete checkpoints, and the names of unfinished ones.

        Both are sorted, and come from the same listing.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        try:
            # One listing for both: between two listings, a step could get its name and be in
            # neither. An entry that cannot be examined is an error: os.path.isdir would return
            # False for a folder that is unreadable now, and its step would be skipped.
            with (
                explaining(f"reading the directory of checkpoints {self.path}"),
                os.scandir(self.path) as entries,
            ):
                is_folder_by_name = {
                    entry.name: entry.is_dir()
                    for entry in entries
                    if _STEP.fullmatch(entry.name) or TEMPORARY in entry.name
                }
        except CheckpointError as error:
            if error.errno == errno.ENOENT:
                raise CheckpointError(
                    f"the directory of checkpoints {self.path} does not exist", errno=errno.ENOENT
                ) from error
            raise
        steps: set[int] = set()
        for name, is_dir in is_folder_by_name.items():
            match = _STEP.fullmatch(name)
            if is_dir and match is not None:
                steps.add(int(match[1]))
        return sorted(steps), sorted(name for name in is_folder_by_name if TEMPORARY in name)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        return self.listing()[0]

    def step_folder(self, step: int) -> str:
        """Return the folder of a step.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        # Both exist only while one replaces the other.
        newer = self.new_folder(step, replaces=True)
        with explaining(f"reading the directory of checkpoints {self.path}"):
            return newer if is_folder(newer) else self.new_folder(step)

    def new_folder(self, step: int, *, replaces: bool = False) -> str:
        """Return the folder in which a step will appear; with `replaces`, the name with `.next`."""
        return os.path.join(self.path, f"{step}{NEXT if replaces else ''}")

    def state_folder(self, step: int) -> str:
        """Return the folder in which the state of a step is saved."""
        return os.path.join(self.step_folder(step), STATE)

    def newest_whole(
        self,
        read: Callable[[int], T],
        *,
        required: bool = True,
        label: Callable[[int], str] = "step {}".format,
    ) -> tuple[int, T] | None:
        """Return the newest intact step and the result of `read` for it.

        Damaged steps are skipped with a warning.

        Args:
          read: function of a step's number; raises DamagedError for a damaged step.
          required: if no step is intact, raise the error of the oldest one; otherwise skip that one
            too.
          label: function that names a step in a warning.

        Returns:
          None if there is no step, or if no step is intact and none is required.

        Raises:
          DamagedError: no step is intact, and one is required.
        """
        steps = self.steps()[::-1]
        for step in steps:
            try:
                return step, read(step)
            # Only damage: another model or version is no reason to use an older step.
            except DamagedError as error:
                if required and step == steps[-1]:
                    raise
                logger.warning("%s is passed over: %s", label(step), error)
        return None

    # --- changes ----------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the directory if it does not exist; every process does, as any may be first."""
        with explaining(f"creating the directory of checkpoints {self.path}"):
            os.makedirs(self.path, exist_ok=True)

    def check_writable(self) -> None:
        """Check that files can be created here.

        If Orbax cannot create its folder in one process, the other processes wait for that folder.

        Raises:
          CheckpointError: the directory was removed or is not writable, or its lock was removed.
        """
        if jax.process_index() == 0:
            with explaining(f"writing to {self.path}"):
                if not is_folder(self.path):
                    raise CheckpointError(
                        f"{self.path} was removed: create another Checkpointer, which creates "
                        "it again"
                    )
                self._check_lock()
                # Entries that a failed save could not rename or remove.
                self.finish_replacing()
                self.clean()
                with tempfile.TemporaryFile(dir=self.path):
                    pass

    def settle(self, step: int, aside: Sequence[int], *, removes: bool = False) -> list[str]:
        """Give a step that has appeared its own name, and set other steps aside.

        Nothing is renamed before the step's name is on disk, and nothing may be removed before this
        returns.

        Args:
          step: number of the saved step.
          aside: steps of a rolled-back run; `step` itself may be among them.
          removes: remove the earlier checkpoint of `step` instead of setting it aside.

        Returns:
          The new names of the steps that were set aside.

        Raises:
          OSError: the file system failed. The step has appeared, and may be settled again.
        """
        sync(self.step_folder(step))  # the names of its items
        sync(self.path)
        new = self.new_folder(step, replaces=True)
        names = []
        replaces = is_folder(new)
        removed = ""
        for number in aside:
            old = self.new_folder(number)
            # If an earlier call failed after the rename, the step itself already has its own name.
            if not is_folder(old) or (number == step and not replaces):
                continue
            if number == step and removes:
                removed = tempfile.mkdtemp(prefix=f"{DELETED}.", dir=self.path)
                os.rename(old, os.path.join(removed, str(number)))
            else:
                names.append(self._free_name(number))
                os.rename(old, os.path.join(self.path, names[-1]))
        if replaces:
            os.rename(new, self.new_folder(step))
        if names or replaces:
            sync(self.path)
        if removed:
            with contextlib.suppress(OSError):  # `clean` tries again
                shutil.rmtree(removed, ignore_errors=True)
        return names

    def _free_name(self, step: int) -> str:
        """Return an unused name under which to set a step aside.

        Each run that is rolled back behind the step may set one aside.
        """
        names = (f"{step}{ASIDE}{n or ''}" for n in itertools.count())
        return next(n for n in names if not os.path.lexists(os.path.join(self.path, n)))

    def clean(self) -> None:
        """Remove the leftovers of failed or killed saves; call it only while no save is running."""
        if jax.process_index() != 0 or not self.is_locked:
            return
        for name in os.listdir(self.path):
            if TEMPORARY in name or name.startswith(DELETED):
                with contextlib.suppress(OSError):  # ignore_errors does not suppress every error
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def finish_replacing(self) -> None:
        """Give `.next` steps their own names, if a kill or an error prevented it.

        Raises:
          OSError: the file system failed.
        """
        for name in os.listdir(self.path):
            match = _STEP.fullmatch(name)
            if match is not None and match[2]:
                self.settle(int(match[1]), [int(match[1])])

    def delete(self, steps: Sequence[int]) -> None:
        """Remove steps: from the list of steps immediately, from the disk as fast as it can.

        Raises:
          OSError: the file system failed.
        """
        if not steps:
            return
        # A new folder: leftovers of an earlier call may still exist.
        folder = tempfile.mkdtemp(prefix=f"{DELETED}.", dir=self.path)
        for step in steps:
            os.rename(self.new_folder(step), os.path.join(folder, str(step)))
        sync(self.path)  # or a half-removed step could reappear after a power failure
        shutil.rmtree(folder)

    # --- the lock ---------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether this run may save here."""
        return self._lock is not None

    def lock(self) -> None:
        """Take the lock, so that other runs cannot save here.

        The kernel releases it when the process ends.

        Raises:
          CheckpointError: another run saves here, or the lock file cannot be written.
        """
        if jax.process_index() != 0:
            self._lock = _ELSEWHERE
            return
        with explaining(f"locking the directory of checkpoints {self.path}"):
            self._lock = fd = self._locked()
            try:
                # Only under the lock: now no unfinished entry belongs to another run.
                self.finish_replacing()
                self.clean()
            except BaseException:
                self.unlock()
                raise
        if fd != _ELSEWHERE:
            os.register_at_fork(after_in_child=lambda: self._forget(fd))

    def _locked(self) -> int:
        """Lock the lock file and return its descriptor, or _ELSEWHERE without file locks."""
        path = os.path.join(self.path, LOCK)
        # Anyone who may write to the directory could have replaced the lock file by another file of
        # this user. So links are not followed, and nothing is written before the file was examined.
        # A program started from this process does not inherit the lock.
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except NotRegularError as error:
            raise CheckpointError(f"{path} is not a lock file: {error}: remove it") from error
        owner = b""
        try:
            status = os.fstat(fd)
            owners = (os.geteuid(), os.stat(self.path).st_uid)
            is_ours = status.st_uid in owners and status.st_nlink == 1
            owner = os.pread(fd, 64, 0) if is_ours else b""
            if not is_ours or not re.fullmatch(rb"[0-9]*\s*", owner):
                raise CheckpointError(
                    f"{path} is not a lock file of this user's runs (owner {status.st_uid}, "
                    f"{status.st_nlink} names): remove it"
                )
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only the owner writes its process ID, which the error shows to a refused run.
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            os.close(fd)
            holder = owner.decode().strip() or "?"
            raise CheckpointError(
                f"process {holder} saves checkpoints in {self.path}: use another directory "
                "for this run"
            ) from error
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise
            self._without_lock(error)
            return _ELSEWHERE
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_lock(self) -> None:
        """Raise CheckpointError unless the held lock file is still the one at the lock's path."""
        if self._lock in (None, _ELSEWHERE):
            return
        path = os.path.join(self.path, LOCK)
        locked = os.fstat(self._lock)
        try:
            named = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (locked.st_dev, locked.st_ino):
            raise CheckpointError(
                f"{path} was removed while this run saves there, so another run may save "
                "there too: "
                "check that none does, and create another Checkpointer"
            )

    def _without_lock(self, error: OSError) -> None:
        """Continue without a lock if this run has only one process, else raise CheckpointError."""
        lacks = f"the file system of {self.path} does not lock files (flock: {error.strerror})"
        remedy = (
            "mount it with locks (Lustre: -o flock; NFS: lockd), "
            "or use a directory on another file system"
        )
        if jax.process_count() > 1:
            raise CheckpointError(
                f"{lacks}, so a second job in it would not be noticed: {remedy}", errno=error.errno
            ) from error
        logger.warning(
            "%s, so a second run that saves there is not noticed: start none, or %s", lacks, remedy
        )

    def _forget(self, fd: int) -> None:
        """Close the lock file in a forked child.

        Otherwise the child would hold the lock after this process ends.
        """
        if self._lock == fd:
            self._lock = None
            os.close(fd)

    def unlock(self) -> None:
        """Release the lock, so that other runs can save here."""
        fd = self._lock
        self._lock = None
        if fd is not None and fd != _ELSEWHERE:
            with contextlib.suppress(OSError):  # only this process's ID was written
                os.close(fd)


def is_folder(path: str) -> bool:
    """Return whether `path` is a folder, or a link to one.

    Raises:
      OSError: the file system does not say, for example for lack of permission.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_step(folder: str) -> bool:
    """Return whether a folder is the folder of a step, complete or not.

    Raises:
      OSError: the file system does not say, for example for lack of permission.
    """
    return TEMPORARY in os.path.basename(folder) or any(
        is_folder(os.path.join(folder, item)) for item in (STATE, CONFIG)
    )


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a step of a zerojax checkpoint, or a directory of such steps.

    Orbax also names an item of its own checkpoints `state`, so this looks for a zerojax description
    in it.

    Raises:
      CheckpointError: the directory cannot be read.
    """
    path = os.path.abspath(os.fspath(path))
    if _is_state(os.path.join(path, STATE)):
        return True
    if not os.path.isdir(path):
        return False
    directory = Directory(path)
    return any(_is_state(directory.state_folder(step)) for step in directory.steps())


def _is_state(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, "manifest.0.json"))


def open_newest(path: str | os.PathLike[str], read: Callable[[str], T]) -> T:
    """Return the result of `read` for the state of a step.

    The step is `path` itself, or else the newest intact step in `path`.

    Args:
      path: folder of a step, or directory of steps.
      read: function that opens the folder of a state, and raises DamagedError if it is damaged.

    Raises:
      CheckpointError: there is no checkpoint.
      DamagedError: the step is damaged, or all steps are.
    """
    directory = Directory(path)
    state = os.path.join(directory.path, STATE)
    if os.path.isdir(state):
        return read(state)
    if os.path.isdir(directory.path):
        newest = directory.newest_whole(
            lambda step: read(directory.state_folder(step)), label=directory.step_folder
        )
        if newest is not None:
            return newest[1]
    raise CheckpointError(
        f"{directory.path} is neither a zerojax.Checkpointer's directory with a checkpoint, "
        "nor a step of one"
    )
