"""Describe a checkpoint from its files alone, without building a model or using a device.

    zerojax inspect runs/gpt/checkpoints         one line per step: whole or damaged, and why,
                                                 bytes, processes
    zerojax inspect runs/gpt/checkpoints/1200    config, mesh, every leaf, and totals

The sizes of all files are compared with the saved sizes, which reads no data; `--verify` reads all
bytes and compares their checksums.
"""

import dataclasses
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from host_offload.disk import ReadFile
from host_offload.fields import parse_json
from zerojax.checkpoint.directory import CONFIG, STATE, TEMPORARY, Directory, is_folder, is_step
from zerojax.checkpoint.errors import DamagedError, explaining, unreadable
from zerojax.checkpoint.manifest import MOST_BYTES, SavedState
from zerojax.checkpoint.retention import read_metrics
from zerojax.sharding import without_mesh

_CONFIG_FILE = "metadata"
"""File that Orbax's JsonSave writes."""
_WIDTH = 110


class NoCheckpointError(ValueError):
    """A folder is neither a Checkpointer's directory nor the folder of a step."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `inspect`.

    Attributes:
      text: text to print.
      is_whole: whether nothing is incomplete or damaged.
    """

    text: str
    is_whole: bool


@dataclasses.dataclass(frozen=True)
class _Status:
    """The status of one step.

    Attributes:
      saved: the opened state; None if its descriptions cannot be read.
      damage: what is damaged; None if the step is intact.
    """

    saved: SavedState | None
    damage: str | None


@without_mesh
def inspect(folder: str | os.PathLike[str], *, verify: bool = False) -> Report:
    """Describe a Checkpointer's directory, or the folder of one step.

    Args:
      folder: path of the directory or of the step.
      verify: read all records and compare their checksums; otherwise compare only their sizes.

    Raises:
      NoCheckpointError: the folder is neither.
      CheckpointError: a file cannot be read now, for example for lack of permission, so it is not
        known whether it is intact.
    """
    directory = Directory(folder)
    folder = directory.path
    with explaining(f"reading {folder}"):
        if not is_folder(folder):
            raise NoCheckpointError(f"{folder} is not a folder")
        if is_step(folder):
            return _step_report(folder, verify)
    steps, unfinished = directory.listing()
    # A folder named like a step may hold something else.
    with explaining(f"reading {folder}"):
        has_steps = any(is_step(directory.step_folder(step)) for step in steps)
    if not unfinished and not has_steps:
        raise NoCheckpointError(
            f"{folder} is neither a zerojax.Checkpointer's directory nor a step in one"
        )
    return _directory_report(directory, steps, unfinished, verify)


def _directory_report(
    directory: Directory, steps: Sequence[int], unfinished: Sequence[str], verify: bool
) -> Report:
    rows = []
    num_whole = 0
    for step in steps:
        status = _status(directory.step_folder(step), verify)
        saved = status.saved
        sizes = ("?", "?") if saved is None else (f"{saved.num_bytes:,}", str(saved.num_processes))
        rows.append(
            (
                str(step),
                "whole" if status.damage is None else "damaged",
                *sizes,
                status.damage or "",
            )
        )
        num_whole += status.damage is None
    for name in unfinished:
        rows.append((name.partition(TEMPORARY)[0], "incomplete", "?", "?", _unfinished(name)))
    lines = [f"{directory.path}: {num_whole} of {len(rows)} checkpoints whole ({_extent(verify)})"]
    lines += _aligned([("step", "state", "bytes", "processes", ""), *rows], right=(0, 2, 3))
    return Report("\n".join(lines), num_whole == len(rows))


def _status(folder: str, verify: bool) -> _Status:
    """Read a step's descriptions, and compare its records with them."""
    try:
        saved = SavedState(os.path.join(folder, STATE))
    except DamagedError as error:
        return _Status(None, str(error))
    with saved:
        try:
            saved.check(checksums=verify)
            # No restore reads config and metrics, but a step without them is not as it was saved.
            _config(folder)
            read_metrics(folder)
        except DamagedError as error:
            return _Status(saved, str(error))
    return _Status(saved, None)


