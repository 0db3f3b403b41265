"""A traced function as a flat list of equations, for code that interprets or analyzes it.

`flatten` inlines nested `jit` calls, so equations that run one after the other are neighbors,
wherever the author put function boundaries. Variables become integer slots, because two calls of
one jitted function share their variables. A slot is written once, before it is read, so one pass
over the instructions answers either question about data flow:

    program.live(outputs)     backwards: which instructions do these outputs need?
    program.reached(starts)   forwards: which slots depend on these?
"""

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zerojax.jaxprs.parameters import called, opened
from zerojax.jaxprs.primitives import INLINED

BY_POSITION = frozenset(
    {"optimization_barrier", "psum", "psum_invariant", "reduce_scatter", "pvary"}
)
"""Equations whose result k depends only on operand k."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A known operand: a literal, or a constant of the jaxpr."""

    value: Any


Ref = int | Constant
"""An operand: a slot, or a constant."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An equation over slots.

    Attributes:
      eqn: the equation.
      ins: the equation's operands.
      outs: slots of the equation's results.
      has_jaxpr: whether the equation holds a jaxpr, such as the body of a scan.
    """

    eqn: jex.JaxprEqn
    ins: tuple[Ref, ...]
    outs: tuple[int, ...]
    has_jaxpr: bool

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots among the operands."""
        return tuple(ref for ref in self.ins if isinstance(ref, int))


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """A jaxpr without nested `jit`.

    Attributes:
      inputs: slots of the arguments.
      instructions: instructions in the order of the trace, so each slot is written before it is
        read.
      outputs: the results, as slots or constants.
      last_read: index of the last instruction that reads each slot; for an output, the number of
        instructions.
    """

    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Ref, ...]
    last_read: dict[int, int]

    def live(
        self,
        outputs: Iterable[Ref],
        is_root: Callable[[Instruction], bool] = lambda i: False,
        is_followed: Callable[[int], bool] = lambda slot: True,
    ) -> tuple[Instruction, ...]:
        """Return the instructions on which outputs depend, in order.

        Args:
          outputs: wanted slots; constants need no instructions.
          is_root: whether an instruction is needed even if nothing reads its results, such as an
            instruction with an effect.
          is_followed: whether the instruction that computes an operand is needed too.
        """
        needed = {ref for ref in outputs if isinstance(ref, int)}
        live: list[Instruction] = []
        for i in reversed(self.instructions):
            if is_root(i) or not needed.isdisjoint(i.outs):
                live.append(i)
                needed.update(slot for slot in i.reads if is_followed(slot))
        return tuple(reversed(live))

    def reached(self, starts: Iterable[int], by_result: bool = False) -> set[int]:
        """Return the slots in `starts`, and every slot that is computed from them.

        Args:
          starts: slots to start from.
          by_result: whether each result of an equation in `BY_POSITION`, and of a `jax.shard_map`,
            depends only on its own operands; else it depends on all operands. With rings
            (`zerojax.activations.rings`), such an equation may hold both data and cotangents.
        """
        reached = set(starts)
        for i in self.instructions:
            if by_result and i.eqn.primitive.name in BY_POSITION:
                pairs = zip(i.ins, i.outs, strict=True)
                reached.update(out for ref, out in pairs if is_among(ref, reached))
            elif by_result and i.eqn.primitive.name == "shard_map":
                reached.update(_list_reached_by_shard_map(i, reached))
            elif not reached.isdisjoint(i.reads):
                reached.update(i.outs)
        return reached

    def run(
        self,
        values: Sequence[Any],
        evaluator: Callable[[Sequence[Instruction], dict[int, Any]], None] | None = None,
    ) -> list[Any]:
        """Evaluate the program, and return its results.

        Args:
          values: values of the inputs.
          evaluator: function that runs instructions, reading and writing slots; `evaluate` by
            default.
        """
        slots: dict[int, Any] = dict(zip(self.inputs, values, strict=True))
        if evaluator is None:
            evaluator = evaluate
        evaluator(self.instructions, slots)
        return self.results(slots)

    def results(self, slots: Mapping[int, Any]) -> list[Any]:
        """Return the values of the outputs, given the values of all slots."""
        return [read(ref, slots) for ref in self.outputs]


def _list_reached_by_shard_map(i: Instruction, reached: Container[int]) -> list[int]:
    """Return the results of a `jax.shard_map` that depend on slots in `reached`."""
    program = flatten(*opened(i.eqn.params["jaxpr"]))
    operands = zip(program.inputs, i.ins, strict=True)
    starts = [slot for slot, ref in operands if is_among(ref, reached)]
    reached_inside = program.reached(starts, by_result=True)
    results = zip(program.outputs, i.outs, strict=True)
    return [out for ref, out in results if is_among(ref, reached_inside)]


def flatten(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    is_opaque: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> FlatJaxpr:
    """Return a jaxpr as a flat program, with every nested `jit` inlined.

    Args:
      jaxpr: jaxpr to flatten.
      consts: values of the jaxpr's constvars.
      is_opaque: function that says whether a `jit` stays one equation.
    """
    counter = iter(range(1 << 62))
    instructions: list[Instruction] = []

    def emit(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Ref]) -> list[Ref]:
        # Each call has its own environment, because two calls of one jitted function share the
        # jaxpr's variables.
        env: dict[jex.Var, Ref] = dict(zip(jaxpr.constvars, map(Constant, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def build_ref(atom: Any) -> Ref:
            return Constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [build_ref(v) for v in eqn.invars]
            if eqn.primitive.name in INLINED and not is_opaque(eqn):
                inner = called(eqn)
                assert inner is not None
                outs = emit(*inner, ins)
            else:
                outs = [next(counter) for _ in eqn.outvars]
                has_jaxpr = any(True for _ in jex.jaxprs_in_params(eqn.params))
                instructions.append(Instruction(eqn, tuple(ins), tuple(outs), has_jaxpr))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [build_ref(v) for v in jaxpr.outvars]

    inputs = tuple(next(counter) for _ in jaxpr.invars)
    outputs = tuple(emit(jaxpr, consts, inputs))
    # Later instructions overwrite earlier ones, so the last read remains.
    last_read = {slot: index for index, i in enumerate(instructions) for slot in i.reads}
    last_read.update({ref: len(instructions) for ref in outputs if isinstance(ref, int)})
    return FlatJaxpr(inputs, tuple(instructions), outputs, last_read)


def trace(
    function: Callable[..., Any],
    *args: Any,
    is_opaque: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> tuple[FlatJaxpr, Any]:
    """Trace a function; return its program, and the tree of its results' shapes.

    Args:
      function: function to trace.
      *args: arguments of the function, concrete or abstract.
      is_opaque: function that says whether a `jit` stays one equation.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    return flatten(closed.jaxpr, closed.consts, is_opaque), out


