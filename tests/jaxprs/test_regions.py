"""Control flow of traced programs: an equation's contents, and the equation with other contents."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from zerojax.jaxprs import (
    ENTERED,
    FlatJaxpr,
    Function,
    Instruction,
    checkpointed,
    entered,
    list_regions,
    rebind,
    rebind_scan,
    trace,
)

Arrays = Sequence[Any]
MESH = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
X = jnp.arange(3.0)


def scanned(x: jax.Array, weight: jax.Array) -> Any:
    def body(carry: tuple[Any, Any], row: jax.Array) -> tuple[Any, Any]:
        a, b = carry
        return (b, a * weight + row), a + row

    return jax.lax.scan(body, (x, 2 * x), jnp.stack([x, x + 1, x * x]), reverse=True)


def branched(x: jax.Array, weight: jax.Array) -> Any:
    return jax.lax.cond(weight[0] > 1, lambda x: x * weight, lambda x: x - weight, x)


def of_platforms(x: jax.Array, weight: jax.Array) -> Any:
    return jax.lax.platform_dependent(x, weight, cpu=jnp.add, default=jnp.subtract)


def rematerialised(x: jax.Array, weight: jax.Array) -> Any:
    return jax.checkpoint(lambda x, weight: jnp.sin(x * weight))(x, weight)


def by_shards(x: jax.Array, weight: jax.Array) -> Any:
    spec = PartitionSpec("fsdp")
    run = jax.shard_map(lambda x, w: (x + w, x * w), mesh=MESH, in_specs=spec, out_specs=spec)
    return run(x, weight)


CONTROL_FLOW = [scanned, branched, of_platforms, rematerialised, by_shards]


def run_with(
    program: FlatJaxpr, apply: Callable[[Instruction, Arrays], Arrays], values: Arrays
) -> list[Any]:
    """Run a program; a function replaces the instructions that hold jaxprs."""

    def evaluator(instructions: Sequence[Instruction], slots: dict[int, Any]) -> None:
        for i in instructions:
            ins = [slots[ref] if isinstance(ref, int) else ref.value for ref in i.ins]
            outs = (
                apply(i, ins) if list_regions(i.eqn) else i.eqn.primitive.bind(*ins, **i.eqn.params)
            )
            is_list = i.eqn.primitive.multiple_results or list_regions(i.eqn)
            slots.update(zip(i.outs, outs if is_list else [outs], strict=True))

    return program.run(values, evaluator)


@pytest.mark.parametrize("function", CONTROL_FLOW)
@pytest.mark.parametrize("factor", [1, 3])
def test_rebind_applies_an_equation_around_other_functions(function: Any, factor: int) -> None:
    program, _ = trace(function, X, X + 1)
    held = [i for i in program.instructions if list_regions(i.eqn)]
    assert len(held) == 1

    def apply(i: Instruction, values: Arrays) -> Arrays:
        functions = [times(region.flatten().run) for region in list_regions(i.eqn)]
        return rebind(i.eqn, functions, values)

    def times(run: Function) -> Function:
        return lambda values: [factor * out for out in run(values)]

    def expected(*args: Any) -> Any:
        return jax.tree.leaves(function(*args))

    outs = jax.jit(lambda *args: run_with(program, apply, args))(X, X + 1)
    if factor == 1:
        for out, want in zip(outs, jax.jit(expected)(X, X + 1), strict=True):
            np.testing.assert_array_equal(out, want)
    elif function is scanned:  # a scan's carry is multiplied in each of three iterations
        (b, _), _ = scanned(X, X + 1)
        assert not np.allclose(outs[0], b)
    else:
        for out, want in zip(outs, expected(X, X + 1), strict=True):
            np.testing.assert_allclose(out, factor * want, rtol=1e-6)


@pytest.mark.parametrize("function", CONTROL_FLOW)
def test_rebind_makes_the_equation_that_was_there(function: Any) -> None:
    program, _ = trace(function, X, X + 1)

    def apply(i: Instruction, values: Arrays) -> Arrays:
        return rebind(i.eqn, [region.flatten().run for region in list_regions(i.eqn)], values)

    again, _ = trace(lambda *args: run_with(program, apply, args), X, X + 1)
    (was,), (now,) = (
        [i.eqn for i in p.instructions if list_regions(i.eqn)] for p in (program, again)
    )
    assert was.primitive.name == now.primitive.name
    for name in (
        "length",
        "reverse",
        "unroll",
        "branches_platforms",
        "mesh",
        "in_specs",
        "out_specs",
        "policy",
        "prevent_cse",
    ):
        assert was.params.get(name) == now.params.get(name), name


def test_a_scan_is_entered_with_constants_that_are_no_arrays() -> None:
    program, _ = trace(scanned, X, X + 1)
    (i,) = (i for i in program.instructions if i.eqn.primitive.name == "scan")
    (region,) = list_regions(i.eqn)
    carry, rows = [X, 2 * X], jnp.stack([X, X + 1, X * X])
    num_consts = region.carried.start
    assert num_consts == 1
    assert region.is_loop

    def body(values: Arrays) -> Arrays:
        consts, carry, slices = region.split(values)
        assert consts == ["a name"]
        return region.flatten().run([X + 1, *carry, *slices])

    outs = rebind_scan(i.eqn, body, ["a name", *carry, rows])
    for out, want in zip(outs, jax.tree.leaves(scanned(X, X + 1)), strict=True):
        np.testing.assert_array_equal(out, want)


def test_a_body_is_transformed_as_a_whole() -> None:
    program, _ = trace(scanned, X, X + 1)
    (i,) = (i for i in program.instructions if i.eqn.primitive.name == "scan")
    region, values = list_regions(i.eqn)[0], [X + 1, X, 2 * X, jnp.stack([X, X, X])]

    def run(*values: Any) -> Any:
        return rebind_scan(i.eqn, region.flatten().run, values, around=jax.checkpoint)

    (scan,) = (i for i in trace(run, *values)[0].instructions if i.eqn.primitive.name == "scan")
    inside = list_regions(scan.eqn)[0].flatten()
    assert [i.eqn.primitive.name for i in inside.instructions] == ["remat2"]


def test_reached_follows_what_goes_around_a_loop() -> None:
    program, _ = trace(scanned, X, X + 1)
    (i,) = (i for i in program.instructions if i.eqn.primitive.name == "scan")
    (region,) = list_regions(i.eqn)
    inner = region.flatten()
    first, second = (inner.inputs[p] for p in region.carried)
    # The weight reaches the second carry immediately, and the first an iteration later.
    weight = i.ins[0]
    assert isinstance(weight, int)
    reached = region.reached(inner, i.ins, {weight})
    assert {first, second} <= reached
    # Stacked outputs and scanned inputs do not go around.
    assert inner.inputs[region.carried.stop] not in reached
    assert region.reached(inner, i.ins, set()) == set()


def test_reached_by_result_separates_what_passes_an_island_or_a_barrier_together() -> None:
    spec = PartitionSpec("fsdp")
    island = jax.shard_map(lambda x, w: (x + 1, w * 2), mesh=MESH, in_specs=spec, out_specs=spec)
    for function in (island, lambda x, w: jax.lax.optimization_barrier((x, w))):
        program, _ = trace(function, X, X)
        x, w = program.inputs
        of_x, of_w = program.outputs
        assert {x, of_x} == program.reached([x], by_result=True) & {x, w, of_x, of_w}
        assert {x, of_x, of_w} == program.reached([x]) & {x, w, of_x, of_w}


def test_a_checkpoint_keeps_its_policy_but_for_what_is_never_saved() -> None:
    policy = jax.checkpoint_policies.everything_saveable
    program, _ = trace(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)), policy=policy)(x), X)
    (i,) = program.instructions

    def times_computed(never: str) -> int:
        run = checkpointed(i.eqn, lambda x: jnp.sin(jnp.exp(x)), lambda prim, params: prim == never)
        return str(jax.make_jaxpr(jax.grad(lambda x: run(x).sum()))(X)).count("= exp ")

    assert times_computed("none") == 1
    assert times_computed("exp") == 2


def test_a_while_and_an_unknown_equation_have_no_regions() -> None:
    program, _ = trace(lambda x: jax.lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, x), X)
    (i,) = program.instructions
    assert i.has_jaxpr
    assert list_regions(i.eqn) == []
    (sine,) = trace(jnp.sin, X)[0].instructions
    assert list_regions(sine.eqn) == []


def test_the_table_of_what_is_entered_reads_as_its_data() -> None:
    """The docstring below the table shows the same table."""
    text = ast.parse(inspect.getsource(entered)).body[-1]
    assert isinstance(text, ast.Expr)
    assert isinstance(text.value, ast.Constant)
    lines = str(text.value.value).splitlines()
    names = {
        "jit": "jit", "custom_*": "custom_vjp_call", "remat": "remat2", "scan": "scan", "cond": "cond", "while": "while",
        "shard_map": "shard_map",
    }  # fmt: skip
    header = next(line.split() for line in lines if line.split()[:1] == ["interpreter"])[2:]
    assert header == list(names)
    drawn = {}
    for line in lines:
        row = line.split()
        if row and row[0] in ENTERED:
            drawn[row[0]] = dict(zip(header, row[2:], strict=True))
    assert drawn.keys() == ENTERED.keys()
    for interpreter, cells in drawn.items():
        for column, cell in cells.items():
            is_entered = names[column] in ENTERED[interpreter]
            # A note in place of a cross describes an equation that is entered in its own way.
            assert cell in ("x", "-") or re.fullmatch(r"\(\d\)", cell)
            assert cell != "-" or not is_entered, (interpreter, column)
            assert cell != "x" or is_entered, (interpreter, column)
