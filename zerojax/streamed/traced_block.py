"""One traced layer: a forward that also returns residuals, and a derivative that reads them.

A layer runs twice: in forward, and again inside its own derivative. The second run replaces each
value that was saved by its residual. Instructions that only led to a residual are then dead code
and are not recomputed:

    forward     y, residuals = block(p, x)
    backward    dp, dx       = vjp(block with each residual put in its place)(dy)

The operation `substitute_primal` does this: its result is the residual, and its derivative is that
of the value it replaces.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.activations import SplitVjp
from zerojax.grads import Derivative
from zerojax.jaxprs import FlatJaxpr, bind, read
from zerojax.models import Given, Loss, floating, merged
from zerojax.tiling import TileLoop
from zerojax.trees import Context, Params

Block = Callable[[Any, Any, Any, Given], tuple[Any, Loss | None]]
"""`block(params, x, key, given)` returns the activations, and its addition to the loss or None."""


@jax.custom_jvp
def substitute_primal(computed: jax.Array, saved: jax.Array) -> jax.Array:
    """Return `saved`, with the derivative of `computed`."""
    del computed
    return saved


@substitute_primal.defjvp
def _substitute_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]
) -> tuple[jax.Array, Any]:
    # Return the primal itself: linearisation only sees through a custom_jvp if its rule does.
    return primals[1], tangents[0]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedBlock:
    """One layer, traced: its forward, which also returns residuals, and its backward.

    Attributes:
      program: the block over (params, x, key, given), flattened.
      structures: tree structures of the block's results: activations, and addition to the loss or
        None.
      residuals: slots of the values that forward returns for backward, in order.
      offloaded: for each residual, whether the user asked for host memory.
      shapes: ShapeDtypeStruct of each residual.
      loops: the loops over tiles that are equations of the program, by the slot of their result, in
        order.
      apart: the equations of the program that are taken apart, by the slot of their first result.
      frozen: for each parameter leaf, whether it is frozen and has no gradient.
      of_context: whether to derive with respect to the context, too.
      marked: the names that the block marks.
      transform: transformation of the derivative, which takes (cotangents, data, params) and
        returns (gradients, other results).
      sources: for each residual, the name that the block gives it, or the equation that computes
        it.
      numbered: function that returns the slots with numbers, in order; its first call traces the
        block's derivative.
    """

    program: FlatJaxpr
    structures: tuple[Any, Any]
    residuals: tuple[int, ...]
    offloaded: tuple[bool, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    loops: Mapping[int, TileLoop]
    apart: Mapping[int, SplitVjp]
    frozen: tuple[bool, ...]
    of_context: bool = False
    marked: frozenset[str] = frozenset()
    transform: Callable[[Derivative], Derivative] = lambda derivative: derivative
    sources: tuple[str, ...] = ()
    numbered: Callable[[], tuple[int, ...]] = tuple

    @property
    def labels(self) -> tuple[str, ...]:
        """Label of each residual: its number, if it has one, and its source."""
        numbers = {slot: f"#{number} " for number, slot in enumerate(self.numbered())}
        return tuple(
            numbers.get(slot, "") + source
            for slot, source in zip(self.residuals, self.sources, strict=True)
        )

    @property
    def adds(self) -> bool:
        """Whether the block adds to the loss."""
        return self.structures[1].num_leaves > 0

    def forward(
        self, params: Params, x: Any, key: Any, given: Given
    ) -> tuple[Any, Loss | None, list[jax.Array]]:
        """Return the output y, the addition to the loss, and the residuals."""
        slots = self._run(params, x, key, given, None)
        y, added = self.outputs([read(ref, slots) for ref in self.program.outputs])
        return y, added, [slots[slot] for slot in self.residuals]

    def backward(
        self,
        params: Params,
        x: Any,
        key: Any,
        given: Given,
        residuals: Sequence[jax.Array],
        dy: Any,
        d_added: Any,
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of trainable parameters and the cotangents of x and the context.

        Leaves without a derivative are None. The context's cotangents are None unless they are
        wanted.

        Args:
          params: the layer's parameters, gathered.
          x: the layer's input.
          key: the layer's random key, or None.
          given: the layer's other inputs.
          residuals: the residuals that forward returned.
          dy: cotangent of y; None for leaves that are not floating.
          d_added: f32[], cotangent of the addition to the loss; None if there is none.
        """
        data = (x, key, given, residuals)
        cotangents = (dy, d_added)
        grads, (dx, d_context) = self.transform(self._derivative)(cotangents, data, params)
        return grads, dx, d_context

    def _derivative(
        self, cotangents: Any, data: Any, params: Params
    ) -> tuple[Any, tuple[Any, Any]]:
        x, key, given, residuals = data
        by_slot = dict(zip(self.residuals, residuals, strict=True))
        leaves, tree = jax.tree.flatten(params)
        context = floating(given.context) if self.of_context else None

        def run(trained: list[Any], floats: Any, context: Context) -> Any:
            block_given = given
            if self.of_context:
                block_given = given._replace(context=merged(context, given.context))
            block_leaves = with_trained(leaves, trained)
            slots = self._run(block_leaves, merged(floats, x), key, block_given, by_slot)
            y, added = self.outputs([read(ref, slots) for ref in self.program.outputs])
            return floating(y), None if added is None else added.total.astype(jnp.float32)

        # Residuals are constants here: `substitute_primal` passes their cotangents to the values
        # that they replace.
        _, pullback = jax.vjp(run, self.trained(leaves), floating(x), context)
        grads, dx, d_context = pullback(cotangents)
        return jax.tree.unflatten(tree, grads), (dx, d_context)

    def trained(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the parameter leaves, with None for frozen ones."""
        return [None if frozen else leaf for leaf, frozen in zip(leaves, self.frozen, strict=True)]

    def outputs(self, leaves: Sequence[Any]) -> tuple[Any, Loss | None]:
        """Return a program's flat results in the structures that the block returns."""
        y_tree, added_tree = self.structures
        count = y_tree.num_leaves
        y = jax.tree.unflatten(y_tree, leaves[:count])
        return y, jax.tree.unflatten(added_tree, leaves[count:])

    def _run(
        self, params: Params, x: Any, key: Any, given: Given, residuals: dict[int, jax.Array] | None
    ) -> dict[int, Any]:
        """Return the values of all slots.

        `residuals` are by slot, and None in forward.
        """
        slots: dict[int, Any] = dict(
            zip(self.program.inputs, jax.tree.leaves((params, x, key, given)), strict=True)
        )
        loop_numbers = {slot: number for number, slot in enumerate(self.loops)}
        for i in self.program.instructions:
            values = [read(ref, slots) for ref in i.ins]
            first_out = i.outs[0] if i.outs else -1
            split_vjp = self.apart.get(first_out)
            if split_vjp is not None:
                outs = self._run_split(split_vjp, i.outs, values, residuals)
                slots.update(zip(i.outs, outs, strict=True))
                continue

            # A loop over tiles stays one equation, even in the derivative, so that `TiledBlock` can
            # cut the trace there.
            loop_number = loop_numbers.get(first_out)
            if loop_number is None:
                outs = bind(i.eqn, values)
            else:
                outs = [self.loops[first_out].derivable(loop_number, values)]

            for slot, value in zip(i.outs, outs, strict=True):
                if residuals is None or slot not in residuals:
                    slots[slot] = value
                elif jnp.issubdtype(value.dtype, jnp.inexact):
                    slots[slot] = substitute_primal(value, residuals[slot])
                else:
                    slots[slot] = residuals[slot]  # integers have no derivative
        return slots

    def _run_split(
        self,
        split_vjp: SplitVjp,
        slots: Sequence[int],
        values: list[Any],
        residuals: dict[int, jax.Array] | None,
    ) -> list[Any]:
        """Return the results of a taken-apart equation, and the values kept for its derivative."""
        # Its derivative is that of `derivable`. The forward computation may have none: a kernel
        # such as cuDNN's attention.
        operands = values if residuals is None else jax.lax.stop_gradient(values)
        outs, kept = split_vjp.forward(operands)
        computed = [*outs, *kept]
        if residuals is None:
            return computed
        # The saved values replace the values computed here, which then have no readers.
        saved = [residuals.get(slot, value) for slot, value in zip(slots, computed, strict=True)]
        saved_outs = saved[: len(outs)]
        saved_kept = saved[len(outs) :]
        return [*split_vjp.derivable(values, saved_outs, saved_kept), *saved_kept]


def with_trained(leaves: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Return the parameter leaves, with those of `trained` that are not None in their places."""
    return [
        leaf if trained_leaf is None else trained_leaf
        for leaf, trained_leaf in zip(leaves, trained, strict=True)
    ]


def list_marked_names(program: FlatJaxpr) -> dict[int, tuple[str, Any]]:
    """Return the name and aval of each slot that `checkpoint_name` marks."""
    return {
        i.outs[0]: (i.eqn.params["name"], i.eqn.outvars[0].aval)
        for i in program.instructions
        if i.eqn.primitive.name == "name"
    }
