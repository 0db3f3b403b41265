"""A user's mesh is accepted by the names of its axes, with its devices in their order.

Unsupported meshes are refused by name.
"""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.sharding import own_mesh, place_any_batch, place_batch

AUTO = AxisType.Auto


def mesh_of(kind=AxisType.Explicit, **sizes):
    devices = np.asarray(jax.devices()[: int(np.prod(list(sizes.values())))])[
        ::-1
    ]  # an order of the user's own
    return Mesh(
        devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(kind,) * len(sizes)
    )


def test_a_mesh_of_make_mesh_is_taken_as_it_is(caplog):
    mesh = zj.make_mesh(fsdp=4, tensor=2)
    with caplog.at_level(logging.INFO, "zerojax"):
        assert own_mesh(mesh) is mesh
    assert not caplog.records


def test_a_mesh_has_expert_and_context_where_they_are_above_1():
    mesh = zj.make_mesh(data=1, fsdp=-1, tensor=2, context=2, expert=2)
    assert tuple(mesh.shape.items()) == (
        ("data", 1),
        ("fsdp", 1),
        ("expert", 2),
        ("context", 2),
        ("tensor", 2),
    )
    assert own_mesh(mesh) is mesh
    assert tuple(zj.make_mesh(fsdp=4, context=-1).shape) == ("data", "fsdp", "context", "tensor")
    with pytest.raises(
        ValueError, match=r"fsdp and context are both -1: .* by default: pass fsdp=1"
    ):
        zj.make_mesh(context=-1)
    assert tuple(zj.make_mesh(fsdp=8).shape) == ("data", "fsdp", "tensor")
    with pytest.raises(ValueError, match=r"data 1 x fsdp 4 x context 4 x tensor 1 = 16, but there"):
        zj.make_mesh(fsdp=4, context=4)
    with pytest.raises(ValueError, match=r"context='2': a positive integer"):
        zj.make_mesh(context="2")


@pytest.mark.parametrize(
    ("sizes", "axes", "expected"),
    [
        ({"x": 8}, {"fsdp": "x"}, {"data": 1, "fsdp": 8, "tensor": 1}),
        (
            {"r": 2, "x": 2, "y": 2},
            {"data": "r", "fsdp": ("x", "y")},
            {"data": 2, "fsdp": 4, "tensor": 1},
        ),
        (
            {"t": 2, "one": 1, "x": 4},
            {"tensor": "t", "fsdp": ["x"]},
            {"tensor": 2, "data": 1, "fsdp": 4},
        ),
        (
            {"x": 2, "one": 1, "y": 4},
            {"fsdp": ("x", "y"), "data": "one"},
            {"data": 1, "fsdp": 8, "tensor": 1},
        ),
        (
            {"cp": 2, "experts": 2, "x": 2},
            {"context": "cp", "expert": "experts", "fsdp": "x"},
            {"context": 2, "expert": 2, "data": 1, "fsdp": 2, "tensor": 1},
        ),
        (
            {"fsdp": 4, "expert": 1, "context": 2},
            None,
            {"data": 1, "fsdp": 4, "context": 2, "tensor": 1},
        ),
        ({"data": 2, "fsdp": 2, "tensor": 2}, None, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": 4}, None, {"data": 1, "fsdp": 4, "tensor": 1}),
        ({"one": 1}, {}, {"data": 1, "fsdp": 1, "tensor": 1}),
    ],
)
def test_any_mesh_is_taken_with_its_devices_in_their_order(sizes, axes, expected, caplog):
    theirs = mesh_of(**sizes)
    with caplog.at_level(logging.INFO, "zerojax"):
        mesh = own_mesh(theirs, axes)
    assert dict(mesh.shape) == expected
    assert set(mesh.axis_types) == {AUTO}
    assert list(mesh.devices.flat) == list(theirs.devices.flat)
    [record] = caplog.records
    assert "(Explicit)" in record.getMessage()
    assert own_mesh(mesh) is mesh


@pytest.mark.parametrize(
    ("sizes", "axes", "words"),
    [
        (
            {"x": 4, "y": 2},
            {"fsdp": "x"},
            r"the axis 'y' of 2 devices, .* none of pipe, data, fsdp, expert, context, tensor.*axes=\{\"fsdp\": 'y'\}",
        ),
        ({"x": 8}, None, "'x' of 8 devices"),
        (
            {"x": 8},
            {"fsdp": "z"},
            r"axes\['fsdp'\]='z': the mesh has the axes \('x',\), and no 'z'",
        ),
        (
            {"x": 8},
            {"zero": "x"},
            "axes has the key 'zero', and the axes are pipe, data, fsdp, expert, context, tensor",
        ),
        ({"x": 8}, {"fsdp": 0}, r"axes\['fsdp'\]=0: the name of a mesh axis"),
        ({"x": 8}, {"fsdp": "x", "data": "x"}, "names 'x' twice"),
        ({"x": 8}, ["x"], r"axes=\['x'\]: a dict is needed"),
        (
            {"x": 2, "y": 2, "z": 2},
            {"fsdp": ("x", "z"), "data": "y"},
            r"axes\['fsdp'\]=\('x', 'z'\): .*follow each other",
        ),
        (
            {"x": 2, "y": 4},
            {"fsdp": ("y", "x")},
            r"axes\['fsdp'\]=\('y', 'x'\): .*follow each other",
        ),
    ],
)
def test_axes_that_fit_no_mesh_are_named(sizes, axes, words):
    with pytest.raises(ValueError, match=words):
        own_mesh(mesh_of(**sizes), axes)


@pytest.mark.parametrize("rows", [8, 5])
def test_a_batch_on_the_users_mesh_is_moved(rows):
    theirs = mesh_of(x=4, y=2)
    mesh = own_mesh(theirs, {"data": "x", "fsdp": "y"})
    values = np.arange(rows * 3.0).reshape(rows, 3)
    split = P(("x", "y")) if rows == 8 else P()
    with jax.set_mesh(theirs):
        batch = {"a": jax.device_put(values, NamedSharding(theirs, split)), "scale": 2.0}
    placed, padding = place_any_batch(batch, mesh)
    assert (padding is None) == (rows == 8)
    assert placed["a"].sharding.mesh == mesh
    np.testing.assert_array_equal(np.asarray(placed["a"])[:rows], values)
    if rows == 8:
        assert place_batch(batch, mesh, 1)["a"].sharding == placed["a"].sharding
