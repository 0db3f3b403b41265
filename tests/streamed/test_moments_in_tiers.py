"""Moments in bfloat16: the same bits in every tier, half the bytes, unchanged by skipped steps."""

import functools

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.state.train_state import is_stored

HOST, DISK = matrix.HOST, matrix.DISK
ALL_ON_DISK = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}


def build(tmp_path, fields, axes=None, model=None, tx=None):
    axes = axes or {"fsdp": 4}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    config = zj.ZeroConfig(
        **{"stage": 3, "moments": "bfloat16", "swap_dir": str(tmp_path), **fields}
    )
    return zj.build_train_step(
        model or toys.layered(tensor="tensor" in axes), tx or toys.optimizer(), config, mesh
    )


def train(program, steps=4):
    """Return the losses, the float32 weights, and the moments unless they are on disk."""
    with program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(steps))
        weights = [
            np.asarray(a) for _, tree in program.iter_params(state) for a in jax.tree.leaves(tree)
        ]
        moments = jax.device_get(
            [
                a
                for a in jax.tree.leaves(state.opt_state, is_leaf=is_stored)
                if isinstance(a, jax.Array)
            ]
        )
        return np.asarray(losses, np.float32), weights, moments


def assert_same(run, expected, moments=True):
    np.testing.assert_array_equal(run[0], expected[0])
    for a, b in zip(run[1], expected[1], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(run[2], expected[2], strict=True) if moments else ():
        np.testing.assert_array_equal(a, b)


def moved(program, reference):
    """Return the fraction of the moments' elements that differ, and their largest difference.

    The difference is relative to the larger element.
    """
    pairs = [
        (a.astype(np.float32), b.astype(np.float32))
        for a, b in zip(program[2], reference[2], strict=True)
        if a.ndim
    ]
    differs = sum((a != b).sum() for a, b in pairs) / sum(a.size for a, _ in pairs)
    return differs, max((np.abs(a - b) / np.maximum(np.abs(b), 1e-30)).max() for a, b in pairs)


# --- the same bits --------------------------------------------------------------------------------


# by default `test_nvme_host_update.py` compares the bits of memory and disk
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "tiers"),
    [
        pytest.param(
            "fp32",
            {"params": HOST, "grads": HOST, "opt_state": HOST, "prefetch_distance": 2},
            marks=pytest.mark.exhaustive,
        ),
        ("fp32", {"params": HOST, "opt_state": HOST, "update": "in_backward"}),
        ("bf16", ALL_ON_DISK),
        ("fp16", {"opt_state": DISK, "io": "tensorstore"}),
    ],
    ids=["host", "in_backward", "disk", "tensorstore"],
)
def test_tiers_agree_bit_for_bit(precision, tiers, tmp_path):
    fields = {"precision": precision, "activations": "remat"}
    expected = train(build(tmp_path, fields | {"opt_state": HOST}))
    assert_same(
        train(build(tmp_path, fields | tiers)), expected, moments=DISK not in tiers.values()
    )


# by default `test_nvme_host_update.py` compares them; one of its states has bfloat16 moments
@pytest.mark.exhaustive
@pytest.mark.usefixtures("default_fusions")
@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"precision": "fp32", "update": "in_backward"}, ("params", "opt_state")),
        ({"precision": "bf16"}, ("params", "grads", "opt_state")),
    ],
    ids=["fp32_in_backward", "bf16"],
)
def test_update_on_the_host_agrees_in_its_tiers_bit_for_bit(fields, kinds, tmp_path):
    in_memory, on_disk = (
        train(build(tmp_path, fields | {"update_on": "host"} | dict.fromkeys(kinds, tier)))
        for tier in (HOST, DISK)
    )
    assert_same(on_disk, in_memory, moments=False)


@functools.cache
def one_step():
    """Return the results of a resident step on 4 devices."""
    return train(build(None, {"swap_dir": None}), steps=1)


