"""Gathers and scatters around rings, overlapped with their products, equal the plain ones.

Values, transposes and full programs are compared.
"""

import dataclasses
import functools

import gpt
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_sequence_parallel as plain_rings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.activations import SequenceParallelism, flow, sequence_parallel
from zerojax.activations.rings import RingProduct, column_products, row_product
from zerojax.grads import float32_grads
from zerojax.jaxprs import flatten

mesh_of = plain_rings.mesh_of
RINGS = {"sequence_parallel": True, "tensor_overlap": True}
MESHES = {
    "t2": {"tensor": 2},
    "t4": {"tensor": 4},
    "f2t2": {"fsdp": 2, "tensor": 2},
    "f2t4": {"fsdp": 2, "tensor": 4},
}


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def value_and_transpose(function, *args):
    """Return a function's results, and its arguments' cotangents for varying output cotangents."""

    def run(*args):
        outs, transpose = jax.vjp(function, *args)
        return outs, transpose(jax.tree.map(jnp.cos, outs))

    return jax.block_until_ready(jax.jit(run)(*args))


def check_equal(ring, plain):
    for a, b in zip(jax.tree.leaves(ring), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


@pytest.mark.by_default("f2t2-again")
@pytest.mark.parametrize("again", [True, False], ids=["again", "once"])
@pytest.mark.parametrize("mesh", MESHES)
def test_rings_equal_their_products_in_value_and_transpose(mesh, again):
    mesh = mesh_of(**MESHES[mesh])

    def split(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*spec)))

    def column(z, w, v):
        z, w, v = split(z, "fsdp", "tensor"), split(w, None, "tensor"), split(v, None, "tensor")
        # The second weight comes first, and its split dim is the middle one of three.
        second = RingProduct(((2,), (2,)), True, 1, 1)
        ys = column_products(
            z, [w, v], [RingProduct(((2,), (0,)), False, 1, 1), second], mesh, again
        )
        specs = (("fsdp", None, "tensor"), (None, "tensor", "fsdp"))
        return [split(y, *spec) for y, spec in zip(ys, specs, strict=True)]

    args = normal(4, 8, 6), normal(6, 8), normal(3, 4, 6)
    plain = value_and_transpose(
        lambda z, w, v: [jnp.einsum("bth,hf->btf", z, w), jnp.einsum("gkh,bth->gkbt", v, z)], *args
    )
    check_equal(value_and_transpose(column, *args), plain)

    def row(h, v):
        product = RingProduct(
            ((3, 2), (1, 0)), False, 1, 0
        )  # heads and their width, as in attention
        y = row_product(split(h, "fsdp", None, "tensor"), split(v, "tensor"), product, mesh)
        return split(y, "fsdp", "tensor")

    args = normal(4, 8, 4, 2), normal(4, 2, 6)
    plain = value_and_transpose(lambda h, v: jnp.einsum("btkf,kfh->bth", h, v), *args)
    check_equal(value_and_transpose(row, *args), plain)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_gradients_beside_rings_are_float32_products_of_16_bits():
    """Pieces of z go around the ring together with pieces of cotangents.

    They are not cotangents, so their products must not be widened.
    """
    mesh, product = mesh_of(tensor=2), RingProduct(((2,), (0,)), False, 1, 1)
    z, w, dy = (
        jnp.asarray(normal(*shape), jnp.bfloat16) for shape in ((2, 4, 8), (8, 6), (2, 4, 6))
    )

    def derivative(dy, z, w):
        dz, dw = jax.vjp(lambda z, w: column_products(z, [w], [product], mesh)[0], z, w)[1](dy)
        return dw, dz

    found = list(equations(jax.make_jaxpr(float32_grads(derivative, "cuda"))(dy, z, w).jaxpr))
    dtypes = [
        ([v.aval.dtype.name for v in e.invars], e.outvars[0].aval)
        for e in found
        if e.primitive.name == "dot_general"
    ]
    assert all(operands == ["bfloat16"] * 2 for operands, _ in dtypes)
    assert [out.dtype.name for _, out in dtypes if out.shape in (w.shape, w.shape[::-1])] == [
        "float32"
    ]
    assert {e.outvars[0].aval.dtype.name for e in found if e.primitive.name == "ppermute"} == {
        "bfloat16"
    }


# --- blocks and programs --------------------------------------------------------------------------

HIDDEN = 8
AROUND = {
    "column": "its operand is passed around a ring during the product",
    "row": "its sum is passed around a ring during the product",
}


