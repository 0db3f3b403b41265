"""The streamed step: the layers of a LayeredModel visit the device one after another.

They do so in explicit loops inside one jit:

    forward    for t:  p = take(l[t]); start fetching l[t+d];  x[l+1] = block(all_gather(p), x[l]);
                       save x[l]
    head       loss, dx = value_and_grad(head)
    backward   for t:  p, x = take(l[t]); ...;  g, dx = vjp(block)(dx);  g = reduce_scatter(g)
               update layer l here, with its optimizer state fetched along with it (in_backward), or
               store g
    update     for t:  g, w, s = take(l[t]);  unscale and clip g;  update;  write back

The step never differentiates through a transfer: backward is a separate loop, which takes the
derivative of one layer at a time (`residuals`). Order and prefetches are operations of
`host_offload.schedule`. Every tier runs the same loops (ZeRO-Infinity, arXiv:2104.07857, section
5), and the tier of a record does not change any number.

Microbatches run inside a tick. A layer is fetched and gathered once in forward and once in backward
for all of them, its gradient is complete at the end of its tick, and its optimizer state crosses
the link once per step. The price is that the layers' inputs of all microbatches are kept at the
same time; `activations="pinned_host"` moves them off the device.

If a block has stacks of tiles, a layer's record holds its other leaves, and each tile is a record
of its own. A tile is fetched, gathered, used and released inside the layer's tick, where the block
loops over tiles (`tiled_block`). Its gradient is also taken there, so no device ever holds a full
layer (memory-centric tiling, ZeRO-Infinity, section 5.1.3).

With `gather_ahead` a tick gathers the next tick's layer while it computes its own.

Several stacks, such as an encoder and a decoder, have separate loops (`loops`), which run one after
another: forward from the first stack to the last, backward from the last to the first. A stack's
`enter` computes its input from the output of the previous stack. Backward recomputes it and derives
it; a context's cotangents are summed over the stack's layers. Segments of a stack, each of which
saves different values for backward (`zerojax.state.runs`), have separate loops and share the
stack's context.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move, StepPlan
from zerojax.metrics import evaluation, with_own
from zerojax.models import (
    BLOCKS,
    LayeredModel,
    Loss,
    Metrics,
    any_fault,
    divided,
    floating,
    joined,
    together,
    with_blocks,
)
from zerojax.optim import RecordUpdate
from zerojax.ordering import wait_for
from zerojax.state import (
    Index,
    RecordSpec,
    StateRecords,
    TrainState,
    with_loss_scale,
    with_model_state,
)
from zerojax.streamed.activations import ResidualPlan, Scratch
from zerojax.streamed.embed_head import EmbedHead, HeadResult, embed_head_state
from zerojax.streamed.loops import Cotangents, SavedRun, StackLoops
from zerojax.streamed.microbatches import LayerInputs, Microbatches
from zerojax.streamed.plan import StreamedPlan, moves
from zerojax.streamed.residuals import check_names
from zerojax.streamed.traced_block import TracedBlock
from zerojax.streamed.update_policies.in_backward import UpdateInBackward
from zerojax.streamed.update_policies.in_forward import UpdateInForward
from zerojax.streamed.update_policies.in_forward_on_host import HostUpdateInForward
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    Begun,
    GradientSink,
    HeadDone,
    ParamSource,
    StoredParams,
    UpdatePolicy,
    loss_scale,
)
from zerojax.streamed.update_policies.on_host import Delayed, HostUpdateInBackward, OnHost
from zerojax.streamed.update_policies.stored import GradsAlone, UpdateByLayer, UpdateWholeTree
from zerojax.trees import Batch, Context, ModelState, Params, Tree

Array = jax.Array


class _Pass(NamedTuple):
    """Results of forward through one run of layers that backward needs.

    Attributes:
      loops: loops over the run.
      y: input of the stack's `enter`: the output of the previous stack, or of the embedding, of all
        microbatches.
      saved: the inputs of the layers, and the arrays that were saved.
    """

    loops: StackLoops
    y: Tree
    saved: SavedRun


class _ForwardResult(NamedTuple):
    """Results of forward through the embedding and all layers.

    Attributes:
      state: the state after forward, which may have updated it.
      y: output of the last layer.
      passes: results of each run of layers, in order.
      added: the addition to the loss of each run of layers, or None, in order.
      states: states of embedding and head before each microbatch's embedding.
      read_by_head: the same states after it.
      begin: i32[] zero, known when backward may begin.
      token: token that orders the callbacks of the host update.
    """

    state: TrainState
    y: Tree
    passes: list[_Pass]
    added: list[Loss | None]
    states: ModelState
    read_by_head: ModelState
    begin: Array
    token: Array


class _Derived(NamedTuple):
    """Results of forward and backward of a step.

    Attributes:
      backward: the result for the update policy.
      metrics: the model's own metrics, not divided yet.
      embed_head_state: state of embedding and head after the step.
      scratch: the stacks in host memory to return.
    """

    backward: BackwardResult[Any]
    metrics: Metrics
    embed_head_state: ModelState
    scratch: Scratch


class StreamedStep:
    """The step, and the evaluation, of a model whose layers are streamed.

    Attributes:
      update: the update by record, or None if full trees are updated on the device.
      plan: the records, their tiers, and the schedule.
      microbatches: microbatches of a step; an evaluation has one.
      unstacked: embedding and head.
      policy: consumer of the gradients.
      loops: loops over each run of layers, in order.
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
          model: the model whose layers are streamed.
          tx: the optimizer.
          state_records: how the state is stored.
          update: the update by record, or None if full trees are updated on the device.
          gather: `gather(function, params, *args)` evaluates a function of stored parameters and
            gathers them on use; it is used for embedding and head, since the step gathers layers
            itself.
        """
        layout = state_records.layout
        self.model = model
        self.layout = layout
        self.config = layout.config
        self.mesh = layout.mesh
        self.update = update
        self.plan = StreamedPlan(model, state_records, update)
        self.host = self.plan.host
        self.schedule = self.plan.schedule
        self.microbatches = Microbatches(self.mesh, self.config.num_microbatches)
        self.embed_head = EmbedHead(
            self.plan.layout.decoding(model), self.plan, self.microbatches, gather
        )
        self.eval_embed_head = EmbedHead(
            self.plan.layout.decoding(model), self.plan, Microbatches(self.mesh, 1), gather
        )
        self.policy: UpdatePolicy[Any] = build_policy(self.plan, tx)
        self.loops = tuple(
            StackLoops(self.plan, stack, self.microbatches) for stack in self.plan.of_stacks
        )

    def of_model(self, model: LayeredModel, gather: Callable[..., Any]) -> "StreamedStep":
        """Return a step that evaluates another model with the same parameters.

        Args:
          model: the model, with the stacks of this step's model.
          gather: evaluates embedding and head, as for this step.
        """
        step = copy.copy(self)
        step.model = model
        step.plan = self.plan.of_model(model)
        step.eval_embed_head = EmbedHead(
            self.layout.decoding(model), step.plan, Microbatches(self.mesh, 1), gather
        )
        step.loops = tuple(
            StackLoops(step.plan, stack, self.microbatches) for stack in step.plan.of_stacks
        )
        return step

    # --- requirements of a step, from shapes alone ------------------------------------------------

    def abstract_residuals(self, abstract_batch: Batch) -> list[ResidualPlan]:
        """Return the arrays that forward saves of one layer of each run, from a batch's shapes."""
        state = self.layout.abstract_arrays
        entered = self.embed_head.abstract_inputs(
            self.layout.join(state), state.model_state, abstract_batch
        )
        plans = [
            loops.tracer.plan_residuals(x, inputs, self.microbatches.count)
            for loops, (_, x, inputs) in zip(self.loops, entered, strict=True)
        ]
        self._check_names([residuals.block for residuals in plans])
        return plans

    def _check_names(self, blocks: Sequence[TracedBlock]) -> None:
        """Raise ValueError for a name to keep that no block marks.

        A segment's names must be marked by the segment's own block.
        """
        runs = [stack.run for stack in self.plan.of_stacks]
        if not runs[0].is_segment:
            check_names(blocks, self.config.saved_names, self.config.offloaded_names)
            return
        for run, block in zip(runs, blocks, strict=True):
            check_names(
                [block], run.segment.saved_names, run.segment.offloaded_names, f" of {run.name}"
            )

    def abstract_entered(self, abstract_batch: Batch) -> list[Any]:
        """Return the shapes of (input, context) of each stack's `enter`, from a batch's shapes."""
        state = self.layout.abstract_arrays
        entered = self.embed_head.abstract_inputs(
            self.layout.join(state), state.model_state, abstract_batch
        )
        pairs = zip(self.plan.of_stacks, entered, strict=True)
        arguments = list[Any]()
        for stack, (before, _, inputs) in pairs:
            if stack.model.enter is not None and stack.run.starts_stack:
                arguments.append((before, inputs.context))
        return arguments

    def abstract_scratch(self, abstract_batch: Batch) -> Scratch:
        """Return shapes and shardings of the stacks in host memory that live inside a step."""
        plan = self.plan
        saved = list[Any]()
        pairs = zip(self.loops, self.abstract_residuals(abstract_batch), strict=True)
        for loops, residuals in pairs:
            lead = (loops.stack.num_layers,)
            for i in residuals.in_memory:
                array = residuals.arrays[i]
                saved.append(plan.abstract_stack(array.record, array.abstract, lead))
        grads = plan.abstract_grads() if plan.grads_in_memory else []
        return {"grads": grads, "residuals": saved}

    def records_written(self, abstract_batch: Batch) -> list[DiskRecords]:
        """Return the records on disk that a step writes before it reads them."""
        if self.layout.disk is None:
            return []
        records = list[RecordSpec]()
        for residuals in self.abstract_residuals(abstract_batch):
            records += residuals.records
        if self.config.update != "in_forward":
            records += self.plan.grads
        on_disk = [r.disk_records for r in records]
        return list(dict.fromkeys(disk for disk in on_disk if disk is not None))

    def steps(self, kept: Mapping[str, Mapping[str, int]] | None = None) -> StepPlan:
        """Return all operations of a step, in order; see `StreamedPlan.steps`."""
        return self.plan.steps(
            [loops.tracer.tile_loops() for loops in self.loops], self.policy.unstacked_first, kept
        )

    def moves(self) -> tuple[Move, ...]:
        """Return the disk reads and writes of a step, in order."""
        return moves(self.plan, self.steps())

    def eval_moves(self, skips: bool = False) -> tuple[Move, ...]:
        """Return the disk reads of an evaluation, in order.

        An evaluation reads parameters alone. A step's forward also writes activations.

        Args:
          skips: whether tiles are left out that a loop does not need. The result lacks the tiles of
            such loops.
        """
        steps = self.plan.reading_steps(
            [loops.tracer.eval_loops(skips=skips) for loops in self.loops]
        )
        forward_moves = moves(self.plan, steps, ("embed", "forward"))
        reads = ("params", "frozen")
        return tuple(move for move in forward_moves if _kind(move) in reads)

    def unsettled_eval_moves(self) -> tuple[Move, ...]:
        """Return the disk reads of an evaluation that applies a pending update, in order."""
        steps = self.plan.steps(
            [loops.tracer.eval_loops(updates=True) for loops in self.loops],
            self.policy.unstacked_first,
        )
        updated = moves(self.plan, steps, ("unstacked",))
        # The updated parameters of embedding and head are not read again.
        embed = (move for move in moves(self.plan, steps, ("embed",)) if _kind(move) == "frozen")
        forward = moves(self.plan, steps, ("forward",))
        reads = (*updated, *embed, *forward)
        return tuple(m for m in reads if not m.writes and _kind(m) != "activations")

    def settle_moves(self) -> tuple[Move, ...]:
        """Return the disk moves of `settle`, in order: those of the updates in a step."""
        steps = self.plan.steps(
            [loops.tracer.settle_loops() for loops in self.loops], self.policy.unstacked_first
        )
        updates = moves(self.plan, steps, ("unstacked", "forward"))
        return tuple(m for m in updates if _kind(m) not in ("activations", "frozen"))

    def grads_moves(self) -> tuple[Move, ...]:
        """Return the disk moves of `grads`, in order: forward and backward alone.

        The step must keep its gradients on the device.
        """
        return moves(self.plan, self.steps(), ("embed", "forward", "backward"))

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Run one step.

        Args:
          state: the state; donated.
          batch: global batch.
          scratch: stacks in host memory that live from forward to update; donated and returned.

        Returns:
          ((state after the step, scratch), metrics).
        """
        batch, keys = self._split(state, batch)
        derived = self._derive(state, batch, keys, scratch, self.policy, self._first_token(state))
        after, metrics = self.policy.end(derived.backward)
        after = with_loss_scale(state, after, any_fault(derived.metrics))
        if state.model_state is not None:
            model_state = {**state.model_state, **derived.embed_head_state}
            after = with_model_state(state, after, model_state)
        return (after, derived.scratch), with_own(metrics, divided(derived.metrics))

    def grads(
        self, state: TrainState, batch: Batch, scratch: Scratch
    ) -> tuple[tuple[Any, Any], Scratch]:
        """Return the loss and the gradients of one step, without an update.

        Args:
          state: the state.
          batch: global batch.
          scratch: stacks in host memory that live from forward to backward.

        Returns:
          ((loss, gradients), scratch). The loss has the form that `eval` returns; the gradients are
          unscaled and float32.
        """
        policy = GradsAlone(self.plan)
        batch, keys = self._split(state, batch)
        derived = self._derive(state, batch, keys, scratch, policy, jnp.int32(0))
        loss = evaluation(derived.backward.loss, divided(derived.metrics))
        return (loss, policy.tree(derived.backward)), derived.scratch

    def settle(self, state: TrainState) -> TrainState:
        """Return the state with the update applied that the previous step left pending.

        Args:
          state: a state with a pending update; donated.
        """
        assert isinstance(self.policy, UpdateInForward)
        begun = self.policy.begin_step(state, self._first_token(state))
        source, carried = self.policy.settling_source(begun)
        begin = begun.begin
        for loops in self.loops:
            carried = loops.settle(source, begin, carried)
            # The next run's first fetches come after this run.
            begin, carried = jax.lax.optimization_barrier((begin, carried))
        state, _ = self.policy.end_forward(begun, carried)
        assert state.pending is not None
        applied = dataclasses.replace(state.pending, ready=jnp.zeros_like(state.pending.ready))
        return dataclasses.replace(state, pending=applied)

    def updated_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index
    ) -> tuple[list[Array], list[Array]]:
        """Return a record's float32 weights and optimizer state after its pending update."""
        assert isinstance(self.policy, UpdateInForward)
        return self.policy.updated_record(state, leaf_ids, index)

    def check_grads(self) -> None:
        """Raise NotImplementedError if gradients are not stored on the device."""
        required = {"update": "after_backward", "update_on": "device", "grads": "device"}
        for name, needed in required.items():
            value = getattr(self.config, name) or needed
            if value != needed:
                raise NotImplementedError(
                    f"program.grads is not supported with {name}={value!r}: it returns gradients "
                    "that a step stores on the device; build a program with "
                    f"{name}={needed!r} if they fit"
                )

    def _split(self, state: TrainState, batch: Batch) -> tuple[Batch, Array | None]:
        """Return the microbatches of a step and their random keys."""
        # The key depends only on (key, step): a restored run draws the same masks as the original
        # run.
        key = jax.random.fold_in(state.key, state.step) if self.model.stochastic else None
        return self.microbatches.split(batch, key)

    def _derive(
        self,
        state: TrainState,
        batch: Batch,
        keys: Array | None,
        scratch: Scratch,
        sink: GradientSink[Any],
        token: Array,
    ) -> _Derived:
        """Run forward, head and backward, and pass the gradients to `sink`.

        Its callbacks wait for `token`.
        """
        begun = self.policy.begin_step(state, token)
        # Before the layers, in the order of the disk's read-ahead (`moves`).
        unstacked = self.embed_head.load(begun.params)
        forward = self._forward(begun, unstacked, batch, keys, scratch)
        state = forward.state
        y, loaded = sink.load_unstacked(state, forward.y)
        head = self.embed_head.head_and_grads(
            unstacked, y, batch, keys, loss_scale(state), forward.read_by_head
        )
        loss, metrics = _with_added(head.loss, head.metrics, together(forward.added))
        carried = sink.begin(
            state, HeadDone(loss, head.grads, loaded), scratch["grads"], forward.token
        )
        g_unstacked, begin, carried = self._backward(
            state, unstacked, batch, keys, forward, head, sink, carried
        )
        # Scratch is returned in the order in which it was passed in, so that the next step gets the
        # same host memory.
        in_memory = list[Array]()
        for done in forward.passes:
            in_memory += [done.saved.stacks[i] for i in done.saved.residuals.in_memory]
        scratch = {"grads": sink.grads(carried), "residuals": in_memory}
        result = BackwardResult(state, loss, carried, g_unstacked, begin)
        return _Derived(result, metrics, head.state, scratch)

    def _forward(
        self,
        begun: Begun,
        unstacked: Params,
        batch: Batch,
        keys: Array | None,
        scratch: Scratch,
    ) -> _ForwardResult:
        """Run the embedding and all layers.

        Args:
          begun: the result of the policy's `begin_step`.
          unstacked: the leaves of embedding and head, sharded.
          batch: the microbatches.
          keys: their random keys, or None.
          scratch: stacks in host memory.
        """
        begin = begun.begin
        model_state = begun.state.model_state
        before = embed_head_state(model_state)
        y, states, read_by_head = self.embed_head.embed_all(unstacked, batch, keys, before)
        in_memory = list(scratch["residuals"])
        passes = list[_Pass]()
        all_added = list[Loss | None]()
        entered = y
        inputs = LayerInputs()
        source, carried = self.policy.source(begun)
        for loops in self.loops:
            # The first fetches of these layers may only overlap the end of the previous layers.
            if passes:
                begin, y = wait_for(begin, y, self.mesh)
            x = y
            if loops.stack.run.starts_stack:
                entered = y
                x, context = self.embed_head.enter(loops.stack, unstacked, y, batch, keys)
                inputs = self.embed_head.inputs(loops.stack, context, keys, model_state)
            residuals = loops.tracer.plan_residuals(x, inputs, self.microbatches.count)
            num_in_memory = len(residuals.in_memory)
            stacks = loops.tracer.stacks(residuals, in_memory[:num_in_memory])
            in_memory = in_memory[num_in_memory:]
            done, carried = loops.forward(source, x, inputs, begin, residuals, stacks, carried)
            y = done.y
            passes.append(_Pass(loops, entered, SavedRun(inputs, residuals, done.stacks)))
            all_added.append(done.added)
        # Backward's first fetches may overlap the head, but not the layers.
        begin, y = wait_for(begin, y, self.mesh)
        state, token = self.policy.end_forward(begun, carried)
        return _ForwardResult(state, y, passes, all_added, states, read_by_head, begin, token)

    def _backward(
        self,
        state: TrainState,
        unstacked: Params,
        batch: Batch,
        keys: Array | None,
        forward: _ForwardResult,
        head: HeadResult,
        sink: GradientSink[Any],
        carried: Any,
    ) -> tuple[list[Array], Array, Any]:
        """Run backward through all layers and the embedding, and pass gradients to `sink`.

        Args:
          state: the state before the step.
          unstacked: the leaves of embedding and head, sharded.
          batch: the microbatches.
          keys: their random keys, or None.
          forward: results of forward.
          head: results of the head.
          sink: consumer of the layers' gradients.
          carried: the value that `sink` carries through backward.

        Returns:
          The gradients of the unstacked leaves; i32[] zero, known when the update may begin; and
          `carried`.
        """
        begin = forward.begin
        g_unstacked = head.grads
        cotangents = Cotangents(head.dy, None)
        for done in reversed(forward.passes):
            if done is not forward.passes[-1]:
                begin, dx = wait_for(begin, cotangents.dx, self.mesh)
                cotangents = cotangents._replace(dx=dx)
            stack = done.loops.stack
            cotangents, carried = done.loops.backward(
                sink, state, done.saved, begin, cotangents, carried
            )
            if stack.run.starts_stack:
                d_context = _as_context(cotangents.context, done.saved.inputs.context)
                dx, g_unstacked = self.embed_head.enter_grads(
                    stack,
                    unstacked,
                    done.y,
                    batch,
                    keys,
                    Cotangents(cotangents.dx, d_context),
                    g_unstacked,
                )
                cotangents = Cotangents(dx, None)
        g_unstacked = self.embed_head.embed_grads(
            unstacked, batch, keys, cotangents.dx, forward.states, g_unstacked
        )
        return g_unstacked, begin, carried

    def readable(self, state: TrainState) -> Any:
        """Return what `eval` and `apply` read: the parameters, or a state with a pending update."""
        if isinstance(self.policy, UpdateInForward):
            assert state.pending is not None
            if bool(state.pending.ready):
                return dataclasses.replace(state, loss_scale=None, model_state=None)
        return self.layout.join(state)

    def eval(self, params: Params | TrainState, model_state: ModelState, batch: Batch) -> Any:
        """Return the loss of a batch; if there are metrics, a dict of both.

        The batch is one microbatch, without random keys.
        """
        unstacked, y, added, state = self._eval_layers(params, model_state, batch)
        loss, _ = self.eval_embed_head.head(unstacked, y, batch, None, state)
        value, metrics = _with_added(with_blocks(loss, None).value(), dict(loss.metrics), added)
        return evaluation(value, divided(metrics))

    def apply(self, params: Params | TrainState, model_state: ModelState, batch: Batch) -> Any:
        """Return the result of the model's `predict` for a batch.

        The batch is one microbatch, without random keys. Tiles that a loop does not need, such as
        groups of experts that no token visits, are not read.
        """
        unstacked, y, _, state = self._eval_layers(params, model_state, batch, skips=True)
        return self.eval_embed_head.predict(unstacked, y, batch, state)

    def _eval_layers(
        self,
        params: Params | TrainState,
        model_state: ModelState,
        batch: Batch,
        *,
        skips: bool = False,
    ) -> tuple[Any, Any, Loss | None, Any]:
        """Return (leaves of embedding and head, last layer's output, loss addition, state).

        The loss addition is the layers', and the state belongs to embedding and head.
        """
        source: ParamSource[Any]
        carried = None
        if isinstance(params, TrainState):
            assert isinstance(self.policy, UpdateInForward)
            params, source, carried = self.policy.read_source(params)
        else:
            source = StoredParams.of_blocks(self.plan, params[BLOCKS])
        unstacked = self.embed_head.load(params)
        y, state = self.eval_embed_head.embed(unstacked, batch, None, embed_head_state(model_state))
        all_added = list[Loss | None]()
        inputs = LayerInputs()
        begin = jnp.int32(0)
        for loops in self.loops:
            if all_added:
                begin, y = wait_for(begin, y, self.mesh)
            if loops.stack.run.starts_stack:
                y, context = self.eval_embed_head.enter(loops.stack, unstacked, y, batch, None)
                inputs = self.eval_embed_head.inputs(loops.stack, context, None, model_state)
            # An evaluation saves nothing, so there are no stacks to fill.
            done, carried = loops.forward(source, y, inputs, begin, None, [], carried, skips=skips)
            y = done.y
            all_added.append(done.added)
        return unstacked, y, together(all_added), state

    def _first_token(self, state: TrainState) -> Array:
        """Return the token that orders the callbacks of the host update.

        Also starts the delayed update that the previous step left, if any.
        """
        if self.host is None:
            return jnp.int32(0)
        token = self.host.first_token(state)
        if not self.config.delayed_update:
            return token
        assert state.pending is not None
        return self.host.start(self.plan.state_records.flat(state), state.pending, token)


