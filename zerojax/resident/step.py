"""The resident step: all layers stay on the device for the full step.

Only the optimizer state may be stored elsewhere.

    for each microbatch:                      a scan; a single pass if there is one microbatch
        loss, g = value_and_grad(loss)(params)    parameters gathered on use (stage 3)
        g: reduce_scatter to its shard            where it is computed (stages 1 to 3), in
                                                  reduce_dtype
        sum += g                                  float32, sharded; with reduce_every="step",
                                                  each device's own sum
    g = reduce_scatter(sum)                   once, with reduce_every="step"
    norm, clip, tx.update, apply              on shards: full trees, or leaf by leaf if the
                                              state is off the device
    params = cast(master)                     all_gather below stage 3

The caller passes in how parameters are gathered. The update is from `zerojax.optim`. The stage's
rules come only from `zerojax.sharding.STAGES`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from host_offload.engine import DiskRecords
from host_offload.schedule import Move, build_schedule, list_moves, stacked_schedule
from zerojax.activations import Splits, keep_products
from zerojax.grads import float32_grads, reduced, unreduced_grads, unreduced_sharding
from zerojax.metrics import evaluation, with_own
from zerojax.models import (
    OVERWRITTEN,
    LayeredModel,
    Metrics,
    Model,
    Objective,
    Terms,
    any_fault,
    build_objective,
    build_predict,
    divided,
    summed,
    whole_weight,
)
from zerojax.optim import (
    HostUpdate,
    RecordUpdate,
    Update,
    build_update,
    update_by_record,
    update_on_host,
)
from zerojax.resident.segments import keep_by_segments
from zerojax.sharding import STAGES, ActivationSpec, count_rows, split_microbatches
from zerojax.state import (
    Index,
    Layout,
    Leaf,
    StateRecords,
    TrainState,
    join_frozen,
    steps_of_leaves,
    with_loss_scale,
    with_model_state,
)
from zerojax.trees import Batch, Grads, ModelState, Params

Array = jax.Array


class ResidentStep:
    """The equations of one resident step of a model, an optimizer and a layout.

    Attributes:
      records: how the state is stored.
      update: the leaf-by-leaf update if the optimizer state is stored off the device, else None.
      host: the update on the host, or None.
      schedule: the order in which layers are computed; a Model counts as one layer.
      objective: the loss as a function of unsharded parameters, before any gather is inserted.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        records: StateRecords,
        update: RecordUpdate | None,
        gather: Callable[..., Any],
    ) -> None:
        """Build the step.

        Args:
          model: the model.
          tx: the optimizer.
          records: how the state is stored.
          update: the leaf-by-leaf update, or None if full trees are updated.
          gather: evaluates the model: `gather(function, params, *args)` takes parameters as stored
            and gathers them.
        """
        self.model = model
        self.tx = tx
        self.records = records
        self.update = update
        self._gather = gather
        self.layout = layout = records.layout
        self.host: HostUpdate | None = None
        if update is not None and layout.config.update_on == "host":
            # `build_grads` returns means, so the kernels have nothing to divide by.
            self.host = HostUpdate(update, stashes=False, summed=1)
        self.objective = plain_objective(model, layout)
        self._stored_objective = self.objective
        if layout.encodings:
            self._stored_objective = stored_objective(model, layout)
        layers = layout.stack_layers or {"": 1}  # a Model counts as one layer
        stream = ""
        if layout.stack_layers:
            stream = str(ActivationSpec(layout.mesh, is_stream=layout.config.sequence_parallel))
        schedules = {name: build_schedule(num_layers) for name, num_layers in layers.items()}
        schedules = {name: dataclasses.replace(s, stream=stream) for name, s in schedules.items()}
        self.stacks = {
            name: dataclasses.replace(s, phases=s.phases[:2]) for name, s in schedules.items()
        }
        last = list(schedules)[-1]
        pieces = {} if update is None else update.num_pieces()
        leaves = None if update is None else steps_of_leaves(records, pieces).unstacked["unstacked"]
        phases = tuple(
            dataclasses.replace(phase, leaves=leaves if phase.name == "update" else None)
            for phase in schedules[last].phases
        )
        schedules[last] = dataclasses.replace(schedules[last], phases=phases)
        self.schedule = stacked_schedule(schedules)

    def step(
        self, state: TrainState, batch: Batch, scratch: dict[str, list[Any]]
    ) -> tuple[tuple[TrainState, dict[str, list[Any]]], dict[str, Array]]:
        """Run one step; `scratch` is returned unchanged."""
        result = build_grads(self.model, self.layout, self.evaluated)(state, batch)
        after, metrics = self._update()(state, result.loss, result.grads)
        after = with_loss_scale(state, after, any_fault(result.metrics))
        return (with_model_state(state, after, result.model_state), scratch), with_own(
            metrics, divided(result.metrics)
        )

    def _update(self) -> Update:
        if self.host is not None:
            return update_on_host(self.host)
        if self.update is None:
            return build_update(self.tx, self.layout)
        return update_by_record(self.update)

    def evaluated(
        self, params: Params, batch: Batch, key: Any, model_state: ModelState
    ) -> tuple[Terms, Any]:
        """Return the objective of parameters as stored, and the model state after it.

        Gradients are reduced to where the stage stores them.
        """
        return self._gather(self._stored_objective, params, batch, key, model_state)

    def eval(
        self, params: Params, model_state: ModelState, batch: Batch
    ) -> Array | dict[str, Array]:
        """Return the loss of a batch, without random keys; if there are metrics, a dict of both."""
        terms, _ = self.evaluated(params, batch, None, model_state)
        return evaluation(terms.value(), divided(terms.metrics))

    def apply(self, params: Params, model_state: ModelState, batch: Batch) -> Any:
        """Return the result of the model's `predict`, without random keys."""
        layout = self.layout
        model = self.model
        model = layout.decoding(model) if isinstance(model, LayeredModel) else model
        predict = build_predict(model, ActivationSpec(layout.mesh).constrain)
        if layout.encodings and isinstance(model, Model):
            return self._gather(
                lambda p, *args: predict(layout.decode(p), *args), params, batch, model_state
            )
        return self._gather(predict, params, batch, model_state)

    def grads(
        self, state: TrainState, batch: Batch, scratch: dict[str, list[Any]]
    ) -> tuple[tuple[Any, Any], dict[str, list[Any]]]:
        """Return the loss and the gradients of one step, without an update.

        Args:
          state: the state.
          batch: global batch.
          scratch: returned unchanged.

        Returns:
          ((loss, gradients), scratch). The loss has the form that `eval` returns; the gradients are
          unscaled and float32.
        """
        result = build_grads(self.model, self.layout, self.evaluated)(state, batch)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        grads = result.grads if scale is None else jax.tree.map(lambda g: g / scale, result.grads)
        return (evaluation(result.loss, divided(result.metrics)), grads), scratch

    def readable(self, state: TrainState) -> Params:
        """Return what `eval` and `apply` read of a state: all parameters."""
        return self.layout.join(state)

    def settle(self, state: TrainState) -> TrainState:
        """Raise AssertionError: a resident step leaves no update pending."""
        raise AssertionError("a resident step leaves no update pending")

    def updated_record(
        self, state: TrainState, leaf_ids: Sequence[int], index: Index
    ) -> tuple[list[Array], list[Array]]:
        """Raise AssertionError: a resident step leaves no update pending."""
        raise AssertionError("a resident step leaves no update pending")

    def check_grads(self) -> None:
        """Accept every config: all resident steps have their gradients on the device."""

    def abstract_scratch(self, abstract_batch: Batch) -> dict[str, list[Any]]:
        """Return no stacks: gradients and activations stay on the device."""
        del abstract_batch
        return {}

    def records_written(self, abstract_batch: Batch) -> Sequence[DiskRecords]:
        """Return no records: only state is stored on disk, and it exists before the step."""
        del abstract_batch
        return ()

    def moves(self) -> tuple[Move, ...]:
        """Return the disk reads and writes of a step, one leaf of the state after another."""
        return self._moves()

    def eval_moves(self, skips: bool = False) -> tuple[Move, ...]:
        """Return the disk reads of an evaluation, which skips none."""
        del skips
        return self._moves(("embed",))

    def _moves(self, phases: tuple[str, ...] | None = None) -> tuple[Move, ...]:
        disk = self.layout.disk
        if disk is None:
            return ()
        return list_moves(steps_of_leaves(self.records, {}), disk.kinds.keys(), phases)

    def unsettled_eval_moves(self) -> tuple[Move, ...]:
        """Raise AssertionError: a resident step leaves no update pending."""
        raise AssertionError("a resident step leaves no update pending")

    def settle_moves(self) -> tuple[Move, ...]:
        """Raise AssertionError: a resident step leaves no update pending."""
        raise AssertionError("a resident step leaves no update pending")

    def grads_moves(self) -> tuple[Move, ...]:
        """Return no moves: parameters are on the device, and the optimizer state is not read."""
        return ()


