"""The pipelined step: stages of layers along the mesh axis `pipe`, in one jit.

    ticks     forward and backward units of all stages, embedding and head    zerojax.pipeline.run
    update    each record's sums, reduced, go to the update policy, as in a streamed step

It is built from the parts of a streamed step (`zerojax.streamed`): traced blocks, residuals,
records, embedding and head, and update policies. What differs is the order, which is a table
(`zerojax.pipeline.schedule`), and that a record holds one layer of every stage
(`zerojax.state.wide`). Stages, microbatches and chunks follow GPipe (arXiv:1811.06965),
PipeDream-Flush (arXiv:2006.09503) and Megatron-LM (arXiv:2104.04473).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move
from zerojax.metrics import evaluation, with_own
from zerojax.models import (
    BLOCKS,
    LayeredModel,
    Loss,
    any_fault,
    divided,
    joined,
    per_layer_arrays,
    with_blocks,
)
from zerojax.optim import RecordUpdate
from zerojax.ordering import wait_for
from zerojax.pipeline.layers import StageLayers
from zerojax.pipeline.run import Carry, StepTicks
from zerojax.pipeline.schedule import (
    build_forward_ticks,
    build_pipeline_schedule,
    build_single_ticks,
)
from zerojax.pipeline.stages import Stages
from zerojax.pipeline.ticks import Ticks
from zerojax.sharding import join_microbatches, num_batch_shards
from zerojax.state import Index, StateRecords, TrainState, with_loss_scale
from zerojax.streamed import (
    BackwardResult,
    BlockTracer,
    EmbedHead,
    GradsAlone,
    HeadDone,
    LayerInputs,
    Microbatches,
    RecordGrads,
    ResidualPlan,
    StreamedPlan,
    Tick,
    UpdatePolicy,
    build_policy,
    check_names,
    loss_scale,
)
from zerojax.trees import Batch, ModelState, Params

Array = jax.Array
Scratch = dict[str, list[Any]]


class PipelineStep:
    """The step, and the evaluation, of a model whose layers are divided into stages.

    Attributes:
      update: the update by record, or None if full trees are updated on the device.
      plan: the records and their tiers.
      table: the order of forward and backward units.
      stages: operations on arrays over the stages.
      policy: consumer of the gradients.
      tracer: tracer of the block.
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
          model: the model; its layers are divided into stages.
          tx: the optimizer.
          state_records: how the state is stored, in records of one layer of every stage.
          update: the update by record, or None if full trees are updated on the device.
          gather: `gather(function, params, *args)` evaluates a function of stored parameters and
            gathers them on use; it is used for embedding and head.
        """
        layout = state_records.layout
        assert layout.order is not None
        self.model = model
        self.layout = layout
        self.config = layout.config
        self.mesh = layout.mesh
        self.update = update
        self.order = layout.order
        self.stages = Stages(self.mesh)
        self.plan = StreamedPlan(model, state_records, update)
        self.host = self.plan.host
        self.microbatches = Microbatches(self.mesh, self.config.num_microbatches)
        self.table = build_pipeline_schedule(
            self.order.num_stages, self.config.num_microbatches, self.order.num_chunks
        )
        self.schedule = self.table
        decoding = layout.decoding(model)
        self.embed_head = EmbedHead(decoding, self.plan, self.microbatches, gather)
        self.eval_embed_head = EmbedHead(decoding, self.plan, Microbatches(self.mesh, 1), gather)
        self.stack = self.plan.of_stacks[0]
        self.tracer = BlockTracer(self.stack, self.plan)
        self.policy: UpdatePolicy[Any] = build_policy(self.plan, tx)

    # --- requirements of a step, from shapes alone ------------------------------------------------

    def abstract_entered(self, abstract_microbatch: Batch) -> tuple[Any, LayerInputs]:
        """Return the shapes of the first layer's input and of the other inputs of the layers.

        Args:
          abstract_microbatch: shapes of one microbatch, or of the batch of an evaluation.
        """
        state = self.layout.abstract_arrays
        entered = self.eval_embed_head.abstract_inputs(
            self.layout.join(state), state.model_state, abstract_microbatch
        )
        _, x, inputs = entered[0]
        return x, inputs

    def plan_residuals(self, abstract_microbatch: Batch) -> ResidualPlan:
        """Return the values that forward saves of one layer of one microbatch.

        Args:
          abstract_microbatch: shapes of one microbatch.
        """
        x, inputs = self.abstract_entered(abstract_microbatch)
        residuals = self.tracer.plan_residuals(x, inputs, 1)
        check_names([residuals.block], self.config.saved_names, self.config.offloaded_names)
        return residuals

    def abstract_scratch(self, abstract_batch: Batch) -> Scratch:
        """Return no stacks in host memory."""
        del abstract_batch
        return {"grads": [], "residuals": []}

    def records_written(self, abstract_batch: Batch) -> Sequence[DiskRecords]:
        """Return no records: nothing is on disk."""
        del abstract_batch
        return ()

    def moves(self) -> tuple[Move, ...]:
        """Return no moves: nothing is on disk."""
        return ()

    def eval_moves(self, skips: bool = False) -> tuple[Move, ...]:
        """Return no moves: nothing is on disk."""
        del skips
        return ()

    def unsettled_eval_moves(self) -> tuple[Move, ...]:
        """Return no moves: nothing is on disk."""
        return ()

    def settle_moves(self) -> tuple[Move, ...]:
        """Return no moves: nothing is on disk."""
        return ()

    def grads_moves(self) -> tuple[Move, ...]:
        """Return no moves: nothing is on disk."""
        return ()

    def settle(self, state: TrainState) -> TrainState:
        """Return the state: it holds no pending update."""
        return state

    def updated_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index
    ) -> tuple[list[Array], list[Array]]:
        """Raise AssertionError: a state holds no pending update."""
        raise AssertionError(f"no update is pending: {leaf_ids}, {index}")

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Run one step.

        Args:
          state: the state; donated.
          batch: global batch.
          scratch: no stacks.

        Returns:
          ((state after the step, scratch), metrics).
        """
        result, metrics = self._derive(state, batch, self.policy)
        after, step_metrics = self.policy.end(result)
        after = with_loss_scale(state, after, any_fault(metrics))
        return (after, scratch), with_own(step_metrics, divided(metrics))

    def grads(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[Any, Any], Scratch]:
        """Return the loss and the gradients of one step, without an update.

        Args:
          state: the state.
          batch: global batch.
          scratch: no stacks.
        """
        policy = GradsAlone(self.plan)
        result, metrics = self._derive(state, batch, policy)
        return (evaluation(result.loss, divided(metrics)), policy.tree(result)), scratch

    def check_grads(self) -> None:
        """Raise NotImplementedError if the host updates."""
        if self.config.update_on != "device":
            raise NotImplementedError(
                f"program.grads is not supported with update_on={self.config.update_on!r}: it "
                "returns gradients that a step stores on the device; build a program with "
                "update_on='device'"
            )

    def _derive(
        self, state: TrainState, batch: Batch, policy: Any
    ) -> tuple[BackwardResult[Any], dict[str, Any]]:
        """Run all ticks, and pass the gradients to `policy`.

        Returns the result for the policy, and the model's own metrics, not divided yet.
        """
        token = jnp.int32(0) if self.host is None else self.host.first_token(state)
        ticks, carry = self._begin(state, batch)
        for phase in self.table.phases:
            if phase.num_ticks:
                body = partial(ticks.run, phase.name)
                carry, _ = jax.lax.scan(
                    lambda carry, tick, body=body: (body(carry, tick), None), carry, phase.ticks
                )
        count = self.config.num_microbatches
        loss = carry.loss / count
        metrics = dict(carry.metrics)
        if carry.added is not None:
            loss = loss + carry.added.total / count
            metrics = joined(metrics, dict(carry.added.metrics))
        return self._hand_over(state, carry, policy, loss, token), metrics

    def _begin(self, state: TrainState, batch: Batch) -> tuple[StepTicks, Carry]:
        """Return the ticks of a step, and the values before the first tick."""
        key = jax.random.fold_in(state.key, state.step) if self.model.stochastic else None
        batch, keys = self.microbatches.split(batch, key)
        if self.microbatches.count == 1:
            batch, keys = jax.tree.map(lambda a: a[None], (batch, keys))
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        x, inputs = self.abstract_entered(first)
        residuals = self.plan_residuals(first)
        params = self.layout.join(state)
        unstacked = self.embed_head.load(params)
        scale = loss_scale(state)
        context = None
        if self.model.context is not None:
            context = jax.lax.map(self.eval_embed_head.context, batch)
        layers = StageLayers(
            stages=self.stages,
            plan=self.plan,
            tracer=self.tracer,
            residuals=residuals,
            stacks=self.plan.pick(self.plan.weight_stacks(params[BLOCKS]), self.stack.layer),
            inputs=LayerInputs(keys, context, per_layer_arrays(self.tracer.model)),
            d_added=scale if residuals.block.adds else None,
        )
        ticks = StepTicks(
            stages=self.stages,
            layers=layers,
            embed_head=self.embed_head,
            unstacked=unstacked,
            batch=batch,
            keys=keys,
            scale=scale,
            total_weight=self._total_weight(unstacked, x, batch, keys),
            num_chunks=self.order.num_chunks,
        )
        added = self.tracer.abstract_added(x, inputs, 1)
        return ticks, ticks.first(x, self.table.num_slots, added)

    def _total_weight(
        self, unstacked: Params, x: Any, batch: Batch, keys: Array | None
    ) -> Array | None:
        """Return the weight of the loss over all microbatches, or None if the loss is a mean."""
        if self.microbatches.count == 1:
            return None
        y = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        return self.embed_head.batch_weight(unstacked, y, batch, keys)

    def _hand_over(
        self, state: TrainState, carry: Carry, policy: Any, loss: Array, token: Array
    ) -> BackwardResult[Any]:
        """Pass each record's gradients, reduced, to `policy`, the last record first."""
        plan = self.plan
        blocks = self.stack.blocks
        unstacked = plan.reduced(carry.unstacked, plan.unstacked)
        # Without this order, XLA would create the stacks before the ticks, beside the ring.
        zero, ticked = wait_for(jnp.int32(0), (carry.sums, carry.loss), plan.mesh)
        carry = carry._replace(sums=ticked[0])
        grads = [a + zero.astype(a.dtype) for a in plan.empty_grads()]
        carried = policy.begin(state, HeadDone(loss, unstacked, {}), grads, token)
        num_records = self.order.num_records

        def use(number: Array, carried: Any) -> Any:
            record = num_records - 1 - number
            sums = [
                jax.lax.dynamic_index_in_dim(stack, record, keepdims=False) for stack in carry.sums
            ]
            now = Tick(
                layer=record,
                consume=record,
                record=None,
                in_flight=None,
                takes_record=False,
                on_device=False,
            )
            grads = plan.reduced(sums, blocks)
            return policy.use(state, carried, RecordGrads(now, blocks, grads, [], None))[0]

        if blocks:
            carried = jax.lax.fori_loop(0, num_records, use, carried)
        return BackwardResult(state, loss, carried, unstacked, jnp.int32(0))

    # --- evaluations ------------------------------------------------------------------------------

    def readable(self, state: TrainState) -> Any:
        """Return the parameters, which `eval` and `apply` read."""
        return self.layout.join(state)

    def eval(self, params: Params, model_state: ModelState, batch: Batch) -> Any:
        """Return the loss of a batch; if there are metrics, a dict of both.

        Microbatches pass through the layers (`_count_microbatches`), without random keys. The loss
        is of the whole batch.
        """
        del model_state
        ticks, y, added = self._eval_layers(params, batch)
        # As in a step, all stages work on the head, each on its part of the tokens.
        y = ticks.spread(y)
        loss, _ = self.eval_embed_head.head(ticks.unstacked, y, batch, None, None)
        value = with_blocks(loss, None).value()
        metrics = dict(loss.metrics)
        if added is not None:
            value = value + added.total
            metrics = joined(metrics, dict(added.metrics))
        return evaluation(value, divided(metrics))

    def apply(self, params: Params, model_state: ModelState, batch: Batch) -> Any:
        """Return the result of the model's `predict` for a batch.

        Microbatches pass through the layers, without random keys.
        """
        del model_state
        ticks, y, _ = self._eval_layers(params, batch)
        return self.eval_embed_head.predict(ticks.unstacked, y, batch, None)

    def _count_microbatches(self, batch: Batch) -> int:
        """Return the number of microbatches in which an evaluation's batch passes the layers.

        It is a step's, or 1 if the batch does not divide by it, or if the blocks add to the loss:
        their additions, such as a balance of experts, are of the whole batch.
        """
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
        x, inputs = self.abstract_entered(abstract)
        sizes = {a.shape[0] for a in jax.tree.leaves(batch) if a.ndim}
        count = self.config.num_microbatches
        parts = count * num_batch_shards(self.mesh)
        if len(sizes) != 1 or sizes.pop() % parts:
            return 1
        return count if self.tracer.abstract_added(x, inputs, 1) is None else 1

    def _eval_layers(self, params: Params, batch: Batch) -> tuple[StepTicks, Any, Loss | None]:
        """Return the ticks, the last layer's output for the whole batch, and the addition."""
        microbatches = Microbatches(self.mesh, self._count_microbatches(batch))
        count = microbatches.count
        batch, _ = microbatches.split(batch, None)
        if count == 1:
            batch = jax.tree.map(lambda a: a[None], batch)
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        x, inputs = self.abstract_entered(first)
        inputs = dataclasses.replace(inputs, keys=None)
        context = None
        if self.model.context is not None:
            context = jax.lax.map(self.eval_embed_head.context, batch)
        stages = self.stages
        layers = StageLayers(
            stages=stages,
            plan=self.plan,
            tracer=self.tracer,
            residuals=self.tracer.plan_residuals(x, inputs, 1),
            stacks=self.plan.pick(self.plan.weight_stacks(params[BLOCKS]), self.stack.layer),
            inputs=LayerInputs(None, context, per_layer_arrays(self.tracer.model)),
        )
        ticks = StepTicks(
            stages=stages,
            layers=layers,
            embed_head=self.eval_embed_head,
            unstacked=self.eval_embed_head.load(params),
            batch=batch,
            keys=None,
            scale=jnp.float32(1),
            total_weight=None,
            num_chunks=self.order.num_chunks,
        )
        zeros = jax.tree.map(lambda a: jnp.zeros((stages.count, *a.shape), a.dtype), x)
        added = self.tracer.abstract_added(x, inputs, 1)
        added = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), added)
        # Each stage keeps its own outputs, so the last stage's are sent once.
        outputs = jax.tree.map(
            lambda a: jnp.zeros((stages.count, count, *a.shape[1:]), a.dtype), zeros
        )

        def run(carry: Any, tick: Ticks) -> tuple[Any, None]:
            x, outputs, added = carry
            x, y, added = ticks.evaluate(x, tick, added)
            place = jnp.maximum(tick.meets_head, 0)

            def put(stack: Array, a: Array) -> Array:
                old = jax.lax.dynamic_index_in_dim(stack, place, 1, keepdims=False)
                a = jnp.where(tick.meets_head >= 0, a, old)
                return jax.lax.dynamic_update_index_in_dim(stack, a, place, 1)

            return (x, jax.tree.map(put, outputs, y), added), None

        if count > 1:
            table = build_forward_ticks(self.table)
        else:
            table = build_single_ticks(stages.count, self.order.num_chunks)
        outputs = stages.map(jax.vmap(self.plan.stream.constrain))(outputs)
        carry = (layers.constrain(zeros), outputs, added)
        (_, outputs, added), _ = jax.lax.scan(run, carry, table)
        y = join_microbatches(jax.tree.map(lambda a: a[-1], outputs))
        return ticks, self.plan.stream.constrain(y), added
