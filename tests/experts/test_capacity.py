"""Which tokens are dropped, and what the layer makes of the others."""

import functools
import math

import expert_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax as zj
from zerojax.experts.cells import assign_cells, count_cells

MESHES: dict[str, dict[str, int]] = {
    "one": {"fsdp": 1},
    "fsdp4": {"fsdp": 4},
    "expert2_fsdp2_context2": {"expert": 2, "fsdp": 2, "context": 2},
    "expert4_tensor2": {"expert": 4, "tensor": 2},
}


def find_kept(chosen: np.ndarray, num_experts: int, capacity: int) -> np.ndarray:
    """Return which choices bool[n, k] of one device find a cell, by the formula.

    First choices come before second choices, and earlier tokens before later ones.
    """
    used = np.zeros(num_experts, int)
    kept = np.zeros(chosen.shape, bool)
    for choice in range(chosen.shape[1]):
        for token, expert in enumerate(chosen[:, choice]):
            kept[token, choice] = used[expert] < capacity
            used[expert] += 1
    return kept


def find_kept_on_mesh(chosen: np.ndarray, axes: dict[str, int], factor: float) -> np.ndarray:
    """Return which choices bool[B, T, k] of all devices find a cell."""
    rows = math.prod(axes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    kept = np.zeros(chosen.shape, bool)
    for piece in np.split(np.arange(chosen.shape[0]), rows):
        for part in np.split(np.arange(chosen.shape[1]), axes.get("context", 1)):
            at = np.ix_(piece, part)
            local = chosen[at].reshape(-1, chosen.shape[2])
            capacity = math.ceil(factor * local.size / layers.EXPERTS)
            kept[at] = find_kept(local, layers.EXPERTS, capacity).reshape(chosen[at].shape)
    return kept


@pytest.mark.by_default("1.0-2-expert2_fsdp2_context2")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.25, 1.0, 1.25])
def test_dropped_tokens_are_those_of_the_formula(factor, top_k, mesh):
    x, p = layers.tokens(), layers.weights()
    _, chosen = jax.lax.top_k(x @ p["router"], top_k)
    kept = find_kept_on_mesh(np.asarray(chosen), MESHES[mesh], factor)
    assert factor > 1 or not kept.all()
    expected = layers.derived(functools.partial(layers.one_by_one, top_k=top_k, kept=kept), x, p)
    layer = functools.partial(zj.moe, top_k=top_k, capacity_factor=factor)
    actual = layers.on_mesh(MESHES[mesh], lambda: layers.derived(layer, x, p))
    layers.assert_close(actual, expected)


def test_a_token_that_all_its_experts_drop_has_a_result_of_zero():
    x, p = layers.tokens(), layers.weights()
    p["router"] = jnp.zeros_like(p["router"])  # all tokens choose experts 0 and 1
    y, stats = zj.moe(x, **p, capacity_factor=1.0)
    capacity = 2 * layers.ROWS * layers.TOKENS // layers.EXPERTS
    flat = np.asarray(y).reshape(-1, layers.WIDTH)
    assert np.all(np.any(flat[:capacity] != 0, -1))
    assert np.all(flat[capacity:] == 0)
    np.testing.assert_allclose(stats.dropped, 1 - capacity / len(flat), rtol=1e-6)


def test_a_cell_knows_its_pair_and_a_pair_its_cell():
    probabilities = jax.nn.softmax(3 * jax.random.normal(jax.random.key(0), (40, 6)), -1)
    probabilities = probabilities.at[7].set(-jnp.inf)  # padding
    seats = jax.tree.map(np.asarray, assign_cells(probabilities, top_k=3, capacity=11))
    flat_cells = seats.cells.reshape(-1)
    for pair, cell in enumerate(flat_cells):
        if cell < len(seats.pairs):
            assert seats.pairs[cell] == pair
            assert cell // 11 == seats.chosen.reshape(-1)[pair]
    full = seats.pairs[seats.pairs < flat_cells.size]
    assert len(full) == len(set(full)) == np.sum(flat_cells < len(seats.pairs))
    kept = find_kept(np.delete(seats.chosen, 7, 0), 6, 11)
    np.testing.assert_array_equal(np.delete(seats.cells, 7, 0) < len(seats.pairs), kept)
    assert not kept.all()
    assert np.all(seats.cells[7] == len(seats.pairs))
    assert np.all(seats.chosen[7] == 6)


@pytest.mark.parametrize(
    ("factor", "tokens", "experts", "top_k", "cells"),
    [
        (1.25, 64, 8, 2, 20),
        (1.0, 10, 8, 1, 2),
        (1.1, 10, 1, 1, 10),  # at most the tokens
        (1.1, 100, 10, 1, 11),  # not 12: 1.1 * 100 is above 110 in floats
        (0.01, 10, 8, 2, 1),
        (None, 10, 8, 2, 10),
    ],
)
def test_cells_per_expert_follow_the_capacity(factor, tokens, experts, top_k, cells):
    assert count_cells(tokens, experts, top_k, factor) == cells
