"""`zerojax plan`: plan from numbers alone, print the plan, and write it as JSON and HTML.

zerojax plan --params 1T --layers 128 --hidden 25600 --heads 256 --seq 1024 --batch 7
    --machine dgx2
zerojax plan --layers 32 --hidden 4096 --heads 32 --vocab 32000 --seq 2048 --batch 8
    --machine h200 --nodes 2 --compare
zerojax plan ... --fix stage=3 --fix opt_state=pinned_host --set host_bytes=2e12 --validate
    --json plan.json --html plan.html
zerojax plan --layers 32 --hidden 4096 --heads 32 --vocab 32000 --longest 8192 --machine h100
"""

import argparse
import ast
import dataclasses
import difflib
import math
import os
from typing import Any

from zerojax.config import ZeroConfig
from zerojax.costs import Sizes
from zerojax.machines import COUNTS, FIGURES, Machine, MissingFigureError, nearest
from zerojax.machines import machine as named_machine
from zerojax.planner.planner import plan
from zerojax.planner.plans import Plan

_MOST_CHARACTERS = 1000
_FIELDS = tuple(field.name for field in dataclasses.fields(ZeroConfig))


def run_plan(options: argparse.Namespace) -> None:
    """Print the plan, and write it to the files given by the options.

    Raises:
      ValueError: nothing fits, or an option is wrong.
      OSError: a file cannot be written.
      RuntimeError: `--validate` cannot compile here.
    """
    for path in (options.json, options.html):
        _check_file(path)
    try:
        chosen = _plan(options)
        text = str(chosen)
        if options.compare:
            text += f"\n\n{_comparison(options, chosen)}"
    except MissingFigureError as error:
        raise ValueError(f"{error}. On the command line, use --set FIGURE=VALUE.") from error
    if options.json:
        _write(options.json, chosen.to_json())
    if options.html:
        _write(options.html, chosen.html())
    print(text)


def _plan(options: argparse.Namespace, **fixed: Any) -> Plan:
    machine = _machine(options)
    fields = _once("--fix", [_field(text) for text in options.fix]) | fixed
    if options.precision and "precision" in fields:
        raise ValueError(
            f"--precision {options.precision} and --fix precision={fields['precision']}: "
            "give only one of them"
        )
    precision = options.precision or ("bf16" if "flops.bf16" in machine.figures else "fp16")
    groups, remainder = divmod(machine.devices, options.tensor)
    if remainder or not groups:
        raise ValueError(
            f"--tensor {options.tensor} does not divide the {machine.devices} devices "
            f"of {machine.name}"
        )
    longest = options.longest or False
    if longest and options.seq:
        raise ValueError("--seq and --longest: give only one of them")
    if not longest and not (options.seq and options.batch):
        raise ValueError("--seq and --batch are needed, unless --longest looks for the length")
    sizes = Sizes(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        seq=options.seq or longest,
        batch=(options.batch or 1) * groups,
        params=options.params,
        vocab=options.vocab or 0,
        mlp=options.mlp,
        kv_heads=options.kv_heads,
        gated=options.gated,
    )
    mesh = {"data": options.data, "tensor": options.tensor}
    return plan(
        sizes,
        mesh=mesh,
        machine=machine,
        fixed={"precision": precision, **fields},
        min_disk_days=options.min_disk_days,
        rounds_moments=options.round_moments,
        longest=longest,
        validate=options.validate and not fixed,
    )


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine, with the figures given by `--set`."""
    machine = named_machine(
        options.machine, nodes=options.nodes, devices_per_node=options.devices_per_node
    )
    for name, value in _once("--set", [_figure(text) for text in options.set]).items():
        top, _, dtype = name.partition(".")
        if dtype:
            value = {**getattr(machine, top), dtype: value}
        machine = dataclasses.replace(machine, **{top: value})
    return machine


def _figure(text: str) -> tuple[str, float]:
    """Return a machine figure's name and value from a `--set` argument.

    Raises:
      ValueError: there is no such figure, or its value is not a finite number.
    """
    name, _, value = text.partition("=")
    if name not in (*FIGURES, *COUNTS):
        raise ValueError(
            f"--set {text}: {name!r} is not a machine figure{nearest(name, (*FIGURES, *COUNTS))}"
        )
    try:
        figure = float(value)
    except ValueError:
        figure = math.nan
    if not math.isfinite(figure):
        raise ValueError(f"--set {text}: a finite number is needed, such as {name}=2e12")
    return name, int(figure) if figure == int(figure) and "." not in name else figure


def _once(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the names and values of a repeated option.

    Raises:
      ValueError: a name is given twice.
    """
    names = [name for name, _ in pairs]
    for repeated in names:
        if names.count(repeated) > 1:
            values = " and ".join(str(value) for name, value in pairs if name == repeated)
            raise ValueError(
                f"{option} {repeated} is given more than once, as {values}: one value is needed"
            )
    return dict(pairs)


def _field(text: str) -> tuple[str, Any]:
    """Return a `ZeroConfig` field's name and value from a `--fix` argument.

    Raises:
      ValueError: there is no such field, or the value is missing or too long.
    """
    name, equals, value = text.partition("=")
    if name not in _FIELDS:
        near = difflib.get_close_matches(name, _FIELDS, 1)
        raise ValueError(
            f"--fix {text}: ZeroConfig has no field {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if not equals:
        raise ValueError(f"--fix {text}: a value is needed, such as {name}=3")
    if len(value) > _MOST_CHARACTERS:
        raise ValueError(
            f"--fix {name}: the value has {len(value):,} characters; "
            f"at most {_MOST_CHARACTERS:,} are allowed"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return name, value  # a name, such as pinned_host
    except (RecursionError, MemoryError) as error:  # Python's errors for nesting that is too deep
        raise ValueError(f"--fix {name}: the value is nested too deeply: {value[:60]}..") from error


def _comparison(options: argparse.Namespace, chosen: Plan) -> str:
    """Return a table of the fastest plan for each stage and for each optimizer state tier."""
    rows = [f"{'fixed':<28} {'s a step':>10} {'of the plan':>12}  config"]
    restrictions = [{"stage": n} for n in range(4)] if chosen.grid.fsdp > 1 else []
    restrictions += [{"opt_state": tier} for tier in ("device", "pinned_host", "nvme")]
    for fixed in restrictions:
        name = ", ".join(f"{k}={v}" for k, v in fixed.items())
        try:
            other = _plan(options, **fixed)
        except ValueError as error:
            rows.append(f"{name:<28} {'-':>10} {'-':>12}  {str(error).split('(')[0].strip()}")
            continue
        hidden = ("precision", "swap_dir", *fixed)
        config = ", ".join(f"{k}={v!r}" for k, v in other.fields.items() if k not in hidden)
        rows.append(
            f"{name:<28} {other.seconds:>10.4g} {other.seconds / chosen.seconds:>12.2f}  {config}"
        )
    return "\n".join(rows)


def _check_file(path: str | None) -> None:
    """Raise OSError for a file that cannot be written, before planning starts."""
    if path is None:
        return
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        raise OSError(f"{path}: its folder does not exist or is not writable")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for a reader
        raise OSError(f"{path}: it exists and is not a regular file")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
