"""A directory of checkpoints: what lies in it, which step is the newest whole one, and every change
that is made in it.

    {step}/state, {step}/config      a checkpoint and its items; Orbax gives it this name when all of it is on disk
    {step}/metrics                   of the step, where checkpoints are kept by a metric
    {step}.next                      one that is whole, and takes the place of {step} of a run that was rolled back
    {step}.orbax-checkpoint-tmp-*    one that is being written, or that a kill ended
    {step}.set-aside                 one of a run that was rolled back; no reader takes it for a step
    .deleted.*/                      old ones on their way out
    .zerojax.lock                    flocked by the process that saves here

A step comes by one rename and goes by one, so that no reader lists a step that is half there or
half gone. Nothing goes before what takes its place has come, and its name is on disk:

    a step comes    {step} or {step}.next    ->  the folder's entries are flushed  ->  older and rolled-back steps go

So whenever a process is killed, or a call fails, the newest state whose save was confirmed is there
under a name that readers take for its step.

Whoever reads only lists and opens. What changes a directory is process 0 of the run that saves
  there, under the lock: the
processes of a run share one directory. In its other processes the methods that change something do
nothing.
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

STATE, CONFIG, METRICS = "state", "config", "metrics"
"""Items of a checkpoint."""
LOCK = ".zerojax.lock"
ASIDE = ".set-aside"
NEXT = ".next"
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of what Orbax has not finished."""
DELETED = ".deleted"
_ELSEWHERE = -1
"""In place of a file descriptor: process 0 holds the lock, or the file system has none."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""What flock says on file systems that do not lock files."""
# As int would write it: it also reads digits of other scripts, leading zeros, and numbers of any
# length.
_STEP = re.compile(rf"(0|[1-9][0-9]{{0,17}})({re.escape(NEXT)})?")

T = TypeVar("T")