def gated(multiply=lambda z, w: z.astype(w.dtype) @ w):
    """Return a model of gated blocks.

    Two column products read one value, each through a cast of its own.
    """

    def init(key):
        k1, k2, k3 = jax.random.split(key, 3)
        shapes = ((k1, (HIDDEN, 16)), (k2, (HIDDEN, 16)), (k3, (16, HIDDEN)))
        return dict(
            zip(
                ("gate", "up", "down"),
                (jax.random.normal(k, s) / 3 for k, s in shapes),
                strict=True,
            )
        )

    def block(p, x, key):
        del key
        z = jnp.sin(x)
        return x + multiply(jax.nn.silu(multiply(z, p["gate"])) * multiply(z, p["up"]), p["down"])

    free, summed, one = P(None, "tensor"), P("tensor", None), {"scale": P()}
    return zj.LayeredModel(
        num_layers=2,
        init_embed=lambda key: {"scale": jnp.ones(HIDDEN)},
        embed=lambda p, batch, key: batch["x"] * p["scale"],
        init_block=init,
        block=block,
        init_head=lambda key: {"scale": jnp.ones(HIDDEN)},
        head=lambda p, p_embed, x, batch, key: jnp.mean((x * p["scale"] - batch["y"]) ** 2),
        specs={"embed": one, "head": one, "block": {"gate": free, "up": free, "down": summed}},
    )


def test_tensor_overlap_makes_one_ring_of_a_value_and_one_of_a_sum():
    model, seen = gated(), SequenceParallelism()
    ringed = sequence_parallel(model, mesh_of(tensor=2), seen, overlap=True)
    params, x = model.init_block(jax.random.key(0)), normal(2, 4, HIDDEN)
    pair = [
        value_and_transpose(lambda p, x, m=m: m.block(p, x, None), params, x)
        for m in (ringed, model)
    ]
    check_equal(*pair)
    assert [(p.kind, p.why) for p in seen.products] == [
        (kind, AROUND[kind]) for kind in ("column", "column", "row")
    ]
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    closed = jax.make_jaxpr(lambda p, x: ringed.block(p, x, None))(narrow, x)
    permutes = str(closed).count("ppermute")
    assert permutes == 2, (
        f"one column ring and one row ring of 2 devices have one permute each, not {permutes}"
    )
    # The saved values of a ring are split like its product.
    program = flatten(closed.jaxpr, closed.consts)
    batch = ("data", "fsdp")
    inputs = [("tensor", None), (None, "tensor"), (None, "tensor"), (batch, "tensor", None)]
    specs = flow(program, inputs, {"data": 1, "fsdp": 1, "tensor": 2})
    rings = [i for i in program.instructions if i.eqn.primitive.name == "custom_vjp_call"]
    column, row = [[specs[out] for out in i.outs] for i in rings]
    assert (column, row) == ([(batch, None, "tensor")] * 2, [(batch, "tensor", None)])


def test_tensor_overlap_without_sequence_parallel_is_refused():
    with pytest.raises(
        ValueError,
        match=r"tensor_overlap=True with sequence_parallel=False.*set sequence_parallel=True",
    ):
        zj.ZeroConfig(tensor_overlap=True)


@pytest.mark.exhaustive
def test_tensor_overlap_leaves_what_no_ring_serves():
    """A product with a derivative of its own keeps its gather.

    All products that read the same value keep theirs too.
    """

    @jax.custom_vjp
    def multiply(z, w):
        return z @ w

    multiply.defvjp(
        lambda z, w: (z @ w, (z, w)),
        lambda s, dy: (dy @ s[1].T, jnp.einsum("bth,btf->hf", s[0], dy)),
    )
    model, seen = gated(multiply), SequenceParallelism()
    ringed = sequence_parallel(model, mesh_of(tensor=2), seen, overlap=True)
    params, x = model.init_block(jax.random.key(0)), normal(2, 4, HIDDEN)
    check_equal(
        *[
            value_and_transpose(lambda p, x, m=m: m.block(p, x, None), params, x)
            for m in (ringed, model)
        ]
    )
    assert [p.why for p in seen.products] == [
        *["its operand is gathered; no ring, since it is a custom_vjp_call"] * 2,
        "its result is scattered; no ring, since it is a custom_vjp_call",
    ]


ON_HOST = plain_rings.ON_HOST
CASES = {
    **plain_rings.CASES,
    "t4-host": ("t4", 3, ON_HOST | {"activations": "selective"}),
    "f2t2-in-backward": ("f2t2", 3, ON_HOST | {"update": "in_backward"}),
    "f2t2-on-host": (
        "f2t2",
        2,
        {"opt_state": "pinned_host", "update_on": "host", "num_microbatches": 2},
    ),
    "t4-remat": ("t4", 0, {"activations": "remat", "num_microbatches": 2}),
    "f2t2-ahead": ("f2t2", 3, {"gather_ahead": True, "activations": "selective"}),
    "d2f2t2-disk": ("d2f2t2", 3, {"activations": "nvme"}),
}


