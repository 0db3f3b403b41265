"""The gradient of a look-up, and its reductions.

It is sent by rows if these are fewer than the table's, and otherwise as full tables.
"""

from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import hlo
from zerojax.gather.look_up import sends_rows

H = 16
HYBRID = {"data": 2, "fsdp": 4}
# `fsdp` does not divide this vocabulary, like GPT-2's 50,257: the table is split along its width
UNEVEN = 33


def init(vocab: int) -> Any:
    def make(key: jax.Array) -> Any:
        table, w = jax.random.normal(key, (vocab + H, H)), jax.random.normal(key, (H, H)) / 4
        return {"table": table[:vocab], "w": w}

    return make


def tied(p: Any, batch: Any, key: Any) -> jax.Array:
    x = jnp.tanh(p["table"][batch["ids"]] @ p["w"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["table"].T, batch["ids"]).mean()


def build(loss: Any, vocab: int, mesh: dict[str, int], **config: Any) -> zj.Program:
    return zj.build_train_step(
        zj.Model(init(vocab), loss), optax.sgd(0.1), zj.ZeroConfig(**config), zj.make_mesh(**mesh)
    )


def ids(seq: int, vocab: int, batch: int = 8) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(0).integers(0, vocab, (batch, seq), dtype=np.int32)}


def compiled_text(program: zj.Program, batch: Any) -> Any:
    return (
        program.lower(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch))
        .compile()
        .as_text()
    )


# 32 rows per device take more bytes than the table, and 8 take fewer.
@pytest.mark.by_default("2-8", "3-8", "3-32")
@pytest.mark.parametrize("seq", [8, 32])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_rematerialised_on_a_hybrid_mesh(capfd, stage, seq):
    compiled_text(build(tied, UNEVEN, HYBRID, stage=stage), ids(seq, UNEVEN))
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tied_table_is_reduced_once(stage):
    vocab, seq = 256, 64
    program = build(tied, vocab, {"fsdp": 8}, stage=stage)
    moved = hlo.collective_bytes(compiled_text(program, ids(seq, vocab)), least_bytes=64)
    # XLA for CPUs has no reduce_scatter: gradients are reduced by all_reduce, perhaps together with
    # the loss.
    assert 0 <= moved["all-reduce"] - 4 * (vocab * H + H * H) <= 8
    assert moved["all-to-all"] == 4 * (
        seq * H + vocab * H // 8
    )  # own rows, and a shard of the table


@pytest.mark.exhaustive
def test_a_tied_table_is_reduced_once_in_a_streamed_step():
    c = gpt.GPTConfig(vocab=256, seq=64, hidden=H, layers=2, heads=2, loss_tiles=0)
    config = zj.ZeroConfig(stage=3, params="pinned_host", opt_state="pinned_host")
    program = zj.build_train_step(gpt.layered_gpt(c), optax.sgd(0.1), config, zj.make_mesh(fsdp=8))
    tokens = ids(c.seq, c.vocab)["ids"]
    moved = hlo.collective_bytes(
        compiled_text(program, {"tokens": tokens, "targets": tokens}), unknown_trips=1
    )
    np.testing.assert_allclose(moved["all-reduce"], 4 * c.num_params, rtol=0.01)


@pytest.mark.by_default("3-8-hybrid", "3-32-hybrid", "2-8-fsdp")
@pytest.mark.parametrize("mesh", ["fsdp", "hybrid"])
@pytest.mark.parametrize("seq", [8, 32])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_equal_plain_autodiff(stage, seq, mesh):
    program = build(tied, UNEVEN, HYBRID if mesh == "hybrid" else {"fsdp": 8}, stage=stage)
    state, data = program.init(jax.random.key(0)), ids(seq, UNEVEN)
    before = jax.device_get(program.params(state))
    loss, grads = jax.value_and_grad(tied)(jax.device_put(before, jax.devices()[0]), data, None)
    state, metrics = program.step(state, data)
    np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=1e-6)
    for name, g in grads.items():
        np.testing.assert_allclose(
            (before[name] - program.params(state)[name]) / 0.1, g, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_indices_out_of_range_are_treated_as_by_the_look_up(mode):
    def loss(p: Any, batch: Any, key: Any) -> jax.Array:
        x = jnp.take(p["table"], batch["ids"], axis=0, mode=mode, fill_value=0)
        return jnp.mean((x @ p["w"]) ** 2)

    program = build(loss, 256, HYBRID, stage=3)
    state, data = program.init(jax.random.key(0)), ids(8, 256)
    data["ids"][:, ::3] = 999
    before = jax.device_get(program.params(state))
    grads = jax.grad(loss)(jax.device_put(before, jax.devices()[0]), data, None)
    state, _ = program.step(state, data)
    np.testing.assert_allclose(
        (before["table"] - program.params(state)["table"]) / 0.1, grads["table"], atol=2e-6
    )


def test_a_frequent_token_is_summed_in_float32():
    """1,024 ones sum to 1,024; in bfloat16 on one device they would sum to 256."""

    def loss(p: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.sum(p["table"][batch["ids"]])

    program = build(loss, 256, {"fsdp": 8}, stage=3, precision="bf16")
    assert sends_rows((256, H), (8, 128, 1), ("fsdp", None), program.mesh, ("fsdp",))
    state, data = program.init(jax.random.key(0)), {"ids": np.zeros((8, 128), np.int32)}
    _, metrics = program.step(state, data)
    np.testing.assert_allclose(float(metrics["grad_norm"]), 1024 * H**0.5, rtol=1e-3)


@pytest.mark.parametrize(
    ("table", "rows", "cotangent", "mesh", "expected"),
    [
        ((256, H), (8, 8), ("fsdp", None), {"fsdp": 8}, True),
        (
            (256, H),
            (8, 224),
            ("fsdp", None),
            {"fsdp": 8},
            False,
        ),  # 224 + 256 / 8 rows are as many as the table has
        ((256, H), (8, 223), ("fsdp", None), {"fsdp": 8}, True),
        ((256, H), (6, 8), ("fsdp", None), HYBRID, False),  # a batch that the devices do not divide
        ((256, 18), (8, 8), ("fsdp", None), HYBRID, False),  # a width that `fsdp` does not divide
        (
            (256, H),
            (8, 8),
            ("tensor", "fsdp"),
            {"fsdp": 4, "tensor": 2},
            False,
        ),  # the user's own split
    ],
)
def test_rows_are_sent_where_they_are_fewer(table, rows, cotangent, mesh, expected):
    assert sends_rows(table, (*rows, 1), cotangent, zj.make_mesh(**mesh), ("fsdp",)) == expected
