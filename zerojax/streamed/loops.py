"""The loops of a streamed step over one run of layers: forward and backward.

Backward derives one layer at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from host_offload.schedule import Phase
from zerojax.grads import Turn, beside
from zerojax.models import Given, Loss, call_block, floating, summed
from zerojax.optim import DuplexResult, DuplexTransfer
from zerojax.sharding import ActivationSpec
from zerojax.state import Index, OnDevice, TrainState
from zerojax.streamed.activations import BlockTracer, ResidualPlan
from zerojax.streamed.microbatches import LayerInputs, Microbatches, derive_key
from zerojax.streamed.phases import Tick, fetch_first, run_phase
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.tile_runner import TileRunner
from zerojax.streamed.tiled_block import TiledBlock
from zerojax.streamed.update_policies.interface import (
    GradientSink,
    ParamSource,
    RecordGrads,
    StoredParams,
    loss_scale,
)
from zerojax.trees import Context, Params, Tree

Array = jax.Array
Block = Callable[[Any, Any, Any, Given], tuple[Any, Loss | None, list[Array]]]
"""One layer of one microbatch: (params, x, key, given) -> (y, addition to the loss, residuals)."""


class SavedRun(NamedTuple):
    """Values of forward through one run of layers that its backward reads.

    Attributes:
      inputs: the inputs of the layers other than the previous layer's output.
      residuals: the arrays that forward saved and how they are stored.
      stacks: the stacks of these arrays.
    """

    inputs: LayerInputs
    residuals: ResidualPlan
    stacks: list[Array]


class Cotangents(NamedTuple):
    """Cotangents at one end of a run of layers.

    Attributes:
      dx: cotangent of the stream: of the last layer's output before backward through the run, of
        the first layer's input after it.
      context: float32 cotangents of the context's floating leaves, from the layers so far; None if
        there are no such layers, or if the context depends on no parameters.
    """

    dx: Tree
    context: Tree


class StackLoops:
    """The loops over one run of layers.

    Attributes:
      plan: plan of the step.
      stack: the layers and their schedule.
      microbatches: microbatches of a step; an evaluation has one.
      tracer: tracer of the layers' block.
    """

    def __init__(self, plan: StreamedPlan, stack: StackPlan, microbatches: Microbatches) -> None:
        """Build the loops over the layers of `stack`."""
        self.plan = plan
        self.stack = stack
        self.microbatches = microbatches
        self.config = plan.config
        self.mesh = plan.mesh
        self.tracer = BlockTracer(stack, plan)

    def forward(
        self,
        source: ParamSource[Any],
        x: Tree,
        inputs: LayerInputs,
        begin: Array,
        residuals: ResidualPlan | None,
        stacks: list[Array],
        carried: Any = None,
        *,
        skips: bool = False,
    ) -> tuple["ForwardResult", Any]:
        """Run the layers, first layer first.

        Args:
          source: provider of the layers' parameters.
          x: the first layer's input.
          inputs: the other inputs of all layers.
          begin: i32[] zero, known when the loops may begin.
          residuals: the arrays to save and how they are stored; None in an evaluation, which has
            one microbatch.
          stacks: empty stacks for the saved arrays.
          carried: the value that forward carries for the source.
          skips: whether to leave out tiles that a loop does not need, in an evaluation.

        Returns:
          The results of forward, and `carried`.
        """
        if residuals is None:
            tiled = self.tracer.without_residuals(x, inputs)
            microbatches = Microbatches(self.mesh, 1)
        else:
            tiled = residuals.tiled
            microbatches = self.microbatches
        run = _Forward(self, microbatches, inputs, begin, residuals, tiled, source, skips)
        return run(x, stacks, carried)

    def settle(self, source: ParamSource[Any], begin: Array, carried: Any) -> Any:
        """Update the layers without computing them, in forward's order; return `carried`.

        Args:
          source: source of parameters that updates each layer that is taken from it.
          begin: i32[] zero, known when the loops may begin.
          carried: the value that forward carries for the source.
        """
        stack = self.stack
        phase = source.phase(stack)
        slices_host = self.plan.state_records.slices_host
        device_layers = source.device_layers(stack)

        def update(
            carried: Any, record: Sequence[Array], layer: Index, in_flight: list[Array] | None
        ) -> tuple[Any, list[Array] | None]:
            _, updated, in_flight = source.take(carried, stack.record, record, layer, in_flight)
            return source.put(carried, stack.record, updated, layer, in_flight)

        def tick(carried: Any, now: Tick) -> tuple[Any, list[Array] | None]:
            # With gather_ahead the first layer is taken before the loop, so the last tick takes
            # none.
            if self.config.gather_ahead and not now.takes_record:
                return carried, now.in_flight
            carried, in_flight = update(carried, now.record or [], now.taken, now.in_flight)
            if not stack.groups:
                return carried, in_flight
            tiles = TileRunner(self.plan, stack, self.microbatches, begin, now, source, carried)
            tiles.settle()
            return tiles.carried, in_flight

        if self.config.gather_ahead:
            fetch = partial(source.fetch, carried, stack.record)
            record = fetch_first(phase, begin, fetch, self.mesh, slices_host, device_layers)
            carried, _ = update(carried, record, _first_index(phase, device_layers), None)
        return run_phase(
            phase,
            begin,
            carried,
            tick,
            mesh=self.mesh,
            slices_host=slices_host,
            fetch=lambda carried, layer: source.fetch(carried, stack.record, layer),
            device_layers=device_layers,
            device_records=True,
        )

    def backward(
        self,
        sink: GradientSink[Any],
        state: TrainState,
        saved: SavedRun,
        begin: Array,
        cotangents: Cotangents,
        carried: Any,
    ) -> tuple[Cotangents, Any]:
        """Run the layers' derivatives, last layer first.

        Args:
          sink: consumer of the gradients.
          state: the state before the step.
          saved: the inputs of forward through these layers, and the values that it saved.
          begin: i32[] zero, known when the loops may begin.
          cotangents: cotangents of the last layer's output, and of the context from the layers of
            this stack that follow this run.
          carried: the value that the sink carries through backward.

        Returns:
          The cotangents of the first layer's input and of the context, and `carried`.
        """
        frozen = self.plan.frozen_stacks(state)
        # The loops do not carry `unstacked`, since only the first tick uses them.
        carried, unstacked = sink.split_unstacked(carried)
        # The layers' addition is part of the loss, so its derivative is the loss scale.
        d_added = loss_scale(state) if saved.residuals.block.adds else None
        run = _Backward(self, sink, state, saved, begin, frozen, unstacked, d_added)
        return run(cotangents, carried)

    def gather_turn(
        self, gathered: list[Array] | None, now: Tick, take: Callable[[], list[Array]]
    ) -> tuple[list[Array], list[Array] | None]:
        """Return this tick's gathered layer, and the next tick's layer, gathered, or None.

        Only gather_ahead gathers the next tick's layer.

        Args:
          gathered: this tick's layer if the previous tick gathered it, else None.
          now: the tick.
          take: function that returns the shards of the layer whose record this tick takes.
        """
        if not self.config.gather_ahead:
            return self.plan.gather(take(), self.stack.layer), None
        assert gathered is not None
        if now.takes_record:
            return gathered, self.plan.gather(take(), self.stack.layer)
        # A tick that takes no record passes its own layer on, since the loop's carry must keep its
        # shape.
        return gathered, gathered

    def block_params(self, gathered: list[Array], count: int) -> Callable[[], Params]:
        """Return a function that returns a block's parameters, given its gathered leaves.

        The function is called in the body of a loop over `count` microbatches.
        """
        stack = self.stack
        params = self.tracer.block_tree(stack.without_tiles(gathered))
        # encoded weights would be decoded for each microbatch
        if count == 1 or self.plan.layout.encodings:
            return lambda: params
        return lambda: self.tracer.block_tree(
            stack.without_tiles(self.plan.whole(gathered, stack.layer))
        )


class _Overlapped(NamedTuple):
    """Operations that overlap the products of a tick.

    Attributes:
      next_gathered: the next tick's layer, gathered; None if this tick takes no record.
      in_flight: the record in flight, or None.
      transferred: arrays that crossed the host link so far, if records are stored late; else None.
    """

    next_gathered: list[Array] | None
    in_flight: list[Array] | None
    transferred: DuplexResult | None = None


class ForwardResult(NamedTuple):
    """Results of forward through one run of layers.

    Attributes:
      y: output of the last layer.
      stacks: the stacks of saved arrays.
      added: the layers' addition to the loss, a mean over microbatches, or None.
    """

    y: Tree
    stacks: list[Array]
    added: Loss | None


class _ForwardCarry(NamedTuple):
    """Values that the ticks of forward pass on.

    Attributes:
      x: input of the tick's layer.
      gathered: the tick's layer, if the previous tick gathered it; else None.
      stacks: the stacks of saved arrays.
      added: the layers' addition to the loss so far, or None.
      carried: the value that forward carries for the source of parameters.
    """

    x: Tree
    gathered: list[Array] | None
    stacks: list[Array]
    added: Loss | None
    carried: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Forward:
    """Forward through one run of layers.

    Attributes:
      loops: the loops over the run.
      microbatches: microbatches of this pass.
      inputs: inputs of all layers.
      begin: i32[] zero, known when the loops may begin.
      residuals: the arrays to save and how they are stored; None if nothing is saved.
      tiled: the block cut at its loops over tiles, if tiles are records; else None.
      source: provider of the layers' parameters.
      skips: whether to leave out tiles that a loop does not need.
    """

    loops: StackLoops
    microbatches: Microbatches
    inputs: LayerInputs
    begin: Array
    residuals: ResidualPlan | None
    tiled: TiledBlock | None
    source: ParamSource[Any]
    skips: bool

    def __call__(self, x: Tree, stacks: list[Array], carried: Any) -> tuple[ForwardResult, Any]:
        """Return the results of forward, and the value that it carried for the source."""
        loops = self.loops
        plan = loops.plan
        phase = self.source.phase(loops.stack)
        slices_host = plan.state_records.slices_host
        # With gather_ahead, the previous tick gathers a tick's layer. The first tick has no
        # previous tick, so its layer is gathered here.
        gathered = None
        record_leaves = loops.stack.record
        device_layers = self.source.device_layers(loops.stack)
        if loops.config.gather_ahead:
            first = _first_index(phase, device_layers)
            fetch = partial(self.source.fetch, carried, record_leaves)
            record = fetch_first(phase, self.begin, fetch, loops.mesh, slices_host, device_layers)
            shards, updated, _ = self.source.take(carried, record_leaves, record, first, None)
            gathered = plan.gather(shards, loops.stack.layer)
            carried, _ = self.source.put(carried, record_leaves, updated, first, None)
        added = loops.tracer.abstract_added(x, self.inputs, self.microbatches.count)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), added)
        carry = run_phase(
            phase,
            self.begin,
            _ForwardCarry(x, gathered, stacks, zeros, carried),
            self._tick,
            mesh=loops.mesh,
            slices_host=slices_host,
            fetch=lambda carry, layer: self.source.fetch(carry.carried, record_leaves, layer),
            device_layers=device_layers,
            device_records=True,
            tick_fetches=self.source.stores_beside(loops.stack),
        )
        return ForwardResult(carry.x, carry.stacks, carry.added), carry.carried

    def _tick(self, carry: _ForwardCarry, now: Tick) -> tuple[_ForwardCarry, Any]:
        """Run one layer, and save its input and residuals."""
        loops = self.loops
        carried = carry.carried
        record_leaves = loops.stack.record
        updated = None

        def take() -> list[Array]:
            nonlocal updated, now
            shards, updated, in_flight = self.source.take(
                carry.carried, record_leaves, now.record or [], now.taken, now.in_flight
            )
            now = dataclasses.replace(now, in_flight=in_flight)
            return shards

        x = carry.x
        gathered, next_gathered = loops.gather_turn(carry.gathered, now, take)
        transfer = None
        if self.source.stores_beside(loops.stack):
            built = self.source.build_transfer(carried, loops.stack, updated, now)
            if built is not None:
                transfer, others = built
                now = dataclasses.replace(now, in_flight=others)
        if self.tiled is None:
            y, added, values, overlapped = self._run_block(
                gathered, x, now, next_gathered, transfer
            )
        else:
            x = self.microbatches.constrain(x)
            y, added, values, carried = self._run_tiles(self.tiled, gathered, x, now, carried)
            overlapped = _Overlapped(next_gathered, now.in_flight)
        stacks = carry.stacks
        if self.residuals is not None:
            stacks = self.residuals.write(stacks, now.layer, x, values)
        total = _accumulated(carry.added, added, self.microbatches.count)
        if transfer is None:
            carried, in_flight = self.source.put(
                carried, record_leaves, updated, now.taken, overlapped.in_flight
            )
        else:
            assert overlapped.transferred is not None
            carried, in_flight = self.source.end_transfer(
                carried,
                loops.stack,
                transfer,
                overlapped.transferred,
                overlapped.in_flight,
            )
        return _ForwardCarry(y, overlapped.next_gathered, stacks, total, carried), in_flight

    def _run_block(
        self,
        gathered: list[Array],
        x: Tree,
        now: Tick,
        next_gathered: list[Array] | None,
        transfer: DuplexTransfer | None,
    ) -> tuple[Tree, Loss | None, list[Array], _Overlapped]:
        """Run one layer, overlapped with the next layer's gather and the record in flight.

        Returns (output, addition to the loss, residuals, the overlapped operations' results).
        """
        loops = self.loops
        microbatches = self.microbatches
        block = self._plain_block if self.residuals is None else self.residuals.block.forward
        params = loops.block_params(gathered, microbatches.count)
        # Several microbatches are a loop inside the tick. In the loop's body this work would be
        # repeated for each of them.
        work = None
        transferred = None
        turns = list[Turn]()
        if transfer is not None and microbatches.count == 1:
            transferred = transfer.begin()
            turns = [partial(_turn, transfer, n) for n in range(1, transfer.num_turns)]
        elif transfer is not None:
            transferred = transfer.cross()
        if microbatches.count == 1:
            next_layer = next_gathered if now.takes_record else None
            work = _Overlapped(next_layer, now.in_flight, transferred)

        def run(
            x: Tree, key: Array | None, context: Context
        ) -> tuple[Tree, Loss | None, list[Array], _Overlapped | None]:
            args = (
                params(),
                x,
                derive_key(key, loops.stack.number(now.layer)),
                self.inputs.given(context, now.layer),
            )
            (y, added, values), overlapped = beside(block, args, work, turns)
            return loops.plan.stream.constrain(y), added, values, overlapped

        y, added, values, overlapped = microbatches.each(
            run, x, self.inputs.keys, self.inputs.context
        )
        done = _completed(overlapped, next_gathered, now)
        if overlapped is None:
            done = done._replace(transferred=transferred)
        return y, added, values, done

    def _plain_block(
        self, params: Params, x: Tree, key: Array | None, given: Given
    ) -> tuple[Tree, Loss | None, list[Array]]:
        out = call_block(self.loops.stack.model, params, x, key, given)
        return out.x, out.loss, []

    def _run_tiles(
        self, tiled: TiledBlock, gathered: list[Array], x: Tree, now: Tick, carried: Any
    ) -> tuple[Tree, Loss | None, list[Array], Any]:
        """Run one layer tile by tile.

        Returns (output, addition to the loss, residuals, the value carried for the source).
        """
        loops = self.loops
        microbatches = self.microbatches
        tiles = TileRunner(
            loops.plan,
            loops.stack,
            microbatches,
            self.begin,
            now,
            self.source,
            carried,
            skips=self.skips,
        )
        keys = microbatches.derive_keys(self.inputs.keys, loops.stack.number(now.layer))
        given = self.inputs.given_all(now.layer, microbatches)
        y, added, values = tiled.forward(loops.tracer.operands(gathered), x, keys, given, tiles.run)
        return microbatches.constrain(y), added, values, tiles.carried


class _BackwardCarry(NamedTuple):
    """Values that the ticks of backward pass on.

    Attributes:
      dx: cotangent of the output of the tick's layer.
      d_context: float32 cotangents of the context from the layers so far, or None.
      gathered: the tick's layer, if the previous tick gathered it; else None.
      fetched: the tick's residuals that were off the device, if the previous tick took them; else
        None.
      carried: the value that the sink carries.
    """

    dx: Tree
    d_context: Tree
    gathered: list[Array] | None
    fetched: list[Array] | None
    carried: Any


class _LayerGrads(NamedTuple):
    """Results of one layer's derivative.

    Attributes:
      grads: gradients of the layer's trainable leaves, on their shards.
      dx: cotangent of the layer's input.
      d_context: cotangents of the context, or None.
      overlapped: the results of the overlapped operations.
    """

    grads: list[Array]
    dx: Tree
    d_context: Tree
    overlapped: _Overlapped


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """Backward through one run of layers.

    Attributes:
      loops: the loops over the run.
      sink: consumer of the gradients.
      state: the state before the step.
      saved: values of forward that backward reads.
      begin: i32[] zero, known when the loops may begin.
      frozen: the frozen stacks of parameters.
      unstacked: updated records of unstacked leaves that the first tick stores, by leaf.
      d_added: f32[], cotangent of the layers' addition to the loss, or None.
    """

    loops: StackLoops
    sink: GradientSink[Any]
    state: TrainState
    saved: SavedRun
    begin: Array
    frozen: list[Any]
    unstacked: Mapping[int, list[Array]]
    d_added: Array | None

    def __call__(self, cotangents: Cotangents, carried: Any) -> tuple[Cotangents, Any]:
        """Return the cotangents of the first layer's input and of the context, and `carried`."""
        loops = self.loops
        plan = loops.plan
        stack = loops.stack
        phase = stack.schedule.phase("backward")
        slices_host = plan.state_records.slices_host
        gathered = None
        fetched = None
        if loops.config.gather_ahead:
            # The first tick's layer is gathered before the loop, and its residuals are loaded with
            # it.
            record = fetch_first(
                phase, self.begin, partial(self._fetch_layer, carried), loops.mesh, slices_host
            )
            shards = self._take_params(carried, record, jnp.int32(phase.first))
            gathered = plan.gather(shards, stack.layer)
            fetched = record[self._num_params :]
        # Backward reads optimizer state only if it updates.
        on_device = stack.run.device_layers if loops.config.update == "in_backward" else 0
        d_context = cotangents.context
        if d_context is None:
            d_context = self._context_zeros()
        carry = run_phase(
            phase,
            self.begin,
            _BackwardCarry(cotangents.dx, d_context, gathered, fetched, carried),
            self._tick,
            mesh=loops.mesh,
            slices_host=slices_host,
            fetch=self._fetch,
            device_layers=on_device,
            drain=self._drain,
            drains_last=not stack.drains_beside_unstacked,
        )
        return Cotangents(carry.dx, carry.d_context), carry.carried

    def _context_zeros(self) -> Tree:
        """Return float32 zeros for the context's cotangents, or None if they are not wanted."""
        context = None
        if self.saved.residuals.block.of_context:
            context = floating(self.saved.inputs.context)
        zeros = jax.tree.map(
            lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), context
        )
        return self.loops.microbatches.constrain(zeros)

    # --- records ----------------------------------------------------------------------------------

    @property
    def _num_params(self) -> int:
        """Number of parameters in a fetched record, which come before its residuals."""
        return len(self.loops.plan.away(self.loops.stack.layer))

    def _params(self, carried: Any) -> list[Any]:
        """Return the stacks of parameters."""
        return [*self.sink.params(self.state, carried), *self.frozen]

    def _take_params(self, carried: Any, record: list[Array], layer: Array) -> list[Array]:
        """Return the shards of a layer's parameters, given its fetched record."""
        return self.loops.plan.take_params(
            self._params(carried), self.loops.stack.layer, record[: self._num_params], layer
        )

    def _fetch(self, carry: _BackwardCarry, layer: Array) -> list[Array]:
        """Return the record of a layer: parameters, then residuals, that are off the device."""
        return self._fetch_layer(carry.carried, layer)

    def _fetch_layer(self, carried: Any, layer: Array) -> list[Array]:
        # The loop does not carry the stacks of residuals, since this phase only reads them.
        plan = self.loops.plan
        params = plan.read_params(self._params(carried), plan.away(self.loops.stack.layer), layer)
        return params + self.saved.residuals.fetch(self.saved.stacks, layer)

    def _fetch_untrained(self, carried: Any, layer: Array) -> list[Array]:
        """Return the arrays of a layer's record other than trainable parameters."""
        plan = self.loops.plan
        frozen = plan.read_params(
            self._params(carried), plan.away(self.loops.stack.leaves.frozen_blocks), layer
        )
        return frozen + self.saved.residuals.fetch(self.saved.stacks, layer)

    # --- ticks ------------------------------------------------------------------------------------

    def _tick(self, carry: _BackwardCarry, now: Tick) -> tuple[_BackwardCarry, Any]:
        """Derive one layer, and pass its gradients to the sink."""
        loops = self.loops
        blocks = loops.stack.blocks
        residuals = self.saved.residuals
        record = now.record or []
        carried = carry.carried
        gathered, next_gathered = loops.gather_turn(
            carry.gathered, now, lambda: self._take_params(carried, record, now.consume)
        )
        fetched = record[self._num_params :]
        next_fetched = None
        if loops.config.gather_ahead:
            # The record taken holds the next layer's parameters and residuals.
            next_fetched = fetched if now.takes_record else carry.fetched
            fetched = carry.fetched or []
        values = residuals.read(self.saved.stacks, fetched, now.layer)

        transfer = None
        if residuals.tiled is None:
            transfer = self._build_transfer(carried, now)
            if now.fetch is not None:
                # The trainable parameters cross with the record that is updated.
                untrained = self._fetch_untrained(carried, now.fetch)
                now = dataclasses.replace(now, in_flight=untrained)
            layer = self._derive_block(gathered, values, carry.dx, now, next_gathered, transfer)
        else:
            source = StoredParams(loops.plan, self._params)
            tiles = TileRunner(
                loops.plan, loops.stack, loops.microbatches, self.begin, now, source, carried
            )
            layer = self._derive_tiles(
                residuals.tiled, gathered, values, carry.dx, tiles, next_gathered
            )
            carried = tiles.carried

        # All layers read the same context, so its cotangents are summed over layers in float32.
        d_context = jax.tree.map(
            lambda d, a: d + a.astype(d.dtype), carry.d_context, layer.d_context
        )
        overlapped = layer.overlapped
        carried, in_flight = self.sink.use(
            self.state,
            carried,
            RecordGrads(
                now,
                blocks,
                layer.grads,
                gathered[: len(blocks)],
                overlapped.in_flight,
                transfer,
                overlapped.transferred,
            ),
        )
        next_carry = _BackwardCarry(
            layer.dx, d_context, overlapped.next_gathered, next_fetched, carried
        )
        return next_carry, in_flight

    def _build_transfer(self, carried: Any, now: Tick) -> DuplexTransfer | None:
        """Return the transfers over the host link during a tick, if records are stored late."""
        stack = self.loops.stack
        if not stack.schedule.phase("backward").stores_late:
            return None
        unstacked = self.unstacked if now.stores_unstacked else {}
        return self.sink.build_transfer(carried, now, stack.blocks, unstacked)

    def _drain(self, number: int, layer: Array, carry: _BackwardCarry) -> _BackwardCarry:
        """Store the record of a layer after the last tick."""
        carried = self.sink.drain(self.loops.stack, number, layer, carry.carried)
        return carry._replace(carried=carried)

    def _derive_block(
        self,
        gathered: list[Array],
        values: list[Array],
        dx: Tree,
        now: Tick,
        next_gathered: list[Array] | None,
        transfer: DuplexTransfer | None,
    ) -> _LayerGrads:
        """Derive one layer, overlapped with the next layer's gather and all transfers.

        Args:
          gathered: the layer's leaves, gathered.
          values: the layer's saved arrays.
          dx: cotangent of the layer's output.
          now: the tick.
          next_gathered: the next tick's layer, gathered, or None.
          transfer: the transfers over the host link, or None.
        """
        plan = self.loops.plan
        microbatches = self.loops.microbatches
        blocks = self.loops.stack.blocks
        count = microbatches.count
        params = self.loops.block_params(gathered, count)
        transferred = None
        turns = list[Turn]()
        if transfer is not None:
            transferred = transfer.begin()
            turns = [partial(_turn, transfer, n) for n in range(1, transfer.num_turns)]
        # Several microbatches are a loop, between whose parts the turns are taken.
        work = None
        if count == 1:
            next_layer = next_gathered if now.takes_record else None
            work = _Overlapped(next_layer, now.in_flight, transferred)

        derive = partial(self._derive_microbatch, params, now, work, turns if count == 1 else ())

        def between(turn: Turn, total: list[Array]) -> list[Array]:
            nonlocal transferred
            total, (_, _, transferred) = turn(total, _Overlapped(None, None, transferred))
            return total

        inputs = self.saved.inputs
        grads, (dx, d_context, done) = microbatches.fold(
            derive,
            plan.zero_grads(blocks) if count > 1 else [],
            *(dx, values, inputs.keys, inputs.context),
            between=[partial(between, turn) for turn in turns],
        )
        overlapped = _completed(done, next_gathered, now)
        if done is None:
            overlapped = overlapped._replace(transferred=transferred)
        if plan.layout.reduces_once:
            grads = plan.reduced(grads, blocks)
        # Consumers of the gradients wait for dx, so that the gradients are reduced during the
        # remaining products.
        grads, dx = jax.lax.optimization_barrier((grads, dx))
        # otherwise the work overlapped with the microbatches' loop would start after it
        if count > 1:
            grads, next_gathered, in_flight = jax.lax.optimization_barrier(
                (grads, overlapped.next_gathered, overlapped.in_flight)
            )
            overlapped = _Overlapped(next_gathered, in_flight, overlapped.transferred)
        return _LayerGrads(grads, dx, d_context, overlapped)

    def _derive_microbatch(
        self,
        params: Callable[[], Params],
        now: Tick,
        work: _Overlapped | None,
        turns: Sequence[Turn],
        dx: Tree,
        values: list[Array],
        key: Array | None,
        context: Context,
    ) -> tuple[list[Array], tuple[Tree, Tree, _Overlapped | None]]:
        """Derive one layer of one microbatch, overlapped with `work`.

        Returns the gradients, and (the input's cotangent, the context's, results of `work`).
        """
        loops = self.loops
        residuals = self.saved.residuals
        constrain = loops.plan.stream.constrain
        x, saved = residuals.split(values)
        given = self.saved.inputs.given(context, now.layer)
        key = derive_key(key, loops.stack.number(now.layer))
        (grads, dx, d_context), done = beside(
            residuals.block.backward,
            (params(), constrain(x), key, given, saved, dx, self.d_added),
            work,
            turns,
        )
        d_context = ActivationSpec(loops.mesh).constrain(d_context)
        grads = loops.plan.summed_at(jax.tree.leaves(grads), loops.stack.blocks)
        return grads, (constrain(dx), d_context, done)

    def _derive_tiles(
        self,
        tiled: TiledBlock,
        gathered: list[Array],
        values: list[Array],
        dx: Tree,
        tiles: TileRunner,
        next_gathered: list[Array] | None,
    ) -> _LayerGrads:
        """Derive one layer tile by tile; the sink uses the gradients of each tile.

        Args:
          tiled: the block, cut at its loops over tiles.
          gathered: the layer's untiled leaves, gathered.
          values: the layer's saved arrays.
          dx: cotangent of the layer's output.
          tiles: runner of the loops over tiles.
          next_gathered: the next tick's layer, gathered, or None.
        """
        plan = self.loops.plan
        microbatches = self.loops.microbatches
        blocks = self.loops.stack.blocks
        x, saved = self.saved.residuals.split(values)
        now = tiles.now
        keys = microbatches.derive_keys(self.saved.inputs.keys, self.loops.stack.number(now.layer))
        given = self.saved.inputs.given_all(now.layer, microbatches)
        grads, dx, d_context = tiled.backward(
            self.loops.tracer.operands(gathered),
            microbatches.constrain(x),
            keys,
            given,
            saved,
            dx,
            microbatches.repeated(self.d_added),
            partial(tiles.run, use=partial(self.sink.use, self.state)),
            plan.zero_grads(blocks) if microbatches.count > 1 else [],
        )
        # Consumers of the gradients wait for dx, as in `_derive_block`.
        grads, dx = jax.lax.optimization_barrier(
            (plan.reduced(grads, blocks), microbatches.constrain(dx))
        )
        overlapped = _Overlapped(next_gathered, now.in_flight)
        return _LayerGrads(grads, dx, microbatches.constrain(d_context), overlapped)


