"""Check that every mix of tiers gives the same numbers as the resident step."""

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
    """Largest allowed differences between a mix and the resident step, after all steps.

    Attributes:
      ulp: difference of a loss, in float32 units in the last place.
      params: difference of a leaf's elements, over the leaf's largest magnitude.
      gradients: difference of a gradient leaf's elements after one step, over the leaf's largest
        magnitude; some leaves are small sums of large terms.
    """

    ulp: float
    params: float
    gradients: float = 1e-4


# (platform, precision) -> tolerance. A GPU picks different kernels, and so different orders of
# summation, for each program. In bf16, any compiler rounds differently where only one of the
# programs has a fusion.
TOLERANCES = MappingProxyType(
    {
        ("cpu", "fp32"): Tolerance(ulp=4, params=1e-6, gradients=1e-6),
        ("cpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
        ("gpu", "fp32"): Tolerance(ulp=100, params=1e-5),
        ("gpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
    }
)
HOST_PARAMS = 1e-5  # least tolerance for parameters that are updated on the host


def reference_of(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return the name and config of the resident step that a mix is compared with."""
    same = {name: fields[name] for name in ("clip_norm", "num_microbatches") if name in fields}
    return ", ".join([RESIDENT_STEP, *(f"{name}={value}" for name, value in same.items())]), same


def jobs(
    check: str, mixes: Mapping[str, Fields], p: Problem, sizes: Sizes, gradients: bool = False
) -> list[Job]:
    """Return a check's jobs: first the resident reference steps, then the mixes."""
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
    """Return the largest difference of losses, in units in the last place."""
    return float((np.abs(found - right) / np.spacing(np.abs(right))).max())


def largest_part(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Return the largest difference of leaves, over each leaf's largest magnitude."""
    tiny = np.finfo(np.float32).tiny
    return max(
        float(np.abs(f - r).max() / max(np.abs(r).max(), tiny))
        for f, r in zip(found, right, strict=True)
    )


def compare(job: Job, found: Trained, right: Trained, tolerance: Tolerance) -> Row:
    """Compare a mix with the resident step: losses, and parameters or one step's gradients."""
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
        ulp <= tolerance.ulp and part <= limit,  # False if either is NaN
        {"loss_ulp": ulp, "params": part},
    )


def nvme_jobs(sizes: Sizes, folder: str | None = None) -> list[Job]:
    """Return the jobs of "nvme", each with its own swap folder in `folder`.

    Without a folder they can only be compiled.
    """
    return [
        on_disk(job, folder) if "nvme" in job.fields.values() else job
        for job in jobs(
            "nvme", NVME_MIXES, dataclasses.replace(sizes.equal, precision="fp32"), sizes
        )
    ]


def on_disk(job: Job, folder: str | None) -> Job:
    """Return a job with a new swap folder in `folder`."""
    swap_dir = "not there" if folder is None else tempfile.mkdtemp(dir=folder)
    return dataclasses.replace(job, fields={**job.fields, "swap_dir": swap_dir})


def compare_jobs(all_jobs: Sequence[Job]) -> Iterator[Row]:
    """Train every job, several at a time, and compare each mix with its resident step.

    A mix's row is yielded as soon as both are trained.
    """
    mesh, platform = one_device(), platform_name()
    # Jobs compile for longer than they run, so threads help.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
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
