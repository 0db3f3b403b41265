"""Steps of a model with experts, on meshes with `expert`, equal a dense loop on one device."""

import functools
from typing import Any

import expert_layers as layers
import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
STEPS = 3
MESHES: dict[str, dict[str, int]] = {
    "fsdp4": {"fsdp": 4},
    "fsdp2_expert2": {"fsdp": 2, "expert": 2},
    "expert4_context2": {"fsdp": 1, "expert": 4, "context": 2},
    "fsdp2_expert2_context2": {"fsdp": 2, "expert": 2, "context": 2},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data2_fsdp2_expert2": {"data": 2, "fsdp": 2, "expert": 2},
    "expert8": {"fsdp": 1, "expert": 8},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "save": {"stage": 3, "activations": "save"},
    "selective": {"stage": 3, "activations": "selective"},
    "remat": {"stage": 3, "activations": "remat"},
    "stage_1": {"stage": 1},
    "reduce_once": {"stage": 1, "num_microbatches": 2, "reduce_every": "step"},
    "host": {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": "selective"},
    "host_activations": {"params": HOST, "opt_state": HOST, "activations": HOST},
    "disk": {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": "save"},
    "updated_on_host": {"opt_state": HOST, "update_on": "host"},
    "sequence_parallel": {"stage": 3, "sequence_parallel": True, "activations": "selective"},
    "sequence_parallel_host": {
        "params": HOST,
        "opt_state": HOST,
        "sequence_parallel": True,
        "activations": "save",
    },
}


def build(layer: Any, axes: dict[str, int], **fields: Any) -> zj.Program:
    size = int(np.prod(list(axes.values())))
    mesh = zj.make_mesh(**axes, devices=jax.devices()[:size])
    # A large eps: gradients that are almost 0 would otherwise differ in sign.
    tx = optax.adam(1e-2, eps=1e-2)
    return zj.build_train_step(layers.model(layer), tx, zj.ZeroConfig(**fields), mesh)


def train(layer: Any, axes: dict[str, int], **fields: Any) -> tuple[list[float], Any]:
    """Return the losses of some steps and the weights after them."""
    with build(layer, axes, **fields) as program:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in layers.batches(STEPS):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            assert float(metrics["dropped_fraction"]) == 0
        params = [jax.device_get(tree) for _, tree in program.iter_params(state)]
    return losses, params


@functools.cache
def expected(count: int) -> tuple[list[float], Any]:
    return train(layers.one_by_one, {"fsdp": 1}, num_microbatches=count)


@pytest.mark.by_default("remat-fsdp4", "selective-fsdp2_expert2", "host-expert4_context2")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config", CONFIGS)
def test_steps_equal_a_dense_loop(config, mesh, tmp_path):
    if "sequence_parallel" in config and "tensor" not in mesh:
        pytest.skip("sequence parallelism needs tensor")
    fields = dict(CONFIGS[config])
    if config == "disk":
        fields["swap_dir"] = str(tmp_path)
    losses, params = train(functools.partial(zj.moe, capacity_factor=None), MESHES[mesh], **fields)
    wanted_losses, wanted_params = expected(fields.get("num_microbatches", 1))
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
    toys.assert_trees_close(params, wanted_params, atol=5e-6)


@pytest.mark.parametrize("mesh", ["fsdp2_expert2", "fsdp2_expert2_context2"])
@pytest.mark.exhaustive
def test_sums_of_experts_gradients_are_kept_to_the_end_of_the_step(mesh, caplog):
    program = build(zj.moe, MESHES[mesh], **CONFIGS["reduce_once"])
    program.lower(layers.batches(1)[0])
    assert "is reduced in each microbatch" not in caplog.text


def test_a_batch_that_does_not_divide_is_evaluated_as_it_is():
    (batch,) = layers.batches(1, rows=5)
    found = []
    for layer, axes in (
        (layers.one_by_one, {"fsdp": 1}),
        (functools.partial(zj.moe, capacity_factor=None), MESHES["fsdp2_expert2"]),
    ):
        with build(layer, axes) as program:
            metrics = program.eval(program.init(jax.random.key(0)), batch)
            found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)
