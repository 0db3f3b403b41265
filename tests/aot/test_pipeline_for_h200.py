"""Bytes of pipelined steps as `program.memory` predicts them, compiled for 8 absent H200s."""

import functools
import itertools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot

pytestmark = pytest.mark.xdist_group("h200")
ARGUMENTS = ("params", "master", "opt_state", "frozen", "batch", "scalars")
SEQ, WIDTH, LAYERS = 512, 2048, 16

MODES = ("remat", "selective", "save")
CASES = {
    f"{case[0]}-{case[1]}-{case[2]}-{case[3]}": case
    for case in (
        *itertools.product((8, 16, 32, 64), (1, 2), MODES, (1,)),
        *itertools.product((16,), (1,), MODES, (2, 3)),
    )
}
"""Microbatches, chunks, activations and stage."""


@functools.cache
def compiled(
    microbatches: int, chunks: int, fields: tuple[tuple[str, Any], ...]
) -> tuple[Any, dict[str, int]]:
    """Return XLA's bytes of a step, and the predicted bytes on the device, by kind."""
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
        stats = program.lower(batch).compile().memory_analysis()
        report = program.memory(batch)
        assert stats.argument_size_in_bytes == report.argument_bytes
        kinds = dict(report.tiers["device"])
    return stats, kinds


def temporary_bytes(kinds: dict[str, int]) -> int:
    return sum(n for kind, n in kinds.items() if kind not in ARGUMENTS)


@pytest.mark.by_default("16-2-selective-1")
@pytest.mark.parametrize("case", CASES)
def test_temporary_memory_is_predicted(case):
    microbatches, chunks, activations, stage = CASES[case]
    fields = (("stage", stage), ("activations", activations))
    stats, kinds = compiled(microbatches, chunks, fields)
    predicted = temporary_bytes(kinds)
    ratio = stats.temp_size_in_bytes / predicted
    print(
        f"M {microbatches} chunks {chunks} {activations} stage {stage}: "
        f"{stats.temp_size_in_bytes / 1e6:.1f} of {predicted / 1e6:.1f} MB, {ratio:.3f}"
    )
    assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["remat", "selective"])
def test_temporary_memory_does_not_grow_with_the_microbatches(activations):
    fields = (("stage", 1), ("activations", activations))
    temps = [compiled(m, 1, fields)[0].temp_size_in_bytes for m in (8, 16, 32, 64)]
    assert max(temps) <= 1.01 * min(temps)
