"""Pipelined steps compiled for 8 absent H200s: bytes held, and what stages send."""

import collections
import functools
import itertools
import math
from typing import Any, NamedTuple

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo
from zerojax.pipeline import build_pipeline_schedule

pytestmark = pytest.mark.xdist_group("h200")
ARGUMENTS = ("params", "master", "opt_state", "frozen", "batch", "scalars")
SEQ, WIDTH, LAYERS = 512, 2048, 16
X_BYTES = 2 * SEQ * WIDTH
"""Bytes of one microbatch's activations on a device."""

MODES = ("remat", "selective", "save")
CASES = {
    f"{case[0]}-{case[1]}-{case[2]}-{case[3]}": case
    for case in (
        *itertools.product((8, 16, 32, 64), (1, 2), MODES, (1,)),
        *itertools.product((16,), (1,), MODES, (2, 3)),
    )
}
"""Microbatches, chunks, activations and stage."""


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
      temp_bytes: XLA's temporary bytes.
      kinds: the predicted bytes on the device, by kind.
      program: the program.
      text: its HLO.
    """

    temp_bytes: int
    kinds: dict[str, int]
    program: zj.Program
    text: str


@functools.cache
def compiled(microbatches: int, chunks: int, fields: tuple[tuple[str, Any], ...]) -> Compiled:
    """Return a compiled step of a GPT."""
    c = gpt.GPTConfig(
        layers=LAYERS,
        hidden=WIDTH,
        heads=16,
        seq=SEQ,
        vocab=16384,
        dtype=jnp.bfloat16,
        tied=False,
        attention="xla",
    )
    config = zj.ZeroConfig(
        precision="bf16", num_microbatches=microbatches, pipe_chunks=chunks, **dict(fields)
    )
    mesh = aot.gpu_mesh("h200", pipe=4, fsdp=2)
    with zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh) as program:
        tokens = jax.ShapeDtypeStruct((2 * microbatches, SEQ), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
        result = program.lower(batch).compile()
        stats: Any = result.memory_analysis()
        report = program.memory(batch)
        assert stats.argument_size_in_bytes == report.argument_bytes
        kinds = dict(report.tiers["device"])
    text = result.as_text()
    assert text is not None
    return Compiled(stats.temp_size_in_bytes, kinds, program, text)


def temporary_bytes(kinds: dict[str, int]) -> int:
    return sum(n for kind, n in kinds.items() if kind not in ARGUMENTS)


@pytest.mark.by_default("16-2-selective-1")
@pytest.mark.parametrize("case", CASES)
def test_temporary_memory_is_predicted(case):
    microbatches, chunks, activations, stage = CASES[case]
    fields = (("stage", stage), ("activations", activations))
    c = compiled(microbatches, chunks, fields)
    predicted = temporary_bytes(c.kinds)
    ratio = c.temp_bytes / predicted
    print(
        f"M {microbatches} chunks {chunks} {activations} stage {stage}: "
        f"{c.temp_bytes / 1e6:.1f} of {predicted / 1e6:.1f} MB, {ratio:.3f}"
    )
    assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["remat", "selective"])
def test_temporary_memory_does_not_grow_with_the_microbatches(activations):
    fields = (("stage", 1), ("activations", activations))
    temps = [compiled(m, 1, fields).temp_bytes for m in (8, 16, 32, 64)]
    assert max(temps) <= 1.01 * min(temps)


def list_collectives(c: Compiled, axes: str) -> dict[int, Any]:
    """Return {times: number of collectives by kind}, of at least half of one x, over some axes."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in hlo.collectives(c.text, 1, mesh=c.program.mesh):
        if each.axes == axes and each.num_bytes >= X_BYTES / 2:
            found[each.times][each.op] += 1
    return {times: dict(kinds) for times, kinds in found.items()}


def layer_elements(c: Compiled) -> int:
    """Return the number of parameters of one layer."""
    leaves = [leaf for leaf in c.program.layout.leaves if leaf.order is not None]
    return sum(math.prod(leaf.layer_shape) for leaf in leaves)


