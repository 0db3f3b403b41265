"""A reported training run: its figures on the terminal, in TensorBoard or W&B, and on one page.

    with zj.Run(
        "runs/gpt",
        program=program,
        memory=program.memory(batch),
        steps=1000,
        tokens=batch_size * seq,
    ) as run:
        state = program.init(key)                     # with a bar, on a terminal
        for step in range(1, 1001):
            state, metrics = program.step(state, batch)
            run.step(step, metrics)
            if step % 100 == 0:
                with run.pause():                     # this time does not count as step time
                    run.log(step, {"validation/loss": validate(state)})

Reading a metric's value waits for its step, and the device would then wait for the next program. On
an accelerator the values of a step are therefore fetched when the next step has been started: one
step is always queued, and the loop runs no further ahead. On CPUs they are fetched immediately,
because many programs that run at the same time there can wait for each other forever.

Consecutive skipped steps, and batches with a fault, are reported on a line of their own, and in the
report.

The folder holds `report.html`, which is written at each pause (at most once a minute) and at the
end, even after an error, Ctrl-C or SIGTERM; `metrics.jsonl`, with one line of figures per step; and
TensorBoard's events. Only process 0 writes and prints. The folder is locked while the run writes
to it. A full disk costs figures and a warning, but never ends the training.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from zerojax.given import as_path, whole_number
from zerojax.machines import Machine
from zerojax.memory import MemoryReport
from zerojax.planner import Plan, StepWatch, changed
from zerojax.program import Program, SkippedSteps
from zerojax.reporting.about import capacity_of, hardware_of, peaks_of, versions
from zerojax.reporting.display import Display
from zerojax.reporting.folder import PAGE, RunFolder, set_aside
from zerojax.reporting.history import History
from zerojax.reporting.page import Report, write_page
from zerojax.reporting.speed import Speed, describe, peak_flops
from zerojax.reporting.writers import Guarded, TensorBoard, Wandb, Writer, modules_of
from zerojax.runtime import AllProcesses

_PAGE_SECONDS = 60.0
_PROFILE_AFTER = 2
"""Number of steps before the profiled ones; the first one compiles."""
logger = logging.getLogger("zerojax")


class Run:
    """Receive each step's metrics and show them; a context manager.

    Attributes:
      figures: last value of each figure, by name: "train/loss", "validation/loss",
        "speed/tokens_per_second" and so on.
      watch: comparison of the steps with the plan, and count of bytes written to disk per day.
      ended: how the run ended, for the report; set it if the run did not end as planned.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        program: Program,
        report_to: Sequence[str] = ("tensorboard",),
        schedule: Callable[[int], Any] | None = None,
        steps: int | None = None,
        tokens: int | None = None,
        flops_per_token: float | None = None,
        memory: MemoryReport | None = None,
        plan: Plan | None = None,
        machine: Machine | None = None,
        config: Any = None,
        name: str | None = None,
        profile: int = 0,
        bars: bool | None = None,
        late: bool | None = None,
    ) -> None:
        """Make a run; entering it locks its folder, and its first step writes files.

        Args:
          logdir: folder of the run's files, for this run alone; it is made when the run is entered.
            A run that resumes at a later step keeps the figures of earlier steps. Figures and page
            of another run are renamed, not overwritten.
          program: program whose steps are reported.
          report_to: destinations of figures in addition to the report: "tensorboard", "wandb"
            (which needs no network with WANDB_MODE=offline).
          schedule: function from the number of previous updates to the learning rate; only needed
            if the step's metrics do not have the rate, as they do with `optax.adamw(schedule)` and
            `inject_hyperparams`.
          steps: total number of steps of the run, for the bar.
          tokens: tokens per step, over all processes.
          flops_per_token: FLOPs of the model per token, for MFU
            (`zerojax.planner.flops_per_token`).
          memory: memory of a step by tier (`program.memory(batch)`).
          plan: plan to compare the steps with.
          machine: machine whose disks' endurance is known; the plan's by default.
          config: options of the run, for the report: a mapping or a dataclass of numbers, texts and
            None, possibly nested.
          name: name of the run; the folder's name by default.
          profile: number of steps to trace by `jax.profiler`, from the third one on, into the
            folder, for TensorBoard or XProf.
          bars: whether to draw bars; by default if standard output is a terminal.
          late: whether to fetch a step's values only when the next one has been started; by default
            on all platforms but CPUs.

        Raises:
          ValueError: `report_to` has an unknown name, or a number is below its minimum.
          ModuleNotFoundError: a package is missing; the message names what to install.
        """
        steps = None if steps is None else whole_number("steps", steps, 0)
        tokens = None if tokens is None else whole_number("tokens", tokens, 1)
        profile = 0 if profile is None else whole_number("profile", profile, 0)
        folder = as_path(logdir)
        if folder is None:
            raise ValueError(
                f"logdir={logdir!r}: a folder's path is needed, a str or an os.PathLike of one"
            )
        self.logdir = os.path.abspath(folder)
        self.name = name or os.path.basename(self.logdir)
        self.figures: dict[str, float] = {}
        self.watch = StepWatch(plan, machine=machine)
        self.ended = ""
        self._modules = modules_of(report_to)
        self._schedule, self._steps, self._memory, self._profile = schedule, steps, memory, profile
        self._program, self._mesh = program, program.mesh
        self._config = _flat(config)
        self._is_first = jax.process_index() == 0
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        self._lag = int(not is_cpu if late is None else late)
        peak = peak_flops(self._mesh, program.config.precision)
        count = len(self._mesh.local_devices)
        self._speed = Speed(
            tokens=tokens, flops_per_token=flops_per_token, peak=peak, devices=count
        )
        self._pending: list[tuple[int, Mapping[str, Any]]] = []
        self._skipped, self._said = SkippedSteps(program.config), ""
        self._started = 0
        self._is_profiling = False
        self._folder: RunFolder | None = None
        self._history: History | None = None
        self._writers: list[Writer] = []
        self._display = Display(is_quiet=not self._is_first, has_bars=bars)
        self._capacity: dict[str, float | None] = {}
        self._page_written = 0.0
        self._received: list[int] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Lock the folder and start the display."""
        # Measure before the program makes its files, or the disk would seem smaller.
        self._capacity = capacity_of(self._mesh, self._program.config.swap_dir)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_folder)
            AllProcesses(self._mesh, f"opening logdir={self.logdir!r}", ValueError).do(
                self._open_folder
            )
            stack.enter_context(_sigterm_raises(self._received))
            stack.enter_context(self._display)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Fetch the last values, close the files and write the page."""
        with self._stack:
            if error is None:
                self.flush()
            else:
                self.ended = self.ended or f"{type(error).__name__}: {error}"
                with contextlib.suppress(
                    Exception
                ):  # the failed step has no values, and its error is already propagating
                    self.flush()
            self._end_profile()
            for writer in self._writers:
                writer.close(failed=error is not None)
            self._write_page(self.ended or "ended as planned")

    # --- called by the training loop --------------------------------------------------------------

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a started step, and fetch the values of the step before.

        On CPUs this step's values are fetched.

        Args:
          step: number of the step, from 1 on; the first call opens the files.
          metrics: metrics returned by `program.step`.
        """
        step = whole_number("step", step, 0)
        if self._received:  # other code caught the SystemExit that was raised at the signal
            raise SystemExit(128 + self._received[0])
        self._started += 1
        self._pending.append((step, metrics))
        while len(self._pending) > self._lag:
            self._take()
        if (
            self._profile
            and self._is_first
            and self._started in (_PROFILE_AFTER, _PROFILE_AFTER + self._profile)
        ):
            self.flush()  # so that a trace has complete steps
            self._begin_profile() if self._started == _PROFILE_AFTER else self._end_profile()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Take figures in a `pause` that belong to no step.

        Args:
          step: number of the last step.
          figures: numbers by name, such as {"validation/loss": 2.5}.

        Raises:
          ValueError: `step` is not a whole number.
        """
        step = whole_number("step", step, 0)
        self._record(step, {name: float(value) for name, value in figures.items()})

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Wait for the steps so far; the time spent in this context does not count as step time."""
        self.flush()
        try:
            yield
        finally:
            self.watch.pause()
            if self._speed.since is not None:
                if time.monotonic() - self._page_written > _PAGE_SECONDS:
                    self._write_page("running")
                self._speed.restart(time.monotonic())

    def flush(self) -> None:
        """Fetch the values of all started steps."""
        while self._pending:
            self._take()

    def print(self, text: str) -> None:
        """Print a line above the bar, in process 0.

        Args:
          text: line, without its line end.
        """
        self._display.print(text)

    @property
    def line(self) -> str:
        """The last figures in one line."""
        return describe(self.figures)

    # --- implementation ---------------------------------------------------------------------------

    def _take(self) -> None:
        """Fetch the values of the oldest step, which waits for it."""
        step, metrics = self._pending.pop(0)
        fetched = jax.device_get(dict(metrics))
        values = {f"train/{name}": float(value) for name, value in fetched.items()}
        self.watch.step(metrics)
        if self._schedule is not None and not any(
            name.startswith("train/learning_rate") for name in values
        ):
            skipped = int(values.get("train/skipped_steps", 0))
            values["train/learning_rate"] = self._rate(max(0, step - 1 - skipped))
        is_first = self._speed.since is None
        self._record(step, values | self._speed.add(metrics, time.monotonic()))
        if is_first:
            self.print(f"step {step:>5}  loss {values['train/loss']:.3f}  (compiled)")
        if (said := self._skipped.add(fetched)) is not None:
            self._said = f"step {step}: {said}"
            self.print(self._said)
        self._display.step(step, self._steps, self.line)

    def _rate(self, updates: int) -> float:
        """Return the schedule's value, computed on a CPU so that no device waits for it."""
        assert self._schedule is not None
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return float(self._schedule(updates))

    def _record(self, step: int, figures: Mapping[str, float]) -> None:
        self.figures.update(figures)
        if not self._is_first:
            return
        if self._history is None:
            self._history = self._open_history(step)
        for writer in self._writers:
            writer.write(step, figures)

    def _open_folder(self) -> None:
        """Lock the folder in process 0, and open the writers that must be able to fail early."""
        if not self._is_first:
            return
        self._folder = RunFolder(self.logdir)
        if (module := self._modules.get("wandb")) is not None:
            self._writers.append(
                Guarded("wandb", Wandb(module, self.logdir, self.name, self._config))
            )

    def _close_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _open_history(self, first: int) -> History:
        """Open the files whose content depends on the step at which the run begins."""
        if self._folder is None:
            raise RuntimeError(
                "a zj.Run takes steps in its context: with zj.Run(...) as run: run.step(...)"
            )
        if first == 1:
            set_aside(self._folder.file(PAGE))
        history = History(self._folder, first)
        self._writers.append(history)
        if "tensorboard" in self._modules:
            self._writers.append(
                Guarded("tensorboard", None, lambda: TensorBoard(self.logdir, first))
            )
        return history

    def _begin_profile(self) -> None:
        jax.profiler.start_trace(self.logdir)
        self._is_profiling = True

    def _end_profile(self) -> None:
        if not self._is_profiling:
            return
        self._is_profiling = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # such as a full disk, as JAX or its profiler reports it
            logger.warning("the profile could not be written to %s: %s", self.logdir, error)
            return
        self.print(
            f"a profile is in {self.logdir}: tensorboard --logdir {self.logdir}, with the package "
            "xprof"
        )

    def _write_page(self, state: str) -> None:
        if self._history is None:
            return
        self._page_written = time.monotonic()
        steps, _ = self._history.series.get("train/loss", ((0,), ()))
        of = f" of {self._steps:,}" if self._steps else ""
        summary = {"state": state, "steps": f"{steps[-1]:,}{of}", "last figures": self.line}
        if "validation/loss" in self.figures:
            summary["validation loss"] = f"{self.figures['validation/loss']:.4f}"
        if self.watch.written_a_day:
            days = (
                ""
                if self.watch.disk_days is None
                else f", {self.watch.disk_days:,.0f} days to its TBW"
            )
            summary["disk"] = f"{self.watch.written_a_day / 1e12:.3g} TB a day{days}"
        if self._said:
            summary["skipped steps"] = self._said
        memory = self._memory
        report = Report(
            name=self.name,
            summary=summary | ({} if memory is None else {"parameters": f"{memory.num_params:,}"}),
            series=self._history.series,
            tiers=None if memory is None else memory.tiers,
            capacity=self._capacity,
            tables={
                "Hardware": hardware_of(self._mesh) | peaks_of(self._mesh.local_devices),
                "Versions": versions(),
                "ZeroConfig, but for defaults": _flat(changed(self._program.config)),
                "Options": self._config,
            },
        )
        assert self._folder is not None
        path = self._folder.file(PAGE)
        try:
            write_page(path, report)
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)


def _flat(config: Any) -> dict[str, str]:
    """Return options as texts; nested options get dotted names.

    Raises:
      ValueError: the options are neither a mapping nor a dataclass.
    """
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        raise ValueError(f"config={config!r}: a mapping or a dataclass is needed")
    found: dict[str, str] = {}
    for name, value in config.items():
        is_nested = isinstance(value, Mapping) or (
            dataclasses.is_dataclass(value) and not isinstance(value, type)
        )
        found |= (
            {f"{name}.{below}": text for below, text in _flat(value).items()}
            if is_nested
            else {str(name): str(value)}
        )
    return found


@contextlib.contextmanager
def _sigterm_raises(received: list[int]) -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143) instead of killing the process, and add it to `received`.

    Python's garbage collector, for example, swallows exceptions raised while it runs, so the next
    step checks `received`.

    An existing handler, such as `zj.Preemption`'s, stays. In a run of several processes the handler
    is JAX's, which Python does not see.
    """
    is_free = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_free or jax.process_count() > 1:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
