"""Fine-tune a pretrained model on conversations, prompts or texts: on a GPU, laptop or cluster.

    # All weights:
    python examples/finetune.py --model Llama-3.2-1B --data chats.jsonl
    # Adapters over a frozen base:
    python examples/finetune.py --model Llama-3.1-8B --data chats.jsonl --lora-rank 16
    # QLoRA: the base in 4 bits:
    python examples/finetune.py ... --lora-rank 16 --frozen-dtype nf4
    # Adapters of PEFT, trained on:
    python examples/finetune.py --model Llama-3.1-8B --data chats.jsonl --adapters my-adapters
    # The base on a disk:
    python examples/finetune.py ... --lora-rank 16 --frozen nvme --swap-dir /mnt/disk
    # All states on a disk:
    python examples/finetune.py ... --params nvme --grads nvme --opt-state nvme --swap-dir /mnt/disk
    # Chosen and rejected answers instead of examples:
    python examples/finetune.py ... --method dpo --data pairs.jsonl
    # Checkpoints, resuming and an export:
    python examples/finetune.py ... --checkpoint-dir runs/chat --resume True --export chat-model

`--model` is a folder with config.json, weights and a tokenizer, as written by `save_pretrained` in
transformers. `--data` names JSONL files or folders of `datasets` (docs/fine_tuning_data.md), in
memory or streamed (`corpus`). Nothing is downloaded. Examples are packed into rows of `--seq`
tokens, and one in 20 is held out for validation.

Every field of `zerojax.ZeroConfig` is an option. `report.html` in `--logdir` shows the run on one
page. With a checkpoint directory, SIGTERM and Ctrl-C save and end the run. The same command with
`--resume True` continues it; on the same devices the losses are the same, bit for bit. Options that
would change the run are rejected (`run_record`). At the end `--export` writes a folder for
transformers, or a folder of adapters for PEFT.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import methods
import optax
import train_loop
import tyro
from corpus import DataOptions, check_corpus, describe_rows, read_corpus
from jax.experimental import multihost_utils
from methods import MethodOptions
from optimizers import (
    Optimizer,
    Schedule,
    build_optimizer,
    build_schedule,
    check_optimizer,
    named_schedule,
)
from run_record import RunRecord
from selection import METRIC, Selection
from train_loop import (
    build_program,
    first_state,
    open_checkpoints,
    open_run,
    print_sizes,
    restore,
    start,
    swap_trace,
)

import zerojax as zj
from zerojax.data import (
    Batches,
    Examples,
    Mixture,
    PairRows,
    Preferences,
    Rows,
    Stream,
    StreamedBatches,
    batches,
    batches_once,
    load_tokenizer,
    prompt_tokens,
    read_template,
)
from zerojax.hf import (
    check_gguf,
    config_of,
    export_gguf,
    files_beside,
    fingerprint,
    lora_plus,
    model_of,
    read_peft,
)
from zerojax.hf import end_tokens as read_end_tokens
from zerojax.planner import flops_per_token
from zerojax.reporting import bars
from zerojax.weights import open_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DataOptions, MethodOptions):
    """Fine-tune a pretrained model.

    Attributes:
      model: folder of the model, with config.json, weights and a tokenizer.
      chat_template: file with a Jinja template for conversations that replaces the model's; an
        export includes it.
      template_options: arguments of the chat template as a JSON object, such as
        '{"enable_thinking": false}'.
      learning_rate: learning rate after the warmup. By default 2e-4 for adapters and 1e-5 for all
        weights, or a tenth of that with a method other than sft.
      optimizer: adamw, adafactor, muon (the embedding, the head and vectors by AdamW), or
        schedule_free, AdamW with averaged weights in place of a decaying rate.
      schedule: course of the learning rate after the warmup: cosine, linear or constant. By default
        a cosine; constant for schedule_free.
      warmup_steps: number of steps in which the learning rate rises; by default a thirtieth.
      final_rate: learning rate at the end, as a fraction of its peak; by default 0.1.
      keep_best: keep the checkpoints with the lowest validation loss, and the newest one; sample
        from the best one and export it.
      patience: number of validations without a new lowest loss after which the run stops; by
        default it does not stop early.
      lora_rank: rank of the adapters; 0 trains all weights.
      lora_alpha: alpha; alpha / rank scales the adapters. By default twice the rank.
      lora_targets: names of adapted projections, such as q_proj v_proj, and embed_tokens or
        lm_head; by default all seven projections.
      lora_dropout: dropout rate of the adapters' input.
      lora_use_rslora: scale the adapters by alpha / sqrt(rank).
      lora_use_dora: train the magnitudes of the adapted columns, too.
      lora_init: initial adapters: default, pissa or pissa_niter_N.
      lora_modules_to_save: names of modules to train in full, such as lm_head.
      lora_plus_ratio: learning rate of B divided by the rate of A.
      adapters: folder of adapters to train on, as PEFT writes it; it also sets their options.
      neftune_noise_alpha: size of the noise that training adds to embeddings; 0: none.
      mlp_tiles: number of tiles in which the weights of MLPs are stored and used, one at a time; 0:
        no tiles.
      expert_groups: number of groups in which the experts of a mixture are stored and used, one
        group at a time.
      loss_tiles: number of tiles of the vocabulary in which the loss is computed; by default chosen
        by size.
      prompt: texts that the model continues at the end; by default the beginning of a held-out
        example.
      sample_tokens: number of tokens to generate for each prompt at the end. If layers stream, each
        token takes a pass over all of them; of experts in groups, over those that tokens visit.
      export: folder to write at the end from the last checkpoint: weights for transformers, or
        adapters for PEFT.
      merge_lora: export the base with the adapters merged into it.
      export_gguf: GGUF file to write at the end from the exported weights, for llama.cpp.
    """

    zero: Annotated[zj.ZeroConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: zj.ZeroConfig(
            stage=3, precision="bf16", activations="remat", clip_norm=1.0
        )
    )
    model: str
    chat_template: str | None = None
    template_options: str = "{}"
    learning_rate: float | None = None
    optimizer: Optimizer = "adamw"
    schedule: Schedule | None = None
    warmup_steps: int | None = None
    final_rate: float | None = None
    keep_best: bool = False
    patience: int | None = None
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ("all",)
    lora_dropout: float = 0.0
    lora_use_rslora: bool = False
    lora_use_dora: bool = False
    lora_init: str = "default"
    lora_modules_to_save: tuple[str, ...] = ()
    lora_plus_ratio: float | None = None
    adapters: str | None = None
    neftune_noise_alpha: float = 0.0
    mlp_tiles: int = 0
    expert_groups: int = 1
    loss_tiles: int | None = None
    prompt: tuple[str, ...] = ()
    sample_tokens: int = 32
    export: str | None = None
    merge_lora: bool = False
    export_gguf: str | None = None
    # Options of all scripts, with other defaults:
    batch_size: int = 8
    weight_decay: float = 0.0
    eval_batches: int = 16
    runs: ClassVar[str] = "runs/finetune"


PATHS = ("model", "validation_data", "export", "export_gguf", "adapters")
"""Options that are paths."""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the parsed options, with `~` expanded in paths.

    Args:
      arguments: command-line arguments; None: use `sys.argv`.
    """
    options = train_loop.parse(Options, arguments)
    # A shell does not expand the ~ in `--model=~/llama`.
    paths = {name: getattr(options, name) for name in PATHS}
    expanded = {name: os.path.expanduser(path) for name, path in paths.items() if path is not None}
    return dataclasses.replace(options, **expanded)


