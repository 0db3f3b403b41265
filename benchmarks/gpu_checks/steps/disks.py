"""Time the same step with all states in host memory, on a RAM disk and on a disk.

A RAM disk takes hardly any time, so the extra time of its step over host memory's is the engine's.
The extra time of the disk's step over the RAM disk's is the disk's, whose bandwidth is measured in
the same folder just before.
"""

import dataclasses
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping

from gpu_checks.jobs import one_device
from gpu_checks.mixes import LlamaSizes
from gpu_checks.parts import KNOWN, Context
from gpu_checks.rows import Row, attempt
from gpu_checks.steps.llamas import Case, Stepped, fitted, judges, room_of, shortened
from gpu_checks.swap import measure_disk

HOST, RAM, DISK = "host", "RAM disk", "disk"
MODES = {HOST: "params, grads, opt_state on the host", RAM: "all on nvme", DISK: "all on nvme"}
ENGINE = 1.10
"""Largest time of a step from a RAM disk, over a step from host memory."""
BANDWIDTH = 0.95
"""Least share of the disk's bandwidth that a step must reach if the disk limits it."""
BYTES = 14
"""Bytes per parameter on disk: bfloat16, and three float32 arrays (the master and Adam's moments).

The update in backward leaves no gradient on disk.
"""
SPARE, HOST_SPARE = 2 << 30, 40 << 30
"""Bytes of a disk, and of the memory behind a RAM disk, that are left free.

They are for buffers, the program and the system.
"""


def rooms(context: Context) -> dict[str, int]:
    """Return the bytes that each disk has room for; 0 if its folder does not exist."""
    from host_offload.device import available_bytes

    room = {}
    for name, path in ((RAM, context.ram_dir), (DISK, context.swap_dir)):
        room[name] = shutil.disk_usage(path).free - SPARE if pathlib.Path(path).is_dir() else 0
    available = available_bytes()
    if available is not None and not context.sizes.few:
        room[RAM] = min(room[RAM], available - HOST_SPARE)
    return room


def fitting(sizes: LlamaSizes, room: Mapping[str, int], where: str) -> LlamaSizes:
    """Return the sizes with as many layers as fit on every disk.

    A disk without room for a single layer is ignored, except for its own check.

    Raises:
      NotImplementedError: if no layer fits on the disk `where`.
    """
    a_layer = BYTES * (4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.ff)
    ends = 2 * BYTES * sizes.vocab * sizes.hidden
    layers = {name: (size - ends) // a_layer for name, size in room.items()}
    if layers.get(where, 1) < 1:
        raise NotImplementedError(
            f"no layer of {a_layer / 2**30:.2g} GiB fits on the {where}, beside embedding and head "
            f"of {ends / 2**30:.2g}: "
            f"it has {max(0, room[where]) / 2**30:.2g} GiB"
        )
    return dataclasses.replace(
        sizes, layers=int(min(sizes.layers, *(n for n in layers.values() if n >= 1), sizes.layers))
    )


def case_of(where: str, context: Context) -> Case:
    """Return the case to run: the same model in each place, at the first number of tokens.

    It has fewer layers if seconds are short.
    """
    sizes = fitting(context.sizes.on_disk, rooms(context), where)
    return shortened(Case(mode=MODES[where], sizes=sizes, tokens=sizes.tokens[0]), context)


def compiled_case(where: str) -> Callable[[Context], Case]:
    """Return a function that returns the case to compile, which needs no disk."""
    return lambda context: Case(
        mode=MODES[where], sizes=context.sizes.on_disk, tokens=context.sizes.on_disk.tokens[0]
    )


def check_disk(where: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check of steps with their states in one place."""

    def rows(context: Context) -> Iterator[Row]:
        case = case_of(where, context)
        base = {HOST: None, RAM: context.ram_dir, DISK: context.swap_dir}[where]
        if base is None:
            case, program = fitted(case, lambda one: one.build(one_device()), room_of(context))
            with program:
                yield layers_row(where, case)
                yield from told(where, context, Stepped(case, context, program, None), 0.0)
            return
        yield layers_row(where, case)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            best = 0.0
            for name, rate in measure_disk(folder, context.sizes.link_bytes).items():
                text = f"{rate.read / 1e9:.2f} GB/s read, {rate.write / 1e9:.2f} GB/s written"
                yield Row(f"{where}: {name}", text, values={"read": rate.read, "write": rate.write})
                best = max(best, 2 / (1 / rate.read + 1 / rate.write))
            with case.build(one_device(), tempfile.mkdtemp(dir=folder)) as program:
                yield from told(where, context, Stepped(case, context, program, None), best)

    return rows


def layers_row(where: str, case: Case) -> Row:
    """Report the number of layers, also to the checks of other places."""
    layers = case.sizes.layers
    return Row(
        "layers",
        str(layers),
        values={"layers": float(layers), f"{KNOWN}on_disk.layers.{where}": float(layers)},
    )


def told(where: str, context: Context, stepped: Stepped, best: float) -> Iterator[Row]:
    """Run the steps; compare them with steps from host memory and with the disk's bandwidth."""
    seconds = None
    for row in stepped.rows(warmup=1, timed=2, profiled=1):
        if row.name == "step":
            seconds = row.values["seconds"]
            row = dataclasses.replace(
                row, values={**row.values, f"{KNOWN}on_disk.{where}": seconds}
            )
        yield row
    if seconds is None or where == HOST:
        return
    yield from attempt("waits", lambda: disk_rows(where, context, stepped, seconds, best))


def disk_rows(
    where: str, context: Context, stepped: Stepped, seconds: float, best: float
) -> Iterator[Row]:
    """Report the bytes that a step reads and writes, and its wait for the disk."""
    read, written, stall = (
        statistics.median(m[f"swap_{key}"] for m in stepped.metrics[1:])
        for key in ("read_bytes", "write_bytes", "stall_seconds")
    )
    rate, judged = (read + written) / seconds, judges(context)
    share = rate / best
    is_bound = where == DISK and stall > 0.05 * seconds
    yield Row(
        "reached",
        f"{read / 1e9:.2f} GB read, {written / 1e9:.2f} GB written: {rate / 1e9:.2f} GB/s, "
        f"{share:.2f} of the disk's where "
        f"reads and writes take turns; stall {stall:.3g} s",
        f"at least {BANDWIDTH:g} while the disk is the bound" if is_bound and judged else "",
        share >= BANDWIDTH if is_bound and judged else None,
        {"read_bytes": read, "write_bytes": written, "stall_seconds": stall, "share": share},
    )
    host = context.known.get(f"on_disk.{HOST}")
    if (
        host is not None
        and context.known.get(f"on_disk.layers.{HOST}") == stepped.case.sizes.layers
    ):
        bounded = where == RAM and judged
        yield Row(
            f"step over the one from {HOST} memory",
            f"{seconds / host:.2f} ({seconds:.4g} s over {host:.4g})",
            f"at most {ENGINE:g}" if bounded else "",
            seconds / host <= ENGINE if bounded else None,
            {"ratio": seconds / host},
        )
