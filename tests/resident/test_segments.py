"""Automatic segments: where they are cut, and what they keep."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.jaxprs import flatten
from zerojax.resident.segments import keep_by_segments, segments

H, B = 8, 4


def residual_mlp(params, batch, key):
    x = batch
    for up, down in params:
        x = x + jnp.tanh(jnp.tanh(x @ up) * 2.0) @ down
    return jnp.mean(x**2)


def shapes(layers, width=16 * H):
    one = (
        jax.ShapeDtypeStruct((H, width), jnp.float32),
        jax.ShapeDtypeStruct((width, H), jnp.float32),
    )
    return [one] * layers, jax.ShapeDtypeStruct((B, H), jnp.float32)


def kept(loss, params, batch):
    jaxpr = jax.make_jaxpr(lambda p, b: jax.tree.leaves(jax.vjp(lambda p: loss(p, b, None), p)[1]))(
        params, batch
    ).jaxpr
    found: Any = {v for v in jaxpr.outvars if isinstance(v, jex.Var)} - set(jaxpr.invars)
    return [v.aval.shape for v in found]


def test_only_the_stream_crosses_the_cuts():
    params, batch = shapes(12)
    plain, cut = (kept(f, params, batch) for f in (residual_mlp, keep_by_segments(residual_mlp)))
    assert sum(s == (B, 16 * H) for s in plain) >= 24  # the wide values of every layer
    assert sum(s == (B, 16 * H) for s in cut) <= 4  # those of the last segment
    assert sum(s == (B, H) for s in cut) <= 14


def test_kept_values_grow_with_the_root_of_depth():
    def num_segments(layers):
        params, batch = shapes(layers, width=2 * H)
        closed = jax.make_jaxpr(residual_mlp)(params, batch, None)
        program = flatten(closed.jaxpr, closed.consts)
        return len(segments(program, list(enumerate(program.instructions))))

    assert num_segments(4) < num_segments(16) < num_segments(64)
    assert num_segments(64) <= 3 * num_segments(16)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3))
def test_segments_partition_the_program_in_order(layers, width):
    params, batch = shapes(layers, width=width * H)
    closed = jax.make_jaxpr(residual_mlp)(params, batch, None)
    program = flatten(closed.jaxpr, closed.consts)
    data = list(enumerate(program.instructions))
    pieces = segments(program, data)
    assert [item for piece in pieces for item in piece] == data
    assert all(pieces)


def test_a_loss_without_products_is_left_whole():
    def loss(p, b, key):
        return jnp.mean(p * b)

    value, grad = jax.value_and_grad(keep_by_segments(loss))(jnp.float32(3), jnp.ones(4), None)
    assert (float(value), float(grad)) == (3.0, pytest.approx(1.0))
