"""Train a GPT on real text with ZeRO, on a laptop or a GPU cluster.

    python examples/train_gpt.py                                    # simulated devices on a CPU, about 3 minutes
    python examples/train_gpt.py --preset 124m --precision bf16     # on the GPUs that are there
    python examples/train_gpt.py --params nvme --opt-state nvme --swap-dir /mnt/disk    # states on a disk
    python examples/train_gpt.py --preset 1.3b --precision bf16 --auto True    # tiers and more by zj.plan
    python examples/train_gpt.py --mesh fsdp=2,tensor=4 --devices 8 --sequence-parallel True    # tensor parallelism
    srun python examples/train_gpt.py --preset 6.7b ...             # on a cluster: see examples/slurm/
    python examples/train_gpt.py --checkpoint-dir runs/gpt/checkpoints --resume True    # go on where it was stopped, if it was

With no arguments the text is the source of the Python standard library, as bytes, and a small GPT is trained at ZeRO stage 3.
Every field of `zerojax.ZeroConfig` is an option, and segments are given as `--activations 2:pinned_host 2:save`. Where states
rest on a disk, a line of progress tells for how much of the time the step waited for it, and `--swap-trace FILE` draws the last
steps' reads and writes for https://ui.perfetto.dev. `runs/gpt/report.html` shows the run on one page.

With a directory of checkpoints, SIGTERM and Ctrl-C save and end the run with status 0. The same command with `--resume True`
goes on from there, on any number of devices and processes: over the same text and schedule, and on the same devices to the
same losses, bit for bit.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from text_data import batches, go_to, load_corpus, validation_batches

import zerojax as zj
from zerojax import memory
from zerojax.config import streams, whole_layers
from zerojax.planner import changed
from zerojax.tiling import choose_num_tiles

TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train a GPT on text with ZeRO.

    Attributes:
      preset: sizes of the model.
      auto: let `zj.plan` choose what of the config is left as it is; it measures the machine, and prints its plan.
      machine: of the plan: a name of `zerojax machines`, or a TOML file of `zerojax probe`; this machine by default.
      data: folder of text files; the Python standard library's source by default.
      model: "layered" scans over the blocks, "unrolled" is one Flax module gathered on use.
      mesh: sizes of the axes, such as data=2,fsdp=4,tensor=1; -1 is the rest of the devices.
      devices: devices to simulate where there is only a CPU.
      steps: train steps.
      batch_size: sequences in a step, over all devices and microbatches.
      seq: tokens of a sequence; the preset's by default.
      learning_rate: its peak, after a tenth of the steps; it falls to a tenth as a cosine.
      weight_decay: of AdamW.
      dropout: rate.
      loss_tiles: tiles of the vocabulary in which the loss is computed; 0 keeps whole logits; by default they are tiled where
        that lowers the peak of memory.
      mlp_tiles: tiles of a block's MLP, gathered and used one at a time; 0 is two dense layers; by default likewise.
      seed: of the parameters and the order of the text.
      eval_every: steps between validations.
      eval_batches: held-out batches in a validation.
      sample_bytes: bytes of text to generate at the end, with all parameters on the device; 0 where they do not fit there.
      prompt: how that text begins.
      logdir: folder of the report, the figures and the TensorBoard event files.
      report_to: where figures go beside the report: tensorboard, wandb.
      profile: steps to trace by jax.profiler, from the third on, into logdir.
      swap_trace: file for a trace of the last TRACED_STEPS steps' swapping, such as trace.json.gz; of the first process.
      checkpoint_dir: of the checkpoints, on a file system that all processes share; none are saved by default.
      checkpoint_every: steps between checkpoints; the last step has one too.
      keep: newest checkpoints to keep.
      resume: go on from the newest whole checkpoint, with the other options as they were; start anew if there is none.
      heartbeat_timeout: seconds after which a process of several that gives no sign of life counts as dead, and the others end.
    """

    zero: Annotated[zj.ZeroConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: zj.ZeroConfig(stage=3, clip_norm=1.0)
    )
    preset: Literal["tiny", "small", "124m", "350m", "1.3b", "6.7b", "13b", "22b", "175b", "530b", "1t"] = "tiny"
    auto: bool = False
    machine: str | None = None
    data: str | None = None
    model: Literal["layered", "unrolled"] = "layered"
    mesh: str = "fsdp=-1"
    devices: int = 4
    steps: int = 500
    batch_size: int = 32
    seq: int | None = None
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    loss_tiles: int | None = None
    mlp_tiles: int | None = None
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    sample_bytes: int = 300
    prompt: str = "def "
    logdir: str = "runs/gpt"
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    profile: int = 0
    swap_trace: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    keep: int = 3
    resume: bool = False
    heartbeat_timeout: int = 30


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def segment_option(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[zj.Segment] | None:
    """Take segments as an option: `--activations 8:pinned_host 16:remat 8:save`. Their names to keep are for Python alone."""
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


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line, by default of this one."""
    return tyro.cli(Options, args=arguments, config=(tyro.conf.FlagConversionOff,), registry=REGISTRY)


# --- the machine ---------------------------------------------------------------------------------------------------------


def start(options: Options) -> jax.sharding.Mesh:
    """Join a cluster, simulate devices if there is only a CPU, and lay out the mesh."""
    jax.config.update("jax_num_cpu_devices", options.devices)  # read by the CPU backend alone
    zj.join_cluster(options.heartbeat_timeout)
    sizes = dict(pair.split("=") for pair in options.mesh.split(","))
    unknown = set(sizes) - {"data", "fsdp", "tensor"}
    if unknown:
        raise ValueError(f"--mesh {options.mesh}: {sorted(unknown)} unknown; the axes are data, fsdp and tensor")
    axes = {axis: int(size) for axis, size in sizes.items()}
    if "fsdp" not in axes and -1 in axes.values():
        # One -1 at most: the rest of the devices cannot be split between two axes.
        axes["fsdp"] = 1
    return zj.make_mesh(data=axes.get("data", 1), fsdp=axes.get("fsdp", -1), tensor=axes.get("tensor", 1))


# --- the model -----------------------------------------------------------------------------------------------------------


def build(options: Options, mesh: jax.sharding.Mesh) -> tuple[gpt.GPTConfig, zj.Program, zj.Plan | None]:
    """Build the GPT, its optimizer and the train step, by a plan if the options ask for one."""
    preset = gpt.PRESETS[options.preset]
    if options.loss_tiles is not None and not 0 <= options.loss_tiles <= preset.vocab:
        raise ValueError(f"--loss-tiles {options.loss_tiles}: 0 (whole logits) to {preset.vocab}, the vocabulary, is needed")
    c = dataclasses.replace(
        preset,
        seq=options.seq or preset.seq,
        dropout=options.dropout,
        dtype={"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[options.zero.precision],
        tensor_axis="tensor" if mesh.shape["tensor"] > 1 else None,
        loss_tiles=options.loss_tiles,
    )
    gpt.check_tensor(c, mesh.shape["tensor"])
    c = dataclasses.replace(c, mlp_tiles=mlp_tiles(options, c, mesh.shape["tensor"]))
    model = gpt.layered_gpt(c) if options.model == "layered" else gpt.unrolled_gpt(c)
    warmup = max(1, options.steps // 10)
    # The decay must be longer than the warmup, also in a run of one step.
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup, max(options.steps, warmup + 1), options.learning_rate / 10
    )
    tx = optax.adamw(rate, b2=0.95, weight_decay=options.weight_decay)
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    plan = None
    if options.auto:  # what the options say stays as it is
        machine = None if options.machine is None else zj.machine(options.machine)
        plan = zj.plan(model, tx, mesh, batch, machine, fixed=changed(options.zero))
    config = options.zero if plan is None else plan.config
    return c, zj.build_train_step(model, tx, config, mesh, batch=batch), plan


def mlp_tiles(options: Options, c: gpt.GPTConfig, tensor: int) -> int:
    """Return the tiles of an MLP: those asked for, or at stage 3 those that lower the peak of memory.

    Where parameters stream, they do if there are several, and if records may be tiles.
    """
    if options.mlp_tiles is not None:
        if options.mlp_tiles < 0 or (options.mlp_tiles and 4 * c.hidden % options.mlp_tiles):
            raise ValueError(f"--mlp-tiles {options.mlp_tiles}: 0 (dense layers) or a divisor of {4 * c.hidden} is needed")
        return options.mlp_tiles
    sizes = {"seq": c.seq, "hidden": c.hidden, "heads": c.heads, "itemsize": jnp.dtype(c.dtype).itemsize, "tensor": tensor}
    streamed = options.model == "layered" and streams(options.zero)
    if options.zero.stage < 3 or (streamed and whole_layers(options.zero)) or not memory.tiled_mlp_pays(**sizes):
        return 0
    # Of a tile each device of a tensor group has its part.
    tiles = choose_num_tiles(4 * c.hidden // tensor, 4 * 8 * c.hidden**2 // tensor, "a device's part of an MLP")
    return 0 if streamed and tiles == 1 else tiles


# --- checkpoints ---------------------------------------------------------------------------------------------------------


def open_checkpoints(options: Options) -> zj.Checkpointer | None:
    """Return what saves and restores, or None without a directory.

    Raises:
      ValueError: the directory holds checkpoints, and the run is not to go on from them.
    """
    if options.checkpoint_dir is None:
        if options.resume:
            raise ValueError("--resume True: from which --checkpoint-dir?")
        return None
    ckpt = zj.Checkpointer(options.checkpoint_dir, max_to_keep=options.keep, save_interval_steps=options.checkpoint_every)
    if not options.resume and (steps := ckpt.all_steps()):
        raise ValueError(
            f"--checkpoint-dir {options.checkpoint_dir} holds checkpoints up to step {steps[-1]}: --resume True goes on from "
            "there, and a new run needs another directory"
        )
    return ckpt


def first_state(options: Options, program: zj.Program, ckpt: zj.Checkpointer | None, data: Any) -> zj.TrainState:
    """Return the state to start from, a new or a saved one, and put `data` where it was saved."""
    if ckpt is None or not ckpt.all_steps():
        return program.init(jax.random.key(options.seed))
    try:
        return ckpt.restore(program, data=data)
    except zj.IteratorError:  # the processes are more or fewer; their batches, side by side, are the same
        state = ckpt.restore(program)
        go_to(data, int(state.step))
        return state


# --- the loop ------------------------------------------------------------------------------------------------------------


def validate(program: zj.Program, state: zj.TrainState, held_out: list[Any]) -> float:
    """Return the mean loss over the held-out batches."""
    return float(np.mean([float(program.eval(state, batch)) for batch in held_out]))


def whole_params(c: gpt.GPTConfig, program: zj.Program, state: zj.TrainState) -> Any:
    """Return the parameter tree on the device, read piece by piece from a disk if it rests there."""
    if program.config.params != "nvme":
        return jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("device")), program.params(state))
    pieces = dict(program.iter_params(state))  # float32
    layers = [pieces[f"blocks/{i}"] for i in range(c.layers)]
    stack = jax.jit(lambda *layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    with jax.set_mesh(program.mesh):
        return {"embed": pieces["embed"], "blocks": stack(*layers), "head": pieces["head"]}


@contextlib.contextmanager
def told_alone() -> Iterator[None]:
    """End the script where its options are refused, by the message alone and with status 2, as for an unknown option."""
    try:
        yield
    except (ValueError, NotImplementedError, zj.SwapError, zj.CheckpointError) as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Train as the command line says."""
    with told_alone():
        options = parse()
        ckpt = open_checkpoints(options)
        c, program, plan = build(options, start(options))
    with program, ckpt or contextlib.nullcontext():  # what is on a disk goes at the end, and after an error
        with told_alone():
            inputs = prepare(options, c, program)
        run(options, c, program, inputs, ckpt, plan)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads and writes.

    Attributes:
      sizes: of the training and the held-out text, in bytes.
      data: this process's batches.
      held_out: likewise, those of a validation.
      trace: the context of the steps that are traced.
    """

    sizes: tuple[int, int]
    data: Iterator[Any]
    held_out: list[Any]
    trace: contextlib.AbstractContextManager[None]


def prepare(options: Options, c: gpt.GPTConfig, program: zj.Program) -> Inputs:
    """Read the text, and find out whether a trace can be written."""
    me, processes = jax.process_index(), jax.process_count()
    if options.batch_size % processes:
        raise ValueError(f"--batch-size {options.batch_size} does not divide by {processes} processes")
    trace = program.trace_swaps(options.swap_trace) if options.swap_trace and me == 0 else contextlib.nullcontext()
    text, held_text = load_corpus(options.data)
    local = options.batch_size // processes
    data = batches(text, c.seq, local, options.seed, part=me, num_parts=processes)
    # Each process reads its own rows of a held-out batch too.
    held_out = [
        {k: v[me * local : (me + 1) * local] for k, v in batch.items()}
        for batch in validation_batches(held_text, c.seq, options.batch_size, options.eval_batches)
    ]
    return Inputs((len(text), len(held_text)), data, held_out, trace)


def run(
    options: Options,
    c: gpt.GPTConfig,
    program: zj.Program,
    inputs: Inputs,
    ckpt: zj.Checkpointer | None = None,
    plan: zj.Plan | None = None,
) -> dict[str, float]:
    """Train a program, validate and sample it, and return the last figures."""
    mesh = program.mesh
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    memory = program.memory({"tokens": tokens, "targets": tokens})
    with told_alone():
        seen = zj.Run(
            options.logdir,
            program=program,
            report_to=options.report_to,
            steps=options.steps,
            tokens=options.batch_size * c.seq,
            flops_per_token=c.flops_per_token,
            memory=memory,
            plan=plan,
            machine=None if options.machine is None else zj.machine(options.machine),
            config={name: value for name, value in vars(options).items() if name != "zero"},
            profile=options.profile,
        )
    with seen:
        if plan is not None:
            seen.print(str(plan))
        seen.print(f"{c.num_params:,} parameters, {inputs.sizes[0]:,} bytes of text, {inputs.sizes[1]:,} held out")
        seen.print(
            f"{mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)}, ZeRO stage {program.config.stage}, "
            f"{program.config.precision}: {memory.model_state_bytes / 2**20:.1f} MiB of model states a device"
        )
        if on_disk := sum(memory.tiers["nvme"].values()):
            buffers = memory.tiers["pinned_host"]["buffers"]
            seen.print(
                f"a device has {on_disk / 2**20:.1f} MiB on disk and {buffers / 2**20:.1f} MiB of buffers in host memory"
            )
        with told_alone():
            state = first_state(options, program, ckpt, inputs.data)
        if state.step:
            seen.print(f"goes on from step {int(state.step)} of {options.checkpoint_dir}")
        state, is_over = train(options, program, state, inputs, ckpt, seen)
        if seen.watch.written_a_day:
            days = "" if seen.watch.disk_days is None else f", {seen.watch.disk_days:,.0f} days to its TBW"
            seen.print(f"the disk takes {seen.watch.written_a_day / 1e12:.3g} TB a day at this pace{days}")
        if is_over:
            seen.ended = f"stopped by a signal after step {int(state.step)}"
            seen.print(f"{seen.ended}, which is saved: --resume True goes on from there")
        elif options.sample_bytes:
            seen.print(f"\n--- sample ---\n{options.prompt}{sample(options, c, program, state)}")
    return seen.figures


def train(
    options: Options, program: zj.Program, state: zj.TrainState, inputs: Inputs, ckpt: zj.Checkpointer | None, seen: zj.Run
) -> tuple[zj.TrainState, bool]:
    """Make the steps that are left, with checkpoints and validations, and tell whether a signal ended them."""
    first, is_over = int(state.step) + 1, False
    with contextlib.ExitStack() as last_steps:
        preemption = None if ckpt is None else last_steps.enter_context(zj.Preemption())
        for step in range(first, options.steps + 1):
            # The trace is written when `last_steps` closes, after the loop.
            if step == max(first, options.steps + 1 - TRACED_STEPS):
                last_steps.enter_context(inputs.trace)
            state, metrics = program.step(state, next(inputs.data))
            seen.step(step, metrics)
            is_over = preemption is not None and preemption.reached(step)
            if ckpt is not None:
                ckpt.save(program, state, data=inputs.data, force=is_over or step == options.steps)
            if is_over:
                break
            if step % options.eval_every == 0 or step == options.steps:
                with seen.pause():
                    line = seen.line
                    seen.log(step, {"validation/loss": validate(program, state, inputs.held_out)})
                    seen.print(f"step {step:>5}  {line}  validation {seen.figures['validation/loss']:.3f}")
        if ckpt is not None:
            ckpt.wait()  # before signals end the process again
    return state, is_over


def sample(options: Options, c: gpt.GPTConfig, program: zj.Program, state: zj.TrainState) -> str:
    """Return text that the model writes after the prompt."""
    prompt = options.prompt.encode()
    generate = jax.jit(lambda params, key: gpt.sample(c, params, prompt, options.sample_bytes, key))
    params = whole_params(c, program, state)
    with jax.set_mesh(program.mesh):
        generated = generate(params, jax.random.key(options.seed))
    # Every device has the same text: the shard of one is enough.
    return bytes(np.asarray(generated.addressable_shards[0].data)).decode(errors="replace")


if __name__ == "__main__":
    main()
