"""A mixture of experts over a mesh equals every token visiting its experts one by one.

Results, gradients and statistics are compared.
"""

import functools
from typing import Any

import expert_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj

MESHES: dict[str, dict[str, int]] = {
    "one": {"fsdp": 1},
    "fsdp8": {"fsdp": 8},
    "tensor2": {"tensor": 2},
    "fsdp2_tensor2_context2": {"fsdp": 2, "tensor": 2, "context": 2},
    "expert2_fsdp2_tensor2": {"expert": 2, "fsdp": 2, "tensor": 2},
    "expert2_fsdp2_context2": {"expert": 2, "fsdp": 2, "context": 2},
    "expert2_data2_fsdp2": {"expert": 2, "data": 2, "fsdp": 2},
    "expert2_tensor2_context2": {"expert": 2, "tensor": 2, "context": 2},
    "expert4_fsdp2": {"expert": 4, "fsdp": 2},
    "expert4_tensor2": {"expert": 4, "tensor": 2},
    "expert4_context2": {"expert": 4, "context": 2},
    "expert8": {"expert": 8},
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"gated": True, "activation": jax.nn.silu},
    "not_normalized": {"normalize": False},
    "one_expert": {"top_k": 1},
    "three_experts": {"top_k": 3},
    "every_expert": {"top_k": layers.EXPERTS},
    "empty_expert": {"router": "empty"},
    "all_on_two": {"router": "ties"},
    "odd_rows": {"rows": 5, "count": 5},
    "bf16": {"dtype": jnp.bfloat16},
}


def inputs(
    rows: int = layers.ROWS,
    count: int = layers.TOKENS,
    gated: bool = False,
    router: str = "",
    dtype: Any = jnp.float32,
) -> Any:
    x, p = layers.tokens(rows, count), layers.weights(gated)
    if router == "ties":  # all tokens choose the experts with the lowest numbers
        p["router"] = jnp.zeros_like(p["router"])
    if router == "empty":
        # Nobody chooses expert 3.
        x = x.at[..., 0].set(3)
        p["router"] = p["router"].at[:, 3].set(0).at[0, 3].set(-9)
    return jax.tree.map(lambda a: a.astype(dtype), (x, p))


def split_options(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    options = dict(LAYERS[name])
    names = ("rows", "count", "gated", "router", "dtype")
    return {key: options.pop(key) for key in names if key in options}, options


@functools.cache
def expected(name: str) -> Any:
    """Return the reference, computed in float32 from the same numbers."""
    fields, options = split_options(name)
    x, p = jax.tree.map(lambda a: a.astype(jnp.float32), inputs(**fields))
    layer = functools.partial(layers.one_by_one, **options)
    return jax.device_get(layers.derived(layer, x, p))


@pytest.mark.by_default(
    "plain-one",
    "gated-expert2_fsdp2_tensor2",
    "bf16-expert4_fsdp2",
    "empty_expert-expert2_fsdp2_context2",
    "all_on_two-expert8",
    "odd_rows-expert2_tensor2_context2",
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LAYERS)
def test_moe_equals_experts_one_by_one(name, mesh):
    fields, options = split_options(name)
    x, p = inputs(**fields)
    layer = functools.partial(zj.moe, capacity_factor=None, **options)
    actual = layers.on_mesh(MESHES[mesh], lambda: layers.derived(layer, x, p))
    layers.assert_close(actual, expected(name), 2e-2 if name == "bf16" else 2e-6)
    _, (y, stats) = actual
    assert y.dtype == x.dtype
    assert stats.dropped == 0


def test_moe_under_a_callers_shard_map_is_one_devices():
    x, p = inputs()
    mesh = zj.make_mesh(fsdp=2, expert=2, devices=jax.devices()[:4])

    def local(x: jax.Array) -> Any:
        y, stats = zj.moe(x, **p, capacity_factor=None)
        return y, stats.balance[None]

    spec = P(("fsdp", "expert"))
    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False))
        y, balance = jax.device_get(jax.block_until_ready(run(x)))
    parts = [layers.one_by_one(part, **p) for part in jnp.split(x, 4)]
    layers.assert_close(y, jnp.concatenate([part for part, _ in parts]))
    layers.assert_close(balance, jnp.stack([stats.balance for _, stats in parts]))


def test_moe_under_vmap_equals_separate_calls():
    x, p = inputs()
    axes = {"expert": 2, "fsdp": 2}
    stacked = jnp.stack([x, 2 * x])
    run = jax.jit(jax.vmap(lambda x: zj.moe(x, **p, capacity_factor=None)[0]))
    actual = layers.on_mesh(axes, lambda: run(stacked))
    expected = jnp.stack([layers.one_by_one(part, **p)[0] for part in stacked])
    layers.assert_close(actual, expected)


def test_expert_loss_weighs_the_statistics():
    x, p = inputs()
    _, stats = zj.moe(x, **p, capacity_factor=1.0)
    loss = zj.expert_loss(stats, balance=0.5, z=0.25)
    np.testing.assert_allclose(loss.total, 0.5 * stats.balance + 0.25 * stats.z, rtol=1e-6)
    assert loss.weight is None
    assert loss.metrics == {"dropped_fraction": stats.dropped}
    default = zj.expert_loss(stats)
    np.testing.assert_allclose(default.total, 1e-2 * stats.balance + 1e-3 * stats.z, rtol=1e-6)
