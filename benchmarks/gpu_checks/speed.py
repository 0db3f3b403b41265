"""The link, step times, and overlap."""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_checks.jobs import Job, one_device, platform_name
from gpu_checks.mixes import RESIDENT, RESIDENT_STEP, SPEED_MIXES, H, Sizes, chosen
from gpu_checks.rows import Row, attempt
from gpu_checks.turns import Timed, Turns

HERE = pathlib.Path(__file__).resolve().parents[1]
HIDDEN = 0.5  # least part of the shorter of compute and transfers that a mix updated in backward must hide, on a GPU


def speed_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "speed": first the resident step, then the mixes."""
    mixes = {RESIDENT_STEP: RESIDENT, **chosen("speed", SPEED_MIXES, sizes)}
    return [Job(name=name, problem=sizes.fast, fields=f) for name, f in mixes.items()]


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes a second between pinned host memory and the device: each way alone, and both at once, summed."""

    to_device: float
    to_host: float
    both: float

    def seconds(self, to_device: float, to_host: float) -> float:
        """Return the least time of a transfer."""
        return max(to_device / self.to_device, to_host / self.to_host, (to_device + to_host) / self.both)


def measure_link(mesh: Any, num_bytes: int, repeats: int = 5) -> Link:
    """Time `jax.device_put` of arrays of `num_bytes`."""
    import jax
    import jax.numpy as jnp

    from zerojax.sharding import named

    on_device, on_host = named(mesh, ()), named(mesh, (), H)
    x = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), on_device)
    y = jax.device_put(x, on_host)

    def best(*pairs: Any) -> float:
        found = []
        for _ in range(repeats + 1):  # the first allocates
            jax.block_until_ready((x, y))
            start = time.perf_counter()
            moved = [jax.device_put(a, sharding, may_alias=False) for a, sharding in pairs]
            jax.block_until_ready(moved)
            found.append(time.perf_counter() - start)
            del moved
        return len(pairs) * x.nbytes / min(found[1:])

    return Link(best((y, on_device)), best((x, on_host)), best((y, on_device), (x, on_host)))


def check_speed(sizes: Sizes) -> Iterator[Row]:
    """Measure the link, and each mix beside the resident step."""
    link = measure_link(one_device(), sizes.link_bytes)
    for way, rate in dataclasses.asdict(link).items():
        yield Row(f"link, {way.replace('_', ' ')}", f"{rate / 1e9:.1f} GB/s", values={"bytes_per_second": rate})
    first, *others = speed_jobs(sizes)
    with Turns(first) as turns:
        for job in others:
            yield from attempt(job.name, lambda job=job: speed_rows(job, turns.time(job, sizes.rounds), link))


def speed_rows(job: Job, timed: Timed, link: Link) -> Iterator[Row]:
    """Say how long a mix took, and how much of its transfers it hid."""
    step, compute = statistics.median(timed.seconds), statistics.median(timed.resident)
    yield ratio_row(job.name, timed)
    up, down = timed.to_device, timed.to_host
    rate = (up + down) / step
    text = f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down: {rate / 1e9:.1f} GB/s reached"
    yield Row(f"{job.name}: link", text, values={"to_device": up, "to_host": down, "bytes_per_second": rate})
    if job.on_host or job.fields.get("activations") == "save":
        return  # the host's own work, or less to compute than in the resident step, would count as transfers
    transfer = link.seconds(up, down)
    hidden = (compute + transfer - step) / min(compute, transfer)
    judged = platform_name() == "gpu" and job.fields.get("update") == "in_backward" and job.fields.get("prefetch_distance") != 0
    yield Row(
        f"{job.name}: transfers hidden",
        f"{hidden:.2f} (compute {1e3 * compute:.1f} ms, transfers {1e3 * transfer:.1f} ms, "
        f"{step / max(compute, transfer):.2f} of the floor)",
        f"at least {HIDDEN:g}" if judged else "",
        hidden >= HIDDEN if judged else None,
        {"hidden": hidden, "transfer_seconds": transfer, "over_floor": step / max(compute, transfer)},
    )


def ratio_row(name: str, timed: Timed) -> Row:
    """Say how long a mix took over the resident step."""
    step, compute = statistics.median(timed.seconds), statistics.median(timed.resident)
    ratios = [t / b for t, b in zip(timed.seconds, timed.resident, strict=True)]
    ratio = statistics.median(ratios)
    text = f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}; {1e3 * step:.1f} ms over {1e3 * compute:.1f})"
    finite = bool(np.isfinite([m["loss"] for m in timed.metrics]).all())
    values = {"ratio": ratio, "seconds": step, "resident_seconds": compute}
    return Row(f"{name}: step over resident", text, "finite losses", finite, values)
