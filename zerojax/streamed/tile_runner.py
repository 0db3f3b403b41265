"""The loops over tiles inside one tick of the streamed step.

    forward    for k:  w = all_gather(take(l, k));  start fetching tile k+d;  y += f(w, x)
                       (update="in_forward": tile k is updated first, and written back at the end)
    backward   for k:  w = all_gather(take(l, k));  ...;  dw, dx_k = vjp(f)(dy);  dx += dx_k
                       g = reduce_scatter(dw):  update tile k of layer l here, or store g

A tile is fetched and gathered once for all microbatches. Cotangents of operands that all tiles read
are summed in float32.

If a loop knows which of its tiles it needs (`TileLoop.skips`), a forward without gradients may
leave out the others. It fetches each tile when it computes it:

    apply      for k:  if needed[k]:  y += f(all_gather(fetch(l, k)), x)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.device import run_loop
from host_offload.schedule import Phase, TileLoops
from zerojax.grads import beside
from zerojax.ordering import wait_for
from zerojax.state import (
    Tile,
    TileGroup,
)
from zerojax.streamed.microbatches import Microbatches
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import RecordLeaves, StackPlan, StreamedPlan
from zerojax.streamed.tiled_block import TileLoopCall
from zerojax.streamed.update_policies.interface import ParamSource, RecordGrads

Array = jax.Array
OnRecordGrads = Callable[[Any, RecordGrads], tuple[Any, Any]]
"""Consumes a tile's gradient: (carried, record) -> (carried, record in flight).

