"""Steps of a model with experts, compiled for absent H200s: what each layer sends.

Two all_to_alls of C E H elements in forward and two in backward; nothing is gathered over `expert`;
and the experts' gradients reach their shards by a reduce_scatter over `fsdp` and `context`.
"""

import collections
import functools
import math
from typing import Any

import expert_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo

pytestmark = pytest.mark.xdist_group("h200")
ROWS = 64
INNER = 256  # experts are larger than all other leaves together
MESHES: dict[str, dict[str, int]] = {
    "fsdp4_expert2": {"fsdp": 4, "expert": 2},
    "fsdp2_expert2_context2": {"fsdp": 2, "expert": 2, "context": 2},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "expert8": {"fsdp": 1, "expert": 8},
}


@functools.cache
def compiled(mesh_name: str, activations: str) -> tuple[list[hlo.Collective], Any, Any]:
    """Return a step's collectives, the mesh, and the program's memory report."""
    mesh = aot.gpu_mesh("h200", gpus_per_host=8, **MESHES[mesh_name])
    config = zj.ZeroConfig(stage=3, precision="bf16", activations=activations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "INNER", INNER)
        model = layers.model(zj.moe, num_layers=4)
        program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    ids = jax.ShapeDtypeStruct((ROWS, layers.TOKENS), jnp.int32)
    step = program.lower({"tokens": ids, "targets": ids}).compile()
    found = hlo.collectives(step.as_text() or "", unknown_trips=1, mesh=mesh)
    return found, mesh, program


def count_cells(mesh: Any) -> int:
    """Return C for the tokens of a device, at a capacity factor of 1.25."""
    shards = math.prod(size for axis, size in mesh.shape.items() if axis != "tensor")
    return math.ceil(1.25 * 2 * ROWS * layers.TOKENS / shards / layers.EXPERTS)


@pytest.mark.by_default("selective-fsdp2_expert2_context2")
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("activations", ["save", "selective", "remat"])
def test_a_layer_sends_its_cells_to_the_experts_and_back(activations, mesh_name):
    found, mesh, _ = compiled(mesh_name, activations)
    sent = collections.Counter[str]()
    for c in found:
        if c.op == "all-to-all":
            assert c.axes == "expert"
            assert c.times == 4  # once in each layer
            assert c.dtype == "bf16"
            cells = count_cells(mesh) * layers.EXPERTS
            assert c.num_bytes == 2 * cells * layers.WIDTH
            sent[c.computation] += 1
    # Only "remat" sends again what forward has sent.
    in_backward = {"save": 2, "selective": 2, "remat": 4}[activations]
    assert sorted(sent.values()) == [2, in_backward]


@pytest.mark.by_default("fsdp2_expert2_context2")
@pytest.mark.parametrize("mesh_name", MESHES)
def test_weights_of_experts_are_gathered_and_their_gradients_scattered_over_the_other_axes(
    mesh_name,
):
    found, mesh, program = compiled(mesh_name, "selective")
    others = {axis for axis in ("fsdp", "context") if mesh.shape.get(axis, 1) > 1}
    local = layers.WIDTH * INNER * layers.EXPERTS
    local //= mesh.shape["expert"] * mesh.shape["tensor"]  # elements of up, whole on a device
    moved = collections.Counter[tuple[str, str]]()
    for c in found:
        axes = frozenset((c.axes or "").split("+")) - {""}
        if c.num_bytes >= 2 * local:
            moved[c.op, "+".join(sorted(axes))] += c.num_bytes * c.times
    scattered = {key: n for key, n in moved.items() if key[0] == "reduce-scatter"}
    if others:
        assert scattered
    for op, axes in moved:
        if op in ("all-gather", "reduce-scatter", "all-reduce"):
            assert set(axes.split("+")) - {"tensor"} <= others, (op, axes)
            assert op != "all-reduce" or axes == "tensor"
    specs = program.shardings.params["blocks"]
    assert "expert" in str(specs["up"].spec)
    assert np.all([axis in str(specs["up"].spec) for axis in others])


@pytest.mark.exhaustive
def test_temporary_memory_is_that_of_the_account(monkeypatch):
    """The account counts the cells and products that a layer's derivative holds."""
    for name, size in (("WIDTH", 512), ("INNER", 1024), ("TOKENS", 512)):
        monkeypatch.setattr(layers, name, size)
    mesh = aot.gpu_mesh("h200", gpus_per_host=8, fsdp=4, expert=2)
    config = zj.ZeroConfig(stage=3, precision="bf16", activations="selective")
    model = layers.model(zj.moe, num_layers=8)
    program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    ids = jax.ShapeDtypeStruct((ROWS, layers.TOKENS), jnp.int32)
    batch = {"tokens": ids, "targets": ids}
    report = program.memory(batch)
    stats: Any = program.lower(batch).compile().memory_analysis()
    assert report.argument_bytes == stats.argument_size_in_bytes
    counted = report.device_bytes - report.argument_bytes
    np.testing.assert_allclose(stats.temp_size_in_bytes, counted, rtol=0.05)
