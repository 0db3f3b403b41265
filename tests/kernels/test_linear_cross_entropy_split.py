"""Over a mesh, the loss and its gradients equal those of one device.

Tokens, vocabulary and w are split in every supported way.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from pallas_kernels.linear_cross_entropy import Config, Split, linear_cross_entropy
from zerojax.tiling.head_loss import grad_spec

B, S, D, V = 8, 3, 16, 104
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
MESHES = {
    "tensor 4": {"tensor": 4},
    "2 x 2 x 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 8": {"fsdp": 8},
}
W_SPECS = {
    "whole": None,
    "D": P("fsdp", "tensor"),
    "V": P(None, ("tensor", "fsdp")),
    "V, fsdp first": P(None, ("fsdp", "tensor")),
    "V alone": P(None, "fsdp"),
    "data too": P(("data", "fsdp"), "tensor"),
}


def make_mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    return zj.make_mesh(
        **{"data": 1, "fsdp": 1} | axes, devices=jax.devices()[: int(np.prod(list(axes.values())))]
    )


@functools.cache
def problem(dtype: Any = jnp.float32) -> tuple[Any, Any, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((B, S, D), (D, V)))
    return x, w, rng.integers(-2, V, (B, S)).astype(np.int32)


def value_and_grads(loss: Any, mesh: Any, *arguments: Any) -> Any:
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with jax.set_mesh(mesh):
        return jax.block_until_ready(step(*arguments))


@functools.cache
def expected() -> Any:
    x, w, labels = problem()
    return jax.device_get(
        jax.jit(
            jax.value_and_grad(
                lambda x, w: linear_cross_entropy(
                    x, w, labels, implementation="reference", **OPTIONS
                ),
                (0, 1),
            )
        )(x, w)
    )


def assert_equal(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


CASES = [(mesh, "whole", passes) for mesh in MESHES for passes in (1, 2)]
CASES += [("2 x 2 x 2", spec, 1) for spec in W_SPECS if spec != "whole"] + [
    ("fsdp 8", "V", 2),
    ("fsdp 8", "D", 2),
]


@pytest.mark.parametrize(("axes", "w_spec", "passes"), CASES)
def test_split_equals_one_device(axes, w_spec, passes):
    x, w, labels = problem()
    mesh = make_mesh(MESHES[axes])
    config = Config(block_t=2, block_v=5, passes=passes)  # neither divides a device's part
    loss = functools.partial(
        zj.linear_cross_entropy, w_spec=W_SPECS[w_spec], config=config, **OPTIONS
    )
    got = value_and_grads(lambda x, w, y: loss(x, w, y), mesh, x, w, labels)
    assert_equal(got, expected())
    spec = W_SPECS[w_spec] or grad_spec(
        (D, V),
        P(None, "tensor" if "tensor" in MESHES[axes] else None),
        mesh,
        tuple(axis for axis in mesh.axis_names if axis != "tensor"),
    )
    assert got[1][1].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_losses_of_tokens_and_their_own_cotangents():
    x, w, labels = problem()
    weights = np.random.default_rng(1).normal(size=(B, S)).astype(np.float32)
    both = []
    for mesh, implementation in (
        (make_mesh(MESHES["2 x 2 x 2"]), "xla"),
        (make_mesh({"fsdp": 1}), "reference"),
    ):
        loss = functools.partial(
            zj.linear_cross_entropy, reduction="none", ignore_index=5, implementation=implementation
        )
        both.append(
            value_and_grads(
                lambda x, w, loss=loss: (weights * loss(x, w, labels)).sum(), mesh, x, w
            )
        )
    assert_equal(both[0], jax.device_get(both[1]))


def test_a_vocabulary_that_tensor_does_not_divide_stays_whole():
    x, w, labels = problem()
    w = w[:, : V - 1]
    labels = np.minimum(labels, V - 2)
    both = [
        value_and_grads(lambda x, w: zj.linear_cross_entropy(x, w, labels), make_mesh(axes), x, w)
        for axes in ({"fsdp": 2, "tensor": 2}, {"fsdp": 1})
    ]
    assert_equal(both[0], jax.device_get(both[1]))


def test_padding_alone_on_one_device_and_a_wrong_label_on_another():
    """On a device whose tokens do not count, the cotangent is 0.

    A label of V makes every gradient NaN, on whichever device it is.
    """
    x, w, labels = problem()
    mesh, labels = make_mesh(MESHES["2 x 2 x 2"]), labels.copy()
    labels[:4] = -1
    loss = jax.jit(jax.value_and_grad(zj.linear_cross_entropy, (0, 1)))
    with jax.set_mesh(mesh):
        value, (dx, dw) = jax.block_until_ready(loss(x, w, labels))
    plain = jax.jit(
        jax.value_and_grad(
            functools.partial(linear_cross_entropy, implementation="reference"), (0, 1)
        )
    )(x, w, labels)
    assert_equal((value, (dx, dw)), jax.device_get(plain))
    assert not np.asarray(dx[:4]).any()
    labels[7] = V
    with jax.set_mesh(mesh):
        value, (_, dw) = jax.block_until_ready(loss(x, w, labels))
    assert np.isnan(value)
    assert np.isnan(np.asarray(dw)).all()


def test_inside_a_shard_map_of_the_callers_own_the_call_is_local():
    x, w, labels = problem()
    mesh = make_mesh({"fsdp": 4})

    def local(x, w, labels):
        return zj.linear_cross_entropy(x, w, labels, reduction="sum")[None]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("fsdp"), P(), P("fsdp")), out_specs=P("fsdp"), check_vma=False
    )
    with jax.set_mesh(mesh):
        sums = jax.block_until_ready(jax.jit(mapped)(x, w, labels))
    whole = jax.jit(functools.partial(linear_cross_entropy, reduction="sum"))(x, w, labels)
    np.testing.assert_allclose(np.asarray(sums).sum(), whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ({"x": (3, 1, D)}, {}, "T=3 does not divide by 4, the devices along data x fsdp"),
        ({"w": (D, V + 1)}, {"w_spec": P(None, "tensor")}, "V=105 does not divide by 2"),
        ({"x": (B, S, 15), "w": (15, V)}, {"w_spec": P("fsdp")}, "D=15 does not divide by 2"),
        ({}, {"w_spec": P("tensor", None)}, "'tensor' splits w"),
        ({}, {"w_spec": P("rows", None)}, r"and not \['rows'\]"),
        ({}, {"w_spec": P("data", "fsdp")}, "both dims"),
        ({}, {"w_spec": P("fsdp", "fsdp")}, "each axis once"),
        ({}, {"w_spec": P(None, None, "fsdp")}, "one entry per dim"),
    ],
)
def test_bad_splits_are_refused_in_plain_words(shapes, options, words):
    shapes = {"x": (B, S, D), "w": (D, V)} | shapes
    x, w = jnp.ones(shapes["x"]), jnp.ones(shapes["w"])
    with pytest.raises(ValueError, match=words):
        zj.linear_cross_entropy(
            x, w, np.zeros(x.shape[:-1], int), mesh=make_mesh(MESHES["2 x 2 x 2"]), **options
        )


@pytest.mark.parametrize(
    ("w", "dw", "words"),
    [
        (P("fsdp", "tensor"), P(None, ("tensor", "fsdp")), "w is gathered from"),
        (P(None, "tensor"), P(None, ("fsdp", "tensor")), "V must be split as in"),
        (P(None, None), P(None, "tensor"), "'tensor' splits dw"),
    ],
)
def test_gradients_go_where_w_is_or_to_finer_shards(w, dw, words):
    with pytest.raises(ValueError, match=words):
        Split(make_mesh(MESHES["2 x 2 x 2"]), ("data", "fsdp"), w, dw)


def test_a_split_has_no_whole_logits_to_compare_with():
    split = Split(make_mesh({"fsdp": 4}), ("fsdp",), P())
    with pytest.raises(NotImplementedError, match="it takes no split"):
        linear_cross_entropy(*problem(), split=split, implementation="reference")


def test_a_spec_without_a_mesh_is_refused():
    with pytest.raises(ValueError, match="needs a mesh"):
        zj.linear_cross_entropy(*problem(), w_spec=P("fsdp"))
