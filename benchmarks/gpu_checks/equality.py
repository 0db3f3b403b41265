"""The same numbers from every mix of tiers."""

import concurrent.futures
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from problem import Problem

from gpu_checks.jobs import Job, Trained, one_device, platform_name
from gpu_checks.mixes import (
    ACTIVATION_MIXES,
    EQUAL_MIXES,
    NUM_TILES,
    NVME_MIXES,
    RESIDENT,
    RESIDENT_STEP,
    TILE_MIXES,
    Fields,
    Sizes,
    chosen,
)
from gpu_checks.rows import Row, attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a mix may be from the resident step after all steps.

    Attributes:
      ulp: of a loss, in float32.
      params: of a leaf's largest magnitude.
      gradients: likewise, after one step; some leaves of a gradient are small sums of large terms.
    """

    ulp: float
    params: float
    gradients: float = 1e-4


# (platform, precision) -> tolerance. A GPU picks other kernels, and so other orders of summation,
# for each program; in bf16 any compiler rounds where one program has a fusion and the other has
# not.
TOLERANCES = MappingProxyType(
    {
        ("cpu", "fp32"): Tolerance(ulp=4, params=1e-6, gradients=1e-6),
        ("cpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
        ("gpu", "fp32"): Tolerance(ulp=100, params=1e-5),
        ("gpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
    }
)
HOST_PARAMS = 1e-5  # at least, for a mix that is updated on the host


def reference_of(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return name and config of the resident step that a mix is compared with."""
    same = {name: fields[name] for name in ("clip_norm", "num_microbatches") if name in fields}
    return ", ".join([RESIDENT_STEP, *(f"{name}={value}" for name, value in same.items())]), same


def jobs(
    check: str, mixes: Mapping[str, Fields], p: Problem, sizes: Sizes, gradients: bool = False
) -> list[Job]:
    """Return a check's jobs, those that the mixes are compared with first."""
    found = chosen(check, mixes, sizes)
    base: dict[str, Any] = dict(RESIDENT) if gradients else {}
    references = {name: base | same for name, same in map(reference_of, found.values())}
    return [
        Job(name=name, problem=p, fields=f, gradients=gradients)
        for name, f in (references | found).items()
    ]


def equal_jobs(precision: str, sizes: Sizes) -> list[Job]:
    """Return the jobs of "fp32" or "bf16"."""
    return jobs(
        precision, EQUAL_MIXES, dataclasses.replace(sizes.equal, precision=precision), sizes
    )


def activation_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "activations"."""
    p = dataclasses.replace(sizes.equal, precision="fp32", steps=1)
    return jobs("activations", ACTIVATION_MIXES, p, sizes, gradients=True)


def tile_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "tiles"."""
    p = dataclasses.replace(sizes.equal, precision="fp32")
    return [
        dataclasses.replace(job, mlp_tiles=NUM_TILES) for job in jobs("tiles", TILE_MIXES, p, sizes)
    ]


def largest_ulp(found: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference of losses in units of the last place."""
    return float((np.abs(found - right) / np.spacing(np.abs(right))).max())


def largest_part(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Return the largest difference of leaves, over each leaf's largest magnitude."""
    tiny = np.finfo(np.float32).tiny
    return max(
        float(np.abs(f - r).max() / max(np.abs(r).max(), tiny))
        for f, r in zip(found, right, strict=True)
    )


def compare(job: Job, found: Trained, right: Trained, tolerance: Tolerance) -> Row:
    """Compare a mix with the resident step: losses, and parameters or what one step made of them."""
    (losses, before, after), (right_losses, right_before, right_after) = found, right
    if job.gradients:
        after = [a - b for a, b in zip(after, before, strict=True)]
        right_after = [a - b for a, b in zip(right_after, right_before, strict=True)]
    ulp, part = largest_ulp(losses, right_losses), largest_part(after, right_after)
    limit = (
        tolerance.gradients
        if job.gradients
        else max(tolerance.params, HOST_PARAMS if job.on_host else 0)
    )
    return Row(
        job.name,
        f"loss {ulp:.1f} ulp, {'gradients' if job.gradients else 'params'} {part:.1e}",
        f"{tolerance.ulp:g} ulp, {limit:g}",
        ulp <= tolerance.ulp and part <= limit,  # False where either is not a number
        {"loss_ulp": ulp, "params": part},
    )


def nvme_jobs(sizes: Sizes, folder: str | None = None) -> list[Job]:
    """Return the jobs of "nvme", each with a swap folder of its own in `folder`; without one they
    can only be compiled.
    """
    return [
        on_disk(job, folder) if "nvme" in job.fields.values() else job
        for job in jobs(
            "nvme", NVME_MIXES, dataclasses.replace(sizes.equal, precision="fp32"), sizes
        )
    ]


def on_disk(job: Job, folder: str | None) -> Job:
    """Return a job with a swap folder in `folder`."""
    swap_dir = "not there" if folder is None else tempfile.mkdtemp(dir=folder)
    return dataclasses.replace(job, fields={**job.fields, "swap_dir": swap_dir})


def compare_jobs(all_jobs: Sequence[Job]) -> Iterator[Row]:
    """Train every job, several at a time, and compare each mix with the resident step as soon as
    both are trained.
    """
    mesh, platform = one_device(), platform_name()
    with concurrent.futures.ThreadPoolExecutor(
        min(8, os.cpu_count() or 1)
    ) as pool:  # they compile for longer than they run
        trained = {job.name: pool.submit(job.train, mesh) for job in all_jobs}
        mixes = {
            trained[job.name]: job for job in all_jobs if not job.name.startswith(RESIDENT_STEP)
        }
        for future in concurrent.futures.as_completed(mixes):
            job = mixes[future]

            def rows(job: Job = job) -> Iterator[Row]:
                right = trained[reference_of(job.fields)[0]]
                yield compare(
                    job,
                    trained[job.name].result(),
                    right.result(),
                    TOLERANCES[platform, job.problem.precision],
                )

            yield from attempt(job.name, rows)
