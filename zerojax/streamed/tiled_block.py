"""A block that runs without its stacks of tiles: it is cut at its loops over tiles, and the caller
runs these loops.

    forward    y  = block(p, x)                 segments of equations between loops, as the block has them
    backward   dp, dx = vjp(block)(dy)          traced once; the derivative of a loop is a loop, which uses a tile's gradient in
                                                the iteration that makes it

A gradient of a stack of tiles is therefore never an array. Microbatches are dim 0 of all that
  depends on data: a segment runs
for one after the other, and a loop over tiles runs once for all of them, so that each tile is
fetched and gathered once.
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
"""The number of the loop over tiles that an equation is, and whether it is that loop's derivative.
"""


@dataclasses.dataclass(frozen=True)
class TileLoopCall:
    """A loop over tiles to run.

    Attributes:
      loop: the loop, as the block has it.
      group: index of the group whose tiles it uses.
      is_backward: whether its derivative is meant.
      operands: those of the loop, stacks of tiles being None; each with whether microbatches are
        its dim 0.
      dy: likewise the cotangent of its result, or None.
      wanted: of a derivative, whether the cotangent of each operand is.
      of_params: whether each operand is made of parameters alone: its cotangent is of a gradient,
        and may come in float32.
    """

    loop: TileLoop
    group: int
    is_backward: bool
    operands: tuple[tuple[Any, bool] | None, ...]
    dy: tuple[Any, bool] | None
    wanted: tuple[bool, ...]
    of_params: tuple[bool, ...]


RunLoop = Callable[[TileLoopCall], Sequence[Any]]
"""Runs a loop; returns its result alone, or the wanted cotangents, each with microbatches as dim 0
where there are several.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class _CutProgram:
    """A program cut at its loops.

    Attributes:
      program: flattened.
      items: segments of instructions, and single ones that are loops.
      marks: for each item which loop it is; None of a segment.
      read: for each item the slots that later ones read.
      outputs: slots that are wanted.
    """

    program: FlatJaxpr
    items: tuple[tuple[Instruction, ...], ...]
    marks: tuple[Mark | None, ...]
    read: tuple[frozenset[int], ...]
    outputs: frozenset[int]


