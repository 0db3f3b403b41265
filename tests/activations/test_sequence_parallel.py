"""Sequence parallelism equals the plain program and is placed by the weights' specs.

It is refused where it is impossible.
"""

import dataclasses

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.activations import is_gather, is_scatter, sequence_ops
from zerojax.jaxprs import flatten

CONFIG = gpt.GPTConfig(
    vocab=32, seq=16, hidden=32, layers=2, heads=4, tensor_axis="tensor", loss_tiles=0
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 17)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
MESHES = {
    "t2": {"tensor": 2},
    "t4": {"tensor": 4},
    "f2t2": {"fsdp": 2, "tensor": 2},
    "d2f2t2": {"data": 2, "fsdp": 2, "tensor": 2},
}
ON_HOST = {
    "params": "pinned_host",
    "opt_state": "pinned_host",
    "grads": "pinned_host",
    "activations": "pinned_host",
}
CASES = {
    "t4-save": ("t4", 1, {}),
    "f2t2-selective": ("f2t2", 3, {"activations": "selective"}),
    "d2f2t2-remat": ("d2f2t2", 2, {"activations": "remat"}),
    "f2t2-host": ("f2t2", 3, ON_HOST | {"num_microbatches": 2}),
    "t2-save": ("t2", 0, {}),
    "d2f2t2-save": ("d2f2t2", 3, {}),
}


def mesh_of(data=1, fsdp=1, tensor=1):
    count = data * fsdp * tensor
    return zj.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[:count])


def trained(config, mesh, **settings):
    """Return the losses of 5 steps, the parameters after them, and the products that were read."""
    # A large eps: a key bias's gradient is 0 except for rounding, which Adam would turn into full
    # steps.
    with zj.build_train_step(
        gpt.layered_gpt(config), optax.adamw(1e-3, eps=1e-3), zj.ZeroConfig(**settings), mesh
    ) as program:
        state, losses = program.init(jax.random.key(0)), []
        for _ in range(5):
            state, metrics = jax.block_until_ready(program.step(state, BATCH))
            losses.append(float(metrics["loss"]))
        return (
            losses,
            jax.tree.map(np.asarray, program.master_params(state)),
            program.sequence_parallel,
        )


@pytest.fixture(scope="module")
def plain():
    return trained(CONFIG, mesh_of(), stage=0)[:2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_sequence_parallel_equals_the_plain_program(plain, case):
    mesh, stage, settings = CASES[case]
    check(
        plain,
        *trained(CONFIG, mesh_of(**MESHES[mesh]), stage=stage, sequence_parallel=True, **settings),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, ON_HOST], ids=["device", "host"])
def test_sequence_parallel_of_tiles_equals_the_plain_program(settings):
    config = dataclasses.replace(CONFIG, mlp_tiles=2)
    mesh = mesh_of(fsdp=2, tensor=2)
    result = trained(config, mesh, stage=3, sequence_parallel=True, **settings)
    check(
        trained(config, mesh_of(), stage=0)[:2],
        *result,
        kinds=["column", "left alone", "left alone", "row", "column", "row"],
    )
    assert "after the loop over tiles" in result[2][-1].why


def check(
    plain,
    losses,
    params,
    products,
    kinds=("column", "left alone", "left alone", "row", "column", "row"),
):
    np.testing.assert_allclose(losses, plain[0], rtol=2e-6)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    assert [product.kind for product in products] == list(kinds)


def test_sequence_parallel_lists_the_products_of_a_block():
    config = zj.ZeroConfig(sequence_parallel=True)
    program = zj.build_train_step(
        gpt.layered_gpt(CONFIG), optax.adamw(1e-3), config, mesh_of(tensor=4), batch=BATCH
    )
    products = [(product.weight, product.kind) for product in program.sequence_parallel]
    of_data = ("", "left alone")  # queries with keys, and scores with values
    assert products == [
        ("['qkv']['kernel']", "column"), of_data, of_data, ("['proj']['kernel']", "row"), ("['fc']['kernel']", "column"),
        ("['out']['kernel']", "row"),
    ]  # fmt: skip


