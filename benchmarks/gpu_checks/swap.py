"""Check the nvme tier: equal numbers, the disk's speed, and the time a step waits for it."""

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpu_checks.equality import compare_jobs, nvme_jobs, on_disk
from gpu_checks.jobs import Job
from gpu_checks.mixes import NVME_SPEED_MIXES, RESIDENT, RESIDENT_STEP, Sizes, chosen
from gpu_checks.rows import Row, attempt
from gpu_checks.speed import ratio_row
from gpu_checks.turns import Timed, Turns

if TYPE_CHECKING:
    from host_offload.disk import Rates


def speed_jobs(sizes: Sizes, folder: str | None = None) -> list[Job]:
    """Return the jobs to time, the resident step first."""
    mixes = chosen("nvme", NVME_SPEED_MIXES, sizes)
    timed = [
        Job(name=f"timed: {name}", problem=sizes.swapped, fields=fields)
        for name, fields in mixes.items()
    ]
    return [Job(name=f"timed: {RESIDENT_STEP}", problem=sizes.swapped, fields=RESIDENT)] + [
        on_disk(j, folder) for j in timed
    ]


def swap_jobs(sizes: Sizes) -> list[Job]:
    """Return all jobs, for compilation only."""
    return nvme_jobs(sizes) + speed_jobs(sizes)


def check_swap(sizes: Sizes) -> Iterator[Row]:
    """Compare steps on disk with the resident step, measure the disk, and time steps."""
    from host_offload.disk import PLAIN

    with tempfile.TemporaryDirectory() as folder:
        yield from compare_jobs(nvme_jobs(sizes, folder))
        rates = measure_disk(folder, sizes.link_bytes)
        for name, rate in rates.items():
            text = f"{rate.read / 1e9:.2f} GB/s read, {rate.write / 1e9:.2f} GB/s written"
            yield Row(f"disk: {name}", text, values=dataclasses.asdict(rate))
        yield from time_jobs(speed_jobs(sizes, folder), sizes.rounds, rates[PLAIN])


def measure_disk(folder: str, num_bytes: int) -> "dict[str, Rates]":
    """Return each reader's rates in a folder, the best of three rounds.

    A round writes and reads files of `num_bytes` in total.
    """
    from host_offload.disk import Bench, Rates, SwapFolder, tune

    num_records = 16
    with (
        SwapFolder(tempfile.mkdtemp(dir=folder)) as swap,
        Bench(
            swap.path,
            tune(swap.path),
            num_records=num_records,
            record_bytes=num_bytes // num_records,
        ) as bench,
    ):
        rounds = [bench.round() for _ in range(3)]
    return {
        name: Rates(
            read=max(r[name].read for r in rounds), write=max(r[name].write for r in rounds)
        )
        for name in rounds[0]
    }


def time_jobs(all_jobs: list[Job], rounds: int, disk: "Rates") -> Iterator[Row]:
    """Time each job in turn with the first one, the resident step."""
    first, *others = all_jobs
    with Turns(first) as turns:
        for job in others:

            def rows(job: Job = job) -> Iterator[Row]:
                timed = turns.time(job, rounds)
                yield ratio_row(job.name, timed)
                yield swap_row(job.name, timed, disk)

            yield from attempt(job.name, rows)


def swap_row(name: str, timed: Timed, disk: "Rates") -> Row:
    """Report the bytes that a step reads and writes, and its wait for the disk."""
    step, compute = statistics.median(timed.seconds), statistics.median(timed.resident)
    read, written, stall = (
        statistics.median(m[f"swap_{key}"] for m in timed.metrics)
        for key in ("read_bytes", "write_bytes", "stall_seconds")
    )
    alone = read / disk.read + written / disk.write
    return Row(
        f"{name}: disk",
        f"{read / 1e6:.0f} MB read, {written / 1e6:.0f} MB written: "
        f"{(read + written) / step / 1e9:.2f} GB/s; "
        f"alone {1e3 * alone:.0f} ms, stall {1e3 * stall:.0f} ms, "
        f"{step / max(compute, alone):.2f} of the floor",
        values={
            "read_bytes": read, "write_bytes": written, "stall_seconds": stall,
            "alone_seconds": alone,
            "over_floor": step / max(compute, alone),
        },
    )  # fmt: skip
