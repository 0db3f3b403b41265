"""Take apart equations with a derivative of their own: forward with its residuals, and backward.

A fused attention kernel is one equation, a custom_vjp, whose rule saves its output and the
logsumexp of its rows. A loop is one equation too, whose derivative reads the results of each
iteration. Differentiated where backward runs, such an equation would run forward a second time.
Taken apart,

    forward    outs, kept = F(operands)
    backward   d_operands = B(operands, outs, kept, d_outs)

its forward runs once. In a loop, each iteration saves the same values as a layer: the results of
its products.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations.kept import is_cheap
from zerojax.jaxprs import Constant, FlatJaxpr, Instruction, trace

Array = jax.Array
_EXCHANGES = frozenset({"ppermute", "all_to_all", "ragged_all_to_all", "all_gather"})


@dataclasses.dataclass(frozen=True, eq=False)
class SplitVjp:
    """One equation, taken apart.

    Attributes:
      program: function of the operands; it returns the equation's results, then the further values
        that its derivative reads.
      sources: origin of each value that the derivative reads: ("operand", n), ("out", n), ("kept",
        n) or ("constant", value).
      structure: the derivative, a tree of these values.
      differentiable: whether each operand is floating.
      num_outs: number of results of the equation.
      kept: shapes of the saved values other than operands and results.
    """

    program: FlatJaxpr
    sources: tuple[tuple[str, Any], ...]
    structure: Any
    differentiable: tuple[bool, ...]
    num_outs: int
    kept: tuple[Any, ...]

    def forward(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results, and the values saved for the derivative."""
        values = self.program.run(operands)
        return values[: self.num_outs], values[self.num_outs :]

    def read_by_backward(
        self, operands: Sequence[Any], outs: Sequence[Any], kept: Sequence[Any]
    ) -> list[Any]:
        """Return the values that the derivative reads, some of which may be constants."""
        by_kind = {"operand": operands, "out": outs, "kept": kept}
        return [by_kind[kind][n] if kind in by_kind else n for kind, n in self.sources]

    def backward(self, values: Sequence[Any], d_outs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the cotangents of the operands, from the values of `read_by_backward`.

        An operand that is not floating has None.
        """
        cotangents = iter(jax.tree.unflatten(self.structure, values)(list(d_outs)))
        return tuple(next(cotangents) if floating else None for floating in self.differentiable)

    def derivable(
        self, operands: Sequence[Any], outs: Sequence[Any], kept: Sequence[Any]
    ) -> list[Any]:
        """Return `outs`, with the equation's derivative with respect to the operands.

        The derivative uses the saved values `kept`.
        """

        @jax.custom_vjp
        def call(operands: list[Any], outs: list[Any], kept: list[Any]) -> list[Any]:
            del operands, kept
            return outs

        def forward(operands: list[Any], outs: list[Any], kept: list[Any]) -> tuple[list[Any], Any]:
            return outs, (operands, outs, kept)

        def backward(
            saved: tuple[list[Any], list[Any], list[Any]], d_outs: list[Any]
        ) -> tuple[list[Any], None, None]:
            return list(self.backward(self.read_by_backward(*saved), d_outs)), None, None

        call.defvjp(forward, backward)
        return call(list(operands), *jax.lax.stop_gradient((list(outs), list(kept))))


def is_splittable(i: Instruction) -> bool:
    """Return whether an equation's derivative would run it again unless it is taken apart."""
    # A while loop has no reverse-mode derivative, and a custom_jvp is differentiated equation by
    # equation.
    return (
        i.has_jaxpr
        and i.eqn.primitive.name not in ("while", "custom_jvp_call")
        and not i.eqn.effects
        and not is_cheap(i.eqn)
    )


def exchanges(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation has a derivative rule of its own, and sends data to other devices.

    Attention over `context` is such an equation. Its rule keeps what devices received.
    """
    return eqn.primitive.name == "custom_vjp_call" and _has_exchange(eqn)


def _has_exchange(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive.name in _EXCHANGES:
        return True
    inner = jex.jaxprs_in_params(eqn.params)
    return any(_has_exchange(e) for jaxpr in inner for e in jaxpr.eqns)


def split_custom_vjp(i: Instruction, run: Callable[[Sequence[Any]], list[Any]]) -> SplitVjp | None:
    """Take an equation apart; return None if it has no derivative.

    Args:
      i: the equation's instruction.
      run: function that runs it, differentiable in its operands.
    """
    pairs = zip(i.ins, i.eqn.invars, strict=True)
    avals: list[Any] = [
        jax.typeof(ref.value) if isinstance(ref, Constant) else v.aval for ref, v in pairs
    ]
    results: list[Any] = [v.aval for v in i.eqn.outvars]
    differentiable = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in avals)
    if not any(differentiable) or not any(jnp.issubdtype(a.dtype, jnp.inexact) for a in results):
        return None
    structures: list[Any] = []

    def split(*operands: Any) -> tuple[list[Any], list[Any]]:
        floating_ids = [n for n, is_floating in enumerate(differentiable) if is_floating]

        def function(*floating: Any) -> list[Any]:
            values = list(operands)
            for n, value in zip(floating_ids, floating, strict=True):
                values[n] = value
            return run(values)

        outs, derivative = jax.vjp(function, *[operands[n] for n in floating_ids])
        leaves, structure = jax.tree.flatten(derivative)
        structures.append(structure)
        return outs, leaves

    program = trace(split, *avals)[0]
    num_outs = len(i.outs)
    outs = program.outputs[:num_outs]
    leaves = program.outputs[num_outs:]
    known = (*program.inputs, *outs)
    new_slots = [ref for ref in leaves if isinstance(ref, int) and ref not in known]
    kept = list(dict.fromkeys(new_slots))

    def source(ref: Any) -> tuple[str, Any]:
        if not isinstance(ref, int):
            return "constant", ref.value
        for kind, refs in (("operand", program.inputs), ("out", outs), ("kept", kept)):
            if ref in refs:
                return kind, refs.index(ref)
        raise AssertionError(ref)

    avals_by_slot = dict[int, Any]()
    for inner in program.instructions:
        for out, v in zip(inner.outs, inner.eqn.outvars, strict=True):
            avals_by_slot[out] = v.aval
    shapes = tuple(avals_by_slot[slot] for slot in kept)
    program = dataclasses.replace(program, outputs=(*outs, *kept))
    return SplitVjp(
        program, tuple(map(source, leaves)), structures[-1], differentiable, num_outs, shapes
    )