def test_sequence_parallel_operations_spell_out_their_transposes():
    mesh, spec = mesh_of(fsdp=2, tensor=4), ("fsdp", "tensor", None)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 2)), jnp.float32)
    for operation, is_it in (
        (sequence_ops.gather_sequence, is_gather),
        (sequence_ops.scatter_sequence, is_scatter),
    ):
        closed = jax.make_jaxpr(lambda x, op=operation: op(x, spec, mesh))(x)
        (equation,) = [i.eqn for i in flatten(closed.jaxpr, closed.consts).instructions]
        assert is_it(equation)
        assert is_gather(equation) != is_scatter(equation)
        y = jax.jit(lambda x, op=operation: op(x, spec, mesh))(x)
        np.testing.assert_array_equal(y, x)
        transpose = jax.jit(
            lambda x, op=operation: jax.vjp(lambda x: op(x, spec, mesh), x)[1](x)[0]
        )(x)
        np.testing.assert_array_equal(transpose, x)
        whole, split = (transpose, y) if is_it is is_scatter else (y, transpose)
        assert (whole.sharding.spec, split.sharding.spec) == (P("fsdp"), P("fsdp", "tensor"))


def functions_of(embed, mix=lambda x: x):
    """Return a model of plain functions with an MLP, whose stream is x or x["x"]."""

    def block(p, x, key):
        tree = x if isinstance(x, dict) else {"x": x}
        y = mix(tree["x"]) + jnp.tanh(tree["x"] @ p["up"]) @ p["down"]
        return {**x, "x": y + jnp.mean(tree["bias"])} if isinstance(x, dict) else y

    def init(key):
        return {
            "up": jax.random.normal(key, (16, 32)) / 4,
            "down": jax.random.normal(key, (32, 16)) / 6,
        }

    return zj.LayeredModel(
        num_layers=2, init_embed=lambda key: {"e": jnp.ones(16)}, embed=lambda p, batch, key: embed(batch["x"] * p["e"]),
        init_block=init, block=block, init_head=lambda key: {"h": jnp.ones(16)},
        head=lambda p, p_embed, x, batch, key: jnp.mean(((x["x"] if isinstance(x, dict) else x) * p["h"]) ** 2),
        specs={"block": {"up": P(None, "tensor"), "down": P("tensor", None)}},
    )  # fmt: skip


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", ["bias", pytest.param("fft", marks=pytest.mark.exhaustive)])
def test_sequence_parallel_of_leaves_without_a_sequence_and_of_transforms_along_it(case, tensor):
    """A bias[B, 1, 1, T] stays unsharded.

    A transform along a split sequence would end the process in XLA's partitioner.
    """
    model = {
        "bias": lambda: functions_of(lambda x: {"bias": 0.1 * x[:, None, None, :, 0], "x": x}),
        "fft": lambda: functions_of(
            lambda x: x, lambda x: jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=1).real / 8
        ),
    }[case]()
    batch, results = {"x": np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)}, []
    for mesh, fields in ((mesh_of(), {}), (mesh_of(tensor=tensor), {"sequence_parallel": True})):
        with zj.build_train_step(
            model, optax.sgd(0.1), zj.ZeroConfig(stage=0, **fields), mesh
        ) as program:
            state, metrics = jax.block_until_ready(
                program.step(program.init(jax.random.key(0)), batch)
            )
            results.append(
                (metrics["loss"], jax.tree.map(np.asarray, program.master_params(state)))
            )
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_sequence_parallel_is_refused_by_name():
    config, mesh = zj.ZeroConfig(sequence_parallel=True), mesh_of(tensor=2)
    with pytest.raises(ValueError, match="sequence_parallel=True works layer by layer"):
        zj.build_train_step(gpt.unrolled_gpt(CONFIG), optax.adamw(1e-3), config, mesh)
    unsplit = gpt.layered_gpt(dataclasses.replace(CONFIG, tensor_axis=None))
    with pytest.raises(ValueError, match="no weight of a block names 'tensor'"):
        zj.build_train_step(unsplit, optax.adamw(1e-3), config, mesh)
    zj.build_train_step(
        unsplit, optax.adamw(1e-3), config, mesh_of()
    )  # on one device, tensor has no meaning
    flat = functions_of(lambda x: x[:, 0])
    with pytest.raises(
        ValueError, match=r"no floating leaf of x has three dims: x is float32\[8, 16\]"
    ):
        zj.build_train_step(
            flat, optax.adamw(1e-3), config, mesh, batch={"x": np.zeros((8, 6, 16), np.float32)}
        )
    odd = {name: a[:, :15] for name, a in BATCH.items()}
    with pytest.raises(
        ValueError,
        match=r"dim 1 of x, of shape \(8, 15, 32\), over tensor=2.*pad the sequences to 16",
    ):
        zj.build_train_step(gpt.layered_gpt(CONFIG), optax.adamw(1e-3), config, mesh, batch=odd)
