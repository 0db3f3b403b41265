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
        run.sample(generate(state, "def "), prompt="def ")

Reading a metric's value waits for its step, and the device would then wait for the next program. On
an accelerator the values of a step are therefore fetched when the next step has been started: one
step is always queued, and the loop runs no further ahead. On CPUs they are fetched immediately,
because many programs that run at the same time there can wait for each other forever.

Consecutive skipped steps, and batches with a fault, are reported on a line of their own, and in the
report.

The folder holds `report.html`, which is written at each pause (at most once a minute) and at the
end, even after an error, Ctrl-C or SIGTERM; `metrics.jsonl`, with one line of figures per step;
`sessions.json`, with the start, duration and end of each process of the run; and TensorBoard's
events. Only process 0 writes and prints. The folder is locked while the run writes to it. A full
disk costs figures and a warning, but never ends the training.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, SupportsFloat

import jax

from zerojax.machines import Machine
from zerojax.memory import MemoryReport
from zerojax.planner import Plan, StepWatch
from zerojax.program import Program, SkippedSteps
from zerojax.reporting.about import describe_machine, measure_capacity, measure_peaks
from zerojax.reporting.display import Display
from zerojax.reporting.page import Report, Sample
from zerojax.reporting.profiler import Profiler
from zerojax.reporting.recorder import Recorder
from zerojax.reporting.sessions import RUNNING, format_start
from zerojax.reporting.settings import flatten_settings
from zerojax.reporting.speed import Speed, describe, peak_flops
from zerojax.reporting.summary import (
    Failure,
    build_facts,
    describe_end,
    describe_failure,
    find_problems,
)
from zerojax.reporting.writers import import_writers
from zerojax.runtime import AllProcesses, raise_on_sigterm
from zerojax.user_values import as_path, whole_number

