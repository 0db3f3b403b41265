"""Rewrite derivatives after JAX traced them, backwards from their gradients.

Some values of the traced derivative get another form: float32 instead of 16 bits, or one row per
device instead of a reduced sum. A jaxpr is rewritten in two passes:

    backwards    from the wanted gradients: which values are made in the other form
    forwards     equations that make such a value are applied by rules, all others unchanged

If a value is read in a form that it does not have, it is converted, once. Control flow is entered
(`zerojax.jaxprs.regions`): each of its jaxprs is rewritten in the same way and bound again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.jaxprs import FlatJaxpr, Instruction, Ref, Region, bind, trace

Derivative = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`derivative(cotangents, data, params) -> (gradients, others)`, on trees of arrays."""
IsOpaque = Callable[[jex.JaxprEqn], bool]
"""Returns whether a `jit` stays one equation. Its results keep the form that it gives them."""


@dataclasses.dataclass(frozen=True)
class TracedDerivative:
    """A traced derivative.

    Attributes:
      program: the program over the leaves of (cotangents, data, params).
      leaves: the leaves of (cotangents, data, params).
      cotangents: slots of the cotangents.
      data: slots of the data.
      is_grad: whether each result is a gradient.
      structure: tree structure of the results.
    """

    program: FlatJaxpr
    leaves: list[Any]
    cotangents: tuple[int, ...]
    data: tuple[int, ...]
    is_grad: list[bool]
    structure: Any

    @classmethod
    def of(
        cls,
        derivative: Derivative,
        args: tuple[Any, Any, Any],
        is_opaque: IsOpaque,
    ) -> "TracedDerivative":
        """Trace a derivative with its arguments, (cotangents, data, params)."""
        program, out = trace(derivative, *args, is_opaque=is_opaque)
        cotangents, data, _ = args
        data_start = len(jax.tree.leaves(cotangents))
        data_stop = data_start + len(jax.tree.leaves(data))
        num_grads, num_others = (len(jax.tree.leaves(tree)) for tree in out)
        return cls(
            program=program,
            leaves=jax.tree.leaves(args),
            cotangents=program.inputs[:data_start],
            data=program.inputs[data_start:data_stop],
            is_grad=[True] * num_grads + [False] * num_others,
            structure=jax.tree.structure(out),
        )

    def rewritten(self, rewriter: "GradRewriter") -> Any:
        """Return the results that a rewriter computes."""
        results = [jnp.asarray(a) for a in rewriter.run(self.leaves)]
        return jax.tree.unflatten(self.structure, results)


Rules = Mapping[str, Callable[[Any, Instruction], Sequence[Any]]]
"""{primitive: method of a `GradRewriter` that applies an instruction}."""


class GradRewriter:
    """Rewrites one jaxpr. A subclass defines the other form, and which values have it.

    Attributes:
      program: the jaxpr.
      cotangents: slots that depend on cotangents.
      data: slots that depend on data. Slots in neither set depend only on parameters and constants.
      outputs: whether each result is to have the other form.
      is_opaque: whether a `jit` stays one equation.
      makers: the instruction that makes each slot.
      rewritten: slots that are made in the other form if there is a rule; set by a subclass.
      rules: method that applies an instruction which makes such a slot, by primitive.
    """

    rewritten: Set[int]
    rules: ClassVar[Rules]

    def __init__(
        self,
        program: FlatJaxpr,
        cotangents: set[int],
        data: set[int],
        outputs: Sequence[bool],
        is_opaque: IsOpaque,
    ) -> None:
        """Keep the arguments, and find the maker of each slot."""
        self.program = program
        self.cotangents = cotangents
        self.data = data
        self.outputs = outputs
        self.makers = {out: i for i in program.instructions for out in i.outs}
        self.is_opaque = is_opaque

    def flatten_region(
        self, i: Instruction, region: Region
    ) -> tuple[FlatJaxpr, set[int], set[int]]:
        """Return the program of a region, and its slots that depend on cotangents and on data."""
        program = region.flatten(self.is_opaque)
        cotangents = region.reached(program, i.ins, self.cotangents)
        data = region.reached(program, i.ins, self.data)
        return program, cotangents, data

    # --- given by a subclass -------------------------------------------------------------------

    def has_form(self, slot: int, value: Any) -> bool:
        """Return whether the value made for a slot has the other form."""
        raise NotImplementedError

    def as_plain(self, slot: int, value: Any) -> Any:
        """Convert a value in the other form to the program's form."""
        raise NotImplementedError

    def as_output(self, ref: Ref) -> Any:
        """Return a result in the other form."""
        raise NotImplementedError

    # --- values --------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results, each in the other form if `outputs` says so."""
        self.plain_values: dict[int, Any] = {}
        self.formed_values: dict[int, Any] = {}
        self._write(self.program.inputs, inputs)
        for i in self.program.instructions:
            self._write(i.outs, self.apply(i))
        results: list[Any] = []
        for ref, is_wanted in zip(self.program.outputs, self.outputs, strict=True):
            is_formed = is_wanted and not self._is_made_opaque(ref)
            results.append(self.as_output(ref) if is_formed else self.plain(ref))
        return results

    def apply(self, i: Instruction) -> Sequence[Any]:
        """Apply an instruction, by a rule if it makes a value in the other form."""
        if self.rewritten.isdisjoint(i.outs):
            return self.apply_plain(i)
        rule = self.rules.get(i.eqn.primitive.name)
        return self.by_default(i) if rule is None else rule(self, i)

    def by_default(self, i: Instruction) -> list[Any]:
        """Apply an instruction that makes a value in the other form but has no rule."""
        return self.apply_plain(i)

    def apply_plain(self, i: Instruction) -> list[Any]:
        """Apply an instruction unchanged."""
        return bind(i.eqn, [self.plain(ref) for ref in i.ins])

    def plain(self, ref: Ref) -> Any:
        """Return a value in the program's form."""
        if not isinstance(ref, int):
            return ref.value
        if ref not in self.plain_values:
            self.plain_values[ref] = self.as_plain(ref, self.formed_values[ref])
        return self.plain_values[ref]

    def _write(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        for slot, value in zip(slots, values, strict=True):
            if self.has_form(slot, value):
                self.formed_values[slot] = value
            else:
                self.plain_values[slot] = value

    def _is_made_opaque(self, ref: Ref) -> bool:
        """Return whether an opaque equation made a value, whose form its caller then chooses."""
        if not isinstance(ref, int) or ref not in self.makers:
            return False
        return self.is_opaque(self.makers[ref].eqn)
