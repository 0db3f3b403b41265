"""Bytes and collectives of steps compiled for 8 absent H200s on meshes with `context`."""

import collections
import functools
from typing import Any, NamedTuple

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo

HOST = "pinned_host"
ALL_ON_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST}
ONCE = {"num_microbatches": 2, "reduce_every": "step"}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp": ({"fsdp": 8}, {}),
    "resident": ({"fsdp": 4, "context": 2}, {}),
    "stage_1": ({"fsdp": 2, "context": 4}, {"stage": 1}),
    "once": ({"fsdp": 4, "context": 2}, {"stage": 2, **ONCE}),
    "host": ({"fsdp": 4, "context": 2}, ALL_ON_HOST),
    "host_once": ({"fsdp": 4, "context": 2}, {**ALL_ON_HOST, **ONCE}),
    "sequence_parallel": (
        {"fsdp": 2, "context": 2, "tensor": 2},
        {**ALL_ON_HOST, "sequence_parallel": True},
    ),
}
pytestmark = pytest.mark.xdist_group("h200")


class Compiled(NamedTuple):
    """A compiled step: its statistics, its account, and the bytes that a device sends."""

    stats: Any
    report: Any
    sent: dict[tuple[str, str], float]


@functools.cache
def compiled(name: str) -> Compiled:
    axes, fields = CASES[name]
    config = zj.ZeroConfig(precision="bf16", clip_norm=1.0, **fields)
    c = gpt.GPTConfig(
        layers=2,
        hidden=512,
        heads=4,
        seq=256,
        vocab=256,
        dtype=jnp.bfloat16,
        tied=False,
        attention="xla",
        tensor_axis="tensor" if "tensor" in axes else None,
    )
    mesh = aot.gpu_mesh("h200", **axes)
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((8 * config.num_microbatches, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    result = program.lower(batch).compile()
    sent = collections.Counter[tuple[str, str]]()
    for each in hlo.collectives(result.as_text() or "", 1, mesh=mesh):
        count = np.prod([mesh.shape.get(axis, 1) for axis in (each.axes or "").split("+")])
        rounds = 2 if each.op == "all-reduce" else 1
        num_bytes = rounds * each.num_bytes * (count - 1) / count * each.times
        sent[each.op, each.axes or ""] += float(num_bytes)
    return Compiled(result.memory_analysis(), program.memory(batch), dict(sent))


@pytest.mark.exhaustive  # by default tests/axes/test_steps.py compares arguments
@pytest.mark.parametrize("name", CASES)
def test_arguments_and_collectives_are_those_of_the_account(name):
    c = compiled(name)
    assert c.report.argument_bytes == c.stats.argument_size_in_bytes
    assert c.report.host_argument_bytes == c.stats.host_argument_size_in_bytes
    if "tensor" in CASES[name][0]:
        return  # the embedding, which `tensor` splits too, sends rows instead of its table
    # Attention has collectives of its own over `context` alone; with reduce_every="step" the sums
    # over `context` are added there too.
    axes = ("fsdp", "fsdp+context")
    gathered = sum(c.sent.get(("all-gather", each), 0) for each in axes)
    scattered = sum(c.sent.get(("reduce-scatter", each), 0) for each in axes)
    np.testing.assert_allclose(gathered, c.report.collectives["all_gather"], rtol=0.03)
    np.testing.assert_allclose(scattered, c.report.collectives["reduce_scatter"], rtol=0.03)
    if "once" in name:
        over_context = c.sent["all-reduce", "context"]
        np.testing.assert_allclose(over_context, c.report.collectives["all_reduce"], rtol=0.06)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["resident", "stage_1"])
def test_activations_are_split_over_context(name):
    """A device of 8 holds an eighth of the batch's tokens, whichever axes split them."""
    c, plain = compiled(name), compiled("fsdp")
    # Scores, which the plain attention keeps, are not arrays here.
    tokens, hidden = 256, 512
    scores = 2 * 4 * tokens * tokens * 4  # layers, heads, float32
    activations = [each.report.tiers["device"]["activations"] for each in (c, plain)]
    assert activations[0] <= activations[1] - scores + 2 * 4 * tokens * hidden * 2  # q, k, v, o
    assert c.stats.temp_size_in_bytes <= plain.stats.temp_size_in_bytes
