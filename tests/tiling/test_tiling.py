"""A tiled operator equals the dense one, for every number of tiles.

Values, gradients, weights and training are compared.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import flax.linen as nn
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
import train_gpt
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import hlo, tiling
from zerojax.tiling import marked, parse

D, H, F, S = 12, 24, 8, 6
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest difference from float64 relative to the result's largest magnitude.

It is about 16 roundings of the dtype.
"""


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def assert_near(actual, expected, dtype):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), e, rtol=0, atol=TOLERANCE[dtype] * np.abs(e).max()
        )


def both(function, args, dtype):
    """Return value and gradients of sum(sin(function(*args))), computed in a dtype."""
    args = jax.tree.map(lambda a: jnp.asarray(a, dtype), args)

    def total(*args):
        y = function(*args)
        assert y.dtype == jnp.dtype(dtype)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    gradients, y = jax.jit(jax.grad(total, argnums=tuple(range(len(args))), has_aux=True))(*args)
    return y, gradients


def dense_in_float64(x, w, b):
    """Return value and gradients of sum(sin(x w + b)), computed in a dtype."""
    y = x @ w + b
    dy = np.cos(y)
    flat, dflat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return y, (dy @ w.T, flat.T @ dflat, dflat.sum(0))


@pytest.mark.by_default(
    "1-1-float32",
    "1-2-float32",
    "1-8-float32",
    "3-1-float32",
    "12-1-float32",
    "2-4-float32",
    "3-2-float32",
    "3-2-bfloat16",
    "2-4-float16",
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("in_tiles", "out_tiles"), [(1, 1), (1, 2), (1, 8), (3, 1), (12, 1), (2, 4), (3, 2)]
)
def test_a_tiled_dense_layer_is_the_dense_one(in_tiles, out_tiles, dtype):
    x, w, b = normal(0, 2, S, D), normal(1, D, F) / 4, normal(2, F)
    x, w, b = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, w, b))

    def tiled(x, w, b):
        kernel = tiling.tile_kernel(w, in_tiles=in_tiles, out_tiles=out_tiles)
        assert kernel.shape == (in_tiles * out_tiles, D // in_tiles, F // out_tiles)
        return tiling.tiled_dense(x, kernel, b, in_tiles=in_tiles)

    assert_near(both(tiled, (x, w, b), dtype), dense_in_float64(x, w, b), dtype)


def dense_mlp(weights, x):
    hidden = jax.nn.silu(x @ weights["gate"] + weights["gate_bias"]) if "gate" in weights else None
    up = x @ weights["up"] + weights["up_bias"]
    hidden = jax.nn.silu(up) if hidden is None else hidden * up
    return hidden @ weights["down"] + weights["down_bias"]


@pytest.mark.by_default(
    "1-1-True-float32",
    "4-1-False-float32",
    "4-3-True-float32",
    "24-6-True-float32",
    "1-2-False-float32",
    "4-3-True-bfloat16",
    "24-6-True-float16",
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tiles", "seq_tiles", "gated"),
    [(1, 1, True), (4, 1, False), (4, 3, True), (24, 6, True), (1, 2, False)],
)
def test_a_tiled_mlp_is_the_dense_one(tiles, seq_tiles, gated, dtype):
    x = normal(0, 2, S, D)
    weights = {
        "up": normal(1, D, H) / 4,
        "down": normal(2, H, D) / 5,
        "up_bias": normal(3, H),
        "down_bias": normal(4, D),
    }
    if gated:
        weights |= {"gate": normal(5, D, H) / 4, "gate_bias": normal(6, H)}
    x, weights = jax.tree.map(lambda a: np.asarray(jnp.asarray(a, dtype), np.float64), (x, weights))

    def tiled(weights, x):
        return tiling.tiled_mlp(
            x, tiling.tile_mlp(weights, tiles), jax.nn.silu, seq_tiles=seq_tiles
        )

    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, (weights, x))
        y = dense_mlp(*wide)
        expected = (
            y,
            jax.grad(lambda w, x: jnp.sum(jnp.sin(dense_mlp(w, x))), argnums=(0, 1))(*wide),
        )
        expected = jax.tree.map(np.asarray, expected)
    assert_near(both(tiled, (weights, x), dtype), expected, dtype)


