"""Absent devices to trace programs for."""

import jax
from jax._src.mesh import AbstractDevice


def on_gpu(kind: str, count: int = 1):
    """Return a context in which programs are traced for `count` GPUs called `name`.

    The GPUs are on the axis `data`.
    """
    device = AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh(
        (count,), ("data",), axis_types=axis_types, abstract_device=device
    )
    return jax.sharding.use_abstract_mesh(mesh)
