"""Gradients that are summed, returned and reduced over devices in float32, while all else stays in
16 bits.

    x[B, D], dy[B, F]: bf16    g = dot(x, dy)             f32 sums, rounded: g[D, F]{U_fsdp}: bf16, then reduced in bf16
                               g = dot(x, dy) -> f32      the sums as they are: g[D, F]{U_fsdp}: f32, then reduced in f32

A sum over devices follows the equation that leaves it to be done, in that equation's dtype: to cast
a gradient afterwards comes too late. So a derivative is traced, and rewritten from its gradients
backwards. A gradient is wanted in float32, and so is what it is computed from by casts, layout,
sums and constraints, up to the equations that sum over data:

    dot_general, ragged_dot, conv     preferred_element_type=float32; its operands stay as they are
    reduce_sum                        of the bf16 cotangent, or of its product with a value, in float32 (biases, scales)
    scatter-add                       of bf16 rows into float32 (look-ups)

Loops, branches, rematerialised regions and `jax.shard_map` are entered: what a scan carries of a
gradient, or stacks, is float32, and so is the psum of a spelt-out reduction. Sums of several uses
of a parameter are float32. Rules of custom derivatives are equations like others, since they are
there once the derivative is traced.

Only what depends on cotangents is rewritten. So the loss, and all that forward computes, is bit for
bit what it was.

What is not known (a kernel, a `while_loop`) makes its gradient in its own dtype, which is cast:
what it sums, and what the partitioner sums over devices right after it, is summed as it comes.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from zerojax.grads.rewriter import Derivative, GradRewriter, IsOpaque, Rules, TracedDerivative
from zerojax.jaxprs import (
    BY_POSITION,
    ENTERED,
    INLINED,
    FlatJaxpr,
    Instruction,
    Ref,
    Region,
    bind,
    rebind,
    regions_of,
)

_LAYOUT = frozenset(
    {
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "slice",
        "rev",
        "copy",
        "neg",
        "name",
        "sharding_constraint",
        "reshard",
        "convert_element_type",
    }
)
_LINEAR = _LAYOUT | {
    "add_any",
    "add",
    "sub",
    "mul",
    "div",
    "broadcast_in_dim",
    "pad",
    "concatenate",
    "select_n",
    "split",
    "cumsum",
    "gather",
    "dynamic_slice",
    "dynamic_update_slice",
}
"""Linear in a cotangent, and the same equation in float32. Floating operands have one dtype."""
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})


def float32_grads(
    derivative: Derivative,
    platform: str,
    is_opaque: IsOpaque = lambda eqn: False,
) -> Derivative:
    """Return a derivative whose gradients are summed in float32.

    Args:
      derivative: with which a pullback is called.
      platform: on which the program runs, such as "cpu".
      is_opaque: whether a `jit` is to stay one equation; its results are returned as it makes them.

    Returns:
      A function of the same arguments. It returns `others` as they are. Floating leaves of the
      gradients that are narrower than float32 are float32.
    """

    def run(cotangents: Any, data: Any, params: Any) -> Any:
        traced = TracedDerivative.of(derivative, (cotangents, data, params), is_opaque)
        program = traced.program
        rewriter = Float32GradRewriter(
            program,
            program.reached(traced.cotangents, by_result=True),
            program.reached(traced.data, by_result=True),
            traced.is_grad,
            is_opaque,
            platform,
        )
        return traced.rewritten(rewriter)

    return run


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def _is_narrow(dtype: Any) -> bool:
    """Tell whether a dtype is a floating one below float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _widened(value: Any) -> Any:
    """Return a value in float32, if its dtype is a narrower floating one."""
    return jnp.asarray(value).astype(jnp.float32) if _is_narrow(_dtype(value)) else value


def _summed_dims(i: Instruction) -> tuple[int, ...] | None:
    """Return the dims over which an instruction sums, or None where it is no sum."""
    name, params = i.eqn.primitive.name, i.eqn.params
    if name == "reduce_sum":
        return tuple(params["axes"])
    # `jax.lax.reduce` of 16 bits, whose initial value is an operand.
    adds = (
        name == "reduce"
        and len(i.outs) == 1
        and [e.primitive.name for e in params["jaxpr"].eqns] == ["add"]
    )
    return tuple(params["dimensions"]) if adds else None


def _sums_ones(i: Instruction) -> bool:
    """Tell whether an instruction sums over dims of length 1 alone, and so changes the layout only."""
    dims = _summed_dims(i)
    if dims is None:
        return False
    aval: Any = i.eqn.invars[0].aval
    return all(aval.shape[dim] == 1 for dim in dims)


