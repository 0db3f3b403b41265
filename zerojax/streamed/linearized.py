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
from zerojax.jaxprs import Instruction, Ref, evaluate, flatten, read
from zerojax.models import Given, Loss, floating, merged
from zerojax.streamed.traced_block import Block, TracedBlock, list_marked_names
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
    structures: list[Any] = []

    def with_pullback(
        params: Params, x: Any, key: Any, given: Given
    ) -> tuple[list[Any], list[Any]]:
        leaves = jax.tree.leaves(params)
        trained = [
            None if frozen else leaf for leaf, frozen in zip(leaves, traced.frozen, strict=True)
        ]
        context = floating(given.context) if traced.of_context else None

        def run(
            trained: list[Any], floats: Any, context: Context
        ) -> tuple[Any, tuple[Any, Loss | None]]:
            whole = [leaf if t is None else t for leaf, t in zip(leaves, trained, strict=True)]
            if traced.of_context:
                seen = given._replace(context=merged(context, given.context))
            else:
                seen = given
            y, added = block(
                jax.tree.unflatten(jax.tree.structure(params), whole), merged(floats, x), key, seen
            )
            return (floating(y), None if added is None else added.total.astype(jnp.float32)), (
                y,
                added,
            )

        _, pullback, out = jax.vjp(run, trained, floating(x), context, has_aux=True)
        read_by_pullback, structure = jax.tree.flatten(pullback)
        structures.append(structure)
        return jax.tree.leaves(out), read_by_pullback

    closed, shapes = jax.make_jaxpr(with_pullback, return_shape=True)(*args)
    program = flatten(closed.jaxpr, closed.consts)
    num_outs = len(shapes[0])
    leaves = program.outputs[num_outs:]
    num_params = len(jax.tree.leaves(args[0]))
    of_data = depending(program, program.inputs[num_params:]) - {*program.inputs}
    made_by: dict[int, tuple[Instruction, Any]] = {
        slot: (i, v.aval)
        for i in program.instructions
        for slot, v in zip(i.outs, i.eqn.outvars, strict=True)
    }

    def is_kept(ref: Ref) -> bool:
        return (
            isinstance(ref, int)
            and ref in of_data
            and not jnp.issubdtype(made_by[ref][1].dtype, jax.dtypes.extended)
        )

    kept = tuple(dict.fromkeys(ref for ref in leaves if isinstance(ref, int) and is_kept(ref)))
    names = {slot: name for slot, (name, _) in list_marked_names(program).items()}
    again = [ref for ref in leaves if ref not in kept]
    return LinearizedBlock(
        program=dataclasses.replace(program, outputs=program.outputs[:num_outs]),
        structures=traced.structures,
        residuals=kept,
        offloaded=tuple(names.get(slot) in offloaded for slot in kept),
        shapes=tuple(
            jax.ShapeDtypeStruct(made_by[slot][1].shape, made_by[slot][1].dtype) for slot in kept
        ),
        loops={},
        apart={},
        frozen=traced.frozen,
        of_context=traced.of_context,
        marked=traced.marked,
        transform=traced.transform,
        sources=tuple(
            names[slot] if slot in names else describe(made_by[slot][0].eqn) for slot in kept
        ),
        numbered=traced.numbered,
        read_by_pullback=leaves,
        structure=structures[-1],
        repeated=program.live(again, is_followed=lambda slot: slot not in kept),
    )
