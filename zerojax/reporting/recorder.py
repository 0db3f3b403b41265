"""What process 0 writes of a run: figures, the page and the sessions, in one locked folder.

Other processes have a recorder too, which writes nothing. A run begins once its first step is
known: only then are figures of an earlier run, or of steps that are computed again, moved aside.
"""

import logging
import time
from collections.abc import Mapping
from types import ModuleType

from zerojax.reporting.folder import PAGE, RunFolder, set_aside
from zerojax.reporting.history import History, Series
from zerojax.reporting.page import Report, write_page
from zerojax.reporting.sessions import (
    Session,
    format_start,
    mark_killed,
    read_command,
    read_sessions,
    write_sessions,
)
from zerojax.reporting.settings import Setting
from zerojax.reporting.writers import Guarded, TensorBoard, Wandb, Writer

logger = logging.getLogger("zerojax")


class Recorder:
    """Files and writers of a run.

    Attributes:
      logdir: absolute path of the folder.
      is_active: whether this process writes.
      first_step: number of the session's first step.
    """

    def __init__(self, logdir: str, modules: Mapping[str, ModuleType], is_active: bool) -> None:
        """Set up a recorder; `open` locks the folder.

        Args:
          logdir: absolute path of the folder.
          modules: packages of further writers, by name in `report_to`.
          is_active: whether this process writes.
        """
        self.logdir = logdir
        self.is_active = is_active
        self.first_step = 1
        self._modules = modules
        self._folder: RunFolder | None = None
        self._history: History | None = None
        self._writers: list[Writer] = []
        self._earlier_sessions: list[Session] = []
        self._start = time.time()
        self._clock_start = time.monotonic()

    @property
    def is_begun(self) -> bool:
        """Whether the first step is known; other processes never begin."""
        return self._history is not None

    @property
    def is_unused(self) -> bool:
        """Whether the folder has nothing of an earlier run."""
        return self._folder is not None and not self._folder.has_figures()

    @property
    def series(self) -> Mapping[str, Series]:
        """Values of each figure, by its name."""
        return {} if self._history is None else self._history.series

    def open(self, name: str, settings: list[Setting]) -> None:
        """Lock the folder, and open the writers that must be able to fail early.

        Args:
          name: name of the run.
          settings: options of the run.

        Raises:
          ValueError: the folder cannot be written, or another run writes to it.
        """
        if not self.is_active:
            return
        self._folder = RunFolder(self.logdir)
        module = self._modules.get("wandb")
        if module is not None:
            config = {setting.name: setting.value for setting in settings}
            self._writers.append(Guarded("wandb", Wandb(module, self.logdir, name, config)))

    def begin(self, first_step: int) -> None:
        """Open the files whose contents depend on the step at which the run begins."""
        if not self.is_active:
            return
        if self._folder is None:
            raise RuntimeError(
                "a zj.Run takes steps in its context: with zj.Run(...) as run: run.step(...)"
            )
        self.first_step = first_step
        if first_step <= 1:
            set_aside(self._folder.file(PAGE))
        else:
            self._earlier_sessions = [mark_killed(one) for one in read_sessions(self._folder)]
        # A new run also drops an earlier run's figures before its first step.
        self._history = History(self._folder, first_step if first_step > 1 else 0)
        self._writers.append(self._history)
        if "tensorboard" in self._modules:
            self._writers.append(
                Guarded("tensorboard", None, lambda: TensorBoard(self.logdir, first_step))
            )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for writer in self._writers:
            writer.write(step, figures)

    def close_writers(self, failed: bool) -> None:
        """Close the writers; `failed` is whether the run ended with an error."""
        for writer in self._writers:
            writer.close(failed=failed)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self._folder is not None:
            self._folder.close()

    def list_sessions(self, last_step: int, state: str) -> list[Session]:
        """Return the earlier sessions and the current one.

        Args:
          last_step: number of the last step so far.
          state: how the current session ended, or "running".
        """
        current = Session(
            started=format_start(self._start),
            seconds=max(0.0, time.monotonic() - self._clock_start),
            first_step=self.first_step,
            last_step=last_step,
            state=state,
            command=read_command(),
        )
        return [*self._earlier_sessions, current]

    def write_page(self, report: Report) -> None:
        """Replace the page and the sessions; log a failure."""
        assert self._folder is not None
        path = self._folder.file(PAGE)
        try:
            write_page(path, report)
            write_sessions(self._folder, report.sessions)
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)
