import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.sharding import batch_axes, zero_axes
from zerojax.sharding.partition import leaf_spec, param_specs
from zerojax.sharding.specs import parse_axes, without_axes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, {"data": 1, "fsdp": 8, "tensor": 1}),
        ({"data": 2, "fsdp": -1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": -1, "fsdp": 4}, {"data": 2, "fsdp": 4, "tensor": 1}),
    ],
)
def test_mesh_fills_the_free_axis(sizes, expected):
    mesh = zj.make_mesh(**sizes)
    assert dict(mesh.shape) == expected
    assert mesh.axis_names == ("data", "fsdp", "tensor")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 2, "fsdp": 3}, ["data 2 x fsdp 3 x tensor 1 = 6", "8 devices", "-1"]),
        ({"data": 3, "fsdp": -1}, ["8 devices", "divide by 3"]),
        ({"data": -1, "fsdp": -1}, ["data and fsdp", "at most one"]),
        ({"fsdp": 0}, ["fsdp=0"]),
        ({"tensor": 1.5}, ["tensor=1.5"]),
    ],
)
def test_mesh_refuses_axes_that_do_not_multiply(sizes, words):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        zj.make_mesh(**sizes)
    assert all(word in str(e.value) for word in words), e.value


def test_mesh_of_other_axes_is_refused():
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    model = zj.Model(lambda key: {"w": jnp.ones(8)}, lambda p, b, k: jnp.sum(p["w"]))
    with pytest.raises(
        ValueError,
        match=r"'shards' of 8 devices, which is none of pipe, data, fsdp, expert, context, tensor",
    ):
        zj.build_train_step(model, None, zj.ZeroConfig(), mesh)  # type: ignore[arg-type]


def test_leaf_spec_takes_the_largest_dim_that_divides_and_of_layers_the_first():
    mesh = zj.make_mesh(fsdp=4, tensor=2)
    assert leaf_spec((8, 16), mesh, ("fsdp",)).sharded == (None, "fsdp")
    assert leaf_spec((8, 18), mesh, ("fsdp",)).sharded == ("fsdp", None)
    assert leaf_spec((64, 16), mesh, ("fsdp",), ("tensor", None)).sharded == ("tensor", "fsdp")
    assert leaf_spec((64, 15), mesh, ("fsdp",), ("tensor", None)).sharded == (
        ("tensor", "fsdp"),
        None,
    )
    assert leaf_spec((64,), mesh, ("fsdp",), ("tensor",)).sharded == (("tensor", "fsdp"),)
    assert leaf_spec((64, 4, 4), mesh, ("fsdp",), first_dim=1).sharded == (None, "fsdp", None)
    assert leaf_spec((64, 4, 32), mesh, ("fsdp",), first_dim=1).sharded == (None, "fsdp", None)
    assert leaf_spec((64, 6, 32), mesh, ("fsdp",), first_dim=1).sharded == (None, None, "fsdp")
    assert leaf_spec((64, 8, 4, 32), mesh, ("fsdp",), first_dim=2).sharded == (
        None,
        None,
        "fsdp",
        None,
    )
    assert leaf_spec((64, 8, 32), mesh, ("fsdp",), (None, "tensor", None), first_dim=1).sharded == (
        None,
        "tensor",
        "fsdp",
    )
    assert leaf_spec((7, 3), mesh, ("fsdp",)).replicated is not None
    assert leaf_spec((), mesh, ("fsdp",)).replicated is not None


def test_every_zero_axis_splits_a_leaf_but_those_of_its_own_spec():
    mesh = zj.make_mesh(fsdp=2, expert=2, context=2)
    axes = zero_axes(mesh)
    assert axes == ("fsdp", "expert", "context")
    assert batch_axes(mesh) == ("data", "fsdp", "expert")
    assert leaf_spec((8, 16), mesh, axes).sharded == (None, axes)
    spec = leaf_spec((3, 4, 8, 5), mesh, axes, (None, "expert", None, None), first_dim=1)
    assert spec.sharded == (None, "expert", ("fsdp", "context"), None)
    assert spec.added_axes == ("fsdp", "context")
    assert spec.base == (None, "expert", None, None)
    why = leaf_spec((7, 12), mesh, axes).replicated
    assert why == "no dim of (7, 12) divides by fsdp=2 x expert=2 x context=2"


def test_specs_that_name_expert_fit_meshes_without_it():
    tree = {"w": jax.ShapeDtypeStruct((4, 8, 6), jnp.float32)}
    user_specs = {"w": P("expert", None, "tensor")}
    mesh = zj.make_mesh(fsdp=4, tensor=2)
    (spec,) = param_specs(tree, user_specs, mesh, zero_axes(mesh)).values()
    assert spec.sharded == (None, "fsdp", "tensor")
    mesh = zj.make_mesh(fsdp=2, expert=2, context=2)
    (spec,) = param_specs(tree, user_specs, mesh, zero_axes(mesh)).values()
    assert spec.sharded == ("expert", ("fsdp", "context"), "tensor")
    with pytest.raises(ValueError, match="names 'context', which ZeRO assigns"):
        param_specs(tree, {"w": P("context")}, mesh, zero_axes(mesh))


@given(
    st.lists(st.integers(0, 48), max_size=4),
    st.lists(st.sampled_from([None, "tensor"]), max_size=4),
    st.integers(0, 1),
)
def test_leaf_spec_is_always_valid(shape, base, first_dim):
    mesh = zj.make_mesh(data=1, fsdp=4, tensor=2)
    base = tuple(base[: len(shape)]) + (None,) * (len(shape) - len(base))
    if base.count("tensor") > 1 or any(s and n % 2 for n, s in zip(shape, base, strict=True)):
        return
    spec = leaf_spec(shape, mesh, ("fsdp",), base, first_dim=first_dim)
    axes = [a for entry in spec.sharded for a in parse_axes(entry)]
    assert len(axes) == len(set(axes))
    for n, entry in zip(shape, spec.sharded, strict=True):
        assert n % math.prod(mesh.shape[a] for a in parse_axes(entry)) == 0
    assert without_axes(spec.sharded, "fsdp") == spec.base == base
    assert ("fsdp" in axes) == (spec.replicated is None)
    assert all("fsdp" not in parse_axes(entry) for entry in spec.sharded[:first_dim])
    jax.sharding.NamedSharding(mesh, P(*spec.sharded)).shard_shape(tuple(shape))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"w": P("model", None)}, ["['w']", "'model'", "fsdp"]),
        ({"w": P("fsdp", None)}, ["['w']", "ZeRO assigns"]),
        ({"w": P(None, None, "tensor")}, ["['w']", "3 entries", "(8, 7)"]),
        ({"w": P(None, "tensor")}, ["['w']", "dim 1", "(8, 7)", "divide by 2"]),
        ({"v": P()}, ["mirror"]),
        ({"w": "tensor"}, ["'tensor'"]),
        ({"w": P("tensor", "tensor")}, ["['w']", "twice"]),
    ],
)
def test_given_specs_that_do_not_fit_are_refused(spec, words):
    tree = {"w": jax.ShapeDtypeStruct((8, 7), jnp.float32)}
    with pytest.raises(ValueError) as e:  # noqa: PT011
        param_specs(tree, spec, zj.make_mesh(fsdp=4, tensor=2), ("fsdp",))
    assert all(word in str(e.value) for word in words), e.value
