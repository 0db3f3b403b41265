"""A traced function as a flat list of equations, for code that interprets it or analyses what it computes.

`flatten` inlines nested `jit` calls. So equations that run one after the other are neighbours, wherever the author put function
boundaries. Variables become integer slots, because two calls of one jitted function share their variables. A slot is written
once, before it is read. So one pass over the instructions answers either question of data flow:

    program.live(outputs)     backwards: which instructions do these outputs need?
    program.reached(starts)   forwards: which slots depend on these?

The sets of primitives below classify equations: cheap, linear, elementwise. A primitive that is in no set is assumed to have
none of these properties.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather", "dynamic_slice"})
"""Equations that cost too much to repeat in backward, or whose result is data of its own (lookups)."""
LINEAR = frozenset(
    {"add", "sub", "neg", "convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims",
     "copy", "reduce_precision", "name", "slice", "concatenate", "split", "reduce_sum", "add_any"}
)  # fmt: skip
"""Equations whose derivative does not need their operands."""
ELEMENTWISE = frozenset(
    {"convert_element_type", "copy", "name", "reduce_precision", "stop_gradient", "add", "sub", "neg", "mul", "div",
     "max", "min", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "rsqrt", "sqrt", "cbrt", "square", "integer_pow",
     "pow", "abs", "sign", "erf", "erf_inv", "erfc", "sin", "cos", "tan", "floor", "ceil", "round", "clamp"}
)  # fmt: skip
"""Equations that act on each element: on a shard as on the whole."""
CHEAP = LINEAR | ELEMENTWISE | frozenset(
    {"select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "rev", "pad", "iota", "reduce_max",
     "reduce_min", "reduce_and", "reduce_or", "is_finite", "rem", "nextafter"}
)  # fmt: skip
"""Elementwise, layout and reduction equations: cheap to repeat."""
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
POINTWISE = ELEMENTWISE | {
    "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "rem", "nextafter", "add_any",
    "bitcast_convert_type", "shift_left", "shift_right_logical", "shift_right_arithmetic",
}  # fmt: skip
"""Equations whose result at one index reads its operands at that index alone (of a bitcast: where it keeps the shape)."""
FILLS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
"""Equations that turn an array of equal elements into an array of the same elements in another shape."""
INLINED = frozenset({"jit", "closed_call", "eval_jaxpr"})
"""Equations that call a jaxpr once, as it is. From jax 0.11 on "eval_jaxpr" stands for "closed_call"."""
REMAT = "remat2"
"""The equation that `jax.checkpoint` makes."""


_FUSED_ATTENTION = {"dot_product_attention_fwd_wrapper": 1.0, "dot_product_attention_bwd_wrapper": 2.5}
"""cuDNN's attention: how many times the two products of a forward pass. Backward computes the scores again."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """An operand that is known: a literal, or a constant of the jaxpr."""

    value: Any


