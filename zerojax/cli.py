"""The `zerojax` command: closed forms, predictions from compiled programs, figures of machines, and what a checkpoint holds.

zerojax memory --params 7.5e9 --shards 64 --precision bf16
zerojax memory --layers 48 --hidden 6144 --heads 64 --seq 2048 --shards 2 --tensor 8 --sequence-parallel --activations selective
zerojax simulate PROGRAM.txt --link 50e9
zerojax bench-io FOLDER
zerojax machines
zerojax probe --swap-dir FOLDER --out machine.toml
zerojax plan --params 1T --layers 128 --hidden 25600 --heads 256 --seq 1024 --batch 7 --machine dgx2
zerojax inspect CHECKPOINTS
zerojax export CHECKPOINTS OUT --format safetensors --dtype bfloat16
zerojax export CHECKPOINTS OUT --format hf --like FOLDER --merge-lora

What a command is given, or finds on the machine, may be wrong: it then prints one line and exits with status 2. With
ZEROJAX_TRACEBACK=1 in the environment it raises the error instead. Any other error is a fault of the program's own, and always
shows where it comes from.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from zerojax.activations import MODES
from zerojax.arguments import count, number, whole
from zerojax.checkpoint import CheckpointError, inspect
from zerojax.hf import export_hf, export_peft
from zerojax.hlo import CALLBACKS, RATES, STREAMS, Rates, Simulation, dumped_text, module_name, read_thunks, simulate
from zerojax.memory import (
    collective_elements,
    korthikanti_layer_bytes,
    layer_activation_bytes,
    model_state_bytes,
    state_bytes,
    transformer_params,
)
from zerojax.planner import NAMED, add_plan_command, machine, probe, run_plan
from zerojax.planner import report as disk_report
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES
from zerojax.weights import DTYPES, export_orbax, export_safetensors

_EXPORTS = ("orbax", "safetensors", "hf", "peft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer, and how `tensor` splits it.

    Attributes:
      layers: L.
      hidden: h.
      heads: a.
      seq: s, tokens of a sequence.
      vocab: V, or 0 without an embedding.
      batch: b, sequences on the devices of one tensor group.
      tensor: t, devices that share a layer's products.
      sequence_parallel: the stream is split over them, too.
      partition_activations: what is kept of it is.
      fused_attention: attention is one kernel.

    Raises:
      ValueError: they do not divide.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int = 0
    batch: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    partition_activations: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden} does not divide by --heads {self.heads}: heads of equal width are needed")
        if self.vocab % self.tensor:
            fits = -(-self.vocab // self.tensor) * self.tensor
            raise ValueError(f"--vocab {self.vocab} does not divide by --tensor {self.tensor}: pad it to {fits}")
        if self.heads % self.tensor:
            raise ValueError(f"--heads {self.heads} do not divide by --tensor {self.tensor}: a device has whole heads")
        flags = [
            f"--{name.replace('_', '-')}" for name in ("sequence_parallel", "partition_activations") if getattr(self, name)
        ]
        if flags and self.tensor == 1:
            raise ValueError(f"{flags[0]} splits the sequence over the devices of --tensor: give 2 or more of them")
        if flags and self.seq % self.tensor:
            fits = -(-self.seq // self.tensor) * self.tensor
            raise ValueError(f"--seq {self.seq} does not divide by --tensor {self.tensor}: pad the sequences to {fits}")


WRONG = 2
"""Exit status where something that was given is wrong, as argparse has it. 1: a checkpoint is not whole."""
_TRACEBACK = "ZEROJAX_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has read what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be written when Python ends
    except (ValueError, OSError, RuntimeError) as error:
        # RecursionError is a RuntimeError, and a fault of the program's own.
        if os.environ.get(_TRACEBACK) or isinstance(error, RecursionError):
            raise
        print(f"zerojax {given[0] if given else ''}: {_one_line(error)}", file=sys.stderr)
        sys.exit(WRONG)


def _one_line(error: Exception) -> str:
    """Return an error's message on one line; of an error without a message its kind."""
    return _printable(str(error)) or type(error).__name__


def _printable(message: str) -> str:
    """Return a message on one line that every stream can take: an argument may hold bytes that are not UTF-8."""
    return " ".join(message.split()).encode(errors="backslashreplace").decode()


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of the commands are: without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {_printable(message)} ({self.prog} --help lists the options)\n")


