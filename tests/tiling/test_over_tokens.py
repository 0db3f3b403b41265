"""Functions of single tokens, computed over tiles of the tokens, equal the whole ones."""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import hlo
from zerojax.tiling import over_tokens_and_sums

HOST, DISK = "pinned_host", "nvme"
LENGTH = 8


def init_block(key: jax.Array) -> Any:
    return {
        "scale": jnp.ones(toys.HIDDEN),
        "up": toys.draw(key, (toys.HIDDEN, toys.INNER)) / 4,
        "down": toys.draw(key, (toys.INNER, toys.HIDDEN), 1) / 6,
    }


def mlp(p: Any, x: jax.Array) -> jax.Array:
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
    return jax.nn.gelu(y @ p["up"]) @ p["down"]


def model(num_tiles: int, tensor: bool = False) -> zj.LayeredModel:
    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        mixed = jnp.cumsum(x, 1) / LENGTH  # in place of attention
        x, mixed = zj.over_tokens(
            lambda xs: (xs[0] + mlp(p, xs[1]), xs[1]), (x, mixed), num_tiles=num_tiles
        )
        return (x + 0.1 * mixed).astype(x.dtype)

    specs = {"scale": toys.P(), "up": toys.P(None, "tensor"), "down": toys.P("tensor", None)}
    return zj.LayeredModel(
        toys.LAYERS,
        toys.init_embed,
        toys.embed,
        init_block,
        block,
        toys.init_head,
        toys.head,
        specs={"block": specs} if tensor else None,
    )


def data(count: int) -> list[Any]:
    found = toys.batches(count)
    rng = np.random.default_rng(0)
    for batch in found:
        for name in ("tokens", "targets"):
            batch[name] = rng.integers(0, toys.VOCAB, (toys.BATCH, LENGTH), np.int32)
    return found


CASES = {
    "plain": ({"fsdp": 1}, {}),
    "save": ({"fsdp": 4}, {"activations": "save"}),
    "selective": ({"fsdp": 4}, {"activations": "selective", "num_microbatches": 2}),
    "step": (
        {"fsdp": 4},
        {"activations": "remat", "num_microbatches": 2, "reduce_every": "step", "stage": 1},
    ),
    "everything": ({"fsdp": 2}, {"activations": "everything"}),
    "host": ({"fsdp": 2}, {"params": HOST, "grads": HOST, "opt_state": HOST}),
    "disk": (
        {"fsdp": 2},
        {**dict.fromkeys(("params", "grads", "opt_state", "activations"), DISK)},
    ),
    "context": ({"fsdp": 2, "context": 2}, {"activations": "selective"}),
    "tensor": ({"fsdp": 2, "tensor": 2}, {"activations": "selective"}),
    "sequence_parallel": (
        {"fsdp": 2, "tensor": 2},
        {"activations": "selective", "sequence_parallel": True},
    ),
    "pipe": ({"pipe": 3, "fsdp": 2}, {"stage": 1, "num_microbatches": 4}),
}


def train(num_tiles: int, axes: dict[str, int], fields: dict[str, Any], folder: Any) -> Any:
    size = math.prod(axes.values())
    if DISK in fields.values():
        fields = {**fields, "swap_dir": folder}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[:size])
    config = zj.ZeroConfig(**{"stage": 3, **fields})
    built = model(num_tiles, "tensor" in axes)
    with zj.build_train_step(built, optax.adamw(1e-2), config, mesh) as program:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in data(3):
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses.append(float(metrics["loss"]))
        losses.append(float(program.eval(state, data(1)[0])))
        is_on_disk = program.config.params == DISK
        params = None if is_on_disk else jax.device_get(program.params(state))
    return losses, params


@functools.cache
def whole() -> Any:
    axes, fields = CASES["plain"]
    return train(1, axes, fields, None)


@pytest.mark.by_default("step", "context")
@pytest.mark.parametrize("case", CASES)
def test_tiles_of_tokens_train_as_the_whole_does(case, tmp_path):
    axes, fields = CASES[case]
    losses, params = train(2, axes, fields, tmp_path)
    expected, weights = whole()
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    if params is not None:
        toys.assert_trees_close(params, weights, atol=2e-5)


