"""What an optimizer's init makes of imported weights, found out from its jaxpr."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint import INLINE_ELEMENTS
from zerojax.jaxprs import FILLS, POINTWISE, Constant, Instruction, bind, flatten

_COPIES = frozenset({"copy", "copy_p", "convert_element_type", "reshape", "name", "stop_gradient"})


@dataclasses.dataclass(frozen=True)
class Copy:
    """The weight of this index, in the order of the parameter tree."""

    index: int


Made = np.ndarray | np.generic | Copy | None
"""Of a leaf: its numbers, or one for all of its elements; a copy; or something else."""


def initial_values(init: Any, abstract_params: Any) -> list[Made]:
    """Tell of each leaf of `init(params)` what it is.

    Args:
      init: of an optimizer.
      abstract_params: float32 shapes.
    """
    closed = jax.make_jaxpr(init)(abstract_params)
    program = flatten(closed.jaxpr, closed.consts)
    known: dict[int, Made] = {slot: Copy(index) for index, slot in enumerate(program.inputs)}

    def value(ref: int | Constant) -> Made:
        return known.get(ref) if isinstance(ref, int) else _folded(ref.value)

    for i in program.instructions:
        known.update(zip(i.outs, _results(i, [value(ref) for ref in i.ins]), strict=True))
    return [value(ref) for ref in program.outputs]


def _folded(value: Any) -> Made:
    """Return numbers as they are known: one for all, or a few."""
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    array = np.asarray(value)
    if array.size and (array == array.reshape(-1)[0]).all():
        return array.reshape(-1)[0]
    return array if array.size <= INLINE_ELEMENTS else None


def _results(i: Instruction, values: Sequence[Made]) -> list[Made]:
    """Return what is known of an equation's results."""
    name, outs = i.eqn.primitive.name, [v.aval for v in i.eqn.outvars]
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in i.eqn.invars]
    if name in _COPIES and isinstance(copied := values[0], Copy):
        before: Any = i.eqn.invars[0].aval
        after: Any = outs[0]
        return [copied if (before.shape, before.dtype) == (after.shape, after.dtype) or _narrows(before, after) else None]
    numbers = [v for v in values if isinstance(v, np.ndarray | np.generic)]
    if len(numbers) < len(values):
        return [None] * len(outs)
    if name in FILLS and not numbers[0].shape:
        return [numbers[0]]
    if name in POINTWISE and not i.has_jaxpr and not any(n.shape for n in numbers):
        return [_folded(out) for out in bind(i.eqn, [jnp.asarray(n) for n in numbers])]
    if all(math.prod(getattr(a, "shape", ())) <= INLINE_ELEMENTS for a in [*(v.aval for v in i.eqn.invars), *outs]):
        whole = [jnp.asarray(np.broadcast_to(n, shape)) for n, shape in zip(numbers, shapes, strict=True)]
        return [_folded(out) for out in bind(i.eqn, whole)]
    return [None] * len(outs)


def _narrows(before: Any, after: Any) -> bool:
    """Tell whether a weight is cast as a reader casts it."""
    return before.shape == after.shape and before.dtype == jnp.float32 and jnp.issubdtype(after.dtype, jnp.floating)
