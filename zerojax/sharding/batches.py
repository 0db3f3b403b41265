"""Batches on a mesh: dim 0 is split over `data` and `fsdp`, and each process may bring a part of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.sharding.activations import ActivationSpec
from zerojax.sharding.mesh import BATCH_AXES, num_batch_shards


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
        # An array that this process holds only in part is a global one.
        is_whole = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return 1 if is_whole or leaf.ndim == 0 else processes

    def whole(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct((leaf.shape[0] * parts(leaf), *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype)

    check_batch(jax.tree.map(whole, batch), mesh, num_microbatches)

    def place(leaf: Any) -> jax.Array:
        sharding = ActivationSpec(mesh).batch(leaf.ndim)
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if parts(leaf) > 1:
            return jax.make_array_from_process_local_data(sharding, leaf)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, batch)


def abstract_batch(batch: Any, mesh: Mesh) -> Any:
    """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding."""

    def abstract(a: Any) -> jax.ShapeDtypeStruct:
        # On the device numpy's 64-bit numbers become 32-bit ones, unless x64 is enabled.
        dtype = jax.dtypes.canonicalize_dtype(a.dtype)
        return jax.ShapeDtypeStruct(a.shape, dtype, sharding=ActivationSpec(mesh).batch(len(a.shape)))

    return jax.tree.map(abstract, batch)


def check_batch(batch: Any, mesh: Mesh, num_microbatches: int) -> int:
    """Return the global batch size.

    Args:
      batch: tree of arrays or ShapeDtypeStruct; dim 0 of every leaf that has dims is the batch.
      mesh: the device mesh.
      num_microbatches: of the config.

    Raises:
      ValueError: no arrays, unequal batch sizes, or a batch that does not divide.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    odd = [f"{jax.tree_util.keystr(path)} is {type(leaf).__name__}" for path, leaf in leaves if not hasattr(leaf, "shape")]
    if odd:
        raise ValueError(f"a batch is a tree of arrays, but {', '.join(odd)}")
    sizes = {jax.tree_util.keystr(path) or "batch": leaf.shape[0] for path, leaf in leaves if len(leaf.shape)}
    if not sizes:
        raise ValueError("the batch holds no array with a batch dim")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"dim 0 of every leaf of a batch is the batch, but they differ: {sizes}")
    size = next(iter(sizes.values()))
    shards = num_batch_shards(mesh)
    if not size or size % (shards * num_microbatches):
        axes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in BATCH_AXES)
        least = shards * num_microbatches
        raise ValueError(
            f"a batch of {size} does not divide by {axes} x num_microbatches {num_microbatches} = {least}: "
            f"use a multiple of {least}, such as {max(least, size // least * least)}"
        )
    return size


def split_microbatches(batch: Any, count: int) -> Any:
    """Return `batch` with a leading dim of `count` microbatches.

    Microbatch m takes the examples m, m + count, ...: every device splits its own part of the batch, so nothing moves.
    """

    def split(a: jax.Array) -> jax.Array:
        if a.ndim == 0:
            return jnp.broadcast_to(a, (count,))
        # [B, ...] -> [B / M, M, ...] -> [M, B / M, ...]
        return jnp.moveaxis(a.reshape(a.shape[0] // count, count, *a.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)
