"""A directory of checkpoints: what lies in it, which step is the newest whole one, and every change that is made in it.

    {step}/state, {step}/config      a checkpoint and its two items; Orbax gives it this name when all of it is on disk
    {step}.orbax-checkpoint-tmp-*    one that is being written, or that a kill ended
    {step}.set-aside                 one of a run that was rolled back; no reader takes it for a step
    .deleted/                        old ones on their way out
    .zerojax.lock                    flocked by the process that saves here

A step comes by one rename and goes by one, so that no reader lists a step that is half there or half gone.

Whoever reads only lists and opens. What changes a directory is process 0 of the run that saves there, under the lock: the
processes of a run share one directory. In its other processes the methods that change something do nothing.
"""

import fcntl
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TypeVar

import jax

from host_offload.disk import sync
from zerojax.checkpoint.errors import CheckpointError, DamagedError, explaining

logger = logging.getLogger("zerojax")

STATE, CONFIG = "state", "config"
"""Items of a checkpoint."""
LOCK = ".zerojax.lock"
ASIDE = ".set-aside"
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of what Orbax has not finished."""
DELETED = ".deleted"
_ELSEWHERE = -1
"""In place of a file descriptor: process 0 holds the lock."""

T = TypeVar("T")


class Directory:
    """A directory of checkpoints.

    Attributes:
      path: absolute.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._lock: int | None = None  # a file descriptor, or _ELSEWHERE

    # --- what is there -----------------------------------------------------------------------------------------------------

    def listing(self) -> tuple[list[int], list[str]]:
        """Return the steps of all complete checkpoints, in order, and the names of unfinished ones; both at one moment.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        try:
            # One listing for both: between two, a step could get its name and be in neither.
            names = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(f"the directory of checkpoints {self.path} cannot be read: {error.strerror}") from error
        steps = (int(name) for name in names if name.isdigit() and os.path.isdir(os.path.join(self.path, name)))
        return sorted(steps), sorted(name for name in names if TEMPORARY in name)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order.

        Raises:
          CheckpointError: the directory cannot be read.
        """
        return self.listing()[0]

    def step_folder(self, step: int) -> str:
        """Return the folder of a step."""
        return os.path.join(self.path, str(step))

    def state_folder(self, step: int) -> str:
        """Return the folder in which the state of a step is saved."""
        return os.path.join(self.path, str(step), STATE)

    def newest_whole(
        self, read: Callable[[int], T], *, required: bool = True, label: Callable[[int], str] = "step {}".format
    ) -> tuple[int, T] | None:
        """Return the newest step that is whole, and what `read` makes of it. Damaged ones are passed over with a warning.

        Args:
          read: raises DamagedError for a step that is not whole.
          required: raise the error of the oldest step if none is whole; else that one is passed over too.
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
            # Only damage: what is of another model or version is no reason to go back to an older step.
            except DamagedError as error:
                if required and step == steps[-1]:
                    raise
                logger.warning("%s is passed over: %s", label(step), error)
        return None

    # --- what is changed ---------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the directory if it is not there; in every process, as any of them may come first."""
        with explaining(f"making the directory of checkpoints {self.path}"):
            os.makedirs(self.path, exist_ok=True)

    def check_writable(self) -> None:
        """Make a file: where Orbax cannot make its folder, the processes that do not make it wait for it."""
        if jax.process_index() == 0:
            with explaining(f"writing to {self.path}"), tempfile.TemporaryFile(dir=self.path):
                pass

    def set_aside(self, step: int) -> str | None:
        """Rename a step, so that it is none any more, and return the new name; None in processes that change nothing."""
        if jax.process_index() != 0:
            return None
        # The same step may be set aside by each run that goes back behind it.
        names = (f"{step}{ASIDE}{n or ''}" for n in itertools.count())
        name = next(n for n in names if not os.path.lexists(os.path.join(self.path, n)))
        os.rename(self.step_folder(step), os.path.join(self.path, name))
        return name

    def clean(self) -> None:
        """Remove what saves that failed, or that a kill ended, left; to be called while nothing is being saved."""
        if jax.process_index() == 0:
            for name in os.listdir(self.path):
                if TEMPORARY in name or name == DELETED:
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def empty_deleted(self) -> None:
        """Remove the files of old checkpoints."""
        if jax.process_index() == 0:
            shutil.rmtree(os.path.join(self.path, DELETED), ignore_errors=True)

    def sync(self) -> None:
        """Make the names of the steps last: a rename is on disk only when its folder is."""
        sync(self.path)

    # --- the lock ----------------------------------------------------------------------------------------------------------

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
            # O_CLOEXEC: else a program started from this process would hold the lock for as long as it runs.
            fd = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only the owner writes its process number, which the error shows to whoever is refused.
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError as error:
                owner = os.pread(fd, 64, 0).decode(errors="replace").strip() or "?"
                os.close(fd)
                raise CheckpointError(
                    f"process {owner} saves checkpoints in {self.path}: give this run a directory of its own"
                ) from error
            except BaseException:
                os.close(fd)
                raise
            self.clean()  # only now: what lies there unfinished is no other run's
        self._lock = fd
        os.register_at_fork(after_in_child=lambda: self._forget(fd))

    def _forget(self, fd: int) -> None:
        """Close the lock's file in a forked child, which would keep the lock when this process is gone."""
        if self._lock == fd:
            self._lock = None
            os.close(fd)

    def unlock(self) -> None:
        """Let other runs save here."""
        fd, self._lock = self._lock, None
        if fd is not None and fd != _ELSEWHERE:
            os.close(fd)


def is_step(folder: str) -> bool:
    """Tell whether a folder is that of a step, whole or not."""
    return TEMPORARY in os.path.basename(folder) or any(os.path.isdir(os.path.join(folder, item)) for item in (STATE, CONFIG))
