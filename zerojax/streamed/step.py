"""The streamed step: a LayeredModel whose layers come to the device one after the other, in explicit loops inside one jit.

    forward    for t:  p = take(l[t]); start fetching l[t+d];  x[l+1] = block(all_gather(p), x[l]);  keep x[l]
    head       loss, dx = value_and_grad(head)
    backward   for t:  p, x = take(l[t]); ...;  g, dx = vjp(block)(dx);  g = reduce_scatter(g)
               update layer l here, its optimizer state fetched along with it (in_backward), or store g
    update     for t:  g, w, s = take(l[t]);  scale by the global norm;  update;  write back

Nothing is differentiated through a transfer: backward is a loop of its own, which takes the derivative of one layer at a time
(`residuals`). Order, prefetches and buffer slots are arrays of `host_offload.schedule`. Every tier runs the same loops
(ZeRO-Infinity, arXiv:2104.07857, section 5), and where the bytes rest does not change a number.

Microbatches run inside a tick: a layer is fetched and gathered once in forward and once in backward for all of them, its
gradient is complete at the end of its tick, and its optimizer state crosses the link once a step. The price is that the
layers' inputs are kept for all microbatches at once; `activations="pinned_host"` moves them off the device.

Of a block with stacks of tiles a layer's record is what else it has, and each tile is a record of its own: it is fetched,
gathered, used and released inside the layer's tick, where the block loops over tiles (`tiled_block`), and its gradient
is taken there, so that no device ever holds a whole layer (memory-centric tiling, ZeRO-Infinity, section 5.1.3).

With `gather_ahead` a tick gathers the layer of the next one while it computes its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move
from zerojax.metrics import evaluation, with_own
from zerojax.models import BLOCKS, Given, LayeredModel, Loss, call_block, divided, joined, summed, with_blocks
from zerojax.optim import RecordUpdate
from zerojax.sharding import ActivationSpec
from zerojax.state import StateRecords, TrainState, with_model_state, write_layer
from zerojax.streamed.activations import BlockTracer, ResidualPlan, Scratch
from zerojax.streamed.ending import BackwardResult, Ending, GradsTaker, RecordGrads, loss_scale
from zerojax.streamed.endings import ByLayers, GradsAlone, InBackward, WholeTree
from zerojax.streamed.ends import Ends, ends_state
from zerojax.streamed.host_endings import Delayed, HostInBackward, OnHost
from zerojax.streamed.inputs import LayerInputs
from zerojax.streamed.microbatches import Microbatches, key_of
from zerojax.streamed.moves import eval_moves, grads_moves, step_moves
from zerojax.streamed.phases import ScheduleArrays, Tick, beside, run_phase
from zerojax.streamed.plan import StreamedPlan
from zerojax.streamed.tile_runner import TileRunner

Array = jax.Array
Block = Callable[[Any, Any, Any, Given], tuple[Any, Loss | None, list[Array]]]
"""One layer of one microbatch: (params, x, key, given) -> (y, what it adds to the loss, residuals)."""


class _Derived(NamedTuple):
    """What forward and backward of a step make.

    Attributes:
      backward: for the ending.
      own: the model's metrics, not divided yet.
      ends_state: of the model's ends, after the step.
      scratch: as it goes out.
    """

    backward: BackwardResult[Any]
    own: Any
    ends_state: Any
    scratch: Scratch


class StreamedStep:
    """The step, and the evaluation, of a model whose layers are streamed.

    Attributes:
      plan: the records, where they rest, and the schedule.
      microbatches: of a step; an evaluation has one.
      ends: embedding and head.
      ending: what becomes of the gradients.
      tracer: of the block.
    """

    def __init__(
        self,
        model: LayeredModel,
        tx: optax.GradientTransformation,
        state_records: StateRecords,
        update: RecordUpdate | None,
        gather: Callable[..., Any],
    ) -> None:
        """Build the step.

        Args:
          model: whose layers come and go.
          tx: the optimizer.
          state_records: how the state rests.
          update: the update by record, or None where whole trees are updated on the device.
          gather: `gather(function, params, *args)` evaluates a function of stored parameters and gathers them on use: those of
            embedding and head, since layers are gathered by the step itself.
        """
        layout = state_records.layout
        self.model, self.layout, self.config, self.mesh = model, layout, layout.config, layout.mesh
        self.plan = StreamedPlan(model, state_records, update)
        self.host, self.schedule = self.plan.host, self.plan.schedule
        self.microbatches = Microbatches(self.mesh, self.config.num_microbatches)
        self.ends = Ends(self.plan.layout.decoding(model), self.plan, self.microbatches, gather)
        self.ends_of_eval = Ends(self.plan.layout.decoding(model), self.plan, Microbatches(self.mesh, 1), gather)
        self.ending: Ending[Any] = ending_of(self.plan, tx)
        self.tracer = BlockTracer(model, self.plan)

    # --- what a step needs, from shapes alone ------------------------------------------------------------------------------

    def arrays(self) -> ScheduleArrays:
        """Return the schedule's arrays, in numpy."""
        return ScheduleArrays(self.schedule.arrays(), np.asarray(1, np.int32))

    def abstract_residuals(self, abstract_batch: Any) -> ResidualPlan:
        """Return what forward saves of a batch."""
        state = self.layout.abstract_arrays
        x, inputs = self.ends.abstract_input(self.layout.join(state), state.model_state, abstract_batch)
        return self.tracer.plan_residuals(x, inputs, self.microbatches.count)

    def abstract_scratch(self, abstract_batch: Any) -> Scratch:
        """Return shapes and shardings of the stacks in host memory that live inside a step."""
        residuals, plan = self.abstract_residuals(abstract_batch), self.plan
        return {
            "grads": plan.abstract_grads() if plan.grads_in_memory else [],
            "residuals": [plan.abstract_stack(residuals.records[i], residuals.shapes[i]) for i in residuals.in_memory],
        }

    def records_written(self, abstract_batch: Any) -> list[DiskRecords]:
        """Return the records on disk that a step writes before it reads them."""
        if self.layout.disk is None:
            return []
        records = [*self.abstract_residuals(abstract_batch).records, *self.plan.grads]
        return list(dict.fromkeys(r.disk_records for r in records if r.disk_records is not None))

    def moves(self) -> tuple[Move, ...]:
        """Return what a step reads from disk and writes to it, in order."""
        return step_moves(self.plan, self.tracer.tile_loops(), self.ending.ends_first)

    def eval_moves(self) -> tuple[Move, ...]:
        """Return the same of an evaluation."""
        return eval_moves(self.plan, self.tracer.eval_loops())

    def grads_moves(self) -> tuple[Move, ...]:
        """Return the same of `grads`."""
        return grads_moves(self.plan, self.tracer.tile_loops())

    # --- the step ----------------------------------------------------------------------------------------------------------

    def step(
        self, state: TrainState, batch: Any, arrays: ScheduleArrays, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Run one step.

        Args:
          state: donated.
          batch: global batch.
          arrays: of the schedule.
          scratch: stacks in host memory that live from forward to update; donated and returned.
        """
        batch, keys = self._split(state, batch)
        run = self._derive(state, batch, keys, arrays, scratch, self.ending, self._first_token(state))
        after, metrics = self.ending.end(run.backward)
        if state.model_state is not None:
            after = with_model_state(state, after, {**state.model_state, **run.ends_state})
        return (after, run.scratch), with_own(metrics, divided(run.own))

    def grads(self, state: TrainState, batch: Any, arrays: ScheduleArrays, scratch: Scratch) -> tuple[tuple[Any, Any], Scratch]:
        """Return (what `eval` returns, of a step) and the unscaled gradients, float32; and the scratch."""
        ending = GradsAlone(self.plan)
        batch, keys = self._split(state, batch)
        run = self._derive(state, batch, keys, arrays, scratch, ending, jnp.int32(0))
        return (evaluation(run.backward.loss, divided(run.own)), ending.tree(run.backward)), run.scratch

    def check_grads(self) -> None:
        """Raise NotImplementedError where gradients are not stored on the device."""
        for name, needed in (("update", "after_backward"), ("update_on", "device"), ("grads", "device")):
            if (value := getattr(self.config, name) or needed) != needed:
                raise NotImplementedError(
                    f"program.grads is not built in this version with {name}={value!r}: it returns the gradients that a step "
                    f"stores on the device; build a program with {name}={needed!r}, where they fit"
                )

    def _split(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """Return the microbatches of a step and their keys."""
        # Of (key, step) alone: a restored run draws the masks that it would have drawn.
        key = jax.random.fold_in(state.key, state.step) if self.model.stochastic else None
        return self.microbatches.split(batch, key)

    def _derive(
        self,
        state: TrainState,
        batch: Any,
        keys: Any,
        arrays: ScheduleArrays,
        scratch: Scratch,
        taker: GradsTaker[Any],
        token: Array,
    ) -> "_Derived":
        """Run forward, head and backward, whose gradients go to `taker`; `token` is what its callbacks wait for."""
        # Before the layers, as the disk was told (`step_moves`).
        params = self.layout.join(state)
        ends = self.ends.load(params)
        before = ends_state(state.model_state)
        x, states, read_by_head = self.ends.embed_all(ends, batch, keys, before)
        inputs = self.ends.inputs(batch, keys, state.model_state)
        residuals = self.tracer.plan_residuals(x, inputs, self.microbatches.count)
        stacks = self.tracer.stacks(residuals, scratch)
        y, stacks, added = self.forward(params[BLOCKS], x, inputs, arrays, residuals, stacks)
        # What backward fetches first may overlap the head, and not the layers.
        arrays, y = arrays.after(y, self.mesh)
        head = self.ends.head_and_grads(ends, y, batch, keys, loss_scale(state), read_by_head)
        loss, own = _with_added(head.loss, head.metrics, added)
        carried = taker.begin(state, loss, scratch["grads"], token)
        dx, carried = self.backward(taker, state, inputs, arrays, residuals, stacks, head.dy, carried)
        g_ends = self.ends.embed_grads(ends, batch, keys, dx, states, head.grads)
        # Scratch goes out as it came in, so that the next step is given the same host memory.
        scratch = {"grads": taker.grads(carried), "residuals": [stacks[i] for i in residuals.in_memory]}
        return _Derived(BackwardResult(state, loss, carried, g_ends, arrays), own, head.state, scratch)

    def eval(self, params: Any, model_state: Any, batch: Any, arrays: ScheduleArrays) -> Any:
        """Return the loss of a batch, without keys, as one microbatch; where there are metrics, a dict of both."""
        ends, y, added, state = self._eval_layers(params, model_state, batch, arrays)
        loss, _ = self.ends_of_eval.head(ends, y, batch, None, state)
        value, own = _with_added(with_blocks(loss, None).value(), dict(loss.metrics), added)
        return evaluation(value, divided(own))

    def apply(self, params: Any, model_state: Any, batch: Any, arrays: ScheduleArrays) -> Any:
        """Return what the model's `predict` does, without keys, as one microbatch."""
        ends, y, _, state = self._eval_layers(params, model_state, batch, arrays)
        return self.ends_of_eval.predict(ends, y, batch, state)

    def _eval_layers(
        self, params: Any, model_state: Any, batch: Any, arrays: ScheduleArrays
    ) -> tuple[Any, Any, Loss | None, Any]:
        """Return the leaves of the ends, the last layer's output, what the layers add to the loss, and the ends' state."""
        ends = self.ends.load(params)
        x, state = self.ends_of_eval.embed(ends, batch, None, ends_state(model_state))
        inputs = self.ends_of_eval.inputs(batch, None, model_state)
        # Nothing is saved, so there are no stacks to fill.
        y, _, added = self.forward(params[BLOCKS], x, inputs, arrays, None, [])
        return ends, y, added, state

    def _first_token(self, state: TrainState) -> Array:
        """Return what orders the callbacks of the host's update; starts the one that the step before left, if any."""
        if self.host is None:
            return jnp.int32(0)
        token = self.host.first_token(state)
        if state.pending is None:
            return token
        return self.host.start(self.plan.state_records.flat(state), state.pending, token)

    # --- forward -----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        blocks: Any,
        x: Any,
        inputs: LayerInputs,
        arrays: ScheduleArrays,
        residuals: ResidualPlan | None,
        stacks: list[Array],
    ) -> tuple[Any, list[Array], Loss | None]:
        """Run the layers, first layer first.

        Args:
          blocks: the model's stacked parameters, trained and frozen.
          x: the first layer's input.
          inputs: what all layers read.
          arrays: of the schedule.
          residuals: what to save, and how; None in an evaluation, which has one microbatch.
          stacks: of it, empty.

        Returns:
          The last layer's output, `stacks`, filled, and what the layers add to the loss, a mean over microbatches, or None.
        """
        plan, phase = self.plan, arrays.phase("forward")
        microbatches = Microbatches(self.mesh, 1) if residuals is None else self.microbatches
        tiled = self.tracer.without_residuals(x, inputs) if residuals is None else residuals.tiled
        block = self._plain_block if residuals is None else residuals.block.forward
        params = plan.weight_stacks(blocks)

        def fetch(carry: Any, layer: Array) -> list[Array]:
            del carry
            return plan.read_params(params, plan.away(plan.layer), layer)

        def tick(carry: Any, now: Tick) -> Any:
            x, full, stacks, total = carry
            take = lambda: plan.take_params(params, plan.layer, now.record or [], now.consume)  # noqa: E731
            full, next_full = self._turn(full, now, take)
            if tiled is None:
                y, added, values, next_full, landing = self._run_block(block, full, x, inputs, now, next_full, microbatches)
            else:
                x = microbatches.constrain(x)
                tiles = TileRunner(plan, microbatches, arrays, now, lambda carried: params)
                keys, given = microbatches.keys_of(inputs.keys, now.layer), inputs.given_all(now.layer, microbatches)
                y, added, values = tiled.forward(self.tracer.operands(full), x, keys, given, tiles.run)
                y, landing = microbatches.constrain(y), now.landing
            if residuals is not None:
                # x is the input of this layer. `ResidualPlan.split` takes them apart in this order.
                stacks = write_layer(residuals.records, stacks, now.write, [*jax.tree.leaves(x), *values])
            return (y, next_full, stacks, _accumulated(total, added, microbatches.count)), landing

        # With gather_ahead a tick is handed its layer gathered: the first one has no tick before it that does so.
        first = None
        if self.config.gather_ahead:
            first = plan.gather(plan.read_params(params, plan.layer, phase.columns["first"][0]))
        adds = self.tracer.abstract_added(x, inputs, microbatches.count)
        none = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), adds)
        carry = (x, first, stacks, none)
        y, _, stacks, total = run_phase(self.schedule.phase("forward"), phase, carry, tick, fetch=fetch)
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
        """Return a layer's output, what it adds to the loss, residuals, the next layer, gathered, and the record on its way."""
        params = self.tracer.block_tree(self.plan.without_tiles(full))
        # Several microbatches are a loop inside of the tick: in its body this work would be done for each of them.
        work = (next_full if now.takes_record else None, now.landing) if microbatches.count == 1 else None

        def run(x: Any, key: Any, context: Any) -> tuple[Any, Loss | None, list[Array], Any]:
            args = (params, x, key_of(key, now.layer), inputs.given(context, now.layer))
            (y, added, values), done = beside(block, args, work)
            return ActivationSpec(self.mesh).constrain(y), added, values, done

        y, added, values, done = microbatches.each(run, x, inputs.keys, inputs.context)
        return y, added, values, *_after(work, done, next_full, now)

    def _plain_block(self, params: Any, x: Any, key: Any, given: Given) -> tuple[Any, Loss | None, list[Array]]:
        out = call_block(self.model, params, x, key, given)
        return out.x, out.loss, []

    # --- backward ----------------------------------------------------------------------------------------------------------

    def backward(
        self,
        taker: GradsTaker[Any],
        state: TrainState,
        inputs: LayerInputs,
        arrays: ScheduleArrays,
        residuals: ResidualPlan,
        stacks: list[Array],
        dy: Any,
        carried: Any,
    ) -> tuple[Any, Any]:
        """Run the layers' derivatives, last layer first.

        Args:
          taker: of the gradients.
          state: before the step.
          inputs: what all layers read.
          arrays: of the schedule.
          residuals: what forward saved, and how.
          stacks: of it.
          dy: cotangent of the last output.
          carried: by the taker.

        Returns:
          The cotangent of the first layer's input, and `carried`.
        """
        plan, phase, ahead = self.plan, arrays.phase("backward"), self.config.gather_ahead
        num_params = len(plan.away(plan.layer))  # a fetched record: parameters, then residuals
        frozen = plan.frozen_stacks(state)

        def params(carried: Any) -> list[Any]:
            return [*taker.params(state, carried), *frozen]

        def fetch(carry: Any, layer: Array) -> list[Array]:
            # The stacks of residuals are only read in this phase, so the loop does not carry them.
            return plan.read_params(params(carry[3]), plan.away(plan.layer), layer) + residuals.fetch(stacks, layer)

        def tick(carry: Any, now: Tick) -> Any:
            dx, full, fetched, carried = carry
            record = now.record or []
            take = lambda: plan.take_params(params(carried), plan.layer, record[:num_params], now.consume)  # noqa: E731
            full, next_full = self._turn(full, now, take)
            # With gather_ahead the record taken is the next layer's, and so are its residuals.
            arrived = record[num_params:]
            fetched, next_fetched = (fetched, arrived if now.takes_record else fetched) if ahead else (arrived, None)
            values = residuals.read(stacks, fetched, now.layer)
            if residuals.tiled is None:
                grads, dx, next_full, landing = self._derive_block(residuals, full, values, inputs, dx, d_added, now, next_full)
            else:
                tiles = TileRunner(plan, self.microbatches, arrays, now, params, carried)
                grads, dx = self._derive_tiles(residuals, full, values, inputs, dx, d_added, tiles, partial(taker.use, state))
                landing, carried = now.landing, tiles.carried
            trained = full[: len(plan.blocks)]
            carried, landing = taker.use(state, carried, RecordGrads(now, plan.blocks, grads, trained, landing))
            return (dx, next_full, next_fetched, carried), landing

        # What the layers add is part of the loss as it is: its derivative is the scale.
        d_added = loss_scale(state) if residuals.block.adds else None
        first = fetched = None
        if ahead:
            # The layer of the first tick is gathered before the loop, and its residuals come with it.
            record = fetch((None, None, None, carried), phase.columns["first"][0])
            shards = plan.take_params(params(carried), plan.layer, record[:num_params], phase.columns["first"][0])
            first, fetched = plan.gather(shards), record[num_params:]
        # Backward reads optimizer state only if it updates.
        on_device = self.layout.device_layers if self.config.update == "in_backward" else 0
        dx, _, _, carried = run_phase(
            self.schedule.phase("backward"), phase, (dy, first, fetched, carried), tick,
            fetch=fetch, device_layers=on_device,
        )  # fmt: skip
        return dx, carried

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
    ) -> tuple[list[Array], Any, Any, Any]:
        """Return a layer's gradients, its input's, the next layer, gathered, and the record on its way."""
        plan, count = self.plan, self.microbatches.count
        params = self.tracer.block_tree(plan.without_tiles(full))
        work = (next_full if now.takes_record else None, now.landing) if count == 1 else None

        def derive(dx: Any, values: list[Array], key: Any, context: Any) -> tuple[list[Array], Any]:
            x, saved = residuals.split(values)
            given = inputs.given(context, now.layer)
            args = (params, ActivationSpec(self.mesh).constrain(x), key_of(key, now.layer), given, saved, dx, d_added)
            (g, dx), done = beside(residuals.block.backward, args, work)
            return plan.on_shards(jax.tree.leaves(g), plan.blocks), (ActivationSpec(self.mesh).constrain(dx), done)

        total = plan.zero_grads(plan.blocks) if count > 1 else []
        grads, (dx, done) = self.microbatches.fold(derive, total, dx, values, inputs.keys, inputs.context)
        next_full, landing = _after(work, done, next_full, now)
        # What uses the gradients waits for dx, so that they are reduced beside the products that are left.
        grads, dx = jax.lax.optimization_barrier((grads, dx))
        if count > 1:  # else what runs beside the microbatches' loop would start after it
            grads, next_full, landing = jax.lax.optimization_barrier((grads, next_full, landing))
        return grads, dx, next_full, landing

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
    ) -> tuple[list[Array], Any]:
        """Return the gradients of a layer's leaves that are no tiles, and its input's; `use` takes those of each tile."""
        plan, microbatches = self.plan, self.microbatches
        assert residuals.tiled is not None
        x, saved = residuals.split(values)
        layer = tiles.now.layer
        keys, given = microbatches.keys_of(inputs.keys, layer), inputs.given_all(layer, microbatches)
        grads, dx = residuals.tiled.backward(
            self.tracer.operands(full), microbatches.constrain(x), keys, given, saved, dx, microbatches.repeated(d_added),
            partial(tiles.run, use=use), plan.zero_grads(plan.blocks) if microbatches.count > 1 else [],
        )  # fmt: skip
        # What uses the gradients waits for dx, as in `_derive_block`.
        return jax.lax.optimization_barrier((plan.on_shards(grads, plan.blocks), microbatches.constrain(dx)))

    def _turn(self, full: Any, now: Tick, take: Callable[[], Any]) -> tuple[list[Array], Any]:
        """Return this tick's gathered layer, and what the next tick is handed: its own, gathered meanwhile, or None."""
        if not self.config.gather_ahead:
            return self.plan.gather(take()), None
        # A tick that takes no record hands its own layer on: what a loop carries keeps its shape.
        return full, (self.plan.gather(take()) if now.takes_record else full)


