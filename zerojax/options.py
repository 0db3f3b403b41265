"""The options of the `zerojax` command.

This module imports nothing slow, so `--help` and errors in options are printed immediately.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from zerojax.arguments import count, integer, number
from zerojax.hlo import CALLBACKS, GRAPHS, RATES, STREAMS, Rates
from zerojax.vocabulary import EXPORT_DTYPES, EXPORT_FORMATS, MODES, PRECISION_NAMES

WRONG = 2
"""Exit status for a wrong argument, as in argparse.

Status 1 means that a checkpoint is incomplete.
"""


def on_one_line(message: str) -> str:
    """Return a message on one line that every stream can encode.

    An argument may contain bytes that are not UTF-8; they are escaped.
    """
    return " ".join(message.split()).encode(errors="backslashreplace").decode()


class OneLineParser(argparse.ArgumentParser):
    """A parser that prints its errors on one line, without the usage, as the commands do."""

    def error(self, message: str) -> NoReturn:
        """Print an error on one line and exit."""
        self.exit(
            WRONG, f"{self.prog}: {on_one_line(message)} ({self.prog} --help lists the options)\n"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command and its options; exit with a message if they are wrong.

    Args:
      arguments: command-line arguments without the program's name.

    Raises:
      ValueError: an option cannot be used.
    """
    options = _build_parser().parse_args(arguments)
    if options.command == "export":
        _check_export(options.parser, options)
    if options.command == "memory":
        options.shape = _build_shape(options.parser, options)
    if options.command == "probe" and options.out is not None:
        _check_out(options.out)
    return options


_Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


