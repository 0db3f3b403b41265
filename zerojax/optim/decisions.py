"""What an optimizer decides from shapes: whether it treats a stack of layers as it treats one layer.

A mask `a.ndim >= 2` is true for a layer's matrix `[D, F]` and false for its bias `[F]`. For stacks, `[L, D, F]` and `[L, F]`,
it is true for both. The user's function makes such a decision out of sight. But the optimizer is traced, over the stacks and
over one layer, and the traced equations show it. Both traces are written in a form without shapes, and compared leaf by leaf:

    form(value) = (primitive, parameters that change numbers, forms of the operands)

Equal forms have equal numbers, so two traces share one table. Fills and reshapes are left out: they move no number.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, Ref, flatten

_ATTRIBUTES = ("y", "new_dtype", "direction", "mode", "exponent_bits", "mantissa_bits", "rounding_method")
"""Parameters of equations that change the numbers, and do not follow from shapes."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """Parameter leaves that an optimizer treats as a stack in another way than as one layer.

    Attributes:
      rules: indices of leaves whose equations differ.
      constants: indices of leaves whose equations have other constants, such as a leaf's size.
    """

    rules: tuple[int, ...]
    constants: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.rules or self.constants)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """An optimizer over one tree.

    Attributes:
      init: its traced init, of the parameters.
      update: its traced update, of (grads, state, params, loss).
      state: its abstract state.
      owners: for each leaf of the state the parameter leaf that it belongs to; None: all share it.
    """

    init: jex.ClosedJaxpr
    update: jex.ClosedJaxpr
    state: Any
    owners: tuple[int | None, ...]


def differences(one: Traced, other: Traced, num_params: int) -> Differences:
    """Return the parameter leaves that an optimizer updates in different ways over two trees of the same structure."""
    every = tuple(range(num_params))
    if jax.tree.structure(one.state) != jax.tree.structure(other.state):
        return Differences(_with_other_states(one, other) or every, ())
    rules, constants = (_unequal(one, other, num_params, reads_constants) for reads_constants in (False, True))
    return Differences(tuple(sorted(rules)), tuple(sorted(constants - rules)))


def _with_other_states(one: Traced, other: Traced) -> tuple[int, ...]:
    """Return the parameter leaves that have other state leaves."""

    def owned(traced: Traced) -> set[tuple[str, int]]:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(traced.state)[0]]
        return {(path, owner) for path, owner in zip(paths, traced.owners, strict=True) if owner is not None}

    return tuple(sorted({owner for _, owner in owned(one) ^ owned(other)}))


def _unequal(one: Traced, other: Traced, num_params: int, reads_constants: bool) -> set[int]:
    forms = _Forms(reads_constants)
    pairs = zip(_results(one, num_params, forms), _results(other, num_params, forms), strict=True)
    # A state that all leaves share differs where what enters it does: the leaves that read it show that.
    owners = [*range(num_params), *one.owners, *one.owners]
    return {owner for owner, (a, b) in zip(owners, pairs, strict=True) if owner is not None and a != b}


def _results(traced: Traced, num_params: int, forms: "_Forms") -> list[int]:
    """Return the forms of the updates, of the states after them and of the first states."""
    params = [("param", n) for n in range(num_params)]
    states = [("state", n) for n in range(len(traced.owners))]
    grads = [("grad", n) for n in range(num_params)]
    update = forms.of(flatten(traced.update.jaxpr, traced.update.consts), [*grads, *states, *params, "loss"])
    return update + forms.of(flatten(traced.init.jaxpr, traced.init.consts), params)


class _Forms:
    """Numbers values: two that are computed alike, whatever the shapes, have the same number."""

    def __init__(self, reads_constants: bool) -> None:
        self._reads_constants = reads_constants
        self._numbers: dict[Hashable, int] = {}

    def of(self, program: FlatJaxpr, inputs: Sequence[Hashable]) -> list[int]:
        """Return the numbers of a program's outputs, given names of its inputs."""
        slots = {slot: self._number(name) for slot, name in zip(program.inputs, inputs, strict=True)}
        for i in program.instructions:
            operands = tuple(self._operand(ref, slots) for ref in i.ins)
            if i.eqn.primitive.name in FILLS:
                slots[i.outs[0]] = operands[0]
                continue
            form = (i.eqn.primitive.name, self._attributes(i), self._inside(i), operands)
            slots.update({out: self._number((form, n)) for n, out in enumerate(i.outs)})
        return [self._operand(ref, slots) for ref in program.outputs]

    def _number(self, form: Hashable) -> int:
        return self._numbers.setdefault(form, len(self._numbers))

    def _operand(self, ref: Ref, slots: Mapping[int, int]) -> int:
        if isinstance(ref, int):
            return slots[ref]
        return self._number(_constant(ref) if self._reads_constants else "constant")

    def _attributes(self, i: Instruction) -> tuple[tuple[str, str], ...]:
        return tuple((key, str(value)) for key, value in i.eqn.params.items() if key in _ATTRIBUTES)

    def _inside(self, i: Instruction) -> tuple[tuple[int, ...], ...]:
        """Return the forms of the jaxprs that an equation holds."""
        if not i.has_jaxpr or i.eqn.primitive.name in POINTWISE:
            return ()
        inside = []
        for jaxpr, consts in _jaxprs(i.eqn.params):
            program = flatten(jaxpr, consts)
            inside.append(tuple(self.of(program, [("argument", n) for n in range(len(program.inputs))])))
        return tuple(inside)


def _jaxprs(params: Mapping[str, Any]) -> list[tuple[jex.Jaxpr, Sequence[Any]]]:
    found: list[tuple[jex.Jaxpr, Sequence[Any]]] = []
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jex.ClosedJaxpr):
                found.append((one.jaxpr, one.consts))
            elif isinstance(one, jex.Jaxpr):
                found.append((one, [None] * len(one.constvars)))
    return found


def _constant(ref: Constant) -> Hashable:
    """Return a constant as bytes: one that is not a number equals itself, and -0 is not 0."""
    value = ref.value
    if value is None:
        return "constant"
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    elements = np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)
    is_even = bool((elements == elements[:1]).all())
    return ("constant", str(array.dtype), elements[:1].tobytes() if is_even else elements.tobytes())