def plain_objective(
    model: Model | LayeredModel,
    layout: Layout,
    modes: Mapping[str, str] = MappingProxyType({}),
    *,
    as_stored: bool = False,
) -> Objective:
    """Return the objective as a function of unsharded parameters, before any gather is inserted.

    Args:
      model: the model.
      layout: layout of the model's state.
      modes: `activations` mode of each stack of layers, by the stack's name; missing stacks use the
        config's mode.
      as_stored: whether a layered model takes parameters as stored, some of them in 8 or 4 bits
        (`Layout.decoding`).
    """
    mode = layout.config.activations
    constrain = ActivationSpec(layout.mesh).constrain
    if isinstance(model, Model):
        assert isinstance(mode, str)  # segments need layers (`zerojax.config.check_unlayered`)
        # A checkpoint skips derivative rules whose results are not read, but these rules must run:
        # they return new scales as gradients.
        if mode == "everything" or (
            mode == "save" and _overwritten(layout.abstract_arrays.model_state)[0] is not None
        ):
            return build_objective(model, constrain=constrain)
        return keep_by_segments(
            build_objective(model, constrain=constrain),
            mode,
            build_splits(layout, layout.decoded_leaves()),
        )
    stacks = {stack.name: stack.in_tree for stack in layout.stacks}

    def region(function: Callable[..., Any], stack: str) -> Callable[..., Any]:
        # A scan's body is compiled separately from its derivative's body, so CSE has nothing to
        # merge, and no barrier is needed.
        stack_mode = modes.get(stack, mode)
        if stack_mode == "everything":
            return function
        if stack_mode == "remat":
            return jax.checkpoint(function, prevent_cse=False)
        if as_stored:
            leaves = [layout.all_leaves[i] for i in stacks[stack]]
        else:
            leaves = layout.decoded_leaves(stacks[stack])
        return keep_products(
            function, prevent_cse=False, splits=build_splits(layout, leaves, 1), group=stack
        )

    return build_objective(model, region=region, constrain=constrain)