class _Version(argparse.Action):
    """Prints the version of the installed package, which takes a moment to find."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        parser.exit(0, f"zerojax {version('zerojax')}\n")


def _build_parser() -> OneLineParser:
    """Return the parser of all commands; parsed options hold the command's parser."""
    parser = OneLineParser(
        prog="zerojax",
        description="ZeRO in JAX: model states and collectives, compiled programs, disks, "
        "and checkpoints",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the installed version")
    commands = parser.add_subparsers(dest="command", required=True)
    # `--help` lists the commands in this order.
    _add_env_command(commands)
    _add_memory_command(commands)
    _add_simulate_command(commands)
    _add_bench_io_command(commands)
    _add_machines_command(commands)
    _add_probe_command(commands)
    _add_plan_command(commands)
    _add_inspect_command(commands)
    _add_export_command(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_env_command(commands: _Commands) -> None:
    """Add `zerojax env`."""
    parser = commands.add_parser(
        "env", help="versions, devices, limits of memory, and a folder's disk, for a bug report"
    )
    parser.add_argument("--swap-dir", help="an existing folder on the disk to report on")


def _add_memory_command(commands: _Commands) -> None:
    """Add `zerojax memory`."""
    parser = commands.add_parser(
        "memory",
        help="model states per device and elements sent per step, by ZeRO stage, and a "
        "transformer's activations",
    )
    parser.add_argument(
        "--params",
        type=count,
        help="number of parameters, such as 7.5e9; default: 12 L h^2, plus V h with --vocab",
    )
    parser.add_argument(
        "--shards",
        type=integer(1),
        default=1,
        help="devices that share the state (the mesh axis fsdp)",
    )
    parser.add_argument("--precision", choices=PRECISION_NAMES, default="bf16")
    parser.add_argument(
        "--moments",
        type=integer(0, 1000),
        default=8,
        help="bytes of optimizer state per parameter; Adam has 8",
    )
    parser.add_argument("--microbatches", type=integer(1), default=1)
    _add_activation_options(parser)


def _add_activation_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the transformer whose activations `zerojax memory` counts."""
    group = parser.add_argument_group(
        "activations",
        "sizes of a GPT; --layers, --hidden, --heads and --seq must be given together",
    )
    for name, meaning in (
        ("layers", "L"),
        ("hidden", "h"),
        ("heads", "a"),
        ("seq", "s, tokens per sequence"),
    ):
        group.add_argument(f"--{name}", type=integer(1), help=meaning)
    group.add_argument(
        "--vocab", type=integer(1), help="V, rows of a token embedding that is tied to the head"
    )
    group.add_argument(
        "--batch",
        type=integer(1),
        default=1,
        help="b, sequences per tensor group: in a microbatch with save and remat, in a step with "
        "selective",
    )
    group.add_argument(
        "--tensor",
        type=integer(1),
        default=1,
        help="t, devices that share a layer's products (the mesh axis tensor)",
    )
    group.add_argument(
        "--sequence-parallel", action="store_true", help="split the stream over --tensor too"
    )
    group.add_argument(
        "--partition-activations",
        action="store_true",
        help="split the stream's saved activations over --tensor",
    )
    group.add_argument(
        "--fused-attention",
        action="store_true",
        help="compute attention in one kernel, which keeps no scores",
    )
    group.add_argument(
        "--activations",
        choices=MODES,
        help="activations that a layer keeps; default: one line per choice. A tier keeps the same "
        "as remat",
    )


def _add_simulate_command(commands: _Commands) -> None:
    """Add `zerojax simulate`."""
    parser = commands.add_parser(
        "simulate",
        help="predict a step from its compiled program: seconds, idle compute, bytes over the host "
        "link, waits",
    )
    parser.add_argument(
        "program",
        help="text file with the result of compiled.as_text(), or the folder of one program's XLA "
        "dump (xla_dump_to)",
    )
    parser.add_argument("--thunks", help="folder of the XLA dump, if the program is a text file")
    parser.add_argument(
        "--rates",
        choices=list(RATES),
        default="h200",
        help="assumed rates, by name; the options below override single rates",
    )
    _add_rate_options(parser)
    parser.add_argument(
        "--streams", choices=list(STREAMS), help="; ".join(f"{k}: {v}" for k, v in STREAMS.items())
    )
    parser.add_argument(
        "--kernels",
        choices=["exclusive", "beside"],
        default="exclusive",
        help="how kernels that move host memory run",
    )
    parser.add_argument(
        "--graphs",
        choices=list(GRAPHS),
        default="in_turn",
        help="how copies in CUDA graphs run; " + "; ".join(f"{k}: {v}" for k, v in GRAPHS.items()),
    )
    parser.add_argument(
        "--callbacks",
        choices=list(CALLBACKS),
        default="plain",
        help="what the program's callbacks do. update: update_on='host'; delayed: delayed_update; "
        "nvme: state on disk; nvme_update: update_on='host' with state on disk; plain: wait "
        "until the device has finished all work",
    )


def _add_rate_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `zerojax.hlo.Rates`."""
    for field in dataclasses.fields(Rates):
        if field.name.endswith("_seconds"):
            unit = "seconds"
        elif field.name.startswith(("products", "attention")):
            unit = "FLOPs per second"
        else:
            unit = "bytes per second"
        default = f"{getattr(RATES['h200'], field.name):g} for an H200"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=number(0, 1e24),
            help=f"{unit}, {default}; see zerojax.hlo.Rates",
        )


def _add_bench_io_command(commands: _Commands) -> None:
    """Add `zerojax bench-io`."""
    parser = commands.add_parser(
        "bench-io",
        help="bandwidth of a folder's disk, and the models and step times that it supports",
    )
    parser.add_argument(
        "folder",
        help="an existing folder, such as a swap_dir; a small file with the best settings remains "
        "in it",
    )
    parser.add_argument(
        "--gib",
        type=number(0, 1e6, above=True),
        default=1.0,
        help="GiB that each reader writes and reads per round",
    )
    parser.add_argument(
        "--rounds", type=integer(1, 1000), default=3, help="number of rounds; the median is shown"
    )


def _add_machines_command(commands: _Commands) -> None:
    """Add `zerojax machines`."""
    parser = commands.add_parser(
        "machines", help="figures of named machines or of a TOML file, with their sources"
    )
    parser.add_argument(
        "name",
        nargs="*",
        help="a machine's name, or a path that ends with .toml; default: all named machines",
    )


def _add_probe_command(commands: _Commands) -> None:
    """Add `zerojax probe`."""
    parser = commands.add_parser(
        "probe",
        help="measure this machine in less than a minute: devices, host link, host, and a disk",
    )
    parser.add_argument(
        "--swap-dir",
        help="an existing folder on the disk; a small file with the best settings remains in it",
    )
    parser.add_argument("--out", help="TOML file to write or replace, for zerojax.machine")


def _add_plan_command(commands: _Commands) -> None:
    """Add `zerojax plan`."""
    parser = commands.add_parser(
        "plan",
        help="the fastest config of a transformer that fits a machine, with its needs and the time "
        "per step",
    )
    _add_model_options(parser)
    _add_machine_options(parser)
    parser.add_argument(
        "--tensor", type=count, default=1, help="devices that share a layer's products"
    )
    parser.add_argument("--data", type=count, default=1, help="replicas of hybrid sharding")
    parser.add_argument(
        "--precision",
        choices=PRECISION_NAMES,
        help="default: bf16, or fp16 if the machine does not support bf16",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="fix a field of ZeroConfig. VALUE is a Python literal (3, 0.5, True, None, \"('a', "
        "'b')\"), or a word without quotes (pinned_host)",
    )
    parser.add_argument(
        "--min-disk-days",
        type=number(0, 1e9, above=True),
        help="days that the disks must last, by their TBW rating",
    )
    parser.add_argument(
        "--round-moments",
        action="store_true",
        help="allow moments in bfloat16, whose rounding changes the training",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print a table of the slower configs, and of each stage and tier",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compile the step for the machine's GPUs, which need not be present",
    )
    parser.add_argument("--json", metavar="FILE", help="JSON file to write the plan to")
    parser.add_argument(
        "--html", metavar="FILE", help="HTML file to write the plan to, with pictures"
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the transformer that `zerojax plan` plans for."""
    parser.add_argument(
        "--params",
        type=count,
        help="number of parameters, such as 1T or 175B; default: L 12 h^2 + V h",
    )
    for name, meaning in (
        ("layers", "L"),
        ("hidden", "h"),
        ("heads", "a"),
    ):
        parser.add_argument(f"--{name}", type=count, required=True, help=meaning)
    parser.add_argument("--seq", type=count, help="T, tokens per sequence")
    parser.add_argument(
        "--longest",
        type=count,
        nargs="?",
        const=1024,
        metavar="TOKENS",
        help="instead of --seq: plan for the longest sequences that fit, among multiples of TOKENS "
        "(1024)",
    )
    parser.add_argument(
        "--batch",
        type=count,
        help="b, sequences per step and tensor group; needed without --longest, else 1",
    )
    for name, meaning in (
        ("vocab", "V"),
        ("mlp", "f, the MLP's width; default: 4 h"),
        ("kv-heads", "heads of keys and values; default: a"),
    ):
        parser.add_argument(f"--{name}", type=count, help=meaning)
    parser.add_argument("--gated", action="store_true", help="the MLP has three matrices (SwiGLU)")


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the machine of `zerojax plan`."""
    parser.add_argument(
        "--machine",
        required=True,
        help="a name that `zerojax machines` lists, or a TOML file that `zerojax probe` wrote",
    )
    parser.add_argument("--nodes", type=count, help="number of nodes; default: the machine's")
    parser.add_argument(
        "--devices-per-node", type=count, help="default: the devices per node of the machine"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIGURE=VALUE",
        help="override a figure of the machine, such as host_bytes=2e12",
    )


def _add_inspect_command(commands: _Commands) -> None:
    """Add `zerojax inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="a checkpoint's contents; exit status 0 if it is complete, 1 if not, 2 if it is not a "
        "checkpoint",
    )
    parser.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    parser.add_argument(
        "--verify", action="store_true", help="read all bytes and compare their checksums"
    )


def _add_export_command(commands: _Commands) -> None:
    """Add `zerojax export`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights in Orbax's format, as a safetensors file, or as a "
        "Hugging Face or PEFT folder",
    )
    parser.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    parser.add_argument("out", help="path to write, which must not exist")
    parser.add_argument("--format", choices=EXPORT_FORMATS, required=True)
    parser.add_argument(
        "--dtype",
        choices=EXPORT_DTYPES,
        help="default: float32; with --format hf, the dtype of --like",
    )
    parser.add_argument(
        "--like", help="with hf and peft: the folder that the weights were imported from"
    )
    parser.add_argument(
        "--merge-lora", action="store_true", help="with hf: merge adapters into the weights"
    )
    parser.add_argument(
        "--shard-bytes",
        type=number(1),
        default=5e9,
        help="with hf: largest size of one file, in bytes",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="export the weight averages of zerojax.Ema or zerojax.schedule_free_adamw instead of "
        "the weights",
    )
    parser.add_argument(
        "--step",
        type=integer(0),
        help="step to export from a directory; default: its newest complete step",
    )


def _build_shape(parser: argparse.ArgumentParser, options: argparse.Namespace) -> "Shape | None":
    """Return the transformer of `zerojax memory`, or None if none is given.

    Exits with an error if the options do not fit together.
    """
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "seq")}
    flags = ("sequence_parallel", "partition_activations", "fused_attention")
    missing = [f"--{name}" for name, size in sizes.items() if size is None]
    if missing:
        used = [f"--{name}" for name, size in sizes.items() if size is not None]
        for name in ("vocab", *flags, "activations"):
            if getattr(options, name):
                used.append(f"--{name.replace('_', '-')}")
        if options.batch != 1:
            used.append("--batch")
        if used:
            parser.error(
                f"{', '.join(used)}: activations need a transformer, whose {', '.join(missing)} "
                "must be given too"
            )
        if options.params is None:
            parser.error("--params, or --layers, --hidden, --heads and --seq, must be given")
        return None

    settings = {name: getattr(options, name) for name in ("batch", "tensor", *flags)}
    try:
        return Shape(**sizes, vocab=options.vocab or 0, **settings)
    except ValueError as error:
        parser.error(str(error))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer, and how `tensor` splits it.

    Attributes:
      layers: L, number of layers.
      hidden: h, width of the stream.
      heads: a, number of attention heads.
      seq: s, tokens per sequence.
      vocab: V, rows of the embedding; 0 without an embedding.
      batch: b, sequences per tensor group.
      tensor: t, number of devices that share a layer's products.
      sequence_parallel: whether the stream is split over `tensor` too.
      partition_activations: whether the stream's saved activations are split over `tensor`.
      fused_attention: whether attention is one kernel.

    Raises:
      ValueError: the sizes do not divide.
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
        """Check that the sizes divide."""
        if self.hidden % self.heads:
            raise ValueError(
                f"--hidden {self.hidden} does not divide by --heads {self.heads}: heads of "
                "equal width are needed"
            )
        if self.vocab % self.tensor:
            fits = -(-self.vocab // self.tensor) * self.tensor
            raise ValueError(
                f"--vocab {self.vocab} does not divide by --tensor {self.tensor}: pad it to {fits}"
            )
        if self.heads % self.tensor:
            raise ValueError(
                f"--heads {self.heads} do not divide by --tensor {self.tensor}: heads cannot "
                "be split between devices"
            )
        splits_sequence = self.sequence_parallel or self.partition_activations
        if splits_sequence and self.tensor == 1:
            flag = "--sequence-parallel" if self.sequence_parallel else "--partition-activations"
            raise ValueError(
                f"{flag} splits the sequence over the devices of --tensor: give 2 or more of them"
            )
        if splits_sequence and self.seq % self.tensor:
            fits = -(-self.seq // self.tensor) * self.tensor
            raise ValueError(
                f"--seq {self.seq} does not divide by --tensor {self.tensor}: pad the "
                f"sequences to {fits}"
            )


def _check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if the options of an export do not fit together."""
    needs_like = options.format in ("hf", "peft")
    if needs_like and options.like is None:
        parser.error(
            f"--format {options.format} needs --like, the folder that the weights were "
            "imported from"
        )
    if options.like is not None and not needs_like:
        parser.error(f"--like needs --format hf or peft, got {options.format}")
    if options.merge_lora and options.format != "hf":
        parser.error(f"--merge-lora needs --format hf, got {options.format}")


def _check_out(path: str) -> None:
    """Raise ValueError unless the path is a .toml file that can be written.

    Checking first avoids a failure after a minute of measuring.
    """
    if not path.endswith(".toml"):
        raise ValueError(f"--out {path}: the name of a machine's file must end with .toml")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for a reader
        raise ValueError(
            f"--out {path}: it cannot be written, because it exists and is not a regular file"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"--out {path}: it cannot be written (folder {folder})")
