"""What a folder's disk can train: its bandwidth, and the resulting model sizes and step times.

With everything on nvme, a step reads parameters once for forward and once for backward, and reads
optimizer state (including masters) for the update; it writes optimizer state and parameters. With
the update after backward, gradients are also written, and read once the global norm is known; if
parameters are their own masters, they are then read a third time. In the bytes per parameter of
`zerojax.formulas.StateBytes`:

    update           read                                          written
    in_backward      2 params + master + moments                   params + master + moments
    after_backward   in_backward's + grads (+ params if no master) in_backward's + grads

A step of P parameters therefore takes P (read / read bandwidth + written / write bandwidth) seconds
of disk time if reads and writes alternate. Compute either hides behind that time or hides it.
Activations on nvme are not included. P counts the parameters of all devices that share the disk.
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
    """Return the bytes that one parameter takes on disk.

    Args:
      per_param: bytes per parameter of each kind of state.
      update: "in_backward" or "after_backward".
    """
    return per_param.total - (per_param.grads if update == "in_backward" else 0)


def disk_traffic(per_param: StateBytes, update: str) -> tuple[int, int]:
    """Return the bytes that a step reads and writes per parameter, following the module's table.

    Args:
      per_param: bytes per parameter of each kind of state.
      update: "in_backward" or "after_backward".
    """
    b = per_param
    # Forward and backward each read the parameters.
    read = 2 * b.params + b.master + b.moments
    written = b.params + b.master + b.moments
    if update == "in_backward":
        return read, written
    return read + b.grads + (0 if b.master else b.params), written + b.grads


def report(folder: str, *, num_bytes: int = 1 << 30, num_rounds: int = 3) -> str:
    """Measure a folder's disk and return, as text, its bandwidth and the models that it can train.

    Files written during the measurement are removed, except for the tuned settings, which later
    runs reuse.

    Args:
      folder: path of an existing folder.
      num_bytes: bytes that each reader writes and reads in each round.
      num_rounds: number of rounds; the report shows their median.

    Raises:
      ValueError: the folder does not exist or cannot be used; see `SwapFolder` and `Bench`.
      SwapError: the disk is too small or fails; see `SwapFolder` and `Bench`.
    """
    num_records = 16
    with SwapFolder(folder) as swap:
        free = swap.free_bytes()
        settings = tune(swap.path)
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
            f"{os.path.abspath(folder)}: {free / 1e9:.1f} GB free; fastest with "
            f"{settings.num_threads} concurrent transfers of {settings.block_bytes >> 20} MiB",
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
        # Here a full disk has an additional remedy: measuring with fewer bytes.
        if error.errno != errno.ENOSPC:
            raise
        needed = num_records * record_bytes
        stat = os.statvfs(path)
        free = stat.f_bavail * stat.f_frsize
        raise SwapError(
            f"measuring takes {needed} bytes ({needed / 2**30:.3g} GiB), but {path} has only "
            f"{free} free ({free / 2**30:.3g} GiB): pass a smaller --gib, or free space on that "
            "file system",
            file=path,
            errno=errno.ENOSPC,
        ) from error


def bandwidth_table(rates: dict[str, Rates]) -> list[str]:
    """Return a table with one line per reader: bandwidth, and fraction of the disk's ceiling."""
    peak = rates[PLAIN]
    lines = [f"{'reader':<24}{'read GB/s':>10}{'of plain':>10}{'write GB/s':>12}{'of plain':>10}"]
    for name, r in rates.items():
        lines.append(
            f"{name:<24}{r.read / 1e9:>10.2f}{r.read / peak.read:>10.2f}"
            f"{r.write / 1e9:>12.2f}{r.write / peak.write:>10.2f}"
        )
    return lines


def model_table(rates: Rates, free_bytes: int) -> list[str]:
    """Return a table with the largest model and its step time for each precision and update.

    Args:
      rates: bandwidth of the disk, in bytes per second.
      free_bytes: free bytes on the disk.
    """
    lines = [
        f"With Adam; params, grads and opt_state on nvme; and {DIRECT}. "
        "Parameters are counted over all devices that share this disk:",
        f"{'precision':<10}{'update':<16}{'bytes each':>11}{'read':>6}{'written':>9}"
        f"{'at most, 1e9':>14}{'s a step of 1e9':>17}{'s of the largest':>18}",
    ]
    for precision, update in _ROWS:
        per_param = state_bytes(precision)
        each = disk_bytes(per_param, update)
        (read, written) = disk_traffic(per_param, update)
        largest = free_bytes / each
        seconds = read / rates.read + written / rates.write
        lines.append(
            f"{precision:<10}{update:<16}{each:>11}{read:>6}{written:>9}{largest / 1e9:>14.2f}"
            f"{seconds * 1e9:>17.1f}{seconds * largest:>18.1f}"
        )
    return lines
