"""Join the results of parts that ran separately into one table."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from gpu_checks.rows import Row, line
from gpu_checks.runner import NOT_RUN

CUT_OFF = "cut off"
_MODES: Mapping[str, str] = {
    "run": "",
    "small run": "tiny sizes: that it runs, and no measurement",
    "compile-only": "compiled for a GPU that is not there; nothing was run",
    "small compile-only": "tiny sizes, compiled for a GPU that is not there; nothing was run",
}


@dataclasses.dataclass(kw_only=True)
class Found:
    """Results of one check in one run of a part: its rows, its status, its seconds."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    status: str = CUT_OFF
    seconds: float = 0.0


@dataclasses.dataclass(kw_only=True)
class PartRun:
    """Results of one run of a part.

    Attributes:
      head: command, mode, limit, time, names of the checks.
      facts: hardware, versions, sizes; empty if no check began.
      checks: results of the checks that began, by name.
      seconds: duration of the run; None if it was cut off.
    """

    head: Mapping[str, Any]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checks: dict[str, Found] = dataclasses.field(default_factory=dict)
    seconds: float | None = None

    @property
    def versions(self) -> str:
        """Names and versions of the packages, as text."""
        return ", ".join(
            f"{name} {version}" for name, version in self.facts.get("versions", {}).items()
        )


def read_runs(folder: pathlib.Path) -> list[PartRun]:
    """Return the runs in the files PART.jsonl in and below a folder, oldest first.

    Raises:
      ValueError: if there is none.
    """
    found = [run for path in sorted(folder.rglob("*.jsonl")) for run in _read(path)]
    if not found:
        raise ValueError(
            f"{folder} holds no results; give the folder that --out named, or a parent of it"
        )
    return sorted(found, key=lambda run: run.head["time"])


def _read(path: pathlib.Path) -> list[PartRun]:
    runs: list[PartRun] = []
    for text in path.read_text().splitlines():
        try:
            said = json.loads(text)
        except json.JSONDecodeError:  # the last line of a run that was cut off
            continue
        if "head" in said:
            runs.append(PartRun(head=said["head"]))
        elif "facts" in said:
            runs[-1].facts = said["facts"]
        elif "seconds" in said:
            runs[-1].seconds = said["seconds"]
        else:
            one = runs[-1].checks.setdefault(said["check"], Found())
            if "row" in said:
                one.rows.append(Row(**said["row"]))
            else:
                one.status, one.seconds = said["end"]["status"], said["end"]["seconds"]
    return runs


def latest(runs: Iterable[PartRun]) -> list[PartRun]:
    """Return the runs that hold the last result of each check.

    Results of different modes, versions of jax and machines are kept apart.
    """
    kept: dict[tuple[str, ...], PartRun] = {}
    for run in runs:
        mode = (
            run.head["part"],
            run.head["mode"],
            run.facts.get("versions", {}).get("jax", ""),
            run.facts.get("hardware", ""),
        )
        for name in run.head["checks"]:
            kept[*mode, name] = run
    # A run in which no check began has no machine. A later run on any machine replaces it.
    later: dict[tuple[str, ...], str] = {}
    for (part, mode, _, machine, name), run in kept.items():
        if machine:
            later[part, mode, name] = max(run.head["time"], later.get((part, mode, name), ""))
    kept = {
        (part, mode, jax, machine, name): run
        for (part, mode, jax, machine, name), run in kept.items()
        if machine or later.get((part, mode, name), "") < run.head["time"]
    }
    left = []
    for run in {id(run): run for run in kept.values()}.values():
        names = [key[-1] for key, last in kept.items() if last is run]
        head = {**run.head, "checks": [name for name in run.head["checks"] if name in names]}
        left.append(dataclasses.replace(run, head=head))
    return left


def missing(run: PartRun) -> list[tuple[str, str]]:
    """Return the name of each check without a result, and the reason."""
    found = []
    for name in run.head["checks"]:
        one = run.checks.get(name)
        if one is None:
            found.append((name, "not run: the part was cut off before it"))
        elif one.status == CUT_OFF:
            found.append((name, "cut off; what it found until then is above"))
        elif one.status == NOT_RUN:
            found.append((name, one.rows[-1].figure))
    return found


def holds(runs: Iterable[PartRun]) -> bool:
    """Return whether every check was run and every bound holds."""
    runs = list(runs)
    return not any(missing(run) for run in runs) and all(
        row.ok is not False
        for run in runs
        for name in run.head["checks"]
        for row in run.checks[name].rows
    )


