"""Dtypes and bytes of gradient reductions, compiled for 8 absent H200s."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiled_toys
import toys

import zerojax as zj
from zerojax import aot, hlo

pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
HOST = "pinned_host"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
FSDP, TENSOR, HYBRID = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4})
STREAMED: dict[str, dict[str, Any]] = {
    "all": ALL,
    "in_backward": {**ALL, "update": "in_backward", "gather_ahead": True},
    "selective": {"opt_state": HOST, "activations": "selective"},
    "on_host": {"opt_state": HOST, "update_on": "host"},
    "tiles": {**ALL, "model": "tiled"},
    "stage_1": {"stage": 1, "opt_state": HOST},
}
CASES: dict[str, dict[str, Any]] = {}
for stage in (0, 1, 2, 3):
    for name, mesh in (("fsdp", FSDP), ("tensor", TENSOR), ("hybrid", HYBRID)):
        CASES[f"layered_{stage}_{name}"] = {"stage": stage, "mesh": mesh}
    CASES[f"layered_{stage}_tensor_microbatches"] = {
        "stage": stage,
        "mesh": TENSOR,
        "num_microbatches": 2,
    }
    CASES[f"unrolled_{stage}_tensor"] = {"model": "unrolled", "stage": stage, "mesh": TENSOR}
for name, fields in STREAMED.items():
    CASES[f"streamed_{name}_fsdp"] = {**fields, "mesh": FSDP}
    CASES[f"streamed_{name}_tensor_microbatches"] = {
        **fields,
        "mesh": TENSOR,
        "num_microbatches": 2,
    }
MODELS = {
    "layered": toys.layered,
    "unrolled": toys.unrolled,
    "tiled": lambda tensor: tiled_toys.model(stochastic=False),
}


@functools.cache
def compiled(
    case: str, reduce_dtype: str | None
) -> tuple[zj.Program, list[hlo.Collective], Mapping[str, int]]:
    """Return the program, its collectives, and the account's collectives."""
    fields = {"model": "layered", **CASES[case]}
    kind, mesh = fields.pop("model"), aot.gpu_mesh("h200", gpus_per_host=8, **fields.pop("mesh"))
    config = zj.ZeroConfig(precision="bf16", reduce_dtype=reduce_dtype, **fields)
    program = zj.build_train_step(
        MODELS[kind](tensor=mesh.shape["tensor"] > 1), optax.adamw(1e-3), config, mesh
    )
    data = (tiled_toys if kind == "tiled" else toys).batches(1)[0]
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), data)
    text = program.lower(batch).compile().as_text()
    return (
        program,
        hlo.collectives(text, unknown_trips=1, mesh=mesh),
        program.memory(batch).collectives,
    )


def reductions(found: list[hlo.Collective]) -> list[hlo.Collective]:
    """Return the collectives over devices with different data: gradients, the loss and norms."""
    over_data = [c for c in found if set((c.axes or "").split("+")) & {"data", "fsdp"}]
    return [c for c in over_data if c.op in ("reduce-scatter", "all-reduce")]


@pytest.mark.by_default("layered_3_tensor")
@pytest.mark.parametrize("case", CASES)
def test_with_float32_every_reduction_is_float32_and_every_gather_is_not(case):
    _, found, _ = compiled(case, "float32")
    assert {c.dtype for c in reductions(found)} == {"f32"}
    assert {c.dtype for c in found if c.op == "all-gather" and c.num_bytes > 256} <= {"bf16", "s32"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_reductions_take_twice_the_bytes_and_nothing_else_changes(case):
    (_, wide, account), (_, narrow, narrow_account) = (
        compiled(case, "float32"),
        compiled(case, None),
    )

    def moved(found: list[hlo.Collective], ops: tuple[str, ...], dtype: str) -> int:
        return sum(c.num_bytes * c.times for c in found if c.op in ops and c.dtype == dtype)

    reduce = ("reduce-scatter", "all-reduce")
    small = 4096 * 4
    np.testing.assert_allclose(
        moved(reductions(wide), reduce, "f32"),
        2 * moved(reductions(narrow), reduce, "bf16"),
        rtol=0.05,
        atol=small,
    )
    for op in ("all-gather", "all-to-all"):
        assert sum(c.times for c in wide if c.op == op) <= sum(
            c.times for c in narrow if c.op == op
        )
    assert account["all_gather"] == narrow_account["all_gather"]
    assert account["reduce_scatter"] == 2 * narrow_account["reduce_scatter"]
    assert account["all_reduce"] == 2 * narrow_account["all_reduce"]