@pytest.mark.parametrize(("in_tiles", "out_tiles"), itertools.product((1, 2, 12), (1, 4)))
def test_weights_are_tiled_and_back_again(in_tiles, out_tiles):
    w = normal(0, D, F)
    tiles = tiling.tile_kernel(w, in_tiles=in_tiles, out_tiles=out_tiles)
    for number, tile in enumerate(tiles):
        o, i = divmod(number, in_tiles)
        rows, columns = D // in_tiles, F // out_tiles
        np.testing.assert_array_equal(
            tile, w[i * rows : (i + 1) * rows, o * columns : (o + 1) * columns]
        )
    np.testing.assert_array_equal(tiling.untile_kernel(tiles, in_tiles=in_tiles), w)
    dense = {
        "up": normal(1, D, H),
        "down": normal(2, H, D),
        "up_bias": normal(3, H),
        "other": normal(4, 3),
    }
    for name, a in tiling.untile_mlp(tiling.tile_mlp(dense, 4)).items():
        np.testing.assert_array_equal(a, dense[name])


# --- Flax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_tiles", [0, -1, True, 2.0])
def test_tiles_are_not_undone_by_a_number_that_is_none(in_tiles):
    with pytest.raises(ValueError, match=rf"in_tiles={in_tiles}"):
        tiling.untile_kernel(jnp.ones((4, 2, 2)), in_tiles=in_tiles)


@pytest.mark.parametrize(
    "name",
    [
        "zerojax_tiles",
        "zerojax_tiles_of_mine",
        "zerojax_tiles_1",
        "zerojax_mark",
        "zerojax_mark_of_mine",
    ],
)
def test_a_users_jit_of_a_loops_name_is_no_loop(name):
    def function(x):
        return x + 1

    function.__name__ = function.__qualname__ = name
    (eqn,) = jax.make_jaxpr(jax.jit(function))(1.0).jaxpr.eqns
    assert eqn.params["name"] == name
    assert parse(eqn) is None
    assert marked(eqn) is None


def test_nnx_layers_begin_with_the_weights_of_dense_ones():
    dense = nnx.Linear(D, F, rngs=nnx.Rngs(0))
    tiled = zj.TiledDense(D, F, num_tiles=4, in_tiles=2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(
        tiling.untile_kernel(tiled.kernel[...], in_tiles=2), dense.kernel[...]
    )
    x = jnp.asarray(normal(0, 3, D), jnp.float32)
    np.testing.assert_allclose(tiled(x), dense(x), rtol=1e-5, atol=1e-6)
    rngs = nnx.Rngs(1)
    up, gate, down = (
        nnx.Linear(D, H, rngs=rngs),
        nnx.Linear(D, H, rngs=rngs),
        nnx.Linear(H, D, rngs=rngs),
    )
    mlp = zj.TiledMLP(D, H, num_tiles=3, gated=True, activation=jax.nn.silu, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(mlp(x), down(jax.nn.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-5)
    assert mlp.up.shape == (3, D, H // 3)


def test_linen_layers_hold_the_weights_of_dense_ones():
    x = jnp.asarray(normal(0, 3, D), jnp.float32)
    dense, tiled = nn.Dense(F), zj.linen.TiledDense(F, num_tiles=2, in_tiles=3)
    kernel, bias = (dense.init(jax.random.key(0), x)["params"][name] for name in ("kernel", "bias"))
    made: Any = tiled.init(jax.random.key(0), x)["params"]
    assert made["kernel"].shape == (6, D // 3, F // 2)
    np.testing.assert_array_equal(tiling.untile_kernel(made["kernel"], in_tiles=3), kernel)
    y = tiled.apply(
        {"params": {"kernel": tiling.tile_kernel(kernel, in_tiles=3, out_tiles=2), "bias": bias}}, x
    )
    expected = dense.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=1e-5, atol=1e-6)
    mlp = zj.linen.TiledMLP(H, num_tiles=4, gated=True, activation=jax.nn.silu)
    weights: Any = mlp.init(jax.random.key(0), x)["params"]
    y = np.asarray(mlp.apply({"params": weights}, x))
    np.testing.assert_allclose(y, dense_mlp(tiling.untile_mlp(weights), x), rtol=1e-5, atol=1e-5)


def test_annotations_for_tensor_parallelism_are_those_of_tiles():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
    with nnx.use_eager_sharding(False):
        made = zj.TiledMLP(D, H, num_tiles=2, up_init=init, rngs=nnx.Rngs(0))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(made, nnx.Param)))
    assert specs["up"] == P(None, None, "tensor")
    assert specs["down"] in (None, P())
    linen = zj.linen.TiledDense(
        F,
        num_tiles=2,
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor")),
    )
    boxed = jax.eval_shape(linen.init, jax.random.key(0), jnp.zeros((3, D)))
    assert nn.get_partition_spec(boxed)["params"]["kernel"] == P(None, None, "tensor")


# --- training -------------------------------------------------------------------------------------


class Net(nnx.Module):
    """Two MLPs on a stream, dense or tiled, with the same weights from the same key."""

    def __init__(self, tiles, *, rngs):
        self.tiled = bool(tiles)
        if tiles:
            self.mlps = nnx.List(
                [zj.TiledMLP(64, 256, num_tiles=tiles, seq_tiles=2, rngs=rngs) for _ in range(2)]
            )
            self.out = zj.TiledDense(64, 64, num_tiles=4, in_tiles=2, rngs=rngs)
            return
        self.mlps = nnx.List(
            [
                nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)])
                for _ in range(2)
            ]
        )
        self.out = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        for mlp in self.mlps:
            x = x + (mlp(x) if self.tiled else mlp[1](jax.nn.gelu(mlp[0](x))))
        return self.out(x)