def table(runs: Iterable[PartRun], order: list[str]) -> str:
    """Return the report in Markdown; `order` lists the names of the parts."""
    runs = sorted(
        runs,
        key=lambda run: (
            order.index(run.head["part"]) if run.head["part"] in order else len(order),
            run.head["time"],
        ),
    )
    machines = list(
        dict.fromkeys((run.facts.get("hardware", "no check began"), run.versions) for run in runs)
    )
    lines = [f"# What the device does, {max(run.head['time'] for run in runs)[:7]}", ""]
    for number, (hardware, versions) in enumerate(machines):
        lines.append(f"{_letter(number)}: {hardware}. Versions: {versions or 'unknown'}.")
    lines += [
        "",
        "| part | machine | command | seconds (limit) | seconds by check | what it is |",
        "|---|---|---|---|---|---|",
    ]
    judged: list[bool] = []
    for run in runs:
        machine = _letter(
            machines.index((run.facts.get("hardware", "no check began"), run.versions))
        )
        seconds = CUT_OFF if run.seconds is None else f"{run.seconds:.0f}"
        each = ", ".join(
            f"{name} {run.checks[name].seconds:.0f}"
            for name in run.head["checks"]
            if name in run.checks
        )
        what = _MODES[run.head["mode"]]
        cells: tuple[str, ...] = (
            run.head["part"],
            machine,
            f"`{run.head['command']}`",
            f"{seconds} ({run.head['limit']:g})",
            each,
            what,
        )
        lines.append(f"| {' | '.join(cells)} |")
    several = len({(run.head["mode"], run.versions) for run in runs}) > 1
    for run in runs:
        machine = _letter(
            machines.index((run.facts.get("hardware", "no check began"), run.versions))
        )
        title = f"## {run.head['part']}" + (f", {run.head['mode']} on {machine}" if several else "")
        lines += ["", title, "", "| check | what | figure | bound | ok |", "|---|---|---|---|---|"]
        rows = [
            (name, row)
            for name in run.head["checks"]
            for row in getattr(run.checks.get(name), "rows", [])
        ]
        lines += [line(name, row) for name, row in rows]
        judged += [row.ok for _, row in rows if row.ok is not None]
    absent = [(run.head["part"], name, why) for run in runs for name, why in missing(run)]
    if absent:
        lines += ["", "## Not run", "", *(f"- {part}, {name}: {why}" for part, name, why in absent)]
    lines += [
        "",
        f"{sum(judged)} of {len(judged)} bounds hold; {len(absent)} checks have no result.",
    ]
    return "\n".join(lines) + "\n"


FITS = ": device, host, pool"
"""Suffix of the rows that show the memory of a compiled program."""


def fits(runs: Iterable[PartRun], order: list[str]) -> str:
    """Return a Markdown table of the memory that compiled programs take.

    Raises:
      ValueError: if no run compiled a program, or a run has a part that `order` does not list.
    """
    runs = list(runs)
    for part in {run.head["part"] for run in runs} - set(order):
        raise ValueError(
            f"these results hold the part {part!r}, which this version does not have: join them "
            f"with the version that wrote them; its parts are {', '.join(order)}"
        )
    lines, seen = [], set[tuple[str, ...]]()
    for run in sorted(
        runs, key=lambda run: (run.versions, run.head["command"], order.index(run.head["part"]))
    ):
        for check in run.head["checks"]:
            rows = getattr(run.checks.get(check), "rows", [])
            cut = next(
                (row.figure.partition(":")[0] for row in rows if row.name == "layers"), "all"
            )
            for row in rows:
                if not row.name.endswith(FITS):
                    continue
                chip = (row.bound.removeprefix("within the memory of ")).partition(" ")[0]
                jax = run.facts.get("versions", {}).get("jax", "")
                sizes = [f"{row.values[name] / 2**30:.1f}" for name in ("device", "host", "pool")]
                cells = (
                    chip,
                    jax,
                    run.head["part"],
                    check,
                    row.name.removesuffix(FITS),
                    cut,
                    *sizes,
                    "yes" if row.ok else "NO",
                )
                if cells not in seen:
                    lines.append(f"| {' | '.join(cells)} |")
                seen.add(cells)
    if not lines:
        raise ValueError("these results hold no compiled program; give results of --compile-only")
    head = [
        "# What the programs of gpu_check take, compiled",
        "",
        "Compiled for GPUs that are not there; nothing was run. "
        "GiB of device memory by the compiler's count, of pinned host",
        "memory, and of XLA's pool of it, which is 5 % more than a program keeps and at least 4. "
        "A program has as many layers",
        "as fit into 0.92 of the device's memory, and into the host's 128 GiB less 12 "
        "for the system.",
        "",
        "Commands: `python benchmarks/gpu_check.py --compile-only --chip CHIP --out RESULTS` "
        "for each chip and version of jax,",
        "then once `python benchmarks/gpu_check.py --join RESULTS --fits --save FILE`.",
        "",
        "| chip | jax | part | check | program | layers | device | host | pool | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _letter(number: int) -> str:
    return f"Machine {number + 1}"