@contextlib.contextmanager
def _trace_context(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Restore the context in which an equation was traced.

    It consists of the mesh, the compute_on context, and the name in profiles.
    """
    with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack) or "param"):
        yield


def is_among(ref: Ref, slots: Container[int]) -> bool:
    """Return whether an operand is one of these slots."""
    return isinstance(ref, int) and ref in slots


def read(ref: Ref, slots: Mapping[int, Any]) -> Any:
    """Return the value of an operand."""
    return slots[ref] if isinstance(ref, int) else ref.value


def bind(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply one equation, and return its results.

    Derivative rules of custom_jvp and custom_vjp stay attached.
    """
    with _trace_context(eqn):
        # The parameters of a custom derivative hold jaxprs, but `bind` takes functions;
        # get_bind_params converts them.
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(instructions: Sequence[Instruction], slots: dict[int, Any]) -> None:
    """Run instructions in order, reading and writing `slots`."""
    for i in instructions:
        outs = bind(i.eqn, [read(ref, slots) for ref in i.ins])
        slots.update(zip(i.outs, outs, strict=True))


def only_live(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without the equations on which its results do not depend.

    Such equations inside loops stay.
    """

    def run(*args: Any) -> Any:
        program, out = trace(function, *args)
        needed = dataclasses.replace(program, instructions=program.live(program.outputs))
        return jax.tree.unflatten(jax.tree.structure(out), needed.run(jax.tree.leaves(args)))

    return run
