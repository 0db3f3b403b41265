"""The residuals of one layer: which values forward keeps, which ones backward recomputes, and the derivative given these.

Where the kept values rest until backward is decided by `zerojax.streamed.activations`.

A layer runs twice: in forward, and again inside of its own derivative. The second run puts each residual in place of the value
that it computes. Whatever only led to a residual is then dead code, and is not computed again:

    forward     y, residuals = block(p, x)
    backward    dp, dx       = vjp(block with each residual put in its place)(dy)

`put` is the operation that does so: its result is the residual, and its derivative is that of the value it replaces. Nothing
that is computed from parameters alone is ever saved: a transposed weight is recomputed from the gathered layer. So ZeRO-3's
memory bound holds in every mode. The modes save:

    save        every intermediate that backward reads, layout and casts excepted
    selective   the same, less attention's inner part: all between the product of queries and keys and the product with the
                values, dropout mask included (Korthikanti et al., arXiv:2205.05198, section 5)
    remat       nothing but the layer's input
    names       whatever the model marks by `jax.ad_checkpoint.checkpoint_name`, in any mode

Attention is found by its form, two matrix products with batch dims of data with data, one feeding the other; a fused attention
kernel saves little, and is one equation here. Random masks agree in both runs since keys are functions of (step, layer).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.float32_grads import Derivative
from zerojax.jaxprs import FlatJaxpr, Instruction, bind, flatten, read
from zerojax.models import Given, Loss, floating, merged
from zerojax.tiling import TileLoop, find_loops, marked, parse

MODES = ("save", "selective", "remat")
_LAYOUT = frozenset(
    {"broadcast_in_dim", "iota", "reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "slice", "copy",
     "copy_p", "stop_gradient", "random_wrap", "random_unwrap", "random_fold_in", "random_split", "random_seed", "rev", "split"}
)  # fmt: skip
"""Equations whose results are made again from what they read."""


@jax.custom_jvp
def put(computed: jax.Array, saved: jax.Array) -> jax.Array:
    """Return `saved`; the derivative is that of `computed`."""
    del computed
    return saved


@put.defjvp
def _put_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> tuple[jax.Array, Any]:
    # The primal itself: linearisation sees through a custom_jvp only if its rule returns that.
    return primals[1], tangents[0]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedBlock:
    """One layer, traced: its forward, which returns its residuals too, and its backward.

    Attributes:
      program: the block over (params, x, key, given), flattened.
      structures: tree structures of what it returns: activations, and what it adds to the loss or None.
      residuals: the slots of the values that forward returns for backward, in order.
      offloaded: for each of them, whether the user asked for host memory.
      shapes: ShapeDtypeStruct of each of them.
      loops: the loops over tiles that are equations of the program, by the slot of their result, in order.
      frozen: whether each leaf of params is: it has no gradient.
      of_context: whether the derivative is that of the context, too.
      marked: the names that the block marks.
      transform: of the derivative, which takes (cotangents, data, params) and returns (gradients, others).
    """

    program: FlatJaxpr
    structures: tuple[Any, Any]
    residuals: tuple[int, ...]
    offloaded: tuple[bool, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    loops: Mapping[int, TileLoop]
    frozen: tuple[bool, ...]
    of_context: bool = False
    marked: frozenset[str] = frozenset()
    transform: Callable[[Derivative], Derivative] = lambda derivative: derivative

    @property
    def adds(self) -> bool:
        """Whether it adds to the loss."""
        return self.structures[1].num_leaves > 0

    def forward(self, params: Any, x: Any, key: Any, given: Given) -> tuple[Any, Loss | None, list[jax.Array]]:
        """Return y, what is added to the loss, and the residuals."""
        slots = self._run(params, x, key, given, {})
        return *self.outputs([read(ref, slots) for ref in self.program.outputs]), [slots[slot] for slot in self.residuals]

    def backward(
        self, params: Any, x: Any, key: Any, given: Given, residuals: Sequence[jax.Array], dy: Any, d_added: Any
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of the trained parameters, and of the floating leaves of x and of the context.

        None is in the place of other leaves, and of the context where no derivative of it is wanted.

        Args:
          params: gathered.
          x: the layer's input.
          key: of the layer, or None.
          given: of the layer.
          residuals: of forward.
          dy: cotangent of y; None for leaves that are not floating.
          d_added: f32[], that of what is added to the loss; None where nothing is.
        """
        data, cotangents = (x, key, given, residuals), (dy, d_added)
        grads, (dx, d_context) = self.transform(self._derivative)(cotangents, data, params)
        return grads, dx, d_context

    def _derivative(self, cotangents: Any, data: Any, params: Any) -> tuple[Any, tuple[Any, Any]]:
        x, key, given, residuals = data
        by_slot = dict(zip(self.residuals, residuals, strict=True))
        leaves, tree = jax.tree.flatten(params)
        trained = [None if frozen else leaf for leaf, frozen in zip(leaves, self.frozen, strict=True)]

        context = floating(given.context) if self.of_context else None

        def run(trained: list[Any], floats: Any, context: Any) -> Any:
            whole = [leaf if t is None else t for leaf, t in zip(leaves, trained, strict=True)]
            seen = given._replace(context=merged(context, given.context)) if self.of_context else given
            slots = self._run(whole, merged(floats, x), key, seen, by_slot)
            y, added = self.outputs([read(ref, slots) for ref in self.program.outputs])
            return floating(y), None if added is None else added.total.astype(jnp.float32)

        # Residuals are constants here: `put` hands their cotangents to the values that they replace.
        grads, dx, d_context = jax.vjp(run, trained, floating(x), context)[1](cotangents)
        return jax.tree.unflatten(tree, grads), (dx, d_context)

    def outputs(self, leaves: Sequence[Any]) -> tuple[Any, Loss | None]:
        """Return the results of a program over the block, as the block returns them."""
        y_tree, added_tree = self.structures
        count = y_tree.num_leaves
        return jax.tree.unflatten(y_tree, leaves[:count]), jax.tree.unflatten(added_tree, leaves[count:])

    def _run(self, params: Any, x: Any, key: Any, given: Given, residuals: dict[int, jax.Array]) -> dict[int, Any]:
        slots: dict[int, Any] = dict(zip(self.program.inputs, jax.tree.leaves((params, x, key, given)), strict=True))
        numbers = {slot: number for number, slot in enumerate(self.loops)}
        for i in self.program.instructions:
            values = [read(ref, slots) for ref in i.ins]
            # A loop over tiles stays one equation, also in the derivative, so that `TiledBlock` can cut the trace there.
            number = numbers.get(i.outs[0]) if i.outs else None
            outs = bind(i.eqn, values) if number is None else [self.loops[i.outs[0]].derivable(number, values)]
            for slot, value in zip(i.outs, outs, strict=True):
                if slot not in residuals:
                    slots[slot] = value
                elif jnp.issubdtype(value.dtype, jnp.inexact):
                    slots[slot] = put(value, residuals[slot])
                else:
                    slots[slot] = residuals[slot]  # integers have no derivative
        return slots