class Float32GradRewriter(GradRewriter):
    """The rewriting of one jaxpr, whose other form is float32.

    Attributes:
      platform: on which the program runs.
      wanted: slots to have in float32, each with whether what it is made of is followed.
    """

    def __init__(
        self,
        program: FlatJaxpr,
        cotangents: set[int],
        data: set[int],
        outputs: Sequence[bool],
        is_opaque: IsOpaque,
        platform: str,
        dtypes: Sequence[Any] | None = None,
    ) -> None:
        """Choose what to have in float32, given which of the outputs.

        Args:
          program: the jaxpr.
          cotangents: slots that depend on cotangents.
          data: slots that depend on data.
          outputs: whether each result is to be float32.
          is_opaque: see `float32_grads`.
          platform: on which the program runs.
          dtypes: of the inputs in the program, if some are given in float32; else theirs.
        """
        super().__init__(program, cotangents, data, outputs, is_opaque)
        self.platform, self._input_dtypes = platform, dtypes
        self._dtypes = dict[int, Any]()
        for i in program.instructions:
            avals: list[Any] = [v.aval for v in i.eqn.outvars]
            self._dtypes.update(zip(i.outs, (aval.dtype for aval in avals), strict=True))
        pairs = zip(program.outputs, outputs, strict=True)
        self.wanted = {
            ref: True
            for ref, is_wide in pairs
            if is_wide and isinstance(ref, int) and ref in cotangents
        }
        # What reads a slot comes after what makes it, so that all is known of a result when its
        # maker is looked at.
        for i in reversed(program.instructions):
            if any(self.wanted.get(out) for out in i.outs):
                for slot, is_followed in self._made_of(i):
                    self.wanted[slot] = self.wanted.get(slot, False) or is_followed
        self.rewritten = self.wanted.keys()

    # --- which slots ------------------------------------------------------------------------------

    def _made_of(self, i: Instruction) -> list[tuple[int, bool]]:
        """Return the operands that are wanted in float32 for a result to be, each with whether it
        is followed.
        """
        name, of_cotangents = (
            i.eqn.primitive.name,
            [slot for slot in i.reads if slot in self.cotangents],
        )
        if name in BY_POSITION:
            pairs = zip(i.ins, i.outs, strict=True)
            return [
                (ref, True)
                for ref, out in pairs
                if ref in of_cotangents and out in self.wanted and isinstance(ref, int)
            ]
        if name in _LINEAR or _sums_ones(i):
            return [(slot, True) for slot in of_cotangents]
        if name in _PRODUCTS:
            # With data it is a sum over data. With parameters it leads on to one that a parameter
            # was made of, as in LoRA: the cotangent is then that of a merged parameter.
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
        """Return what is wanted of an operand that is summed: all, if it is a sum over data itself;
        else its last product.
        """
        if not isinstance(ref, int) or ref not in self.cotangents:
            return []
        if self._is_sum(ref):
            return [(ref, True)]
        maker = self.makers.get(ref)
        return [(ref, False)] if maker is not None and maker.eqn.primitive.name == "mul" else []

    def _is_sum(self, slot: int) -> bool:
        """Tell whether a cotangent is a sum over data, and not of data itself.

        Products that make cotangents of data multiply by parameters, or they have batch dims, as
        those of attention.
        """
        maker = self.makers.get(slot)
        if maker is None:
            return False
        name = maker.eqn.primitive.name
        if name in _LAYOUT or name == "add_any" or _sums_ones(maker):
            return all(self._is_sum(s) for s in maker.reads if s in self.cotangents)
        if name == "dot_general":
            return self._reads_data(maker) and not maker.eqn.params["dimension_numbers"][1][0]
        return name == "scatter-add" or _summed_dims(maker) is not None

    # --- their values -----------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        dtypes = self._input_dtypes or [_dtype(value) for value in inputs]
        self._dtypes.update(zip(self.program.inputs, dtypes, strict=True))
        return super().run(inputs)

    def has_form(self, slot: int, value: Any) -> bool:
        return _dtype(value) != self._dtypes[slot]

    def as_plain(self, slot: int, value: Any) -> Any:
        return value.astype(self._dtypes[slot])

    def as_output(self, ref: Ref) -> Any:
        return _widened(self.best(ref))

    def best(self, ref: Ref) -> Any:
        """Return a value in float32 where it was made so, else as the program has it."""
        if isinstance(ref, int) and ref in self.formed_values:
            return self.formed_values[ref]
        return self.plain(ref)

    def is_wide(self, ref: Ref) -> bool:
        """Return whether a value was made in float32 that is narrower in the program."""
        return isinstance(ref, int) and ref in self.formed_values

    def inside(self, i: Instruction, region: Region) -> "Float32GradRewriter":
        """Return the rewriting of a region of an instruction, whose results are those of both."""
        avals: list[Any] = [v.aval for v in region.jaxpr.invars]
        return Float32GradRewriter(
            *self.flatten_region(i, region),
            [out in self.wanted for out in i.outs],
            self.is_opaque,
            self.platform,
            [aval.dtype for aval in avals] if region.is_loop else None,
        )

    # --- equations whose result is wanted in float32 -----------------------------------------

    def linear(self, i: Instruction) -> list[Any]:
        """Apply the same equation to operands in float32."""
        return bind(i.eqn, [_widened(self.best(ref)) for ref in i.ins])

    def by_position(self, i: Instruction) -> list[Any]:
        def value(ref: Ref, out: int) -> Any:
            return _widened(self.best(ref)) if out in self.wanted else self.plain(ref)

        pairs = zip(i.ins, i.outs, strict=True)
        return bind(i.eqn, [value(ref, out) for ref, out in pairs])

    def convert(self, i: Instruction) -> list[Any]:
        """Leave out what rounds: a cast of float32, or of what was made in it."""
        value, after = self.best(i.ins[0]), jnp.dtype(i.eqn.params["new_dtype"])
        if _dtype(value) == jnp.float32 and (_is_narrow(after) or after == jnp.float32):
            return [value]
        return bind(i.eqn, [value])

    def product(self, i: Instruction) -> list[Any]:
        """Return a product as it was summed.

        Its operands stay as they are, unless they are sums in float32 themselves.
        """
        aval: Any = i.eqn.outvars[0].aval
        params, dtype = i.eqn.params, aval.dtype
        # The result of a named algorithm has the dtype that the algorithm says.
        is_named = not isinstance(params.get("precision"), tuple | jax.lax.Precision | None)
        if is_named or not (_is_narrow(dtype) or dtype == jnp.float32):
            return self.apply_plain(i)
        values = [self.plain(ref) for ref in i.ins]
        # Operands of 32 bits have the same values, and cost more. XLA:CPU multiplies in float32
        # anyway, and refuses a product of 16 bits that returns 32, over several dims, where a
        # transpose follows.
        if self.platform == "cpu" or any(self.is_wide(ref) for ref in i.ins):
            values = [_widened(self.best(ref)) for ref in i.ins]
        params = {**params, "preferred_element_type": jnp.dtype(jnp.float32)}
        return bind(i.eqn.replace(params=params), values)

    def reduce(self, i: Instruction) -> list[Any]:
        dims = _summed_dims(i)
        if dims is None:
            return self.apply_plain(i)
        value, first = (jnp.asarray(_widened(self.best(ref))) for ref in i.ins)
        # Not the equation itself: its parameters hold an addition in its own dtype.
        return [jax.lax.reduce(value, first, jax.lax.add, dims)]

    def scatter_add(self, i: Instruction) -> list[Any]:
        total, ids, rows = (self.best(ref) for ref in i.ins)
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        options = {name: i.eqn.params[name] for name in names}
        # not the equation itself, as above
        return [jax.lax.scatter_add(_widened(total), ids, _widened(rows), **options)]

    def enter(self, i: Instruction) -> list[Any]:
        """Rewrite what an instruction holds. A loop carries sums over its iterations in float32."""
        regions = regions_of(i.eqn)
        values = [self.plain(ref) for ref in i.ins]
        for position, out in zip(regions[0].carried, i.outs, strict=False):
            if out in self.wanted:
                values[position] = _widened(self.best(i.ins[position]))
        return rebind(i.eqn, [self.inside(i, region).run for region in regions], values)

    rules: ClassVar[Rules] = {
        **dict.fromkeys(_LINEAR, linear),
        **dict.fromkeys(BY_POSITION, by_position),
        **dict.fromkeys(_PRODUCTS, product),
        "convert_element_type": convert,
        "reduce_sum": linear,
        "reduce": reduce,
        "scatter-add": scatter_add,
        **dict.fromkeys(ENTERED["float32_grads"] - INLINED, enter),
    }
