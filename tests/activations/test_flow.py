"""The splits found for a traced function's values equal the partitioner's."""

from typing import Any

import gpt
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import zerojax as zj
from zerojax.activations import flow, has_island
from zerojax.jaxprs import PRODUCTS, evaluate, flatten, list_regions, read
from zerojax.sharding import pad_spec

BATCH, T = ("data", "fsdp"), "tensor"
X = (BATCH, None, None)


def traced(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return flatten(closed.jaxpr, closed.consts)


def floats(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def specs_of(function, specs, *shapes, sizes=None):
    """Return what `flow` reports for the results of a function."""
    program = traced(function, *floats(*shapes))
    slots = flow(program, specs, sizes or {"data": 1, "fsdp": 2, "tensor": 2})
    return [slots[ref] for ref in program.outputs]


def chosen(program, specs, args, mesh, slots):
    """Return the shardings that XLA chooses for some slots of a program that returns them."""

    def run(*leaves):
        values = dict(zip(program.inputs, leaves, strict=True))
        evaluate(program.instructions, values)
        return [values[slot] for slot in slots], [read(ref, values) for ref in program.outputs]

    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    return jax.jit(run, in_shardings=shardings).lower(*args).compile().output_shardings[0]


def gpt_block(**settings):
    c = gpt.GPTConfig(
        **{"vocab": 32, "seq": 16, "hidden": 32, "layers": 2, "heads": 4, "tensor_axis": "tensor"}
        | settings
    )
    model = gpt.layered_gpt(c)
    params, x = (
        jax.eval_shape(model.init_block, jax.random.key(0)),
        jax.ShapeDtypeStruct((4, 16, 32), jnp.float32),
    )
    leaves, tree = jax.tree.flatten(params)
    flat = tree.flatten_up_to(model.specs["block"])
    specs = [*(pad_spec(s, leaf.ndim) for s, leaf in zip(flat, leaves, strict=True)), X]
    program = traced(
        lambda leaves, x: model.block(jax.tree.unflatten(tree, leaves), x, None), leaves, x
    )
    return program, specs, [*leaves, x]


def test_flow_says_what_the_partitioner_chooses():
    mesh = zj.make_mesh(data=1, fsdp=2, tensor=4)
    program, specs, args = gpt_block()
    said = flow(program, specs, mesh.shape)
    avals: dict[int, Any] = {
        out: v.aval
        for i in program.instructions
        for out, v in zip(i.outs, i.eqn.outvars, strict=True)
    }
    data = program.reached(program.inputs[-1:])
    known = [slot for slot in avals if said[slot] is not None and slot in data]
    assert len(known) > 0.9 * len(data & set(avals))
    for slot, sharding in zip(known, chosen(program, specs, args, mesh, known), strict=True):
        expected = NamedSharding(mesh, PartitionSpec(*(said[slot] or ())))
        assert sharding.is_equivalent_to(expected, avals[slot].ndim), (slot, said[slot], sharding)
    products = [said[i.outs[0]] for i in program.instructions if i.eqn.primitive.name in PRODUCTS]
    over = [spec.index(T) if spec and T in spec else None for spec in products]
    assert over == [
        2,
        1,
        1,
        None,
        2,
        None,
    ]  # qkv, scores[B, heads, T, 1, S], weighted[B, heads, w, 1, T], proj, fc, out


ROW, COLUMN = (T, None), (None, T)
CASES = {
    # name: (function, specs of its operands, their shapes, spec of its result)
    "dims that split a dim": (
        lambda a: a.reshape(4, 8, 2, 3),
        [(BATCH, T)],
        [(4, 48)],
        (BATCH, T, None, None),
    ),
    "dims that merge": (lambda a: a.reshape(4, 96), [(BATCH, T, None)], [(4, 8, 12)], (BATCH, T)),
    "a merge of a dim behind another": (
        lambda a: a.reshape(32, 12),
        [(BATCH, T, None)],
        [(4, 8, 12)],
        None,
    ),
    "one behind a dim that is split to the end": (
        lambda a: a.reshape(16, 12),
        [(BATCH, T, None)],
        [(2, 8, 12)],
        ((*BATCH, T), None),
    ),
    "a part that does not divide": (lambda a: a.reshape(4, 3, 16), [(BATCH, T)], [(4, 48)], None),
    "dims of 1": (
        lambda a: a.reshape(4, 1, 8)[..., None],
        [(BATCH, T)],
        [(4, 8)],
        (BATCH, None, T, None),
    ),
    "a split operand beside one that is not": (
        jnp.add,
        [(BATCH, T), (BATCH, None)],
        [(4, 8), (4, 8)],
        (BATCH, T),
    ),
    "splits that differ": (jnp.add, [COLUMN, ROW], [(8, 8), (8, 8)], None),
    "a dim of 1 beside a split one": (
        jnp.multiply,
        [(None, None), (BATCH, T)],
        [(4, 1), (4, 8)],
        (BATCH, T),
    ),
    "a row product": (jnp.dot, [(BATCH, T), ROW], [(4, 8), (8, 12)], (BATCH, None)),
    "a column product": (jnp.dot, [(BATCH, None), COLUMN], [(4, 8), (8, 12)], (BATCH, T)),
    "a column product of a split sequence": (
        jnp.dot,
        [(BATCH, T, None), COLUMN],
        [(4, 8, 12), (12, 8)],
        None,
    ),
    "a slice along a whole dim": (lambda a: a[:, 2:6], [(BATCH, None)], [(4, 8)], (BATCH, None)),
    "a slice along a split dim": (lambda a: a[:, 2:6], [(BATCH, T)], [(4, 8)], None),
    "concatenated": (
        lambda a, b: jnp.concatenate([a, b], 1),
        [(T, None), (None, None)],
        [(4, 8), (4, 2)],
        (T, None),
    ),
    "padded": (lambda a: jnp.pad(a, ((0, 0), (1, 1))), [(T, None)], [(4, 8)], (T, None)),
    "parts": (lambda a: jnp.split(a, 2, 1)[1], [(T, None)], [(4, 8)], (T, None)),
    "a sum over devices": (lambda a: a.sum(1), [(BATCH, T)], [(4, 8)], (BATCH,)),
    "a running sum": (lambda a: jnp.cumsum(a, 1), [(T, None)], [(4, 8)], (T, None)),
    "sorted": (lambda a: jnp.sort(a, 1), [(T, None)], [(4, 8)], (T, None)),
    "largest": (lambda a: jax.lax.top_k(a, 2)[0], [(T, None)], [(4, 8)], (T, None)),
    "a look-up in a split vocabulary": (
        lambda w, i: w[i.astype(jnp.int32)],
        [ROW, (BATCH, None)],
        [(8, 12), (4, 5)],
        (BATCH, None, None),
    ),
    "a look-up of split rows": (
        lambda w, i: w[i.astype(jnp.int32)],
        [COLUMN, (BATCH, None)],
        [(8, 12), (4, 5)],
        (BATCH, None, T),
    ),
    "what a mask meets": (lambda a: a + jnp.tri(8), [COLUMN], [(8, 8)], COLUMN),
    "a custom derivative": (jax.nn.relu, [COLUMN], [(4, 8)], COLUMN),
    "a region": (
        jax.checkpoint(lambda a, w: jnp.sin(a @ w)),
        [(BATCH, None), COLUMN],
        [(4, 8), (8, 12)],
        (BATCH, T),
    ),
    "a carry": (
        lambda a, w: jax.lax.scan(lambda c, w: (c + a @ w, None), a, w)[0],
        [(BATCH, None), (None, None, T)],
        [(4, 8), (3, 8, 8)],
        (BATCH, T),
    ),
    "a carry that is split in the loop": (
        lambda a, b: jax.lax.scan(lambda c, b: (c * b, None), a, b)[0],
        [(BATCH, None), (None, None, T)],
        [(4, 8), (3, 4, 8)],
        (BATCH, T),
    ),
    "branches": (
        lambda a: jax.lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a),
        [(BATCH, None)],
        [(4, 8)],
        (BATCH, None),
    ),
    "constrained": (
        lambda a: jax.lax.with_sharding_constraint(a, PartitionSpec(None, T)),
        [(None, None)],
        [(4, 8)],
        COLUMN,
    ),
    "no rule": (jnp.linalg.cholesky, [(None, None)], [(4, 4)], None),
}


def test_flow_of_each_kind_of_equation():
    mesh = zj.make_mesh(data=1, fsdp=2, tensor=4)
    leaves, specs, outs = [], [], []
    with jax.set_mesh(mesh):
        for name, (function, given, shapes, expected) in CASES.items():
            program = traced(function, *floats(*shapes))
            (ref,) = program.outputs
            assert flow(program, given, mesh.shape)[ref] == expected, name
            if expected is not None:
                leaves, specs, outs = (
                    [*leaves, *floats(*shapes)],
                    [*specs, *given],
                    [*outs, (name, len(leaves), len(shapes))],
                )

        def run(*leaves):
            return [CASES[name][0](*leaves[first : first + count]) for name, first, count in outs]

        shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
        compiled = jax.jit(run, in_shardings=shardings).lower(*leaves).compile()
    for (name, *_), sharding in zip(outs, compiled.output_shardings, strict=True):
        expected = NamedSharding(mesh, PartitionSpec(*CASES[name][3]))
        assert sharding.is_equivalent_to(expected, len(CASES[name][3])), (name, sharding)


def test_flow_says_nothing_of_what_is_made_of_no_data_or_of_what_is_not_known():
    program = traced(lambda a: (jnp.arange(8.0), a + 1), *floats((8, 8)))
    assert [flow(program, [None], {})[ref] for ref in program.outputs] == [None, None]
    program = traced(
        lambda key, a: (jax.random.normal(key, a.shape), a * jax.random.normal(key, a.shape)),
        jax.random.key(0),
        *floats((8, 8)),
    )
    assert [flow(program, [(), COLUMN], {"tensor": 2})[ref] for ref in program.outputs] == [
        None,
        COLUMN,
    ]


def test_a_constraint_of_every_dim_is_known_for_a_value_that_is_not():
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    free = PartitionSpec.UNCONSTRAINED

    def constrained(x, *spec):
        unknown = jnp.linalg.cholesky(x)
        return jax.lax.with_sharding_constraint(unknown, NamedSharding(mesh, PartitionSpec(*spec)))

    assert specs_of(lambda x: constrained(x, "fsdp", None, "tensor"), [X], (4, 8, 8)) == [
        ("fsdp", None, "tensor")
    ]
    assert specs_of(lambda x: constrained(x, "fsdp", free, "tensor"), [X], (4, 8, 8)) == [None]


def test_an_island_of_every_axis_splits_its_results_by_their_specs():
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    spec = PartitionSpec("fsdp", None, "tensor")

    def island(axes):
        return jax.shard_map(
            jnp.linalg.cholesky,
            mesh=mesh,
            in_specs=PartitionSpec("fsdp"),
            out_specs=spec if len(axes) == 2 else PartitionSpec("fsdp"),
            axis_names=axes,
            check_vma=False,
        )

    everywhere, beside_tensor = (island(axes) for axes in ({"fsdp", "tensor"}, {"fsdp"}))
    assert specs_of(everywhere, [("fsdp", None, None)], (4, 8, 8)) == [("fsdp", None, "tensor")]
    assert specs_of(beside_tensor, [("fsdp", None, None)], (4, 8, 8)) == [None]
    assert has_island(traced(jax.jit(everywhere), *floats((4, 8, 8))))
    assert not has_island(traced(jnp.linalg.cholesky, *floats((4, 8, 8))))


def test_slots_inside_an_island_are_not_those_of_equations_taken_apart():
    mesh = zj.make_mesh(fsdp=2, tensor=1, devices=jax.devices()[:2])
    spec = PartitionSpec("fsdp")
    island = jax.shard_map(
        lambda x: jnp.cos(jnp.sin(x)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    program = traced(island, *floats((4, 8)))
    (i,) = program.instructions
    (region,) = list_regions(i.eqn)
    inside = {out for inner in region.flatten().instructions for out in inner.outs}
    taken_apart = traced(jnp.add, *floats((4, 8), (4, 8)))  # of other operands
    apart = dict.fromkeys(inside - set(i.outs), taken_apart)
    assert apart
    slots = flow(program, [("fsdp", None)], {"fsdp": 2}, apart)
    assert slots[i.outs[0]] == ("fsdp", None)
