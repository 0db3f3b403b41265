"""Devices that are not there, to trace programs for."""

import jax
from jax._src.mesh import AbstractDevice


def on_gpu(kind: str):
    """Return a context in which programs are traced for a GPU of this name."""
    device = AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device))
