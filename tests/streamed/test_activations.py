"""What a layer saves: same derivatives, the same masks on recompute, no inner part of attention."""

import dataclasses

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj
from zerojax.activations import MODES
from zerojax.models import Given
from zerojax.streamed.residuals import plan_layer

HOST = "pinned_host"
C = gpt.GPTConfig(layers=2, hidden=32, heads=2, seq=24, vocab=32, dropout=0.2)


def tokens(count, batch=8):
    random = np.random.default_rng(0)
    draw = lambda: random.integers(0, C.vocab, (batch, C.seq))  # noqa: E731
    return [{"tokens": draw(), "targets": draw()} for _ in range(count)]


def train(model, config, data, tx=None):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    program = zj.build_train_step(model, tx or optax.adamw(1e-2), config, mesh)
    losses, state = toys.run(program, program.init(jax.random.key(0)), data)
    return np.asarray(losses, np.float32), jax.device_get(program.params(state))


def dropping():
    """Return a model with dropout before and after products, batches and an optimizer."""

    def dropped(x, key, number):
        if key is None:
            return x
        return jnp.where(
            jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape), x / 0.8, 0
        )

    def block(p, x, key):
        return x + dropped(jnp.tanh(dropped(x, key, 0) @ p["w"]), key, 1)

    return (
        dataclasses.replace(toys.small(), block=block, stochastic=True),
        toys.batches(3),
        optax.sgd(0.5),
    )