def _after(work: Any, done: Any, next_full: Any, now: Tick) -> tuple[Any, Any]:
    """Return the next gathered layer and the record on its way, from what ran beside a tick's products."""
    if work is None:
        return next_full, now.landing
    # A tick that takes no record had no gather to run beside its products: it hands on what it has.
    return (done[0] if work[0] is not None else next_full), done[1]


def _accumulated(total: Loss | None, added: Loss | None, count: int) -> Loss | None:
    """Return what the layers so far add to the loss, with one layer's, of `count` microbatches: a mean, and sums of metrics."""
    if total is None or added is None:
        return None
    if count > 1:
        added = Loss(jnp.mean(added.total.astype(jnp.float32)), None, summed(added.metrics))
    return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, added)


def _with_added(loss: Array, metrics: Any, added: Loss | None) -> tuple[Array, Any]:
    """Return the loss and the metrics of a head with those of the layers."""
    if added is None:
        return loss, metrics
    return loss + added.total, joined(metrics, dict(added.metrics))


def ending_of(plan: StreamedPlan, tx: optax.GradientTransformation) -> Ending[Any]:
    """Return the ending that a config asks for."""
    in_backward = plan.config.update == "in_backward"
    if plan.update is None:
        return WholeTree(plan, tx)
    if plan.host is None:
        return InBackward(plan, plan.update) if in_backward else ByLayers(plan, plan.update)
    if plan.config.delayed_update:
        return Delayed(plan, plan.update, plan.host)
    return HostInBackward(plan, plan.update, plan.host) if in_backward else OnHost(plan, plan.update, plan.host)
