"""Find decisions that an optimizer makes from shapes, so that stacks differ from single layers.

A mask `a.ndim >= 2` is true for a layer's matrix `[D, F]` and false for its bias `[F]`. For stacks,
`[L, D, F]` and `[L, F]`, it is true for both. Such a decision is made inside the user's function,
where it cannot be seen. But the optimizer is traced, once over the stacks and once over one layer,
and the traced equations show it. Both traces are written in a form without shapes and compared leaf
by leaf:

    form(value) = (primitive, parameters that change numbers, forms of the operands)

Values with equal forms are equal, so both traces share one table. Fills and reshapes are left out
because they do not change any number.
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
from zerojax.trees import OptState

_ATTRIBUTES = (
    "y",
    "new_dtype",
    "direction",
    "mode",
    "exponent_bits",
    "mantissa_bits",
    "rounding_method",
)
"""Equation parameters that change the numbers and do not follow from shapes."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """What an optimizer treats differently in a stack of layers than in one layer.

    Attributes:
      rules: indices of parameter leaves whose equations differ, or whose initial state holds
        another number.
      constants: indices of parameter leaves whose equations have other constants, such as a leaf's
        size.
      shared_rules: paths of state leaves that belong to no single parameter leaf and whose
        equations differ.
      shared_constants: paths of state leaves that belong to no single parameter leaf and whose
        equations have other constants.
    """

    rules: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    shared_rules: tuple[str, ...] = ()
    shared_constants: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.rules or self.constants or self.shared)

    @property
    def shared(self) -> tuple[str, ...]:
        """Paths of the state leaves that differ and belong to no single parameter leaf."""
        return (*self.shared_rules, *self.shared_constants)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """An optimizer traced over one tree.

    Attributes:
      init: the traced init, a function of the parameters.
      update: the traced update, a function of (grads, state, params, loss).
      state: the optimizer's abstract state.
      owners: for each state leaf, the index of the parameter leaf with the same path, whatever its
        shape; None if there is none.
    """

    init: jex.ClosedJaxpr
    update: jex.ClosedJaxpr
    state: OptState
    owners: tuple[int | None, ...]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf of the state."""
        leaves = jax.tree_util.tree_flatten_with_path(self.state)[0]
        return [jax.tree_util.keystr(path) for path, _ in leaves]


_Output = tuple[str, int | str]
"""A result: ("update", parameter leaf), ("after", path in state), or ("first", path in state)."""


def differences(stacks: Traced, layer: Traced, stacked: Sequence[int]) -> Differences:
    """Return what an optimizer computes differently over stacks of layers and over one layer.

    Args:
      stacks: the optimizer traced over the stacks.
      layer: the optimizer traced over one layer.
      stacked: for each parameter leaf, the number of leading dims that count layers.

    Returns:
      The differences; falsy if there are none.
    """
    num_params = len(stacked)
    other_rules = _unequal(stacks, layer, num_params, reads_constants=False)
    other_constants = _unequal(stacks, layer, num_params, reads_constants=True)
    is_same_tree = jax.tree.structure(stacks.state) == jax.tree.structure(layer.state)
    if is_same_tree and not other_rules and not other_constants:
        return Differences()
    owners = _owners(layer, num_params) | _owners(stacks, num_params)
    rules, shared_rules = _by_owner(other_rules, owners)
    constants, shared_constants = _by_owner(other_constants, owners)
    # A number that init puts into a leaf's state is a decision about that leaf, as a mask is.
    other_firsts = {output for output in other_constants if output[0] == "first"}
    firsts, _ = _by_owner(other_firsts, owners)
    rules |= {i for i in firsts if stacked[i]}
    if not rules and not shared_rules and not is_same_tree:
        rules = {i for i in range(num_params) if stacked[i]}
    return Differences(
        tuple(sorted(rules)),
        tuple(sorted(constants - rules)),
        tuple(sorted(shared_rules)),
        tuple(sorted(shared_constants - shared_rules)),
    )


def _unequal(
    stacks: Traced, layer: Traced, num_params: int, *, reads_constants: bool
) -> set[_Output]:
    """Return the results that differ between two traces, or that exist in only one of them."""
    forms = _Forms(reads_constants)
    of_stacks = _results(stacks, num_params, forms)
    of_layer = _results(layer, num_params, forms)
    outputs = of_stacks.keys() | of_layer.keys()
    return {output for output in outputs if of_stacks.get(output) != of_layer.get(output)}


