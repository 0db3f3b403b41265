"""Weights stored in 8 or 4 bits: their bytes, and the dims that blocks run along.

Shards equal the full weight, and one layer is decoded at a time.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.storage import (
    BLOCKS,
    Layout,
    abstract_encoded,
    choose_layout,
    decode,
    encode,
    encoded_bytes,
    encoded_spec,
    refusal,
)

pytestmark = pytest.mark.xdist_group("kernels")
FORMATS: list[Any] = list(BLOCKS)


def draw(shape, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


@pytest.mark.parametrize(
    ("format", "held"), [("int8", 1 + 4 / 256), ("nf4", 0.5 + 1 / 64 + 8 / 16384)]
)
def test_storage_of_a_layer_of_a_large_model_holds_1_016_and_0_516_bytes_a_parameter(format, held):
    d, f = 4096, 11008
    leaves = [
        ((d, d), (8, 1)),
        ((d, 32, 128), (8, 1, 1)),
        ((d, f), (64, 1)),
        ((f, d), (1, 8)),
        ((32000, d), (8, 1)),
    ]
    sizes = [encoded_bytes(choose_layout(format, *leaf), leaf[0]) for leaf in leaves]
    assert sum(sizes) / sum(math.prod(shape) for shape, _ in leaves) == pytest.approx(
        held, rel=1e-3
    )
    if format == "nf4":  # a group has as many rows as it needs if a shard has 8 blocks per row
        assert choose_layout(format, (f, d), (1, 8)).group == (32, 8)


@pytest.mark.parametrize(
    ("format", "shape", "shards", "layout"),
    [
        (
            "nf4",
            (128, 256),
            (1, 1),
            Layout(format="nf4", inner=(256,), group=(1, 256)),
        ),  # 512 blocks
        ("nf4", (128, 256), (8, 1), Layout(format="nf4", inner=(256,), group=(1, 64))),
        ("nf4", (128, 256), (1, 4), Layout(format="nf4", group=(128, 1))),
        (
            "nf4",
            (128, 4, 32),
            (2, 2, 1),
            Layout(format="nf4", inner=(32,), group=(64, 1)),
        ),  # heads of 32: 64 for a shard's two
        (
            "nf4",
            (128, 44),
            (2, 4),
            Layout(format="nf4", moved=-2, group=(11, 1)),
        ),  # 11 columns per shard
        ("nf4", (2, 128, 44), (1, 1, 4), Layout(format="nf4", moved=-2, group=(11, 2))),
        ("int8", (256, 44), (1, 4), Layout(format="int8", moved=-2)),
        ("int8", (3, 3, 64, 64), (1, 1, 8, 1), Layout(format="int8", inner=(64,))),
        ("int8", (16, 16), (1, 1), Layout(format="int8", inner=(16,))),
    ],
)
def test_storage_blocks_lie_along_what_a_shard_has_of_the_last_split_dim_and_behind(
    format, shape, shards, layout
):
    assert choose_layout(format, shape, shards) == layout
    assert refusal(format, shape, shards) is None


@pytest.mark.parametrize(
    ("format", "shape", "shards", "message"),
    [
        ("nf4", (4096,), (8,), r"a leaf \[4096\] has less than 2 dims"),
        ("nf4", (3, 4), (1, 1), "12 elements, less than a block of 64"),
        ("int8", (3, 64), (1, 1), "192 elements, less than a block of 256"),
        (
            "nf4",
            (96, 88),
            (2, 4),
            r"\[96, 88\] in \[2, 4\] shards has 22 elements in a row of a shard's dims 1 to 1, and \[48, 22\] along its dims: "
            "none is a multiple of the block, 64",
        ),
    ],
)
def test_storage_of_a_leaf_that_does_not_divide_is_refused_with_its_numbers(
    format, shape, shards, message
):
    with pytest.raises(ValueError, match=message):
        choose_layout(format, shape, shards)
    assert re.search(message, refusal(format, shape, shards) or "")


def test_storage_of_bad_input_says_what_is_needed():
    with pytest.raises(ValueError, match="format='int4': choose from int8, nf4"):
        choose_layout("int4", (64, 64), (1, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError,
        match=r"\[64, 64\] in \[3, 1\] shards: each dim needs a number of shards that divides it",
    ):
        choose_layout("nf4", (64, 64), (3, 1))
    with pytest.raises(ValueError, match=r"w is \[64, 32\], and its layout merges the dims \[64\]"):
        encode(draw((64, 32)), choose_layout("nf4", (64, 64), (1, 1)))
    with pytest.raises(
        ValueError,
        match=r"w is \[1, 64\], 1 rows of 64 elements, and its layout has groups of 1 rows and 64 blocks of 64",
    ):
        encode(draw((1, 64)), choose_layout("nf4", (64, 64), (1, 1)))


MESHES = {
    "rows": ((32, 512), P("fsdp", None)),
    "columns": ((8, 2048), P(None, "fsdp")),
    "both": ((8, 2048), P("fsdp", "tensor")),
    "heads": ((16, 4, 512), P("fsdp", "tensor", None)),
    "one dim over both": ((32, 512), P(("fsdp", "tensor"), None)),
    "moved": ((1024, 12), P("fsdp", "tensor")),
    "stack": ((3, 32, 512), P(None, "fsdp", None)),
}


@pytest.mark.by_default("both-nf4", "moved-int8")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", MESHES)
def test_storage_of_shards_gathered_is_that_of_the_whole_and_decoding_commutes(case, format):
    shape, spec = MESHES[case]
    sizes = {"fsdp": 4, "tensor": 2}
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    shards = [
        math.prod(sizes[axis] for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis)
        if entry
        else 1
        for entry in spec
    ]
    first = int(case == "stack")
    layout = choose_layout(format, shape[first:], shards[first:])
    assert (layout.moved is not None) == (case == "moved")
    w = draw(shape)
    own = P(*encoded_spec(layout, spec))
    whole = encode(w, layout)

    def gather(tree: Any, entries: P) -> Any:
        def one(a: jax.Array) -> jax.Array:
            for dim, entry in enumerate(entries):
                a = a if entry is None else jax.lax.all_gather(a, entry, axis=dim, tiled=True)
            return a

        return jax.tree.map(one, tree)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=(own, P(), P()), check_vma=False
    )
    def run(w):
        q = encode(w, layout)
        return q, decode(gather(q, own)), gather(decode(q), spec)

    q, gathered_first, decoded_first = jax.block_until_ready(run(w))
    assert_same(q, whole)
    assert_same(gathered_first, decode(whole))
    assert_same(decoded_first, gathered_first)
    assert all(a.ndim == len(own) for a in jax.tree.leaves(q))
    # The partitioner does not communicate either if the result is split like the arrays.
    put = jax.tree.map(lambda a: jax.device_put(a, jax.NamedSharding(mesh, own)), q)
    compiled = jax.jit(decode, out_shardings=jax.NamedSharding(mesh, spec)).lower(put).compile()
    assert not [
        word
        for word in ("all-", "collective", "reduce-scatter")
        if word in (compiled.as_text() or "")
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_storage_of_a_stack_is_that_of_each_layer_and_has_the_abstract_shapes(format):
    w = draw((3, 16, 64))
    layout = choose_layout(format, (16, 64), (2, 1))
    stack = encode(w, layout)
    for n in range(3):
        assert_same(jax.tree.map(lambda a, n=n: a[n], stack), encode(w[n], layout))
    abstract = abstract_encoded(layout, w.shape)
    assert jax.tree.structure(abstract) == jax.tree.structure(stack)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(abstract)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(stack)
    ]
    assert encoded_bytes(layout, w.shape) == sum(a.nbytes for a in jax.tree.leaves(stack))
    y = np.asarray(decode(stack, jnp.float32))
    assert y.shape == w.shape
    largest = {"int8": 1 / 253, "nf4": 0.153 + 1 / 127}[format] * np.abs(
        np.asarray(w, np.float32)
    ).max()
    assert np.abs(y - np.asarray(w, np.float32)).max() <= largest


@pytest.mark.parametrize("format", FORMATS)
def test_storage_is_decoded_a_layer_at_a_time_and_no_decoded_layer_is_kept_for_backward(format):
    d = 128
    layout = choose_layout(format, (d, d), (1, 1))

    def loss(bias, q, x):
        def block(x, layer):
            b, q = layer
            q, x = jax.lax.optimization_barrier(
                (q, x)
            )  # its derivative returns zeros for the encoded arrays
            return jnp.tanh(x @ decode(q, jnp.float32) + b), None

        # Nothing inside a layer is saved, as in a step that recomputes its layers; otherwise all
        # decoded layers would be saved.
        x, _ = jax.lax.scan(jax.checkpoint(block), x, (bias, q))
        return x.sum()

    def temp_bytes(num_layers: int) -> int:
        q = abstract_encoded(layout, (num_layers, d, d))
        bias, x = (
            jax.ShapeDtypeStruct((num_layers, d), jnp.float32),
            jax.ShapeDtypeStruct((1, d), jnp.float32),
        )
        stats: Any = jax.jit(jax.grad(loss)).lower(bias, q, x).compile().memory_analysis()
        return stats.temp_size_in_bytes

    few, many = temp_bytes(2), temp_bytes(10)
    # small arrays, such as each layer's input; a decoded layer has 4 * d * d
    assert many - few <= 8 * 4 * d * 8