def plan_layer(
    block: Callable[[Any, Any, Any, Given], tuple[Any, Loss | None]],
    params: Any,
    x: Any,
    key: Any,
    given: Given,
    mode: str,
    saved: Sequence[str],
    offloaded: Sequence[str],
    tiled: bool = False,
    frozen: Sequence[bool] = (),
    of_context: bool = False,
    transform: Callable[[Derivative], Derivative] = lambda derivative: derivative,
) -> TracedBlock:
    """Trace a block and choose its residuals.

    Args:
      block: `block(params, x, key, given) -> (x, what it adds to the loss, or None)`.
      params: abstract parameters of one layer.
      x: abstract activations.
      key: abstract key, or None.
      given: what it reads besides, abstract.
      mode: one of MODES.
      saved: names to keep on the device.
      offloaded: names to keep in host memory.
      tiled: whether loops over tiles stay equations (`zerojax.tiling.loops`).
      frozen: whether each leaf of the parameters is; empty: none.
      of_context: whether the derivative is that of the context, too.
      transform: of the derivative.
    """
    closed, out = jax.make_jaxpr(block, return_shape=True)(params, x, key, given)
    program = flatten(closed.jaxpr, closed.consts, lambda eqn: tiled and parse(eqn) is not None)
    structures = (jax.tree.structure(out[0]), jax.tree.structure(out[1]))
    names = _names(program)
    user_names, marks = {*saved, *offloaded}, frozenset(name for name, _ in names.values())
    # Named values are kept in every mode; the mode adds its own.
    chosen = {slot: aval for slot, (name, aval) in names.items() if name in user_names}
    if mode != "remat":
        num_params, num_data = len(jax.tree.leaves(params)), len(jax.tree.leaves(x))
        inner = _attention_inner(program, num_params, num_data) if mode == "selective" else frozenset()
        candidates = _candidates(program, num_params)
        chosen |= {slot: aval for slot, aval in candidates.items() if slot not in inner}
    to_host = {slot for slot, (name, _) in names.items() if name in offloaded}
    shapes = {slot: jax.ShapeDtypeStruct(aval.shape, aval.dtype) for slot, aval in chosen.items()}

    loops = find_loops(program) if tiled else {}
    is_frozen = tuple(frozen) or (False,) * len(jax.tree.leaves(params))

    def layer(slots: Sequence[int]) -> TracedBlock:
        chosen = tuple(sorted(slots))
        offloaded = tuple(s in to_host for s in chosen)
        kept = tuple(shapes[s] for s in chosen)
        return TracedBlock(program, structures, chosen, offloaded, kept, loops, is_frozen, of_context, marks, transform)

    # With all candidates in place the derivative is traced once; those that it does not read are not saved.
    every = layer(list(shapes))
    return layer(
        [slot for slot, read in zip(every.residuals, _read_by_backward(every, params, x, key, given), strict=True) if read]
    )


