"""The traffic of tensor parallelism, counted in a traced function: ring bytes by collective."""

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax.activations import sent_over_tensor

ROWS, SEQ, HIDDEN = 2, 8, 16
RING = 3 / 4  # on 4 devices
SBH = 4 * ROWS * SEQ * HIDDEN * RING


def mesh_of(fsdp=1, tensor=4):
    return zj.make_mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor])


def sent(function, specs, *args):
    return sent_over_tensor(jax.make_jaxpr(function)(*args), specs, mesh_of())


X, UP, DOWN = jnp.ones((ROWS, SEQ, HIDDEN)), jnp.ones((HIDDEN, 32)), jnp.ones((32, HIDDEN))
WHOLE, COLUMN, ROW = (None, None, None), (None, "tensor"), ("tensor", None)


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


def test_a_row_product_is_reduced_and_so_is_the_cotangent_of_a_column_product():
    assert sent(mlp, [WHOLE, COLUMN, ROW], X, UP, DOWN) == {"all_reduce": 2 * SBH}
    both = jax.value_and_grad(lambda *args: jnp.tanh(mlp(*args)).sum(), argnums=(0, 1, 2))
    assert sent(both, [WHOLE, COLUMN, ROW], X, UP, DOWN) == {"all_reduce": 4 * SBH}
    assert sent(both, [WHOLE, (None, None), (None, None)], X, UP, DOWN) == {}


def test_cotangents_of_several_products_of_a_value_are_added_before_they_are_reduced():
    def two(x, a, b):
        return jnp.sum(jnp.tanh(x @ a) * (x @ b))

    assert sent(jax.grad(two), [WHOLE, COLUMN, COLUMN], X, UP, UP) == {"all_reduce": 2 * SBH}


def test_what_a_loop_sends_counts_in_each_iteration_and_what_is_computed_again_counts_again():
    def layers(x, up, down, wrap):
        body = wrap(lambda x, _: (x + mlp(jnp.tanh(x), up, down), None))
        return jnp.tanh(jax.lax.scan(body, x, length=5)[0]).sum()

    for wrap, each in (
        (lambda f: f, 4),
        (jax.checkpoint, 4),
        (lambda f: jax.checkpoint(lambda x, i: f(f(x, i)[0], i)), 10),
    ):
        grad = jax.value_and_grad(lambda x, up, down, wrap=wrap: layers(x, up, down, wrap))
        found = sent(grad, [WHOLE, COLUMN, ROW], X, UP, DOWN)
        assert found == {"all_reduce": pytest.approx(5 * each * SBH)}, each


CONFIG = gpt.GPTConfig(
    vocab=32, seq=64, hidden=128, layers=3, heads=4, tensor_axis="tensor", loss_tiles=0
)
L = CONFIG.layers
VECTORS = (
    2 * (6 * L + 2) / (2 * CONFIG.seq)
)  # gradients of norms, and of biases after a row product, are sums over tokens
RINGS = {"sequence_parallel": True, "tensor_overlap": True}
# Per layer, and for look-up and head, in units of s b h elements of a ring.
CASES = {
    "save": ({"stage": 1}, {"all_reduce": 2 * (4 * L + 2)}),
    "remat-sp": (
        {"stage": 1, "activations": "remat", "sequence_parallel": True, "num_microbatches": 2},
        {
            "all_gather": 2 * (6 * L + 2),
            "reduce_scatter": 2 * (5 * L + 1),
            "all_reduce": 2 * (2 + VECTORS),
        },
    ),
    "host-sp": (
        {
            "stage": 3,
            "activations": "pinned_host",
            "params": "pinned_host",
            "sequence_parallel": True,
        },
        {"all_gather": 6 * L + 2, "reduce_scatter": 5 * L + 1, "all_reduce": 2 + VECTORS},
    ),
    # For the head, x goes around once and so does its cotangent. The look-up's cotangent is
    # gathered.
    "save-rings": (
        {"stage": 1, **RINGS},
        {"permute": 10 * L + 2, "all_gather": 1, "all_reduce": 2 + VECTORS},
    ),
    "remat-rings": (
        {"stage": 3, "activations": "remat", **RINGS},
        {"permute": 11 * L + 2, "all_gather": 1, "all_reduce": 2 + VECTORS},
    ),
}


@pytest.mark.by_default("save", "remat-sp", "host-sp")
@pytest.mark.parametrize("case", CASES)
def test_a_programs_account_has_the_traffic_of_tensor(case):
    settings, expected = CASES[case]
    mesh = mesh_of(fsdp=2)
    program = zj.build_train_step(
        gpt.layered_gpt(CONFIG), optax.sgd(1e-3), zj.ZeroConfig(**settings), mesh
    )
    tokens = jax.ShapeDtypeStruct((4 * settings.get("num_microbatches", 1), CONFIG.seq), jnp.int32)
    report = program.memory({"tokens": tokens, "targets": tokens})
    found = report.collectives
    assert "over tensor  all_reduce" in str(report)
    sbh = 2 * CONFIG.seq * CONFIG.hidden * 4 * RING  # of a device's 2 rows
    # In addition, sums of the loss, [b, s].
    for name, n in expected.items():
        assert found[f"tensor_{name}"] / sbh == pytest.approx(
            n, abs=0.01 * sum(expected.values())
        ), name
    is_split = "sequence_parallel" in settings
    assert f"between layers: x[B_(data, fsdp), {'T_tensor, H' if is_split else '...'}]" in str(
        program.schedule
    )


def test_without_tensor_parallelism_nothing_is_said_of_it():
    program = zj.build_train_step(
        gpt.layered_gpt(CONFIG), optax.sgd(1e-3), zj.ZeroConfig(), mesh_of(fsdp=4, tensor=1)
    )
    tokens = jax.ShapeDtypeStruct((4, CONFIG.seq), jnp.int32)
    found = program.memory({"tokens": tokens, "targets": tokens}).collectives
    assert not any("tensor" in name for name in found)
