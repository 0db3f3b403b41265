"""Shared parts of the training scripts: options, devices, checkpoints, and the loop of steps.

A script parses its options, builds a program, and opens a `zj.Run`. Then it calls

    state = first_state(ckpt, program, make, data, go_to)          # a new or a saved state
    state, is_over = train(options, steps, program, state, ...)    # until a signal ends the run
"""

import contextlib
import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import jax
import optax
import tyro
from selection import METRIC, Selection

import zerojax as zj
from zerojax.memory import MemoryReport
from zerojax.planner import changed
from zerojax.reporting import import_writers
from zerojax.runtime import AllProcesses
from zerojax.sharding import AXES

TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of every training script.

    Attributes:
      auto: let `zj.plan` choose the fields of the config that have their defaults; it measures the
        machine, and prints its plan.
      machine: machine for the plan: a name that `zerojax machines` lists, or a TOML file that
        `zerojax probe` wrote; by default this machine.
      mesh: sizes of the axes pipe, data, fsdp, expert, context and tensor, such as data=2,fsdp=4;
        -1 takes the remaining devices.
      devices: number of devices to simulate if there is only a CPU.
      batch_size: sequences per step, over all devices and microbatches.
      weight_decay: weight decay of AdamW.
      seed: seed of the parameters and of the order of the data.
      eval_every: steps between validations.
      eval_batches: number of held-out batches per validation.
      logdir: folder of the report, the metrics and the TensorBoard event files, for this run only;
        by default `log` in checkpoint_dir, where a resumed run finds it, or without checkpoints a
        new folder below `runs`.
      report_to: where metrics go in addition to the report: tensorboard, wandb.
      profile: number of steps to trace by jax.profiler into logdir, from the third step on.
      swap_trace: file for a trace of disk transfers in the last TRACED_STEPS steps of the first
        process, such as trace.json.gz.
      checkpoint_dir: folder of the checkpoints, on a file system that all processes share; by
        default no checkpoints are saved.
      checkpoint_every: steps between checkpoints; the last step is saved too.
      keep: number of newest checkpoints to keep.
      resume: continue from the newest complete checkpoint, with otherwise unchanged options; start
        a new run if there is none.
      stopped_status: exit status after a signal ended the run and its state was saved; a nonzero
        status lets a scheduler restart the run.
      heartbeat_timeout: seconds without a sign of life after which a process counts as dead, and
        the other processes end.
    """

    runs: ClassVar[str] = "runs"
    """Parent folder of the logs of runs without a checkpoint directory."""

    auto: bool = False
    machine: str | None = None
    mesh: str = "fsdp=-1"
    devices: int = 4
    batch_size: int = 32
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    logdir: str | None = None
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    profile: int = 0
    swap_trace: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    keep: int = 3
    resume: bool = False
    stopped_status: int = 0
    heartbeat_timeout: int = 30


Options = TypeVar("Options", bound=LoopOptions)
REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def segment_option(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[zj.Segment] | None:
    """Return the parser of segments, as in `--activations 8:pinned_host 16:remat 8:save`.

    A segment's saved_names and offloaded_names can be set only in Python.
    """
    if info.type is not zj.Segment:
        return None

    def parse(args: list[str]) -> zj.Segment:
        layers, _, activations = args[0].partition(":")
        return zj.Segment(int(layers), activations=cast(Any, activations or "save"))

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="LAYERS:ACTIVATIONS",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, zj.Segment),
        str_from_instance=lambda segment: [f"{segment.num_layers}:{segment.activations}"],
    )


def parse(options: type[Options], arguments: Sequence[str] | None = None) -> Options:
    """Return the parsed options, with logdir set.

    Args:
      options: class of the options.
      arguments: command-line arguments; None: use `sys.argv`.
    """
    parsed = tyro.cli(
        options, args=arguments, config=(tyro.conf.FlagConversionOff,), registry=REGISTRY
    )
    if parsed.logdir is None:
        parsed = dataclasses.replace(parsed, logdir=default_logdir(parsed))
    return parsed


def default_logdir(options: LoopOptions) -> str:
    """Return a log folder that no other run uses."""
    if options.checkpoint_dir is not None:
        return os.path.join(options.checkpoint_dir, "log")
    return os.path.join(options.runs, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def name_run(options: LoopOptions) -> str | None:
    """Return the name of the run's checkpoints if it logs among them; None: the log's name."""
    if options.checkpoint_dir is None or options.logdir != default_logdir(options):
        return None
    return os.path.basename(os.path.abspath(options.checkpoint_dir))


@contextlib.contextmanager
def errors_without_traceback(
    script: str, options: type[LoopOptions] = LoopOptions
) -> Iterator[None]:
    """End the script with the error's message and status 2 if its options are rejected.

    Unknown options end it in the same way.
    """
    try:
        yield
    except (
        ValueError,
        NotImplementedError,
        ModuleNotFoundError,
        zj.SwapError,
        zj.CheckpointError,
    ) as error:
        print(f"{script}: error: {as_options(str(error), options)}", file=sys.stderr)
        sys.exit(2)


def as_options(message: str, options: type[LoopOptions]) -> str:
    """Return a message with fields and arguments as options: swap_dir='x' as --swap-dir x."""
    fields = {field.name for kind in (options, zj.ZeroConfig) for field in dataclasses.fields(kind)}
    fields -= {"data"}  # also an axis of the mesh
    # Replace a name of one word only if a value follows it: "a shorter seq" and "the model" are
    # plain English.
    names = (
        rf"(?<![\w-])(?:({'|'.join(sorted(fields))})=(?:'([^']*)')?"
        rf"|({'|'.join(sorted(f for f in fields if '_' in f))})\b)"
    )

    def named(match: re.Match[str]) -> str:
        with_value, value, alone = match.groups()
        return f"--{(with_value or alone).replace('_', '-')}" + f" {value or ''}" * (
            with_value is not None
        )

    return re.sub(names, named, message)


def check_loop(options: LoopOptions) -> None:
    """Check options whose errors would otherwise appear in the middle or at the end of a run.

    Raises:
      ValueError: an option is out of range, or the folder of the report is a file.
      ModuleNotFoundError: a package that `report_to` needs is missing.
    """
    for name in ("devices", "batch_size", "eval_every", "eval_batches", "checkpoint_every", "keep"):
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    for name in ("seed", "profile", "weight_decay"):
        if not 0 <= (value := getattr(options, name)) < 2**63:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: a number from 0 to below 2^63 is needed"
            )
    for name in ("logdir", "checkpoint_dir"):
        if getattr(options, name) == "":
            raise ValueError(f"--{name.replace('_', '-')}: the name of a folder is needed")
        if (
            (folder := getattr(options, name)) is not None
            and os.path.exists(folder)
            and not os.path.isdir(folder)
        ):
            raise ValueError(
                f"--{name.replace('_', '-')} {folder} is a file, but a folder is needed"
            )
    import_writers(options.report_to)


# --- the machine ----------------------------------------------------------------------------------


def start(options: LoopOptions) -> jax.sharding.Mesh:
    """Join a cluster, simulate devices if there is only a CPU, and return the mesh."""
    jax.config.update("jax_num_cpu_devices", options.devices)  # only the CPU backend reads this
    zj.join_cluster(options.heartbeat_timeout)
    pairs = [pair.partition("=") for pair in options.mesh.split(",")]
    if wrong := [pair for *pair, size in pairs if not size.removeprefix("-").isdecimal()]:
        raise ValueError(
            f"--mesh {options.mesh}: {''.join(wrong[0])} has no number: sizes are as in "
            "data=2,fsdp=4"
        )
    sizes = {axis: size for axis, _, size in pairs}
    if unknown := sorted(set(sizes) - set(AXES)):
        *first, last = AXES
        raise ValueError(
            f"--mesh {options.mesh}: {unknown} unknown; the axes are {', '.join(first)} and {last}"
        )
    axes: dict[str, Any] = {axis: int(size) for axis, size in sizes.items()}
    if "fsdp" not in axes and -1 in axes.values():
        # At most one axis can be -1: the remaining devices cannot be split between two axes.
        axes["fsdp"] = 1
    try:
        mesh = zj.make_mesh(
            data=axes.get("data", 1),
            fsdp=axes.get("fsdp", -1),
            tensor=axes.get("tensor", 1),
            context=axes.get("context", 1),
            expert=axes.get("expert", 1),
            pipe=axes.get("pipe", 1),
        )
    except ValueError as error:
        raise ValueError(f"--mesh {options.mesh}: {error}{_advise(axes)}") from error
    AllProcesses(mesh, "looking for the folder of the report", ValueError).do(
        lambda: check_logdir(options)
    )
    return mesh


def _advise(axes: Mapping[str, int]) -> str:
    """Return the number of devices to simulate for a mesh, for an error, or "" if none helps."""
    sizes = [size for size in axes.values() if size != -1]
    needed = math.prod(sizes)
    is_valid = min(sizes, default=1) >= 1 and len(axes) - len(sizes) <= 1
    is_simulated = jax.default_backend() == "cpu" and jax.process_count() == 1
    if not is_simulated or not is_valid or needed == jax.device_count():
        return ""
    return f". On a CPU, --devices {needed} simulates this number"


def check_logdir(options: LoopOptions) -> None:
    """Check that the first process, which writes the report, can create and write its folder.

    Raises:
      ValueError: it cannot.
    """
    if jax.process_index():
        return
    assert options.logdir is not None
    folder = os.path.abspath(options.logdir)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--logdir {options.logdir}: {folder} is not a writable folder")


def build_program(
    options: LoopOptions,
    zero: zj.ZeroConfig,
    model: zj.Model | zj.LayeredModel,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    batch: Any,
) -> tuple[zj.Program, zj.Plan | None]:
    """Build the train step; plan the config first if the options ask for it."""
    plan = None
    if options.auto:  # the plan keeps the fields that the options set
        plan = zj.plan(model, tx, mesh, batch, load_machine(options), fixed=changed(zero))
    return zj.build_train_step(
        model, tx, zero if plan is None else plan.config, mesh, batch=batch
    ), plan


def load_machine(options: LoopOptions) -> zj.Machine | None:
    """Return the machine that the options name, or None.

    Raises:
      ValueError: the machine's name or file is invalid.
    """
    try:
        return None if options.machine is None else zj.machine(options.machine)
    except ValueError as error:
        raise ValueError(f"--machine: {error}") from error


def local_batch_size(options: LoopOptions, num_parts: int) -> int:
    """Return the number of sequences per batch that one process reads.

    Args:
      options: the run's options.
      num_parts: number of parts in which processes read a batch, of `program.batch_part`.

    Raises:
      ValueError: the batch does not divide by the number of parts.
    """
    if options.batch_size % num_parts:
        raise ValueError(
            f"--batch-size {options.batch_size} does not divide by {num_parts} processes"
        )
    return options.batch_size // num_parts


def open_run(
    options: LoopOptions,
    program: zj.Program,
    memory: MemoryReport,
    plan: zj.Plan | None,
    *,
    steps: int,
    tokens: int,
    flops_per_token: float,
) -> zj.Run:
    """Return the `zj.Run` that displays and logs the run.

    Args:
      options: options of the script.
      program: program that trains.
      memory: memory report of its step.
      plan: plan that chose its config, or None.
      steps: number of steps in the full run.
      tokens: tokens per step.
      flops_per_token: FLOP per token of the model.
    """
    assert options.logdir is not None
    return zj.Run(
        options.logdir,
        program=program,
        report_to=options.report_to,
        steps=steps,
        tokens=tokens,
        flops_per_token=flops_per_token,
        memory=memory,
        plan=plan,
        machine=load_machine(options),
        config=options,
        name=name_run(options),
        profile=options.profile,
    )


def print_sizes(program: zj.Program, memory: MemoryReport, report: zj.Run) -> None:
    """Print the devices, the config, and the bytes per device in each tier."""
    mesh = program.mesh
    report.print(
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)}, ZeRO stage "
        f"{program.config.stage}, {program.config.precision}: "
        f"{memory.model_state_bytes / 2**20:.1f} MiB of model states a device"
    )
    if on_disk := sum(memory.tiers["nvme"].values()):
        buffers = memory.tiers["pinned_host"]["buffers"]
        report.print(
            f"a device has {on_disk / 2**20:.1f} MiB on disk and {buffers / 2**20:.1f} MiB of "
            "buffers in host memory"
        )


# --- checkpoints ----------------------------------------------------------------------------------


def open_checkpoints(
    options: LoopOptions, best_metric: str | None = None
) -> zj.Checkpointer | None:
    """Return the checkpointer, or None without a checkpoint directory.

    Args:
      options: options of the script.
      best_metric: metric by which the best checkpoints are kept; None: the newest ones are kept.

    Raises:
      ValueError: the directory holds checkpoints but `resume` is not set, or `resume` is set
        without a directory.
    """
    if options.checkpoint_dir is None:
        if options.resume:
            raise ValueError("--resume True: from which --checkpoint-dir?")
        return None
    ckpt = zj.Checkpointer(
        options.checkpoint_dir,
        max_to_keep=options.keep,
        save_interval_steps=options.checkpoint_every,
        best_metric=best_metric,
    )
    if not options.resume and (steps := ckpt.all_steps()):
        raise ValueError(
            f"--checkpoint-dir {options.checkpoint_dir} holds checkpoints up to step {steps[-1]}: "
            "continue from there with --resume True, or choose another directory for a new run"
        )
    return ckpt


def first_state(
    ckpt: zj.Checkpointer | None,
    program: zj.Program,
    make: Callable[[], zj.TrainState],
    data: Any,
    go_to: Callable[[Any, int], None],
) -> zj.TrainState:
    """Return the state to start from, restored or new.

    `data` is moved to the position at which the state was saved.

    Args:
      ckpt: checkpointer of the run, or None.
      program: program to which the state belongs.
      make: function that returns a new state.
      data: batches of this process.
      go_to: function that moves `data` to the position after a number of steps.
    """
    if ckpt is None or not ckpt.all_steps():
        return make()
    return restore(ckpt, program, data, go_to)


def restore(
    ckpt: zj.Checkpointer,
    program: zj.Program,
    data: Any,
    go_to: Callable[[Any, int], None],
    step: int | None = None,
) -> zj.TrainState:
    """Return a saved state, by default the newest one, and move `data` to its position."""
    try:
        return ckpt.restore(program, step, data=data)
    except (
        zj.IteratorError
    ):  # the number of processes changed, but together they read the same batches
        state = ckpt.restore(program, step)
        go_to(data, int(state.step))
        return state


# --- the loop -------------------------------------------------------------------------------------


def swap_trace(
    options: LoopOptions, program: zj.Program
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the traced steps run; it does nothing without `--swap-trace`."""
    if options.swap_trace and jax.process_index() == 0:
        return program.trace_swaps(options.swap_trace)
    return contextlib.nullcontext()


