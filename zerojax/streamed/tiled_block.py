"""A block that runs without its stacks of tiles: it is cut at its loops over tiles.

The caller runs these loops.

    forward    y  = block(p, x)            segments of equations between loops, in the block's order
    backward   dp, dx = vjp(block)(dy)     traced once; the derivative of a loop is a loop, which
                                           uses a tile's gradient in the iteration that computes it

A gradient of a stack of tiles is therefore never an array. Microbatches are dim 0 of all arrays
that depend on data. A segment runs for one microbatch after another. A loop over tiles runs once
for all of them, so that each tile is fetched and gathered once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.jaxprs import FlatJaxpr, Instruction, evaluate, flatten
from zerojax.models import Given, Loss, floating
from zerojax.streamed.residuals import derivative_jaxpr
from zerojax.streamed.traced_block import TracedBlock
from zerojax.tiling import TileLoop, marked

Array = jax.Array
Slots = dict[int, Any]
Mark = tuple[int, bool]
"""Number of a loop over tiles, and whether the equation is that loop's derivative."""


@dataclasses.dataclass(frozen=True)
class TileLoopCall:
    """A loop over tiles to run.

    Attributes:
      loop: the loop, as the block has it.
      group: index of the group whose tiles the loop uses.
      is_backward: whether to run the loop's derivative.
      operands: operands of the loop, each with whether its dim 0 counts microbatches; None for
        stacks of tiles.
      dy: cotangent of the loop's result, with whether its dim 0 counts microbatches; None in
        forward.
      wanted: for each operand, whether a derivative returns its cotangent.
      of_params: for each operand, whether it depends on parameters alone; its cotangent is then
        part of a gradient, and may be float32.
    """

    loop: TileLoop
    group: int
    is_backward: bool
    operands: tuple[tuple[Any, bool] | None, ...]
    dy: tuple[Any, bool] | None
    wanted: tuple[bool, ...]
    of_params: tuple[bool, ...]

    @property
    def data_operands(self) -> list[Array]:
        """The operands whose dim 0 counts microbatches, in order."""
        values = list[Array]()
        for operand in self.operands:
            if operand is not None and operand[1]:
                values.append(operand[0])
        return values


