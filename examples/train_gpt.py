"""Train a GPT on real text with ZeRO, on a laptop or a GPU cluster.

    # Simulated devices on a CPU, about 3 minutes:
    python examples/train_gpt.py
    # The GPUs of this machine:
    python examples/train_gpt.py --preset 124m --precision bf16
    # States on a disk:
    python examples/train_gpt.py --params nvme --opt-state nvme --swap-dir /mnt/disk
    # Tiers and more, chosen by zj.plan:
    python examples/train_gpt.py --preset 1.3b --precision bf16 --auto True
    # Tensor parallelism:
    python examples/train_gpt.py --mesh fsdp=2,tensor=4 --devices 8 --sequence-parallel True
    # A long sequence, split over 4 devices:
    python examples/train_gpt.py --mesh fsdp=2,context=4 --devices 8 --attention ring --seq 1024
    # Experts:
    python examples/train_gpt.py --experts 8 --top-k 2 --mesh expert=2,fsdp=2
    # A cluster, see examples/slurm/:
    srun python examples/train_gpt.py --preset 6.7b ...
    # Resume from the newest checkpoint, or start if there is none:
    python examples/train_gpt.py --checkpoint-dir runs/gpt/checkpoints --resume True

Without arguments the text is the source of the Python standard library, as bytes, and a small GPT
is trained at ZeRO stage 3. Every field of `zerojax.ZeroConfig` is an option; segments are given as
`--activations 2:pinned_host 2:save`. If states are stored on a disk, each progress line shows the
fraction of time that the step waited for it, and `--swap-trace FILE` draws the last steps' reads
and writes for https://ui.perfetto.dev. `report.html` in `--logdir` shows the run on one page.

With a checkpoint directory, SIGTERM and Ctrl-C save and end the run with status 0. The same command
with `--resume True` continues it on any number of devices and processes, with the same text and
schedule; on the same devices its losses are the same, bit for bit.
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
from jax.sharding import PartitionSpec
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
from zerojax.config import streams, untiled_setting
from zerojax.tiling import choose_num_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(LoopOptions):
    """Train a GPT on text with ZeRO.

    Attributes:
      preset: name of the model's sizes.
      data: folder of text files; by default the Python standard library's source.
      model: "layered" scans over the blocks; "unrolled" is one Flax module gathered on use.
      steps: number of train steps.
      seq: tokens per sequence; by default the preset's.
      learning_rate: peak learning rate, reached after a tenth of the steps; it then decays to a
        tenth along a cosine.
      dropout: dropout rate.
      loss_tiles: number of tiles of the vocabulary in which the loss is computed; 0 computes the
        full logits; by default the loss is tiled if that lowers peak memory.
      mlp_tiles: number of tiles of a block's MLP, gathered and used one at a time; 0 uses two dense
        layers; by default the MLP is tiled if that lowers peak memory.
      attention: "auto" uses cuDNN where it applies, else XLA; "xla" or "cudnn" insists on one. On a
        mesh with context, "ring", "ulysses" and "gather" are methods of `zj.attention`, and "auto"
        lets it choose between ring and ulysses.
      experts: number of experts in each block, spread over the mesh axis expert; 0 uses an MLP.
      top_k: number of experts that a token visits; 2 by default. It needs experts.
      capacity_factor: an expert takes at most capacity_factor x top_k / experts of a device's
        tokens; None drops no token. It needs experts.
      expert_hidden: width of an expert's hidden dim; by default an MLP's, 4 times the width of the
        stream. It needs experts.
      sample_bytes: bytes of text to generate at the end, with all parameters on the device; use 0
        if they do not fit there.
      prompt: beginning of the generated text.
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
    attention: gpt.Attention = "auto"
    experts: int = 0
    top_k: int | None = None
    capacity_factor: float | None = 1.25
    expert_hidden: int | None = None
    sample_bytes: int = 300
    prompt: str = "def "


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the parsed options.

    Args:
      arguments: command-line arguments; None: use `sys.argv`.

    Raises:
      ValueError: an option of experts is given, and the model has none.
    """
    options = train_loop.parse(Options, arguments)
    if options.experts:
        return options
    for name in ("top_k", "capacity_factor", "expert_hidden"):
        if (value := getattr(options, name)) != getattr(Options, name):
            raise ValueError(f"{name}={value} needs experts: add --experts 8, or leave it out")
    return options


# --- the model ------------------------------------------------------------------------------------


def build(
    options: Options, mesh: jax.sharding.Mesh
) -> tuple[gpt.GPTConfig, zj.Program, zj.Plan | None]:
    """Build the GPT, its optimizer and the train step.

    The config is planned first if the options ask for it.

    Raises:
      ValueError: an option does not fit the model or the mesh.
    """
    if not options.experts and (size := mesh.shape.get("expert", 1)) > 1:
        raise ValueError(
            f"--mesh {options.mesh}: expert={size} spreads experts over devices, and the model has "
            "none: add --experts 8, or put these devices on fsdp"
        )
    preset = gpt.PRESETS[options.preset]
    if options.loss_tiles is not None and not 0 <= options.loss_tiles <= preset.vocab:
        raise ValueError(
            f"--loss-tiles {options.loss_tiles}: 0 (full logits) to {preset.vocab} (the "
            "vocabulary) is needed"
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
        attention=options.attention,
        experts=options.experts,
        top_k=2 if options.top_k is None else options.top_k,
        capacity_factor=options.capacity_factor,
        expert_hidden=options.expert_hidden,
    )
    gpt.check_tensor(c, mesh.shape["tensor"])
    c = dataclasses.replace(c, mlp_tiles=mlp_tiles(options, c, mesh))
    model = gpt.layered_gpt(c) if options.model == "layered" else gpt.unrolled_gpt(c)
    warmup = max(1, options.steps // 10)
    # The decay must be longer than the warmup, even in a run of one step.
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


def mlp_tiles(options: Options, c: gpt.GPTConfig, mesh: jax.sharding.Mesh) -> int:
    """Return the number of tiles of an MLP: the option, or a number that lowers peak memory.

    Without the option, tiles are used at stage 3 only, and not with experts. If parameters stream,
    there must be several tiles, and the config must allow records of tiles.
    """
    if options.mlp_tiles is not None:
        if options.mlp_tiles < 0 or (options.mlp_tiles and 4 * c.hidden % options.mlp_tiles):
            raise ValueError(
                f"--mlp-tiles {options.mlp_tiles}: 0 (dense layers) or a divisor of "
                f"{4 * c.hidden} is needed"
            )
        return options.mlp_tiles
    tensor = mesh.shape["tensor"]
    sizes = {
        "seq": c.seq // mesh.shape.get("context", 1),
        "hidden": c.hidden,
        "heads": c.heads,
        "itemsize": jnp.dtype(c.dtype).itemsize,
        "tensor": tensor,
    }
    streamed = options.model == "layered" and streams(options.zero)
    if (
        c.experts
        or options.zero.stage < 3
        or (streamed and untiled_setting(options.zero))
        or not memory.tiled_mlp_pays(**sizes)
    ):
        return 0
    # Each device of a tensor group holds a part of every tile.
    tiles = choose_num_tiles(
        4 * c.hidden // tensor, 4 * 8 * c.hidden**2 // tensor, "a device's part of an MLP"
    )
    return 0 if streamed and tiles == 1 else tiles


# --- the run --------------------------------------------------------------------------------------


def whole_params(c: gpt.GPTConfig, program: zj.Program, state: zj.TrainState) -> Any:
    """Return the parameter tree on the device, read layer by layer if it is stored on a disk."""
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
    with train_loop.errors_without_traceback("train_gpt.py", Options):
        options = parse()
        train_loop.check_loop(options)
        ckpt = open_checkpoints(options)
        c, program, plan = build(options, start(options))
    with (
        program,
        ckpt or contextlib.nullcontext(),
    ):  # the context removes the files on disk at the end, and after an error
        with train_loop.errors_without_traceback("train_gpt.py", Options):
            inputs = prepare(options, c, program)
        is_over = run(options, c, program, inputs, ckpt, plan)
    if is_over:
        sys.exit(options.stopped_status)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Data that a run reads, and the trace that it writes.

    Attributes:
      sizes: bytes of the training text and of the held-out text.
      data: batches of this process.
      held_out: this process's batches for validation.
      trace: context in which the traced steps run.
    """

    sizes: tuple[int, int]
    data: Iterator[Any]
    held_out: list[Any]
    trace: contextlib.AbstractContextManager[None]