Ref = int | Constant
"""An operand: a slot, or a constant."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An equation over slots.

    Attributes:
      eqn: the equation.
      ins: its operands.
      outs: the slots of its results.
      has_jaxpr: whether it holds a jaxpr, such as the body of a scan.
    """

    eqn: jex.JaxprEqn
    ins: tuple[Ref, ...]
    outs: tuple[int, ...]
    has_jaxpr: bool

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots among its operands."""
        return tuple(ref for ref in self.ins if isinstance(ref, int))


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """A jaxpr without nested `jit`.

    Attributes:
      inputs: slots of the arguments.
      instructions: in the order of the trace, so each slot is written before it is read.
      outputs: the results.
      last_read: index of the last instruction that reads a slot; of an output the number of instructions.
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
          outputs: slots that are wanted; constants need nothing.
          is_root: whether an instruction is needed even if nothing reads its results, such as one with an effect.
          is_followed: whether the instruction that computes an operand is needed too.
        """
        needed = {ref for ref in outputs if isinstance(ref, int)}
        live: list[Instruction] = []
        for i in reversed(self.instructions):
            if is_root(i) or not needed.isdisjoint(i.outs):
                live.append(i)
                needed.update(slot for slot in i.reads if is_followed(slot))
        return tuple(reversed(live))

    def reached(self, starts: Iterable[int]) -> set[int]:
        """Return the slots in `starts`, and every slot that is computed from them."""
        reached = set(starts)
        for i in self.instructions:
            if not reached.isdisjoint(i.reads):
                reached.update(i.outs)
        return reached


def flatten(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], is_opaque: Callable[[jex.JaxprEqn], bool] = lambda eqn: False
) -> FlatJaxpr:
    """Inline every nested `jit`.

    Args:
      jaxpr: what to flatten.
      consts: values of its constvars.
      is_opaque: whether a `jit` is to stay one equation.
    """
    counter = iter(range(1 << 62))
    instructions: list[Instruction] = []

    def emit(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Ref]) -> list[Ref]:
        # Each call has an environment of its own: two calls of one jitted function share the jaxpr's variables.
        env: dict[jex.Var, Ref] = {v: Constant(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))

        def ref_of(atom: Any) -> Ref:
            return Constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [ref_of(v) for v in eqn.invars]
            if eqn.primitive.name in INLINED and not is_opaque(eqn):
                # Primitives differ in the name of the parameter, and in whether it holds the constants too.
                inner: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                is_closed = isinstance(inner, jex.ClosedJaxpr)
                outs = emit(inner.jaxpr if is_closed else inner, inner.consts if is_closed else (), ins)
            else:
                outs = [next(counter) for _ in eqn.outvars]
                nested = next(iter(jex.jaxprs_in_params(eqn.params)), None) is not None
                instructions.append(Instruction(eqn, tuple(ins), tuple(outs), nested))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [ref_of(v) for v in jaxpr.outvars]

    inputs = tuple(next(counter) for _ in jaxpr.invars)
    outputs = tuple(emit(jaxpr, consts, inputs))
    # Later instructions overwrite earlier ones, so the last read remains.
    last_read = {slot: index for index, i in enumerate(instructions) for slot in i.reads}
    last_read.update({ref: len(instructions) for ref in outputs if isinstance(ref, int)})
    return FlatJaxpr(inputs, tuple(instructions), outputs, last_read)


@contextlib.contextmanager
def _context_of(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Restore what the equation was traced under: its mesh and compute_on context, and its name in profiles."""
    with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack) or "param"):
        yield


def read(ref: Ref, slots: Mapping[int, Any]) -> Any:
    """Return the value of an operand."""
    return slots[ref] if isinstance(ref, int) else ref.value


