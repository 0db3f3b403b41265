"""A GPT whose loss is computed in tiles trains like one with full logits.

This applies to every kind of program, and the full logits never exist.
"""

import dataclasses
import functools
import re
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import memory

C = gpt.GPTConfig(layers=2, hidden=16, heads=2, seq=6, vocab=40)
HOST = dict.fromkeys(("params", "grads", "opt_state"), "pinned_host")
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "layered, stage 3, tensor": (
        "layered",
        {"tied": False},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"stage": 3},
    ),
    "layered, stage 1, microbatches": (
        "layered",
        {},
        {"fsdp": 4},
        {"stage": 1, "num_microbatches": 2},
    ),
    "unrolled, stage 3": ("unrolled", {"tied": False}, {"fsdp": 4}, {"stage": 3}),
    "unrolled, stage 3, remat": ("unrolled", {}, {"fsdp": 2}, {"stage": 3, "activations": "remat"}),
    "streamed from the host": ("layered", {}, {"fsdp": 2, "tensor": 2}, {"stage": 3, **HOST}),
    "one device": ("layered", {}, {"fsdp": 1}, {"stage": 0}),
}


def build(c: gpt.GPTConfig, kind: str, axes: dict[str, int], **config: Any) -> zj.Program:
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    c = dataclasses.replace(c, tensor_axis="tensor" if axes.get("tensor", 1) > 1 else None)
    model = gpt.layered_gpt(c) if kind == "layered" else gpt.unrolled_gpt(c)
    return zj.build_train_step(model, optax.adamw(1e-2), zj.ZeroConfig(**config), mesh)


def losses(c: gpt.GPTConfig, kind: str, axes: dict[str, int], **config: Any) -> list[float]:
    tokens = np.random.default_rng(0).integers(0, c.vocab, (4, 8, c.seq + 1)).astype(np.int32)
    with build(c, kind, axes, **config) as program:
        state = program.init(jax.random.key(0))
        made = []
        for row in tokens[:3]:
            state, metrics = program.step(state, {"tokens": row[:, :-1], "targets": row[:, 1:]})
            made += [float(metrics["loss"]), float(metrics["grad_norm"])]
        return [
            *made,
            float(program.eval(state, {"tokens": tokens[3, :, :-1], "targets": tokens[3, :, 1:]})),
        ]


@pytest.mark.exhaustive  # by default the test below compares them, in bf16
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_with_tiled_loss_equal_those_of_whole_logits(name):
    kind, fields, axes, config = PROGRAMS[name]
    whole, tiled = (
        losses(dataclasses.replace(C, loss_tiles=n, **fields), kind, axes, **config) for n in (0, 3)
    )
    np.testing.assert_allclose(tiled, whole, rtol=2e-5)


# by default test_linear_cross_entropy.py compares tiles of each dtype with float64
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_they_agree_to_its_rounding(precision):
    c = dataclasses.replace(C, dtype={"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision])
    run = functools.partial(losses, kind="layered", axes={"fsdp": 2}, stage=3, precision=precision)
    np.testing.assert_allclose(
        run(dataclasses.replace(c, loss_tiles=3)),
        run(dataclasses.replace(c, loss_tiles=0)),
        rtol=2e-2,
    )


@pytest.mark.by_default("0-layered", "3-layered")
@pytest.mark.parametrize("kind", ["layered", "unrolled"])
@pytest.mark.parametrize("tiles", [0, 3])
def test_logits_are_in_the_program_of_whole_logits_alone(kind, tiles):
    c = dataclasses.replace(
        C, loss_tiles=tiles, vocab=44, hidden=20
    )  # the step has no other dim of 44 next to tokens
    program = build(c, kind, {"fsdp": 2}, stage=3)
    tokens = jax.ShapeDtypeStruct((8, c.seq), jnp.int32)
    text = program.lower({"tokens": tokens, "targets": tokens}).as_text()
    assert any(f"{dims}x44x" in text for dims in ("8x6", "4x6", "48", "24")) == (tiles == 0)


@pytest.mark.parametrize("kind", ["layered", "unrolled"])
def test_a_rematerialised_head_makes_logits_twice_and_not_three_times(kind):
    """Backward repeats the unit that gathers the head, except for the log-sum-exps.

    It computes logits, logits again, dx, and dw.
    """
    c = dataclasses.replace(C, loss_tiles=3, vocab=44, hidden=20)
    program = build(c, kind, {"fsdp": 2}, stage=3)
    tokens = jax.ShapeDtypeStruct((8, c.seq), jnp.int32)
    text = program.lower({"tokens": tokens, "targets": tokens}).as_text()
    products = [
        line
        for line in text.splitlines()
        if "dot_general" in line and re.search(r"\b(\d+x)?15(x\d+)?x", line)
    ]
    assert len(products) == 4


def test_the_closed_form_tiles_large_vocabularies():
    """A block's residuals against the logits and their gradient.

    The residuals take 34 h + 5 a s bytes per token in 16 bits, the logits 6 V.
    """
    small = {"seq": 1024, "hidden": 768, "heads": 12}  # 87552 bytes: V = 14592
    assert not memory.tiled_loss_pays(vocab=14592, **small)
    assert memory.tiled_loss_pays(vocab=14593, **small)
    large = {"seq": 2048, "hidden": 4096, "heads": 32}  # 466944 bytes: V = 77824
    assert not memory.tiled_loss_pays(vocab=77824, **large)
    assert memory.tiled_loss_pays(vocab=77825, **large)
    assert not any(c.tiles_loss for c in gpt.PRESETS.values())  # of bytes
    big = dataclasses.replace(gpt.PRESETS["124m"], vocab=50304, dtype=jnp.bfloat16)
    assert big.tiles_loss
    assert not dataclasses.replace(big, loss_tiles=0).tiles_loss