def build_splits(layout: Layout, leaves: Sequence[Leaf], lead: int = 0) -> Splits:
    """Return how some parameters are sharded, from which the splits of activations follow.

    An encoded leaf has no known sharding here, since it is decoded where it is used.

    Args:
      layout: layout of the state.
      leaves: the parameter leaves.
      lead: number of leading dims to leave out.
    """
    return Splits(
        layout.mesh,
        tuple(None if leaf.decodes is not None else leaf.spec.base[lead:] for leaf in leaves),
    )


def stored_objective(model: Model | LayeredModel, layout: Layout) -> Objective:
    """Return the objective of parameters as stored, before any gather is inserted.

    Some of the parameters may be stored in 8 or 4 bits; they are decoded where they are used.
    """
    if isinstance(model, LayeredModel):
        # Each layer decodes its own parameters.
        return plain_objective(layout.decoding(model), layout, as_stored=True)
    objective = plain_objective(model, layout)
    # Decoding stays outside of rematerialised regions: a region takes postponed weights as it takes
    # shards.
    return lambda params, *args: objective(layout.decode(params), *args)


class Gradients(NamedTuple):
    """Results of a step before its update.

    Attributes:
      loss: f32[], loss of the full batch.
      grads: float32 gradients, on the update's shards.
      metrics: the model's own metrics, not divided yet.
      model_state: the model's state after the step.
    """

    loss: Array
    grads: Grads
    metrics: Metrics
    model_state: ModelState