@pytest.mark.by_default("2-selective")
@pytest.mark.parametrize("activations", ["selective", "remat"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_send_one_microbatch_and_reduce_once(chunks, activations):
    c = compiled(16, chunks, (("stage", 1), ("activations", activations)))
    table = build_pipeline_schedule(4, 16, chunks)
    fill, steady, _ = (phase.num_ticks for phase in table.phases)
    expected = {
        # y to the stages' tokens, dy back, and dx to the embedding
        steady: {"collective-permute": 2, "all-to-all": 2, "all-gather": 1},
        # fill and drain
        fill: {"collective-permute": 2, "all-to-all": 1},
    }
    assert list_collectives(c, "pipe") == expected
    # Layers are reduced after the ticks, one record of every stage at a time.
    records = LAYERS // 4
    found = {times: set(kinds) for times, kinds in list_collectives(c, "fsdp").items()}
    assert found == {records: {"reduce-scatter"}, 1: {"all-gather"}}
    reduced = sum(
        each.num_bytes
        for each in hlo.collectives(c.text, 1, mesh=c.program.mesh)
        if each.axes == "fsdp" and each.op == "reduce-scatter"
    )
    assert reduced == pytest.approx(4 * layer_elements(c), rel=1e-3)
    # Embedding and head are split over stages and shards.
    found = {times: set(kinds) for times, kinds in list_collectives(c, "pipe+fsdp").items()}
    assert found == {1: {"all-gather", "reduce-scatter"}}
    permutes = [span for span in hlo.spans(c.text) if span.kind == "collective-permute"]
    assert [span.products > 0 for span in permutes if span.times == steady] == [True, True]


@pytest.mark.exhaustive
def test_stage_3_gathers_each_layer_twice_in_each_tick():
    c = compiled(16, 1, (("stage", 3), ("activations", "remat")))
    gathered = sum(
        each.num_bytes * each.times
        for each in hlo.collectives(c.text, 1, mesh=c.program.mesh)
        if each.axes == "fsdp" and each.op == "all-gather"
    )
    ticks = 16 + 3
    assert gathered == pytest.approx(2 * ticks * LAYERS / 4 * 2 * layer_elements(c), rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["data", "context"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_are_reduced_within_stages(stage, chunks, axis):
    """With `context`, each tick sums its layers' gradients; they are not gathered over `pipe`."""
    c = gpt.GPTConfig(
        layers=4,
        hidden=256,
        heads=2,
        seq=256,
        vocab=512,
        dtype=jnp.bfloat16,
        tied=False,
        attention="gather" if axis == "context" else "xla",
    )
    config = zj.ZeroConfig(
        precision="bf16",
        stage=stage,
        num_microbatches=4,
        pipe_chunks=chunks,
        reduce_every="step",
        activations="selective",
    )
    sizes: dict[str, int] = {axis: 2}
    mesh = aot.gpu_mesh("h200", pipe=2, fsdp=2, **sizes)
    tokens = jax.ShapeDtypeStruct((16, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    with zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh) as program:
        text = program.lower(batch).compile().as_text() or ""
        counted = program.memory(batch).collectives
        layer = sum(
            math.prod(each.layer_shape) for each in program.layout.leaves if each.is_stacked
        )
    sent = collections.Counter[str]()
    for each in hlo.collectives(text, 1, mesh=mesh):
        axes = set((each.axes or "").split("+")) - {""}
        if each.op == "all-gather" and axes == {"pipe"}:
            assert each.num_bytes < layer
        is_sum = each.op == "all-reduce" or (each.op == "reduce-scatter" and axes != {"context"})
        if is_sum and each.num_bytes > 64:  # no metric
            devices = math.prod(mesh.shape[name] for name in axes)
            rounds = 2 if each.op == "all-reduce" else 1
            share = (devices - 1) / devices
            sent[each.op] += round(rounds * share * each.num_bytes * each.times)
    assert sent["reduce-scatter"] == counted["reduce_scatter"]
    assert sent["all-reduce"] == counted["all_reduce"]