def net_program(tiles, mesh, **fields):
    model = zj.from_flax(
        lambda rngs: Net(tiles, rngs=rngs),
        lambda net, batch: jnp.mean((net(batch["x"]) - batch["y"]) ** 2),
    )
    return zj.build_train_step(model, optax.adamw(1e-3), zj.ZeroConfig(**fields), mesh)


BATCH = {"x": normal(0, 8, 4, 64).astype(np.float32), "y": normal(1, 8, 4, 64).astype(np.float32)}


def losses_of(program, steps=10):
    return toys.run(program, program.init(jax.random.key(0)), [BATCH] * steps)[0]


@functools.cache
def dense_losses():
    return losses_of(net_program(0, zj.make_mesh(fsdp=1, devices=jax.devices()[:1])))


@pytest.mark.by_default("3-axes2")
@pytest.mark.parametrize(
    ("stage", "axes"),
    [(0, {"fsdp": 4}), (1, {"data": 2, "fsdp": 2}), (3, {"fsdp": 4}), (3, {"fsdp": 8})],
)
def test_a_tiled_model_trains_as_a_dense_one(stage, axes):
    count = int(np.prod(list(axes.values())))
    program = net_program(4, zj.make_mesh(**axes, devices=jax.devices()[:count]), stage=stage)
    assert program.gathered_early == ()
    np.testing.assert_allclose(losses_of(program), dense_losses(), rtol=2e-5)
    assert dense_losses()[-1] < dense_losses()[0]


@pytest.mark.parametrize("tiles", [1, 8])
def test_at_stage_3_one_tile_is_gathered_at_a_time(tiles):
    program = net_program(tiles, zj.make_mesh(fsdp=4, devices=jax.devices()[:4]), stage=3)
    text = (
        program.lower(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), BATCH))
        .compile()
        .as_text()
    )
    mlp = [
        c
        for c in hlo.collectives(text)
        if c.op == "all-gather" and c.times % tiles == 0 and c.num_bytes >= 64 * 32 * 4
    ]
    largest = max(c.num_bytes for c in mlp)
    assert largest <= 2 * 64 * 256 * 4 // tiles * 1.05  # up and down together
    assert program.gathered_early == ()


TINY = gpt.GPTConfig(layers=2, hidden=32, heads=2, seq=16, vocab=64)


def gpt_losses(make, mlp_tiles, fields, axes, steps=10):
    """Return the losses of a GPT on a mesh."""
    c = dataclasses.replace(
        TINY, mlp_tiles=mlp_tiles, tensor_axis="tensor" if axes.get("tensor") else None
    )
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    tokens = np.random.default_rng(0).integers(0, TINY.vocab, (8, TINY.seq)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    with zj.build_train_step(make(c), optax.adamw(1e-3), zj.ZeroConfig(**fields), mesh) as program:
        return toys.run(program, program.init(jax.random.key(0)), [batch] * steps)[0]


@functools.cache
def dense_gpt_losses(make):
    return gpt_losses(make, 0, {}, {"fsdp": 1})


@pytest.mark.by_default("tensor")  # `test_tiles.py` trains tiles on disk
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({"stage": 2}, {"data": 2, "fsdp": 2}),
        ({"stage": 3}, {"fsdp": 2, "tensor": 2}),
        ({"params": "pinned_host", "opt_state": "pinned_host"}, {"fsdp": 4}),
        (
            {"params": "nvme", "opt_state": "nvme", "grads": "nvme", "update": "in_backward"},
            {"fsdp": 2},
        ),
        ({"opt_state": "pinned_host", "update_on": "host", "num_microbatches": 2}, {"fsdp": 4}),
    ],
    ids=["stage_2", "tensor", "host", "nvme", "updated_on_host"],
)
def test_a_gpt_with_tiled_mlps_trains_as_a_dense_one_in_every_tier(fields, axes, tmp_path):
    fields = fields | ({"swap_dir": str(tmp_path)} if "nvme" in fields.values() else {})
    losses = gpt_losses(gpt.layered_gpt, 8, fields, axes)
    np.testing.assert_allclose(losses, dense_gpt_losses(gpt.layered_gpt), rtol=3e-5)


