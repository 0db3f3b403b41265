"""The modules `zj.MoE` and `zj.linen.MoE`: their weights, specs and results."""

from typing import Any

import expert_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax as zj

SIZES = (layers.WIDTH, layers.INNER, layers.EXPERTS)
SHAPES = {
    "router": (layers.WIDTH, layers.EXPERTS),
    "up": (layers.EXPERTS, layers.WIDTH, layers.INNER),
    "gate": (layers.EXPERTS, layers.WIDTH, layers.INNER),
    "down": (layers.EXPERTS, layers.INNER, layers.WIDTH),
}
SPECS = {
    "router": P(),
    "up": P("expert", None, "tensor"),
    "gate": P("expert", None, "tensor"),
    "down": P("expert", "tensor", None),
}
OPTIONS: dict[str, Any] = {
    "top_k": 3,
    "capacity_factor": 1.5,
    "activation": jax.nn.silu,
    "normalize": False,
}


def test_nnx_module_equals_moe_with_its_weights():
    x = layers.tokens()
    module = zj.MoE(*SIZES, gated=True, rngs=nnx.Rngs(0), **OPTIONS)
    p = {name: getattr(module, name)[...] for name in SHAPES}
    assert {name: a.shape for name, a in p.items()} == SHAPES
    for actual, expected in zip(module(x), zj.moe(x, **p, **OPTIONS), strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert zj.MoE(*SIZES, rngs=nnx.Rngs(0)).gate is None


def test_linen_module_equals_moe_with_its_weights():
    x = layers.tokens()
    module = zj.linen.MoE(*SIZES[1:], gated=True, **OPTIONS)
    boxed = module.init(jax.random.key(0), x)
    assert nn.get_partition_spec(boxed)["params"] == SPECS
    p = nn.unbox(boxed)["params"]
    assert {name: a.shape for name, a in p.items()} == SHAPES
    results = module.apply({"params": p}, x)
    for actual, expected in zip(results, zj.moe(x, **p, **OPTIONS), strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_each_expert_is_initialized_like_a_dense_layer():
    module = zj.MoE(64, 128, 8, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.std(module.up[...]), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(module.down[...]), 128**-0.5, rtol=0.05)


def test_modules_compute_in_their_dtype_and_route_in_float32():
    x = layers.tokens()
    fields = {"dtype": jnp.bfloat16, "capacity_factor": None}
    y, stats = zj.MoE(*SIZES, rngs=nnx.Rngs(0), **fields)(x)
    module = zj.linen.MoE(*SIZES[1:], **fields)
    z, _ = module.apply(nn.unbox(module.init(jax.random.key(0), x)), x)
    assert (y.dtype, z.dtype, stats.balance.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_an_initializer_with_axes_replaces_those_of_the_modules():
    x = layers.tokens()
    init = nnx.with_partitioning(nnx.initializers.normal(), ("expert", None, None))
    with nnx.use_eager_sharding(False):
        module = zj.MoE(*SIZES, up_init=init, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
    assert specs["up"] == P("expert", None, None)
    assert specs["down"] == P("expert", "tensor", None)
    init = nn.with_partitioning(nn.initializers.normal(), ("expert", None, None))
    boxed = zj.linen.MoE(*SIZES[1:], up_init=init).init(jax.random.key(0), x)
    assert nn.get_partition_spec(boxed)["params"]["up"] == P("expert", None, None)


class NnxNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(layers.VOCAB, layers.WIDTH, rngs=rngs)
        self.experts = zj.MoE(*SIZES, capacity_factor=None, rngs=rngs)
        self.out = nnx.Linear(layers.WIDTH, layers.VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> Any:
        x = self.embed(tokens)
        y, stats = self.experts(x)
        return self.out(x + y), stats


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:
        x = nn.Embed(layers.VOCAB, layers.WIDTH)(tokens)
        y, stats = zj.linen.MoE(*SIZES[1:], capacity_factor=None)(x)
        return nn.Dense(layers.VOCAB)(x + y), stats


def loss(module: Any, batch: Any) -> zj.Loss:
    logits, stats = module(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    added = zj.expert_loss(stats)
    return zj.Loss(jnp.mean(losses) + added.total, metrics=added.metrics)


def losses(kind: str, axes: dict[str, int]) -> list[float]:
    batches = layers.batches(3)
    if kind == "nnx":
        model = zj.from_flax(lambda rngs: NnxNet(rngs=rngs), loss)
    else:
        model = zj.from_flax(LinenNet(), loss, example_batch=batches[0])
    size = int(np.prod(list(axes.values())))
    mesh = zj.make_mesh(**axes, devices=jax.devices()[:size])
    with zj.build_train_step(model, optax.adam(1e-2), zj.ZeroConfig(stage=3), mesh) as program:
        state = program.init(jax.random.key(0))
        found = []
        for batch in batches:
            state, metrics = program.step(state, batch)
            found.append(float(metrics["loss"]))
            assert float(metrics["dropped_fraction"]) == 0
        specs = [str(sharding.spec) for sharding in jax.tree.leaves(program.shardings.params)]
        assert any("'expert'" in spec for spec in specs) == ("expert" in axes)
    return found


@pytest.mark.by_default("nnx")
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_flax_models_with_experts_train_on_any_mesh(kind):
    expected = losses(kind, {"fsdp": 1})
    np.testing.assert_allclose(losses(kind, {"fsdp": 2, "expert": 2}), expected, rtol=2e-6)
    np.testing.assert_allclose(losses(kind, {"fsdp": 2, "tensor": 2}), expected, rtol=2e-6)
