"""The update of a resident step on CPUs writes weights and optimizer state in place.

It creates no other arrays.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

LAYERS, HIDDEN, INNER, VOCAB = 2, 128, 160, 192
BATCH = {"tokens": np.zeros((8, 4), np.int32)}
SUMMED_AT_ONCE = 10_000
"""Minimum size of an array that XLA for CPUs squares and sums in one loop.

For smaller arrays it writes the squares first.
"""
ARRAY = re.compile(
    r"%(?P<name>\S+) = f32\[(?P<dims>[\d,]+)\]\{(?P<layout>[\d,]*)[^}]*\} (?P<op>[\w\-]+)\((?P<rest>.*)"
)


def layered() -> zj.LayeredModel:
    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        return x + jnp.tanh(x @ p["w1"]) @ p["w2"]

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        del p_embed, key
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ p["out"], batch["tokens"])
        return jnp.mean(losses)

    return zj.LayeredModel(
        LAYERS,
        lambda key: {"table": toys.draw(key, (VOCAB, HIDDEN))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {
            "w1": toys.draw(key, (HIDDEN, INNER)),
            "w2": toys.draw(key, (INNER, HIDDEN), 1),
        },
        block,
        lambda key: {"out": toys.draw(key, (HIDDEN, VOCAB))},
        head,
    )


def unlayered() -> zj.Model:
    model = layered()

    def init(key: jax.Array) -> Any:
        blocks = [model.init_block(key) for _ in range(LAYERS)]
        return {"embed": model.init_embed(key), "blocks": blocks, "head": model.init_head(key)}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = model.embed(params["embed"], batch, key)
        for p in params["blocks"]:
            x = model.block(p, x, key)
        return model.head(params["head"], params["embed"], x, batch, key)

    return zj.Model(init, loss)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      devices: number of devices that share the state.
      model: the model.
      tx: the optimizer.
      config: fields of `ZeroConfig`.
    """

    devices: int
    model: Any
    tx: optax.GradientTransformation
    config: dict[str, Any]


ADAMW = optax.adamw(1e-3)
CASES = {
    "stage 0, 1 device": Case(1, layered, ADAMW, {"stage": 0}),
    "stage 2, clipped": Case(2, layered, ADAMW, {"stage": 2, "clip_norm": 1.0}),
    "stage 3, fp16": Case(2, layered, ADAMW, {"stage": 3, "precision": "fp16"}),
    "model, stage 0, 1 device": Case(1, unlayered, ADAMW, {"stage": 0, "clip_norm": 1.0}),
    "model, stage 3, average": Case(8, unlayered, optax.chain(ADAMW, zj.Ema(0.9)), {"stage": 3}),
    "model, leaf by leaf": Case(2, unlayered, ADAMW, {"stage": 3, "opt_state": "pinned_host"}),
    "streamed, updated in backward": Case(2, layered, ADAMW, {"stage": 3, "update": "in_backward"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_update_copies_no_moment_and_writes_no_square(case):
    devices = jax.devices()[: case.devices]
    mesh = zj.make_mesh(fsdp=case.devices, devices=devices)
    program = zj.build_train_step(case.model(), case.tx, zj.ZeroConfig(**case.config), mesh)
    text = program.lower(BATCH).compile().as_text() or ""
    arrays = {found["name"]: found for found in ARRAY.finditer(text)}
    smallest = HIDDEN * INNER // case.devices
    assert arrays
    for array in arrays.values():
        size = np.prod([int(dim) for dim in array["dims"].split(",")])
        if size < smallest:
            continue
        operands = re.findall(r"%([\w.\-]+)", array["rest"].split(")")[0])
        if array["op"] == "copy":
            # A layout change, which an all_gather of another dim needs, moves weights and no
            # moments.
            before = arrays.get(operands[0])
            assert before is None or before["layout"] != array["layout"], array[0]
        if array["op"] == "fusion" and size > SUMMED_AT_ONCE:
            # The norm reads a gradient once: it is squared and summed where it is computed.
            assert "/square" not in array["rest"], array[0]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_step_that_is_not_finite_leaves_all_bits(stage, clip_norm):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(stage=stage, clip_norm=clip_norm, precision="bf16")
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    program = zj.build_train_step(toys.small(), tx, config, mesh)
    state = program.init(jax.random.key(0))
    (batch,) = toys.batches(1)
    state, _ = jax.block_until_ready(program.step(state, batch))
    before = jax.device_get((state.params, state.master, state.opt_state))
    state, _ = jax.block_until_ready(program.step(state, batch | {"weight": np.float32(np.nan)}))
    assert int(state.skipped) == 1
    after = jax.device_get((state.params, state.master, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)