class TiledBlock:
    """One block, traced, with its residuals, for one record of parameters and groups of tiles.

    Attributes:
      layer: the traced block.
      forward_loops: the groups whose loops a forward tick runs, in order.
      backward_loops: of a backward tick, each with whether it is the loop's derivative.
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
          groups: for each group its leaves among those of the block's parameters.
          names: of the block's leaves, for errors.
          count: microbatches.
          args: abstract (params, x, key, given) of one microbatch.

        Raises:
          ValueError: a stack of tiles that is not used in one loop over tiles of its group alone.
        """
        self.layer, self.groups, self.count = layer, tuple(map(tuple, groups)), count
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
        # Frozen leaves have no gradient: the outputs are those of the others, then that of x, then
        # that of the context.
        trained = [leaf for leaf in range(self.num_params) if not layer.frozen[leaf]]
        self.output_of = {leaf: place for place, leaf in enumerate(trained)}
        self.num_grads, of_tiles = len(trained), {self.output_of.get(leaf) for leaf in self.tiled}
        # The gradients of stacks of tiles are no outputs: the loops that make them also use them.
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
                    f"{names[leaf]}: its gradient is not that of one loop over tiles alone"
                )

    def forward(
        self, params: Sequence[Any], x: Any, key: Any, given: Given, run: RunLoop
    ) -> tuple[Any, Loss | None, list[Array]]:
        """Return y, what is added to the loss, and the residuals.

        Args:
          params: the block's leaves, gathered; stacks of tiles are None.
          x: the layer's input; microbatches are dim 0 where there are several.
          key: of the layer, likewise, or None.
          given: of the layer, likewise.
          run: runs loops.
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
        """Return the gradients of the leaves that are no stacks of tiles, of x, and of the context
        where it is wanted.

        Args:
          params: as in `forward`.
          x: likewise.
          key: likewise.
          given: likewise.
          residuals: likewise.
          dy: likewise.
          d_added: likewise.
          run: likewise.
          totals: float32 zeros for these gradients, where there are several microbatches.
        """
        # In the order of the arguments with which backward was traced.
        data = jax.tree.leaves((x, key, given, list(residuals), dy, d_added))
        outputs = self._backward.program.outputs
        rest = [place for leaf, place in self.output_of.items() if leaf not in self.tiled]
        sums: Slots = {}
        if self.count > 1:
            of_x = outputs[
                self.num_grads :
            ]  # what is a gradient of x too is needed of each microbatch
            pairs = [(outputs[i], total) for i, total in zip(rest, totals, strict=True)]
            sums = {ref: total for ref, total in pairs if isinstance(ref, int) and ref not in of_x}
        shared, each, sums = self._run(self._backward, params, data, run, sums)
        dx = [self._value(ref, shared, each) for ref in outputs[self.num_grads :]]
        grads = [self._total(outputs[i], shared, each, sums) for i in rest]
        return grads, *jax.tree.unflatten(self.dx_tree, dx)

    def _total(self, ref: Any, shared: Slots, each: Slots, sums: Slots) -> Array:
        """Return the sum over microbatches of a gradient: of a segment, of a loop, or the same for
        each. Several in float32.
        """
        if isinstance(ref, int) and ref in sums:
            return sums[ref]
        if isinstance(ref, int) and ref in each:
            return each[ref] if self.count == 1 else jnp.sum(each[ref].astype(jnp.float32), 0)
        # It depends on no data, so each microbatch adds the same.
        value = shared[ref] if isinstance(ref, int) else jnp.asarray(ref.value)
        return value if self.count == 1 else value.astype(jnp.float32) * self.count

    def _value(self, ref: Any, shared: Slots, each: Slots) -> Any:
        """Return a result that there is one of for each microbatch."""
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
        """Run a program; returns the slots that do not depend on data, those that do, and the sums
        that were made.
        """
        inputs = cut.program.inputs
        # The first inputs are parameters, and all others depend on data.
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
                    # Of parameters alone: computed once for all microbatches.
                    evaluate([i], shared)
            if instructions:
                sum_slots |= of_data & sums.keys()
                # A gradient that is only summed is not kept for each microbatch.
                later = of_data & (read | (cut.outputs - sums.keys()))
                sums = self._segment(instructions, of_data, later, shared, each, sums)
        # A total that no segment added to still holds zeros: `_total` finds that gradient among the
        # other slots.
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
        """Run equations that depend on data, for one microbatch after the other; returns the sums.

        Args:
          instructions: the equations.
          outs: slots that they make.
          later: those of them that are read later, of each microbatch.
          shared: slots that do not depend on data.
          each: slots that do; those of `later` are added.
          sums: over microbatches, so far.
        """
        needs = sorted({slot for i in instructions for slot in i.reads if slot in each})
        totals, read_later = sorted(outs & sums.keys()), sorted(later)

        def one(total: list[Array], values: list[Any]) -> tuple[list[Array], list[Any]]:
            slots = shared | dict(zip(needs, values, strict=True))
            evaluate(instructions, slots)
            total = [t + slots[slot].astype(t.dtype) for t, slot in zip(total, totals, strict=True)]
            return total, [slots[slot] for slot in read_later]

        values = [each[slot] for slot in needs]
        # The scan runs over microbatches. Values that depend on no data are closed over, and so not
        # repeated for each.
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
        # Only floating operands have cotangents, which the derivative returns in their order.
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
    """Cut a program at its loops over tiles; drops what is not needed for `outputs` or a loop's
    derivative.
    """

    def is_root(i: Instruction) -> bool:
        # A derivative is kept though no output may read it: its tiles are updated in it.
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
    read, later = [], set[int]()
    # From the last item to the first: what the items behind this one read is what it has to hand
    # on.
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
      ValueError: a stack of tiles that is not used in one loop over tiles of its group alone.
    """
    # First, every use of a stack is as the stack of tiles of a loop.
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
                    f"{names[leaf]} is a stack of tiles, whose records are tiles in a streamed step, but the block uses it in "
                    f"{i.eqn.primitive.name!r}: it may be used in one loop of zerojax.tiling alone, as TiledDense and TiledMLP "
                    "do, which is not inside of jax.checkpoint, nnx.remat, scan, cond or vmap; or leave it "
                    "out of the model's `tiles` (dataclasses.replace(model, tiles=False)), and it is fetched whole"
                )
            loop_uses.setdefault(leaf, []).append(mark[0])
    for ref in program.outputs:
        if ref in leaf_of:
            raise ValueError(f"{names[leaf_of[ref]]} is a stack of tiles, and the block returns it")
    # Then, the leaves of a group are used together, in one loop, once: tile k of all of them is one
    # record.
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        loops_of = {tuple(loop_uses.get(leaf, ())) for leaf in group}
        if len(loops_of) > 1 or len(next(iter(loops_of))) != 1:
            uses = {names[leaf]: loop_uses.get(leaf, []) for leaf in group}
            raise ValueError(
                f"stacks of tiles that one module holds are used together in one loop, once in a block, but these are used by "
                f"loops {uses}: hold them in modules of their own, or leave them out of the model's `tiles`"
            )
        group_of[next(iter(loops_of))[0]] = number
    # Last, a loop uses the stacks of one group and no others: it fetches one record a tile.
    for number, loop in enumerate(loops):
        users = [
            group for group in groups if any(number in loop_uses.get(leaf, ()) for leaf in group)
        ]
        if len(users) != 1 or len(users[0]) != loop.sizes[1]:
            named = [names[leaf] for group in users for leaf in group]
            raise ValueError(
                f"loop {number} of the block runs over {loop.num_tiles} tiles of {loop.sizes[1]} stacks, of which the model's "
                f"`tiles` names {named or 'none'}, held in {len(users)} places: all stacks of a loop are named there, held "
                "together, and neither cast nor changed before it"
            )
    return group_of
