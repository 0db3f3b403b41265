"""Run or compile each form in which a step slices host memory."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpu_checks.mixes import H, Sizes
from gpu_checks.rows import Row, attempt


def check_slices(sizes: Sizes) -> Iterator[Row]:
    """Run each form of access to host memory, in ascending and descending order of records."""
    import jax

    from host_offload.device import build_form, forms, records

    del sizes
    for name, form in forms().items():

        def rows(name: str = name, form: Any = form) -> Iterator[Row]:
            program, wrong = build_form(form, jax.devices()[0]), []
            stack = records()
            for direction, order in (
                ("ascending", range(len(stack))),
                ("descending", reversed(range(len(stack)))),
            ):
                order = np.array(list(order), np.int32)
                found, right = program(order, stack), form.expect(order, stack)
                wrong += (
                    [direction]
                    if any(not np.array_equal(f, r) for f, r in zip(found, right, strict=True))
                    else []
                )
            text = f"wrong records {' and '.join(wrong)}" if wrong else "right"
            yield Row(name, text, "right", not wrong, {"wrong": len(wrong)})

        yield from attempt(name, rows)


def compile_forms(mesh: Any, judged: Callable[[str, Any, float], Row]) -> Iterator[Row]:
    """Compile each form of access to host memory, in descending order of records."""
    import jax

    from host_offload.device import forms, linear_order, records
    from zerojax.sharding import named

    stack = records()
    descending = linear_order(np.arange(len(stack), dtype=np.int32)[::-1])
    for name, form in forms().items():

        def rows(name: str = name, form: Any = form) -> Iterator[Row]:
            start = time.perf_counter()
            with jax.set_mesh(mesh):
                here, there = named(mesh, ()), named(mesh, (), H)
                given = jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=there)

                def run(stack: Any) -> Any:
                    return form.run(descending, stack, H)

                compiled = (
                    jax.jit(run, donate_argnums=0, out_shardings=(there, here))
                    .lower(given)
                    .compile()
                )
            yield judged(name, compiled, time.perf_counter() - start)

        yield from attempt(name, rows)
