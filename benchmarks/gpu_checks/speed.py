"""Measure the link, step times, and overlap."""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gpu_checks.jobs import Job, one_device, platform_name
from gpu_checks.mixes import RESIDENT, RESIDENT_STEP, SPEED_MIXES, Sizes, chosen
from gpu_checks.rows import Row, attempt
from gpu_checks.turns import Timed, Turns

if TYPE_CHECKING:
    from zerojax.planner import Link

HERE = pathlib.Path(__file__).resolve().parents[1]
# On a GPU, a mix updated in backward must hide at least this part of the shorter of compute and
# transfers.
HIDDEN = 0.5


def speed_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "speed": first the resident step, then the mixes."""
    mixes = {RESIDENT_STEP: RESIDENT, **chosen("speed", SPEED_MIXES, sizes)}
    return [Job(name=name, problem=sizes.fast, fields=f) for name, f in mixes.items()]


def check_speed(sizes: Sizes) -> Iterator[Row]:
    """Measure the link, and time each mix in turn with the resident step."""
    from zerojax.planner import measure_link

    link = measure_link(one_device(), sizes.link_bytes)
    for way, rate in dataclasses.asdict(link).items():
        yield Row(
            f"link, {way.replace('_', ' ')}",
            f"{rate / 1e9:.1f} GB/s",
            values={"bytes_per_second": rate},
        )
    first, *others = speed_jobs(sizes)
    with Turns(first) as turns:
        for job in others:
            yield from attempt(
                job.name, lambda job=job: speed_rows(job, turns.time(job, sizes.rounds), link)
            )


def speed_rows(job: Job, timed: Timed, link: "Link") -> Iterator[Row]:
    """Report how long a mix's step takes, and how much of its transfers is hidden."""
    step, compute = statistics.median(timed.seconds), statistics.median(timed.resident)
    yield ratio_row(job.name, timed)
    up, down = timed.to_device, timed.to_host
    rate = (up + down) / step
    text = f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down: {rate / 1e9:.1f} GB/s reached"
    yield Row(
        f"{job.name}: link",
        text,
        values={"to_device": up, "to_host": down, "bytes_per_second": rate},
    )
    if job.on_host or job.fields.get("activations") == "save":
        # The host's own work, or less to compute than in the resident step, would count as
        # transfers.
        return
    transfer = link.seconds(up, down)
    hidden = (compute + transfer - step) / min(compute, transfer)
    judged = (
        platform_name() == "gpu"
        and job.fields.get("update") == "in_backward"
        and job.fields.get("prefetch_distance") != 0
    )
    yield Row(
        f"{job.name}: transfers hidden",
        f"{hidden:.2f} (compute {1e3 * compute:.1f} ms, transfers {1e3 * transfer:.1f} ms, "
        f"{step / max(compute, transfer):.2f} of the floor)",
        f"at least {HIDDEN:g}" if judged else "",
        hidden >= HIDDEN if judged else None,
        {
            "hidden": hidden,
            "transfer_seconds": transfer,
            "over_floor": step / max(compute, transfer),
        },
    )


def ratio_row(name: str, timed: Timed) -> Row:
    """Report a mix's step time over the resident step's."""
    step, compute = statistics.median(timed.seconds), statistics.median(timed.resident)
    ratios = [t / b for t, b in zip(timed.seconds, timed.resident, strict=True)]
    ratio = statistics.median(ratios)
    text = (
        f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}; "
        f"{1e3 * step:.1f} ms over {1e3 * compute:.1f})"
    )
    finite = bool(np.isfinite([m["loss"] for m in timed.metrics]).all())
    values = {"ratio": ratio, "seconds": step, "resident_seconds": compute}
    return Row(f"{name}: step over resident", text, "finite losses", finite, values)