@functools.cache
def plain(config):
    return plain_rings.trained(config, mesh_of(), stage=0)[:2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_tensor_overlap_equals_the_plain_program(case, tmp_path):
    mesh, stage, settings = CASES[case]
    if "nvme" in settings.values():
        settings = settings | {"swap_dir": str(tmp_path)}
    result = plain_rings.trained(
        plain_rings.CONFIG, mesh_of(**plain_rings.MESHES[mesh]), stage=stage, **settings, **RINGS
    )
    plain_rings.check(plain(plain_rings.CONFIG), *result)
    assert [p.why for p in result[2] if p.kind in AROUND] == [
        AROUND[p.kind] for p in result[2] if p.kind in AROUND
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, ON_HOST], ids=["device", "host"])
def test_tensor_overlap_beside_tiles_equals_the_plain_program(settings):
    config = dataclasses.replace(plain_rings.CONFIG, mlp_tiles=2)
    result = plain_rings.trained(config, mesh_of(fsdp=2, tensor=2), stage=3, **settings, **RINGS)
    plain_rings.check(plain(config), *result)
    whys = [p.why for p in result[2] if p.kind in AROUND]
    assert whys[:2] == [AROUND["column"], AROUND["row"]]
    assert [why.split(" over tiles")[0] for why in whys[2:]] == [
        "its operand is gathered before the loop",
        "its result is scattered after the loop",
    ]


def losses_of(model, mesh, **settings):
    """Return the losses of 5 steps of a gated model."""
    batch = {"x": normal(4, 8, HIDDEN), "y": normal(8, 4, HIDDEN).reshape(4, 8, HIDDEN)}
    with zj.build_train_step(model, optax.sgd(0.5), zj.ZeroConfig(**settings), mesh) as program:
        state, losses = program.init(jax.random.key(0)), []
        for _ in range(5):
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses.append(float(metrics["loss"]))
        return np.asarray(losses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "settings", [{}, {"activations": "selective"}, ON_HOST], ids=["save", "selective", "host"]
)
def test_tensor_overlap_in_16_bits_is_as_near_as_gathers_are(precision, reduce_dtype, settings):
    """Partial sums are rounded at each device that they pass, as in a reduce_scatter."""
    mesh, exact = mesh_of(fsdp=2, tensor=4), losses_of(gated(), mesh_of(), stage=0)
    fields = {
        "stage": 3,
        "precision": precision,
        "reduce_dtype": reduce_dtype,
        "sequence_parallel": True,
        **settings,
    }
    gathers, rings = (
        np.abs(losses_of(gated(), mesh, tensor_overlap=on, **fields) - exact).max()
        for on in (False, True)
    )
    assert exact[0] - exact[-1] > 0.05
    assert rings < max(1.5 * gathers, 2.0**-8 * exact[0]), (rings, gathers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_tensor_overlap_in_a_region_of_the_models_own(policy):
    model, mesh = gated(), mesh_of(tensor=4)
    block = jax.checkpoint(model.block, policy=policy and getattr(jax.checkpoint_policies, policy))
    params, x = model.init_block(jax.random.key(0)), normal(2, 8, HIDDEN)
    ringed = sequence_parallel(
        dataclasses.replace(model, block=block), mesh, SequenceParallelism(), overlap=True
    )
    check_equal(
        *[
            value_and_transpose(lambda p, x, m=m: m.block(p, x, None), params, x)
            for m in (ringed, model)
        ]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["save", "selective"])
def test_tensor_overlap_keeps_what_gathers_keep(activations):
    mesh, settings = (
        mesh_of(fsdp=2, tensor=4),
        {"stage": 3, "activations": activations, "sequence_parallel": True},
    )

    def kept(tensor_overlap):
        config = zj.ZeroConfig(tensor_overlap=tensor_overlap, **settings)
        program = zj.build_train_step(
            gpt.layered_gpt(plain_rings.CONFIG), optax.adamw(1e-3), config, mesh
        )
        # Only the 2 layers' permutes count, not the head's.
        values = [
            v for v in program.kept(plain_rings.BATCH) if v.count == plain_rings.CONFIG.layers
        ]
        return sorted(((v.shape, v.spec, v.num_bytes) for v in values), key=str)

    assert kept(True) == kept(False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["save", "selective", "remat"])
def test_beside_rings_gradients_are_reduced_once_a_step(activations, caplog):
    settings = {
        "stage": 3,
        "activations": activations,
        "num_microbatches": 2,
        "reduce_every": "step",
    }
    result = plain_rings.trained(plain_rings.CONFIG, mesh_of(fsdp=2, tensor=2), **settings, **RINGS)
    plain_rings.check(plain(plain_rings.CONFIG), *result)
    assert "is not known" not in caplog.text