def sent_by(num_tiles: int, axes: dict[str, int], fields: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a compiled step sends over each group of axes."""
    sent = collections.Counter[str]()
    size = math.prod(axes.values())
    mesh = zj.make_mesh(**axes, devices=jax.devices()[:size])
    built = model(num_tiles, "tensor" in axes)
    with zj.build_train_step(built, optax.sgd(1e-2), zj.ZeroConfig(**fields), mesh) as program:
        text = program.lower(data(1)[0]).compile().as_text()
        assert text is not None
        for each in hlo.collectives(text, 1, mesh=mesh):
            sent[f"{each.op} over {each.axes}"] += each.num_bytes * each.times
    return dict(sent)


@pytest.mark.by_default("fsdp")
@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        pytest.param({"fsdp": 4}, {"stage": 3}, id="fsdp"),
        pytest.param({"fsdp": 2, "tensor": 2}, {"stage": 3}, id="tensor"),
        pytest.param({"fsdp": 4}, {"stage": 1, "num_microbatches": 2}, id="microbatches"),
    ],
)
def test_gradients_are_reduced_once_and_not_in_each_tile(axes, fields):
    tiled = sent_by(4, axes, fields)
    whole = sent_by(1, axes, fields)
    assert tiled.keys() == whole.keys()
    assert all(tiled[kind] <= whole[kind] for kind in whole)


def test_sums_over_all_tokens_are_those_of_the_whole():
    x = toys.draw(jax.random.key(0), (2, LENGTH, 4))

    def function(scale: jax.Array, x: jax.Array) -> Any:
        return x * scale, {"squares": jnp.sum(scale * x**2), "by_row": jnp.sum(jnp.sin(x), 1)}

    def loss(scale: jax.Array, x: jax.Array, num_tiles: int) -> jax.Array:
        y, sums = over_tokens_and_sums(functools.partial(function, scale), x, num_tiles=num_tiles)
        return jnp.sum(y**2) + sums["squares"] ** 2 + jnp.sum(jnp.cos(sums["by_row"]))

    run = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    whole, in_tiles = (run(jnp.float32(1.5), x, count) for count in (1, 4))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, in_tiles
    )


def test_gradients_are_summed_over_tiles_in_float32():
    """In bfloat16, a sum of 256 terms of 1 stays at 256 from there on; float32 counts on."""
    length = 512

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        return zj.over_tokens(lambda x: x + p["shift"].astype(x.dtype), x, num_tiles=length)

    built = zj.LayeredModel(
        1,
        init_embed=lambda key: {"table": jnp.zeros((2, 4))},
        embed=lambda p, batch, key: p["table"][batch["tokens"]],
        init_block=lambda key: {"shift": jnp.zeros(4)},
        block=block,
        init_head=lambda key: {},
        head=lambda p, p_embed, x, batch, key: jnp.sum(x.astype(jnp.float32)) / length,
    )
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    config = zj.ZeroConfig(precision="bf16")
    with zj.build_train_step(built, optax.sgd(1.0), config, mesh) as program:
        state = program.init(jax.random.key(0))
        _, grads = program.grads(state, {"tokens": np.zeros((1, length), np.int32)})
    np.testing.assert_array_equal(np.asarray(grads["blocks"]["shift"][0], np.float32), 1)


@pytest.mark.parametrize(
    ("function", "x", "num_tiles", "message"),
    [
        (lambda x: x, jnp.zeros((2, 6, 3)), 0, "num_tiles=0: an integer of at least 1"),
        (lambda x: x, jnp.zeros((2, 6, 3)), 2.0, "num_tiles=2.0: an integer of at least 1"),
        (lambda x: x, jnp.zeros((2, 6, 3)), 4, "6 tokens do not divide by num_tiles=4: .* to 8"),
        (lambda x: x, jnp.zeros(6), 2, r"x must have arrays \[B, T, ...\]"),
        (lambda x: x, {}, 2, "got no arrays"),
        (lambda x: x[0], [jnp.zeros((2, 6)), jnp.zeros((2, 4))], 2, "the same B and T"),
        (lambda x: x.sum(1), jnp.zeros((2, 6, 5)), 2, "dims 0 and 1 must stay"),
    ],
)
def test_what_does_not_fit_is_refused(function, x, num_tiles, message):
    with pytest.raises(ValueError, match=message):
        zj.over_tokens(function, x, num_tiles=num_tiles)


def test_tokens_divide_by_tiles_and_context():
    mesh = zj.make_mesh(fsdp=1, context=4, devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"num_tiles=2 x context=4: pad .* 16"):
        zj.over_tokens(lambda x: x, jnp.zeros((2, 12, 3)), num_tiles=2)