def check(options: Options) -> None:
    """Check options whose errors would otherwise appear at the end of a run.

    Raises:
      ValueError: an option is out of range, or contradicts another.
      CheckpointError: the model's weights are missing, or a file that their index names.
    """
    train_loop.check_loop(options)
    methods.check_method(options)
    leasts = {
        "seq": 2,
        "epochs": 0,
        "steps": 0,
        "lora_rank": 0,
        "neftune_noise_alpha": 0,
        "sample_tokens": 0,
        "mlp_tiles": 0,
        "expert_groups": 1,
        "loss_tiles": 1,
    }
    for name, least in leasts.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: a number of at least {least} is needed"
            )
    _check_adapters(options)
    rate = options.learning_rate
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"--learning-rate {rate}: a positive number is needed")
    check_optimizer_options(options, options.zero)
    check_selection(options)
    check_corpus(options)
    if options.zero.frozen_dtype is not None and not has_adapters(options):
        raise ValueError(
            f"--frozen-dtype {options.zero.frozen_dtype} needs a frozen base: give --lora-rank, too"
        )
    if options.held_out < 0 or options.held_out == 1:
        raise ValueError(f"--held-out {options.held_out}: 2 or more is needed, or 0 for none")
    if options.merge_lora and options.export is None:
        raise ValueError("--merge-lora True only affects an export: give --export, too")
    if options.export is not None:
        if options.checkpoint_dir is None:
            raise ValueError("--export reads the last checkpoint: give --checkpoint-dir, too")
        if os.path.lexists(options.export):
            raise ValueError(f"--export {options.export}: the path exists and is not overwritten")
        if not options.export or not os.path.isdir(
            os.path.dirname(os.path.abspath(options.export))
        ):
            raise ValueError(f"--export {options.export}: its parent folder does not exist")
        if not os.access(os.path.dirname(os.path.abspath(options.export)), os.W_OK):
            raise ValueError(f"--export {options.export}: its parent folder is not writable")
        if options.steps == 0:
            raise ValueError(
                "--export with --steps 0: a run without steps saves no checkpoint to export"
            )
    template_options(options)
    if options.chat_template is not None:
        read_template(options.chat_template)
    if not os.path.isdir(options.model):
        raise ValueError(f"--model {options.model}: not a folder; nothing is downloaded")
    try:
        build_lora(options)
    except (ValueError, zj.CheckpointError) as error:
        targets = " ".join(options.lora_targets)  # as on the command line
        message = str(error).replace(
            f"targets={tuple(options.lora_targets)!r}", f"targets={targets}"
        )
        message = re.sub(r"^(\w+)=(.*) of a Lora", r"--lora-\1 \2", message)
        raise ValueError(message) from error
    sizes = config_of(options.model)
    if options.mlp_tiles and sizes.intermediate % options.mlp_tiles:
        raise ValueError(
            f"--mlp-tiles {options.mlp_tiles}: a number that divides {sizes.intermediate} is "
            "needed, or 0"
        )
    num_experts = 1 if sizes.mixture is None else sizes.mixture.experts
    if num_experts % options.expert_groups:
        raise ValueError(
            f"--expert-groups {options.expert_groups}: a divisor of the {num_experts} experts of "
            f"{options.model} is needed"
        )
    if options.loss_tiles is not None and options.loss_tiles > sizes.vocab:
        raise ValueError(
            f"--loss-tiles {options.loss_tiles}: at most the {sizes.vocab} tokens of the vocabulary"
        )
    open_weights(options.model)
    try:
        read_end_tokens(options.model)
    except ValueError as error:
        raise ValueError(f"--model {options.model}: {error}") from error
    check_gguf_option(options)
    if options.export is not None and (not has_adapters(options) or options.merge_lora):
        try:
            files_beside(options.model)
        except (ValueError, zj.CheckpointError) as error:
            raise ValueError(f"--export {options.export}: {error}") from error