`carried` is the value that the update policy carries through backward.
"""


class TileRunner:
    """Runs the loops over tiles of one tick.

    Attributes:
      carried: the value that the update policy, or forward's source, carries, after the loops so
        far.
    """

    def __init__(
        self,
        plan: StreamedPlan,
        stack: StackPlan,
        microbatches: Microbatches,
        begin: Array,
        now: Tick,
        source: ParamSource[Any],
        carried: Any,
        *,
        skips: bool = False,
    ) -> None:
        """Prepare to run the loops of a tick.

        Args:
          plan: plan of the step.
          stack: the run of layers.
          microbatches: microbatches of the step.
          begin: i32[] zero, known when the loops may begin.
          now: the tick.
          source: source of the tiles' parameters.
          carried: the value that the update policy carries through backward, or forward's source.
          skips: whether to leave out tiles that a loop does not need.
        """
        self.plan = plan
        self.stack = stack
        self.microbatches = microbatches
        self.begin = begin
        self.now = now
        self.source = source
        self.carried = carried
        self._skips = skips and not source.updates
        self._before: Array | None = None  # a result of the previous loop

    def run(self, call: TileLoopCall, use: OnRecordGrads | None = None) -> list[Any]:
        """Run a loop; return its result, or the wanted cotangents of its operands."""
        group, loops = self.stack.loops[call.group]
        if call.is_backward and use is not None:
            return self._derive(call, group, loops, use)
        return [self._forward(call, group, loops)]

    def settle(self) -> None:
        """Update the tiles of all groups without computing them."""
        for group, loops in self.stack.loops:
            self._update(group, loops, (), lambda nothing, now: (nothing, now.in_flight))

    def _forward(self, call: TileLoopCall, group: TileGroup, loops: TileLoops) -> Array:
        """Run a loop forward; return y[num_out, ...], or y[M, num_out, ...] of M microbatches."""
        loop = call.loop
        microbatches = self.microbatches
        of_data = call.data_operands
        if self._skips and loop.skips:
            return self._forward_needed(call, group)

        def tick(y: Array, now: Tick) -> tuple[Array, Any]:
            assert now.record is not None
            gathered = self._gather(call, group, now.record)

            def add_tile(y: Array, *of_data: Array) -> Array:
                return loop.put(y, now.layer, _operands(call, gathered, of_data, now.layer))

            if microbatches.count == 1:
                return beside(add_tile, (y,), now.in_flight)
            return microbatches.each(add_tile, y, *of_data), now.in_flight

        # Filled or added to tile by tile.
        y = jnp.zeros((*self._microbatch_dims, *loop.out.shape), loop.out.dtype)
        if self.source.updates:
            return self._update(group, loops, y, tick)
        # This loop does not carry the stacks, since it only reads them.
        return self._loop("read", group, loops, y, tick, lambda carry: self.carried)

    def _forward_needed(self, call: TileLoopCall, group: TileGroup) -> Array:
        """Run a loop forward over the tiles that it needs, for a single microbatch.

        The other tiles are neither fetched nor computed.
        """
        assert self.microbatches.count == 1
        loop = call.loop
        leaves = _record_leaves(group)
        of_data = call.data_operands
        assert call.operands[-1] is not None
        needed = call.operands[-1][0]  # bool[T], the last of the parts
        begin = self.begin
        if self._before is not None:
            begin, _ = wait_for(begin, self._before, self.plan.mesh)

        def use(tile: Array, y: Array) -> Array:
            index = self._index(group, tile)
            record = self.source.fetch(self.carried, leaves, index)
            shards, _, _ = self.source.take(self.carried, leaves, record, index, None)
            gathered = self._gather(call, group, shards)
            return loop.put(y, tile, _operands(call, gathered, of_data, tile))

        def tick(tile: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y, begin = carry
            tile = tile + begin
            is_needed = jax.lax.dynamic_index_in_dim(needed, tile, 0, keepdims=False)
            y = jax.lax.cond(is_needed, lambda y: use(tile, y), lambda y: y, y)
            return y, begin

        y = jnp.zeros(loop.out.shape, loop.out.dtype)
        y, _ = run_loop(0, loop.num_tiles, tick, (y, begin), self.plan.mesh)
        self._before = y
        return y

    def _update(
        self,
        group: TileGroup,
        loops: TileLoops,
        y: Any,
        compute: Callable[[Any, Tick], tuple[Any, Any]],
    ) -> Any:
        """Run a loop forward that updates each tile before `compute`; return the final y.

        Args:
          group: the tiles.
          loops: the loops over them.
          y: value that the loop carries.
          compute: `compute(y, now) -> (y, in_flight)`, where `now.record` has the shards of the
            tile's parameters.
        """
        leaves = _record_leaves(group)

        def fetch(carry: Any, tile: Array) -> list[Array]:
            return self.source.fetch(carry[1], leaves, self._index(group, tile))

        def tick(carry: Any, now: Tick) -> tuple[Any, Any]:
            y, carried = carry
            index = self._index(group, now.consume)
            shards, updated, in_flight = self.source.take(
                carried, leaves, now.record or [], index, now.in_flight
            )
            now = dataclasses.replace(now, record=shards, in_flight=in_flight)
            y, in_flight = compute(y, now)
            carried, in_flight = self.source.put(carried, leaves, updated, index, in_flight)
            return (y, carried), in_flight

        y, self.carried = self._run(loops.phase("forward"), (y, self.carried), tick, fetch)
        return y

    @property
    def _microbatch_dims(self) -> tuple[int, ...]:
        """Leading dims of arrays of all microbatches: none for a single microbatch."""
        count = self.microbatches.count
        return () if count == 1 else (count,)

    def _derive(
        self, call: TileLoopCall, group: TileGroup, loops: TileLoops, use: OnRecordGrads
    ) -> list[Array]:
        """Run a loop's derivative; return the wanted cotangents in the order of the operands."""
        derivative = self._plan_derivative(call, group)
        assert call.dy is not None
        sums = [self._zeros(call, p, jnp.float32) for p in derivative.shared]
        # Only one tile reads each slice of a part. Its cotangents are placed side by side and not
        # summed, so their dtype stays.
        slices = [self._zeros(call, p, derivative.dtype(p)) for p in derivative.sliced]
        of_data = call.data_operands
        dy = self._dy_of_microbatches(call)

        def tick(carry: Any, now: Tick) -> tuple[Any, Any]:
            cotangents, carried = carry
            assert now.record is not None
            gathered = self._gather(call, group, now.record)
            derive = partial(self._derive_tile, derivative, gathered, now.layer)
            # With several microbatches, dim 0 of all these arrays counts them: a scan takes the
            # cotangents of one microbatch and returns them.
            inputs = (*cotangents, dy, of_data)
            in_flight = now.in_flight
            if self.microbatches.count == 1:
                (grads, cotangents), in_flight = beside(partial(derive, []), (inputs,), in_flight)
            else:
                grads, cotangents = jax.lax.scan(derive, self.plan.zero_grads(group.leaves), inputs)
            grads = self.plan.reduced(grads, group.leaves)
            # As for a layer, consumers of the gradients wait for the cotangents.
            grads, cotangents = jax.lax.optimization_barrier((grads, cotangents))
            # An update policy reads and writes records. Here the record is a tile, whose index
            # consists of the layer and the tile.
            now = dataclasses.replace(now, layer=Tile(self.now.layer, now.layer, group.num_tiles))
            if group.leaves:  # otherwise all of the group is frozen
                by_index = dict(zip(self._operands_of(call), gathered, strict=True))
                trained = [by_index[i] for i in group.leaves]
                record = RecordGrads(now, group.leaves, grads, trained, in_flight)
                carried, in_flight = use(carried, record)
            return (cotangents, carried), in_flight

        (sums, slices), self.carried = self._loop(
            "backward",
            group,
            loops,
            ((sums, slices), self.carried),
            tick,
            lambda carry: carry[1],
        )
        positions = (*derivative.shared, *derivative.sliced)
        cotangents = dict(zip(positions, (*sums, *slices), strict=True))
        wanted = [p for p, is_wanted in enumerate(call.wanted) if is_wanted]
        return [cotangents[p].astype(derivative.dtype(p)) for p in wanted]

    def _plan_derivative(self, call: TileLoopCall, group: TileGroup) -> "_TileDerivative":
        loop = call.loop
        wanted = [p for p, is_wanted in enumerate(call.wanted) if is_wanted]
        positions = dict(zip(self._operands_of(call), loop.tiles, strict=True))
        # In the order of the group's gradients, which need not be the operands'.
        leaf_ids = {positions[leaf]: leaf for leaf in group.leaves}
        # Cotangents of untiled parameters become part of gradients.
        in_float32 = [
            of_params and self.plan.layout.reduces_in_float32 for of_params in call.of_params
        ]
        return _TileDerivative(
            call=call,
            leaf_ids=leaf_ids,
            shared=[p for p in wanted if p not in loop.parts],
            sliced=[p for p in wanted if p in loop.parts],
            in_float32=in_float32,
        )

    def _zeros(self, call: TileLoopCall, position: int, dtype: jnp.dtype) -> Array:
        """Return zeros for the cotangent of an operand, of all microbatches."""
        operand = call.operands[position]
        assert operand is not None
        value, has_microbatches = operand
        if has_microbatches:
            return jnp.zeros(value.shape, dtype)
        # An operand that depends on no data has no microbatch dim, but its cotangent has one.
        return jnp.zeros((*self._microbatch_dims, *value.shape), dtype)

    def _dy_of_microbatches(self, call: TileLoopCall) -> Array:
        """Return the cotangent of a loop's result, of all microbatches."""
        assert call.dy is not None
        dy, has_microbatches = call.dy
        if has_microbatches or self.microbatches.count == 1:
            return dy
        # A cotangent that depends on no data is the same for each microbatch.
        return jnp.broadcast_to(dy, (*self._microbatch_dims, *dy.shape))

    def _derive_tile(
        self,
        derivative: "_TileDerivative",
        gathered: Sequence[Array],
        tile: Array,
        total: list[Array],
        inputs: tuple[list[Array], list[Array], Array, list[Array]],
    ) -> tuple[list[Array], tuple[list[Array], list[Array]]]:
        """Derive one tile of one microbatch.

        Args:
          derivative: which operands are derived, and how.
          gathered: the tile's leaves, gathered.
          tile: i32[], number of the tile.
          total: sums of the tile's gradients so far, if there are several microbatches.
          inputs: (sums and slices of cotangents so far, cotangent of the loop's result, operands
            that depend on data).

        Returns:
          The tile's gradients, summed over microbatches so far; and the sums and slices.
        """
        sums, slices, dy, of_data = inputs
        loop = derivative.call.loop
        operands = _operands(derivative.call, gathered, of_data, tile)

        def unit(values: dict[int, Array]) -> Array:
            return loop.run([values.get(p, a) for p, a in enumerate(operands)])

        def derive(dy: Array, data: dict[int, Array], params: dict[int, Array]) -> tuple[Any, Any]:
            (grads,) = jax.vjp(unit, data | params)[1](dy)
            return {p: grads[p] for p in params}, {p: grads[p] for p in data}

        trained = derivative.trained
        params = {p: operands[p] for p in derivative.param_positions}
        data = dict[int, Any]()
        for p in (*derivative.shared, *derivative.sliced):
            if p not in params:
                data[p] = operands[p]
        dy_of_tile = loop.cotangent(dy, tile)
        # A dict's leaves are in the order of its keys.
        leaf_ids = [derivative.leaf_ids.get(position) for position in sorted(params)]
        grads, cotangents = self.plan.derivative(derive, leaf_ids)(dy_of_tile, data, params)
        if self.plan.layout.reduces_once:
            # Only a tile's gradient is used here; the block adds up the other gradients.
            grads = {p: g if p in trained else jnp.sum(g, 0) for p, g in grads.items()}
        cotangents = grads | cotangents
        tile_grads = [cotangents[p] for p in trained]
        sums = [
            s + cotangents[p].astype(jnp.float32)
            for s, p in zip(sums, derivative.shared, strict=True)
        ]
        slices = [
            jax.lax.dynamic_update_index_in_dim(s, cotangents[p], tile, 0)
            for s, p in zip(slices, derivative.sliced, strict=True)
        ]
        if self.microbatches.count > 1:
            pairs = zip(total, tile_grads, strict=True)
            tile_grads = [t + g.astype(jnp.float32) for t, g in pairs]
        return tile_grads, (sums, slices)

    def _loop(
        self,
        phase: str,
        group: TileGroup,
        loops: TileLoops,
        carry: Any,
        tick: Callable[[Any, Tick], tuple[Any, Any]],
        carried: Callable[[Any], Any],
    ) -> Any:
        """Run a phase's loop over the tiles of this tick's layer, which only reads parameters."""
        leaves = _record_leaves(group)

        def read(carry: Any, tile: Array) -> list[Array]:
            return self.source.fetch(carried(carry), leaves, self._index(group, tile))

        def take(carry: Any, now: Tick) -> tuple[Any, Any]:
            # Parameters on the device do not pass through a ring: the tile is sliced here.
            index = self._index(group, now.consume)
            record = now.record or []
            shards, _, _ = self.source.take(carried(carry), leaves, record, index, None)
            return tick(carry, dataclasses.replace(now, record=shards))

        return self._run(loops.phase(phase), carry, take, read)

    def _index(self, group: TileGroup, tile: Array) -> Tile:
        """Return the index of a tile of this tick's layer."""
        return Tile(self.now.layer, tile, group.num_tiles)

    def _run(
        self,
        phase: Phase,
        carry: Any,
        tick: Callable[[Any, Tick], tuple[Any, Any]],
        fetch: Callable[[Any, Array], list[Array]],
    ) -> Any:
        """Run the ticks of a loop over tiles."""
        begin = self.begin
        mesh = self.plan.mesh
        slices_host = self.plan.state_records.slices_host
        # The disk needs one order of all loops.
        if self._before is not None and self.plan.layout.disk is not None:
            begin, _ = wait_for(begin, self._before, mesh)
        after = run_phase(
            phase, begin, carry, tick, mesh=mesh, slices_host=slices_host, fetch=fetch
        )
        # Any result will do: all results of a loop are available at the same time.
        self._before = jax.tree.leaves(after)[0]
        return after

    def _operands_of(self, call: TileLoopCall) -> list[int]:
        """Return the leaf of each stack of tiles among a loop's operands, in their order.

        The first array of an encoded leaf stands for it.
        """
        return [self.stack.operands[position] for position in call.leaves]

    def _gather(self, call: TileLoopCall, group: TileGroup, shards: Sequence[Array]) -> list[Array]:
        """Return a tile's leaves, gathered and decoded, in the order of the loop's operands."""
        gathered = self.plan.gather(shards, group.weights)
        by_index = dict(zip(group.weights, gathered, strict=True))
        by_operand = self.stack.group_nodes(group)
        nodes = [by_operand[operand] for operand in self._operands_of(call)]
        return self.plan.layout.decode(jax.tree.map(by_index.__getitem__, nodes))


