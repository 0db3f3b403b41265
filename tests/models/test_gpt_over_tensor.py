"""The example's GPT over `tensor` equals one device, with its vocabulary split.

Sizes that do not divide are refused by name.
"""

import dataclasses
import math

import gpt
import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

CONFIG = gpt.GPTConfig(layers=2, hidden=16, heads=4, seq=8, vocab=24, tensor_axis="tensor")
HOST = {
    "params": "pinned_host",
    "grads": "pinned_host",
    "opt_state": "pinned_host",
    "activations": "pinned_host",
}


def build(c, axes, make=gpt.layered_gpt, **fields):
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    return zj.build_train_step(make(c), optax.adamw(1e-2), zj.ZeroConfig(**fields), mesh)


def trained(c, axes, make=gpt.layered_gpt, **fields):
    rows = np.random.default_rng(0).integers(0, c.vocab, (5, 8, c.seq + 1)).astype(np.int32)
    program = build(c, axes, make, **fields)
    data = [{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in rows]
    losses, state = toys.run(program, program.init(jax.random.key(0)), data)
    return losses, jax.device_get(program.params(state))


@pytest.mark.exhaustive  # by default test_flax.py trains at stage 3
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss_tiles", [0, 3])
@pytest.mark.parametrize(
    ("axes", "make", "fields"),
    [
        ({"fsdp": 1, "tensor": 4}, gpt.layered_gpt, {"stage": 0}),
        ({"fsdp": 2, "tensor": 2}, gpt.layered_gpt, {"stage": 1}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, gpt.layered_gpt, {"stage": 2}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, gpt.layered_gpt, {"stage": 3}),
        ({"fsdp": 2, "tensor": 2}, gpt.unrolled_gpt, {"stage": 3}),
        ({"fsdp": 2, "tensor": 2}, gpt.layered_gpt, {"stage": 3, "num_microbatches": 2}),
        ({"fsdp": 2, "tensor": 2}, gpt.layered_gpt, {"stage": 3, **HOST}),
    ],
    ids=["stage_0", "stage_1", "stage_2", "stage_3", "unrolled", "microbatches", "streamed"],
)
def test_a_gpt_over_tensor_equals_one_device(axes, make, fields, loss_tiles, tied):
    c = dataclasses.replace(CONFIG, tied=tied, loss_tiles=loss_tiles)
    losses, params = trained(c, axes, make, **fields)
    expected, whole = trained(dataclasses.replace(c, tensor_axis=None), {"fsdp": 1}, make, stage=0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("make", [gpt.layered_gpt, gpt.unrolled_gpt])
def test_heads_that_do_not_divide_are_refused_when_the_loss_is_traced(make):
    c = dataclasses.replace(CONFIG, heads=6, hidden=24)
    mesh, tokens = zj.make_mesh(fsdp=2, tensor=4), jax.ShapeDtypeStruct((8, c.seq), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    message = "heads=6 do not divide by tensor=4, .* choose a multiple of 4 heads, or a tensor axis that divides them, such as 3"
    with pytest.raises(ValueError, match=message):
        zj.build_train_step(make(c), optax.sgd(1e-2), zj.ZeroConfig(), mesh, batch=batch)


def test_a_vocabulary_that_does_not_divide_is_refused():
    c = dataclasses.replace(CONFIG, vocab=26)
    with pytest.raises(ValueError, match=r"vocab=26 does not divide by tensor=4, .* pad it to 28"):
        gpt.check_tensor(c, 4)
    with pytest.raises(
        ValueError,
        match=r"\['token'\]\['embedding'\]: dim 0 of shape \(26, 16\) does not divide by 4 .*to 28",
    ):
        build(c, {"fsdp": 2, "tensor": 4})
    gpt.check_tensor(c, 2)