@pytest.mark.by_default(HOST)
@pytest.mark.parametrize("activations", ["selective", HOST])
def test_dropout_masks_agree_on_recompute(activations):
    """A mask that differed between forward and backward would change the gradients.

    The losses would then differ after a step. Gradient descent is used because a key bias has no
    gradient, and Adam would turn its rounding into a step.
    """
    model, data, tx = (
        (gpt.layered_gpt(C), tokens(3), optax.sgd(0.5))
        if activations == "selective"
        else dropping()
    )
    fields = {"stage": 3, "num_microbatches": 2}
    expected, params = train(model, zj.ZeroConfig(**fields), data, tx)
    config = zj.ZeroConfig(**fields, activations=activations, gather_ahead=True, params=HOST)
    losses, after = train(model, config, data, tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    toys.assert_trees_close(after, params, atol=1e-6)


def traced(mode, saved=(), offloaded=(), block=None):
    model = gpt.layered_gpt(C)
    x = jax.random.normal(jax.random.key(1), (4, C.seq, C.hidden))
    key = jax.random.key(2)
    params = model.init_block(jax.random.key(0))
    block = block or model.block
    layer = plan_layer(
        lambda p, x, key, given: (block(p, x, key), None),
        params,
        x,
        key,
        Given(),
        mode,
        saved,
        offloaded,
    )
    return layer, block, (params, x, key)


@pytest.mark.by_default("selective")  # keeps some values and recomputes the rest
@pytest.mark.parametrize("mode", MODES)
def test_a_layers_derivative_given_what_it_keeps(mode):
    layer, block, (params, x, key) = traced(mode)
    dy = jax.random.normal(jax.random.key(3), x.shape)

    def plain(params, x, dy):
        y, derivative = jax.vjp(lambda p, x: block(p, x, key), params, x)
        return y, derivative(dy)

    y, _, kept = jax.jit(layer.forward)(params, x, key, Given())
    expected_y, expected = jax.jit(plain)(params, x, dy)
    np.testing.assert_allclose(y, expected_y, rtol=1e-6, atol=1e-6)
    backward = jax.jit(layer.backward)
    actual = backward(params, x, key, Given(), kept, dy, None)
    toys.assert_trees_close(actual, expected, atol=2e-5)
    # Kept values are used, not recomputed: another value gives another derivative.
    if kept:
        wrong = backward(
            params,
            x,
            key,
            Given(),
            [a + 1 if a.dtype == jnp.float32 else ~a for a in kept],
            dy,
            None,
        )
        assert (
            max(
                float(jnp.abs(a - b).max())
                for a, b in zip(jax.tree.leaves(wrong), jax.tree.leaves(actual), strict=True)
            )
            > 1e-2
        )


def test_selective_keeps_no_scores_and_remat_keeps_nothing():
    scores = 4 * C.heads * C.seq * C.seq

    def sizes(mode):
        return [a.size for a in traced(mode)[0].shapes]

    x = 4 * C.seq * C.hidden
    products = [3 * x, x, x, 4 * x]  # qkv, attention's output, its projection, the hidden layer
    assert sizes("save") == [3 * x, scores, x, x, 4 * x]
    assert sizes("selective") == products
    assert sizes("remat") == []


def test_nothing_of_the_parameters_is_kept():
    """A transposed or scaled weight is as large as the gathered layer.

    Keeping it would break ZeRO-3's bound.
    """

    def block(p, x, key):
        del key
        w = (2 * p["w"]).T
        return x + jnp.tanh(x @ w) @ p["w"]

    params, x = {"w": jnp.ones((16, 16))}, jnp.ones((64, 16))
    for mode in MODES:
        layer = plan_layer(
            lambda p, x, key, given: (block(p, x, key), None),
            params,
            x,
            None,
            Given(),
            mode,
            (),
            (),
        )
        assert all(a.shape == (64, 16) for a in layer.shapes), mode


def named_model():
    def init_block(key):
        w1, w2 = (
            toys.draw(key, (toys.HIDDEN, toys.INNER)) / 4,
            toys.draw(key, (toys.INNER, toys.HIDDEN), 1) / 6,
        )
        return {"w1": w1, "w2": w2}

    def block(p, x, key):
        hidden = checkpoint_name(jax.nn.gelu(x @ p["w1"]), "hidden")
        return x + checkpoint_name(hidden @ p["w2"], "out")

    return dataclasses.replace(toys.small(), init_block=init_block, block=block)


def test_named_tensors_are_kept_where_asked():
    data = toys.batches(4)
    expected, params = train(named_model(), zj.ZeroConfig(stage=3), data)
    for fields in ({"saved_names": ("hidden",)}, {"offloaded_names": ("hidden",), "params": HOST}):
        losses, after = train(
            named_model(), zj.ZeroConfig(stage=3, activations="remat", **fields), data
        )
        np.testing.assert_allclose(losses, expected, rtol=3e-7)
        toys.assert_trees_close(after, params, atol=1e-6)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(stage=3, activations="remat", offloaded_names=("hidden",))
    program = zj.build_train_step(named_model(), optax.adamw(1e-2), config, mesh)
    abstract = program._step.abstract_scratch(program.abstract_batch(data[0]))
    (hidden,) = abstract["residuals"]
    assert hidden.shape == (toys.LAYERS, toys.BATCH, toys.SEQ, toys.INNER)
    assert hidden.sharding.memory_kind == HOST


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    config = zj.ZeroConfig(stage=3, activations="remat", saved_names=("hiden",))
    with pytest.raises(ValueError, match=r"\['hiden'\].*it marks \['hidden', 'out'\]"):
        zj.build_train_step(
            named_model(), optax.adamw(1e-2), config, zj.make_mesh(), batch=toys.batches(1)[0]
        )


def test_layer_inputs_on_disk_are_counted_there_beside_named_tensors(tmp_path):
    """Named values kept in host memory do not move a layer's input from disk to host memory."""
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(
        stage=3, activations="nvme", offloaded_names=("hidden",), swap_dir=str(tmp_path)
    )
    with zj.build_train_step(named_model(), optax.adamw(1e-2), config, mesh) as program:
        assert toys.layer_schedule(program).tiers["activations"] == "nvme"


@pytest.mark.parametrize("names", ["saved_names", "offloaded_names"])
def test_a_layers_input_is_on_disk_beside_named_tensors(names, tmp_path):
    """A named value is not on disk, whichever of the layer's saved values comes last."""
    data = toys.batches(3)
    expected, params = train(named_model(), zj.ZeroConfig(stage=3), data)
    config = zj.ZeroConfig(
        stage=3, activations="nvme", swap_dir=str(tmp_path), **{names: ("hidden",)}
    )
    losses, after = train(named_model(), config, data)
    np.testing.assert_allclose(losses, expected, rtol=3e-7)
    toys.assert_trees_close(after, params, atol=1e-6)
