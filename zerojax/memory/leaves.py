"""Bytes per device of single leaves and records: stored, as gradients, and gathered.

Modules that count a program add these up. Specs and tiers are those that `Layout` chose, so a leaf
that is not divisible, or that `tensor` splits too, counts the bytes that a device really holds.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES, Spec, local_elements, num_zero_shards, stored_spec
from zerojax.state import Layout, Leaf, RecordSpec, is_away
from zerojax.trees import Tree


def compute_itemsize(layout: Layout) -> int:
    """Return the bytes per element of the compute dtype."""
    return jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize


def grad_itemsize(layout: Layout) -> int:
    """Return the bytes per element of a stored gradient."""
    return jnp.dtype(layout.stored_grads_dtype).itemsize


def summed_itemsize(layout: Layout) -> int:
    """Return the bytes per element of a gradient once backward has computed it."""
    return 4 if layout.sums_in_float32 else compute_itemsize(layout)


def reduced_itemsize(layout: Layout, leaf: Leaf) -> int:
    """Return the bytes per element of a leaf's gradient when a microbatch's is reduced."""
    return max(leaf.dtype.itemsize, 4) if layout.reduces_in_float32 else leaf.dtype.itemsize


def grad_elements(layout: Layout, blocks: bool | None = None) -> int:
    """Return the number of gradient elements per device.

    Args:
      layout: layout of the program.
      blocks: True for the stacked layers, False for the unstacked leaves, None for all leaves.
    """
    sharded = STAGES[layout.config.stage].opt_state
    return sum(
        local_elements(leaf.shape, stored_spec(leaf.spec, sharded), layout.mesh)
        for leaf in layout.leaves
        if blocks is None or leaf.is_stacked == blocks
    )


def unreduced_bytes(layout: Layout, blocks: bool | None = None) -> int:
    """Return the bytes per device of unreduced float32 gradients in addition to their shards.

    It is 0 unless gradients are reduced once per step.

    Args:
      layout: layout of the program.
      blocks: True for the stacked layers, False for the unstacked leaves, None for all leaves.
    """
    if not layout.reduces_once:
        return 0
    leaves = [leaf for leaf in layout.leaves if blocks is None or leaf.is_stacked == blocks]
    elements = sum(local_elements(leaf.shape, leaf.spec.base, layout.mesh) for leaf in leaves)
    return 4 * (elements - grad_elements(layout, blocks))


def gathered_bytes(layout: Layout, layers: int = 1, fetched: bool = False) -> int:
    """Return the bytes per device of the largest gathered unit, in addition to its shards.

    Args:
      layout: layout of the program. The units of a Model are its leaves; otherwise they are
        embedding, head, and the layers of each stack.
      layers: number of layers of a stack that are gathered at the same time.
      fetched: whether parameters are loaded from another tier, so that a layer takes its bytes even
        if nothing is split.
    """
    # Otherwise parameters are stored in full on the device: nothing is gathered, but quantized
    # weights are decoded all the same.
    is_gathered = STAGES[layout.config.stage].params and (
        num_zero_shards(layout.mesh) > 1 or fetched
    )
    if not is_gathered and not layout.encodings:
        return 0
    num_tiles = {group.name: group.num_tiles for group in layout.groups}
    unit_bytes: dict[Any, int] = {}
    tile_bytes: dict[str, int] = {}
    for leaf in layout.all_leaves:
        size = decoded_bytes(leaf, layout)
        if is_gathered:
            elements = local_elements(leaf.shape, leaf.spec.base, layout.mesh)
            size += elements * leaf.dtype.itemsize
        if leaf.is_stacked:
            # A stacked leaf counts all layers, but only some are gathered at a time: one, or two
            # with gather_ahead.
            size = size // leaf.shape[0] * layers
        if leaf.role == "tile":
            tile_size = size // num_tiles[leaf.group]
            tile_bytes[leaf.group] = tile_bytes.get(leaf.group, 0) + tile_size
        else:
            unit = leaf.name if layout.num_layers is None else _unit(leaf)
            unit_bytes[unit] = unit_bytes.get(unit, 0) + size
    for stack in layout.stacks:  # tiles are gathered one by one, next to the layer's other leaves
        largest_tile = max((tile_bytes.get(group.name, 0) for group in stack.groups), default=0)
        for i in stack.in_tree[:1]:
            unit = _unit(layout.all_leaves[i])
            unit_bytes[unit] = unit_bytes.get(unit, 0) + largest_tile
    return max(unit_bytes.values())


def _unit(leaf: Leaf) -> tuple[Any, str]:
    """Return the unit that is gathered together with a leaf of a LayeredModel.

    It is the embedding, the head, or a layer of a stack.
    """
    return leaf.path[0], leaf.stack


def decoded_bytes(leaf: Leaf, layout: Layout) -> int:
    """Return the bytes per device of the decoded weight, over all layers, or 0 if not quantized.

    It is counted for only one of the encoded arrays of a weight.
    """
    weight = leaf.decodes
    if weight is None:
        return 0
    return local_elements(weight.shape, weight.spec.base, layout.mesh) * weight.dtype.itemsize


def local_record_bytes(record: RecordSpec, shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of one device's part of a record.

    Dims that XLA may split as it likes count as unsplit.
    """
    spec = tuple(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in record.spec)
    return local_elements(shape, spec, record.mesh) * jnp.dtype(dtype).itemsize


def local_bytes(a: Any, spec: Spec, mesh: Mesh) -> int:
    """Return the bytes of one device's part of an array of a shape and dtype."""
    return local_elements(a.shape, spec, mesh) * jnp.dtype(a.dtype).itemsize


def bytes_by_tier(tree: Tree) -> dict[str, int]:
    """Return the bytes per device of a tree of ShapeDtypeStruct with shardings, by tier."""
    total = {"device": 0, "pinned_host": 0}
    for leaf in jax.tree.leaves(tree):
        tier = "pinned_host" if is_away(leaf) else "device"
        total[tier] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total
