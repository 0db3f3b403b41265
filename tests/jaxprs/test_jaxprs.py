"""Flat jaxprs: what is inlined, and the two walks over the data flow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.jaxprs import FlatJaxpr, count_flops, dtype_of_products, evaluate, flatten, read


def flat(function: Any, *args: Any, **options: Any) -> FlatJaxpr:
    closed = jax.make_jaxpr(function)(*args)
    return flatten(closed.jaxpr, closed.consts, **options)


def names(instructions: Any) -> list[str]:
    return [i.eqn.primitive.name for i in instructions]


def test_flatten_inlines_each_call_of_one_function_into_slots_of_its_own() -> None:
    double = jax.jit(lambda x: jnp.sin(x) * 2.0)
    program = flat(lambda x, y: double(x) + double(y), 1.0, 2.0)
    assert names(program.instructions) == ["sin", "mul", "sin", "mul", "add"]
    outs = [out for i in program.instructions for out in i.outs]
    assert len(set(outs)) == len(outs)


def test_flatten_leaves_an_opaque_jit_as_one_equation() -> None:
    inner = jax.jit(jnp.sin)
    program = flat(lambda x: inner(x) + 1.0, 1.0, is_opaque=lambda eqn: True)
    assert [i.has_jaxpr for i in program.instructions] == [True, False]


def test_last_read_is_the_last_reader_or_the_end() -> None:
    program = flat(lambda x: (jnp.sin(x), jnp.cos(x)), 1.0)
    assert program.last_read[program.inputs[0]] == 1
    assert all(program.last_read[ref] == 2 for ref in program.outputs if isinstance(ref, int))


def several(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    a = jnp.sin(x)
    b = jnp.cos(y)
    return a * 3.0, a + b, jnp.exp(b)


@pytest.mark.parametrize(
    ("output", "expected"), [(0, ["sin", "mul"]), (1, ["sin", "cos", "add"]), (2, ["cos", "exp"])]
)  # fmt: skip
def test_live_is_what_an_output_needs_and_gives_its_value(output: int, expected: list[str]) -> None:
    x, y = jnp.float32(0.3), jnp.float32(0.7)
    program = flat(several, x, y)
    ref = program.outputs[output]
    live = program.live([ref])
    assert names(live) == expected
    slots = dict(zip(program.inputs, (x, y), strict=True))
    evaluate(live, slots)
    np.testing.assert_array_equal(read(ref, slots), several(x, y)[output])


def test_live_of_a_constant_is_nothing() -> None:
    program = flat(lambda x: 3.0, 1.0)
    assert program.live(program.outputs) == ()


def test_live_holds_roots_and_what_they_need() -> None:
    program = flat(several, 1.0, 2.0)
    live = program.live([program.outputs[0]], is_root=lambda i: i.eqn.primitive.name == "exp")
    assert names(live) == ["sin", "cos", "mul", "exp"]


def test_live_stops_at_operands_that_are_not_followed() -> None:
    program = flat(several, 1.0, 2.0)
    sine = program.instructions[0].outs[0]
    assert names(program.live([program.outputs[1]], is_followed=lambda slot: slot != sine)) == [
        "cos",
        "add",
    ]


def test_reached_is_the_starts_and_what_depends_on_them() -> None:
    program = flat(several, 1.0, 2.0)
    x, y = program.inputs
    of_x, of_y = program.reached([x]), program.reached([y])
    assert x in of_x
    assert y not in of_x
    assert [ref in of_x for ref in program.outputs] == [True, True, False]
    assert [ref in of_y for ref in program.outputs] == [False, True, True]
    assert program.reached([]) == set()


def test_reads_are_the_slots_among_the_operands() -> None:
    program = flat(lambda x: x * x + 2.0, 1.0)
    multiply, add = program.instructions
    assert multiply.reads == program.inputs * 2
    assert add.reads == multiply.outs


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (jnp.matmul, [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        (
            lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0],
            [(4, 8), (8, 8)],
            3 * 2 * 4 * 8 * 8,
        ),
        (
            lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w),
            [(4, 8), (8, 8)],
            2 * 2 * 4 * 8 * 8,
        ),
        (jax.checkpoint(jnp.matmul), [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        (
            lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
            [(2, 3, 7, 7), (5, 3, 3, 3)],
            2 * (2 * 5 * 7 * 7) * (3 * 3 * 3),
        ),
        (
            lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([1, 3])),
            [(4, 8), (2, 8, 16)],
            2 * 4 * 8 * 16,
        ),
        (jnp.tanh, [(4, 8)], 0),
    ],
)
def test_flops_of_products(function, shapes, expected):
    jaxpr = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    )
    assert (
        sum(count_flops(i.eqn) for i in flatten(jaxpr.jaxpr, jaxpr.consts).instructions) == expected
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_of_products_is_found_inside_of_loops(dtype):
    """Other operands do not matter, nor do small products of another dtype."""

    def body(x, w):
        return x + jax.lax.dot(x, w).astype(jnp.float32).astype(dtype), jnp.ones((2, 2)) @ jnp.ones(
            (2, 2)
        )

    def f(scale, x, w):
        return scale * jax.checkpoint(lambda x, w: jax.lax.scan(body, x, w)[0])(x, w).astype(
            jnp.float32
        )

    args = (jnp.float32(2), jnp.ones((8, 8), dtype), jnp.ones((3, 8, 8), dtype))
    products = [e for e in jax.make_jaxpr(f)(*args).eqns if count_flops(e)]
    assert [dtype_of_products(e) for e in products] == [dtype]
