"""The options of the `zerojax` command.

Nothing is imported here that takes time: `--help` and errors of options are printed at once.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from zerojax.arguments import count, number, whole
from zerojax.hlo import CALLBACKS, GRAPHS, RATES, STREAMS, Rates
from zerojax.vocabulary import EXPORT_DTYPES, EXPORT_FORMATS, MODES, PRECISION_NAMES

WRONG = 2
"""Exit status where something that was given is wrong, as argparse has it. 1: a checkpoint is not
whole.
"""


def on_one_line(message: str) -> str:
    """Return a message on one line that every stream can take: an argument may hold bytes that are
    not UTF-8.
    """
    return " ".join(message.split()).encode(errors="backslashreplace").decode()


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of the commands are: without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            WRONG, f"{self.prog}: {on_one_line(message)} ({self.prog} --help lists the options)\n"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options, or exit with what is wrong with them.

    Raises:
      ValueError: an option cannot be used.
    """
    options = _parser().parse_args(arguments)
    if options.command == "export":
        _check_export(options.parser, options)
    if options.command == "memory":
        options.shape = _shape(options.parser, options)
    if options.command == "probe" and options.out is not None:
        _check_out(options.out)
    return options


def _parser() -> OneLineParser:
    """Return the parser of all commands; each sets `parser` to its own."""
    parser = OneLineParser(
        prog="zerojax",
        description="ZeRO in JAX: model states and collectives, compiled programs, disks, and checkpoints",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    states = commands.add_parser(
        "memory",
        help="model states on each device, and elements moved a step, by ZeRO stage; and a transformer's activations",
    )
    states.add_argument(
        "--params",
        type=count,
        help="parameters of the model, such as 7.5e9; without it 12 L h^2, and V h with --vocab",
    )
    states.add_argument(
        "--shards",
        type=whole(1),
        default=1,
        help="devices that share the state (the mesh axis fsdp)",
    )
    states.add_argument("--precision", choices=PRECISION_NAMES, default="bf16")
    states.add_argument(
        "--moments",
        type=whole(0, 1000),
        default=8,
        help="bytes of optimizer state for one parameter; Adam: 8",
    )
    states.add_argument("--microbatches", type=whole(1), default=1)
    shape = states.add_argument_group(
        "activations", "of a GPT; --layers, --hidden, --heads and --seq go together"
    )
    for name, what in (
        ("layers", "L"),
        ("hidden", "h"),
        ("heads", "a"),
        ("seq", "s, tokens of a sequence"),
    ):
        shape.add_argument(f"--{name}", type=whole(1), help=what)
    shape.add_argument(
        "--vocab", type=whole(1), help="V, of a token embedding that is the head's matrix, too"
    )
    shape.add_argument(
        "--batch",
        type=whole(1),
        default=1,
        help="b, sequences on the devices of one tensor group: of a microbatch with save and remat, of a step with selective",
    )
    shape.add_argument(
        "--tensor",
        type=whole(1),
        default=1,
        help="t, devices that share a layer's products (the mesh axis tensor)",
    )
    shape.add_argument(
        "--sequence-parallel", action="store_true", help="the stream is split over them, too"
    )
    shape.add_argument(
        "--partition-activations",
        action="store_true",
        help="what is kept of the stream is split over them",
    )
    shape.add_argument(
        "--fused-attention",
        action="store_true",
        help="attention is one kernel, which keeps no scores",
    )
    shape.add_argument(
        "--activations",
        choices=MODES,
        help="what a layer keeps; without it, a line for each. A tier keeps what remat does, there",
    )
    simulation = commands.add_parser(
        "simulate",
        help="predict a step from its compiled program: seconds, idle compute, bytes over the link to the host, waits",
    )
    simulation.add_argument(
        "program",
        help="text of compiled.as_text(), or the folder of one program that XLA dumped to (xla_dump_to)",
    )
    simulation.add_argument("--thunks", help="that folder, where the program is given as text")
    simulation.add_argument(
        "--rates",
        choices=list(RATES),
        default="h200",
        help="assumed ones, by name; those below go before",
    )
    for field in dataclasses.fields(Rates):
        is_flops = field.name.startswith(("products", "attention"))
        unit = (
            "seconds"
            if field.name.endswith("_seconds")
            else "FLOPs a second"
            if is_flops
            else "bytes a second"
        )
        what = f"{unit}, {getattr(RATES['h200'], field.name):g} of an H200; zerojax.hlo.Rates tells of what"
        simulation.add_argument(
            f"--{field.name.replace('_', '-')}", type=number(0, 1e24), help=what
        )
    simulation.add_argument(
        "--streams", choices=list(STREAMS), help="; ".join(f"{k}: {v}" for k, v in STREAMS.items())
    )
    simulation.add_argument(
        "--kernels",
        choices=["exclusive", "beside"],
        default="exclusive",
        help="that move host memory",
    )
    simulation.add_argument(
        "--graphs",
        choices=list(GRAPHS),
        default="in_turn",
        help="how copies in CUDA graphs are made; "
        + "; ".join(f"{k}: {v}" for k, v in GRAPHS.items()),
    )
    simulation.add_argument(
        "--callbacks",
        choices=list(CALLBACKS),
        default="plain",
        help="what those of the program do: update of update_on='host', delayed of delayed_update, nvme of a state on disk, "
        "nvme_update of both; plain ones wait until the device has done all",
    )
    disk = commands.add_parser(
        "bench-io",
        help="bandwidth of a folder's disk, and the models and step times that it supports",
    )
    disk.add_argument(
        "folder",
        help="an existing folder, such as a swap_dir; only a small file with the settings found stays",
    )
    disk.add_argument(
        "--gib",
        type=number(0, 1e6, above=True),
        default=1.0,
        help="GiB that each reader writes and reads in a round",
    )
    disk.add_argument(
        "--rounds", type=whole(1, 1000), default=3, help="the median of so many is shown"
    )
    machines = commands.add_parser(
        "machines", help="the figures of machines that have a name, or of a TOML file, and sources"
    )
    machines.add_argument(
        "name",
        nargs="*",
        help="of a machine, or a path that ends with .toml; without it all that have a name",
    )
    measured = commands.add_parser(
        "probe", help="measure this machine in less than a minute: devices, link, host, and a disk"
    )
    measured.add_argument(
        "--swap-dir",
        help="an existing folder of the disk; only a small file with the settings found stays",
    )
    measured.add_argument(
        "--out", help="a TOML file for the figures, for zerojax.machine; it is replaced"
    )
    _add_plan_command(commands)
    checkpoints = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, and whether it is whole: exit status 0, or 1 if it is not, 2 if it is none",
    )
    checkpoints.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    checkpoints.add_argument(
        "--verify", action="store_true", help="read all bytes and compare their checksums"
    )
    weights = commands.add_parser(
        "export",
        help="the weights of a checkpoint: in Orbax's own format, as a safetensors file, or as a Hugging Face or PEFT folder",
    )
    weights.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    weights.add_argument("out", help="what to write; nothing may be there")
    weights.add_argument("--format", choices=EXPORT_FORMATS, required=True)
    weights.add_argument(
        "--dtype",
        choices=EXPORT_DTYPES,
        help="without it float32, and of --format hf that of --like",
    )
    weights.add_argument(
        "--like", help="of hf and peft: the folder that the weights were imported from"
    )
    weights.add_argument(
        "--merge-lora", action="store_true", help="of hf: add adapters to the weights beside them"
    )
    weights.add_argument(
        "--shard-bytes", type=number(1), default=5e9, help="of hf: most bytes of one file"
    )
    weights.add_argument(
        "--ema",
        action="store_true",
        help="the averages that zerojax.Ema keeps of the weights instead of these",
    )
    weights.add_argument(
        "--step", type=whole(0), help="of a directory; without it, its newest whole step"
    )
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_plan_command(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "plan",
        help="which config of a transformer fits a machine and is fastest there, what it needs, and how long a step takes",
    )
    parser.add_argument(
        "--params", type=count, help="parameters, such as 1T or 175B; without it L 12 h^2, and V h"
    )
    for name, what in (
        ("layers", "L"),
        ("hidden", "h"),
        ("heads", "a"),
        ("seq", "T, tokens of a sequence"),
    ):
        parser.add_argument(f"--{name}", type=count, required=True, help=what)
    parser.add_argument(
        "--batch",
        type=count,
        required=True,
        help="b, sequences of a step on the devices of one tensor group",
    )
    for name, what in (
        ("vocab", "V"),
        ("mlp", "f, the MLP's width; 4 h"),
        ("kv-heads", "heads of keys and values; a"),
    ):
        parser.add_argument(f"--{name}", type=count, help=what)
    parser.add_argument("--gated", action="store_true", help="the MLP has three matrices (SwiGLU)")
    parser.add_argument(
        "--machine",
        required=True,
        help="a name of `zerojax machines`, or a TOML file of `zerojax probe`",
    )
    parser.add_argument("--nodes", type=count, help="instead of the machine's")
    parser.add_argument("--devices-per-node", type=count, help="likewise")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIGURE=VALUE",
        help="a figure of the machine: host_bytes=2e12",
    )
    parser.add_argument(
        "--tensor", type=count, default=1, help="devices that share a layer's products"
    )
    parser.add_argument("--data", type=count, default=1, help="replicas of hybrid sharding")
    parser.add_argument(
        "--precision",
        choices=PRECISION_NAMES,
        help="bf16, or fp16 where the machine has no products in bf16",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of ZeroConfig that stays. VALUE is a Python literal (3, 0.5, True, None, \"('a', 'b')\"), or a word "
        "without quotes (pinned_host)",
    )
    parser.add_argument(
        "--min-disk-days",
        type=number(0, 1e9, above=True),
        help="days that the disks have to last, by their TBW",
    )
    parser.add_argument(
        "--round-moments",
        action="store_true",
        help="moments in bfloat16 may be chosen, which round what is trained",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="a table of the configs that were beaten, and of each stage and tier",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compile the step for the machine's GPUs, which need not be here",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan there")
    parser.add_argument("--html", metavar="FILE", help="likewise, a page with pictures")


def _shape(parser: argparse.ArgumentParser, options: argparse.Namespace) -> "Shape | None":
    """Return the transformer of `zerojax memory`, or None without one; exit if options do not go
    together.
    """
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "seq")}
    missing = [f"--{name}" for name, n in sizes.items() if n is None]
    flags = ("sequence_parallel", "partition_activations", "fused_attention")
    of_shape = [name for name in ("vocab", *flags, "activations") if getattr(options, name)]
    asked = [f"--{name.replace('_', '-')}" for name in of_shape] + ["--batch"] * (
        options.batch != 1
    )
    if missing and (len(missing) < len(sizes) or asked):
        given = [f"--{name}" for name, n in sizes.items() if n is not None] + asked
        what = "activations are those of a transformer, whose"
        parser.error(f"{', '.join(given)}: {what} {', '.join(missing)} must be given too")
    if missing and options.params is None:
        parser.error("--params, or --layers, --hidden, --heads and --seq, must be given")
    if missing:
        return None
    of_tensor = {name: getattr(options, name) for name in ("batch", "tensor", *flags)}
    try:
        return Shape(**sizes, vocab=options.vocab or 0, **of_tensor)
    except ValueError as error:
        parser.error(str(error))


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
            raise ValueError(
                f"--hidden {self.hidden} does not divide by --heads {self.heads}: heads of equal width are needed"
            )
        if self.vocab % self.tensor:
            fits = -(-self.vocab // self.tensor) * self.tensor
            raise ValueError(
                f"--vocab {self.vocab} does not divide by --tensor {self.tensor}: pad it to {fits}"
            )
        if self.heads % self.tensor:
            raise ValueError(
                f"--heads {self.heads} do not divide by --tensor {self.tensor}: a device has whole heads"
            )
        flags = [
            f"--{name.replace('_', '-')}"
            for name in ("sequence_parallel", "partition_activations")
            if getattr(self, name)
        ]
        if flags and self.tensor == 1:
            raise ValueError(
                f"{flags[0]} splits the sequence over the devices of --tensor: give 2 or more of them"
            )
        if flags and self.seq % self.tensor:
            fits = -(-self.seq // self.tensor) * self.tensor
            raise ValueError(
                f"--seq {self.seq} does not divide by --tensor {self.tensor}: pad the sequences to {fits}"
            )


def _check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with what is wrong with the options of an export, if anything is."""
    needs_like = options.format in ("hf", "peft")
    if needs_like and options.like is None:
        parser.error(
            f"--format {options.format} needs --like, the folder that the weights were imported from"
        )
    if options.like is not None and not needs_like:
        parser.error(f"--like is of --format hf and peft, and this is {options.format}")
    if options.merge_lora and options.format != "hf":
        parser.error(f"--merge-lora is of --format hf, and this is {options.format}")
    if options.ema and needs_like:
        parser.error(f"--ema is of --format orbax and safetensors, and this is {options.format}")


def _check_out(path: str) -> None:
    """Raise ValueError unless `zerojax.machine` would read a file that can be written there: before
    a minute is spent.
    """
    if not path.endswith(".toml"):
        raise ValueError(f"--out {path}: the name of a machine's file ends with .toml")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for a reader
        raise ValueError(
            f"--out {path}: it cannot be written, because it is there and no regular file"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"--out {path}: it cannot be written (folder {folder})")
