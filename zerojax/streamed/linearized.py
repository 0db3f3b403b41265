"""The block of a layer that saves everything: `activations="everything"`.

The block is linearized in forward, and backward is the pullback that `jax.vjp` returns:

    forward     y, residuals = block(p, x)      the pullback reads the residuals
    backward    dp, dx       = pullback(dy)     nothing is recomputed

Two kinds of residuals are recomputed instead of saved. A residual that depends on parameters alone,
such as a transposed weight, can be recomputed because backward has the gathered layer, so ZeRO-3's
memory bound applies to this mode too. Random keys are recomputed as well.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.activations import depending, describe
from zerojax.jaxprs import FlatJaxpr, Instruction, Ref, evaluate, flatten, read
from zerojax.models import Given, Loss, floating, merged
from zerojax.streamed.traced_block import Block, TracedBlock, list_marked_names, with_trained
from zerojax.trees import Context, Params


@dataclasses.dataclass(frozen=True, eq=False)
class LinearizedBlock(TracedBlock):
    """A traced block whose program also computes the values that the pullback reads.

    Attributes:
      read_by_pullback: leaves of the pullback: slots of the program, or constants.
      structure: tree structure of the pullback.
      repeated: instructions that backward runs again, to compute leaves that are neither inputs nor
        residuals.
    """

    read_by_pullback: tuple[Ref, ...] = ()
    structure: Any = None
    repeated: tuple[Instruction, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Source of each residual: its name, or the equation that computes it.

        There are no numbers here: they count the values that "save" keeps, which belong to another
        program.
        """
        return self.sources

    def _derivative(
        self, cotangents: Any, data: Any, params: Params
    ) -> tuple[Any, tuple[Any, Any]]:
        x, key, given, residuals = data
        slots: dict[int, Any] = dict(
            zip(self.program.inputs, jax.tree.leaves((params, x, key, given)), strict=True)
        )
        slots.update(zip(self.residuals, residuals, strict=True))
        evaluate(self.repeated, slots)
        pullback = jax.tree.unflatten(
            self.structure, [read(ref, slots) for ref in self.read_by_pullback]
        )
        grads, dx, d_context = pullback(cotangents)
        return jax.tree.unflatten(jax.tree.structure(params), grads), (dx, d_context)


def linearized(
    traced: TracedBlock, block: Block, args: tuple[Any, Any, Any, Given], offloaded: Collection[str]
) -> LinearizedBlock:
    """Linearize a block and save every value that the pullback reads.

    Args:
      traced: the traced block, with any residuals.
      block: the function that was traced.
      args: its abstract arguments.
      offloaded: names that the block marks whose values are kept in host memory.
    """
    program, num_outs, structure = _trace_with_pullback(traced, block, args)
    read_by_pullback = program.outputs[num_outs:]
    num_params = len(jax.tree.leaves(args[0]))
    of_data = depending(program, program.inputs[num_params:]) - {*program.inputs}
    producers = dict[int, Instruction]()
    avals = dict[int, Any]()
    for i in program.instructions:
        for slot, variable in zip(i.outs, i.eqn.outvars, strict=True):
            producers[slot] = i
            avals[slot] = variable.aval

    residuals = list[int]()
    for ref in dict.fromkeys(ref for ref in read_by_pullback if isinstance(ref, int)):
        # Random keys, which have an extended dtype, are computed again.
        if ref in of_data and not jnp.issubdtype(avals[ref].dtype, jax.dtypes.extended):
            residuals.append(ref)

    names = {slot: name for slot, (name, _) in list_marked_names(program).items()}
    shapes = list[jax.ShapeDtypeStruct]()
    sources = list[str]()
    for slot in residuals:
        shapes.append(jax.ShapeDtypeStruct(avals[slot].shape, avals[slot].dtype))
        sources.append(names[slot] if slot in names else describe(producers[slot].eqn))

    recomputed = [ref for ref in read_by_pullback if ref not in residuals]
    return LinearizedBlock(
        program=dataclasses.replace(program, outputs=program.outputs[:num_outs]),
        structures=traced.structures,
        residuals=tuple(residuals),
        offloaded=tuple(names.get(slot) in offloaded for slot in residuals),
        shapes=tuple(shapes),
        loops={},
        apart={},
        frozen=traced.frozen,
        of_context=traced.of_context,
        marked=traced.marked,
        transform=traced.transform,
        sources=tuple(sources),
        numbered=traced.numbered,
        read_by_pullback=read_by_pullback,
        structure=structure,
        repeated=program.live(recomputed, is_followed=lambda slot: slot not in residuals),
    )


def _trace_with_pullback(
    traced: TracedBlock, block: Block, args: tuple[Any, Any, Any, Given]
) -> tuple[FlatJaxpr, int, Any]:
    """Trace a block together with its pullback.

    Returns the program, whose outputs are the block's results and then the pullback's leaves; the
    number of these results; and the pullback's tree structure.
    """
    structures: list[Any] = []

    def with_pullback(
        params: Params, x: Any, key: Any, given: Given
    ) -> tuple[list[Any], list[Any]]:
        leaves, params_tree = jax.tree.flatten(params)
        context = floating(given.context) if traced.of_context else None

        def run(
            trained: list[Any], floats: Any, context: Context
        ) -> tuple[Any, tuple[Any, Loss | None]]:
            block_given = given
            if traced.of_context:
                block_given = given._replace(context=merged(context, given.context))
            block_params = jax.tree.unflatten(params_tree, with_trained(leaves, trained))
            y, added = block(block_params, merged(floats, x), key, block_given)
            total = None if added is None else added.total.astype(jnp.float32)
            return (floating(y), total), (y, added)

        trained = traced.trained(leaves)
        _, pullback, out = jax.vjp(run, trained, floating(x), context, has_aux=True)
        read_by_pullback, structure = jax.tree.flatten(pullback)
        structures.append(structure)
        return jax.tree.leaves(out), read_by_pullback

    closed, shapes = jax.make_jaxpr(with_pullback, return_shape=True)(*args)
    return flatten(closed.jaxpr, closed.consts), len(shapes[0]), structures[-1]
