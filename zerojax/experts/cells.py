"""The cells of one device: which token is in which cell, and moves between the two orders.

A device has C cells for each expert, and at most C of its tokens visit an expert. The n k pairs of
a token and one of its experts are sorted by expert, and the first C pairs of each expert get a
cell. First choices of all tokens come before second choices, and earlier tokens before later ones
(GShard, arXiv:2006.16668, algorithm 1), so later choices are dropped first.

    tokens[n, H]  ->  cells[E C, H]     `fill`: each cell reads its token; an empty cell is 0
    cells[E C, H] ->  pairs[n k, H]     `pick`: each pair reads its cell; a dropped pair is 0

Both directions are look-ups, since a cell knows its pair and a pair knows its cell. Each one's
derivative is the other, so that nothing is scattered.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.experts.routing import choose_experts

Array = jax.Array


class Seats(NamedTuple):
    """Where the tokens of a device go.

    Attributes:
      chosen: experts of each token, i32[n, k].
      cells: cell of each pair, i32[n, k], counted over all experts; E C if the pair is dropped.
      pairs: pair in each cell, i32[E C], counted over tokens and then choices; n k if it is empty.
    """

    chosen: Array
    cells: Array
    pairs: Array


def count_cells(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float | None
) -> int:
    """Return C, the number of cells of each expert on a device.

    It is ceil(capacity_factor k n / E), but at most n, since a token visits an expert once.

    Args:
      num_tokens: number of tokens n of a device.
      num_experts: number of experts E.
      top_k: number of experts k of a token.
      capacity_factor: cells per pair; None: n cells, so that no token is dropped.
    """
    if capacity_factor is None:
        return num_tokens
    # In decimals, as the user wrote it: in floats, 1.1 * 10 is above 11.
    factor = Fraction(repr(float(capacity_factor)))
    return min(num_tokens, math.ceil(factor * top_k * num_tokens / num_experts))


def assign_cells(ranks: Array, top_k: int, capacity: int) -> Seats:
    """Return where the tokens of a device go.

    Args:
      ranks: f32[n, E]; -inf for a token that visits no expert.
      top_k: number of experts k of a token.
      capacity: number of cells C of each expert.
    """
    num_tokens, num_experts = ranks.shape
    num_pairs = num_tokens * top_k
    chosen = choose_experts(ranks, top_k)  # [n, k]
    experts = chosen.T.reshape(-1)  # [k n]: first choices first

    order = jnp.argsort(experts, stable=True)  # [k n]
    counts = jnp.sum(experts[:, None] == jnp.arange(num_experts), 0)  # [E]
    first = jnp.cumsum(counts) - counts  # [E], where each expert begins in the order

    sorted_experts = experts[order]
    places = jnp.arange(num_pairs) - first[sorted_experts]
    has_cell = (places < capacity) & (sorted_experts < num_experts)
    sorted_cells = jnp.where(has_cell, sorted_experts * capacity + places, num_experts * capacity)
    cells = jnp.zeros_like(sorted_cells).at[order].set(sorted_cells, unique_indices=True)

    places = jnp.arange(capacity)
    positions = jnp.minimum(first[:, None] + places, num_pairs - 1)  # [E, C]
    choices, tokens = jnp.divmod(order[positions], num_tokens)
    is_full = places < counts[:, None]
    pairs = jnp.where(is_full, tokens * top_k + choices, num_pairs)
    return Seats(chosen, cells.reshape(top_k, num_tokens).T, pairs.reshape(-1))


def fill_cells(tokens: Array, pairs: Array, top_k: int) -> Array:
    """Return the token in each cell: tokens[n, H] -> [E C, H]."""
    return _look_up(tokens, pairs // top_k)


def fill_cells_with_pairs(values: Array, pairs: Array) -> Array:
    """Return the pair's value in each cell: values[n, k, H] -> [E C, H]."""
    return _look_up(values.reshape(-1, values.shape[-1]), pairs)


def pick_cells(filled: Array, cells: Array) -> Array:
    """Return the cell of each pair: filled[E C, H] -> [n, k, H]."""
    return _look_up(filled, cells)


def _look_up(table: Array, indices: Array) -> Array:
    """Return rows of a table, and zeros for indices that are too large."""
    return table.at[indices].get(mode="fill", fill_value=0)
