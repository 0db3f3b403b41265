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

_ROWS = (
    ("bf16", "after_backward"),
    ("bf16", "in_backward"),
    ("fp32", "after_backward"),
    ("fp32", "in_backward"),
)
"""Rows of `model_table`: precision and update."""


def disk_bytes(per_param: StateBytes, update: str) -> int:
    """Return the bytes that one parameter takes on disk.

    Args:
      per_param: bytes per parameter of each kind of state.
      update: "in_backward" or "after_backward".
    """
    if update == "in_backward":
        return per_param.total - per_param.grads
    return per_param.total


def disk_traffic(per_param: StateBytes, update: str) -> tuple[int, int]:
    """Return the bytes that a step reads and writes per parameter, following the module's table.

    Args:
      per_param: bytes per parameter of each kind of state.
      update: "in_backward" or "after_backward".
    """
    # Forward and backward each read the parameters.
    read = 2 * per_param.params + per_param.master + per_param.moments
    written = per_param.params + per_param.master + per_param.moments
    if update != "in_backward":
        read += per_param.grads
        written += per_param.grads
        if not per_param.master:
            read += per_param.params
    return read, written


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
    rates = dict[str, Rates]()
    for name in rounds[0]:
        read = statistics.median(rates_by_name[name].read for rates_by_name in rounds)
        write = statistics.median(rates_by_name[name].write for rates_by_name in rounds)
        rates[name] = Rates(read=read, write=write)
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
    """Return a `Bench`; if the disk is too full, the error names the additional remedy."""
    try:
        return Bench(path, settings, num_records=num_records, record_bytes=record_bytes)
    except SwapError as error:
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
    plain = rates[PLAIN]
    lines = [f"{'reader':<24}{'read GB/s':>10}{'of plain':>10}{'write GB/s':>12}{'of plain':>10}"]
    for name, rate in rates.items():
        lines.append(
            f"{name:<24}{rate.read / 1e9:>10.2f}{rate.read / plain.read:>10.2f}"
            f"{rate.write / 1e9:>12.2f}{rate.write / plain.write:>10.2f}"
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
        stored = disk_bytes(per_param, update)
        read, written = disk_traffic(per_param, update)
        largest = free_bytes / stored
        seconds = read / rates.read + written / rates.write
        lines.append(
            f"{precision:<10}{update:<16}{stored:>11}{read:>6}{written:>9}{largest / 1e9:>14.2f}"
            f"{seconds * 1e9:>17.1f}{seconds * largest:>18.1f}"
        )
    return lines
