"""Gradients that are summed, returned and reduced over devices in float32, while all else stays in 16 bits.

    x[B, D], dy[B, F]: bf16    g = dot(x, dy)             f32 sums, rounded: g[D, F]{U_fsdp}: bf16, then reduced in bf16
                               g = dot(x, dy) -> f32      the sums as they are: g[D, F]{U_fsdp}: f32, then reduced in f32

A sum over devices follows the equation that leaves it to be done, in that equation's dtype: to cast a gradient afterwards comes
too late. So a derivative is traced, and rewritten from its gradients backwards. A gradient is wanted in float32, and so is what
it is computed from by casts, layout, sums and constraints, up to the equations that sum over data:

    dot_general, ragged_dot, conv     preferred_element_type=float32; its operands stay as they are
    reduce_sum                        of the bf16 cotangent, or of its product with a value, in float32 (biases, scales)
    scatter-add                       of bf16 rows into float32 (look-ups)

Loops, branches, rematerialised regions and `jax.shard_map` are entered: what a scan carries of a gradient, or stacks, is
float32, and so is the psum of a spelt-out reduction. Sums of several uses of a parameter are float32. Rules of custom
derivatives are equations like others, since they are there once the derivative is traced.

Only what depends on cotangents is rewritten. So the loss, and all that forward computes, is bit for bit what it was.

What is not known (a kernel, a `while_loop`) makes its gradient in its own dtype, which is cast: what it sums, and what the
partitioner sums over devices right after it, is summed as it comes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.jaxprs import (
    REMAT,
    FlatJaxpr,
    Instruction,
    Ref,
    bind,
    flatten,
    mapped_by_shards,
    rematerialised,
    scan_arity,
    switch,
)

Array = jax.Array
Derivative = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`derivative(cotangents, data, params) -> (gradients, others)`, of trees of arrays."""
_LAYOUT = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "slice", "rev", "copy", "neg", "name", "sharding_constraint",
     "reshard", "convert_element_type"}
)  # fmt: skip
_LINEAR = _LAYOUT | {
    "add_any", "add", "sub", "mul", "div", "broadcast_in_dim", "pad", "concatenate", "select_n", "split", "cumsum", "gather",
    "dynamic_slice", "dynamic_update_slice",
}  # fmt: skip
"""Linear in a cotangent, and the same equation in float32. Floating operands have one dtype."""
_BY_POSITION = frozenset({"optimization_barrier", "psum", "psum_invariant", "reduce_scatter", "pvary"})
"""Result k is made of operand k."""
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})


def float32_grads(
    derivative: Derivative, platform: str, is_opaque: Callable[[jex.JaxprEqn], bool] = lambda eqn: False
) -> Derivative:
    """Return a derivative whose gradients are summed in float32.

    Args:
      derivative: with which a pullback is called.
      platform: on which the program runs, such as "cpu".
      is_opaque: whether a `jit` is to stay one equation; its results are returned as it makes them.

    Returns:
      A function of the same arguments. It returns `others` as they are. Floating leaves of the gradients that are narrower than
      float32 are float32.
    """

    def run(cotangents: Any, data: Any, params: Any) -> Any:
        args = (cotangents, data, params)
        closed, out = jax.make_jaxpr(derivative, return_shape=True)(*args)
        program = flatten(closed.jaxpr, closed.consts, is_opaque)
        counts = [len(jax.tree.leaves(tree)) for tree in args]
        of_cotangents, of_data = program.inputs[: counts[0]], program.inputs[counts[0] : counts[0] + counts[1]]
        is_grad = jax.tree.leaves((jax.tree.map(lambda _: True, out[0]), jax.tree.map(lambda _: False, out[1])))
        rule = _Rule(platform, is_opaque)
        walk = _Walk(rule, program, _reached(program, of_cotangents), _reached(program, of_data), is_grad)
        return jax.tree.unflatten(jax.tree.structure(out), [jnp.asarray(a) for a in walk.run(jax.tree.leaves(args))])

    return run


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What is the same for all jaxprs of a derivative: the arguments of `float32_grads`."""

    platform: str
    is_opaque: Callable[[jex.JaxprEqn], bool]


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def _is_narrow(dtype: Any) -> bool:
    """Tell whether a dtype is a floating one below float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _widened(value: Any) -> Any:
    """Return a value in float32, if its dtype is a narrower floating one."""
    return jnp.asarray(value).astype(jnp.float32) if _is_narrow(_dtype(value)) else value