RunLoop = Callable[[TileLoopCall], Sequence[Any]]
"""Runs a loop; returns its result, or the wanted cotangents.

Each has microbatches as dim 0 if there are several.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class _CutProgram:
    """A program cut at its loops.

    Attributes:
      program: the flattened program.
      items: segments of instructions, and single instructions that are loops.
      marks: for each item, the loop that it is; None for a segment.
      read: for each item, the slots that later items read.
      outputs: slots that are wanted.
    """

    program: FlatJaxpr
    items: tuple[tuple[Instruction, ...], ...]
    marks: tuple[Mark | None, ...]
    read: tuple[frozenset[int], ...]
    outputs: frozenset[int]


class TiledBlock:
    """One traced block with its residuals, for one record of parameters and groups of tiles.

    Attributes:
      layer: the traced block.
      forward_loops: groups whose loops a forward tick runs, in order.
      backward_loops: groups whose loops a backward tick runs, in order, each with whether it is the
        loop's derivative.
    """

    def __init__(
        self,
        layer: TracedBlock,
        groups: Sequence[Sequence[int]],
        names: Sequence[str],
        count: int,
        args: tuple[Any, Any, Any, Given],
    ) -> None:
        """Cut a block's forward and backward.

        Args:
          layer: the traced block.
          groups: for each group, positions of its leaves among the block's parameters.
          names: names of the block's leaves, for errors.
          count: number of microbatches.
          args: abstract (params, x, key, given) of one microbatch.

        Raises:
          ValueError: a stack of tiles is not used in exactly one loop over tiles of its group.
        """
        self.layer = layer
        self.groups = tuple(map(tuple, groups))
        self.count = count
        self.tiled = {leaf for group in self.groups for leaf in group}
        self.num_params = len(jax.tree.leaves(args[0]))
        context = floating(args[3].context) if layer.of_context else None
        self.dx_tree = jax.tree.structure((floating(args[1]), context))
        program = layer.program
        numbers = {slot: number for number, slot in enumerate(layer.loops)}
        self.loops = list(layer.loops.values())

        def forward_loop(i: Instruction) -> Mark | None:
            number = numbers.get(i.outs[0]) if i.outs else None
            return None if number is None else (number, False)

        self.group_of = _check_uses(program, self.loops, forward_loop, self.groups, names)
        outputs = [ref for ref in (*program.outputs, *layer.residuals) if isinstance(ref, int)]
        self._forward = _cut(program, outputs, forward_loop)
        closed = derivative_jaxpr(layer, *args)
        backward = flatten(closed.jaxpr, closed.consts, lambda eqn: marked(eqn) is not None)
        # The outputs are the gradients of the trainable leaves, then the cotangents of x, then
        # the cotangents of the context.
        trained = [leaf for leaf in range(self.num_params) if not layer.frozen[leaf]]
        self.output_of = {leaf: place for place, leaf in enumerate(trained)}
        self.num_grads = len(trained)
        of_tiles = {self.output_of.get(leaf) for leaf in self.tiled}
        # The gradients of stacks of tiles are not outputs: the loops that compute them also use
        # them.
        grad_refs = [
            ref
            for i, ref in enumerate(backward.outputs)
            if i not in of_tiles and isinstance(ref, int)
        ]
        self._check_gradients(backward, names)
        self._backward = _cut(backward, grad_refs, lambda i: marked(i.eqn))
        self.forward_loops = [
            self.group_of[mark[0]] for mark in self._forward.marks if mark is not None
        ]
        self.backward_loops = [
            (self.group_of[mark[0]], mark[1]) for mark in self._backward.marks if mark is not None
        ]

    def _check_gradients(self, program: FlatJaxpr, names: Sequence[str]) -> None:
        marks = ((i, marked(i.eqn)) for i in program.instructions)
        of_loops = {out for i, mark in marks if mark is not None and mark[1] for out in i.outs}
        for leaf in self.tiled & self.output_of.keys():
            if program.outputs[self.output_of[leaf]] not in of_loops:
                raise ValueError(
                    f"{names[leaf]} is a stack of tiles, but its gradient does not come from "
                    "exactly one loop over tiles: use it in one loop of zerojax.tiling only"
                )

    def forward(
        self, params: Sequence[Any], x: Any, key: Any, given: Given, run: RunLoop
    ) -> tuple[Any, Loss | None, list[Array]]:
        """Return the output y, the addition to the loss, and the residuals.

        With several microbatches, dim 0 of x, key, given and the results counts them.

        Args:
          params: the block's leaves, gathered; None for stacks of tiles.
          x: the layer's input.
          key: the layer's random keys, or None.
          given: the layer's other inputs.
          run: function that runs loops over tiles.
        """
        shared, each = self._run(self._forward, params, jax.tree.leaves((x, key, given)), run, {})[
            :2
        ]
        program = self.layer.program
        outs = [self._value(ref, shared, each) for ref in program.outputs]
        return *self.layer.outputs(outs), [
            self._value(s, shared, each) for s in self.layer.residuals
        ]

    def backward(
        self,
        params: Sequence[Any],
        x: Any,
        key: Any,
        given: Given,
        residuals: Sequence[Array],
        dy: Any,
        d_added: Any,
        run: RunLoop,
        totals: Sequence[Array],
    ) -> tuple[list[Array], Any, Any]:
        """Return the gradients of the untiled leaves, and the cotangents of x and the context.

        With several microbatches, dim 0 of all arrays that depend on data counts them. The
        context's cotangents are None unless they are wanted.

        Args:
          params: the block's leaves, gathered; None for stacks of tiles.
          x: the layer's input.
          key: the layer's random keys, or None.
          given: the layer's other inputs.
          residuals: the residuals that forward returned.
          dy: cotangent of y.
          d_added: cotangent of the addition to the loss; None if there is none.
          run: function that runs loops over tiles.
          totals: float32 zeros for the gradients of the untiled leaves; empty with one microbatch.
        """
        # In the order of the arguments with which backward was traced.
        data = jax.tree.leaves((x, key, given, list(residuals), dy, d_added))
        outputs = self._backward.program.outputs
        rest = [place for leaf, place in self.output_of.items() if leaf not in self.tiled]
        sums: Slots = {}
        if self.count > 1:
            of_x = outputs[
                self.num_grads :
            ]  # a gradient that is also a cotangent of x is needed for each microbatch
            pairs = [(outputs[i], total) for i, total in zip(rest, totals, strict=True)]
            sums = {ref: total for ref, total in pairs if isinstance(ref, int) and ref not in of_x}
        shared, each, sums = self._run(self._backward, params, data, run, sums)
        dx = [self._value(ref, shared, each) for ref in outputs[self.num_grads :]]
        grads = [self._total(outputs[i], shared, each, sums) for i in rest]
        return grads, *jax.tree.unflatten(self.dx_tree, dx)

    def _total(self, ref: Any, shared: Slots, each: Slots, sums: Slots) -> Array:
        """Return the sum over microbatches of a gradient, float32 if there are several.

        The gradient comes from a segment or a loop, or is the same for each microbatch.
        """
        if isinstance(ref, int) and ref in sums:
            return sums[ref]
        if isinstance(ref, int) and ref in each:
            return each[ref] if self.count == 1 else jnp.sum(each[ref].astype(jnp.float32), 0)
        # It depends on no data, so each microbatch adds the same.
        value = shared[ref] if isinstance(ref, int) else jnp.asarray(ref.value)
        return value if self.count == 1 else value.astype(jnp.float32) * self.count

    def _value(self, ref: Any, shared: Slots, each: Slots) -> Any:
        """Return a result that has one value per microbatch."""
        if isinstance(ref, int) and ref in each:
            return each[ref]
        value = shared[ref] if isinstance(ref, int) else jnp.asarray(ref.value)
        return value if self.count == 1 else jnp.broadcast_to(value, (self.count, *value.shape))

    def _run(
        self,
        cut: _CutProgram,
        params: Sequence[Any],
        data: Sequence[Any],
        run: RunLoop,
        sums: Slots,
    ) -> tuple[Slots, Slots, Slots]:
        """Run a program.

        Returns the slots that do not depend on data, the slots that do, and the sums that were
        computed.
        """
        inputs = cut.program.inputs
        # The first inputs are parameters; all other inputs depend on data.
        shared: Slots = {slot: p for slot, p in zip(inputs, params, strict=False) if p is not None}
        each: Slots = dict(zip(inputs[len(params) :], data, strict=True))
        sum_slots: set[int] = set()
        for item, mark, read in zip(cut.items, cut.marks, cut.read, strict=True):
            if mark is not None:
                self._call(item[0], mark, cut.outputs | read, shared, each, run)
                continue
            of_data: set[int] = set()
            instructions = []
            for i in item:
                if any(slot in each or slot in of_data for slot in i.reads):
                    of_data.update(i.outs)
                    instructions.append(i)
                else:
                    # Depends on parameters alone: computed once for all microbatches.
                    evaluate([i], shared)
            if instructions:
                sum_slots |= of_data & sums.keys()
                # A gradient that is only summed is not kept for each microbatch.
                later = of_data & (read | (cut.outputs - sums.keys()))
                sums = self._segment(instructions, of_data, later, shared, each, sums)
        # A total to which no segment added is still zero: `_total` finds that gradient in the other
        # slots.
        return shared, each, {slot: sums[slot] for slot in sum_slots}

    def _segment(
        self,
        instructions: Sequence[Instruction],
        outs: set[int],
        later: set[int],
        shared: Slots,
        each: Slots,
        sums: Slots,
    ) -> Slots:
        """Run equations that depend on data, for one microbatch after another; return the sums.

        Args:
          instructions: the equations.
          outs: slots that the equations compute.
          later: slots in `outs` that are read later, with one value per microbatch.
          shared: slots that do not depend on data.
          each: slots that depend on data; the slots of `later` are added.
          sums: sums over microbatches so far.
        """
        needs = sorted({slot for i in instructions for slot in i.reads if slot in each})
        totals = sorted(outs & sums.keys())
        read_later = sorted(later)

        def one(total: list[Array], values: list[Any]) -> tuple[list[Array], list[Any]]:
            slots = shared | dict(zip(needs, values, strict=True))
            evaluate(instructions, slots)
            total = [t + slots[slot].astype(t.dtype) for t, slot in zip(total, totals, strict=True)]
            return total, [slots[slot] for slot in read_later]

        values = [each[slot] for slot in needs]
        # The scan runs over microbatches. It closes over values that depend on no data, so they are
        # not repeated for each.
        run = one if self.count == 1 else lambda total, values: jax.lax.scan(one, total, values)
        total, after = run([sums[slot] for slot in totals], values)
        each.update(zip(read_later, after, strict=True))
        return sums | dict(zip(totals, total, strict=True))

    def _call(
        self,
        i: Instruction,
        mark: Mark,
        read: frozenset[int],
        shared: Slots,
        each: Slots,
        run: RunLoop,
    ) -> None:
        number, is_backward = mark
        loop = self.loops[number]

        def operand(ref: Any) -> tuple[Any, bool]:
            if not isinstance(ref, int):
                return ref.value, False
            return (each[ref], self.count > 1) if ref in each else (shared[ref], False)

        count = sum(loop.sizes)
        operands = tuple(
            None if p in loop.tiles else operand(ref) for p, ref in enumerate(i.ins[:count])
        )
        # Only floating operands have cotangents, which the derivative returns in operand order.
        avals: list[Any] = [var.aval for var in i.eqn.invars[:count]]
        floating = [p for p, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]
        outs = dict(zip(floating, i.outs, strict=True)) if is_backward else {}
        wanted = tuple(p in outs and outs[p] in read and p not in loop.tiles for p in range(count))
        dy = operand(i.ins[count]) if is_backward else None
        of_params = tuple(ref not in each for ref in i.ins[:count])
        results = run(
            TileLoopCall(loop, self.group_of[number], is_backward, operands, dy, wanted, of_params)
        )
        slots = [outs[p] for p in range(count) if wanted[p]] if is_backward else i.outs
        each.update(zip(slots, results, strict=True))


def _cut(
    program: FlatJaxpr, outputs: Sequence[int], mark_of: Callable[[Instruction], Mark | None]
) -> _CutProgram:
    """Cut a program at its loops over tiles.

    Instructions that neither `outputs` nor a loop's derivative needs are dropped.
    """

    def is_root(i: Instruction) -> bool:
        # A loop's derivative is kept even if no output reads it, since it updates the loop's tiles.
        mark = mark_of(i)
        return bool(i.eqn.effects) or (mark is not None and mark[1])

    items: list[list[Instruction]] = []
    marks: list[Mark | None] = []
    for i in program.live(outputs, is_root):
        mark = mark_of(i)
        # A loop is an item of its own; the equations between two loops are one segment.
        if mark is not None or not items or marks[-1] is not None:
            items.append([])
            marks.append(mark)
        items[-1].append(i)
    read = []
    later = set[int]()
    # From the last item to the first: an item has to pass on the slots that later items read.
    for item in reversed(items):
        read.append(frozenset(later))
        later.update(slot for i in item for slot in i.reads)
    return _CutProgram(
        program, tuple(map(tuple, items)), tuple(marks), tuple(reversed(read)), frozenset(outputs)
    )


def _check_uses(
    program: FlatJaxpr,
    loops: Sequence[TileLoop],
    mark_of: Callable[[Instruction], Mark | None],
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
) -> dict[int, int]:
    """Return the group that each loop uses.

    Raises:
      ValueError: a stack of tiles is not used in exactly one loop over tiles of its group.
    """
    # First check: a stack is only used as the stack of tiles of a loop.
    leaf_of: dict[Any, int] = {program.inputs[leaf]: leaf for group in groups for leaf in group}
    loop_uses: dict[int, list[int]] = {}
    for i in program.instructions:
        mark = mark_of(i)
        stacks = loops[mark[0]].tiles if mark is not None else range(0)
        for position, ref in enumerate(i.ins):
            if not isinstance(ref, int) or (leaf := leaf_of.get(ref)) is None:
                continue
            if mark is None or position not in stacks:
                raise ValueError(
                    f"{names[leaf]} is a stack of tiles, whose records are tiles in a streamed "
                    f"step, but the block uses it in {i.eqn.primitive.name!r}: use it in one "
                    "loop of zerojax.tiling only, as TiledDense and TiledMLP do, outside "
                    "jax.checkpoint, nnx.remat, scan, cond and vmap; or leave it out of the "
                    "model's `tiles` (dataclasses.replace(model, tiles=False)), so that it is "
                    "fetched in one piece"
                )
            loop_uses.setdefault(leaf, []).append(mark[0])
    for ref in program.outputs:
        if ref in leaf_of:
            raise ValueError(
                f"{names[leaf_of[ref]]} is a stack of tiles, but the block returns it: leave it "
                "out of the model's `tiles`, or do not return it"
            )
    # Second check: the leaves of a group are used together, in one loop, once, since tile k of all
    # of them is one record.
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        loops_of = {tuple(loop_uses.get(leaf, ())) for leaf in group}
        if len(loops_of) > 1 or len(next(iter(loops_of))) != 1:
            uses = {names[leaf]: loop_uses.get(leaf, []) for leaf in group}
            raise ValueError(
                "the stacks of tiles of one module must be used together in one loop, once in a "
                f"block, but these are used by loops {uses}: hold them in separate modules, or "
                "leave them out of the model's `tiles`"
            )
        group_of[next(iter(loops_of))[0]] = number
    # Third check: a loop uses the stacks of exactly one group, since it fetches one record per
    # tile.
    for number, loop in enumerate(loops):
        users = [
            group for group in groups if any(number in loop_uses.get(leaf, ()) for leaf in group)
        ]
        if len(users) != 1 or len(users[0]) != loop.sizes[1]:
            named = [names[leaf] for group in users for leaf in group]
            raise ValueError(
                f"loop {number} of the block runs over {loop.num_tiles} tiles of {loop.sizes[1]} "
                f"stacks, but the model's `tiles` names {named or 'none'} of them, held in "
                f"{len(users)} places: name all stacks of a loop there, hold them together, and "
                "do not cast or change them before the loop"
            )
    return group_of