def train(
    options: LoopOptions,
    steps: int,
    program: zj.Program,
    state: zj.TrainState,
    data: Iterator[Any],
    ckpt: zj.Checkpointer | None,
    report: zj.Run,
    trace: contextlib.AbstractContextManager[None],
    validate: Callable[[zj.TrainState], float] | None,
    selection: Selection | None = None,
) -> tuple[zj.TrainState, bool]:
    """Run the remaining steps with checkpoints and validations.

    Returns the last state, and whether a signal ended the run.

    Args:
      options: options of the script.
      steps: number of steps in the full run.
      program: program that trains.
      state: state to start from.
      data: batches of this process.
      ckpt: checkpointer that saves the state, or None.
      report: run that displays and logs the steps.
      trace: context of the last steps.
      validate: function that returns the loss of held-out data, or None.
      selection: rule that saves the state at each new lowest loss and ends the run after
        evaluations that are all higher, or None.
    """
    if state.step:
        report.print(f"continues from step {int(state.step)} of {options.checkpoint_dir}")
    first, is_over = int(state.step) + 1, False
    if selection is not None and validate is not None:
        selection.resume(first - 1)
        is_due = first > 1 and (first - 1) % options.eval_every == 0
        if is_due and first - 1 not in selection.losses:  # a signal ended the run at this step
            with report.pause():
                selection.add(first - 1, _evaluate(validate, state, report))
        if selection.is_exhausted:
            steps = first - 1
    with contextlib.ExitStack() as last_steps:
        preemption = None if ckpt is None else last_steps.enter_context(zj.Preemption())
        for step in range(first, steps + 1):
            # The trace is written when `last_steps` closes, after the loop.
            if step == max(first, steps + 1 - TRACED_STEPS):
                last_steps.enter_context(trace)
            state, metrics = program.step(state, next(data))
            report.step(step, metrics)
            is_over = preemption is not None and preemption.reached(step)
            is_lowest, loss = False, math.inf
            if not is_over and (step % options.eval_every == 0 or step == steps):
                with report.pause():
                    line = f"step {step:>5}  {report.line}"
                    if "train/dropped_fraction" in report.figures:
                        line += f"  dropped {100 * report.figures['train/dropped_fraction']:.1f} %"
                    if validate is not None:
                        loss = _evaluate(validate, state, report)
                        line += f"  validation {loss:.3f}"
                        is_lowest = selection is not None and selection.add(step, loss)
                    report.print(line)
            ends = is_over or step == steps or (selection is not None and selection.is_exhausted)
            if ckpt is not None:
                is_forced = ends or is_lowest
                ckpt.save(program, state, metrics={METRIC: loss}, data=data, force=is_forced)
            if ends:
                break
        if ckpt is not None:
            ckpt.wait()  # finish saving before signals can end the process again
    if report.watch.written_a_day:
        days = (
            ""
            if report.watch.disk_days is None
            else f", {report.watch.disk_days:,.0f} days to its TBW"
        )
        report.print(
            f"the disk takes {report.watch.written_a_day / 1e12:.3g} TB a day at this pace{days}"
        )
    if selection is not None and selection.losses:
        report.print(f"lowest validation {selection.lowest:.3f}, at step {selection.lowest_step}")
        if selection.is_exhausted and not is_over:
            report.ended = f"stopped early after step {int(state.step)}"
            report.print(f"{report.ended}: --patience {selection.patience}")
    report.print(f"report: {os.path.join(options.logdir or '', 'report.html')}")
    if is_over:
        report.ended = f"stopped by a signal after step {int(state.step)}"
        report.print(f"{report.ended}, which is saved: --resume True continues from there")
    return state, is_over


def _evaluate(
    validate: Callable[[zj.TrainState], float], state: zj.TrainState, report: zj.Run
) -> float:
    """Return the loss of held-out data, and log it."""
    loss = validate(state)
    report.log(int(state.step), {METRIC: loss})
    return loss