def has_adapters(options: Options) -> bool:
    """Return whether adapters are trained, instead of all weights."""
    return bool(options.lora_rank) or options.adapters is not None


def _check_adapters(options: Options) -> None:
    """Raise ValueError if options of adapters need others, or contradict them."""
    fields = dataclasses.fields(options)
    defaults = {field.name: field.default for field in fields if field.name.startswith("lora_")}
    given = [name for name, default in defaults.items() if getattr(options, name) != default]
    shown = [f"--{name.replace('_', '-')}" for name in given]
    if not has_adapters(options) and (given or options.merge_lora):
        names = ", ".join([*shown, *["--merge-lora"] * options.merge_lora])
        raise ValueError(f"{names}: only adapters have this option: give --lora-rank, too")
    if options.adapters is not None and given not in ([], ["lora_plus_ratio"]):
        raise ValueError(
            f"--adapters {options.adapters} sets the options of its adapters: leave out "
            f"{', '.join(name for name in shown if name != '--lora-plus-ratio')}"
        )
    if options.lora_plus_ratio is not None and not 0 < options.lora_plus_ratio < math.inf:
        raise ValueError(
            f"--lora-plus-ratio {options.lora_plus_ratio}: a positive number is needed"
        )
    if options.lora_plus_ratio is not None and options.optimizer != "adamw":
        raise ValueError(
            f"--lora-plus-ratio {options.lora_plus_ratio} with --optimizer {options.optimizer}: "
            "only adamw has a rate for each group"
        )


