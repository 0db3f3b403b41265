"""Reductions once per step, compiled for 8 absent H200s.

Each gradient is reduced once, in float32; memory is checked too.
"""

import functools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys

import zerojax as zj
from zerojax import aot, hlo
from zerojax.sharding import local_elements

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("h200")]
HOST = "pinned_host"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
FSDP, HYBRID, TENSOR = {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}
CONFIG = gpt.GPTConfig(
    vocab=1024,
    seq=256,
    hidden=256,
    layers=4,
    heads=4,
    dtype=jnp.bfloat16,
    tensor_axis="tensor",
    loss_tiles=4,
    dropout=0.1,
    attention="xla",
)
COUNT, SMALL = 8, 64  # microbatches; bytes of losses, weights and norms
CASES: dict[str, dict[str, Any]] = {
    **{f"toys_{stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "toys_hybrid": {"stage": 2, "mesh": HYBRID},
    "toys_selective": {"stage": 2, "activations": "selective"},
    "toys_in_backward": {**ALL, "update": "in_backward"},
    "toys_tensor": {"stage": 1, "mesh": TENSOR},
    "toys_tensor_streamed": {**ALL, "mesh": TENSOR},
    "tiles_streamed": {**ALL},
    "gpt_2": {"stage": 2},
    "gpt_3": {"stage": 3},
    "gpt_3_hybrid": {"stage": 3, "mesh": HYBRID},
    "gpt_sequence": {"stage": 2, "mesh": TENSOR, "sequence_parallel": True},
    "gpt_streamed": ALL,
}


@functools.cache
def compiled(case: str, every: str | None) -> tuple[zj.Program, list[hlo.Collective], int, Any]:
    """Return the program, its collectives, its temporary bytes, and its account."""
    fields = {"mesh": FSDP, **CASES[case]}
    mesh = aot.gpu_mesh("h200", gpus_per_host=8, **fields.pop("mesh"))
    config = zj.ZeroConfig(precision="bf16", num_microbatches=COUNT, reduce_every=every, **fields)
    rows = 8 * COUNT
    tokens = jax.ShapeDtypeStruct((rows, CONFIG.seq), jnp.int32)
    model, batch = {
        "toys": lambda: (toys.layered(tensor=mesh.shape["tensor"] > 1), toys.batches(1, rows)[0]),
        "tiles": lambda: (tiled_toys.model(stochastic=False), tiled_toys.batches(1, rows)[0]),
        "gpt": lambda: (gpt.layered_gpt(CONFIG), {"tokens": tokens, "targets": tokens}),
    }[case.split("_")[0]]()
    program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), batch)
    step = program.lower(batch).compile()
    found = hlo.collectives(step.as_text() or "", unknown_trips=1, mesh=mesh)
    return program, found, step.memory_analysis().temp_size_in_bytes, program.memory(batch)


@pytest.mark.parametrize("case", CASES)
def test_of_eight_microbatches_each_gradient_is_reduced_once_in_float32(case):
    program, found, _, account = compiled(case, "step")
    over_data = [
        c
        for c in found
        if set((c.axes or "").split("+")) & {"data", "fsdp"} and c.num_bytes > SMALL
    ]
    reductions = [c for c in over_data if c.op in ("reduce-scatter", "all-reduce")]
    assert {c.dtype for c in reductions} == {"f32"}
    assert {c.op for c in over_data} <= {
        "reduce-scatter",
        "all-reduce",
        "all-gather",
    }  # no rows are sent
    mesh, stage = program.mesh, program.config.stage
    split, whole = 0, 0
    for leaf in program.layout.leaves:
        is_split = stage > 0 and leaf.spec.sharded != leaf.spec.base
        elements = local_elements(leaf.shape, leaf.spec.base, mesh)
        split, whole = split + elements * is_split, whole + elements * (not is_split)

    def moved(op: str) -> int:
        return sum(c.num_bytes * c.times for c in reductions if c.op == op)

    # Each element once: a reduction in a loop over microbatches would count 8 times.
    assert moved("reduce-scatter") == 4 * split
    of_replicas = 4 * split // mesh.shape["fsdp"] * (mesh.shape["data"] > 1)
    small = COUNT * SMALL * (program.layout.num_layers or 1)
    np.testing.assert_allclose(moved("all-reduce"), 4 * whole + of_replicas, atol=small)
    ring = (mesh.shape["fsdp"] - 1) / mesh.shape["fsdp"]
    assert account.collectives["reduce_scatter"] == int(4 * split * ring)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("gpt")])
def test_temporaries_grow_as_the_account_says(case):
    (_, _, once, account), (_, _, each, before) = compiled(case, "step"), compiled(case, None)
    grown = account.device_bytes - before.device_bytes
    # For the streamed step, XLA takes 3,004,928 bytes more and the account says 2,728,192: 277 kB
    # are in no closed form.
    np.testing.assert_allclose(once - each, grown, rtol=0.11 if case == "gpt_streamed" else 0.1)
