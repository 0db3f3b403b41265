"""Host memory for offloaded state."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from host_offload.device import check_host_memory, check_host_slices, host_memory_error

Array = jax.Array


def is_away(leaf: Any) -> bool:
    """Return whether an abstract leaf is stored in host memory."""
    return getattr(leaf.sharding, "memory_kind", None) == "pinned_host"


def check_host_reads(mesh: Mesh) -> None:
    """Test that the devices slice host memory correctly, once per process.

    CPUs are not tested.

    Raises:
      RuntimeError: this device and jaxlib read or write the wrong records of host memory.
    """
    if mesh.devices.flat[0].platform != "cpu":
        check_host_slices(mesh.local_devices[0])


def crosses_link(mesh: Mesh) -> bool:
    """Return whether records in host memory are moved over a link to the device: on GPUs.

    Such a link carries both directions at the same time.
    """
    return mesh.devices.flat[0].platform != "cpu"


def allocate_all(abstract: Sequence[Any]) -> list[Array]:
    """Return zeros in host memory; each process allocates its own shards.

    Args:
      abstract: ShapeDtypeStruct with a sharding for each array.

    Raises:
      RuntimeError: host memory is too small; the message says how many bytes were requested and how
        to raise the limit.
    """
    if not abstract:
        return []
    platform = next(iter(abstract[0].sharding.device_set)).platform
    num_bytes = sum(map(_local_bytes, abstract))
    check_host_memory(num_bytes, platform)
    try:
        # The wait is inside the try because JAX may raise a failed allocation only then.
        return jax.block_until_ready([_allocate(leaf) for leaf in abstract])
    except Exception as error:
        explained = host_memory_error(error, num_bytes, platform)
        if explained is not None:
            raise explained from error
        raise


def _local_bytes(leaf: Any) -> int:
    """Return the bytes of an abstract leaf's shards on this process's devices."""
    shard_elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return len(leaf.sharding.addressable_devices) * shard_elements * leaf.dtype.itemsize


def _allocate(leaf: Any) -> Array:
    # Shard by shard from numpy: a jitted jnp.zeros would be created on the device first.
    def zeros(index: Any) -> np.ndarray:
        shape = [len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True)]
        return np.zeros(shape, leaf.dtype)

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, zeros)
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        # JAX's CPU client may adopt numpy's memory, which it then cannot update in place.
        array = jax.device_put(array, leaf.sharding, may_alias=False)
    return array