def check_optimizer_options(options: Options, zero: zj.ZeroConfig) -> None:
    """Check the options of the optimizer with a config.

    Raises:
      ValueError: an option is out of range, or contradicts another.
    """
    check_optimizer(
        options.optimizer, options.schedule, options.warmup_steps, options.final_rate, zero
    )


def check_gguf_option(options: Options) -> None:
    """Check that a GGUF file can be written at the end.

    Raises:
      ValueError: it cannot, or nothing is exported that it could be written from.
      ModuleNotFoundError: gguf is not installed.
    """
    path = options.export_gguf
    if path is None:
        return
    if options.export is None or (has_adapters(options) and not options.merge_lora):
        raise ValueError(
            "--export-gguf converts exported weights: give --export, and with adapters "
            "--merge-lora True"
        )
    if os.path.lexists(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"--export-gguf {path}: a new file in an existing folder is needed")
    try:
        check_gguf(options.model)
    except ValueError as error:
        raise ValueError(f"--export-gguf: {error}") from error


def check_selection(options: Options) -> None:
    """Check the options that select checkpoints by validation.

    Raises:
      ValueError: one is out of range, or nothing is validated, or there are no checkpoints.
    """
    if options.patience is not None and options.patience < 1:
        raise ValueError(f"--patience {options.patience}: at least 1 is needed")
    if options.keep_best and options.checkpoint_dir is None:
        raise ValueError("--keep-best True keeps checkpoints: give --checkpoint-dir, too")
    is_validated = options.held_out or options.validation_data or options.validation_split
    if not is_validated and (options.keep_best or options.patience is not None):
        raise ValueError(
            "--keep-best and --patience compare validation losses, but --held-out 0 holds nothing "
            "out: give --validation-data, too"
        )


def template_options(options: Options) -> dict[str, Any]:
    """Return the arguments of the chat template by name.

    Raises:
      ValueError: the option is not a JSON object.
    """
    try:
        arguments = json.loads(options.template_options)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--template-options {options.template_options}: not JSON: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise ValueError(
            f"--template-options {options.template_options}: a JSON object is needed, such as {{}}"
        )
    return arguments