_PAGE_SECONDS = 60.0
_MOST_NOTICES = 20
"""Most notices of skipped steps on the page: the first ones."""


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
        schedule: Callable[[int], SupportsFloat] | None = None,
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
        """Make a run; entering it locks its folder, and `begin` or its first step writes files.

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
            None, possibly nested. The report lists a dataclass's defaults separately.
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
        self.logdir = _absolute_path(logdir)
        self.name = name or os.path.basename(self.logdir)
        self.figures: dict[str, float] = {}
        self.watch = StepWatch(plan, machine=machine)
        self.ended = ""
        self._program = program
        self._mesh = program.mesh
        self._schedule = schedule
        self._memory = memory
        self._num_steps = None if steps is None else whole_number("steps", steps, 0)
        self._profiler = Profiler(self.logdir, whole_number("profile", profile or 0, 0))
        self._speed = Speed(
            tokens=None if tokens is None else whole_number("tokens", tokens, 1),
            flops_per_token=flops_per_token,
            peak=peak_flops(self._mesh, program.config.precision),
            devices=len(self._mesh.local_devices),
        )
        self._config = config
        self._settings = flatten_settings(config)
        is_first_process = jax.process_index() == 0
        self._recorder = Recorder(self.logdir, import_writers(report_to), is_first_process)
        self._display = Display(is_quiet=not is_first_process, has_bars=bars)
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        self._lag = int(not is_cpu if late is None else late)
        self._skipped = SkippedSteps(program.config)
        self._pending: list[tuple[int, Mapping[str, Any]]] = []
        self._num_started = 0
        self._last_step = 0
        self._notices: list[str] = []
        self._samples: list[Sample] = []
        self._failure: Failure | None = None
        self._page_written = 0.0
        self._machine: dict[str, str] = {}
        self._capacity: dict[str, float | None] = {}
        self._signals: list[int] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Lock the folder and start the display."""
        # Measure before the program makes its files, or the disk would seem smaller.
        self._capacity = measure_capacity(self._mesh, self._program.config.swap_dir)
        if self._recorder.is_active:
            self._machine = describe_machine(self._mesh)
        with contextlib.ExitStack() as stack:
            stack.callback(self._recorder.release)
            AllProcesses(self._mesh, f"opening logdir={self.logdir!r}", ValueError).do(
                lambda: self._recorder.open(self.name, self._settings)
            )
            stack.enter_context(raise_on_sigterm(self._signals))
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
                # The failed step has no values, and its error is already propagating.
                with contextlib.suppress(Exception):
                    self.flush()
                self.ended = self.ended or self._explain(error)
            self._profiler.stop(self.print)
            # A run that ends before its first step leaves an earlier run's page as it is.
            if not self._recorder.is_begun and self._recorder.is_unused:
                self._begin(1)
            self._recorder.close_writers(failed=error is not None)
            self._write_page(self.ended or describe_end(self._last_step, self._num_steps))

    # --- called by the training loop --------------------------------------------------------------

    def begin(self, step: int = 1) -> None:
        """Say which step comes first, and write a page that shows the run as running.

        Without this call, the first call of `step` or `log` begins the run. A run that resumes
        needs it only if no steps may remain.

        Args:
          step: number of the next step: 1 for a new run, whose folder is cleared, more for a run
            that resumes.

        Raises:
          ValueError: `step` is not a positive whole number, or the run has already begun.
        """
        step = whole_number("step", step, 1)
        if self._recorder.is_begun:
            raise ValueError(
                f"step={step}: the run has already begun, at step {self._recorder.first_step}"
            )
        self._begin(step)
        self._write_page(RUNNING)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a started step, and fetch the values of the step before.

        On CPUs this step's values are fetched.

        Args:
          step: number of the step, from 1 on; the first call opens the files.
          metrics: metrics returned by `program.step`.
        """
        step = whole_number("step", step, 0)
        if self._signals:  # other code caught the SystemExit that was raised at the signal
            raise SystemExit(128 + self._signals[0])
        self._num_started += 1
        self._pending.append((step, metrics))
        while len(self._pending) > self._lag:
            self._take()
        if self._recorder.is_active:
            self._profiler.step(self._num_started, self.flush, self.print)

    def log(self, step: int, figures: Mapping[str, SupportsFloat]) -> None:
        """Take figures in a `pause`, such as {"validation/loss": 2.5}.

        Args:
          step: number of steps so far; 0 before the first one.
          figures: values by name.

        Raises:
          ValueError: `step` is not a whole number.
        """
        step = whole_number("step", step, 0)
        values = {name: float(value) for name, value in figures.items()}
        self._record(step, values, next_step=step + 1)

    def sample(self, text: str, prompt: str = "") -> None:
        """Print a text that the model generated, and show it in the report.

        Args:
          text: generated text, without the prompt.
          prompt: beginning of the text, which the model was given.
        """
        self._samples.append(Sample(prompt, text))
        self.print(f"\n--- sample ---\n{prompt}{text}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Wait for the steps so far; the time spent in this context does not count as step time."""
        self.flush()
        try:
            yield
        finally:
            self.watch.pause()
            if time.monotonic() - self._page_written > _PAGE_SECONDS:
                self._write_page(RUNNING)
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
        """The last figures in one line; rates are those of the last interval between pauses."""
        return describe(self.figures | self._speed.measure_interval())

    # --- implementation ---------------------------------------------------------------------------

    def _explain(self, error: BaseException) -> str:
        """Return how an error ended the run, and keep it for the page unless a signal raised it."""
        if self._signals:
            return f"stopped by {signal.Signals(self._signals[0]).name}"
        if isinstance(error, KeyboardInterrupt):
            return "stopped by Ctrl-C"
        self._failure = describe_failure(error)
        return f"failed: {self._failure.message}"

    def _take(self) -> None:
        """Fetch the values of the oldest step, which waits for it."""
        step, metrics = self._pending.pop(0)
        fetched = jax.device_get(dict(metrics))
        values = {f"train/{name}": float(value) for name, value in fetched.items()}
        self.watch.step(metrics)
        has_rate = any(name.startswith("train/learning_rate") for name in values)
        if self._schedule is not None and not has_rate:
            num_skipped = int(values.get("train/skipped_steps", 0))
            values["train/learning_rate"] = self._compute_rate(max(0, step - 1 - num_skipped))
        is_compiled = not self._speed.is_started
        rates = self._speed.add(step, fetched, time.monotonic())
        self._record(step, values | rates, next_step=step)
        self._last_step = step
        if is_compiled:
            self.print(f"step {step:>5}  loss {values['train/loss']:.3f}  (compiled)")
        notice = self._skipped.add(fetched)
        if notice is not None:
            self.print(f"step {step}: {notice}")
            if len(self._notices) < _MOST_NOTICES:
                self._notices.append(f"Step {step:,}: {notice}")
        self._display.step(step, self._num_steps, self.line)

    def _compute_rate(self, updates: int) -> float:
        """Return the schedule's value, computed on a CPU so that no device waits for it."""
        assert self._schedule is not None
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return float(self._schedule(updates))

    def _record(self, step: int, figures: Mapping[str, float], next_step: int) -> None:
        self.figures.update(figures)
        if not self._recorder.is_begun:
            self._begin(next_step)
        self._recorder.write(step, figures)

    def _begin(self, first_step: int) -> None:
        self._recorder.begin(first_step)
        if self._recorder.is_begun:
            self._last_step = first_step - 1

    def _write_page(self, state: str) -> None:
        if not self._recorder.is_begun:
            return
        self._page_written = time.monotonic()
        sessions = self._recorder.list_sessions(self._last_step, state)
        series = self._recorder.series
        memory = self._memory
        facts = build_facts(series, sessions, self._num_steps, self._speed, self.watch, memory)
        report = Report(
            name=self.name,
            facts=facts | measure_peaks(self._mesh.local_devices),
            problems=find_problems(series, self._notices, self._failure),
            trace="" if self._failure is None else self._failure.trace,
            series=series,
            tiers=None if memory is None else memory.tiers,
            capacity=self._capacity,
            samples=self._samples,
            sessions=sessions,
            options=flatten_settings(self._config, omitted=(type(self._program.config),)),
            config=flatten_settings(self._program.config),
            machine=self._machine,
            written=format_start(time.time()),
        )
        self._recorder.write_page(report)


def _absolute_path(logdir: Any) -> str:
    """Return the absolute path of a run's folder.

    Raises:
      ValueError: `logdir` is not a path.
    """
    folder = as_path(logdir)
    if folder is None:
        raise ValueError(
            f"logdir={logdir!r}: a folder's path is needed, a str or an os.PathLike of one"
        )
    return os.path.abspath(folder)