def _reached(program: FlatJaxpr, starts: Sequence[int]) -> set[int]:
    """Return the slots in `starts`, and every slot computed from them. A barrier computes each result of its own operand."""
    reached = set(starts)
    for i in program.instructions:
        if i.eqn.primitive.name in _BY_POSITION:
            reached.update(out for ref, out in zip(i.ins, i.outs, strict=True) if ref in reached)
        elif i.eqn.primitive.name == "shard_map":
            # Data may go around a ring beside cotangents (`zerojax.activations.rings`).
            inner = flatten(i.eqn.params["jaxpr"], ())
            inside = _reached(inner, [slot for slot, ref in zip(inner.inputs, i.ins, strict=True) if ref in reached])
            reached.update(out for ref, out in zip(inner.outputs, i.outs, strict=True) if ref in inside)
        elif not reached.isdisjoint(i.reads):
            reached.update(i.outs)
    return reached


def _summed_dims(i: Instruction) -> tuple[int, ...] | None:
    """Return the dims over which an instruction sums, or None where it is no sum."""
    name, params = i.eqn.primitive.name, i.eqn.params
    if name == "reduce_sum":
        return tuple(params["axes"])
    # `jax.lax.reduce` of 16 bits, whose initial value is an operand.
    adds = name == "reduce" and len(i.outs) == 1 and [e.primitive.name for e in params["jaxpr"].eqns] == ["add"]
    return tuple(params["dimensions"]) if adds else None


def _sums_ones(i: Instruction) -> bool:
    """Tell whether an instruction sums over dims of length 1 alone, and so changes the layout only."""
    dims = _summed_dims(i)
    if dims is None:
        return False
    aval: Any = i.eqn.invars[0].aval
    return all(aval.shape[dim] == 1 for dim in dims)