# --- the data -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Data of a run.

    Attributes:
      tokenizer: tokenizer from the model's folder.
      rows: training rows.
      held_out: rows of the held-out examples, or None.
      prompts: tokens of each prompt to continue at the end.
    """

    tokenizer: Any
    rows: Rows | Mixture | Stream
    held_out: Rows | Mixture | None
    prompts: list[list[int]]


def prepare(options: Options) -> Inputs:
    """Tokenize the examples, and pack them into rows.

    Raises:
      ValueError: the tokenizer or an example cannot be read, or the tokenizer does not fit the
        model.
    """
    try:
        tokenizer = load_tokenizer(options.model, chat_template=options.chat_template)
    except ValueError as error:
        raise ValueError(f"--model {error}") from error
    arguments = template_options(options)

    reads: dict[str, Any] = {}
    if options.method != "sft":
        reads["read"] = lambda path, split: methods.read(options, path, tokenizer, split, arguments)
        reads["pack_rows"] = lambda answers: methods.pack(options, answers)
    corpus = read_corpus(options, tokenizer, arguments, **reads)
    both = [part.examples if isinstance(part, Preferences) else part for part in corpus.examples]
    vocab = config_of(options.model).vocab
    prompts = [encode_prompt(tokenizer, text, arguments) for text in options.prompt] or [
        first_prompt(both[-1])
    ]
    if not all(prompts):
        raise ValueError(
            f"--prompt {' '.join(map(repr, options.prompt))}: each needs at least one token"
        )
    if (
        largest := max(*(int(examples.tokens.max()) for examples in both), *map(max, prompts))
    ) >= vocab:
        raise ValueError(
            f"--model {options.model}: its tokenizer returned token {largest}, but the model "
            f"has {vocab} tokens, numbered from 0"
        )
    return Inputs(tokenizer, corpus.rows, corpus.held_out, prompts)


def num_steps(options: Options, rows: Rows | Mixture | Stream) -> int:
    """Return the number of steps in the run."""
    if options.steps is not None:
        return options.steps
    assert not isinstance(rows, Stream)  # `check_corpus`
    return math.ceil(options.epochs * len(rows) / options.batch_size)


# --- the model ------------------------------------------------------------------------------------


def build(
    options: Options,
    mesh: jax.sharding.Mesh,
    steps: int,
    rows: Rows | Mixture | Stream | None = None,
) -> tuple[zj.Program, zj.Plan | None]:
    """Build the model of a folder, its optimizer and the train step.

    The config is planned first if the options ask for it. Methods other than sft need the rows,
    whose arrays the batch's shapes depend on.
    """
    model = model_of(
        options.model,
        lora=build_lora(options),
        mlp_tiles=options.mlp_tiles,
        expert_groups=options.expert_groups,
        loss_tiles=options.loss_tiles,
        neftune_noise_alpha=options.neftune_noise_alpha,
        loss=methods.build_loss(options),
    )
    rate = build_schedule(
        named_schedule(options.optimizer, options.schedule),
        peak_rate(options),
        steps,
        options.warmup_steps,
        options.final_rate,
    )
    if options.lora_plus_ratio is None:
        tx = build_optimizer(options.optimizer, rate, options.weight_decay)
    else:
        adamw = functools.partial(optax.adamw, weight_decay=options.weight_decay)
        tx = lora_plus(adamw, rate, options.lora_plus_ratio)
    program, plan = build_program(
        options, options.zero, model, tx, mesh, abstract_batch(options, rows)
    )
    check_optimizer_options(options, program.config)  # which may be planned
    return program, plan


def peak_rate(options: Options) -> float:
    """Return the learning rate after the warmup."""
    if options.learning_rate is not None:
        return options.learning_rate
    return methods.default_rate(options)


def build_lora(options: Options) -> zj.Lora | None:
    """Return the adapters that the options ask for, or None."""
    if options.adapters is not None:
        return read_peft(options.adapters)
    if not options.lora_rank:
        return None
    alpha = 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
    targets = "all" if options.lora_targets == ("all",) else options.lora_targets
    return zj.Lora(
        options.lora_rank,
        alpha,
        targets,
        options.lora_dropout,
        use_rslora=options.lora_use_rslora,
        use_dora=options.lora_use_dora,
        init=options.lora_init,
        modules_to_save=options.lora_modules_to_save,
    )


def abstract_batch(
    options: Options, rows: Rows | Mixture | Stream | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch over all processes."""
    a = jax.ShapeDtypeStruct((options.batch_size, options.seq), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), a)
    return batch | methods.abstract_arrays(options, rows)


def model_flops_per_token(options: Options) -> float:
    """Return the FLOP of forward and backward per token, for MFU.

    A frozen matrix has no gradient, so it takes 4 FLOP per weight instead of 6.
    """
    c = config_of(options.model)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = round(c.hidden * (2 * q + 2 * kv + 3 * c.visited_width))
    head = c.vocab * c.hidden
    whole = flops_per_token(c.layers, q, options.seq, layer, head)
    return whole - 2.0 * (c.layers * layer + head) if has_adapters(options) else whole


# --- the run --------------------------------------------------------------------------------------

ROWS = (
    "the rows of --data (which --split, --form, --each-answer, --chat-template, "
    "--template-options, --held-out, --too-long, --seq and --stream also change):"
)


