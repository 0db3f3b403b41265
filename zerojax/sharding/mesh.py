"""The device mesh: `data` (replicas), `fsdp` (ZeRO shards), `tensor` (tensor parallelism), in this order.

The last axis is the innermost, so neighbouring devices share a tensor group, then a ZeRO group. With devices listed host by
host, `fsdp` = GPUs of a node and `data` = nodes is hybrid sharding (MiCS, arXiv:2205.00119; hpZ of ZeRO++,
arXiv:2306.10209): state is sharded inside a node, replicated across, and only gradients cross nodes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zerojax.given import as_integer

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
BATCH_AXES = (DATA, FSDP)
"""Axes over which dim 0 of a batch is split."""


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices in a mesh with the axes `data`, `fsdp` and `tensor`.

    Args:
      data: number of replicas of the sharded state.
      fsdp: number of ZeRO shards.
      tensor: number of tensor-parallel shards. At most one of the three may be -1, which stands for the rest.
      devices: the devices, host by host; all of `jax.devices()` by default. Devices of a compile-only topology will do.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    for axis, size in sizes.items():
        number = as_integer(size)
        if number is None or (number < 1 and number != -1):
            raise ValueError(f"{axis}={size!r}: a positive integer is needed, or -1 for the rest of the devices")
        sizes[axis] = number
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{' and '.join(free)} are both -1: at most one axis may stand for the rest")
    known = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if free and len(devices) % known:
        raise ValueError(f"{product}: {len(devices)} devices do not divide by {known}; choose axes that do")
    if free:
        sizes[free[0]] = len(devices) // known
    elif known != len(devices):
        raise ValueError(f"{product} = {known}, but there are {len(devices)} devices; set one axis to -1 for the rest")
    grid = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    # With Auto axes a model needs no annotations: the partitioner propagates shardings from the constraints.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError unless `mesh` has the axes that a train step needs, all of them automatic."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh from zerojax.make_mesh, got {type(mesh).__name__}")
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise ValueError(f"the mesh has axes {mesh.axis_names} and lacks {missing}: make it with zerojax.make_mesh")
    explicit = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]
    if explicit:
        raise ValueError(f"mesh axes {explicit} are not AxisType.Auto: make the mesh with zerojax.make_mesh")


def num_batch_shards(mesh: Mesh) -> int:
    """Return over how many devices dim 0 of a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