@pytest.mark.exhaustive  # by default a model of separate tiled layers is trained above
def test_an_unrolled_gpt_with_tiled_mlps_trains_as_a_dense_one():
    losses = gpt_losses(gpt.unrolled_gpt, 4, {"stage": 3}, {"fsdp": 4})
    np.testing.assert_allclose(losses, dense_gpt_losses(gpt.unrolled_gpt), rtol=3e-5)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [5, 0, -1, 2.0, True])
def test_tiles_that_do_not_divide_are_refused(tiles):
    for make in (
        lambda: zj.TiledDense(D, F, num_tiles=tiles, rngs=nnx.Rngs(0)),
        lambda: zj.TiledDense(D, F, num_tiles=1, in_tiles=tiles, rngs=nnx.Rngs(0)),
        lambda: zj.TiledMLP(D, H, num_tiles=tiles, rngs=nnx.Rngs(0)),
        lambda: zj.linen.TiledDense(F, num_tiles=tiles).init(jax.random.key(0), jnp.zeros((3, D))),
        lambda: tiling.tile_kernel(jnp.zeros((D, F)), out_tiles=tiles),
    ):
        with pytest.raises(
            ValueError,
            match=r"tiles=(5 does not divide the dim of (8|12|24)|.*integer of at least 1)",
        ):
            make()


def test_weights_that_do_not_fit_are_refused():
    x = jnp.zeros((2, S, D))
    with pytest.raises(ValueError, match="x has 12 features, and 2 tiles of 4 take 8"):
        tiling.tiled_dense(x, jnp.zeros((4, 4, 2)), in_tiles=2)
    with pytest.raises(ValueError, match="do not belong together"):
        tiling.tiled_mlp(x, {"up": jnp.zeros((2, D, 4)), "down": jnp.zeros((2, 3, D))})
    with pytest.raises(ValueError, match=r"not \['w1'\]"):
        tiling.tiled_mlp(x, {"up": jnp.zeros((2, D, 4)), "down": jnp.zeros((2, 4, D)), "w1": x})
    with pytest.raises(ValueError, match="seq_tiles=4 does not divide the dim of 6"):
        tiling.tiled_mlp(x, {"up": jnp.zeros((2, D, 4)), "down": jnp.zeros((2, 4, D))}, seq_tiles=4)


def test_train_gpt_tiles_mlps_where_that_lowers_the_peak():
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    wide = dataclasses.replace(TINY, hidden=4096, heads=32, seq=512, dtype=jnp.bfloat16)
    host = zj.ZeroConfig(
        stage=3, params="pinned_host", grads="pinned_host", opt_state="pinned_host"
    )
    for fields, c, expected in (
        ({}, wide, 2),  # 8 x 4096^2 x 4 bytes are 512 MiB
        ({}, dataclasses.replace(wide, seq=4096), 0),
        ({}, TINY, 0),
        ({"mlp_tiles": 8}, TINY, 8),
        ({"mlp_tiles": 0}, wide, 0),
        ({"zero": zj.ZeroConfig(stage=2)}, wide, 0),
        ({"zero": host}, wide, 2),
        (
            {"zero": dataclasses.replace(host, update_on="host")},
            wide,
            0,
        ),  # full layers are updated there
    ):
        assert train_gpt.mlp_tiles(train_gpt.Options(**fields), c, mesh) == expected
    for tiles in (-1, 3):
        with pytest.raises(
            ValueError, match=f"--mlp-tiles {tiles}: 0 .dense layers. or a divisor of 128"
        ):
            train_gpt.mlp_tiles(train_gpt.Options(mlp_tiles=tiles), TINY, mesh)


def test_tiles_are_chosen_by_bytes(caplog):
    with caplog.at_level("INFO", "zerojax"):
        assert tiling.choose_num_tiles(1024, 1 << 20, "a kernel") == 1
        assert caplog.text == ""
        assert tiling.choose_num_tiles(3 << 14, 6 << 30, "a kernel") == 24
        assert "6.00 GiB is kept as 24 tiles" in caplog.text
    with pytest.raises(ValueError, match="any divisor of 7"):
        tiling.choose_num_tiles(7, 6 << 30, "a kernel")
    assert zj.TiledMLP(D, H, rngs=nnx.Rngs(0)).num_tiles == 1
