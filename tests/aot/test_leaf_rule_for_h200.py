"""Muon compiled for absent H200s: products divided among the devices, and their traffic."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import aot, hlo
from zerojax.hlo.parse import parse_arrays, parse_ints, parse_module

pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
ROWS, COLUMNS, STEPS = 256, 512, 2  # Newton-Schulz iterations, each with the same three products
HOST = "pinned_host"
INVOLUNTARY = "nvoluntary full rematerialization"


@functools.cache
def compiled(layers, axes, fields):
    """Compile a step of layers of one matrix.

    Returns the program, its text and the batch's shapes.
    """
    mesh_axes = dict(axes)
    model = zj.LayeredModel(
        layers,
        lambda key: {"scale": jnp.ones(ROWS)},
        lambda p, batch, key: (batch["x"] * p["scale"]).astype(p["scale"].dtype),
        lambda key: {"w": jax.random.normal(key, (ROWS, COLUMNS))},
        lambda p, x, key: x + jax.nn.gelu(x @ p["w"]) @ p["w"].T,
        lambda key: {"bias": jnp.ones(ROWS)},
        lambda p, p_embed, x, batch, key: jnp.mean(jnp.square((x + p["bias"]).astype(jnp.float32))),
        specs={"block": {"w": P(None, "tensor")}} if "tensor" in mesh_axes else None,
    )
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=math.prod(mesh_axes.values()), **mesh_axes)
    config = zj.ZeroConfig(precision="bf16", **dict(fields))
    program = zj.build_train_step(model, optax.contrib.muon(1e-2, ns_steps=STEPS), config, mesh)
    batch = {"x": jax.ShapeDtypeStruct((16, 4, ROWS), jnp.float32)}
    return program, program.lower(batch).compile().as_text(), batch


def float32_flops(text):
    """Return the FLOPs of a device's float32 products.

    They belong to the optimizer, since the model's products are in bfloat16.
    """
    total = 0
    for computation in parse_module(text).computations.values():
        for i in computation.instructions.values():
            assert "gemm" not in i.text or i.op != "custom-call", (
                "this count does not support products that are calls"
            )
            if i.op != "dot":
                continue
            left = parse_arrays(computation.instructions[i.operands[0]].shape)[0]
            summed = parse_ints(i.text.split("lhs_contracting_dims={")[1].split("}")[0])
            (out,) = parse_arrays(i.shape)
            total += (
                2 * math.prod(out.dims) * math.prod(left.dims[d] for d in summed)
                if left.dtype == "f32"
                else 0
            )
    return total


MATRIX_FLOPS = STEPS * (2 * ROWS**2 * COLUMNS + 2 * ROWS**3 + 2 * ROWS**2 * COLUMNS)
"""x x^T, its square, and their product with x."""


@pytest.mark.by_default("stage_3")
@pytest.mark.parametrize(
    ("layers", "axes", "fields", "share"),
    [
        pytest.param(16, {"fsdp": 8}, {"stage": 3}, 2, id="stage_3"),
        pytest.param(16, {"fsdp": 8}, {"stage": 1}, 2, id="stage_1"),
        pytest.param(12, {"fsdp": 8}, {"stage": 2}, 2, id="layers_that_do_not_divide"),
        pytest.param(16, {"fsdp": 4, "tensor": 2}, {"stage": 3}, 2, id="tensor"),
        pytest.param(16, {"data": 2, "fsdp": 4}, {"stage": 3}, 4, id="hybrid"),
        pytest.param(16, {"fsdp": 8}, {"params": HOST, "opt_state": HOST}, None, id="host"),
    ],
)
def test_a_devices_products_are_its_share_and_bytes_those_that_memory_tells(
    layers, axes, fields, share, capfd
):
    program, text, batch = compiled(layers, tuple(axes.items()), tuple(fields.items()))
    assert INVOLUNTARY not in capfd.readouterr().err
    sent = program.memory(batch).collectives
    moved = [
        c
        for c in hlo.collectives(text, unknown_trips=1)
        if c.dtype == "f32" and c.num_bytes >= 1 << 16
    ]
    if share is None:  # streamed: one layer at a time, whose matrix every device gathers
        assert not hlo.unsafe_host_slices(text, 1)
        gathered = sum(c.num_bytes * c.times for c in moved if c.op == "all-gather")
        assert gathered == 4 * layers * ROWS * COLUMNS
        both = hlo.collective_bytes(text, least_bytes=1 << 16, unknown_trips=1)["all-gather"]
        assert sent["all_gather"] == pytest.approx(
            both * 7 / 8, rel=1e-2
        )  # the ends' vectors are small
        return
    assert float32_flops(text) == share * MATRIX_FLOPS
    assert {c.op for c in moved} == {"all-to-all"}
    parts = [n for name, n in axes.items() if name != "data"]
    # of each hop, in both directions
    size = sum(c.num_bytes * c.times for c in moved) // len(parts)
    assert sent["all_to_all"] == pytest.approx(size * sum((n - 1) / n for n in parts))
