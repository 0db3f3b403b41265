"""Rings of permutes compiled for absent H200s: what overlaps with each, and its traffic."""

import collections
import dataclasses
import functools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from test_sequence_parallel_for_h200 import CONFIG, SBH, gated

import zerojax as zj
from zerojax import aot, hlo

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("h200")]
CASES: dict[str, tuple[zj.LayeredModel, int, dict[str, Any]]] = {
    "gpt": (gpt.layered_gpt(CONFIG), 8, {"stage": 1, "activations": "selective"}),
    "gpt-save": (gpt.layered_gpt(CONFIG), 4, {"stage": 3, "activations": "save"}),
    "gpt-remat": (gpt.layered_gpt(CONFIG), 8, {"stage": 1, "activations": "remat"}),
    "gpt-stage3": (gpt.layered_gpt(CONFIG), 4, {"stage": 3, "activations": "selective"}),
    "gpt-float32": (
        gpt.layered_gpt(CONFIG),
        4,
        {"stage": 3, "activations": "save", "reduce_dtype": "float32"},
    ),
    "gpt-host": (
        gpt.layered_gpt(CONFIG),
        4,
        {"stage": 3, "params": "pinned_host", "activations": "pinned_host"},
    ),
    "gpt-tiles": (
        gpt.layered_gpt(dataclasses.replace(CONFIG, mlp_tiles=4)),
        8,
        {"stage": 1, "activations": "remat"},
    ),
    "gated": (gated(CONFIG), 8, {"stage": 1, "activations": "save"}),
}


@functools.cache
def compiled(case: str, tensor_overlap: bool) -> str:
    model, tensor, settings = CASES[case]
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8 // tensor, tensor=tensor)
    config = zj.ZeroConfig(
        precision="bf16", sequence_parallel=True, tensor_overlap=tensor_overlap, **settings
    )
    program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((8 // tensor, CONFIG.seq), jnp.int32)
    return program.lower({"tokens": tokens, "targets": tokens}).compile().as_text() or ""


def of_x(case: str, text: str) -> list[hlo.Collective]:
    """Return the collectives of x over `tensor` in the loops over layers.

    The all_reduces belong to the gradients of norms.
    """
    tensor = CASES[case][1]
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8 // tensor, tensor=tensor)
    found = [
        c
        for c in hlo.collectives(text, unknown_trips=CONFIG.layers, mesh=mesh)
        if c.times == CONFIG.layers
    ]
    return [c for c in found if c.axes == "tensor" and c.op != "all-reduce"]


def sent(case: str, text: str) -> list[int]:
    """Return what a device sends of x in each loop over layers, in units of s b h / t elements."""
    by_loop: dict[str, int] = collections.defaultdict(int)
    for c in of_x(case, text):
        # A gather or a scatter sends t - 1 pieces of its result or operand; a permute sends all of
        # its operand.
        pieces = CASES[case][1] if c.op == "collective-permute" else CASES[case][1] - 1
        by_loop[c.computation] += c.num_bytes * pieces
    assert all(n % SBH == 0 for n in by_loop.values())
    return sorted(n // SBH for n in by_loop.values())


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt-tiles"])
def test_each_permute_of_a_ring_spans_a_product(case):
    text, (_, tensor, settings) = compiled(case, True), CASES[case]
    permutes = [
        s
        for s in hlo.spans(text, CONFIG.layers)
        if s.times == CONFIG.layers and s.kind == "collective-permute"
    ]
    assert all(s.is_async and s.products >= 1 for s in permutes)
    assert {c.op for c in of_x(case, text)} == {"collective-permute"}
    assert "source_target_pairs={}" not in text
    # Forward has 4 rings. Backward has 4 rings of cotangents and 2 of repeated pieces, and
    # recomputation adds one.
    is_recomputed = settings["activations"] in ("remat", "pinned_host")
    assert sent(case, text) == [4 * (tensor - 1), (7 if is_recomputed else 6) * (tensor - 1)]
    assert sent(case, text) == sent(case, compiled(case, False))


def test_beside_rings_gradients_are_reduced_once_in_float32():
    """If it were split in pieces, each piece would be reduced by itself."""
    text = compiled("gpt-float32", True)
    found = [
        c for c in hlo.collectives(text, unknown_trips=CONFIG.layers) if c.times == CONFIG.layers
    ]
    assert {c.dtype for c in found if c.op == "collective-permute"} == {"bf16"}
    (scatter,) = [c for c in found if c.op == "reduce-scatter"]
    assert scatter.dtype == "f32"


def test_products_of_a_tiled_mlp_keep_their_gather_and_those_of_attention_do_not():
    text = compiled("gpt-tiles", True)
    whole = collections.Counter()
    for c in of_x("gpt-tiles", text):
        if c.op != "collective-permute":
            whole[c.op] += c.num_bytes // SBH
    # Forward 1 + 1; backward two cotangents and 1 repeated gather.
    assert whole == {"all-gather": 3, "reduce-scatter": 2}
    assert all(
        s.products >= 1 for s in hlo.spans(text, CONFIG.layers) if s.kind == "collective-permute"
    )
