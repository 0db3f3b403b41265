"""The loops of a streamed step over one run of layers: forward and backward.

Backward derives one layer at a time.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.grads import Turn, beside
from zerojax.models import Given, Loss, call_block, floating, summed
from zerojax.optim import DuplexResult, DuplexTransfer
from zerojax.sharding import ActivationSpec
from zerojax.state import TrainState
from zerojax.streamed.activations import BlockTracer, ResidualPlan
from zerojax.streamed.microbatches import LayerInputs, Microbatches, derive_key
from zerojax.streamed.phases import Tick, fetch_first, run_phase
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.tile_runner import TileRunner
from zerojax.streamed.update_policies.interface import GradientSink, RecordGrads, loss_scale
from zerojax.trees import Context, Params

Array = jax.Array
Block = Callable[[Any, Any, Any, Given], tuple[Any, Loss | None, list[Array]]]
"""One layer of one microbatch: (params, x, key, given) -> (y, addition to the loss, residuals)."""


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

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        blocks: Any,
        x: Any,
        inputs: LayerInputs,
        begin: Array,
        residuals: ResidualPlan | None,
        stacks: list[Array],
    ) -> tuple[Any, list[Array], Loss | None]:
        """Run the layers, first layer first.

        Args:
          blocks: the model's stacked parameters, trainable and frozen.
          x: the first layer's input.
          inputs: the other inputs of all layers.
          begin: i32[] zero, known when the loops may begin.
          residuals: the arrays to save and how they are stored; None in an evaluation, which has
            one microbatch.
          stacks: empty stacks for the saved arrays.

        Returns:
          The last layer's output, the filled `stacks`, and the layers' addition to the loss (a mean
          over microbatches), or None.
        """
        plan = self.plan
        stack = self.stack
        phase = self.stack.schedule.phase("forward")
        microbatches = Microbatches(self.mesh, 1) if residuals is None else self.microbatches
        tiled = self.tracer.without_residuals(x, inputs) if residuals is None else residuals.tiled
        block = self._plain_block if residuals is None else residuals.block.forward
        params = plan.weight_stacks(blocks)

        def fetch(carry: Any, layer: Array) -> list[Array]:
            del carry
            return plan.read_params(params, plan.away(stack.layer), layer)

        def tick(carry: Any, now: Tick) -> Any:
            x, full, stacks, total = carry
            take = lambda: plan.take_params(params, stack.layer, now.record or [], now.consume)  # noqa: E731
            full, next_full = self._turn(full, now, take)
            if tiled is None:
                y, added, values, next_full, landing = self._run_block(
                    block, full, x, inputs, now, next_full, microbatches
                )
            else:
                x = microbatches.constrain(x)
                tiles = TileRunner(plan, stack, microbatches, begin, now, lambda carried: params)
                keys = microbatches.derive_keys(inputs.keys, stack.number(now.layer))
                given = inputs.given_all(now.layer, microbatches)
                y, added, values = tiled.forward(
                    self.tracer.operands(full), x, keys, given, tiles.run
                )
                y = microbatches.constrain(y)
                landing = now.landing
            if residuals is not None:
                stacks = residuals.write(stacks, now.layer, x, values)  # x is this layer's input
            return (y, next_full, stacks, _accumulated(total, added, microbatches.count)), landing

        # With gather_ahead, the previous tick gathers a tick's layer. The first tick has no
        # previous tick, so its layer is gathered here.
        first = None
        if self.config.gather_ahead:
            record = fetch_first(
                phase, begin, partial(fetch, None), self.mesh, plan.state_records.slices_host
            )
            first = plan.gather(
                plan.take_params(params, stack.layer, record, jnp.int32(phase.first)), stack.layer
            )
        adds = self.tracer.abstract_added(x, inputs, microbatches.count)
        none = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), adds)
        carry = (x, first, stacks, none)
        y, _, stacks, total = run_phase(
            phase,
            begin,
            carry,
            tick,
            mesh=self.mesh,
            slices_host=plan.state_records.slices_host,
            fetch=fetch,
        )
        return y, stacks, total

    def _run_block(
        self,
        block: Block,
        full: list[Array],
        x: Any,
        inputs: LayerInputs,
        now: Tick,
        next_full: Any,
        microbatches: Microbatches,
    ) -> tuple[Any, Loss | None, list[Array], Any, Any]:
        """Run one layer, overlapped with the next layer's gather and the record in flight.

        Returns (output, addition to the loss, residuals, next layer gathered, record in flight).
        """
        params = self._params(full, microbatches.count)
        # Several microbatches are a loop inside the tick. In the loop's body this work would be
        # repeated for each of them.
        if microbatches.count == 1:
            work = (next_full if now.takes_record else None, now.landing)
        else:
            work = None

        def run(x: Any, key: Any, context: Context) -> tuple[Any, Loss | None, list[Array], Any]:
            args = (
                params(),
                x,
                derive_key(key, self.stack.number(now.layer)),
                inputs.given(context, now.layer),
            )
            (y, added, values), done = beside(block, args, work)
            return self.plan.stream.constrain(y), added, values, done

        y, added, values, done = microbatches.each(run, x, inputs.keys, inputs.context)
        return y, added, values, *_after(work, done, next_full, now)

    def _params(self, full: list[Array], count: int) -> Callable[[], Any]:
        """Return a function that returns a block's parameters, given its gathered leaves.

        The function is called in the body of a loop over `count` microbatches.
        """
        stack = self.stack
        params = self.tracer.block_tree(stack.without_tiles(full))
        # encoded weights would be decoded for each microbatch
        if count == 1 or self.plan.layout.encodings:
            return lambda: params
        return lambda: self.tracer.block_tree(
            stack.without_tiles(self.plan.whole(full, stack.layer))
        )

    def _plain_block(
        self, params: Params, x: Any, key: Any, given: Given
    ) -> tuple[Any, Loss | None, list[Array]]:
        out = call_block(self.stack.model, params, x, key, given)
        return out.x, out.loss, []

    # --- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        sink: GradientSink[Any],
        state: TrainState,
        inputs: LayerInputs,
        begin: Array,
        residuals: ResidualPlan,
        stacks: list[Array],
        dy: Any,
        d_context: Any,
        carried: Any,
    ) -> tuple[Any, Any, Any]:
        """Run the layers' derivatives, last layer first.

        Args:
          sink: consumer of the gradients.
          state: the state before the step.
          inputs: the other inputs of all layers.
          begin: i32[] zero, known when the loops may begin.
          residuals: the arrays that forward saved and how they are stored.
          stacks: the stacks of these arrays.
          dy: cotangent of the last layer's output.
          d_context: float32 cotangent of the context from the layers of this stack that follow this
            run; None if there are none.
          carried: the value that the sink carries through backward.

        Returns:
          The cotangent of the first layer's input; the float32 cotangents of the context's floating
          leaves if they depend on parameters; and `carried`.
        """
        plan = self.plan
        stack = self.stack
        ahead = self.config.gather_ahead
        phase = stack.schedule.phase("backward")
        # a fetched record holds parameters, then residuals
        num_params = len(plan.away(stack.layer))
        frozen = plan.frozen_stacks(state)
        stores_late = phase.stores_late

        def params(carried: Any) -> list[Any]:
            return [*sink.params(state, carried), *frozen]

        def fetch(carry: Any, layer: Array) -> list[Array]:
            # The loop does not carry the stacks of residuals, since this phase only reads them.
            return plan.read_params(
                params(carry[-1]), plan.away(stack.layer), layer
            ) + residuals.fetch(stacks, layer)

        def fetch_besides(carried: Any, layer: Array) -> list[Array]:
            of_frozen = plan.read_params(
                params(carried), plan.away(stack.leaves.frozen_blocks), layer
            )
            return of_frozen + residuals.fetch(stacks, layer)

        def tick(carry: Any, now: Tick) -> Any:
            dx, d_context, full, fetched, carried = carry
            record = now.record or []

            def take():
                return plan.take_params(
                    params(carried), stack.layer, record[:num_params], now.consume
                )

            full, next_full = self._turn(full, now, take)
            # With gather_ahead, the record taken holds the next layer's parameters and residuals.
            arrived = record[num_params:]
            if ahead:
                fetched, next_fetched = (fetched, arrived if now.takes_record else fetched)
            else:
                fetched, next_fetched = (arrived, None)
            values = residuals.read(stacks, fetched, now.layer)
            transfer = transferred = None
            if residuals.tiled is None:
                if stores_late:
                    transfer = sink.transfer(
                        carried, now, stack.blocks, unstacked if now.stores_unstacked else {}
                    )
                if (
                    now.fetch is not None
                ):  # the trainable parameters cross with the record that is updated
                    now = dataclasses.replace(now, landing=fetch_besides(carried, now.fetch))
                derived = self._derive_block(
                    residuals, full, values, inputs, dx, d_added, now, next_full, transfer
                )
                grads, dx, of_context, next_full, landing, transferred = derived
            else:
                tiles = TileRunner(plan, stack, self.microbatches, begin, now, params, carried)
                use = partial(sink.use, state)
                grads, dx, of_context = self._derive_tiles(
                    residuals, full, values, inputs, dx, d_added, tiles, use
                )
                landing = now.landing
                carried = tiles.carried
            # All layers read the same context, so its cotangents are summed over layers in float32.
            d_context = jax.tree.map(lambda d, a: d + a.astype(d.dtype), d_context, of_context)
            trained = full[: len(stack.blocks)]
            carried, landing = sink.use(
                state,
                carried,
                RecordGrads(now, stack.blocks, grads, trained, landing, transfer, transferred),
            )
            return (dx, d_context, next_full, next_fetched, carried), landing

        def drain(number: int, layer: Array, carry: Any) -> Any:
            return (*carry[:-1], sink.drain(stack, number, layer, carry[-1]))

        # The loops do not carry `unstacked`, since only the first tick uses them.
        carried, unstacked = sink.split_unstacked(carried)
        # The layers' addition is part of the loss, so its derivative is the loss scale.
        d_added = loss_scale(state) if residuals.block.adds else None
        first = fetched = None
        if ahead:
            # The first tick's layer is gathered before the loop, and its residuals are loaded with
            # it.
            record = fetch_first(
                phase, begin, partial(fetch, (carried,)), self.mesh, plan.state_records.slices_host
            )
            shards = plan.take_params(
                params(carried), stack.layer, record[:num_params], jnp.int32(phase.first)
            )
            first = plan.gather(shards, stack.layer)
            fetched = record[num_params:]
        # Backward reads optimizer state only if it updates.
        on_device = stack.run.device_layers if self.config.update == "in_backward" else 0
        if d_context is None:
            context = floating(inputs.context) if residuals.block.of_context else None
            zeros = jax.tree.map(
                lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), context
            )
            d_context = self.microbatches.constrain(zeros)
        dx, d_context, _, _, carried = run_phase(
            phase,
            begin,
            (dy, d_context, first, fetched, carried),
            tick,
            mesh=self.mesh,
            slices_host=plan.state_records.slices_host,
            fetch=fetch,
            device_layers=on_device,
            drain=drain,
            drains_last=not stack.drains_beside_unstacked,
        )
        return dx, d_context, carried

    def _derive_block(
        self,
        residuals: ResidualPlan,
        full: list[Array],
        values: list[Array],
        inputs: LayerInputs,
        dx: Any,
        d_added: Any,
        now: Tick,
        next_full: Any,
        transfer: DuplexTransfer | None,
    ) -> tuple[list[Array], Any, Any, Any, Any, DuplexResult | None]:
        """Derive one layer, overlapped with the next layer's gather and all transfers.

        Returns (gradients, the input's cotangent, the context's cotangent, next layer gathered,
        record in flight, further arrays that crossed the host link).
        """
        plan = self.plan
        stack = self.stack
        count = self.microbatches.count
        params = self._params(full, count)
        transferred = None if transfer is None else transfer.begin()
        if count == 1:
            work = (next_full if now.takes_record else None, now.landing, transferred)
        else:
            work = None
        if transfer is None:
            turns = []
        else:
            turns = [partial(_turn, transfer, n) for n in range(1, transfer.num_turns)]

        def derive(
            dx: Any, values: list[Array], key: Any, context: Context
        ) -> tuple[list[Array], Any]:
            x, saved = residuals.split(values)
            given = inputs.given(context, now.layer)
            key = derive_key(key, stack.number(now.layer))
            constrain = plan.stream.constrain
            (g, dx, d_context), done = beside(
                residuals.block.backward,
                (params(), constrain(x), key, given, saved, dx, d_added),
                work,
                turns if count == 1 else (),
            )
            d_context = ActivationSpec(self.mesh).constrain(d_context)
            return plan.summed_at(jax.tree.leaves(g), stack.blocks), (
                constrain(dx),
                d_context,
                done,
            )

        def between(turn: Turn, total: list[Array]) -> list[Array]:
            nonlocal transferred
            total, (_, _, transferred) = turn(total, (None, None, transferred))
            return total

        total = plan.zero_grads(stack.blocks) if count > 1 else []
        trees = (dx, values, inputs.keys, inputs.context)
        grads, (dx, d_context, done) = self.microbatches.fold(
            derive, total, *trees, between=[partial(between, turn) for turn in turns]
        )
        next_full, landing = _after(work, done, next_full, now)
        transferred = transferred if work is None else done[2]
        if plan.layout.reduces_once:
            grads = plan.reduced(grads, stack.blocks)
        # Consumers of the gradients wait for dx, so that the gradients are reduced during the
        # remaining products.
        grads, dx = jax.lax.optimization_barrier((grads, dx))
        # otherwise the work overlapped with the microbatches' loop would start after it
        if count > 1:
            grads, next_full, landing = jax.lax.optimization_barrier((grads, next_full, landing))
        return grads, dx, d_context, next_full, landing, transferred

    def _derive_tiles(
        self,
        residuals: ResidualPlan,
        full: list[Array],
        values: list[Array],
        inputs: LayerInputs,
        dx: Any,
        d_added: Any,
        tiles: TileRunner,
        use: Any,
    ) -> tuple[list[Array], Any, Any]:
        """Return the gradients of a layer's untiled leaves, and cotangents of input and context.

        `use` takes the gradients of each tile.
        """
        plan = self.plan
        microbatches = self.microbatches
        assert residuals.tiled is not None
        x, saved = residuals.split(values)
        layer = tiles.now.layer
        keys = microbatches.derive_keys(inputs.keys, self.stack.number(layer))
        given = inputs.given_all(layer, microbatches)
        blocks = self.stack.blocks
        grads, dx, d_context = residuals.tiled.backward(
            self.tracer.operands(full),
            microbatches.constrain(x),
            keys,
            given,
            saved,
            dx,
            microbatches.repeated(d_added),
            partial(tiles.run, use=use),
            plan.zero_grads(blocks) if microbatches.count > 1 else [],
        )
        # Consumers of the gradients wait for dx, as in `_derive_block`.
        grads, dx = jax.lax.optimization_barrier(
            (plan.reduced(grads, blocks), microbatches.constrain(dx))
        )
        return grads, dx, microbatches.constrain(d_context)

    def _turn(self, full: Any, now: Tick, take: Callable[[], Any]) -> tuple[list[Array], Any]:
        """Return this tick's gathered layer, and the next tick's layer, gathered, or None.

        Only gather_ahead gathers the next tick's layer.
        """
        if not self.config.gather_ahead:
            return self.plan.gather(take(), self.stack.layer), None
        # A tick that takes no record passes its own layer on, since the loop's carry must keep its
        # shape.
        return full, (self.plan.gather(take(), self.stack.layer) if now.takes_record else full)


def _turn(transfer: DuplexTransfer, number: int, operands: Any, work: Any) -> tuple[Any, Any]:
    """Move one group of arrays across the host link before a product.

    The last turn also waits for the next layer's gather and the record in flight.
    """
    next_full, landing, transferred = work
    if number < transfer.num_turns - 1:
        operands, transferred = jax.lax.optimization_barrier((operands, transferred))
    else:
        operands, (next_full, landing, transferred) = jax.lax.optimization_barrier((operands, work))
    return operands, (next_full, landing, transfer.turn(number, transferred))


def _after(work: Any, done: Any, next_full: Any, now: Tick) -> tuple[Any, Any]:
    """Return the next gathered layer and the record in flight.

    Both overlapped with a tick's products.
    """
    if work is None:
        return next_full, now.landing
    # A tick that takes no record had no gather to overlap with its products, and passes on its own
    # layer.
    return (done[0] if work[0] is not None else next_full), done[1]


def _accumulated(total: Loss | None, added: Loss | None, count: int) -> Loss | None:
    """Return the loss addition of the layers so far plus that of one more layer.

    Totals are means over the `count` microbatches; metrics are sums.
    """
    if total is None or added is None:
        return None
    if count > 1:
        added = Loss(jnp.mean(added.total.astype(jnp.float32)), None, summed(added.metrics))
    return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, added)
