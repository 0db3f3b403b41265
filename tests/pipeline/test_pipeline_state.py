"""Users see the layers of a pipelined program in the order of the model, [L, ...]."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys
from single_layers import read_layers

import zerojax as zj

LAYERS = 8
HOST = "pinned_host"


def build(axes: dict[str, int], chunks: int, fields: dict[str, Any]) -> zj.Program:
    """Return a program whose optimizer keeps averages."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    model = dataclasses.replace(toys.small(), num_layers=LAYERS)
    config = zj.ZeroConfig(num_microbatches=4, pipe_chunks=chunks, **fields)
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    return zj.build_train_step(model, tx, config, zj.make_mesh(**axes, devices=devices))


def assert_same(actual: Any, expected: Any) -> None:
    """Compare two trees bit for bit, in the dtypes of `actual`."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(a.dtype))


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # stages, chunks, config
    "stage3": (2, 2, {"stage": 3}),
    "stage0": (2, 1, {"stage": 0}),
    "bf16": (4, 1, {"stage": 1, "precision": "bf16"}),
    "host": (2, 2, {"stage": 2, "precision": "bf16", "opt_state": HOST}),
    "fraction": (
        2,
        2,
        {"stage": 3, "opt_state": HOST, "opt_state_device_fraction": 0.75, "precision": "bf16"},
    ),
}


@pytest.mark.by_default("stage3")
@pytest.mark.parametrize("case", CASES)
def test_users_see_layers(case):
    stages, chunks, fields = CASES[case]
    program = build({"pipe": stages, "fsdp": 2}, chunks, fields)
    plain = build({"fsdp": 2}, 1, {"stage": 0})
    key = jax.random.key(0)
    assert_same(program.params(program.init(key)), plain.params(plain.init(key)))

    batch = toys.batches(1)[0]
    state, _ = jax.block_until_ready(program.step(program.init(key), batch))
    params = program.params(state)
    weights = read_layers(program, state, ema=False)
    assert_same(params, weights)
    assert_same(program.master_params(state), weights)
    averages = program.ema_params(state)
    assert_same(averages, read_layers(program, state, ema=True))
    stack = params["blocks"]["w"]
    assert stack.shape == (LAYERS, toys.HIDDEN, toys.HIDDEN)
    assert stack.addressable_shards[0].data.shape[0] == LAYERS // stages
    masters = program.master_params(state)["blocks"]["w"]
    assert masters.sharding.memory_kind == ("device" if "opt_state" not in fields else HOST)

    loss, grads = program.grads(state, batch)
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, params)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)

    # Parameters in the order of the layers take the place of those in a state.
    assert float(program.eval(state, batch)) == pytest.approx(float(loss), rel=1e-5)
    same = dataclasses.replace(state, params=params)
    assert_same(program.params(same), params)
    assert_same(read_layers(program, same, ema=False), weights)
    assert float(program.eval(same, batch)) == float(program.eval(state, batch))
    averaged = float(program.eval(dataclasses.replace(state, params=averages), batch))
    in_records = jax.tree.map(
        lambda a, p: a if a.shape == p.shape else program.layout.order.widen(np.asarray(a)),
        averages,
        state.params,
    )
    in_records = jax.device_put(in_records, program.shardings.params)
    wide = dataclasses.replace(state, params=in_records)
    assert averaged == float(program.eval(wide, batch)) != float(loss)
    _, metrics = jax.block_until_ready(program.step(same, batch))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert not stack.is_deleted()


def test_a_stack_of_another_length_is_refused():
    program = build({"pipe": 2, "fsdp": 2}, 2, {"stage": 3})
    state = program.init(jax.random.key(0))
    params = program.params(state)
    params["blocks"]["w"] = params["blocks"]["w"][:4]
    with pytest.raises(ValueError, match=r"params.*\(4, 16, 16\).*another model or config"):
        program.eval(dataclasses.replace(state, params=params), toys.batches(1)[0])