def check_names(blocks: Sequence[TracedBlock], saved: Sequence[str], offloaded: Sequence[str]) -> None:
    """Raise ValueError for a name to keep that no block marks, of a model's stacks."""
    marked = frozenset[str]().union(*(block.marked for block in blocks))
    if missing := sorted({*saved, *offloaded} - marked):
        raise ValueError(
            f"saved_names and offloaded_names name {missing}, which the block does not mark; it marks "
            f"{sorted(marked) or 'none'} (jax.ad_checkpoint.checkpoint_name(value, name))"
        )


def derivative_jaxpr(layer: TracedBlock, params: Any, x: Any, key: Any, given: Given) -> jex.ClosedJaxpr:
    """Return `layer.backward` traced over abstract arguments, of (params, x, key, given, residuals, dy, d_added)."""
    # x stands for dy too: a block returns what it takes.
    d_added = jax.ShapeDtypeStruct((), jnp.float32) if layer.adds else None
    return jax.make_jaxpr(layer.backward)(params, x, key, given, list(layer.shapes), floating(x), d_added)


def _read_by_backward(layer: TracedBlock, params: Any, x: Any, key: Any, given: Given) -> list[bool]:
    """Return, for each residual, whether the derivative reads it."""
    closed = derivative_jaxpr(layer, params, x, key, given)
    program = flatten(closed.jaxpr, closed.consts, lambda eqn: marked(eqn) is not None)
    live = program.live(program.outputs, is_root=lambda i: bool(i.eqn.effects))
    read_slots = {ref for ref in program.outputs if isinstance(ref, int)} | {slot for i in live for slot in i.reads}
    first = len(jax.tree.leaves((params, x, key, given)))
    return [slot in read_slots for slot in program.inputs[first : first + len(layer.residuals)]]


def _names(program: FlatJaxpr) -> dict[int, tuple[str, Any]]:
    """Return name and aval of each slot that `checkpoint_name` marks."""
    return {
        i.outs[0]: (i.eqn.params["name"], i.eqn.outvars[0].aval) for i in program.instructions if i.eqn.primitive.name == "name"
    }


def _candidates(program: FlatJaxpr, num_params: int) -> dict[int, Any]:
    """Return the slots that depend on data and cost something to make again."""
    data = program.reached(program.inputs[num_params:])
    avals: dict[int, Any] = {
        out: v.aval
        for i in program.instructions
        if i.eqn.primitive.name not in _LAYOUT
        for out, v in zip(i.outs, i.eqn.outvars, strict=True)
    }
    # Keys are made again: they are functions of (step, layer).
    return {s: a for s, a in avals.items() if s in data and not jnp.issubdtype(a.dtype, jax.dtypes.extended)}


def _attention_inner(program: FlatJaxpr, num_params: int, num_data: int) -> frozenset[int]:
    """Return the slots between the two products of attention: scores, weights, and the masks that only they read."""
    data = program.reached(program.inputs[num_params : num_params + num_data])

    def of_data(i: Instruction) -> bool:
        """Tell whether an instruction multiplies data with data, batched."""
        if i.eqn.primitive.name != "dot_general" or not all(isinstance(ref, int) and ref in data for ref in i.ins):
            return False
        # dimension_numbers is (contracting dims, batch dims), and each of these (lhs, rhs).
        return bool(i.eqn.params["dimension_numbers"][1][0])

    products = [i for i in program.instructions if of_data(i)]
    inner: set[int] = set()
    for first in products:
        after = program.reached(first.outs)
        for second in products:
            if second is not first and any(ref in after for ref in second.ins):
                inner |= _between(program, second, after, data)
    return frozenset(inner)


def _between(program: FlatJaxpr, second: Instruction, after: set[int], data: set[int]) -> set[int]:
    """Return the slots on the way from the first product to the second, and what is made of no data for them.

    Args:
      program: the block.
      second: the second product.
      after: slots that depend on the first.
      data: slots that depend on data.
    """

    def is_inner(slot: int) -> bool:
        return slot in after or slot not in data

    # Back from the second product until the first is reached, and into whatever reads no data, such as dropout masks.
    live = program.live(second.ins, is_followed=is_inner)
    return {slot for i in (*live, second) for slot in i.reads if is_inner(slot)}
