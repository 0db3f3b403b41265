"""Train a GPT on real text with ZeRO, on a laptop or a GPU cluster.

    python examples/train_gpt.py                                    # simulated devices on a CPU, about 3 minutes
    python examples/train_gpt.py --preset 124m --precision bf16     # on the GPUs that are there
    python examples/train_gpt.py --params nvme --opt-state nvme --swap-dir /mnt/disk    # states on a disk
    python examples/train_gpt.py --preset 1.3b --precision bf16 --auto True    # tiers and more by zj.plan
    python examples/train_gpt.py --mesh fsdp=2,tensor=4 --devices 8 --sequence-parallel True    # tensor parallelism
    srun python examples/train_gpt.py --preset 6.7b ...             # on a cluster: see examples/slurm/
    python examples/train_gpt.py --checkpoint-dir runs/gpt/checkpoints --resume True    # go on where it was stopped, if it was

With no arguments the text is the source of the Python standard library, as bytes, and a small GPT
is trained at ZeRO stage 3. Every field of `zerojax.ZeroConfig` is an option, and segments are given
as `--activations 2:pinned_host 2:save`. Where states rest on a disk, a line of progress tells for
how much of the time the step waited for it, and `--swap-trace FILE` draws the last steps' reads and
writes for https://ui.perfetto.dev. `runs/gpt/report.html` shows the run on one page.

With a directory of checkpoints, SIGTERM and Ctrl-C save and end the run with status 0. The same
command with `--resume True` goes on from there, on any number of devices and processes: over the
same text and schedule, and on the same devices to the same losses, bit for bit.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_loop
import tyro
from text_data import batches, go_to, load_corpus, validation_batches
from train_loop import (
    LoopOptions,
    build_program,
    first_state,
    local_batch_size,
    open_checkpoints,
    open_run,
    print_sizes,
    start,
)

import zerojax as zj
from zerojax import memory
from zerojax.config import streams, whole_layers
from zerojax.tiling import choose_num_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(LoopOptions):
    """Train a GPT on text with ZeRO.

    Attributes:
      preset: sizes of the model.
      data: folder of text files; the Python standard library's source by default.
      model: "layered" scans over the blocks, "unrolled" is one Flax module gathered on use.
      steps: train steps.
      seq: tokens of a sequence; the preset's by default.
      learning_rate: its peak, after a tenth of the steps; it falls to a tenth as a cosine.
      dropout: rate.
      loss_tiles: tiles of the vocabulary in which the loss is computed; 0 keeps whole logits; by
        default they are tiled where that lowers the peak of memory.
      mlp_tiles: tiles of a block's MLP, gathered and used one at a time; 0 is two dense layers; by
        default likewise.
      sample_bytes: bytes of text to generate at the end, with all parameters on the device; 0 where
        they do not fit there.
      prompt: how that text begins.
    """

    runs: ClassVar[str] = "runs/gpt"

    zero: Annotated[zj.ZeroConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: zj.ZeroConfig(stage=3, clip_norm=1.0)
    )
    preset: Literal[
        "tiny", "small", "124m", "350m", "1.3b", "6.7b", "13b", "22b", "175b", "530b", "1t"
    ] = "tiny"
    data: str | None = None
    model: Literal["layered", "unrolled"] = "layered"
    steps: int = 500
    seq: int | None = None
    learning_rate: float = 3e-3
    dropout: float = 0.0
    loss_tiles: int | None = None
    mlp_tiles: int | None = None
    sample_bytes: int = 300
    prompt: str = "def "


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line, by default of this one."""
    return train_loop.parse(Options, arguments)


# --- the model ------------------------------------------------------------------------------------


def build(
    options: Options, mesh: jax.sharding.Mesh
) -> tuple[gpt.GPTConfig, zj.Program, zj.Plan | None]:
    """Build the GPT, its optimizer and the train step, by a plan if the options ask for one."""
    preset = gpt.PRESETS[options.preset]
    if options.loss_tiles is not None and not 0 <= options.loss_tiles <= preset.vocab:
        raise ValueError(
            f"--loss-tiles {options.loss_tiles}: 0 (whole logits) to {preset.vocab}, the vocabulary, is needed"
        )
    c = dataclasses.replace(
        preset,
        seq=options.seq or preset.seq,
        dropout=options.dropout,
        dtype={"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[
            options.zero.precision
        ],
        tensor_axis="tensor" if mesh.shape["tensor"] > 1 else None,
        loss_tiles=options.loss_tiles,
    )
    gpt.check_tensor(c, mesh.shape["tensor"])
    c = dataclasses.replace(c, mlp_tiles=mlp_tiles(options, c, mesh.shape["tensor"]))
    model = gpt.layered_gpt(c) if options.model == "layered" else gpt.unrolled_gpt(c)
    warmup = max(1, options.steps // 10)
    # The decay must be longer than the warmup, also in a run of one step.
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        options.learning_rate,
        warmup,
        max(options.steps, warmup + 1),
        options.learning_rate / 10,
    )
    tx = optax.adamw(rate, b2=0.95, weight_decay=options.weight_decay)
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return c, *build_program(options, options.zero, model, tx, mesh, batch)