class Directory:
    """A directory of checkpoints.

    Attributes:
      path: absolute.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._lock: int | None = None  # a file descriptor, or _ELSEWHERE

    # --- what is there ----------------------------------------------------------------------------

    def listing(self) -> tuple[list[int], list[str]]:
        """Return the steps of all complete checkpoints, in order, and the names of unfinished ones;
        both at one moment.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        try:
            # One listing for both: between two, a step could get its name and be in neither. What
            # cannot be told is an error: os.path.isdir says no of a folder that cannot be looked at
            # now, and its step would be passed over.
            with (
                explaining(f"reading the directory of checkpoints {self.path}"),
                os.scandir(self.path) as entries,
            ):
                known = [
                    entry
                    for entry in entries
                    if _STEP.fullmatch(entry.name) or TEMPORARY in entry.name
                ]
                found = [(entry.name, entry.is_dir()) for entry in known]
        except CheckpointError as error:
            if error.errno == errno.ENOENT:
                raise CheckpointError(
                    f"the directory of checkpoints {self.path} is not there", errno=errno.ENOENT
                ) from error
            raise
        steps = {int(m[1]) for name, is_dir in found if is_dir and (m := _STEP.fullmatch(name))}
        names = [name for name, _ in found]
        return sorted(steps), sorted(name for name in names if TEMPORARY in name)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        return self.listing()[0]

    def step_folder(self, step: int) -> str:
        """Return the folder of a step.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        # Both are there only while the one takes the other's place.
        newer = self.new_folder(step, replaces=True)
        with explaining(f"reading the directory of checkpoints {self.path}"):
            return newer if is_folder(newer) else self.new_folder(step)

    def new_folder(self, step: int, *, replaces: bool = False) -> str:
        """Return the folder under which a step is to appear, which may replace one of another run."""
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
        """Return the newest step that is whole, and what `read` makes of it. Damaged ones are
        passed over with a warning.

        Args:
          read: raises DamagedError for a step that is not whole.
          required: raise the error of the oldest step if none is whole; else that one is passed
            over too.
          label: what a warning calls a step.

        Returns:
          None if there is no step, or none is whole and none is required.

        Raises:
          DamagedError: no step is whole, and one is required.
        """
        steps = self.steps()[::-1]
        for step in steps:
            try:
                return step, read(step)
            # Only damage: what is of another model or version is no reason to go back to an older
            # step.
            except DamagedError as error:
                if required and step == steps[-1]:
                    raise
                logger.warning("%s is passed over: %s", label(step), error)
        return None

    # --- what is changed --------------------------------------------------------------------------

    def make(self) -> None:
        """Make the directory if it is not there; in every process, as any of them may come first."""
        with explaining(f"making the directory of checkpoints {self.path}"):
            os.makedirs(self.path, exist_ok=True)

    def check_writable(self) -> None:
        """Make a file: where Orbax cannot make its folder, the processes that do not make it wait
        for it.
        """
        if jax.process_index() == 0:
            with explaining(f"writing to {self.path}"):
                if not is_folder(self.path):
                    raise CheckpointError(
                        f"{self.path} was removed: make another Checkpointer, which makes it again"
                    )
                self._check_lock()
                # What a save that failed could not rename or remove.
                self.finish_replacing()
                self.clean()
                with tempfile.TemporaryFile(dir=self.path):
                    pass

    def settle(self, step: int, aside: Sequence[int]) -> list[str]:
        """Give a step that has appeared its own name, and set other steps aside; return the new
        names of these.

        Nothing is renamed before the step's name is on disk, and nothing may be removed before this
        returns.

        Args:
          step: that was saved.
          aside: steps of a run that was rolled back; the same step may be one.

        Raises:
          OSError: of the file system. The step is there, and may be settled again.
        """
        sync(self.step_folder(step))  # the names of its items
        sync(self.path)
        new, names = self.new_folder(step, replaces=True), []
        replaces = is_folder(new)
        for other in aside:
            old = self.new_folder(other)
            # Under this step's own name is the step itself, where a call that failed has come so
            # far.
            if is_folder(old) and (other != step or replaces):
                names.append(self._free_name(other))
                os.rename(old, os.path.join(self.path, names[-1]))
        if replaces:
            os.rename(new, self.new_folder(step))
        if names or replaces:
            sync(self.path)
        return names

    def _free_name(self, step: int) -> str:
        """Return the name under which to set a step aside; each run that goes back behind it may
        set one aside.
        """
        names = (f"{step}{ASIDE}{n or ''}" for n in itertools.count())
        return next(n for n in names if not os.path.lexists(os.path.join(self.path, n)))

    def clean(self) -> None:
        """Remove what saves that failed, or that a kill ended, left; to be called while nothing is
        being saved.
        """
        if jax.process_index() != 0 or not self.is_locked:
            return
        for name in os.listdir(self.path):
            if TEMPORARY in name or name.startswith(DELETED):
                with contextlib.suppress(OSError):  # which ignore_errors does not suppress all
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def finish_replacing(self) -> None:
        """Give those that were to take another's place their names, where a kill or an error came
        between.

        Raises:
          OSError: of the file system.
        """
        for name in os.listdir(self.path):
            if (found := _STEP.fullmatch(name)) and found[2]:
                self.settle(int(found[1]), [int(found[1])])

    def delete(self, steps: Sequence[int]) -> None:
        """Remove steps: from the list of steps at once, from the disk as fast as that is.

        Raises:
          OSError: of the file system.
        """
        if not steps:
            return
        # A folder of its own: what an earlier call could not remove may still be there.
        folder = tempfile.mkdtemp(prefix=f"{DELETED}.", dir=self.path)
        for step in steps:
            os.rename(self.new_folder(step), os.path.join(folder, str(step)))
        sync(self.path)  # or a step could be there again, half removed, after a power failure
        shutil.rmtree(folder)

    # --- the lock ---------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether this run may save here."""
        return self._lock is not None

    def lock(self) -> None:
        """Keep other runs from saving here; the kernel lets go of the lock with the process.

        Raises:
          CheckpointError: another run saves here, or the lock's file cannot be written.
        """
        if jax.process_index() != 0:
            self._lock = _ELSEWHERE
            return
        with explaining(f"taking the directory of checkpoints {self.path}"):
            self._lock = fd = self._locked()
            try:
                # Only now: what lies there unfinished is no other run's.
                self.finish_replacing()
                self.clean()
            except BaseException:
                self.unlock()
                raise
        if fd != _ELSEWHERE:
            os.register_at_fork(after_in_child=lambda: self._forget(fd))

    def _locked(self) -> int:
        """Return the descriptor of the lock's file, locked, or _ELSEWHERE where the file system has
        no locks.
        """
        path = os.path.join(self.path, LOCK)
        # Whoever may write to the directory could have put another file of this user's in its
        # place: no link is followed, and nothing is written before the file was looked at. A
        # program started from this process does not inherit the lock.
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except NotRegularError as error:
            raise CheckpointError(f"{path} is no file of a lock: {error}: remove it") from error
        owner = b""
        try:
            status, owners = os.fstat(fd), (os.geteuid(), os.stat(self.path).st_uid)
            is_ours = status.st_uid in owners and status.st_nlink == 1
            owner = os.pread(fd, 64, 0) if is_ours else b""
            if not is_ours or not re.fullmatch(rb"[0-9]*\s*", owner):
                raise CheckpointError(
                    f"{path} is no lock that this user's runs made (owner {status.st_uid}, {status.st_nlink} names): remove it"
                )
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only the owner writes its process number, which the error shows to whoever is refused.
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            os.close(fd)
            holder = owner.decode().strip() or "?"
            raise CheckpointError(
                f"process {holder} saves checkpoints in {self.path}: give this run a directory of its own"
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
        """Raise unless the lock that is held is still the one that others look for."""
        if self._lock in (None, _ELSEWHERE):
            return
        path, held = os.path.join(self.path, LOCK), os.fstat(self._lock)
        try:
            named = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise CheckpointError(
                f"{path} was removed while this run saves there, so another run may save there too: see that there is none, "
                "and make another Checkpointer"
            )

    def _without_lock(self, error: OSError) -> None:
        """Go on without a lock where only this process saves, or raise."""
        lacks = f"the file system of {self.path} does not lock files (flock: {error.strerror})"
        remedy = "mount it with locks (Lustre: -o flock; NFS: lockd), or give a directory of another file system"
        if jax.process_count() > 1:
            raise CheckpointError(
                f"{lacks}, so a second job in it would not be noticed: {remedy}", errno=error.errno
            ) from error
        logger.warning(
            "%s: a second run that saves there is not noticed, so start none; or %s", lacks, remedy
        )

    def _forget(self, fd: int) -> None:
        """Close the lock's file in a forked child, which would keep the lock when this process is
        gone.
        """
        if self._lock == fd:
            self._lock = None
            os.close(fd)

    def unlock(self) -> None:
        """Let other runs save here."""
        fd, self._lock = self._lock, None
        if fd is not None and fd != _ELSEWHERE:
            with contextlib.suppress(OSError):  # the number of this process is all that was written
                os.close(fd)


def is_folder(path: str) -> bool:
    """Tell whether there is a folder, or a link to one.

    Raises:
      OSError: that cannot be told, for want of a right, say.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_step(folder: str) -> bool:
    """Tell whether a folder is that of a step, whole or not.

    Raises:
      OSError: as `is_folder` does.
    """
    return TEMPORARY in os.path.basename(folder) or any(
        is_folder(os.path.join(folder, item)) for item in (STATE, CONFIG)
    )


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of a zerojax checkpoint, or a directory of some.

    Orbax names an item of its own checkpoints `state`, too, so a zerojax description is looked for
    in it.
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
    """Return what `read` makes of a step's state, if `path` is the folder of a step, or of the
    newest whole step in it.

    Args:
      path: of the step or of the directory.
      read: opens the folder of a state, and raises DamagedError where it is not whole.

    Raises:
      CheckpointError: there is no checkpoint.
      DamagedError: the step is not whole, or none is.
    """
    directory = Directory(path)
    if os.path.isdir(state := os.path.join(directory.path, STATE)):
        return read(state)
    if os.path.isdir(directory.path):
        newest = directory.newest_whole(
            lambda step: read(directory.state_folder(step)), label=directory.step_folder
        )
        if newest is not None:
            return newest[1]
    raise CheckpointError(
        f"{directory.path} is neither a zerojax.Checkpointer's directory with a checkpoint, nor a step of one"
    )
