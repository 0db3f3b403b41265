"""A traced function that acts on each element by itself, run on arrays of other shapes.

An elementwise optimizer is traced on one layer's leaves, `[D, F]`. Its equations then apply to each
element wherever it is stored: in a stack of layers `[L, D, F]`, in a tile, in some rows of an
embedding, in the shard that the host updates. Decisions that depend on shapes (a mask by number of
dims, a label by size) are part of the trace, so they are the same everywhere.

    u[D, F] = mul g[D, F] 0.1            on a stack   u[L, D, F] = mul g[L, D, F] 0.1
    z[D, F] = broadcast_in_dim 0.0       one number for all elements; it takes the operands' shape

There are three kinds of values. A value that depends on a leaf has the shape of the given leaf. An
array that depends on no leaf has equal elements and is kept as one number. Scalars stay scalars.
`zerojax.optim.elementwise` proves that no other kinds occur.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, Ref, bind

Array = jax.Array
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Even:
    """An array whose elements are all equal.

    Attributes:
      value: the scalar that every element equals.
      shape: shape in the trace.
    """

    value: Any
    shape: Shape


@dataclasses.dataclass(frozen=True, eq=False)
class ElementProgram:
    """A traced function of parameter leaves that acts on each element by itself.

    Attributes:
      program: the traced equations.
      leaf_of: index of the leaf on which each slot depends; None or missing if it depends on no
        leaf.
    """

    program: FlatJaxpr
    leaf_of: Mapping[int, int | None]

    def __call__(
        self, inputs: Mapping[int, Any], wanted: Sequence[Ref], shapes: Sequence[Shape | None]
    ) -> list[Any]:
        """Return the wanted results, computed for leaves of any shape.

        Args:
          inputs: input values by slot, at least the inputs of the wanted results. Leaves may have a
            different shape than in the trace.
          wanted: results to compute.
          shapes: for each result, the shape of its leaf in `inputs`; None if the result depends on
            no leaf.
        """
        slots: dict[int, Any] = dict(inputs)
        for i in self.program.live(wanted):
            slots.update(zip(i.outs, self._apply(i, slots), strict=True))
        results = []
        for ref, shape in zip(wanted, shapes, strict=True):
            value = slots[ref] if isinstance(ref, int) else ref.value
            if shape is None:
                value = _in_traced_shape(value)
            elif not self._has_leaf(ref):
                value = jnp.broadcast_to(_any_element(value), shape)
            results.append(value)
        return results

    def _has_leaf(self, ref: Ref) -> bool:
        return isinstance(ref, int) and self.leaf_of.get(ref) is not None

    def _apply(self, i: Instruction, slots: Mapping[int, Any]) -> list[Any]:
        """Return the results of an equation."""
        values = [slots[ref] if isinstance(ref, int) else ref.value for ref in i.ins]
        name = i.eqn.primitive.name
        if any(self._has_leaf(ref) for ref in i.ins):
            if name in FILLS:  # filling a leaf's shape from a leaf changes nothing
                return [values[0]]
            return bind(i.eqn, self._operands(i, values))
        if _keeps_even(i, values):
            (var,) = i.eqn.outvars
            elements = [_any_element(value) for value in values]
            element = elements[0] if name in FILLS else bind(i.eqn, elements)[0]
            return [_Even(element, _get_shape(var))]
        return bind(i.eqn, [_in_traced_shape(value) for value in values])

    def _operands(self, i: Instruction, values: Sequence[Any]) -> list[Any]:
        """Return the operands of an equation on a leaf.

        Operands that had the leaf's shape in the trace are broadcast to its present shape.
        """
        leaves = [v for v, ref in zip(values, i.ins, strict=True) if self._has_leaf(ref)]
        leaf_shape = jnp.shape(leaves[0])
        traced_shape = _get_shape(i.eqn.outvars[0])
        operands = []
        for n, ref in enumerate(i.ins):
            operand = values[n]
            if not self._has_leaf(ref) and _get_shape(i.eqn.invars[n]) == traced_shape:
                operand = jnp.broadcast_to(_any_element(operand), leaf_shape)
            operands.append(operand)
        return operands


def _keeps_even(i: Instruction, values: Sequence[Any]) -> bool:
    """Return whether an equation without leaves maps equal elements to equal elements."""
    name = i.eqn.primitive.name
    shape = _get_shape(i.eqn.outvars[0])
    if i.has_jaxpr or name not in POINTWISE | FILLS or not shape:
        return False
    if name in POINTWISE and any(_get_shape(v) not in ((), shape) for v in i.eqn.invars):
        return False  # a bitcast to another number of bytes
    return all(
        isinstance(v, _Even) or not jnp.shape(v) or _is_constant(ref)
        for v, ref in zip(values, i.ins, strict=True)
    )


def _is_constant(ref: Ref) -> bool:
    return isinstance(ref, Constant)


def _get_shape(var: Any) -> Shape:
    return tuple(getattr(var.aval, "shape", ()))


def _any_element(value: Any) -> Any:
    """Return one of a value's equal elements."""
    if isinstance(value, _Even):
        return value.value
    if not jnp.shape(value):
        return value
    if not math.prod(jnp.shape(value)):
        return jnp.zeros((), value.dtype)
    # Read a constant now: as an operand, the full array would become part of the program.
    elements = value if isinstance(value, Tracer) else np.asarray(value)
    return elements.reshape(-1)[0]


def _in_traced_shape(value: Any) -> Any:
    """Return a value that depends on no leaf, in its traced shape."""
    return jnp.broadcast_to(value.value, value.shape) if isinstance(value, _Even) else value
