"""Steps with the nvme tier compiled for H200s that are not there: what is on disk is in no memory of the program."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot

pytestmark = pytest.mark.xdist_group("h200")
HIDDEN, LAYERS, GPUS = 1024, 12, 8
LAYER_PARAMS = 2 * HIDDEN**2


def layered():
    return zj.LayeredModel(
        LAYERS,
        lambda key: jax.random.normal(key, (HIDDEN,)),
        lambda p, batch, key: batch * p,
        lambda key: {name: jax.random.normal(key, (HIDDEN, HIDDEN)) for name in "ab"},
        lambda p, x, key: x + jnp.tanh(x @ p["a"]) @ p["b"],
        lambda key: jnp.ones(()),  # a number, and its moments
        lambda p, p_embed, x, batch, key: p * jnp.mean(jnp.square(x.astype(jnp.float32))),
    )


@pytest.mark.parametrize("update", ["after_backward", "in_backward"])
@pytest.mark.parametrize("update_on", ["device", "host"])
def test_a_device_holds_a_few_layers_of_a_state_on_disk(update_on, update, tmp_path):
    tiers = dict.fromkeys(("params", "grads", "opt_state", "activations"), "nvme")
    config = zj.ZeroConfig(precision="bf16", update=update, update_on=update_on, swap_dir=str(tmp_path), **tiers)
    program = zj.build_train_step(layered(), optax.adam(1e-3), config, aot.gpu_mesh("h200", gpus_per_host=GPUS, fsdp=GPUS))
    batch = jax.ShapeDtypeStruct((GPUS, HIDDEN), jnp.float32)
    used, report = program.lower(batch).compile().memory_analysis(), program.memory(batch)
    assert used.host_argument_size_in_bytes == used.host_temp_size_in_bytes == 0
    assert used.argument_size_in_bytes <= report.argument_bytes + 1024  # tokens of what is on disk
    state = report.tiers["nvme"]["opt_state"]
    assert state > LAYERS * 12 * LAYER_PARAMS / GPUS
    gathered = 2 * LAYER_PARAMS
    assert used.temp_size_in_bytes < 3 * gathered < state / 2  # a layer, its gradient, and what is on its way
