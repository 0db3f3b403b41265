"""Host memory for state that rests there."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from host_offload.device import check_host_memory, check_host_slices, host_memory_error

Array = jax.Array


def is_away(leaf: Any) -> bool:
    """Tell whether an abstract leaf rests in host memory."""
    return getattr(leaf.sharding, "memory_kind", None) == "pinned_host"


def check_host_reads(mesh: Mesh) -> None:
    """Test, once a process, that the devices read and write the right records of host memory. CPUs
    always do.

    Raises:
      RuntimeError: this device and jaxlib slice host memory at wrong records.
    """
    if mesh.devices.flat[0].platform != "cpu":
        check_host_slices(mesh.local_devices[0])


def crosses_link(mesh: Mesh) -> bool:
    """Return whether records in host memory cross a link to the device, which carries both
    directions at once: on GPUs.
    """
    return mesh.devices.flat[0].platform != "cpu"


def allocate_all(abstract: Sequence[Any]) -> list[Array]:
    """Return zeros in host memory, each process its own shards.

    Raises:
      RuntimeError: they find no room; says how many bytes were asked for and how to raise the
        limit.
    """
    if not abstract:
        return []
    platform = next(iter(abstract[0].sharding.device_set)).platform
    num_bytes = sum(map(_local_bytes, abstract))
    check_host_memory(num_bytes, platform)
    try:
        # Waited for inside of the try: JAX may raise a failed allocation only then.
        return jax.block_until_ready([_allocate(leaf) for leaf in abstract])
    except Exception as error:
        if (explained := host_memory_error(error, num_bytes, platform)) is not None:
            raise explained from error
        raise


def _local_bytes(leaf: Any) -> int:
    return (
        len(leaf.sharding.addressable_devices)
        * math.prod(leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
    )


def _allocate(leaf: Any) -> Array:
    # Shard by shard from numpy: a jitted jnp.zeros would be made on the device first.
    def zeros(index: Any) -> np.ndarray:
        shape = [len(range(*i.indices(n))) for i, n in zip(index, leaf.shape, strict=True)]
        return np.zeros(shape, leaf.dtype)

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, zeros)
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        # The client of CPUs may take numpy's memory for its own, which it then cannot update in
        # place.
        array = jax.device_put(array, leaf.sharding, may_alias=False)
    return array
