"""Attention on one device, by blocks: values, gradients, and rows without a visible key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_attention import plain_attention

import zerojax as zj
from zerojax.context import blocks
from zerojax.context.scores import Scores

T, N, K, D = 37, 4, 2, 8
OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "cap": {"cap": 0.8, "scale": 0.7},
}


def draw(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def grads(attend, q, k, v, do):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.vdot(attend(*a), do), (0, 1, 2)))(q, k, v)


@pytest.mark.parametrize("block", [512, 10])
@pytest.mark.parametrize("options", OPTIONS)
def test_one_device_equals_the_plain_formula(options, block):
    q, k, v, do = draw((2, T, N, D), (2, T, K, D), (2, T, K, D), (2, T, N, D))
    ids = jnp.asarray(np.sort(np.random.default_rng(2).integers(0, 3, (2, T)), 1))
    given = {"segment_ids": ids, **OPTIONS[options]}
    got = grads(lambda *a: zj.attention(*a, block=block, **given), q, k, v, do)
    want = grads(lambda *a: plain_attention(*a, **given), q, k, v, do)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= 5e-6 * np.max(np.abs(b))


@pytest.mark.parametrize("block", [512, 10])
def test_sinks_take_a_share_of_each_query(block):
    q, k, v, do, sinks = draw((2, T, N, D), (2, T, K, D), (2, T, K, D), (2, T, N, D), (N,))

    def value_and_grads(attend):
        def total(q, k, v, sinks):
            return jnp.vdot(attend(q, k, v, sinks=sinks, window=20), do)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(q, k, v, sinks)

    got = value_and_grads(functools.partial(zj.attention, block=block))
    want = value_and_grads(plain_attention)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= 5e-6 * np.max(np.abs(b))


@pytest.mark.parametrize("window", [0, 5])
def test_a_window_may_be_an_array(window):
    q, k, v, do = draw((1, T, N, D), (1, T, K, D), (1, T, K, D), (1, T, N, D))
    got = grads(lambda *a: zj.attention(*a, window=jnp.int32(window), block=10), q, k, v, do)
    want = grads(lambda *a: plain_attention(*a, window=window or None), q, k, v, do)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= 5e-6 * np.max(np.abs(b))


def test_a_row_that_sees_no_key_has_zeros_and_no_gradient():
    """With another device's keys a row may see none; only the running softmax has such rows."""
    q, k, v, do = draw((1, 8, N, D), (1, 8, K, D), (1, 8, K, D), (1, 8, N, D))
    cut = blocks.Cut(1, 8, 4)
    scores = Scores(scale=1.0, causal=False, window=None, cap=None)
    starts = jnp.zeros(1, jnp.int32)
    q_ids = cut.cut(jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 1]]))
    q_tokens = cut.tokens(starts, q_ids)
    k_tokens = cut.tokens(starts, cut.cut(jnp.ones((1, 8), jnp.int32)))
    q_blocks, k_blocks, v_blocks = blocks.grouped(cut.cut(q), K), cut.cut(k), cut.cut(v)
    pairs = blocks.list_pairs(scores, cut)
    rest = k_blocks, v_blocks, k_tokens, pairs
    state = blocks.accumulate(scores, blocks.start(q_blocks), q_blocks, q_tokens, *rest)
    o, lse = blocks.finish(state, cut, q.dtype)
    outputs = blocks.cut_outputs(cut, do, lse, jnp.sum(do * o, -1), K)
    zeros = blocks.zero_grads(q_blocks, k_blocks)
    found = blocks.accumulate_grads(scores, zeros, q_blocks, q_tokens, outputs, *rest)
    dq = cut.join(found.dq).reshape(q.shape)
    assert not o[:, :3].any()
    assert not dq[:, :3].any()
    assert o[:, 3:].all()
    assert dq[:, 3:].any()
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((o, lse, found)))
    # The gradients of keys and values are those of the rows that see them.
    seeing = jax.grad(
        lambda k, v: jnp.vdot(plain_attention(q, k, v, causal=False, scale=1.0)[:, 3:], do[:, 3:]),
        (0, 1),
    )(k, v)
    for a, b in zip((found.dk, found.dv), seeing, strict=True):
        np.testing.assert_allclose(cut.join(a), b, atol=1e-5)


def test_float16_runs_on_a_cpu():
    q, k, v, do = draw((1, T, N, D), (1, T, K, D), (1, T, K, D), (1, T, N, D), dtype=jnp.float16)
    got = grads(zj.attention, q, k, v, do)
    want = grads(plain_attention, *(a.astype(jnp.float32) for a in (q, k, v, do)))
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert np.max(np.abs(a - b)) <= 5e-3 * np.max(np.abs(b))
