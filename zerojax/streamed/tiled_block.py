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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.jaxprs import FlatJaxpr, Instruction, Ref, evaluate, flatten
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
      leaves: for each stack of tiles among the operands, its position among the block's parameters.
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
    leaves: tuple[int, ...]
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


RunTileLoop = Callable[[TileLoopCall], Sequence[Any]]
"""Runs a loop; returns its result, or the wanted cotangents.

Each has microbatches as dim 0 if there are several.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """A segment of instructions, or a single instruction that is a loop.

    Attributes:
      instructions: the instructions, in program order.
      mark: the loop; None for a segment.
      read_later: slots that later pieces read.
    """

    instructions: tuple[Instruction, ...]
    mark: Mark | None
    read_later: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class _CutProgram:
    """A program cut at its loops.

    Attributes:
      program: the flattened program.
      pieces: segments and loops, in program order.
      outputs: slots that are wanted.
    """

    program: FlatJaxpr
    pieces: tuple[_Piece, ...]
    outputs: frozenset[int]

    @property
    def marks(self) -> list[Mark]:
        """The loops of the program, in order."""
        return [piece.mark for piece in self.pieces if piece.mark is not None]


@dataclasses.dataclass(eq=False)
class _Values:
    """The values of a program's slots during a run.

    Attributes:
      shared: slots that do not depend on data.
      per_microbatch: slots that depend on data; dim 0 counts microbatches if there are several.
      sums: sums over microbatches of slots that are only wanted as sums.
    """

    shared: Slots
    per_microbatch: Slots
    sums: Slots


class TiledBlock:
    """One traced block with its residuals, for one record of parameters and groups of tiles.

    Attributes:
      layer: the traced block.
      forward_loops: groups whose loops a forward tick runs, in order.
      needed_loops: for each of these loops, whether it knows which of its tiles it needs.
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
        context = floating(args[3].context) if layer.of_context else None
        self.dx_tree = jax.tree.structure((floating(args[1]), context))
        # The outputs of backward are the gradients of the trainable leaves, then the cotangents of
        # x, then the cotangents of the context.
        num_params = len(jax.tree.leaves(args[0]))
        trained = [leaf for leaf in range(num_params) if not layer.frozen[leaf]]
        self.output_of = {leaf: place for place, leaf in enumerate(trained)}
        self.num_grads = len(trained)
        self.loops = list(layer.loops.values())

        loop_numbers = {slot: number for number, slot in enumerate(layer.loops)}

        def forward_loop(i: Instruction) -> Mark | None:
            number = loop_numbers.get(i.outs[0]) if i.outs else None
            return None if number is None else (number, False)

        self.group_of = _check_uses(layer.program, self.loops, forward_loop, self.groups, names)
        outputs = [
            ref for ref in (*layer.program.outputs, *layer.residuals) if isinstance(ref, int)
        ]
        self._forward = _cut(layer.program, outputs, forward_loop)
        self._backward = self._cut_backward(args, names)
        self.forward_loops = [self.group_of[number] for number, _ in self._forward.marks]
        self.needed_loops = [self.loops[number].skips for number, _ in self._forward.marks]
        self.backward_loops = [
            (self.group_of[number], is_derivative) for number, is_derivative in self._backward.marks
        ]

    def _cut_backward(self, args: tuple[Any, Any, Any, Given], names: Sequence[str]) -> _CutProgram:
        """Trace backward and cut it at its loops and their derivatives."""
        closed = derivative_jaxpr(self.layer, *args)
        program = flatten(closed.jaxpr, closed.consts, lambda eqn: marked(eqn) is not None)
        self._check_gradients(program, names)
        # The gradients of stacks of tiles are not outputs: the loops that compute them also use
        # them.
        tile_outputs = {self.output_of.get(leaf) for leaf in self.tiled}
        outputs = list[int]()
        for place, ref in enumerate(program.outputs):
            if place not in tile_outputs and isinstance(ref, int):
                outputs.append(ref)
        return _cut(program, outputs, lambda i: marked(i.eqn))

    def _check_gradients(self, program: FlatJaxpr, names: Sequence[str]) -> None:
        loop_outputs = set[int]()
        for i in program.instructions:
            mark = marked(i.eqn)
            if mark is not None and mark[1]:
                loop_outputs.update(i.outs)
        for leaf in self.tiled & self.output_of.keys():
            if program.outputs[self.output_of[leaf]] not in loop_outputs:
                raise ValueError(
                    f"{names[leaf]} is a stack of tiles, but its gradient does not come from "
                    "exactly one loop over tiles: use it in one loop of zerojax.tiling only"
                )

    def forward(
        self, params: Sequence[Any], x: Any, key: Any, given: Given, run: RunTileLoop
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
        data = jax.tree.leaves((x, key, given))
        values = self._run(self._forward, params, data, run, {})
        outs = [self._value(ref, values) for ref in self.layer.program.outputs]
        residuals = [self._value(slot, values) for slot in self.layer.residuals]
        return *self.layer.outputs(outs), residuals

    def backward(
        self,
        params: Sequence[Any],
        x: Any,
        key: Any,
        given: Given,
        residuals: Sequence[Array],
        dy: Any,
        d_added: Any,
        run: RunTileLoop,
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
        untiled = [place for leaf, place in self.output_of.items() if leaf not in self.tiled]
        sums: Slots = {}
        if self.count > 1:
            # A gradient that is also a cotangent of x is needed for each microbatch.
            dx_refs = outputs[self.num_grads :]
            for place, total in zip(untiled, totals, strict=True):
                ref = outputs[place]
                if isinstance(ref, int) and ref not in dx_refs:
                    sums[ref] = total
        values = self._run(self._backward, params, data, run, sums)
        dx = [self._value(ref, values) for ref in outputs[self.num_grads :]]
        grads = [self._total(outputs[place], values) for place in untiled]
        return grads, *jax.tree.unflatten(self.dx_tree, dx)

    def _total(self, ref: Ref, values: _Values) -> Array:
        """Return the sum over microbatches of a gradient, float32 if there are several.

        The gradient comes from a segment or a loop, or is the same for each microbatch.
        """
        if isinstance(ref, int) and ref in values.sums:
            return values.sums[ref]
        if isinstance(ref, int) and ref in values.per_microbatch:
            value = values.per_microbatch[ref]
            return value if self.count == 1 else jnp.sum(value.astype(jnp.float32), 0)
        # It depends on no data, so each microbatch adds the same.
        value = values.shared[ref] if isinstance(ref, int) else jnp.asarray(ref.value)
        return value if self.count == 1 else value.astype(jnp.float32) * self.count

    def _value(self, ref: Ref, values: _Values) -> Any:
        """Return a result that has one value per microbatch."""
        if isinstance(ref, int) and ref in values.per_microbatch:
            return values.per_microbatch[ref]
        value = values.shared[ref] if isinstance(ref, int) else jnp.asarray(ref.value)
        return value if self.count == 1 else jnp.broadcast_to(value, (self.count, *value.shape))

    def _run(
        self,
        cut: _CutProgram,
        params: Sequence[Any],
        data: Sequence[Any],
        run: RunTileLoop,
        sums: Slots,
    ) -> _Values:
        """Run a program.

        Args:
          cut: the program.
          params: the block's leaves, gathered; None for stacks of tiles.
          data: the other inputs, which depend on data.
          run: function that runs loops over tiles.
          sums: zeros for the slots that are only wanted as sums over microbatches.

        Returns:
          The values of all slots, with the sums to which a segment has added.
        """
        inputs = cut.program.inputs
        # The first inputs are parameters; all other inputs depend on data.
        shared: Slots = {slot: p for slot, p in zip(inputs, params, strict=False) if p is not None}
        per_microbatch: Slots = dict(zip(inputs[len(params) :], data, strict=True))
        values = _Values(shared, per_microbatch, sums)
        sum_slots: set[int] = set()
        for piece in cut.pieces:
            if piece.mark is not None:
                needed = cut.outputs | piece.read_later
                weights = inputs[: len(params)]
                stacks: dict[Ref, int] = {slot: leaf for leaf, slot in enumerate(weights)}
                self._run_loop(piece.instructions[0], piece.mark, needed, stacks, values, run)
                continue
            of_data: set[int] = set()
            instructions = list[Instruction]()
            for i in piece.instructions:
                if any(slot in per_microbatch or slot in of_data for slot in i.reads):
                    of_data.update(i.outs)
                    instructions.append(i)
                else:
                    # Depends on parameters alone: computed once for all microbatches.
                    evaluate([i], shared)
            if instructions:
                sum_slots |= of_data & sums.keys()
                # A gradient that is only summed is not kept for each microbatch.
                read_later = of_data & (piece.read_later | (cut.outputs - sums.keys()))
                self._run_segment(instructions, of_data, read_later, values)
        # A total to which no segment added is still zero: `_total` finds that gradient in the other
        # slots.
        values.sums = {slot: values.sums[slot] for slot in sum_slots}
        return values

    def _run_segment(
        self,
        instructions: Sequence[Instruction],
        outs: set[int],
        read_later: set[int],
        values: _Values,
    ) -> None:
        """Run equations that depend on data, for one microbatch after another.

        Args:
          instructions: the equations.
          outs: slots that the equations compute.
          read_later: slots in `outs` that are read later, with one value per microbatch.
          values: values of all slots; the slots of `read_later` are added, and sums are added to.
        """
        per_microbatch = values.per_microbatch
        in_slots = sorted(
            {slot for i in instructions for slot in i.reads if slot in per_microbatch}
        )
        sum_slots = sorted(outs & values.sums.keys())
        out_slots = sorted(read_later)

        def run_one(sums: list[Array], operands: list[Any]) -> tuple[list[Array], list[Any]]:
            slots = values.shared | dict(zip(in_slots, operands, strict=True))
            evaluate(instructions, slots)
            sums = [
                total + slots[slot].astype(total.dtype)
                for total, slot in zip(sums, sum_slots, strict=True)
            ]
            return sums, [slots[slot] for slot in out_slots]

        operands = [per_microbatch[slot] for slot in in_slots]
        sums = [values.sums[slot] for slot in sum_slots]
        if self.count == 1:
            sums, results = run_one(sums, operands)
        else:
            # The scan runs over microbatches. It closes over values that depend on no data, so they
            # are not repeated for each.
            sums, results = jax.lax.scan(run_one, sums, operands)
        per_microbatch.update(zip(out_slots, results, strict=True))
        values.sums = values.sums | dict(zip(sum_slots, sums, strict=True))

    def _run_loop(
        self,
        i: Instruction,
        mark: Mark,
        needed: frozenset[int],
        stacks: Mapping[Ref, int],
        values: _Values,
        run: RunTileLoop,
    ) -> None:
        """Run a loop over tiles, and add its results to `values`.

        Args:
          i: the loop.
          mark: its number, and whether it is the loop's derivative.
          needed: slots that are read later, or are outputs.
          stacks: the block's parameters, by slot.
          values: values of all slots.
          run: function that runs loops over tiles.
        """
        number, is_backward = mark
        loop = self.loops[number]
        per_microbatch = values.per_microbatch

        def operand(ref: Ref) -> tuple[Any, bool]:
            if not isinstance(ref, int):
                return ref.value, False
            if ref in per_microbatch:
                return per_microbatch[ref], self.count > 1
            return values.shared[ref], False

        num_operands = sum(loop.sizes)
        refs = i.ins[:num_operands]
        operands = tuple(None if p in loop.tiles else operand(ref) for p, ref in enumerate(refs))
        cotangents = dict[int, int]()  # slot of each operand's cotangent
        if is_backward:
            # Only floating operands have cotangents, which the derivative returns in operand order.
            avals: list[Any] = [var.aval for var in i.eqn.invars[:num_operands]]
            positions = [p for p, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating)]
            cotangents = dict(zip(positions, i.outs, strict=True))
        wanted = tuple(
            p in cotangents and cotangents[p] in needed and p not in loop.tiles
            for p in range(num_operands)
        )
        call = TileLoopCall(
            loop=loop,
            group=self.group_of[number],
            leaves=tuple(stacks[refs[p]] for p in loop.tiles),
            is_backward=is_backward,
            operands=operands,
            dy=operand(i.ins[num_operands]) if is_backward else None,
            wanted=wanted,
            of_params=tuple(ref not in per_microbatch for ref in refs),
        )
        results = run(call)
        slots = i.outs
        if is_backward:
            slots = [cotangents[p] for p in range(num_operands) if wanted[p]]
        per_microbatch.update(zip(slots, results, strict=True))


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

    cuts = list[tuple[Mark | None, list[Instruction]]]()
    for i in program.live(outputs, is_root):
        mark = mark_of(i)
        # A loop is a piece of its own; the equations between two loops are one segment.
        if mark is not None or not cuts or cuts[-1][0] is not None:
            cuts.append((mark, []))
        cuts[-1][1].append(i)
    pieces = list[_Piece]()
    read_later = set[int]()
    # From the last piece to the first: a piece has to pass on the slots that later pieces read.
    for mark, instructions in reversed(cuts):
        pieces.append(_Piece(tuple(instructions), mark, frozenset(read_later)))
        read_later.update(slot for i in instructions for slot in i.reads)
    return _CutProgram(program, tuple(reversed(pieces)), frozenset(outputs))


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
    loop_uses = _find_loop_uses(program, loops, mark_of, groups, names)
    group_of = _match_groups(loop_uses, groups, names)
    # A loop uses the stacks of exactly one group, since it fetches one record per tile.
    for number, loop in enumerate(loops):
        users = list[Sequence[int]]()
        for group in groups:
            if any(number in loop_uses.get(leaf, ()) for leaf in group):
                users.append(group)
        if len(users) != 1 or len(users[0]) != loop.sizes[1]:
            named = [names[leaf] for group in users for leaf in group]
            raise ValueError(
                f"loop {number} of the block runs over {loop.num_tiles} tiles of {loop.sizes[1]} "
                f"stacks, but the model's `tiles` names {named or 'none'} of them, held in "
                f"{len(users)} places: name all stacks of a loop there, hold them together, and "
                "do not cast or change them before the loop"
            )
    return group_of


def _find_loop_uses(
    program: FlatJaxpr,
    loops: Sequence[TileLoop],
    mark_of: Callable[[Instruction], Mark | None],
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
) -> dict[int, list[int]]:
    """Return the numbers of the loops that use each stack of tiles, by the stack's leaf.

    Raises:
      ValueError: a stack is used otherwise than as the stack of tiles of a loop.
    """
    leaf_of: dict[Ref, int] = {program.inputs[leaf]: leaf for group in groups for leaf in group}
    loop_uses: dict[int, list[int]] = {}
    for i in program.instructions:
        mark = mark_of(i)
        tile_positions = loops[mark[0]].tiles if mark is not None else range(0)
        for position, ref in enumerate(i.ins):
            leaf = leaf_of.get(ref) if isinstance(ref, int) else None
            if leaf is None:
                continue
            if mark is None or position not in tile_positions:
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
        if isinstance(ref, int) and ref in leaf_of:
            raise ValueError(
                f"{names[leaf_of[ref]]} is a stack of tiles, but the block returns it: leave it "
                "out of the model's `tiles`, or do not return it"
            )
    return loop_uses


def _match_groups(
    loop_uses: Mapping[int, Sequence[int]], groups: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[int, int]:
    """Return the group that each loop uses.

    Raises:
      ValueError: the stacks of a group are not used together, in one loop, once; they must be,
        since tile k of all of them is one record.
    """
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        uses_of_group = {tuple(loop_uses.get(leaf, ())) for leaf in group}
        first_uses = next(iter(uses_of_group))
        if len(uses_of_group) > 1 or len(first_uses) != 1:
            uses = {names[leaf]: loop_uses.get(leaf, []) for leaf in group}
            raise ValueError(
                "the stacks of tiles of one module must be used together in one loop, once in a "
                f"block, but these are used by loops {uses}: hold them in separate modules, or "
                "leave them out of the model's `tiles`"
            )
        group_of[first_uses[0]] = number
    return group_of