def prepare(options: Options, c: gpt.GPTConfig, program: zj.Program) -> Inputs:
    """Read the text, and check that a trace can be written."""
    part, num_parts = program.batch_part
    local = local_batch_size(options, num_parts)
    trace = train_loop.swap_trace(options, program)
    text, held_text = load_corpus(options.data)
    data = batches(text, c.seq, local, options.seed, part=part, num_parts=num_parts)
    # Each process also reads its own rows of each held-out batch.
    held_out = [
        {k: v[part * local : (part + 1) * local] for k, v in batch.items()}
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
    """Train, validate and sample; return whether a signal ended the run."""
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    memory = program.memory({"tokens": tokens, "targets": tokens})
    with train_loop.errors_without_traceback("train_gpt.py", Options):
        report = open_run(
            options,
            program,
            memory,
            plan,
            steps=options.steps,
            tokens=tokens.size,
            flops_per_token=c.flops_per_token,
        )
    with report:
        if plan is not None:
            report.print(str(plan))
        report.print(
            f"{c.num_params:,} parameters, {inputs.sizes[0]:,} bytes of text, "
            f"{inputs.sizes[1]:,} held out"
        )
        print_sizes(program, memory, report)
        with train_loop.errors_without_traceback("train_gpt.py", Options):
            state = first_state(
                ckpt,
                program,
                lambda: program.init(jax.random.key(options.seed)),
                inputs.data,
                go_to,
            )
        report.begin(int(state.step) + 1)

        def validate(state: zj.TrainState) -> float:
            out = [program.eval(state, batch) for batch in inputs.held_out]
            # With experts, what is validated are the tokens, without the experts' balance.
            losses = [m["cross_entropy"] if isinstance(m, dict) else m for m in out]
            return float(np.mean([float(loss) for loss in losses]))

        state, is_over = train_loop.train(
            options,
            options.steps,
            program,
            state,
            inputs.data,
            ckpt,
            report,
            inputs.trace,
            validate,
        )
        if options.sample_bytes and not is_over:
            report.sample(sample(options, c, program, state), options.prompt)
    return is_over


def sample(options: Options, c: gpt.GPTConfig, program: zj.Program, state: zj.TrainState) -> str:
    """Return text that the model generates after the prompt."""
    prompt = options.prompt.encode()
    generate = jax.jit(lambda params, key: gpt.sample(c, params, prompt, options.sample_bytes, key))
    params = whole_params(c, program, state)
    with jax.set_mesh(program.mesh):
        if "context" in program.mesh.shape:
            # Once for all bytes: weights split over `context` would meet tokens split over it.
            params = jax.jit(lambda params: params, out_shardings=PartitionSpec())(params)
        generated = generate(params, jax.random.key(options.seed))
    # Every device has the same text, so one shard is enough.
    return bytes(np.asarray(generated.addressable_shards[0].data)).decode(errors="replace")


if __name__ == "__main__":
    main()