def _first_index(phase: Phase, device_layers: int) -> Index:
    """Return the index of the layer that is taken before the first tick."""
    first = jnp.int32(phase.first)
    return OnDevice(first) if phase.first < device_layers else first


def _turn(
    transfer: DuplexTransfer, number: int, operands: Any, work: _Overlapped
) -> tuple[Any, _Overlapped]:
    """Move one group of arrays across the host link before a product.

    The last turn also waits for the next layer's gather and the record in flight.
    """
    if number < transfer.num_turns - 1:
        operands, transferred = jax.lax.optimization_barrier((operands, work.transferred))
        work = work._replace(transferred=transferred)
    else:
        operands, work = jax.lax.optimization_barrier((operands, work))
    assert work.transferred is not None
    return operands, work._replace(transferred=transfer.turn(number, work.transferred))


def _completed(
    done: _Overlapped | None, next_gathered: list[Array] | None, now: Tick
) -> _Overlapped:
    """Return the next gathered layer and the other operations of a tick, after its products.

    Args:
      done: the operations that overlapped the products; None if none did.
      next_gathered: the next tick's layer, gathered, or None.
      now: the tick.
    """
    if done is None:
        return _Overlapped(next_gathered, now.in_flight)
    # A tick that takes no record had no gather to overlap with its products, and passes on its own
    # layer.
    if done.next_gathered is None:
        return done._replace(next_gathered=next_gathered)
    return done


def _accumulated(total: Loss | None, added: Loss | None, count: int) -> Loss | None:
    """Return the loss addition of the layers so far plus that of one more layer.

    Totals are means over the `count` microbatches; metrics are sums.
    """
    if total is None or added is None:
        return None
    if count > 1:
        added = Loss(jnp.mean(added.total.astype(jnp.float32)), None, summed(added.metrics))
    return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, added)