def build_grads(
    model: Model | LayeredModel, layout: Layout, objective: Objective
) -> Callable[[TrainState, Any], Gradients]:
    """Return `grads(state, batch)`, which computes a step's `Gradients`."""
    return _StepGrads(model, layout, objective)


class _StepGrads:
    """The function that computes a step's `Gradients`: all its microbatches, without an update."""

    def __init__(self, model: Model | LayeredModel, layout: Layout, objective: Objective) -> None:
        self.layout = layout
        self.objective = objective
        self.is_stochastic = model.stochastic
        self.count = layout.config.num_microbatches
        self.update_shardings = layout.param_shardings(STAGES[layout.config.stage].opt_state)
        derive = self._derivative
        if layout.reduces_in_float32:
            derive = float32_grads(derive, layout.platform)
        if layout.reduces_once:
            unsharded = [leaf.spec.base for leaf in layout.leaves]
            derive = unreduced_grads(derive, layout.mesh, unsharded=unsharded)
        self._derive = derive
        # Sums over microbatches are on the update's shards, or each device holds its own.
        self.sum_shardings = self.update_shardings
        if layout.reduces_once:
            self.sum_shardings = jax.tree.map(
                lambda sharding: unreduced_sharding(layout.mesh, sharding.spec),
                layout.param_shardings(False),
            )

    def __call__(self, state: TrainState, batch: Batch) -> Gradients:
        """Return the gradients of one step."""
        # The key depends only on (key, step): a restored run draws the same masks as the original
        # run.
        key = jax.random.fold_in(state.key, state.step) if self.is_stochastic else None
        if self.count > 1:
            return self._accumulated(state, batch, key)
        result = self._microbatch_grads(state, state.model_state, batch, key)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), result.grads)
        return result._replace(grads=grads)

    def _derivative(self, scale: Array, data: Any, params: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the gradients of scale * loss of one microbatch, and a tuple of further results.

        The tuple holds the state that its gradient replaces, the loss, the metrics, and the model
        state after it.

        Args:
          scale: f32[], loss scale.
          data: (batch, key, model state that is not overwritten, weight of the full loss).
          params: (trainable parameters, frozen ones, state that its gradient replaces).
        """
        batch, key, model_state, total_weight = data
        trained, frozen, overwritten = params

        def loss(
            trained: Params, overwritten: ModelState
        ) -> tuple[Array, tuple[Array, Metrics, ModelState]]:
            before = model_state
            if overwritten is not None:
                before = {**model_state, OVERWRITTEN: overwritten}
            terms, after = self.objective(join_frozen(trained, frozen), batch, key, before)
            value = terms.value(total_weight, self.count)
            return value, (value, terms.metrics, after)

        value, pullback, aux = jax.vjp(loss, trained, overwritten, has_aux=True)
        # Small float16 cotangents would vanish without the scale.
        grads, replaced = pullback(scale.astype(value.dtype))
        return grads, (replaced, *aux)

    def _microbatch_grads(
        self,
        state: TrainState,
        model_state: ModelState,
        batch: Batch,
        key: Array | None,
        total_weight: Array | None = None,
    ) -> Gradients:
        """Return the loss and the gradients of one microbatch.

        Args:
          state: the state before the step.
          model_state: the model's state after the previous microbatch.
          batch: the microbatch.
          key: its random key, or None.
          total_weight: weight of the loss over all microbatches, or None if the loss is a mean.
        """
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)
        overwritten, remaining = _overwritten(model_state)
        data = (batch, key, remaining, total_weight)
        params = (state.params, state.frozen, overwritten)
        grads, (replaced, value, metrics, after) = self._derive(scale, data, params)
        if replaced is not None:
            after = {**after, OVERWRITTEN: replaced}
        # Constrained to the update's shards so that XLA can use reduce_scatter and keeps no
        # unsharded gradients.
        grads = jax.lax.with_sharding_constraint(grads, self.sum_shardings)
        return Gradients(value, grads, metrics, after)

    def _inputs(
        self, microbatch: tuple[Batch, Array], key: Array | None
    ) -> tuple[Batch, Array | None]:
        """Return a numbered microbatch, constrained to its sharding, and its random key."""
        batch, number = microbatch
        batch = ActivationSpec(self.layout.mesh).constrain(batch)
        # The streamed step folds in the same numbers, so both draw the same masks.
        return batch, None if key is None else jax.random.fold_in(key, number)

    def _accumulated(self, state: TrainState, batch: Batch, key: Array | None) -> Gradients:
        """Return the mean gradients of several microbatches, in a scan over them."""
        layout = self.layout
        microbatches = (split_microbatches(batch, self.count), jnp.arange(self.count))
        params = join_frozen(state.params, state.frozen)

        def weight(microbatch: tuple[Batch, Array], model_state: ModelState) -> Array | None:
            terms, _ = self.objective(params, *self._inputs(microbatch, key), model_state)
            return terms.weight

        total_weight = whole_weight(weight, microbatches, state.model_state)

        def body(sums: _Sums, microbatch: tuple[Batch, Array]) -> tuple[_Sums, Metrics]:
            result = self._microbatch_grads(
                state, sums.model_state, *self._inputs(microbatch, key), total_weight
            )
            grads = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), sums.grads, result.grads)
            loss = sums.loss + result.loss
            grads = jax.lax.with_sharding_constraint(grads, self.sum_shardings)
            return _Sums(loss, grads, result.model_state), result.metrics

        def zeros_of(a: Any, sharding: NamedSharding) -> Array:
            lead = (count_rows(layout.mesh, sharding.spec),) if layout.reduces_once else ()
            return jnp.zeros((*lead, *a.shape), jnp.float32)

        zeros = jax.tree.map(zeros_of, layout.abstract_params, layout.param_shardings(False))
        # A scan's carry has one sharding. Unless its initial value is sharded, XLA may hold the
        # sums unsharded.
        zeros = jax.lax.with_sharding_constraint(zeros, self.sum_shardings)
        sums, metrics = jax.lax.scan(
            body, _Sums(jnp.float32(0), zeros, state.model_state), microbatches
        )
        grads = sums.grads
        if layout.reduces_once:

            def reduce(g: Array, sharding: NamedSharding, unsharded: NamedSharding) -> Array:
                return reduced(g, sharding, unsharded.spec)

            unsharded = layout.param_shardings(False)
            grads = jax.tree.map(reduce, grads, self.update_shardings, unsharded)
        loss = sums.loss / self.count
        grads = jax.tree.map(lambda g: g / self.count, grads)
        return Gradients(loss, grads, summed(metrics), sums.model_state)


class _Sums(NamedTuple):
    """Values that a scan over microbatches passes on.

    Attributes:
      loss: f32[], sum of the losses so far.
      grads: float32 sums of the gradients so far.
      model_state: the model's state after the microbatches so far.
    """

    loss: Array
    grads: Grads
    model_state: ModelState


def _overwritten(model_state: ModelState) -> tuple[ModelState, ModelState]:
    """Return the part of a model's state that its gradient replaces, or None; and the rest."""
    if not isinstance(model_state, dict) or OVERWRITTEN not in model_state:
        return None, model_state
    remaining = {name: tree for name, tree in model_state.items() if name != OVERWRITTEN}
    return model_state[OVERWRITTEN], remaining
