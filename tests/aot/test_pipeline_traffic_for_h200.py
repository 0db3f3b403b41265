"""What pipeline stages send in a step, compiled for 8 absent H200s."""

import collections
import functools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo
from zerojax.pipeline import build_pipeline_schedule

SEQ, WIDTH, MICROBATCHES = 512, 512, 8
X_BYTES = 2 * SEQ * WIDTH
"""Bytes of one microbatch's activations on a device."""
LAYERS = 8
pytestmark = pytest.mark.xdist_group("h200")


@functools.cache
def compiled(chunks: int, fields: tuple[tuple[str, Any], ...]) -> tuple[zj.Program, str]:
    c = gpt.GPTConfig(
        layers=LAYERS,
        hidden=WIDTH,
        heads=4,
        seq=SEQ,
        vocab=2048,
        dtype=jnp.bfloat16,
        tied=False,
        attention="xla",
    )
    config = zj.ZeroConfig(
        precision="bf16", num_microbatches=MICROBATCHES, pipe_chunks=chunks, **dict(fields)
    )
    mesh = aot.gpu_mesh("h200", pipe=4, fsdp=2)
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((2 * MICROBATCHES, SEQ), jnp.int32)
    text = program.lower({"tokens": tokens, "targets": tokens}).compile().as_text()
    assert text is not None
    return program, text


def list_collectives(program: zj.Program, text: str, axes: str) -> dict[int, Any]:
    """Return {times: number of collectives by kind}, of at least half of one x, over some axes."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in hlo.collectives(text, 1, mesh=program.mesh):
        if each.axes == axes and each.num_bytes >= X_BYTES / 2:
            found[each.times][each.op] += 1
    return {times: dict(kinds) for times, kinds in found.items()}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.by_default("1")
def test_stages_send_one_microbatch_and_reduce_once(chunks):
    program, text = compiled(chunks, (("stage", 1), ("activations", "remat")))
    table = build_pipeline_schedule(4, MICROBATCHES, chunks)
    fill, steady, _ = (phase.num_ticks for phase in table.phases)
    expected = {
        # y to the stages' tokens, dy back, and dx to the embedding
        steady: {"collective-permute": 2, "all-to-all": 2, "all-gather": 1},
        # fill and drain
        fill: {"collective-permute": 2, "all-to-all": 1},
    }
    assert list_collectives(program, text, "pipe") == expected
    # Layers are reduced after the ticks, one record of every stage at a time.
    records = LAYERS // 4
    assert list_collectives(program, text, "fsdp") == {
        records: {"reduce-scatter": 1},
        1: {"all-gather": 1},
    }
    # Embedding and head are split over stages and shards.
    assert list_collectives(program, text, "pipe+fsdp") == {
        1: {"all-gather": 1, "reduce-scatter": 1}
    }
    permutes = [s for s in hlo.spans(text) if s.kind == "collective-permute" and s.times == steady]
    assert [span.products > 0 for span in permutes] == [True, True]


@pytest.mark.exhaustive
def test_stage_3_gathers_each_layer_twice_in_each_tick():
    program, text = compiled(1, (("stage", 3), ("activations", "remat")))
    gathered = sum(
        each.num_bytes * each.times
        for each in hlo.collectives(text, 1, mesh=program.mesh)
        if each.axes == "fsdp" and each.op == "all-gather"
    )
    layer_bytes = sum(2 * np.prod(leaf.layer_shape) for leaf in program.layout.leaves if leaf.order)
    ticks = MICROBATCHES + 3
    assert gathered == pytest.approx(2 * ticks * LAYERS / 4 * layer_bytes, rel=1e-3)
