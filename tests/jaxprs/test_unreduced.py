"""Per-device gradients: sums over cotangents inside a `jax.shard_map`."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from zerojax.grads import unreduced_grads

BATCH_AXES = ("data", "fsdp")
BATCH = PartitionSpec(BATCH_AXES)


def test_a_sum_of_data_may_leave_the_island_that_a_cotangent_passes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sum is not a gradient.

    What it scales stays per device, and is not reduced where it is computed.
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("data", "fsdp", "tensor"))

    def island(dy: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dy * 2, jax.lax.psum(jnp.sum(x, 0), BATCH_AXES)

    def derivative(dy: jax.Array, x: jax.Array, params: Any) -> tuple[jax.Array, tuple[()]]:
        run = jax.shard_map(island, mesh=mesh, in_specs=BATCH, out_specs=(BATCH, PartitionSpec()))
        twice, scale = run(dy, x)
        return jnp.einsum("bd,bf->df", x, twice) * scale[:, None], ()

    dy, x = (jax.random.normal(jax.random.key(n), (8, 3)) for n in (0, 1))
    with caplog.at_level(logging.WARNING, "zerojax"):
        own, _ = jax.jit(unreduced_grads(derivative, mesh))(dy, x, ())
    assert not caplog.records
    assert own.shape == (4, 3, 3)
    # Each device has the sum over its own rows.
    scale = x.sum(0)[:, None]
    for device in range(4):
        rows = slice(2 * device, 2 * device + 2)
        np.testing.assert_allclose(own[device], 2 * x[rows].T @ dy[rows] * scale, rtol=1e-5)
    np.testing.assert_allclose(own.sum(0), derivative(dy, x, ())[0], rtol=1e-5)


def test_one_batch_shard_has_nothing_to_reduce(caplog: pytest.LogCaptureFixture) -> None:
    """An island over `tensor` alone has no axes of the batch, so its results are not changed."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), ("data", "fsdp", "tensor"))

    def island(dy: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x.T @ dy, "tensor"), jnp.sin(dy)

    def derivative(dy: jax.Array, x: jax.Array, params: Any) -> tuple[Any, tuple[()]]:
        specs = (PartitionSpec(), PartitionSpec("tensor"))
        run = jax.shard_map(
            island, mesh=mesh, in_specs=specs[1], out_specs=specs, axis_names={"tensor"}
        )
        product, sines = run(dy, x)
        return {"island": product, "around": x.T @ sines}, ()

    dy, x = (jax.random.normal(jax.random.key(n), (8, 3)) for n in (0, 1))
    with caplog.at_level(logging.WARNING, "zerojax"):
        rows, _ = jax.jit(unreduced_grads(derivative, mesh))(dy, x, ())
    assert not caplog.records
    expected, _ = jax.jit(derivative)(dy, x, ())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5), rows, expected)