class _Walk:
    """The rewriting of one jaxpr.

    Attributes:
      rule: of the derivative.
      program: the jaxpr.
      cotangents: slots that depend on cotangents.
      data: slots that depend on data. What is in neither set is made of parameters and constants.
      wanted: slots to have in float32, each with whether what it is made of is followed.
    """

    def __init__(self, rule: _Rule, program: FlatJaxpr, cotangents: set[int], data: set[int], outputs: Sequence[bool]) -> None:
        """Choose what to have in float32, given which of the outputs."""
        self.rule, self.program, self.cotangents, self.data = rule, program, cotangents, data
        self._wide_outputs = outputs
        self._makers = {out: i for i in program.instructions for out in i.outs}
        pairs = zip(program.outputs, outputs, strict=True)
        self.wanted = {ref: True for ref, is_wide in pairs if is_wide and isinstance(ref, int) and ref in cotangents}
        # What reads a slot comes after what makes it, so that all is known of a result when its maker is looked at.
        for i in reversed(program.instructions):
            if any(self.wanted.get(out) for out in i.outs):
                for slot, is_followed in self._made_of(i):
                    self.wanted[slot] = self.wanted.get(slot, False) or is_followed

    # --- which slots -------------------------------------------------------------------------------------------------------

    def _made_of(self, i: Instruction) -> list[tuple[int, bool]]:
        """Return the operands that are wanted in float32 for a result to be, each with whether it is followed."""
        name, of_cotangents = i.eqn.primitive.name, [slot for slot in i.reads if slot in self.cotangents]
        if name in _BY_POSITION:
            pairs = zip(i.ins, i.outs, strict=True)
            return [(ref, True) for ref, out in pairs if ref in of_cotangents and out in self.wanted and isinstance(ref, int)]
        if name in _LINEAR or _sums_ones(i):
            return [(slot, True) for slot in of_cotangents]
        if name in _PRODUCTS:
            # With data it is a sum over data. With parameters it leads on to one that a parameter was made of, as in LoRA: the
            # cotangent is then that of a merged parameter.
            return [] if self._reads_data(i) else [(slot, True) for slot in of_cotangents]
        if _summed_dims(i) is not None:
            return self._summed(i.ins[0])
        if name == "scatter-add":
            total, _, rows = i.ins
            return [*((slot, True) for slot in of_cotangents if slot == total), *self._summed(rows)]
        return []

    def _reads_data(self, i: Instruction) -> bool:
        return any(slot in self.data and slot not in self.cotangents for slot in i.reads)

    def _summed(self, ref: Ref) -> list[tuple[int, bool]]:
        """Return what is wanted of an operand that is summed: all, if it is a sum over data itself; else its last product."""
        if not isinstance(ref, int) or ref not in self.cotangents:
            return []
        if self._is_sum(ref):
            return [(ref, True)]
        maker = self._makers.get(ref)
        return [(ref, False)] if maker is not None and maker.eqn.primitive.name == "mul" else []

    def _is_sum(self, slot: int) -> bool:
        """Tell whether a cotangent is a sum over data, and not of data itself.

        Products that make cotangents of data multiply by parameters, or they have batch dims, as those of attention.
        """
        maker = self._makers.get(slot)
        if maker is None:
            return False
        name = maker.eqn.primitive.name
        if name in _LAYOUT or name == "add_any" or _sums_ones(maker):
            return all(self._is_sum(s) for s in maker.reads if s in self.cotangents)
        if name == "dot_general":
            return self._reads_data(maker) and not maker.eqn.params["dimension_numbers"][1][0]
        return name == "scatter-add" or _summed_dims(maker) is not None

    # --- their values ------------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[Any]:
        """Return the outputs; of those that are to be so, narrower ones in float32.

        Args:
          inputs: of the program.
          dtypes: those that the program has them in, where some are given in float32; None: those of `inputs`.
        """
        self._plain: dict[int, Any] = {}
        self._wide: dict[int, Any] = {}
        self._dtypes: dict[int, Any] = {}
        dtypes = [_dtype(value) for value in inputs] if dtypes is None else dtypes
        self._write(self.program.inputs, inputs, dtypes)
        for i in self.program.instructions:
            handler = _HANDLERS.get(i.eqn.primitive.name) if any(out in self.wanted for out in i.outs) else None
            outs = bind(i.eqn, [self.plain(ref) for ref in i.ins]) if handler is None else handler(self, i)
            avals: list[Any] = [v.aval for v in i.eqn.outvars]
            self._write(i.outs, outs, [aval.dtype for aval in avals])
        outputs = zip(self.program.outputs, self._wide_outputs, strict=True)
        return [
            _widened(self.best(ref)) if is_wide and not self._is_opaque(ref) else self.plain(ref) for ref, is_wide in outputs
        ]

    def _is_opaque(self, ref: Ref) -> bool:
        """Tell whether an opaque equation made a value: then whoever runs that one chooses its dtype."""
        maker = self._makers.get(ref) if isinstance(ref, int) else None
        return maker is not None and self.rule.is_opaque(maker.eqn)

    def _write(self, slots: Sequence[int], values: Sequence[Any], dtypes: Sequence[Any]) -> None:
        for slot, value, dtype in zip(slots, values, dtypes, strict=True):
            (self._plain if _dtype(value) == dtype else self._wide)[slot] = value
            self._dtypes[slot] = dtype

    def plain(self, ref: Ref) -> Any:
        """Return a value in the dtype that the program has it in."""
        if not isinstance(ref, int):
            return ref.value
        if ref not in self._plain:
            self._plain[ref] = self._wide[ref].astype(self._dtypes[ref])
        return self._plain[ref]

    def best(self, ref: Ref) -> Any:
        """Return a value in float32 where it was made so, else as the program has it."""
        return self._wide[ref] if isinstance(ref, int) and ref in self._wide else self.plain(ref)

    def is_wide(self, ref: Ref) -> bool:
        """Tell whether a value was made in float32 where the program has it in a narrower dtype."""
        return isinstance(ref, int) and ref in self._wide

    def entered(
        self, i: Instruction, jaxpr: jex.Jaxpr, consts: Sequence[Any], ins: Sequence[Ref], carry: range = range(0)
    ) -> "_Walk":
        """Return the rewriting of a jaxpr that an instruction holds, and whose results are the instruction's.

        Args:
          i: the instruction.
          jaxpr: what it holds.
          consts: of the jaxpr.
          ins: the operands that the jaxpr takes.
          carry: positions among these of what a loop carries; the first results take their place.
        """
        program = flatten(jaxpr, consts, self.rule.is_opaque)

        def reached(outside: set[int]) -> set[int]:
            pairs = zip(program.inputs, ins, strict=True)
            starts = {slot for slot, ref in pairs if isinstance(ref, int) and ref in outside}
            while True:
                reached = _reached(program, sorted(starts))
                after = starts | {program.inputs[p] for p, ref in zip(carry, program.outputs, strict=False) if ref in reached}
                if after == starts:
                    return reached
                starts = after

        is_wide = [out in self.wanted for out in i.outs]
        return _Walk(self.rule, program, reached(self.cotangents), reached(self.data), is_wide)


# --- equations whose result is wanted in float32 ---------------------------------------------------------------------------


def _linear(walk: _Walk, i: Instruction) -> list[Any]:
    """Apply the same equation to operands in float32."""
    return bind(i.eqn, [_widened(walk.best(ref)) for ref in i.ins])


def _by_position(walk: _Walk, i: Instruction) -> list[Any]:
    pairs = zip(i.ins, i.outs, strict=True)
    return bind(i.eqn, [_widened(walk.best(ref)) if out in walk.wanted else walk.plain(ref) for ref, out in pairs])


