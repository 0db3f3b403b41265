"""All combinations of a streamed step's tiers, schedules, updates and activations.

Smaller selections of these cases are made here too.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
STEPS = 10
MESHES: dict[str, dict[str, int]] = {
    "fsdp4": {"fsdp": 4},
    "fsdp2_tensor2": {"fsdp": 2, "tensor": 2},
}
UPDATES = (
    ("after_backward", "device"),
    ("in_backward", "device"),
    ("after_backward", "host"),
    ("in_backward", "host"),
)

AXES: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(MESHES),
    "params": ("device", HOST, DISK),
    "grads": ("device", HOST, DISK),
    "opt_state": ("device", HOST, DISK),
    "prefetch_distance": (0, 1, 2),
    "update": UPDATES,
    "activations": ("save", "remat", "selective", HOST, DISK),
    "num_microbatches": (1, 4),
    "gather_ahead": (False, True),
    "io": ("direct", "tensorstore"),
}
CANDIDATES = 1500  # number of sampled cases to choose from


def is_valid(case: dict[str, Any]) -> bool:
    return case["update"][1] == "device" or case["opt_state"] != "device"


def every_case(disk: bool = False) -> list[dict[str, Any]]:
    """Return every case; without `disk`, only the cases that store nothing on disk."""
    axes = (
        AXES
        if disk
        else {
            name: tuple(v for v in values if v != DISK)
            for name, values in AXES.items()
            if name != "io"
        }
    )
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [case for case in cases if is_valid(case)]


@functools.cache
def pairwise_cases() -> list[dict[str, Any]]:
    """Choose sampled cases greedily until they cover every pair of values of two axes."""
    return pairwise(random.Random(0).sample(every_case(disk=True), CANDIDATES))


@functools.cache
def quick_cases() -> list[dict[str, Any]]:
    """Choose cases until every value of every axis is covered.

    Only cases that compare with one of two resident steps are chosen, and none with
    activations="save": that is the default, which other tests of streamed steps cover.
    """
    references = {("fsdp4", 4, "device"), ("fsdp2_tensor2", 1, "host")}
    cases = [
        case
        for case in every_case(disk=True)
        if reference_of(case) in references and case["activations"] != "save"
    ]
    return chosen_of(random.Random(0).sample(cases, 300), lambda case: set(case.items()))


def reference_of(case: dict[str, Any]) -> tuple[str, int, str]:
    """Return the arguments of `resident` for a case."""
    return case["mesh"], case["num_microbatches"], case["update"][1]


def pairwise(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose cases greedily until they cover every pair of values of two axes."""
    return chosen_of(cases, lambda case: set(itertools.combinations(sorted(case.items()), 2)))


def chosen_of(
    cases: list[dict[str, Any]], claims: Callable[[dict[str, Any]], set[Any]]
) -> list[dict[str, Any]]:
    """Choose cases greedily until the chosen cases cover all claims of all cases."""
    of_case = [claims(case) for case in cases]
    missing = set().union(*of_case)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda n: len(of_case[n] & missing))
        missing -= of_case[best]
        chosen.append(cases[best])
    return chosen


def name_of(case: dict[str, Any]) -> str:
    return "-".join("_".join(v) if isinstance(v, tuple) else str(v) for v in case.values())


def config_of(case: dict[str, Any], swap_dir: str | None = None) -> zj.ZeroConfig:
    fields = {name: value for name, value in case.items() if name not in ("mesh", "update")}
    return zj.ZeroConfig(
        stage=3, update=case["update"][0], update_on=case["update"][1], swap_dir=swap_dir, **fields
    )


def train(mesh: str, config: zj.ZeroConfig) -> tuple[np.ndarray, Any]:
    """Train the toy for STEPS steps on 4 devices; returns losses and parameters."""
    axes = MESHES[mesh]
    program = zj.build_train_step(
        toys.layered(tensor="tensor" in axes),
        toys.optimizer(),
        config,
        zj.make_mesh(**axes, devices=jax.devices()[:4]),
    )
    losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(STEPS))
    params = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    program.close()
    return np.asarray(losses, np.float32), params


@functools.cache
def resident(mesh: str, num_microbatches: int, update_on: str) -> tuple[np.ndarray, Any]:
    """Return the losses and parameters of the resident step.

    The update on the host has a reference of its own, because its tests compile other fusions.
    """
    del update_on
    return train(mesh, zj.ZeroConfig(stage=3, num_microbatches=num_microbatches))


def differences(case: dict[str, Any], swap_dir: str | None = None) -> tuple[float, float]:
    """Return how far a case is from the resident step.

    The first number is in units in the last place of a loss; the second is the largest parameter
    difference relative to its leaf's largest magnitude.
    """
    losses, params = train(case["mesh"], config_of(case, swap_dir))
    expected_losses, expected = resident(*reference_of(case))
    ulps = float(np.max(np.abs(losses - expected_losses) / np.spacing(np.abs(expected_losses))))

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        largest = np.max(np.abs(b))
        return float(np.max(np.abs(a - b)) / (largest if largest else 1))

    return ulps, max(jax.tree.leaves(jax.tree.map(relative, params, expected)))


def bounds(case: dict[str, Any]) -> tuple[float, float]:
    """Return the largest allowed differences.

    They are 2 ulp and 1e-6 with the update on the device, and 1e-5 for both on the host.
    """
    return (
        (2.0, 1e-6)
        if case["update"][1] == "device"
        else (1e-5 / float(np.finfo(np.float32).eps), 1e-5)
    )