def open_record(
    options: Options, mesh: jax.sharding.Mesh, ckpt: zj.Checkpointer | None
) -> RunRecord:
    """Compare the model and the options with the recorded ones, if the run resumes.

    Raises:
      ValueError: they would change the run; the message names them.
    """
    record = RunRecord(options.checkpoint_dir, ckpt is not None and bool(ckpt.all_steps()), mesh)
    lora, zero = build_lora(options), options.zero
    refuses = {
        "the weights of --model": fingerprint(options.model),
        "config.json of --model": config_of(options.model).computes(),
        "lora_rank": 0 if lora is None else lora.rank,
        "lora_alpha": None if lora is None else lora.alpha,
        "lora_targets": None if lora is None else list(lora.targets),
        "lora_use_rslora": lora is not None and lora.use_rslora,
        "lora_use_dora": lora is not None and lora.use_dora,
        "lora_init": None if lora is None else lora.init,
        "lora_modules_to_save": [] if lora is None else list(lora.modules_to_save),
        "lora_plus_ratio": options.lora_plus_ratio,
        "neftune_noise_alpha": options.neftune_noise_alpha,
        "frozen_dtype": zero.frozen_dtype,
        "learning_rate": peak_rate(options),
        "optimizer": options.optimizer,
        "schedule": named_schedule(options.optimizer, options.schedule),
        "warmup_steps": options.warmup_steps,
        "final_rate": options.final_rate,
        "weight_decay": options.weight_decay,
        "clip_norm": zero.clip_norm,
        "batch_size": options.batch_size,
        "seq": options.seq,
        "seed": options.seed,
        **methods.recorded(options),
    }
    record.check(refuses, {"lora_dropout": options.lora_dropout, "precision": zero.precision})
    return record


def begin(options: Options, inputs: Inputs, record: RunRecord) -> list[str]:
    """Compare rows and steps too, write the new record, and return the lines to print.

    Raises:
      ValueError: the rows changed, or are too few for a batch.
    """
    if not isinstance(inputs.rows, Stream) and len(inputs.rows) < options.batch_size:
        raise ValueError(
            f"--batch-size {options.batch_size}: there are only {len(inputs.rows)} rows of "
            f"--seq {options.seq}"
        )
    rows = batches(inputs.rows, options.batch_size, options.seed, part=0, num_parts=1).get_state()[
        "rows"
    ]
    held_out = (
        None
        if inputs.held_out is None
        else batches(inputs.held_out, 1, part=0, num_parts=1).get_state()["rows"]
    )
    tells = {"held-out rows": held_out, "steps": num_steps(options, inputs.rows)}
    record.check({ROWS: rows}, tells)
    return record.begin()


def main() -> None:
    """Fine-tune as the command line says."""
    with train_loop.errors_without_traceback("finetune.py", Options):
        options = parse()
        check(options)
        mesh = start(options)
        ckpt = open_checkpoints(options, METRIC if options.keep_best else None)
        record = open_record(options, mesh, ckpt)
        with bars():
            inputs = prepare(options)
        notes = begin(options, inputs, record)
        program, plan = build(options, mesh, num_steps(options, inputs.rows), inputs.rows)
    with (
        program,
        ckpt or contextlib.nullcontext(),
    ):  # the context removes the files on disk at the end, and after an error
        is_over = run(options, program, inputs, ckpt, plan, record, notes)
    if is_over:
        sys.exit(options.stopped_status)


