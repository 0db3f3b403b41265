"""What a folder's disk can train: its bandwidth, and the models and step times that follow from it.

With everything on nvme a step reads parameters for forward and again for backward, and optimizer
state (master weights included) for the update; it writes optimizer state and parameters. Gradients
are written and read where they rest until the global norm is known, and parameters that are their
own masters are then read a third time. So, of `zerojax.memory`'s bytes of one parameter,

    update           read                                              written
    in_backward      2 params + master + moments                       params + master + moments
    after_backward   the same + grads (+ params if there is no master)   the same + grads

and a step of P parameters takes P (read / read bandwidth + written / write bandwidth) seconds of
the disk, where reads and writes take turns; computation hides behind that or hides it. Activations
on nvme come on top. P counts the parameters of all devices that share the disk.
"""

import errno
import os
import statistics

from host_offload.disk import DIRECT, PLAIN, Bench, IoSettings, Rates, SwapError, SwapFolder, tune
from zerojax.formulas import StateBytes, state_bytes

_ROWS = tuple(
    (precision, update)
    for precision in ("bf16", "fp32")
    for update in ("after_backward", "in_backward")
)


def disk_bytes(per_param: StateBytes, update: str) -> int:
    """Return the bytes that one parameter takes on disk."""
    return per_param.total - (per_param.grads if update == "in_backward" else 0)


def disk_traffic(per_param: StateBytes, update: str) -> tuple[int, int]:
    """Return the bytes that a step reads and writes for one parameter, by the table above.

    Args:
      per_param: bytes of one parameter.
      update: "in_backward" or "after_backward".
    """
    b = per_param
    # Forward and backward each read the parameters.
    read, written = 2 * b.params + b.master + b.moments, b.params + b.master + b.moments
    if update == "in_backward":
        return read, written
    return read + b.grads + (0 if b.master else b.params), written + b.grads


def report(folder: str, *, num_bytes: int = 1 << 30, num_rounds: int = 3) -> str:
    """Measure a folder and return what it supports, as text.

    Args:
      folder: an existing folder. What is written there is removed, but for the settings found,
        which later runs use.
      num_bytes: to write and to read, by each reader in each round.
      num_rounds: the median of so many.

    Raises:
      ValueError, SwapError: as `SwapFolder` and `Bench`.
    """
    num_records = 16
    with SwapFolder(folder) as swap:
        free, settings = swap.free_bytes(), tune(swap.path)
        size = max(num_bytes // num_records, 1 << 20)
        with _bench(swap.path, settings, num_records, size) as bench:
            bench.round()  # first writes to new files are slower
            rounds = [bench.round() for _ in range(num_rounds)]
    rates = {
        name: Rates(
            read=statistics.median(r[name].read for r in rounds),
            write=statistics.median(r[name].write for r in rounds),
        )
        for name in rounds[0]
    }
    return "\n".join(
        [
            f"{os.path.abspath(folder)}: {free / 1e9:.1f} GB free; {settings.num_threads} transfers at once of "
            f"{settings.block_bytes >> 20} MiB serve it best",
            "",
            *bandwidth_table(rates),
            "",
            *model_table(rates[DIRECT], free),
        ]
    )


def _bench(path: str, settings: IoSettings, num_records: int, record_bytes: int) -> Bench:
    try:
        return Bench(path, settings, num_records=num_records, record_bytes=record_bytes)
    except SwapError as error:
        # A full disk has a remedy of its own here: to measure with less.
        if error.errno != errno.ENOSPC:
            raise
        needed, stat = num_records * record_bytes, os.statvfs(path)
        free = stat.f_bavail * stat.f_frsize
        raise SwapError(
            f"measuring takes {needed} bytes ({needed / 2**30:.3g} GiB), and {path} has {free} free ({free / 2**30:.3g} GiB): "
            "measure with fewer (a smaller --gib), or free space on that file system",
            file=path,
            errno=errno.ENOSPC,
        ) from error


def bandwidth_table(rates: dict[str, Rates]) -> list[str]:
    """Return one line for each reader, with its share of what the disk gives."""
    peak = rates[PLAIN]
    lines = [f"{'reader':<24}{'read GB/s':>10}{'of plain':>10}{'write GB/s':>12}{'of plain':>10}"]
    for name, r in rates.items():
        lines.append(
            f"{name:<24}{r.read / 1e9:>10.2f}{r.read / peak.read:>10.2f}{r.write / 1e9:>12.2f}{r.write / peak.write:>10.2f}"
        )
    return lines


def model_table(rates: Rates, free_bytes: int) -> list[str]:
    """Return one line for each precision and update: the largest model, and seconds of the disk a
    step.
    """
    lines = [
        f"With params, grads and opt_state on nvme, Adam, and {DIRECT}, parameters of all devices that share this disk:",
        f"{'precision':<10}{'update':<16}{'bytes each':>11}{'read':>6}{'written':>9}{'at most, 1e9':>14}"
        f"{'s a step of 1e9':>17}{'s of the largest':>18}",
    ]
    for precision, update in _ROWS:
        per_param = state_bytes(precision)
        each, (read, written) = disk_bytes(per_param, update), disk_traffic(per_param, update)
        largest, seconds = free_bytes / each, read / rates.read + written / rates.write
        lines.append(
            f"{precision:<10}{update:<16}{each:>11}{read:>6}{written:>9}{largest / 1e9:>14.2f}"
            f"{seconds * 1e9:>17.1f}{seconds * largest:>18.1f}"
        )
    return lines
