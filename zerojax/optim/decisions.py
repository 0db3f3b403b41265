"""What an optimizer decides from shapes: whether it treats a stack of layers as it treats one
layer.

A mask `a.ndim >= 2` is true for a layer's matrix `[D, F]` and false for its bias `[F]`. For stacks,
`[L, D, F]` and `[L, F]`, it is true for both. The user's function makes such a decision out of
sight. But the optimizer is traced, over the stacks and over one layer, and the traced equations
show it. Both traces are written in a form without shapes, and compared leaf by leaf:

    form(value) = (primitive, parameters that change numbers, forms of the operands)

Equal forms have equal numbers, so two traces share one table. Fills and reshapes are left out: they
  move no number.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, Ref, flatten

_ATTRIBUTES = (
    "y",
    "new_dtype",
    "direction",
    "mode",
    "exponent_bits",
    "mantissa_bits",
    "rounding_method",
)
"""Parameters of equations that change the numbers, and do not follow from shapes."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """What an optimizer treats as a stack in another way than as one layer.

    Attributes:
      rules: indices of parameter leaves whose equations differ, or whose first state holds another
        number.
      constants: indices of parameter leaves whose equations have other constants, such as a leaf's
        size.
      shared_rules: paths of state leaves that belong to no single parameter leaf and whose
        equations differ.
      shared_constants: paths of such state leaves whose equations have other constants.
    """

    rules: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    shared_rules: tuple[str, ...] = ()
    shared_constants: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules or self.constants or self.shared)

    @property
    def shared(self) -> tuple[str, ...]:
        """Paths of the state leaves that differ and belong to no single parameter leaf."""
        return (*self.shared_rules, *self.shared_constants)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """An optimizer over one tree.

    Attributes:
      init: its traced init, of the parameters.
      update: its traced update, of (grads, state, params, loss).
      state: its abstract state.
      owners: for each leaf of the state the parameter leaf whose path it has, whatever its shape;
        None: it has no such path.
    """

    init: jex.ClosedJaxpr
    update: jex.ClosedJaxpr
    state: Any
    owners: tuple[int | None, ...]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf of the state."""
        return [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(self.state)[0]
        ]


_Output = tuple[str, int | str]
"""What a result is: ("update", parameter leaf), ("after", path in the state), or ("first", path in
the state).
"""


def differences(stacks: Traced, layer: Traced, stacked: Sequence[bool]) -> Differences:
    """Return what an optimizer computes in different ways over stacks of layers and over one layer.

    Args:
      stacks: the optimizer over the stacks.
      layer: the optimizer over one layer.
      stacked: for each parameter leaf whether it is a stack of layers.
    """
    num_params = len(stacked)
    of_rules, of_constants = (_unequal(stacks, layer, num_params, reads) for reads in (False, True))
    is_same_tree = jax.tree.structure(stacks.state) == jax.tree.structure(layer.state)
    if is_same_tree and not of_rules and not of_constants:
        return Differences()
    owners = _owners(layer, num_params) | _owners(stacks, num_params)
    rules, shared_rules = _by_owner(of_rules, owners)
    constants, shared_constants = _by_owner(of_constants, owners)
    # A number that init puts into a leaf's state is a decision about that leaf, as a mask is.
    firsts, _ = _by_owner({output for output in of_constants if output[0] == "first"}, owners)
    rules |= {i for i in firsts if stacked[i]}
    if not rules and not shared_rules and not is_same_tree:
        rules = {i for i in range(num_params) if stacked[i]}
    return Differences(
        tuple(sorted(rules)),
        tuple(sorted(constants - rules)),
        tuple(sorted(shared_rules)),
        tuple(sorted(shared_constants - shared_rules)),
    )


def _unequal(one: Traced, other: Traced, num_params: int, reads_constants: bool) -> set[_Output]:
    """Return the results that differ, or that one of the two alone has."""
    forms = _Forms(reads_constants)
    found = [_results(traced, num_params, forms) for traced in (one, other)]
    return {
        output
        for output in found[0].keys() | found[1].keys()
        if found[0].get(output) != found[1].get(output)
    }


def _results(traced: Traced, num_params: int, forms: "_Forms") -> dict[_Output, int]:
    """Return the forms of the updates, of the states after them and of the first states."""
    params = [("param", n) for n in range(num_params)]
    states = [("state", path) for path in traced.paths]
    grads = [("grad", n) for n in range(num_params)]
    update = forms.of(
        flatten(traced.update.jaxpr, traced.update.consts), [*grads, *states, *params, "loss"]
    )
    first = forms.of(flatten(traced.init.jaxpr, traced.init.consts), params)
    names: list[_Output] = [("update", n) for n in range(num_params)]
    names += [("after", path) for path in traced.paths]
    names += [("first", path) for path in traced.paths]
    return dict(zip(names, update + first, strict=True))


def _by_owner(outputs: set[_Output], owners: Mapping[str, int | None]) -> tuple[set[int], set[str]]:
    """Divide results into the parameter leaves that they belong to, and the paths of the others."""
    leaves: set[int] = set()
    shared: set[str] = set()
    for _, name in outputs:
        owner = name if isinstance(name, int) else owners[name]
        if owner is None:
            shared.add(str(name))
        else:
            leaves.add(owner)
    return leaves, shared


def _owners(traced: Traced, num_params: int) -> dict[str, int | None]:
    """Return for the path of each state leaf the parameter leaf that has its path, or else alone
    reads it; None: no leaf.
    """
    program = flatten(traced.update.jaxpr, traced.update.consts)
    slots = program.inputs[num_params : num_params + len(traced.paths)]
    owners: dict[str, int | None] = {}
    for path, owner, slot in zip(traced.paths, traced.owners, slots, strict=True):
        readers = _readers(program, slot, slots) if owner is None else {owner}
        owners[path] = next(iter(readers)) if len(readers) == 1 else None
    return owners


def _readers(program: FlatJaxpr, slot: int, states: Sequence[int]) -> set[int]:
    """Return the parameter leaves whose updates a state reaches, in this step or, by way of other
    states, in a later one.
    """
    num_params = len(program.outputs) - len(states)
    starts: set[int] = {slot}
    while True:
        reached = program.reached(starts)
        hits = [
            n for n, ref in enumerate(program.outputs) if isinstance(ref, int) and ref in reached
        ]
        later = {states[n - num_params] for n in hits if n >= num_params}
        if later <= starts:
            return {n for n in hits if n < num_params}
        starts |= later


class _Forms:
    """Numbers values: two that are computed alike, whatever the shapes, have the same number."""

    def __init__(self, reads_constants: bool) -> None:
        self._reads_constants = reads_constants
        self._numbers: dict[Hashable, int] = {}

    def of(self, program: FlatJaxpr, inputs: Sequence[Hashable]) -> list[int]:
        """Return the numbers of a program's outputs, given names of its inputs."""
        slots = {
            slot: self._number(name) for slot, name in zip(program.inputs, inputs, strict=True)
        }
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
            inside.append(
                tuple(self.of(program, [("argument", n) for n in range(len(program.inputs))]))
            )
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