def run(
    options: Options,
    program: zj.Program,
    inputs: Inputs,
    ckpt: zj.Checkpointer | None = None,
    plan: zj.Plan | None = None,
    record: RunRecord | None = None,
    notes: Sequence[str] = (),
) -> bool:
    """Train, validate, sample and export; return whether a signal ended the run."""
    steps = num_steps(options, inputs.rows)
    memory = program.memory(abstract_batch(options, inputs.rows))
    made: list[zj.TrainState] = []  # the state before the first step, if it was needed already

    def make() -> zj.TrainState:
        if made:
            return made.pop()
        key = jax.random.key(options.seed)
        return zj.import_hf(program, options.model, key=key, adapters=options.adapters)

    with train_loop.errors_without_traceback("finetune.py", Options):
        is_new = ckpt is None or not ckpt.all_steps()
        inputs, state = with_reference(options, program, inputs, make)
        if state is not None and is_new:
            made.append(state)
        del state  # two states would not fit
    with train_loop.errors_without_traceback("finetune.py", Options):
        trace = swap_trace(options, program)
        selection = None
        if options.keep_best or options.patience is not None:
            selection = Selection(options.checkpoint_dir, options.patience)
        part, num_parts = program.batch_part
        train_loop.local_batch_size(options, num_parts)
        data = batches(
            inputs.rows, options.batch_size, options.seed, part=part, num_parts=num_parts
        )
        report = open_run(
            options,
            program,
            memory,
            plan,
            steps=steps,
            tokens=options.batch_size * options.seq,
            flops_per_token=model_flops_per_token(options),
        )

    def validate(state: zj.TrainState) -> float:
        assert inputs.held_out is not None
        held_out = batches_once(
            inputs.held_out,
            options.batch_size,
            count=options.eval_batches,
            part=part,
            num_parts=num_parts,
        )
        if options.method != "sft":
            return zj.perplexity(program, state, held_out, weight=methods.count_pairs).loss
        return zj.perplexity(program, evaluated(options, program, state), held_out).loss

    with report:
        for line in [*([] if plan is None else [str(plan)]), *notes]:
            report.print(line)
        for line in described(inputs.rows):
            report.print(f"train: {line}")
        if inputs.held_out is not None:
            report.print(f"held out: {described(inputs.held_out)[0]}")
        lora = build_lora(options)
        trained = (
            "all of them trained"
            if lora is None
            else f"and adapters of rank {lora.rank} for {', '.join(lora.targets)}"
        )
        report.print(f"{config_of(options.model).num_params:,} parameters, {trained}")
        print_sizes(program, memory, report)
        with train_loop.errors_without_traceback("finetune.py", Options):
            state = first_state(ckpt, program, make, data, go_to)
            if record is not None:  # only now, so a run that cannot resume changes nothing
                record.keep()
        report.begin(int(state.step) + 1)
        if inputs.held_out is not None and not state.step:
            with report.pause():
                report.log(0, {"validation/loss": validate(state)})
                report.print(f"step     0  validation {report.figures['validation/loss']:.3f}")
        state, is_over = train_loop.train(
            options,
            steps,
            program,
            state,
            data,
            ckpt,
            report,
            trace,
            validate if inputs.held_out is not None else None,
            selection,
        )
        if not is_over:
            best = ckpt.best_step() if options.keep_best and ckpt is not None else None
            with train_loop.errors_without_traceback("finetune.py", Options):
                export(options, report, best)
            if options.sample_tokens:
                if ckpt is not None and best not in (None, int(state.step)):
                    del state  # its memory holds the restored state
                    state = restore(ckpt, program, data, go_to, best)
                sample(options, program, evaluated(options, program, state), inputs, report)
    return is_over


def evaluated(options: Options, program: zj.Program, state: zj.TrainState) -> zj.TrainState:
    """Return the state to evaluate: after schedule-free steps, the one with averaged weights."""
    if options.optimizer != "schedule_free":
        return state
    return dataclasses.replace(state, params=program.ema_params(state))


def go_to(data: Batches | StreamedBatches, step: int) -> None:
    """Continue with the batch of a step."""
    data.go_to(step)


def with_reference(
    options: Options, program: zj.Program, inputs: Inputs, make: Callable[[], zj.TrainState]
) -> tuple[Inputs, zj.TrainState | None]:
    """Add the reference's log-probabilities to the rows, if the method compares with them.

    Returns the inputs, and the state before the first step if it was made for this.
    """
    loss = methods.build_loss(options)
    if loss is None or not loss.reads_reference:
        return inputs, None
    base = {
        "weights": fingerprint(options.model),
        "config": config_of(options.model).computes(),
        "frozen_dtype": program.config.frozen_dtype,
        "precision": program.config.precision,
    }
    if options.adapters is not None:  # which are a part of the reference
        base["adapters"] = fingerprint(os.path.join(options.adapters, "adapter_model.safetensors"))

    def say(line: str) -> None:
        if not jax.process_index():
            print(line)

    parts = [inputs.rows] if inputs.held_out is None else [inputs.rows, inputs.held_out]
    pairs = [rows for rows in parts if isinstance(rows, PairRows)]
    found, state = methods.add_reference(options, program, pairs, base, make, say)
    held_out = found[1] if len(found) > 1 else None
    return dataclasses.replace(inputs, rows=found[0], held_out=held_out), state