def _kind(move: Move) -> str:
    """Return the kind of a move's records, without the name of their stack, group or leaf."""
    return move.kind.split(".")[0]


def _as_context(d_context: Tree, context: Context) -> Tree:
    """Return a context's cotangents, summed in float32, in the dtypes of its leaves."""
    if d_context is None:
        return None
    return jax.tree.map(lambda d, a: d.astype(a.dtype), d_context, floating(context))


def _with_added(loss: Array, metrics: Metrics, added: Loss | None) -> tuple[Array, Metrics]:
    """Return the head's loss and metrics with the layers' additions."""
    if added is None:
        return loss, metrics
    return loss + added.total, joined(metrics, dict(added.metrics))


def build_policy(plan: StreamedPlan, tx: optax.GradientTransformation) -> UpdatePolicy[Any]:
    """Return the update policy that a config asks for."""
    in_backward = plan.config.update == "in_backward"
    if plan.config.update == "in_forward":
        assert plan.update is not None
        if plan.host is not None:
            return HostUpdateInForward(plan, plan.update, plan.host)
        return UpdateInForward(plan, plan.update)
    if plan.update is None:
        return UpdateWholeTree(plan, tx)
    if plan.host is None:
        policy = UpdateInBackward if in_backward else UpdateByLayer
        return policy(plan, plan.update)
    if plan.config.delayed_update:
        return Delayed(plan, plan.update, plan.host)
    policy_on_host = HostUpdateInBackward if in_backward else OnHost
    return policy_on_host(plan, plan.update, plan.host)