def _record_leaves(group: TileGroup) -> RecordLeaves:
    return RecordLeaves(group.leaves, group.frozen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TileDerivative:
    """Which operands of a loop over tiles are derived, by position.

    Attributes:
      call: the loop.
      leaf_ids: leaves of the trainable stacks of tiles, whose gradients the update policy uses tile
        by tile.
      shared: operands that all tiles read, whose cotangents are summed over tiles.
      sliced: operands of which each tile reads one slice, whose cotangents are placed side by side.
      in_float32: for each operand, whether its cotangent is part of a gradient that is summed in
        float32.
    """

    call: TileLoopCall
    leaf_ids: Mapping[int, int]
    shared: Sequence[int]
    sliced: Sequence[int]
    in_float32: Sequence[bool]

    @property
    def trained(self) -> list[int]:
        """Positions of the trainable stacks of tiles."""
        return list(self.leaf_ids)

    @property
    def param_positions(self) -> list[int]:
        """Operands whose cotangents are gradients: trainable tiles, and untiled parameters."""
        positions = (*self.trained, *self.shared, *self.sliced)
        return [p for p in positions if p in self.trained or self.in_float32[p]]

    def dtype(self, position: int) -> Any:
        """Return the dtype of an operand's cotangent."""
        if self.in_float32[position]:
            return jnp.float32
        operand = self.call.operands[position]
        assert operand is not None
        value, _ = operand
        return value.dtype


def _operands(
    call: TileLoopCall, gathered: Sequence[Array], of_data: Sequence[Array], tile: Array
) -> list[Any]:
    """Return the operands of one tile's unit for one microbatch.

    Args:
      call: the loop.
      gathered: the tile's leaves, which take the place of stacks of tiles.
      of_data: the operands that depend on data, of this microbatch.
      tile: i32[], number of the tile; an operand with one entry per tile is reduced to its slice.
    """
    data = iter(of_data)
    leaves = iter(gathered)
    values = []
    for position, operand in enumerate(call.operands):
        if operand is None:
            values.append(next(leaves))
            continue
        value, has_microbatches = operand
        if has_microbatches:
            value = next(data)
        if position in call.loop.parts:
            value = jax.lax.dynamic_index_in_dim(value, tile, 0, keepdims=False)
        values.append(value)
    return values