def described(rows: Rows | Mixture | Stream) -> list[str]:
    """Return a summary of the rows in words, as lines."""
    return [methods.describe(rows)] if isinstance(rows, PairRows) else describe_rows(rows)


def sample(
    options: Options, program: zj.Program, state: zj.TrainState, inputs: Inputs, report: zj.Run
) -> None:
    """Print each prompt with its continuation by the most likely tokens.

    On a mesh on which nothing can be generated, print why instead: the run is done.
    """
    decode, ends = inputs.tokenizer.decode, end_tokens(options, inputs.tokenizer)
    try:
        answers = zj.generate(program, state, inputs.prompts, options.sample_tokens, eos=ends)
    except NotImplementedError as refusal:
        report.print(f"no samples: {refusal}")
        return
    for prompt, answer in zip(inputs.prompts, answers, strict=True):
        report.sample(decode(answer), decode(prompt))


def end_tokens(options: Options, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer, from the tokenizer and from generation_config.json."""
    ends = {*read_end_tokens(options.model), tokenizer.eos_token_id}
    return {token for token in ends if token is not None}


def encode_prompt(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
    """Return a text as tokens; with a chat template, as a user's message."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    return prompt_tokens(tokenizer, [{"role": "user", "content": text}], template_options=options)


def first_prompt(examples: Examples) -> list[int]:
    """Return the tokens of the first example that precede its counted tokens.

    If all tokens count, as in a text, return the first few.
    """
    tokens, counted = (a[: examples.starts[1]] for a in (examples.tokens, examples.counted))
    first = int(counted.argmax())
    return tokens[: first if first > 1 else 8].tolist()


def export(options: Options, report: zj.Run, step: int | None = None) -> None:
    """Write a checkpoint as a folder in the first process; the other processes wait.

    Args:
      options: options of the run.
      report: run that displays the folder.
      step: step of the checkpoint; None: the last one.
    """
    if options.export is None:
        return
    if jax.process_index() == 0:
        assert options.checkpoint_dir is not None
        folder = options.checkpoint_dir
        if step is not None:
            folder = os.path.join(folder, str(step))
        is_averaged = options.optimizer == "schedule_free"
        try:
            if has_adapters(options) and not options.merge_lora:
                zj.export_peft(folder, options.export, like=options.model, ema=is_averaged)
                report.print(f"{options.export} holds the adapters, for PeftModel.from_pretrained")
            else:
                zj.export_hf(
                    folder,
                    options.export,
                    like=options.model,
                    merge_lora=options.merge_lora,
                    ema=is_averaged,
                )
                report.print(
                    f"{options.export} holds the weights, for AutoModelForCausalLM.from_pretrained"
                )
            if options.chat_template is not None:
                write_template(options.chat_template, options.export)
            if options.export_gguf is not None:
                export_gguf(options.export, options.export_gguf)
                report.print(f"{options.export_gguf} holds the weights, for llama.cpp")
        except (OSError, ValueError, zj.CheckpointError) as error:
            message = str(error).replace("as `like`", "as --model")
            raise ValueError(
                f"--export {options.export}: {message}. The checkpoints are complete: use "
                "`zerojax export`"
            ) from error
    multihost_utils.sync_global_devices(
        "exported"
    )  # at its end, a process waits only 5 minutes for the other processes


def write_template(path: str, folder: str) -> None:
    """Write the run's chat template into an exported folder, where transformers reads it first."""
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(read_template(path))
    shutil.rmtree(
        os.path.join(folder, "additional_chat_templates"), ignore_errors=True
    )  # the model's own templates, such as for tools


if __name__ == "__main__":
    main()