@pytest.mark.by_default("streamed")
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({}, {"fsdp": 1}),
        pytest.param({"stage": 1}, {"fsdp": 4}, marks=pytest.mark.exhaustive),
        ({}, {"fsdp": 2, "tensor": 2}),
        ({"params": HOST, "grads": HOST, "opt_state": HOST, "num_microbatches": 1}, {"fsdp": 4}),
        ({"params": HOST, "opt_state": HOST, "update_on": "host"}, {"fsdp": 4}),
    ],
    ids=["one_device", "stage_1", "tensor", "streamed", "host"],
)
def test_sharding_and_place_move_few_moments_in_a_step(fields, axes, tmp_path):
    """Gradients in float32 differ in the last bits.

    A few in 1000 of them have different leading bits or are next to a threshold.
    """
    expected = one_step()
    program = train(build(tmp_path, fields, axes), steps=1)
    differs, most = moved(program, expected)
    assert differs < 5e-3
    assert most < 2.0**-6
    for a, b in zip(program[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(np.abs(b).max(), 1))


@pytest.mark.exhaustive  # by default `test_host_update.py` runs lion on the host
@pytest.mark.parametrize("name", ["lion", "momentum"])
def test_other_optimizers_on_the_host_with_disk(name, tmp_path):
    tx = {"lion": optax.lion(1e-3), "momentum": optax.sgd(0.05, 0.9)}[name]
    expected = train(build(tmp_path, {"opt_state": HOST}, tx=tx))
    on_host = train(build(tmp_path, ALL_ON_DISK | {"update_on": "host"}, tx=tx))
    np.testing.assert_allclose(on_host[0], expected[0], rtol=1e-4)


def test_losses_stay_near_those_of_float32_moments(tmp_path):
    """The results differ from float32 moments, so the option has an effect."""
    model, tx = toys.small(), optax.adamw(1e-2)
    exact = train(build(tmp_path, {"moments": "float32"}, model=model, tx=tx), steps=10)[0]
    rounded = train(build(tmp_path, {}, model=model, tx=tx), steps=10)[0]
    assert 0 < np.abs(rounded - exact).max() < 2e-3 * exact[0]


# --- a skipped step -------------------------------------------------------------------------------


@pytest.mark.by_default("streamed")
@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16"},
        {"precision": "fp16", "params": HOST, "grads": HOST, "opt_state": HOST},
        {
            "precision": "fp16",
            "params": HOST,
            "grads": HOST,
            "opt_state": HOST,
            "update_on": "host",
        },
        {"precision": "bf16", "opt_state": HOST, "update": "in_backward"},
    ],
    ids=["resident", "streamed", "host", "in_backward"],
)
def test_a_skipped_step_leaves_the_state_as_it_was(fields, tmp_path):
    with build(tmp_path, fields, model=toys.small(), tx=optax.adamw(1e-2)) as program:
        state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
        kept = jax.tree.map(np.array, (program.params(state), state.master, state.opt_state))
        state, metrics = program.step(state, toys.batches(2)[1] | {"weight": np.float32(np.inf)})
        assert float(metrics["skipped_steps"]) == 1
        after = jax.tree.map(np.array, (program.params(state), state.master, state.opt_state))
        jax.tree.map(np.testing.assert_array_equal, after, kept)
        dtypes = {a.dtype for a in jax.tree.leaves(state.opt_state) if a.ndim}
        assert dtypes == {jnp.dtype("bfloat16")}
        state, metrics = program.step(state, toys.batches(1)[0])  # and the next step counts
        assert float(metrics["skipped_steps"]) == 1
        assert int(state.opt_state.step) == 2


# --- bytes ----------------------------------------------------------------------------------------


def plain_layers(num_layers=3, width=128, inner=64):
    """Return a model of one matrix per layer.

    Its shards on 4 devices, even of moments with 2 bytes per element, fill blocks of 4096 bytes.
    """

    def make(rows, columns):
        return lambda key: {"w": toys.draw(key, (rows, columns)) / 8}

    def head(p, p_embed, x, batch, key):
        return jnp.mean(jnp.square(x @ p["w"]))

    return zj.LayeredModel(
        num_layers,
        make(width, width),
        lambda p, batch, key: batch["x"] @ p["w"],
        make(width, inner),
        lambda p, x, key: x + jnp.tanh(x @ p["w"]) @ p["w"].T,
        make(width, width),
        head,
    )


def elements(num_layers=3, width=128, inner=64):
    """Return the parameters per device, on 4 devices: those in layers, and the unstacked ones."""
    return num_layers * width * inner // 4, 2 * width * width // 4


BATCH = {"x": np.ones((8, 128), np.float32)}


@pytest.mark.by_default("device-bfloat16", "nvme-bfloat16")
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("tier", ["device", HOST, DISK])
def test_memory_and_records_hold_2_bytes_a_moment(moments, tier, tmp_path):
    size, (layers, others) = {"float32": 4, "bfloat16": 2}[moments], elements()
    fields = {"opt_state": tier, "moments": moments}
    with build(tmp_path, fields, model=plain_layers(), tx=optax.adamw(1e-3)) as program:
        report = program.memory(jax.tree.map(jnp.asarray, BATCH))
        counts = 4 * sum(
            not a.shape for a in jax.tree.leaves(program.layout.abstract_state.opt_state)
        )
        assert report.tiers[tier]["opt_state"] == 2 * (layers + others) * size + (
            counts if tier == "device" else 0
        )
        crossing = 0 if tier == "device" else 2 * (layers + others) * size
        assert report.host_link == {"to_device": crossing, "to_host": crossing}
        state = program.init(jax.random.key(0))
        state, _ = program.step(state, BATCH)
        arrays = [a for a in jax.tree.leaves(state.opt_state, is_leaf=is_stored) if a.shape]
        assert {str(a.dtype) for a in arrays} == {moments}
        if tier == DISK:
            program.swap.engine.flush()
            files = list(tmp_path.rglob("opt_state*/*/c.*"))
            assert sum(path.stat().st_size for path in files) == 4 * crossing
        else:
            assert (
                sum(a.addressable_shards[0].data.nbytes for a in arrays)
                == 2 * (layers + others) * size
            )