def bind(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply one equation. Derivative rules of custom_jvp and custom_vjp stay attached."""
    with _context_of(eqn):
        # A custom derivative's parameters hold jaxprs, and `bind` takes functions: get_bind_params makes these of them.
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def switch(eqn: jex.JaxprEqn, index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
    """Choose a branch as a cond does, with other functions in the place of its branches.

    Those of `jax.lax.platform_dependent` stay so: a platform compiles its own alone, and may lack what another one has.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    pairs = zip(platforms, branches, strict=True)
    named = {name: branch for names, branch in pairs for name in names or ("default",)}
    return jax.lax.platform_dependent(*operands, **named)


def rematerialised(eqn: jex.JaxprEqn, function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
    """Apply a rematerialised region that was differentiated already, with another function in the place of its own.

    It stays the same equation, and no new region: its barriers are placed.
    """
    closed = jax.make_jaxpr(function)(*values)
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    return bind(eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), [*closed.consts, *values])


def mapped_by_shards(
    eqn: jex.JaxprEqn, function: Callable[..., tuple[Any, ...]], values: Sequence[Any], out_specs: Any = None
) -> list[Any]:
    """Apply a `jax.shard_map` with another function, and other specs of its results, in the place of its own."""
    params = eqn.params
    mapped = jax.shard_map(
        function, mesh=params["mesh"], in_specs=params["in_specs"], check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"], out_specs=params["out_specs"] if out_specs is None else out_specs,
    )  # fmt: skip
    return list(mapped(*values))


def product_of(eqn: jex.JaxprEqn) -> jex.JaxprEqn | None:
    """Return the dot_general that an equation is, or that a custom derivative holds alone; else None."""
    if eqn.primitive.name == "dot_general":
        return eqn
    if eqn.primitive.name not in ("custom_vjp_call", "custom_jvp_call") or len(eqn.invars) != 2:
        return None
    inner: Any = eqn.params["call_jaxpr"].jaxpr
    program = flatten(inner, eqn.params["call_jaxpr"].consts)
    made = [i for i in program.instructions if i.eqn.primitive.name not in ("name", "convert_element_type")]
    is_alone = len(made) == 1 and made[0].eqn.primitive.name == "dot_general" and made[0].ins == program.inputs
    return made[0].eqn if is_alone else None


def flops_of(eqn: jex.JaxprEqn) -> float:
    """Return the FLOPs of the products in an equation: of matrices, convolutions and attention, on all devices.

    Jaxprs that it holds count: of branches the largest one, of a loop of unknown length one turn. Of a Pallas kernel its cost
    estimate counts.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes: list[tuple[int, ...]] = [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]
    if name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"):
        lhs, rhs = shapes[:2]
        if name == "dot_general":
            summed = math.prod(lhs[d] for d in params["dimension_numbers"][0][0])
        elif name == "conv_general_dilated":
            summed = math.prod(rhs) // rhs[params["dimension_numbers"].rhs_spec[0]]  # all but the output's features
        else:
            summed = lhs[-1]
        return 2.0 * math.prod(shapes[-1]) * summed
    if name in _FUSED_ATTENTION:
        query, key = shapes[:2]
        length = key[2 if params["layout"] else 1]  # BNTH, else BTNH
        scores = 4.0 * math.prod(query) * length
        return scores * _FUSED_ATTENTION[name] * (0.5 if "CAUSAL" in str(params["mask_type"]) else 1.0)
    if name == "pallas_call":
        return float(getattr(params.get("cost_estimate"), "flops", 0.0))
    inner = [sum(map(flops_of, jaxpr.eqns)) for jaxpr in jex.jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)
    times = params["mesh"].size if name == "shard_map" else params.get("length", 1)
    return sum(inner) * times


def dtype_of_products(eqn: jex.JaxprEqn) -> Any:
    """Return the dtype of the operands of an equation's products: in jaxprs that it holds, of those with the most FLOPs."""
    while eqn.primitive.name != "pallas_call" and (inner := [e for j in jex.jaxprs_in_params(eqn.params) for e in j.eqns]):
        largest = max(inner, key=flops_of)
        if not flops_of(largest):
            break
        eqn = largest
    return getattr(eqn.invars[0].aval, "dtype", None)


def evaluate(instructions: Sequence[Instruction], slots: dict[int, Any]) -> None:
    """Run instructions in order, reading and writing `slots`."""
    for i in instructions:
        outs = bind(i.eqn, [read(ref, slots) for ref in i.ins])
        slots.update(zip(i.outs, outs, strict=True))


def only_live(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without the equations on which its results do not depend; inside of loops they stay."""

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        program = flatten(closed.jaxpr, closed.consts)
        slots: dict[int, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
        evaluate(program.live(program.outputs), slots)
        return jax.tree.unflatten(jax.tree.structure(out), [read(ref, slots) for ref in program.outputs])

    return run


def scan_arity(params: dict[str, Any], num_operands: int) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many are carried; the rest are scanned over."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(range(num_operands)).unpack()  # jax 0.12 groups the operands
    return len(list(consts)), len(list(carry))