def _unfinished(name: str) -> str:
    return f"{name} is being written, or was left by a save that did not finish"


def _extent(verify: bool) -> str:
    """Return what was compared, as text."""
    return "all checksums compared" if verify else "sizes compared; --verify reads the checksums"


def _step_report(folder: str, verify: bool) -> Report:
    name = os.path.basename(folder)
    if TEMPORARY in name:
        return Report(f"{folder}: incomplete: {_unfinished(name)}", False)
    status = _status(folder, verify)
    saved = status.saved
    if saved is None:
        return Report(f"{folder}: damaged: {status.damage}", False)
    records = sum(store.num_records for store in saved.records.stores)
    lines = [
        f"{folder}: saved by {_count(saved.num_processes, 'process', 'processes')}, "
        f"{saved.num_bytes:,} bytes in "
        f"{_count(records, 'record', 'records')}",
        f"damaged: {status.damage}" if status.damage is not None else f"whole ({_extent(verify)})",
    ]
    try:
        lines += ["", *_aligned(_config_rows(_config(folder)))]
    except DamagedError as error:
        lines += ["", f"config: {error}"]
    lines += ["", *_leaves(saved)]
    if saved.data:
        lines += [
            "",
            f"positions of the iterators of {_count(len(saved.data), 'process', 'processes')}",
        ]
    return Report("\n".join(lines), status.damage is None)


def _config(folder: str) -> Mapping[str, Any]:
    """Return the description of the program, which is stored next to the state.

    Raises:
      DamagedError: it is missing, or is not such a description.
      CheckpointError: it cannot be read now.
    """
    path = os.path.join(folder, CONFIG, _CONFIG_FILE)
    try:
        config = parse_json(ReadFile(path).read_all(MOST_BYTES))
    except OSError as error:
        raise unreadable(error, f"reading {path}", f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DamagedError(f"{path} holds no config")
    return config


def _config_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows (name, text) for config, mesh, devices and versions.

    Long texts continue in rows with an empty name.

    Raises:
      DamagedError: the config is nested too deeply.
    """

    # JSON may hold half of a surrogate pair, which must not reach a terminal.
    def printed(text: str) -> str:
        return text.encode(errors="backslashreplace").decode()

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{name}={field}" for name, field in value.items())
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    try:
        rows: list[tuple[str, str]] = []
        for name, value in config.items():
            first, *continued = textwrap.wrap(printed(text(value)), _WIDTH) or [""]
            rows.append((printed(name), first))
            rows += [("", line) for line in continued]
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    return rows


def _leaves(saved: SavedState) -> list[str]:
    """Return a table of all leaves, with the values of small ones, and totals."""
    rows = [("name", "shape", "dtype", "spec", "bytes")]
    totals: dict[str, int] = {}
    frozen = saved.frozen
    for name, leaf in saved.leaves.items():
        rows.append((name, str(list(leaf.shape)), leaf.dtype, leaf.spec, f"{leaf.num_bytes:,}"))
        if name in frozen:
            kind = "frozen"
        elif name.startswith("weights"):
            kind = "weights"
        elif name.startswith("opt_state"):
            kind = "opt_state"
        else:
            kind = "other"
        totals[kind] = totals.get(kind, 0) + leaf.num_bytes
    for name, value in saved.values.items():
        shape = str(list(value.shape))
        rows.append((name, shape, value.dtype.name, f"= {value.tolist()}", f"{value.nbytes:,}"))
        totals["other"] = totals.get("other", 0) + value.nbytes
    rows += [(f"total {kind}", "", "", "", f"{total:,}") for kind, total in totals.items()]
    rows.append(("total", "", "", "", f"{sum(totals.values()):,}"))
    return _aligned(rows, right=(4,))


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; the last column is not padded.

    Columns in `right` are right-aligned.
    """
    columns = []
    for k, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([c.rjust(width) if k in right else c.ljust(width) for c in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
