"""The order of tokens in which a causal ring does equal work on all devices.

A sequence is 2 c chunks. In the model's order, device i of c holds chunks 2 i and 2 i + 1. In
zigzag order it holds chunks i and 2 c - 1 - i, an early and a late one. With the keys of any other
device, two of the four pairs of chunks are then visible, so no device waits for another.

    model's order   0 1 | 2 3 | 4 5 | 6 7
    zigzag order    0 7 | 1 6 | 2 5 | 3 4

Striped attention (arXiv:2311.09431) balances the ring by another permutation, of single tokens;
chunks keep blocks that are fully visible or not at all. The exchange is two permutes of half of an
array: one for the devices' first chunks, one for the second ones.
"""

import jax
import jax.numpy as jnp

from zerojax.sharding import CONTEXT

Array = jax.Array


def to_zigzag(a: Array, place: Array, size: int) -> Array:
    """Return a device's tokens a[B, T_context, ...] in zigzag order.

    Args:
      a: the device's tokens in the model's order.
      place: i32[], the device's place along `context`.
      size: number of devices along `context`.
    """
    pairs = zip(jnp.split(a, 2, 1), _destinations(size), strict=True)
    first, second = (jax.lax.ppermute(half, CONTEXT, moves) for half, moves in pairs)
    # Chunks with even numbers are first chunks, and an early chunk has the number of its device.
    is_even = place % 2 == 0
    early = jnp.where(is_even, first, second)
    late = jnp.where(is_even, second, first)
    return jnp.concatenate([early, late], 1)


def from_zigzag(a: Array, place: Array, size: int) -> Array:
    """Return a device's tokens in the model's order; the inverse of `to_zigzag`."""
    early, late = jnp.split(a, 2, 1)
    is_even = place % 2 == 0
    halves = (jnp.where(is_even, early, late), jnp.where(is_even, late, early))
    sent = []
    for half, moves in zip(halves, _destinations(size), strict=True):
        back = [(target, source) for source, target in moves]
        sent.append(jax.lax.ppermute(half, CONTEXT, back))
    return jnp.concatenate(sent, 1)


def chunk_starts(place: Array, size: int, length: int) -> Array:
    """Return i32[2], positions of the first tokens of a device's chunks of `length` tokens."""
    return jnp.stack([place, 2 * size - 1 - place]).astype(jnp.int32) * length


def _destinations(size: int) -> list[list[tuple[int, int]]]:
    """Return (source, destination) of the devices' first chunks, and of their second ones."""
    moves: list[list[tuple[int, int]]] = []
    for half in (0, 1):
        chunks = [2 * device + half for device in range(size)]
        targets = [chunk if chunk < size else 2 * size - 1 - chunk for chunk in chunks]
        moves.append(list(enumerate(targets)))
    return moves
