"""`program.memory`'s `tensor` traffic against programs compiled for absent H200s."""

import dataclasses
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from test_sequence_parallel_for_h200 import gated

import zerojax as zj
from zerojax import aot, hlo

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("h200")]
CONFIG = gpt.GPTConfig(
    vocab=1024,
    seq=256,
    hidden=512,
    layers=3,
    heads=8,
    dtype=jnp.bfloat16,
    tensor_axis="tensor",
    loss_tiles=0,
    attention="xla",
)
SP, PA = {"sequence_parallel": True}, {"partition_activations": True}


def sent(
    model: Any, fsdp: int = 1, tensor: int = 4, **settings: Any
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the bytes that a device sends over `tensor`, by collective.

    The first are compiled, the second are from the account.
    """
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=fsdp * tensor, fsdp=fsdp, tensor=tensor)
    program = zj.build_train_step(
        model, optax.adamw(1e-3), zj.ZeroConfig(precision="bf16", **settings), mesh
    )
    tokens = jax.ShapeDtypeStruct(
        (2 * fsdp * settings.get("num_microbatches", 1), CONFIG.seq), jnp.int32
    )
    batch = {"tokens": tokens, "targets": tokens}
    text = program.lower(batch).compile().as_text() or ""
    found = hlo.collective_bytes(text, unknown_trips=1, mesh=mesh).get("tensor", {})
    ring = (tensor - 1) / tensor
    of_ring = {
        "all-gather": ring,
        "reduce-scatter": ring,
        "all-reduce": 2 * ring,
    }  # a permute sends its operand
    names = {op: op.removeprefix("collective-").replace("-", "_") for op in found}
    moved = {names[op]: n * of_ring.get(op, 1) for op, n in found.items()}
    told = program.memory(batch).collectives
    return moved, {
        name.removeprefix("tensor_"): n for name, n in told.items() if name.startswith("tensor_")
    }


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "save"}),
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "remat"}),
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "save"} | SP),
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "remat"} | SP),
        (gpt.layered_gpt(CONFIG), {"stage": 3, "activations": "selective", "fsdp": 2} | SP),
        (
            gpt.layered_gpt(CONFIG),
            {"stage": 1, "activations": "selective", "num_microbatches": 2} | SP,
        ),
        (
            gpt.layered_gpt(CONFIG),
            {"activations": "pinned_host", "update": "in_backward", "params": "pinned_host"} | SP,
        ),
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "remat"} | PA),
        (
            gpt.layered_gpt(CONFIG),
            {"stage": 3, "activations": "selective", "fsdp": 2, "num_microbatches": 2} | PA,
        ),
        (
            gpt.layered_gpt(dataclasses.replace(CONFIG, tied=False)),
            {"stage": 1, "activations": "save"},
        ),
        (
            gpt.layered_gpt(dataclasses.replace(CONFIG, mlp_tiles=2)),
            {"stage": 1, "activations": "remat"} | SP,
        ),
        (
            gpt.layered_gpt(dataclasses.replace(CONFIG, mlp_tiles=2)),
            {"stage": 1, "activations": "save"},
        ),
        (
            gpt.layered_gpt(dataclasses.replace(CONFIG, loss_tiles=4)),
            {"stage": 1, "activations": "selective"} | SP,
        ),
        (
            gpt.layered_gpt(CONFIG),
            {"stage": 1, "activations": "selective", "tensor_overlap": True} | SP,
        ),
        (gated(CONFIG), {"stage": 1, "activations": "selective"}),
        (gated(CONFIG), {"stage": 1, "activations": "selective"} | SP),
        (gpt.unrolled_gpt(CONFIG), {"stage": 1, "activations": "remat"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_account_of_tensor_traffic_is_what_is_compiled(model, settings):
    moved, told = sent(model, **settings)
    total = sum(moved.values())
    assert sum(told.values()) == pytest.approx(total, rel=0.01)
    for name in {*moved, *told}:
        assert told.get(name, 0) == pytest.approx(moved.get(name, 0), abs=0.01 * total), name
