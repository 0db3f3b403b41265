"""Move a state off the device, and back, between phases of a run.

    offload    device -> pinned_host     every array of the state that is on the device
    reload     pinned_host -> device     the same arrays

A state that is stored on the device then leaves it to another program, such as one that samples.
Arrays move one after the other, and each is deleted where it was before the next one moves, so the
device never holds more than before. Bits do not change. Scalars and random keys stay on the device:
they are a few bytes. Arrays that are stored in host memory or on a disk stay there, too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.device import check_host_memory, host_memory_error
from zerojax.state import Layout, OnDisk, TrainState, is_away

HOST = "pinned_host"


def move_away(state: TrainState, layout: Layout) -> TrainState:
    """Return a state whose arrays are in host memory; its arrays on the device are deleted.

    Args:
      state: state of the program with this layout.
      layout: layout of the state.

    Raises:
      RuntimeError: host memory is too small; nothing was moved.
    """
    moving = [leaf for leaf in jax.tree.leaves(state) if _moves(leaf)]
    platform = layout.mesh.devices.flat[0].platform
    num_bytes = sum(shard.data.nbytes for leaf in moving for shard in leaf.addressable_shards)
    check_host_memory(num_bytes, platform)

    def move(leaf: jax.Array) -> jax.Array:
        return _move(leaf, leaf.sharding.with_memory_kind(HOST))

    try:
        return _map(state, move)
    except Exception as error:
        explained = host_memory_error(error, num_bytes, platform)
        if explained is not None:
            raise explained from error
        raise


def move_back(state: TrainState, layout: Layout) -> TrainState:
    """Return a state whose arrays are where its program stores them.

    Args:
      state: state that `move_away` returned, of the program with this layout.
      layout: layout of the state.

    Raises:
      ValueError: the state has another structure than the program's.
    """
    leaves, structure = jax.tree.flatten(state)
    expected = jax.tree.leaves(layout.abstract_state, is_leaf=lambda node: isinstance(node, OnDisk))
    if len(leaves) != len(expected):
        raise ValueError(
            f"this state has {len(leaves)} leaves, and this program's has {len(expected)}: reload "
            "it with the program that offloaded it"
        )
    moved = []
    for leaf, abstract in zip(leaves, expected, strict=True):
        if isinstance(leaf, jax.Array) and is_away(leaf) and not is_away(abstract):
            leaf = _move(leaf, abstract.sharding)
        moved.append(leaf)
    return jax.tree.unflatten(structure, moved)


def _moves(leaf: Any) -> bool:
    """Return whether a leaf of a state is an array on the device, other than a scalar or a key."""
    if not isinstance(leaf, jax.Array) or not leaf.ndim:
        return False
    return not is_away(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _move(leaf: jax.Array, sharding: Any) -> jax.Array:
    """Return an array in another memory, and delete the one that it was made from."""
    moved = jax.block_until_ready(jax.device_put(leaf, sharding, may_alias=False))
    leaf.delete()
    return moved


def _map(state: TrainState, move: Callable[[jax.Array], jax.Array]) -> TrainState:
    return jax.tree.map(lambda leaf: move(leaf) if _moves(leaf) else leaf, state)
