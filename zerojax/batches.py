"""Batches on a mesh: dim 0 is split over `data` and `fsdp`, and each process may bring a part of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.layout import batch_sharding, check_batch


def place_batch(batch: Any, mesh: Mesh, num_microbatches: int) -> Any:
    """Return a batch on the mesh. Leaves already there stay.

    Args:
      batch: tree of arrays; of several processes each gives its part of dim 0, or a global array.
      mesh: the device mesh.
      num_microbatches: into which each device's part will be divided.

    Raises:
      ValueError: the batch does not divide.
    """
    processes = len({d.process_index for d in mesh.devices.flat})
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf, batch)

    def parts(leaf: Any) -> int:
        """Return how many processes hold a part of dim 0 each: 1 if the leaf is the whole batch already."""
        is_whole = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return 1 if is_whole or leaf.ndim == 0 else processes

    def whole(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct((leaf.shape[0] * parts(leaf), *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype)

    check_batch(jax.tree.map(whole, batch), mesh, num_microbatches)

    def place(leaf: Any) -> jax.Array:
        sharding = batch_sharding(mesh, leaf.ndim)
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if parts(leaf) > 1:
            return jax.make_array_from_process_local_data(sharding, leaf)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, batch)


def abstract_batch(batch: Any, mesh: Mesh) -> Any:
    """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding."""

    def abstract(a: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(a.dtype)
        return jax.ShapeDtypeStruct(a.shape, dtype, sharding=batch_sharding(mesh, len(a.shape)))

    return jax.tree.map(abstract, batch)
