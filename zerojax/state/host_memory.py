"""Host memory for state that rests there."""

import functools
import importlib.metadata
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from host_offload.device import check_host_memory, check_host_slices, has_linear_fix, host_memory_error, linear_slices_are_right
from zerojax.aot import is_there

Array = jax.Array
logger = logging.getLogger("zerojax")


def is_away(leaf: Any) -> bool:
    """Tell whether an abstract leaf rests in host memory."""
    return getattr(leaf.sharding, "memory_kind", None) == "pinned_host"


def check_host_reads(mesh: Mesh) -> None:
    """Test, once a process, that the devices read the right records of host memory; a CPU does.

    Raises:
      RuntimeError: this device and jaxlib read wrong ones.
    """
    # XLA for GPUs may slice host memory at another index than it is given (openxla/xla 46231); XLA for CPUs does not.
    if mesh.devices.flat[0].platform != "cpu":
        check_host_slices(mesh.local_devices[0])


def takes_linear_slices(mesh: Mesh) -> bool:
    """Tell whether a step's slices of host memory may have indices that are linear in the counters of its loops.

    XLA for GPUs moves such a slice by a copy engine, and one whose index is read from an array by a kernel. It is asked of the
    devices once, by running both (`host_offload.device.self_test`); of devices that are not there, of the version alone. On a
    CPU there is no link to a host, and nothing to win.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return False
    version = importlib.metadata.version("jaxlib")
    if not has_linear_fix():
        _say_once(f"jaxlib {version}: records move between host and device by kernels; from 0.11.1 on, by copy engines")
        return False
    if is_there(mesh) and not linear_slices_are_right(mesh.local_devices[0]):
        _say_once(f"jaxlib {version}: this device slices host memory wrongly at a linear index; records move by kernels")
        return False
    return True


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def allocate_all(abstract: Sequence[Any]) -> list[Array]:
    """Return zeros in host memory, each process its own shards.

    Raises:
      RuntimeError: they find no room; says how many bytes were asked for and how to raise the limit.
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
    return len(leaf.sharding.addressable_devices) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _allocate(leaf: Any) -> Array:
    # Shard by shard from numpy: a jitted jnp.zeros would be made on the device first.
    def zeros(index: Any) -> np.ndarray:
        shape = [len(range(*i.indices(n))) for i, n in zip(index, leaf.shape, strict=True)]
        return np.zeros(shape, leaf.dtype)

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, zeros)
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        # The client of CPUs may take numpy's memory for its own, which it then cannot update in place.
        array = jax.device_put(array, leaf.sharding, may_alias=False)
    return array
