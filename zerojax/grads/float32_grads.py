"""Sum, return and reduce gradients in float32, while all other computation stays in 16 bits.

    x[B, D], dy[B, F]: bf16    g = dot(x, dy)             f32 sums, rounded: g[D, F]{U_fsdp} bf16,
                                                          then reduced in bf16
                               g = dot(x, dy) -> f32      unrounded sums: g[D, F]{U_fsdp} f32,
                                                          then reduced in f32

A sum over devices follows the equation that leaves it pending, in that equation's dtype: casting a
gradient afterwards is too late. So a derivative is traced, and rewritten backwards from its
gradients. A gradient is wanted in float32. So are the values that it is computed from by casts,
layout, sums and constraints, up to the equations that sum over data:

    dot_general, ragged_dot, conv     preferred_element_type=float32; operands are unchanged
    reduce_sum                        sums a bf16 cotangent, or its product with a value, in float32
                                      (biases, scales)
    scatter-add                       adds bf16 rows into float32 (lookups)

Loops, branches, rematerialized regions and `jax.shard_map` are entered: gradients that a scan
carries or stacks are float32, and so is the psum of an explicit reduction. If a parameter is used
several times, its gradients are added in float32. The rules of custom derivatives are ordinary
equations, because the derivative has already been traced.

Only values that depend on cotangents are rewritten. So the loss, and everything that forward
computes, stays the same bit for bit.

An unknown equation (a kernel, a `while_loop`) makes its gradient in its own dtype, which is then
cast. Sums inside it, and the reduction over devices that the partitioner puts right after it, keep
that dtype.
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
    list_regions,
    rebind,
)
from zerojax.trees import Params

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
"""Equations that are linear in a cotangent and work in float32 unchanged.

Their floating operands have the same dtype.
"""
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})


def float32_grads(
    derivative: Derivative,
    platform: str,
    is_opaque: IsOpaque = lambda eqn: False,
) -> Derivative:
    """Return a derivative whose gradients are summed in float32.

    Args:
      derivative: `derivative(cotangents, data, params) -> (gradients, others)`.
      platform: platform on which the program runs, such as "cpu".
      is_opaque: function that says whether a `jit` stays one equation; its results keep their
        dtype.

    Returns:
      A function of the same arguments. It returns `others` unchanged. Floating gradients narrower
      than float32 are returned in float32.
    """

    def run(cotangents: Any, data: Any, params: Params) -> Any:
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
    """Return whether a dtype is a floating dtype narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _widened(value: Any) -> Any:
    """Return a value in float32 if its dtype is a narrower floating dtype."""
    return jnp.asarray(value).astype(jnp.float32) if _is_narrow(_dtype(value)) else value


def _summed_dims(i: Instruction) -> tuple[int, ...] | None:
    """Return the dims over which an instruction sums, or None if it is not a sum."""
    name = i.eqn.primitive.name
    params = i.eqn.params
    if name == "reduce_sum":
        return tuple(params["axes"])
    if name != "reduce" or len(i.outs) != 1:
        return None
    # `jax.lax.reduce` of 16 bits, whose initial value is an operand.
    combining = [inner.primitive.name for inner in params["jaxpr"].eqns]
    return tuple(params["dimensions"]) if combining == ["add"] else None


def _sums_ones(i: Instruction) -> bool:
    """Return whether an instruction sums only over dims of length 1, a change of layout."""
    dims = _summed_dims(i)
    if dims is None:
        return False
    aval: Any = i.eqn.invars[0].aval
    return all(aval.shape[dim] == 1 for dim in dims)


