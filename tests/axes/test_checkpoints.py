"""Checkpoints and exports move between meshes with and without `expert` and `context`."""

import pathlib
from typing import Any

import jax
import long_decoder
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import zerojax as zj

DISK = "nvme"
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp": ({"fsdp": 8}, {}),
    "every_axis_on_disk": (
        {"fsdp": 2, "context": 2, "expert": 2},
        {"params": DISK, "grads": DISK, "opt_state": DISK},
    ),
    "experts_and_tensor": ({"fsdp": 1, "expert": 4, "tensor": 2}, {"stage": 1}),
}


def build(place: str, folder: pathlib.Path) -> zj.Program:
    mesh, fields = PLACES[place]
    if DISK in fields.values():
        fields = {**fields, "swap_dir": folder}
    return zj.build_train_step(
        long_decoder.model(experts=True),
        optax.adam(1e-2),
        zj.ZeroConfig(**fields),
        zj.make_mesh(**mesh),
    )


def read(program: zj.Program, state: Any) -> list[np.ndarray]:
    """Return the weights of all layers, as float32."""
    return jax.tree.leaves(jax.device_get([tree for _, tree in program.iter_params(state)]))


@pytest.mark.by_default("fsdp-every_axis_on_disk")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp", "every_axis_on_disk"),
        ("every_axis_on_disk", "experts_and_tensor"),
        ("experts_and_tensor", "fsdp"),
    ],
)
def test_a_checkpoint_is_restored_on_other_axes_and_back(first, second, tmp_path):
    data = long_decoder.batches(2)
    checkpoints = [zj.Checkpointer(tmp_path / name) for name in ("there", "back")]
    with build(first, tmp_path) as program:
        state = program.init(jax.random.key(0))
        state, _ = jax.block_until_ready(program.step(state, data[0]))
        expected = read(program, state)
        shape = program.layout.abstract_params["blocks"]["up"].shape
        assert shape == (long_decoder.LAYERS, 8, 16, 48)  # [L, E, H, F] on every mesh
        checkpoints[0].save(program, state)
        checkpoints[0].wait()
        _, metrics = jax.block_until_ready(program.step(state, data[1]))
        loss = float(metrics["loss"])
        with build(second, tmp_path) as other:
            state = checkpoints[0].restore(other)
            for a, b in zip(read(other, state), expected, strict=True):
                np.testing.assert_array_equal(a, b)
            checkpoints[1].save(other, state)
            checkpoints[1].wait()
            _, metrics = jax.block_until_ready(other.step(state, data[1]))
            np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=2e-6)
        state = checkpoints[1].restore(program)
        for a, b in zip(read(program, state), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        _, metrics = jax.block_until_ready(program.step(state, data[1]))
        assert float(metrics["loss"]) == loss


@pytest.mark.by_default("every_axis_on_disk")
@pytest.mark.parametrize("place", ["every_axis_on_disk", "experts_and_tensor"])
def test_an_export_is_imported_and_exported_with_the_same_bits(place, tmp_path):
    exported = []
    for n, here in enumerate(("fsdp", place, "fsdp")):
        with build(here, tmp_path) as program:
            if exported:
                state = zj.import_params(program, exported[-1], key=jax.random.key(1))
            else:
                state = program.init(jax.random.key(0))
            with zj.Checkpointer(tmp_path / f"checkpoint{n}") as checkpoints:
                checkpoints.save(program, state)
        exported.append(tmp_path / f"{n}.safetensors")
        zj.export_safetensors(tmp_path / f"checkpoint{n}", exported[-1])
    first, *others = map(load_file, exported)
    assert first["blocks.up"].shape == (long_decoder.LAYERS, 8, 16, 48)  # [L, E, H, F]
    for other in others:
        assert list(other) == list(first)
        for name, array in first.items():
            np.testing.assert_array_equal(other[name], array)