def _results(traced: Traced, num_params: int, forms: "_Forms") -> dict[_Output, int]:
    """Return the forms of the updates, of the states after them, and of the initial states."""
    params = [("param", n) for n in range(num_params)]
    states = [("state", path) for path in traced.paths]
    grads = [("grad", n) for n in range(num_params)]
    update_program = flatten(traced.update.jaxpr, traced.update.consts)
    update = forms.number_outputs(update_program, [*grads, *states, *params, "loss"])
    init_program = flatten(traced.init.jaxpr, traced.init.consts)
    first = forms.number_outputs(init_program, params)
    names: list[_Output] = [("update", n) for n in range(num_params)]
    names += [("after", path) for path in traced.paths]
    names += [("first", path) for path in traced.paths]
    return dict(zip(names, update + first, strict=True))


def _by_owner(outputs: set[_Output], owners: Mapping[str, int | None]) -> tuple[set[int], set[str]]:
    """Split results into the parameter leaves that own them, and paths without an owner."""
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
    """Return {path of a state leaf: index of its parameter leaf, or None}.

    The parameter leaf is the one with the same path, or else the only one that reads the state
    leaf.
    """
    program = flatten(traced.update.jaxpr, traced.update.consts)
    slots = program.inputs[num_params : num_params + len(traced.paths)]
    owners: dict[str, int | None] = {}
    for path, owner, slot in zip(traced.paths, traced.owners, slots, strict=True):
        readers = _readers(program, slot, slots) if owner is None else {owner}
        owners[path] = next(iter(readers)) if len(readers) == 1 else None
    return owners


def _readers(program: FlatJaxpr, slot: int, states: Sequence[int]) -> set[int]:
    """Return the parameter leaves whose updates a state reaches.

    It may reach them in this step or, through other states, in a later step.
    """
    num_params = len(program.outputs) - len(states)
    starts: set[int] = {slot}
    while True:
        reached = program.reached(starts)
        readers: set[int] = set()
        later: set[int] = set()  # states that the next step reads
        for n, ref in enumerate(program.outputs):
            if not isinstance(ref, int) or ref not in reached:
                continue
            if n < num_params:
                readers.add(n)
            else:
                later.add(states[n - num_params])
        if later <= starts:
            return readers
        starts |= later


class _Forms:
    """Numbers values: values computed in the same way get the same number, whatever the shapes."""

    def __init__(self, reads_constants: bool) -> None:
        self._reads_constants = reads_constants
        self._numbers: dict[Hashable, int] = {}

    def number_outputs(self, program: FlatJaxpr, inputs: Sequence[Hashable]) -> list[int]:
        """Return the numbers of a program's outputs, given names for its inputs."""
        slots: dict[int, int] = {}
        for slot, name in zip(program.inputs, inputs, strict=True):
            slots[slot] = self._number(name)
        for i in program.instructions:
            operands = tuple(self._operand(ref, slots) for ref in i.ins)
            if i.eqn.primitive.name in FILLS:
                slots[i.outs[0]] = operands[0]
                continue
            form = (i.eqn.primitive.name, self._attributes(i), self._inside(i), operands)
            for n, out in enumerate(i.outs):
                slots[out] = self._number((form, n))
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
        """Return the forms of the jaxprs inside an equation."""
        if not i.has_jaxpr or i.eqn.primitive.name in POINTWISE:
            return ()
        forms = []
        for jaxpr, consts in _jaxprs(i.eqn.params):
            program = flatten(jaxpr, consts)
            arguments = [("argument", n) for n in range(len(program.inputs))]
            forms.append(tuple(self.number_outputs(program, arguments)))
        return tuple(forms)


def _jaxprs(params: Mapping[str, Any]) -> list[tuple[jex.Jaxpr, Sequence[Any]]]:
    """Return the jaxprs among the parameters of an equation, with their constants."""
    jaxprs: list[tuple[jex.Jaxpr, Sequence[Any]]] = []
    for value in params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            if isinstance(item, jex.ClosedJaxpr):
                jaxprs.append((item.jaxpr, item.consts))
            elif isinstance(item, jex.Jaxpr):
                jaxprs.append((item, [None] * len(item.constvars)))
    return jaxprs


def _constant(ref: Constant) -> Hashable:
    """Return a constant as bytes, so that NaN equals itself and -0 differs from 0."""
    value = ref.value
    if value is None:
        return "constant"
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    elements = np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)
    if (elements == elements[:1]).all():
        elements = elements[:1]
    return ("constant", str(array.dtype), elements.tobytes())
