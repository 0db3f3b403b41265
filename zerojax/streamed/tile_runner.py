"""The loops over tiles inside one tick of the streamed step.

    forward    for k:  w = all_gather(take(l, k));  start fetching tile k+d;  y += f(w, x)
    backward   for k:  w = all_gather(take(l, k));  ...;  dw, dx_k = vjp(f)(dy);  dx += dx_k
                       g = reduce_scatter(dw):  update tile k of layer l here, or store g

A tile is fetched and gathered once for all microbatches. Cotangents of operands that all tiles read
are summed in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.schedule import TileLoops
from zerojax.grads import beside
from zerojax.state import Tile, TileGroup, wait_for
from zerojax.streamed.microbatches import Microbatches
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.tiled_block import TileLoopCall
from zerojax.streamed.update_policies.interface import RecordGrads

Array = jax.Array
OnRecordGrads = Callable[[Any, RecordGrads], tuple[Any, Any]]
"""Consumes a tile's gradient: (carried, record) -> (carried, landing).

`carried` is the value that the update policy carries through backward.
"""


class TileRunner:
    """Runs the loops over tiles of one tick.

    Attributes:
      carried: the value that the update policy carries, after the loops so far.
    """

    def __init__(
        self,
        plan: StreamedPlan,
        stack: StackPlan,
        microbatches: Microbatches,
        begin: Array,
        now: Tick,
        stacks: Callable[[Any], Sequence[Any]],
        carried: Any = None,
    ) -> None:
        """Prepare to run the loops of a tick.

        Args:
          plan: plan of the step.
          stack: the run of layers.
          microbatches: microbatches of the step.
          begin: i32[] zero, known when the loops may begin.
          now: the tick.
          stacks: function from the carried value to the stacks of parameters.
          carried: the value that the update policy carries through backward; None in forward.
        """
        self.plan = plan
        self.stack = stack
        self.microbatches = microbatches
        self.begin = begin
        self.now = now
        self.stacks = stacks
        self.carried = carried
        self._before: Array | None = None  # a result of the previous loop

    def run(self, call: TileLoopCall, use: OnRecordGrads | None = None) -> list[Any]:
        """Run a loop; return its result, or the wanted cotangents of its operands."""
        group, loops = self.stack.loops[call.group]
        if call.is_backward and use is not None:
            return self._derive(call, group, loops, use)
        return [self._forward(call, group, loops)]

    def _forward(self, call: TileLoopCall, group: TileGroup, loops: TileLoops) -> Array:
        loop = call.loop
        microbatches = self.microbatches
        each = [o[0] for o in call.operands if o is not None and o[1]]

        def tick(y: Array, now: Tick) -> tuple[Array, Any]:
            full = self._gather(group, now)

            def one(y: Array, *each: Any) -> Array:
                return loop.put(y, now.layer, _operands(call, full, each, now.layer))

            if microbatches.count == 1:
                return beside(one, (y,), now.landing)
            return microbatches.each(one, y, *each), now.landing

        # y[num_out, ...], or y[M, num_out, ...] with several microbatches, filled or added to tile
        # by tile.
        y = jnp.zeros(
            loop.out.shape if microbatches.count == 1 else (microbatches.count, *loop.out.shape),
            loop.out.dtype,
        )
        return self._loop("forward", group, loops, y, tick, lambda carry: self.carried)

    def _derive(
        self, call: TileLoopCall, group: TileGroup, loops: TileLoops, use: OnRecordGrads
    ) -> list[Array]:
        loop = call.loop
        microbatches = self.microbatches
        assert call.dy is not None
        # Two kinds of cotangents: operands that all tiles read have a sum over tiles; in parts,
        # each tile reads one slice.
        shared_x = [p for p, wanted in enumerate(call.wanted) if wanted and p not in loop.parts]
        parts = [p for p, wanted in enumerate(call.wanted) if wanted and p in loop.parts]
        lead = () if microbatches.count == 1 else (microbatches.count,)

        def zeros(p: int, dtype: Any) -> Array:
            operand = call.operands[p]
            assert operand is not None
            # An operand that depends on no data has no microbatch dim, but its cotangent has one.
            if microbatches.count == 1 or operand[1]:
                shape = operand[0].shape
            else:
                shape = (microbatches.count, *operand[0].shape)
            return jnp.zeros(shape, dtype)

        # Cotangents of untiled parameters become part of gradients.
        in_float32 = [
            of_params and self.plan.layout.reduces_in_float32 for of_params in call.of_params
        ]
        sums = [zeros(p, jnp.float32) for p in shared_x]
        # Only one tile reads each slice of a part. Its cotangents are placed side by side and not
        # summed, so their dtype stays.
        slices = [zeros(p, jnp.float32 if in_float32[p] else _dtype(call, p)) for p in parts]
        each = [o[0] for o in call.operands if o is not None and o[1]]
        # A cotangent that depends on no data is the same for each microbatch.
        if call.dy[1] or microbatches.count == 1:
            dy = call.dy[0]
        else:
            dy = jnp.broadcast_to(call.dy[0], (*lead, *call.dy[0].shape))

        def tick(carry: Any, now: Tick) -> tuple[Any, Any]:
            (sums, slices), carried = carry
            full = self._gather(group, now)
            trained = [
                p
                for p, i in zip(loop.tiles, self._in_tree(group), strict=True)
                if not self.plan.leaves[i].frozen
            ]

            def one(total: list[Array], inputs: Any) -> tuple[list[Array], Any]:
                sums, slices, dy, each = inputs
                operands = _operands(call, full, each, now.layer)

                def unit(values: dict[int, Any]) -> Array:
                    return loop.run([values.get(p, a) for p, a in enumerate(operands)])

                def derivative(
                    dy: Array, of_data: dict[int, Any], of_params: dict[int, Any]
                ) -> tuple[Any, Any]:
                    (grads,) = jax.vjp(unit, of_data | of_params)[1](dy)
                    return {p: grads[p] for p in of_params}, {p: grads[p] for p in of_data}

                of_params = {
                    p: operands[p]
                    for p in (*trained, *shared_x, *parts)
                    if p in trained or in_float32[p]
                }
                of_data = {p: operands[p] for p in (*shared_x, *parts) if p not in of_params}
                of_cotangent = loop.cotangent(dy, now.layer)
                grads, cotangents = self.plan.derivative(derivative)(
                    of_cotangent, of_data, of_params
                )
                if (
                    self.plan.layout.reduces_once
                ):  # only a tile's gradient is used here; the block adds up the other gradients
                    grads = {p: g if p in trained else jnp.sum(g, 0) for p, g in grads.items()}
                dw, dx, d_slices = (
                    [(grads | cotangents)[p] for p in at] for at in (trained, shared_x, parts)
                )
                sums = [s + d.astype(jnp.float32) for s, d in zip(sums, dx, strict=True)]
                put = lambda s, d: jax.lax.dynamic_update_index_in_dim(s, d, now.layer, 0)  # noqa: E731
                slices = [put(s, d) for s, d in zip(slices, d_slices, strict=True)]
                if microbatches.count > 1:
                    total = [t + d.astype(jnp.float32) for t, d in zip(total, dw, strict=True)]
                else:
                    total = dw
                return total, (sums, slices)

            # With several microbatches, dim 0 of all these arrays counts them: a scan takes the
            # cotangents of one microbatch and returns them.
            inputs = (sums, slices, dy, each)
            landing = now.landing
            if microbatches.count == 1:
                (grads, cotangents), landing = beside(
                    lambda inputs: one([], inputs), (inputs,), landing
                )
            else:
                grads, cotangents = jax.lax.scan(one, self.plan.zero_grads(group.leaves), inputs)
            grads = self.plan.reduced(grads, group.leaves)
            # As for a layer, consumers of the gradients wait for the cotangents.
            grads, cotangents = jax.lax.optimization_barrier((grads, cotangents))
            # An update policy reads and writes records. Here the record is a tile, whose index
            # consists of the layer and the tile.
            now = dataclasses.replace(now, layer=Tile(self.now.layer, now.layer, group.num_tiles))
            if group.leaves:  # otherwise all of the group is frozen
                by_index = dict(zip(self._in_tree(group), full, strict=True))
                record = RecordGrads(
                    now, group.leaves, grads, [by_index[i] for i in group.leaves], landing
                )
                carried, landing = use(carried, record)
            return (cotangents, carried), landing

        carry = ((sums, slices), self.carried)
        (sums, slices), self.carried = self._loop(
            "backward", group, loops, carry, tick, lambda carry: carry[1]
        )
        cotangents = dict(zip((*shared_x, *parts), (*sums, *slices), strict=True))
        wanted = [p for p, is_wanted in enumerate(call.wanted) if is_wanted]
        return [
            cotangents[p].astype(jnp.float32 if in_float32[p] else _dtype(call, p)) for p in wanted
        ]

    def _loop(
        self,
        phase: str,
        group: TileGroup,
        loops: TileLoops,
        carry: Any,
        tick: Callable[[Any, Tick], tuple[Any, Any]],
        carried: Callable[[Any], Any],
    ) -> Any:
        """Run a phase's loop over the tiles of this tick's layer."""

        def read(carry: Any, tile: Array) -> list[Array]:
            index = Tile(self.now.layer, tile, group.num_tiles)
            return self.plan.read_params(
                self.stacks(carried(carry)), self.plan.away(group.weights), index
            )

        def take(carry: Any, now: Tick) -> tuple[Any, Any]:
            # Parameters on the device do not pass through a ring: the tile is sliced here.
            index = Tile(self.now.layer, now.consume, group.num_tiles)
            shards = self.plan.take_params(
                self.stacks(carried(carry)), group.weights, now.record or [], index
            )
            return tick(carry, dataclasses.replace(now, record=shards))

        begin = self.begin
        mesh = self.plan.mesh
        slices_host = self.plan.state_records.slices_host
        if (
            self._before is not None and self.plan.layout.disk is not None
        ):  # the disk needs one order
            begin, _ = wait_for(begin, self._before, mesh)
        after = run_phase(
            loops.phase(phase), begin, carry, take, mesh=mesh, slices_host=slices_host, fetch=read
        )
        # Any result will do: all results of a loop are available at the same time.
        self._before = jax.tree.leaves(after)[0]
        return after

    def _gather(self, group: TileGroup, now: Tick) -> list[Array]:
        """Return a tile's leaves, gathered, in tree order, as the loop's operands are."""
        assert now.record is not None
        by_index = dict(
            zip(group.weights, self.plan.gather(now.record, group.weights), strict=True)
        )
        return [by_index[i] for i in self._in_tree(group)]

    def _in_tree(self, group: TileGroup) -> list[int]:
        return sorted(group.weights, key=self.plan.layout.places.__getitem__)


def _dtype(call: TileLoopCall, position: int) -> Any:
    operand = call.operands[position]
    assert operand is not None
    return operand[0].dtype


def _operands(
    call: TileLoopCall, full: Sequence[Array], each: Sequence[Any], tile: Array
) -> list[Any]:
    """Return the operands of one tile's unit for one microbatch.

    `full` takes the place of stacks of tiles, and each part is reduced to one slice.
    """
    of_data = iter(each)
    stacks = iter(full)
    values = []
    for p, operand in enumerate(call.operands):
        if operand is None:
            values.append(next(stacks))
            continue
        value = next(of_data) if operand[1] else operand[0]
        # A part has one entry per tile.
        values.append(
            jax.lax.dynamic_index_in_dim(value, tile, 0, keepdims=False)
            if p in call.loop.parts
            else value
        )
    return values
