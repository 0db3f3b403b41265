"""Derive the optimizer state that `tx.init(params)` would return for weights not loaded yet.

The weights may be larger than memory, so `tx.init` is not run. Instead its jaxpr is interpreted
over what is known of each value.

    Copy(i)     weight i unchanged, or cast to another   the float32 copy of a wrapper that averages
                float dtype                              weights
    numbers     one for all elements, or a few           zero moments; counts; learning rates
    None        anything else                            sums over weights; random numbers

    x = known numbers, f any equation    ->  f(x), computed, if it stays one number or a few
    x = Copy(i), f a copy or a cast      ->  Copy(i)
    else                                 ->  None
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint import INLINE_ELEMENTS
from zerojax.jaxprs import FILLS, POINTWISE, Constant, Instruction, bind, flatten
from zerojax.trees import OptState, Params

_COPIES = frozenset({"copy", "convert_element_type", "reshape", "name", "stop_gradient"})


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of the weight with this index in the order of the parameter tree."""

    index: int


InitialValue = np.ndarray | np.generic | Copy | None
"""A leaf's numbers, or one number for all of its elements; a copy of a weight; or None if unknown.
"""


def initial_values(
    init: Callable[[Params], OptState], abstract_params: Params
) -> list[InitialValue]:
    """Return the initial value of each leaf of `init(params)`.

    Args:
      init: init function of an optimizer.
      abstract_params: shapes of the parameters, in float32.
    """
    closed = jax.make_jaxpr(init)(abstract_params)
    flat = flatten(closed.jaxpr, closed.consts)
    known: dict[int, InitialValue] = {slot: Copy(index) for index, slot in enumerate(flat.inputs)}

    def value(ref: int | Constant) -> InitialValue:
        return known.get(ref) if isinstance(ref, int) else _numbers(ref.value)

    for i in flat.instructions:
        known.update(zip(i.outs, _results(i, [value(ref) for ref in i.ins]), strict=True))
    return [value(ref) for ref in flat.outputs]


def _numbers(value: Any) -> InitialValue:
    """Return an array as one number if all elements are equal, unchanged if small, else None."""
    # A random key has an extended dtype, which numpy cannot hold.
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    array = np.asarray(value)
    if array.size and (array == array.reshape(-1)[0]).all():
        return array.reshape(-1)[0]
    return array if array.size <= INLINE_ELEMENTS else None


def _results(i: Instruction, values: Sequence[InitialValue]) -> list[InitialValue]:
    """Return the known values of an equation's results."""
    name = i.eqn.primitive.name
    outs = [v.aval for v in i.eqn.outvars]
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in i.eqn.invars]
    if name in _COPIES and isinstance(values[0], Copy):
        before: Any = i.eqn.invars[0].aval
        after: Any = outs[0]
        is_same = (before.shape, before.dtype) == (after.shape, after.dtype)
        return [values[0] if is_same or _narrows(before, after) else None]
    numbers = [v for v in values if isinstance(v, np.ndarray | np.generic)]
    if len(numbers) < len(values):
        return [None] * len(outs)
    # Equal elements stay equal in any shape.
    if name in FILLS and not numbers[0].shape:
        return [numbers[0]]
    if name in POINTWISE and not i.has_jaxpr and not any(n.shape for n in numbers):
        # One element stands for all.
        return [_numbers(out) for out in bind(i.eqn, [jnp.asarray(n) for n in numbers])]
    all_shapes = [*shapes, *(getattr(out, "shape", ()) for out in outs)]
    if all(math.prod(shape) <= INLINE_ELEMENTS for shape in all_shapes):
        arrays = [
            jnp.asarray(np.broadcast_to(n, shape)) for n, shape in zip(numbers, shapes, strict=True)
        ]
        return [_numbers(out) for out in bind(i.eqn, arrays)]
    return [None] * len(outs)


def _narrows(before: Any, after: Any) -> bool:
    """Return whether a cast of a weight equals the reader's cast: from float32, in one rounding.

    Weights are read in float32.
    """
    return (
        before.shape == after.shape
        and before.dtype == jnp.float32
        and jnp.issubdtype(after.dtype, jnp.floating)
    )
