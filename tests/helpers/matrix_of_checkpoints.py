"""States of every stage and tier, saved once per file and read back byte by byte.

The reader does not depend on the configuration that wrote the state.
"""

import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import toys

import zerojax as zj
from zerojax.checkpoint.manifest import SavedState

HOST, DISK = "pinned_host", "nvme"
TIERS = ("device", HOST, DISK)
MESHES: dict[str, dict[str, int]] = {
    "8": {"fsdp": 8},
    "4": {"fsdp": 4},
    "2": {"fsdp": 2},
    "1": {"fsdp": 1},
    "4x2": {"fsdp": 4, "tensor": 2},
}
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Place:
    """A state's stage, tier, mesh and precision.

    Attributes:
      stage: ZeRO stage.
      tier: tier of the optimizer state; at stage 3 also of parameters and gradients.
      mesh: key of MESHES.
      precision: precision of the compute copy.
    """

    stage: int
    tier: str
    mesh: str = "8"
    precision: str = "fp16"

    def __str__(self) -> str:
        return f"{self.stage}-{self.tier}-{self.mesh}-{self.precision}"


SAVED = [Place(stage, tier) for stage, tier in itertools.product(range(4), TIERS)]
TARGETS = [
    Place(stage, tier, mesh) for stage, tier, mesh in itertools.product(range(4), TIERS, MESHES)
]


def build(place: Place, swap: pathlib.Path, **more: Any) -> zj.Program:
    axes = MESHES[place.mesh]
    size = int(np.prod(list(axes.values())))
    fields: dict[str, Any] = {
        "stage": place.stage,
        "precision": place.precision,
        "opt_state": place.tier,
    }
    if place.stage == 3:
        fields |= {"params": place.tier, "grads": place.tier}
    if DISK in fields.values():
        swap.mkdir(exist_ok=True)
        fields["swap_dir"] = str(swap)
    mesh = zj.make_mesh(**axes, devices=jax.devices()[:size])
    return zj.build_train_step(
        toys.layered(tensor="tensor" in axes),
        toys.optimizer(),
        zj.ZeroConfig(**fields | more),
        mesh,
    )


def trained(program: zj.Program, steps: int = STEPS) -> zj.TrainState:
    """Return a state after some steps, including one that overflows in float16."""
    state = program.init(jax.random.key(0))
    data = toys.batches(steps)
    data[1]["weight"] = np.float32(1e9)
    return toys.run(program, state, data)[1]


def numbers(directory: str | os.PathLike[str], step: int) -> dict[str, np.ndarray]:
    """Return every leaf of a checkpoint, unsharded."""
    with SavedState(os.path.join(directory, str(step), "state")) as saved:
        return {name: whole(saved, name) for name in saved.leaves} | saved.values


def whole(saved: SavedState, name: str) -> np.ndarray:
    leaf = saved.leaves[name]
    out = np.empty(leaf.shape, leaf.dtype if leaf.dtype != "bfloat16" else np.float32)
    saved.records.read(name, tuple((0, n) for n in leaf.shape), out)
    return out


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