def _run(arguments: Sequence[str]) -> None:
    """Run one command."""
    parser = _Parser(
        prog="zerojax", description="ZeRO in JAX: model states and collectives, compiled programs, disks, and checkpoints"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    states = commands.add_parser(
        "memory", help="model states on each device, and elements moved a step, by ZeRO stage; and a transformer's activations"
    )
    states.add_argument(
        "--params", type=count, help="parameters of the model, such as 7.5e9; without it 12 L h^2, and V h with --vocab"
    )
    states.add_argument("--shards", type=whole(1), default=1, help="devices that share the state (the mesh axis fsdp)")
    states.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    states.add_argument("--moments", type=whole(0, 1000), default=8, help="bytes of optimizer state for one parameter; Adam: 8")
    states.add_argument("--microbatches", type=whole(1), default=1)
    shape = states.add_argument_group("activations", "of a GPT; --layers, --hidden, --heads and --seq go together")
    for name, what in (("layers", "L"), ("hidden", "h"), ("heads", "a"), ("seq", "s, tokens of a sequence")):
        shape.add_argument(f"--{name}", type=whole(1), help=what)
    shape.add_argument("--vocab", type=whole(1), help="V, of a token embedding that is the head's matrix, too")
    shape.add_argument(
        "--batch",
        type=whole(1),
        default=1,
        help="b, sequences on the devices of one tensor group: of a microbatch with save and remat, of a step with selective",
    )
    shape.add_argument(
        "--tensor", type=whole(1), default=1, help="t, devices that share a layer's products (the mesh axis tensor)"
    )
    shape.add_argument("--sequence-parallel", action="store_true", help="the stream is split over them, too")
    shape.add_argument("--partition-activations", action="store_true", help="what is kept of the stream is split over them")
    shape.add_argument("--fused-attention", action="store_true", help="attention is one kernel, which keeps no scores")
    shape.add_argument(
        "--activations",
        choices=list(MODES),
        help="what a layer keeps; without it, a line for each. A tier keeps what remat does, there",
    )
    simulation = commands.add_parser(
        "simulate",
        help="predict a step from its compiled program: seconds, idle compute, bytes over the link to the host, waits",
    )
    simulation.add_argument(
        "program", help="text of compiled.as_text(), or the folder of one program that XLA dumped to (xla_dump_to)"
    )
    simulation.add_argument("--thunks", help="that folder, where the program is given as text")
    simulation.add_argument("--rates", choices=list(RATES), default="h200", help="assumed ones, by name; those below go before")
    for field in dataclasses.fields(Rates):
        is_flops = field.name.startswith(("products", "attention"))
        unit = "seconds" if field.name.endswith("_seconds") else "FLOPs a second" if is_flops else "bytes a second"
        what = f"{unit}, {getattr(RATES['h200'], field.name):g} of an H200; zerojax.hlo.Rates tells of what"
        simulation.add_argument(f"--{field.name.replace('_', '-')}", type=number(0, 1e24), help=what)
    simulation.add_argument("--streams", choices=list(STREAMS), help="; ".join(f"{k}: {v}" for k, v in STREAMS.items()))
    simulation.add_argument("--kernels", choices=["exclusive", "beside"], default="exclusive", help="that move host memory")
    simulation.add_argument(
        "--callbacks",
        choices=list(CALLBACKS),
        default="plain",
        help="what those of the program do: update of update_on='host', delayed of delayed_update, nvme of a state on disk, "
        "nvme_update of both; plain ones wait until the device has done all",
    )
    disk = commands.add_parser("bench-io", help="bandwidth of a folder's disk, and the models and step times that it supports")
    disk.add_argument("folder", help="an existing folder, such as a swap_dir; only a small file with the settings found stays")
    disk.add_argument(
        "--gib", type=number(0, 1e6, above=True), default=1.0, help="GiB that each reader writes and reads in a round"
    )
    disk.add_argument("--rounds", type=whole(1, 1000), default=3, help="the median of so many is shown")
    machines = commands.add_parser("machines", help="the figures of machines that have a name, or of a TOML file, and sources")
    machines.add_argument(
        "name", nargs="*", help="of a machine, or a path that ends with .toml; without it all that have a name"
    )
    measured = commands.add_parser("probe", help="measure this machine in less than a minute: devices, link, host, and a disk")
    measured.add_argument("--swap-dir", help="an existing folder of the disk; only a small file with the settings found stays")
    measured.add_argument("--out", help="a TOML file for the figures, for zerojax.machine; it is replaced")
    add_plan_command(commands)
    checkpoints = commands.add_parser(
        "inspect", help="what a checkpoint holds, and whether it is whole: exit status 0, or 1 if it is not, 2 if it is none"
    )
    checkpoints.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    checkpoints.add_argument("--verify", action="store_true", help="read all bytes and compare their checksums")
    weights = commands.add_parser(
        "export",
        help="the weights of a checkpoint: in Orbax's own format, as a safetensors file, or as a Hugging Face or PEFT folder",
    )
    weights.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    weights.add_argument("out", help="what to write; nothing may be there")
    weights.add_argument("--format", choices=_EXPORTS, required=True)
    weights.add_argument("--dtype", choices=list(DTYPES), help="without it float32, and of --format hf that of --like")
    weights.add_argument("--like", help="of hf and peft: the folder that the weights were imported from")
    weights.add_argument("--merge-lora", action="store_true", help="of hf: add adapters to the weights beside them")
    weights.add_argument("--shard-bytes", type=number(1), default=5e9, help="of hf: most bytes of one file")
    weights.add_argument(
        "--ema", action="store_true", help="the averages that zerojax.Ema keeps of the weights instead of these"
    )
    weights.add_argument("--step", type=whole(0), help="of a directory; without it, its newest whole step")
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        try:
            report = inspect(options.folder, verify=options.verify)
        except CheckpointError as error:
            parser.exit(1, f"zerojax inspect: {_one_line(error)}\n")
        print(report.text)
        if not report.is_whole:
            parser.exit(1)
        return
    if options.command == "export":
        jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its processes, which would take memory of GPUs
        folder = options.folder if options.step is None else os.path.join(options.folder, str(options.step))
        _check_export(weights, options)
        try:
            _export(folder, options)
        except (ValueError, CheckpointError) as error:
            raise ValueError(_as_options(str(error))) from error
        return
    if options.command == "bench-io":
        print(disk_report(options.folder, num_bytes=int(options.gib * 2**30), num_rounds=options.rounds))
        return
    if options.command == "machines":
        print("\n\n".join(str(machine(name)) for name in options.name or NAMED))
        return
    if options.command == "probe":
        if options.out is not None:
            _check_out(options.out)
        found = probe(options.swap_dir)
        if options.out is not None:
            found.save(options.out)
        print(found)
        return
    if options.command == "plan":
        run_plan(options)
        return
    if options.command == "simulate":
        print(_simulation(options))
        return
    # The command that is left is `memory`.
    _memory(states, options)


def _check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with what is wrong with the options of an export, if anything is."""
    needs_like = options.format in ("hf", "peft")
    if needs_like and options.like is None:
        parser.error(f"--format {options.format} needs --like, the folder that the weights were imported from")
    if options.like is not None and not needs_like:
        parser.error(f"--like is of --format hf and peft, and this is {options.format}")
    if options.merge_lora and options.format != "hf":
        parser.error(f"--merge-lora is of --format hf, and this is {options.format}")
    if options.ema and needs_like:
        parser.error(f"--ema is of --format orbax and safetensors, and this is {options.format}")


def _export(folder: str, options: argparse.Namespace) -> None:
    """Write what `zerojax export` was asked for; errors are those of the functions of the formats."""
    if options.format == "hf":
        export_hf(
            folder, options.out, like=options.like, dtype=options.dtype, shard_bytes=options.shard_bytes,
            merge_lora=options.merge_lora,
        )  # fmt: skip
    elif options.format == "peft":
        export_peft(folder, options.out, like=options.like, dtype=options.dtype)
    else:
        export = export_orbax if options.format == "orbax" else export_safetensors
        export(folder, options.out, dtype=options.dtype, ema=options.ema)


def _as_options(message: str) -> str:
    """Return a message of an export with its arguments, and the functions for other formats, as options."""
    for name, option in (
        ("zerojax.export_hf(merge_lora=True)", "--format hf --merge-lora"),
        ("merge_lora=True", "--merge-lora"),
        ("zerojax.export_peft", "--format peft"),
        ("zerojax.export_hf", "--format hf"),
        ("`like`", "--like"),
    ):
        message = message.replace(name, option)
    return message


def _check_out(path: str) -> None:
    """Raise ValueError unless `zerojax.machine` would read a file that can be written there: before a minute is spent."""
    if not path.endswith(".toml"):
        raise ValueError(f"--out {path}: the name of a machine's file ends with .toml")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for a reader
        raise ValueError(f"--out {path}: it cannot be written, because it is there and no regular file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"--out {path}: it cannot be written (folder {folder})")


def _simulation(options: argparse.Namespace) -> Simulation:
    """Predict the step that `zerojax simulate` was given.

    Raises:
      ValueError: the program, its thunks or a rate cannot be used.
      OSError: the program cannot be read.
    """
    folder = options.program if os.path.isdir(options.program) else options.thunks
    text = dumped_text(folder) if folder == options.program else _read_text(options.program)
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Rates)}
    return simulate(
        text,
        rates=dataclasses.replace(RATES[options.rates], **{name: rate for name, rate in given.items() if rate is not None}),
        thunks=None if folder is None else read_thunks(folder, module_name(text)),
        streams=options.streams,
        kernels=options.kernels,
        callbacks=options.callbacks,
    )


def _read_text(path: str) -> str:
    """Return the text of a file.

    Raises:
      ValueError: it is no text, or no regular file, whose end would never come.
      OSError: it cannot be read.
    """
    if not path or "\0" in path:
        raise ValueError(f"PROGRAM={path!r}: the name of a file or of a folder is needed")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no regular file: the text of a compiled program is needed, compiled.as_text()")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: what compiled.as_text() returns is needed") from error


def _memory(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Print what `zerojax memory` says of some options, or exit with what is wrong with them."""
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "seq")}
    missing = [f"--{name}" for name, n in sizes.items() if n is None]
    flags = ("sequence_parallel", "partition_activations", "fused_attention")
    of_shape = [name for name in ("vocab", *flags, "activations") if getattr(options, name)]
    asked = [f"--{name.replace('_', '-')}" for name in of_shape] + ["--batch"] * (options.batch != 1)
    if missing and (len(missing) < len(sizes) or asked):
        given = [f"--{name}" for name, n in sizes.items() if n is not None] + asked
        what = "activations are those of a transformer, whose"
        parser.error(f"{', '.join(given)}: {what} {', '.join(missing)} must be given too")
    if missing and options.params is None:
        parser.error("--params, or --layers, --hidden, --heads and --seq, must be given")
    shape = None
    if not missing:
        try:
            shape = Shape(
                **sizes, vocab=options.vocab or 0, **{name: getattr(options, name) for name in ("batch", "tensor", *flags)}
            )
        except ValueError as error:
            parser.error(str(error))
    if options.params is None:
        num_params = transformer_params(options.layers, options.hidden) + (options.vocab or 0) * options.hidden
    else:
        num_params = options.params
    # Each device of a tensor group has its part of the parameters: over these ZeRO shards.
    part = -(-num_params // options.tensor)
    if options.tensor > 1:
        print(f"{num_params:,} parameters, of which each of {options.tensor} devices of `tensor` has {part:,}")
    print(memory_table(part, options.shards, options.precision, options.moments, options.microbatches))
    if shape is not None:
        itemsize = jnp.dtype(PRECISIONS[options.precision].compute_dtype).itemsize
        print(activations_table(shape, MODES if options.activations is None else (options.activations,), itemsize))


def activations_table(shape: Shape, modes: Sequence[str], itemsize: int) -> str:
    """Return one line for each mode: what a layer and all of them keep, and the same by Korthikanti et al.

    Args:
      shape: of the transformer.
      modes: "save", "selective" or "remat".
      itemsize: bytes of an activation.
    """
    s = shape
    split = ", the stream split" if s.sequence_parallel else ", what is kept split" if s.partition_activations else ""
    rows = [
        f"activations of {s.layers} layers, h {s.hidden}, a {s.heads}, s {s.seq}, b {s.batch}, tensor {s.tensor}{split}",
        f"{'mode':>9} {'a layer':>10} {'all':>10} {'a layer':>10} {'all':>10}   GiB a device; right: Korthikanti et al.",
    ]
    for mode in modes:
        options = {name: getattr(s, name) for name in ("tensor", "sequence_parallel", "fused_attention")}
        given: dict[str, Any] = options | {"activations": mode, "itemsize": itemsize}
        sizes = (s.seq, s.batch, s.hidden, s.heads)
        ours = layer_activation_bytes(*sizes, partition_activations=s.partition_activations, **given)
        layers = [ours, korthikanti_layer_bytes(*sizes, **given)]
        cells = " ".join(f"{n / 2**30:>10.3f}" for layer in layers for n in (layer, s.layers * layer))
        rows.append(f"{mode:>9} {cells}")
    return "\n".join(rows)


def memory_table(num_params: int, shards: int, precision: str, moments: int, num_microbatches: int) -> str:
    """Return one line for each stage."""
    per_param = state_bytes(precision, moments=moments, num_microbatches=num_microbatches)
    rows = [
        f"{num_params:,} parameters over {shards} devices, {precision}: {per_param.total} bytes each before sharding",
        f"{'stage':>5} {'params':>10} {'grads':>10} {'master':>10} {'opt_state':>10} {'total':>10}   GiB a device; sent a step",
    ]
    for stage in STAGES:
        state = model_state_bytes(num_params, stage, shards, per_param)
        sent = sum(collective_elements(num_params, stage, shards, num_microbatches).values())
        cells = " ".join(f"{state[kind] / 2**30:>10.3f}" for kind in ("params", "grads", "master", "opt_state", "total"))
        rows.append(f"{stage:>5} {cells}   {sent / num_params:.2f} P")
    return "\n".join(rows)