class Float32GradRewriter(GradRewriter):
    """Rewrites one jaxpr so that its gradients are float32.

    Attributes:
      platform: platform on which the program runs.
      wanted: slots to compute in float32, each with whether their operands are followed too.
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
        """Choose the values to compute in float32, given the wanted outputs.

        Args:
          program: the jaxpr.
          cotangents: slots that depend on cotangents.
          data: slots that depend on data.
          outputs: whether each result is to be float32.
          is_opaque: whether a `jit` stays one equation, see `float32_grads`.
          platform: platform on which the program runs.
          dtypes: dtypes of the inputs in the program, if some are given in float32 instead; None
            for the dtypes of the given values.
        """
        super().__init__(program, cotangents, data, outputs, is_opaque)
        self.platform = platform
        self._input_dtypes = dtypes
        self._dtypes = dict[int, Any]()
        for i in program.instructions:
            for out, v in zip(i.outs, i.eqn.outvars, strict=True):
                aval: Any = v.aval
                self._dtypes[out] = aval.dtype

        self.wanted = dict[int, bool]()
        for ref, is_wide in zip(program.outputs, outputs, strict=True):
            if is_wide and isinstance(ref, int) and ref in cotangents:
                self.wanted[ref] = True
        # A slot's readers come after its maker, so all readers of a result are known when its maker
        # is visited.
        for i in reversed(program.instructions):
            if not any(self.wanted.get(out) for out in i.outs):
                continue
            for slot, is_followed in self._list_wanted_operands(i):
                self.wanted[slot] = self.wanted.get(slot, False) or is_followed
        self.rewritten = self.wanted.keys()

    # --- which slots ------------------------------------------------------------------------------

    def _list_wanted_operands(self, i: Instruction) -> list[tuple[int, bool]]:
        """Return the operands wanted in float32 for a result, each with whether it is followed."""
        name = i.eqn.primitive.name
        followed = [(slot, True) for slot in i.reads if slot in self.cotangents]
        if name in BY_POSITION:
            pairs = zip(i.ins, i.outs, strict=True)
            wanted_operands = [ref for ref, out in pairs if out in self.wanted]
            return [(slot, True) for slot, _ in followed if slot in wanted_operands]
        if name in _LINEAR or _sums_ones(i):
            return followed
        if name in _PRODUCTS:
            # A product with data is a sum over data. A product with parameters leads on to an
            # operand that a parameter was made of, as in LoRA: the cotangent is then the cotangent
            # of a merged parameter.
            return [] if self._reads_data(i) else followed
        if _summed_dims(i) is not None:
            return self._list_summed_operand(i.ins[0])
        if name == "scatter-add":
            total, _, rows = i.ins
            followed_total = [(slot, True) for slot, _ in followed if slot == total]
            return followed_total + self._list_summed_operand(rows)
        return []

    def _reads_data(self, i: Instruction) -> bool:
        return any(slot in self.data and slot not in self.cotangents for slot in i.reads)

    def _list_summed_operand(self, ref: Ref) -> list[tuple[int, bool]]:
        """Return what to compute in float32 for a summed operand.

        It is the operand and its origins if the operand is itself a sum over data, else only its
        last product.
        """
        if not isinstance(ref, int) or ref not in self.cotangents:
            return []
        if self._is_sum(ref):
            return [(ref, True)]
        maker = self.makers.get(ref)
        is_product = maker is not None and maker.eqn.primitive.name == "mul"
        return [(ref, False)] if is_product else []

    def _is_sum(self, slot: int) -> bool:
        """Return whether a cotangent is a sum over data, and not a cotangent of data.

        Products that make cotangents of data multiply by parameters, or have batch dims, as in
        attention.
        """
        maker = self.makers.get(slot)
        if maker is None:
            return False
        name = maker.eqn.primitive.name
        if name in _LAYOUT or name == "add_any" or _sums_ones(maker):
            return all(
                self._is_sum(operand) for operand in maker.reads if operand in self.cotangents
            )
        if name == "dot_general":
            return self._reads_data(maker) and not maker.eqn.params["dimension_numbers"][1][0]
        return name == "scatter-add" or _summed_dims(maker) is not None

    # --- their values -----------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results, in float32 if `outputs` says so."""
        dtypes = self._input_dtypes or [_dtype(value) for value in inputs]
        self._dtypes.update(zip(self.program.inputs, dtypes, strict=True))
        return super().run(inputs)

    def has_form(self, slot: int, value: Any) -> bool:
        """Return whether a slot's value is wider than in the program."""
        return _dtype(value) != self._dtypes[slot]

    def as_plain(self, slot: int, value: Any) -> Any:
        """Cast a float32 value to its dtype in the program."""
        return value.astype(self._dtypes[slot])

    def as_output(self, ref: Ref) -> Any:
        """Return a result in float32."""
        return _widened(self.best(ref))

    def best(self, ref: Ref) -> Any:
        """Return a value in float32 if it was computed so, else as the program computes it."""
        if isinstance(ref, int) and ref in self.formed_values:
            return self.formed_values[ref]
        return self.plain(ref)

    def is_wide(self, ref: Ref) -> bool:
        """Return whether a value was computed in float32 but is narrower in the program."""
        return isinstance(ref, int) and ref in self.formed_values

    def build_region_rewriter(self, i: Instruction, region: Region) -> "Float32GradRewriter":
        """Return the rewriter of one region of an instruction; both have the same results."""
        avals: list[Any] = [v.aval for v in region.jaxpr.invars]
        return Float32GradRewriter(
            *self.flatten_region(i, region),
            outputs=[out in self.wanted for out in i.outs],
            is_opaque=self.is_opaque,
            platform=self.platform,
            dtypes=[aval.dtype for aval in avals] if region.is_loop else None,
        )

    # --- equations whose result is wanted in float32 -----------------------------------------

    def linear(self, i: Instruction) -> list[Any]:
        """Apply the same equation to operands in float32."""
        return bind(i.eqn, [_widened(self.best(ref)) for ref in i.ins])

    def by_position(self, i: Instruction) -> list[Any]:
        """Apply an equation whose result k depends only on operand k, in float32 if wanted."""
        operands: list[Any] = []
        for ref, out in zip(i.ins, i.outs, strict=True):
            operands.append(_widened(self.best(ref)) if out in self.wanted else self.plain(ref))
        return bind(i.eqn, operands)

    def convert(self, i: Instruction) -> list[Any]:
        """Skip casts that would round a float32 value."""
        value = self.best(i.ins[0])
        new_dtype = jnp.dtype(i.eqn.params["new_dtype"])
        fits_in_float32 = _is_narrow(new_dtype) or new_dtype == jnp.float32
        if fits_in_float32 and _dtype(value) == jnp.float32:
            return [value]
        return bind(i.eqn, [value])

    def product(self, i: Instruction) -> list[Any]:
        """Return a product's unrounded float32 sums.

        Its operands are unchanged, unless they are float32 sums themselves.
        """
        aval: Any = i.eqn.outvars[0].aval
        params = i.eqn.params
        dtype = aval.dtype
        # A named algorithm determines the dtype of its result.
        is_named = not isinstance(params.get("precision"), tuple | jax.lax.Precision | None)
        if is_named or not (_is_narrow(dtype) or dtype == jnp.float32):
            return self.apply_plain(i)
        operands = [self.plain(ref) for ref in i.ins]
        # Operands of 32 bits have the same values but cost more. XLA:CPU multiplies in float32
        # anyway. It also rejects a 16-bit product with a 32-bit result over several dims that a
        # transpose follows.
        if self.platform == "cpu" or any(self.is_wide(ref) for ref in i.ins):
            operands = [_widened(self.best(ref)) for ref in i.ins]
        params = {**params, "preferred_element_type": jnp.dtype(jnp.float32)}
        return bind(i.eqn.replace(params=params), operands)

    def reduce(self, i: Instruction) -> list[Any]:
        """Apply a sum with float32 operands; apply other reductions unchanged."""
        dims = _summed_dims(i)
        if dims is None:
            return self.apply_plain(i)
        value, initial_value = (jnp.asarray(_widened(self.best(ref))) for ref in i.ins)
        # The equation itself cannot be bound: its parameters contain an addition in its own dtype.
        return [jax.lax.reduce(value, initial_value, jax.lax.add, dims)]

    def scatter_add(self, i: Instruction) -> list[Any]:
        """Apply a scatter-add with float32 operands."""
        total, ids, rows = (self.best(ref) for ref in i.ins)
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        options = {name: i.eqn.params[name] for name in names}
        # the equation itself cannot be bound, as in `reduce`
        return [jax.lax.scatter_add(_widened(total), ids, _widened(rows), **options)]

    def enter(self, i: Instruction) -> list[Any]:
        """Rewrite the regions of an instruction.

        A loop carries sums over its iterations in float32.
        """
        regions = list_regions(i.eqn)
        operands = [self.plain(ref) for ref in i.ins]
        for position, out in zip(regions[0].carried, i.outs, strict=False):
            if out in self.wanted:
                operands[position] = _widened(self.best(i.ins[position]))
        rewriters = [self.build_region_rewriter(i, region) for region in regions]
        return rebind(i.eqn, [rewriter.run for rewriter in rewriters], operands)

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