def _convert(walk: _Walk, i: Instruction) -> list[Any]:
    """Leave out what rounds: a cast of float32, or of what was made in it."""
    value, after = walk.best(i.ins[0]), jnp.dtype(i.eqn.params["new_dtype"])
    if _dtype(value) == jnp.float32 and (_is_narrow(after) or after == jnp.float32):
        return [value]
    return bind(i.eqn, [value])


def _product(walk: _Walk, i: Instruction) -> list[Any]:
    """Return a product as it was summed. Its operands stay as they are, unless they are sums in float32 themselves."""
    params, aval = i.eqn.params, i.eqn.outvars[0].aval
    # Of a named algorithm the result has the dtype that it says.
    is_named = not isinstance(params.get("precision"), tuple | jax.lax.Precision | None)
    if is_named or not (_is_narrow(aval.dtype) or aval.dtype == jnp.float32):  # pyright: ignore[reportAttributeAccessIssue]
        return bind(i.eqn, [walk.plain(ref) for ref in i.ins])
    values = [walk.plain(ref) for ref in i.ins]
    # Operands of 32 bits have the same values, and cost more. XLA:CPU multiplies in float32 anyway, and refuses a product of
    # 16 bits that returns 32, over several dims, where a transpose follows.
    if walk.rule.platform == "cpu" or any(walk.is_wide(ref) for ref in i.ins):
        values = [_widened(walk.best(ref)) for ref in i.ins]
    return bind(i.eqn.replace(params={**params, "preferred_element_type": jnp.dtype(jnp.float32)}), values)


def _reduce(walk: _Walk, i: Instruction) -> list[Any]:
    dims = _summed_dims(i)
    if dims is None:
        return bind(i.eqn, [walk.plain(ref) for ref in i.ins])
    value, first = (jnp.asarray(_widened(walk.best(ref))) for ref in i.ins)
    # Not the equation itself: its parameters hold an addition in its own dtype.
    return [jax.lax.reduce(value, first, jax.lax.add, dims)]


def _scatter_add(walk: _Walk, i: Instruction) -> list[Any]:
    total, ids, rows = (walk.best(ref) for ref in i.ins)
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: i.eqn.params[name] for name in names}
    # Likewise.
    return [jax.lax.scatter_add(_widened(total), ids, _widened(rows), **options)]


def _scan(walk: _Walk, i: Instruction) -> list[Any]:
    params = i.eqn.params
    num_consts, num_carry = scan_arity(params, len(i.ins))
    carried = range(num_consts, num_consts + num_carry)
    inner = walk.entered(i, params["jaxpr"].jaxpr, params["jaxpr"].consts, i.ins, carried)
    values = [walk.plain(ref) for ref in i.ins]
    for position, out in zip(carried, i.outs, strict=False):
        if out in walk.wanted:  # a sum over iterations
            values[position] = _widened(walk.best(i.ins[position]))
    consts, xs = values[:num_consts], values[carried.stop :]
    avals: list[Any] = [v.aval for v in params["jaxpr"].jaxpr.invars]
    dtypes = [aval.dtype for aval in avals]

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = inner.run([*consts, *carry, *x], dtypes)
        return outs[:num_carry], outs[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, values[num_consts : carried.stop], xs, **options)
    return [*carry, *ys]


def _cond(walk: _Walk, i: Instruction) -> list[Any]:
    branches = [walk.entered(i, b.jaxpr, b.consts, i.ins[1:]) for b in i.eqn.params["branches"]]
    index, *operands = (walk.plain(ref) for ref in i.ins)
    return switch(i.eqn, index, [lambda *values, b=b: b.run(values) for b in branches], operands)


def _remat(walk: _Walk, i: Instruction) -> list[Any]:
    inner, values = walk.entered(i, i.eqn.params["jaxpr"], (), i.ins), [walk.plain(ref) for ref in i.ins]
    return rematerialised(i.eqn, lambda *values: inner.run(values), values)


def _shard_map(walk: _Walk, i: Instruction) -> list[Any]:
    inner = walk.entered(i, i.eqn.params["jaxpr"], (), i.ins)
    return mapped_by_shards(i.eqn, lambda *values: tuple(inner.run(values)), [walk.plain(ref) for ref in i.ins])


_HANDLERS: dict[str, Callable[[_Walk, Instruction], list[Any]]] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(_BY_POSITION, _by_position),
    **dict.fromkeys(_PRODUCTS, _product),
    "convert_element_type": _convert,
    "reduce_sum": _linear,
    "reduce": _reduce,
    "scatter-add": _scatter_add,
    "scan": _scan,
    "cond": _cond,
    REMAT: _remat,
    "shard_map": _shard_map,
}