def mlp_tiles(options: Options, c: gpt.GPTConfig, tensor: int) -> int:
    """Return the tiles of an MLP: those asked for, or at stage 3 those that lower the peak of
    memory.

    Where parameters stream, they do if there are several, and if records may be tiles.
    """
    if options.mlp_tiles is not None:
        if options.mlp_tiles < 0 or (options.mlp_tiles and 4 * c.hidden % options.mlp_tiles):
            raise ValueError(
                f"--mlp-tiles {options.mlp_tiles}: 0 (dense layers) or a divisor of {4 * c.hidden} is needed"
            )
        return options.mlp_tiles
    sizes = {
        "seq": c.seq,
        "hidden": c.hidden,
        "heads": c.heads,
        "itemsize": jnp.dtype(c.dtype).itemsize,
        "tensor": tensor,
    }
    streamed = options.model == "layered" and streams(options.zero)
    if (
        options.zero.stage < 3
        or (streamed and whole_layers(options.zero))
        or not memory.tiled_mlp_pays(**sizes)
    ):
        return 0
    # Of a tile each device of a tensor group has its part.
    tiles = choose_num_tiles(
        4 * c.hidden // tensor, 4 * 8 * c.hidden**2 // tensor, "a device's part of an MLP"
    )
    return 0 if streamed and tiles == 1 else tiles


# --- the run --------------------------------------------------------------------------------------


def whole_params(c: gpt.GPTConfig, program: zj.Program, state: zj.TrainState) -> Any:
    """Return the parameter tree on the device, read piece by piece from a disk if it rests there."""
    if program.config.params != "nvme":
        return jax.tree.map(
            lambda a: jax.device_put(a, a.sharding.with_memory_kind("device")),
            program.params(state),
        )
    pieces = dict(program.iter_params(state))  # float32
    layers = [pieces[f"blocks/{i}"] for i in range(c.layers)]
    stack = jax.jit(lambda *layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    with jax.set_mesh(program.mesh):
        return {"embed": pieces["embed"], "blocks": stack(*layers), "head": pieces["head"]}


def main() -> None:
    """Train as the command line says."""
    with train_loop.told_alone("train_gpt.py", Options):
        options = parse()
        train_loop.check_loop(options)
        ckpt = open_checkpoints(options)
        c, program, plan = build(options, start(options))
    with (
        program,
        ckpt or contextlib.nullcontext(),
    ):  # what is on a disk goes at the end, and after an error
        with train_loop.told_alone("train_gpt.py", Options):
            inputs = prepare(options, c, program)
        is_over = run(options, c, program, inputs, ckpt, plan)
    if is_over:
        sys.exit(options.stopped_status)


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
    local = local_batch_size(options)
    trace = train_loop.swap_trace(options, program)
    text, held_text = load_corpus(options.data)
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
) -> bool:
    """Train a program, validate and sample it, and tell whether a signal ended it."""
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    memory = program.memory({"tokens": tokens, "targets": tokens})
    with train_loop.told_alone("train_gpt.py", Options):
        seen = open_run(
            options,
            program,
            memory,
            plan,
            steps=options.steps,
            tokens=tokens.size,
            flops_per_token=c.flops_per_token,
        )
    with seen:
        if plan is not None:
            seen.print(str(plan))
        seen.print(
            f"{c.num_params:,} parameters, {inputs.sizes[0]:,} bytes of text, {inputs.sizes[1]:,} held out"
        )
        print_sizes(program, memory, seen)
        with train_loop.told_alone("train_gpt.py", Options):
            state = first_state(
                ckpt,
                program,
                lambda: program.init(jax.random.key(options.seed)),
                inputs.data,
                go_to,
            )

        def validate(state: zj.TrainState) -> float:
            return float(np.mean([float(program.eval(state, batch)) for batch in inputs.held_out]))

        state, is_over = train_loop.train(
            options, options.steps, program, state, inputs.data, ckpt, seen, inputs.trace, validate
        )
        if options.sample_bytes and not is_over:
            seen.print(f"\n--- sample ---\n{options.prompt}{sample(options, c, program, state)}")
    return is_over


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
