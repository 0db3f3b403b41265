"""Tiled layers on `pallas_kernels.matmul`: every form equals the dense layer, on a mesh too.

The tests also show which programs hold the kernel.
"""

import dataclasses
from typing import Any

import gpt
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from devices import on_gpu
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from pallas_kernels.matmul import Config, measured
from pallas_kernels.matmul.config import Problem
from zerojax import tiling
from zerojax.tiling.kernels import find_kernel_name
from zerojax.tiling.nnx import annotation

D, H, F, S = 12, 24, 8, 6


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def weights(gated=True):
    dense = {
        "up": draw(1, D, H) / 4,
        "down": draw(2, H, D) / 5,
        "up_bias": draw(3, H),
        "down_bias": draw(4, D),
    }
    return dense | ({"gate": draw(5, D, H) / 4, "gate_bias": draw(6, H)} if gated else {})


def dense_mlp(w, x, f):
    up = x @ w["up"] + w["up_bias"]
    hidden = f(x @ w["gate"] + w["gate_bias"]) * up if "gate" in w else f(up)
    return hidden @ w["down"] + w["down_bias"]


def assert_equal(function, expected, *args):
    """Compare values and gradients of two functions."""

    def both(f):
        def total(*args):
            y = f(*args)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(total, argnums=tuple(range(len(args))), has_aux=True))(*args)

    for a, e in zip(jax.tree.leaves(both(function)), jax.tree.leaves(both(expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-5 * float(jnp.abs(e).max()))


@pytest.mark.by_default("True-silu-1", "False-tanh-2")
@pytest.mark.parametrize("seq_tiles", [1, 2])
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_tiled_mlp_of_named_products_is_the_dense_one(gated, activation, seq_tiles):
    f = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "tanh": jnp.tanh}[activation]

    def tiled(w, x):
        return tiling.tiled_mlp(
            x, tiling.tile_mlp(w, 4), f, seq_tiles=seq_tiles, implementation="xla"
        )

    assert_equal(tiled, lambda w, x: dense_mlp(w, x, f), weights(gated), draw(0, 2, S, D))


@pytest.mark.by_default("3-2-True")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_tiles", "out_tiles"), [(1, 2), (3, 1), (3, 2)])
def test_a_tiled_dense_layer_of_named_products_is_the_dense_one(in_tiles, out_tiles, bias):
    def tiled(w, b, x):
        kernel = tiling.tile_kernel(w, in_tiles=in_tiles, out_tiles=out_tiles)
        return tiling.tiled_dense(
            x, kernel, b if bias else None, in_tiles=in_tiles, implementation="xla"
        )

    assert_equal(
        tiled,
        lambda w, b, x: x @ w + (b if bias else 0),
        draw(1, D, F) / 4,
        draw(2, F),
        draw(0, 2, S, D),
    )


@pytest.mark.by_default("mlp")
@pytest.mark.parametrize("layer", ["mlp", "columns", "rows"])
def test_products_of_tiles_on_a_mesh_are_those_of_one_device(layer):
    """Rows are split over fsdp, and the hidden dim (columns or rows) over tensor.

    Partial sums are added once, after the loop.
    """
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    dense, x = weights(), draw(0, 2, S, D)
    spec = {"columns": (None, "tensor"), "rows": ("tensor", None)}.get(layer)

    def run(w, x):
        if layer == "mlp":
            return tiling.tiled_mlp(x, tiling.tile_mlp(w, 4), jax.nn.silu, implementation="xla")
        in_tiles = 2 if layer == "rows" else 1
        kernel = tiling.tile_kernel(w["up"], in_tiles=in_tiles, out_tiles=2)
        return tiling.tiled_dense(
            x, kernel, w["up_bias"], in_tiles=in_tiles, implementation="xla", spec=spec
        )

    def loss(w, x):
        return jnp.sum(jnp.sin(run(w, x)))

    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(dense, x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        found = jax.block_until_ready(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(dense, x))
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=0, atol=2e-5 * float(jnp.abs(e).max())
        )


# --- which programs hold the kernel ---------------------------------------------------------------


def kernels_in(jaxpr) -> int:
    return sum(e.primitive.name == "mpmd_map" for e in jaxpr.eqns) + sum(
        kernels_in(inner) for e in jaxpr.eqns for inner in jex.jaxprs_in_params(e.params)
    )


def kernels_of_loops(implementation, kind="NVIDIA H200"):
    """Return the kernels in the body of each loop of a step of two tiled layers, in order."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.mlp = zj.TiledMLP(
                64, 128, num_tiles=2, gated=True, implementation=implementation, rngs=rngs
            )
            self.out = zj.TiledDense(
                64, 64, num_tiles=2, in_tiles=2, implementation=implementation, rngs=rngs
            )

        def __call__(self, x):
            return self.out(self.mlp(x))

    net = nnx.split(Net(nnx.Rngs(0)))

    def loss(state, x):
        state = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state)
        return jnp.sum(nnx.merge(net[0], state)(x).astype(jnp.float32))

    with on_gpu(kind):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(
            net[1], jnp.zeros((2, 4, 64), jnp.bfloat16)
        )
    return [kernels_in(e.params["jaxpr"].jaxpr) for e in scans_in(jaxpr.jaxpr)]


def scans_in(jaxpr) -> list[Any]:
    found = []
    for e in jaxpr.eqns:
        found += (
            [e]
            if e.primitive.name == "scan"
            else [s for inner in jex.jaxprs_in_params(e.params) for s in scans_in(inner)]
        )
    return found


def test_a_step_of_tiles_holds_the_kernel_forward_and_backward_where_it_is_named():
    # Forward: gate and up in one kernel, then down; the dense layer. Backward recomputes the hidden
    # activations with gate and up. The rest of backward is products with transposed operands, which
    # XLA computes.
    forward_mlp, forward_dense, backward_dense, backward_mlp = kernels_of_loops("mosaic")
    assert (forward_mlp, forward_dense) == (2, 1)
    assert backward_mlp >= 1
    assert backward_dense in (0, 1)  # an unread kernel, which XLA removes
    assert kernels_of_loops(None) == [0, 0, 0, 0]


def test_a_step_of_tiles_that_names_none_holds_kernels_where_the_table_says_faster(
    monkeypatch,
):
    narrow, wide = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

    def kernels(*rows):
        """Return the kernels of each loop, given made-up rows.

        A row has weights, K, N, activation, and the time relative to XLA's.
        """
        table = []
        for num_weights, k, n, activation, ratio in rows:
            # Gate and up have biases, and the other products are added to a sum in float32.
            terms = (narrow, narrow, None) if activation else (wide, None, wide)
            kinds = dict(zip(("out_dtype", "bias_dtype", "accumulate_dtype"), terms, strict=True))
            problem = Problem(m=8, n=n, k=k, num_weights=num_weights, dtype=narrow, **kinds)
            sizes = Config(block_n=128, num_stages=2, num_cores=108)
            times = {"seconds": ratio, "xla_seconds": 1.0, "jax_seconds": None}
            about = {
                "chip": "H200",
                "num_cores": 108,
                "device": "NVIDIA H200",
                "jax": "0.12.0",
                "date": "2026-01-01",
            }
            table.append(
                measured.Row(problem=problem, activation=activation, config=sizes, **times, **about)
            )
        monkeypatch.setattr(measured, "table", lambda: tuple(table))
        return kernels_of_loops(None)

    up, down, dense = (2, 64, 64, "gelu"), (1, 64, 64, None), (1, 32, 32, None)
    # Each product has its own kernel; backward recomputes gate and up.
    assert kernels((*up, 0.9), (*down, 1.1)) == [1, 0, 0, 1]
    assert kernels((*down, 0.9))[:2] == [1, 0]
    assert kernels((*dense, 0.9))[:2] == [0, 1]
    assert kernels((*up, 1.1), (*down, 1.1), (*dense, 1.1)) == [0, 0, 0, 0]


def test_tiles_named_for_another_gpu_than_hopper_are_refused():
    with pytest.raises(
        NotImplementedError,
        match="matmul: implementation='mosaic' cannot serve: it needs a Hopper GPU",
    ):
        kernels_of_loops("mosaic", "NVIDIA A100-SXM4-80GB")


def test_an_unknown_implementation_is_refused_when_a_layer_is_built():
    x = jnp.zeros((2, S, D))
    for make in (
        lambda: zj.TiledDense(D, F, implementation="triton", rngs=nnx.Rngs(0)),  # pyright: ignore[reportArgumentType]
        lambda: zj.TiledMLP(D, H, implementation="triton", rngs=nnx.Rngs(0)),  # pyright: ignore[reportArgumentType]
        lambda: zj.linen.TiledDense(F, implementation="triton"),  # pyright: ignore[reportArgumentType]
        lambda: zj.linen.TiledMLP(H, implementation="triton"),  # pyright: ignore[reportArgumentType]
        lambda: tiling.tiled_dense(x, jnp.zeros((1, D, F)), implementation="triton"),  # pyright: ignore[reportArgumentType]
        lambda: tiling.tiled_mlp(x, {}, implementation="triton"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(
            ValueError, match="'triton' is unknown: choose from mosaic, xla, reference, or None"
        ):
            make()


def test_an_activation_that_is_no_function_is_refused_when_a_layer_is_built():
    for make in (
        lambda: zj.TiledMLP(D, H, activation="silu", rngs=nnx.Rngs(0)),  # pyright: ignore[reportArgumentType]
        lambda: zj.linen.TiledMLP(H, activation="silu"),  # pyright: ignore[reportArgumentType]
        lambda: tiling.tiled_mlp(jnp.zeros((2, S, D)), {}, "silu"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(
            ValueError, match=r"activation='silu': a function is needed, such as jax.nn.gelu"
        ):
            make()


def test_activations_that_the_kernel_has_are_known_by_their_functions():
    for f, name in (
        (jax.nn.gelu, "gelu"),
        (nnx.gelu, "gelu"),
        (jax.nn.silu, "silu"),
        (nn.swish, "silu"),
        (jnp.tanh, None),
    ):
        assert find_kernel_name(f) == name


def test_layers_hand_the_split_of_their_weights_on():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("tensor", None))
    with nnx.use_eager_sharding(False):
        assert zj.TiledDense(D, F, kernel_init=init, rngs=nnx.Rngs(0)).spec == ("tensor", None)
    assert zj.TiledDense(D, F, rngs=nnx.Rngs(0)).spec is None
    assert annotation(jnp.zeros(3)) is None
    layer = zj.linen.TiledDense(
        F, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
    )
    named = layer.clone(implementation="xla")
    x = draw(0, 2, S, D)
    variables = nn.unbox(layer.init(jax.random.key(0), x))
    np.testing.assert_allclose(
        np.asarray(layer.apply(variables, x)), np.asarray(named.apply(variables, x)), rtol=1e-5
    )


TINY = gpt.GPTConfig(layers=2, hidden=32, heads=2, seq=16, vocab=64)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({"stage": 3}, {"fsdp": 4}),
        ({"stage": 3}, {"fsdp": 2, "tensor": 2}),
        ({"stage": 3, "sequence_parallel": True}, {"fsdp": 2, "tensor": 2}),
        ({"stage": 3, "num_microbatches": 2, "reduce_every": "step"}, {"data": 2, "fsdp": 2}),
        ({"stage": 2, "activations": "selective"}, {"data": 2, "fsdp": 2}),
        ({"params": "pinned_host", "opt_state": "pinned_host"}, {"fsdp": 4}),
        (
            {"params": "pinned_host", "opt_state": "pinned_host", "num_microbatches": 2},
            {"fsdp": 2, "tensor": 2},
        ),
        (
            {"params": "nvme", "opt_state": "nvme", "grads": "nvme", "update": "in_backward"},
            {"fsdp": 2},
        ),
    ],
    ids=[
        "stage_3",
        "tensor",
        "sequence",
        "reduced_once",
        "selective",
        "host",
        "host_tensor",
        "nvme",
    ],
)
def test_a_gpt_on_named_products_trains_as_a_dense_one_in_every_tier(fields, axes, tmp_path):
    fields = fields | ({"swap_dir": str(tmp_path)} if "nvme" in fields.values() else {})
    tokens = np.random.default_rng(0).integers(0, TINY.vocab, (8, TINY.seq)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}

    def losses(c, fields, axes):
        c = dataclasses.replace(c, tensor_axis="tensor" if axes.get("tensor") else None)
        mesh = zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
        with zj.build_train_step(
            gpt.layered_gpt(c), optax.adamw(1e-3), zj.ZeroConfig(**fields), mesh
        ) as program:
            return toys.run(program, program.init(jax.random.key(0)), [batch] * 8)[0]

    named = dataclasses.replace(TINY, mlp_tiles=8, mlp_implementation="xla")
    np.testing.assert_allclose(
        losses(named, fields, axes), losses(TINY, {}, {"fsdp": 1}), rtol=3e-5
    )
