"""Closed forms, and the account of a program against what is really held."""

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import memory


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, lambda p, n: 16 * p),
        (1, lambda p, n: 4 * p + 12 * p / n),
        (2, lambda p, n: 2 * p + 14 * p / n),
        (3, lambda p, n: 16 * p / n),
    ],
)
def test_model_states_are_the_papers(stage, expected):
    for shards in (1, 4, 64, 1024):
        total = memory.model_state_bytes(7_500_000_000, stage, shards)["total"]
        np.testing.assert_allclose(total, expected(7.5e9, shards), rtol=1e-12)


def test_model_states_of_the_papers_figure():
    """ZeRO, figure 1: 7.5 B parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [memory.model_state_bytes(7_500_000_000, stage, 64)["total"] / 1e9 for stage in range(4)]
    np.testing.assert_allclose(gigabytes, [120, 31.4, 16.6, 1.9], atol=0.06)


def test_bytes_of_a_parameter_follow_from_the_precision():
    assert memory.state_bytes("bf16").total == 16
    assert memory.state_bytes("fp16").total == 16
    assert memory.state_bytes("fp32").total == 16  # 4 + 4 + 8: no master
    assert memory.state_bytes("bf16", keeps_fp32_grads=True).total == 20  # ZeRO-Infinity
    assert memory.state_bytes("bf16", num_microbatches=4).total == 18  # accumulated in float32
    assert memory.state_bytes("bf16", moments=4).total == 12  # one moment


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_collective_elements_are_the_papers(stage, passes):
    elements = memory.collective_elements(1_000_000, stage, 64)
    np.testing.assert_allclose(sum(elements.values()), passes * 1e6 * 63 / 64)


def test_transformer_formulas():
    assert memory.transformer_params(96, 12288) == 12 * 96 * 12288**2  # GPT-3's blocks, 174 B
    assert memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=True) == 2 * 2048 * 12288 * 96
    full = memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=False)
    np.testing.assert_allclose(full, 96 * 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288))
    assert memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=False, tensor=8) < full / 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_account_equals_what_devices_hold(stage, precision):
    config = zj.ZeroConfig(stage=stage, precision=precision, num_microbatches=2)
    program = zj.build_train_step(toys.layered(), toys.optimizer(), config, zj.make_mesh(data=2, fsdp=4))
    state = program.init(jax.random.key(0))
    batch = program.shard_batch(toys.batches(1)[0])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state, batch)))
    report = program.memory(batch)
    assert report.argument_bytes == held
    assert set(report.tiers) == {"device", "pinned_host", "nvme"}
    assert report.num_params == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert "opt_state" in str(report)


def test_activations_are_counted_from_the_residuals():
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)

    def kept(activations, layers):
        c = gpt.GPTConfig(layers=layers, hidden=64, heads=4, seq=32, vocab=64)
        config = zj.ZeroConfig(stage=3, activations=activations)
        program = zj.build_train_step(gpt.layered_gpt(c), optax.adam(1e-3), config, zj.make_mesh(fsdp=8))
        return program.memory({"tokens": tokens, "targets": tokens}).tiers["device"]["activations"]

    layer_input = 2 * 32 * 64 * 4  # sequences a device x seq x hidden x float32
    index = 4 / 8  # the scan keeps each layer's index; counted as split, like all that is kept
    assert kept("remat", 8) - kept("remat", 4) == pytest.approx(4 * (layer_input + index), abs=4)
    assert kept("save", 8) - kept("save", 4) > 8 * 4 * layer_input


def test_gathered_is_one_layer():
    c = gpt.GPTConfig(layers=4, hidden=64, heads=4, seq=32, vocab=64)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8))
    gathered = program.memory({"tokens": tokens, "targets": tokens}).tiers["device"]["gathered"]
    assert gathered == 4 * (12 * 64**2 + 13 * 64)
