"""Batches on a mesh: dim 0 is split over the batch's axes; each process may provide a part.

A batch that does not divide is padded before it is placed on the devices: its last row is repeated.
The program removes the padding before anything reads the batch. It then computes with exactly the
batch's rows, which XLA splits unevenly:

    [B, ...]  ->  [B', ...], B' a multiple of the shards  ->  on the devices  ->  [B, ...]

So every loss is the loss of the batch, even a mean over rows: no result needs a correction for the
padding.

JAX may use the memory of a numpy array as device memory, or read it after the call that received it
has returned. So this module copies numpy arrays once: a loader may refill its arrays as soon as a
batch is placed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from zerojax.sharding.activations import ActivationSpec
from zerojax.sharding.mesh import batch_axes, num_batch_shards
from zerojax.sharding.scope import is_on_another_mesh
from zerojax.sharding.specs import named
from zerojax.trees import Batch, Tree


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of a padded batch belong to the batch.

    Attributes:
      size: number of rows of the batch.
      parts: for each leaf, the number of parts in which processes provided it (`batch_part`); each
        part is padded separately.
    """

    size: int
    parts: tuple[int, ...]

    def cut(self, batch: Batch, mesh: Mesh) -> Any:
        """Return a padded batch without its padding; call it inside a program."""
        leaves, tree = jax.tree.flatten(batch)
        pairs = zip(leaves, self.parts, strict=True)
        return jax.tree.unflatten(tree, [self._cut(a, parts, mesh) for a, parts in pairs])

    def _cut(self, a: jax.Array, parts: int, mesh: Mesh) -> jax.Array:
        if a.ndim == 0:
            return a
        if parts == 1:
            rows = a[: self.size]
        else:
            row_shape = a.shape[1:]
            # [parts B' / parts, ...] -> [parts, B / parts, ...] -> [B, ...]
            rows = a.reshape(parts, -1, *row_shape)[:, : self.size // parts]
            rows = rows.reshape(self.size, *row_shape)
        # Uneven: the last devices get fewer rows, or none.
        return jax.lax.with_sharding_constraint(rows, ActivationSpec(mesh).batch(a.ndim))


def place_batch(batch: Batch, mesh: Mesh, num_microbatches: int) -> Any:
    """Return a batch on the mesh.

    Leaves that are already placed stay where they are. Numpy arrays are copied, so the caller may
    write to them afterwards.

    Args:
      batch: tree of arrays. With several processes, each passes its part of dim 0, or a global
        array.
      mesh: the device mesh.
      num_microbatches: number of microbatches into which each device's part will be split.

    Raises:
      ValueError: a leaf is not an array of numbers, its integers do not fit into the device's 32
        bits, or the batch does not divide.
    """
    batch = _with_arrays(batch)
    check_batch(_whole(batch, mesh), mesh, num_microbatches)
    return _place(jax.tree.map(_own, batch), mesh)


def place_any_batch(batch: Batch, mesh: Mesh) -> tuple[Any, Rows | None]:
    """Return a batch of any size on the mesh, padded if it does not divide.

    Args:
      batch: tree of arrays, as for `place_batch`. With several processes, each part has the same
        number of rows.
      mesh: the device mesh.

    Returns:
      The placed batch, and the rows to keep of it, or None if it was not padded.

    Raises:
      ValueError: a leaf is not an array of numbers, its integers do not fit into the device's 32
        bits, the batch has no rows, or leaves have different numbers of rows.
    """
    batch = jax.tree.map(lambda leaf: _brought(leaf, mesh), _with_arrays(batch))
    size = batch_size(_whole(batch, mesh))
    shards = num_batch_shards(mesh)
    if size % shards == 0:
        return _place(jax.tree.map(_own, batch), mesh), None
    rows = Rows(size, tuple(_parts(leaf, mesh) for leaf in jax.tree.leaves(batch)))
    padded = math.lcm(shards, *rows.parts)
    padded *= -(-size // padded)

    def pad(leaf: Any) -> Any:
        if leaf.ndim == 0:
            return _own(leaf)
        rows = leaf[np.minimum(np.arange(padded // _parts(leaf, mesh)), leaf.shape[0] - 1)]
        # Indexing with an array of row numbers already copies.
        if isinstance(leaf, np.ndarray):
            return rows.astype(device_dtype("a leaf", leaf.dtype), copy=False)
        return rows

    return _place(jax.tree.map(pad, batch), mesh), rows


def _with_arrays(batch: Batch) -> Any:
    """Return a batch whose Python numbers became arrays; existing arrays are not copied.

    Raises:
      ValueError: a leaf is not an array of numbers, or its integers do not fit.
    """
    return _map_named(_as_array, batch)


def _map_named(function: Callable[[str, Any], Any], batch: Batch) -> Any:
    """Return a batch in which `function(name, leaf)` replaces each leaf.

    Raises:
      ValueError: the batch is not a tree.
    """
    try:
        leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    except (TypeError, ValueError) as error:  # keys that cannot be sorted
        raise ValueError(
            "a batch is a tree of arrays, such as a dict by name, and this one cannot be "
            f"read: {error}"
        ) from error
    return jax.tree.unflatten(
        tree, [function(jax.tree_util.keystr(path) or "batch", leaf) for path, leaf in leaves]
    )


def _as_array(name: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        _check_numpy(name, leaf)
        return leaf
    if isinstance(leaf, bool | int | float):
        try:
            return jnp.asarray(leaf)
        except OverflowError as error:
            raise _refusal(name, f"{leaf}, which is too large for a device integer") from error
    if isinstance(leaf, jax.Array):
        if not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{name} of the batch was deleted, or donated to a program: create it again "
                "for each step"
            )
        return leaf
    if hasattr(leaf, "__jax_array__"):
        return leaf.__jax_array__()
    raise _refusal(name, f"{type(leaf).__module__}.{type(leaf).__name__}".removeprefix("builtins."))


def _check_numpy(name: str, leaf: np.ndarray | np.generic) -> None:
    """Raise ValueError unless the device can hold the numbers of a numpy array unchanged."""
    dtype = device_dtype(name, leaf.dtype)
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise ValueError(
            f"{name} of the batch is a masked array, and programs ignore the mask: fill it, "
            "for example by .filled(-1)"
        )
    if leaf.dtype.kind not in "iu" or leaf.dtype.itemsize == dtype.itemsize or not leaf.size:
        return
    least = int(leaf.min())
    most = int(leaf.max())
    bounds = np.iinfo(dtype)
    if least < bounds.min or most > bounds.max:
        raise ValueError(
            f"{name} of the batch is {leaf.dtype} with numbers from {least} to {most}: the device "
            f"stores them as {dtype}, from {bounds.min} to {bounds.max}, which would change them"
        )


def device_dtype(name: str, dtype: Any) -> Any:
    """Return the dtype that an array has on a device.

    64-bit dtypes become 32-bit unless x64 is enabled, and the byte order becomes the host's.

    Args:
      name: name of the leaf, for the error.
      dtype: dtype of the array.

    Raises:
      ValueError: devices do not support such numbers.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys
        return dtype
    kinds = (jnp.bool_, jnp.number)
    is_number = isinstance(dtype, np.dtype) and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if not is_number or dtype in (np.longdouble, np.clongdouble):
        raise _refusal(name, f"an array of {dtype}")
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(
        f"a batch is a tree of arrays, but {name} is {what}: convert it to an array of "
        "numbers, for example by np.asarray"
    )


def _own(leaf: Any) -> Any:
    """Return a numpy array as a private copy in the device's dtype.

    JAX arrays are returned unchanged, since nobody writes to them.
    """
    if isinstance(leaf, np.ndarray):
        return np.array(leaf, device_dtype("a leaf", leaf.dtype))
    return leaf


def _brought(leaf: Any, mesh: Mesh) -> Any:
    """Return a leaf that can be padded.

    A leaf on another mesh is moved to this mesh, replicated on every device.
    """
    return jax.device_put(leaf, named(mesh, ())) if is_on_another_mesh(leaf, mesh) else leaf


def batch_part(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """Return which part of a batch a process provides, and how many parts there are.

    Processes whose devices hold the same rows provide the same part. This is so if an axis that
    does not split rows, `context` or `tensor`, spans several processes.

    Args:
      mesh: the device mesh.
      process: index of the process; by default `jax.process_index()`.
    """
    process = jax.process_index() if process is None else process
    axes = batch_axes(mesh)
    other_axes = [axis for axis in mesh.axis_names if axis not in axes]
    order = [mesh.axis_names.index(axis) for axis in (*axes, *other_axes)]
    by_rows = mesh.devices.transpose(order).reshape(num_batch_shards(mesh), -1)
    rows: dict[int, list[int]] = {}
    for row, devices in enumerate(by_rows):
        for owner in dict.fromkeys(device.process_index for device in devices):
            rows.setdefault(owner, []).append(row)
    parts = list(dict.fromkeys(tuple(own) for own in rows.values()))
    own_rows = tuple(rows.get(process, parts[0]))
    return parts.index(own_rows), len(parts)


def _parts(leaf: Any, mesh: Mesh) -> int:
    """Return in how many parts processes hold a leaf's dim 0; 1 if the leaf is global."""
    return batch_part(mesh)[1] if leaf.ndim and _is_local(leaf) else 1


def _is_local(leaf: Any) -> bool:
    """Return whether a leaf is a process's part; a partly addressable array is a global one."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _whole(batch: Batch, mesh: Mesh) -> Any:
    """Return the leaves' global shapes."""

    def whole(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        rows = (leaf.shape[0] * _parts(leaf, mesh), *leaf.shape[1:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(rows, leaf.dtype)

    return jax.tree.map(whole, batch)


def _place(batch: Batch, mesh: Mesh) -> Any:
    """Return a batch that divides, placed on the mesh."""

    def place(leaf: Any) -> jax.Array:
        sharding = ActivationSpec(mesh).batch(leaf.ndim)
        # An array on a mesh with explicit axes can have an equivalent layout, and yet this mesh's
        # programs reject it.
        is_here = isinstance(leaf, jax.Array) and not is_on_another_mesh(leaf, mesh)
        if is_here and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if leaf.ndim and _is_local(leaf) and len({d.process_index for d in mesh.devices.flat}) > 1:
            rows = (leaf.shape[0] * _parts(leaf, mesh), *leaf.shape[1:])
            return jax.make_array_from_process_local_data(sharding, leaf, rows)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, batch)


def abstract_batch(batch: Batch, mesh: Mesh) -> Any:
    """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding.

    Raises:
      ValueError: a leaf's dtype is not supported on devices.
    """

    def abstract(name: str, a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            a.shape, device_dtype(name, a.dtype), sharding=ActivationSpec(mesh).batch(len(a.shape))
        )

    return _map_named(abstract, batch)


def batch_size(batch: Batch) -> int:
    """Return the number of rows of a batch: dim 0 of every leaf that is not a scalar.

    Raises:
      ValueError: the batch has no arrays or no rows, or its leaves have different numbers of rows.
    """
    leaves = list[tuple[str, Any]]()
    _map_named(lambda name, leaf: leaves.append((name, leaf)), batch)
    odd = [
        f"{name} is {type(leaf).__name__}" for name, leaf in leaves if not hasattr(leaf, "shape")
    ]
    if odd:
        raise ValueError(f"a batch is a tree of arrays, but {', '.join(odd)}")
    sizes = {name: leaf.shape[0] for name, leaf in leaves if len(leaf.shape)}
    if not sizes:
        raise ValueError("the batch holds no array with a batch dim")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"dim 0 of every leaf of a batch is the batch, but they differ: {sizes}")
    size = next(iter(sizes.values()))
    if not size:
        raise ValueError(
            f"a batch of 0: dim 0 of its leaves counts the rows, and it is 0 in {', '.join(sizes)}"
        )
    return size


def check_batch(batch: Batch, mesh: Mesh, num_microbatches: int) -> int:
    """Return the global batch size, once the batch is known to divide.

    Args:
      batch: tree of arrays or ShapeDtypeStruct; dim 0 of every leaf that is not a scalar is the
        batch.
      mesh: the device mesh.
      num_microbatches: microbatches per step, as in the config.

    Raises:
      ValueError: the batch has no arrays, its leaves have different numbers of rows, or it does not
        divide.
    """
    size = batch_size(batch)
    shards = num_batch_shards(mesh)
    if size % (shards * num_microbatches):
        axes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in batch_axes(mesh))
        least = shards * num_microbatches
        raise ValueError(
            f"a batch of {size} does not divide by {axes} x num_microbatches "
            f"{num_microbatches} = {least}: "
            f"use a multiple of {least}, such as {max(least, size // least * least)}"
        )
    return size


def split_microbatches(batch: Batch, count: int) -> Any:
    """Return `batch` with a leading dim of `count` microbatches: [B, ..] -> [M, B / M, ..].

    Microbatch m takes the examples m, m + count, ...: every device splits its own part of the
    batch, so nothing moves.
    """

    def split(a: jax.Array) -> jax.Array:
        if a.ndim == 0:
            return jnp.broadcast_to(a, (count,))
        # [B, ...] -> [B / M, M, ...] -> [M, B / M, ...]
        return jnp.moveaxis(a.reshape(a.shape[0] // count, count, *a.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def join_microbatches(tree: Tree) -> Any:
    """Return arrays of all microbatches as those of one batch: [M, B / M, ..] -> [B, ..].

    It is the inverse of `split_microbatches`.
    """
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:]), tree)
