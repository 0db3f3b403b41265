"""The resident step: every layer on the device for the whole step; the optimizer state may rest elsewhere.

    for each microbatch:                      a scan; one pass where there is one microbatch
        loss, g = value_and_grad(loss)(params)      parameters gathered on use (stage 3)
        g: reduce_scatter to its shard              where it is made (stages 1 to 3)
        sum += g                                    float32, sharded
    norm, clip, tx.update, apply               on shards: whole trees, or leaf by leaf where the state is off the device
    params = cast(master)                      all_gather below stage 3

How parameters are gathered is handed in, and the update is of `zerojax.optim`. The stage is read from `zerojax.sharding.STAGES`
and nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move, build_schedule
from zerojax.models import LayeredModel, Loss, Model, checked, layered_loss
from zerojax.optim import HostUpdate, RecordUpdate, Update, build_update, update_by_record, update_on_host
from zerojax.resident.segments import remat_by_segments
from zerojax.sharding import STAGES, ActivationSpec, split_microbatches
from zerojax.state import Layout, StateRecords, TrainState, join_frozen

Array = jax.Array


class ResidentStep:
    """The equations of one resident step over a model, an optimizer and a layout.

    Attributes:
      records: how the state rests.
      update: the update leaf by leaf, where the optimizer's state rests off the device, else None.
      host: the update on the host, or None.
      schedule: the order in which layers are computed; a Model counts as one layer.
      plain_loss: `loss(params, batch, key)` over whole parameters.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        records: StateRecords,
        update: RecordUpdate | None,
        gather: Callable[..., Any],
    ) -> None:
        """Evaluate the model through `gather(function, params, *args)`, which takes parameters as they are stored."""
        self.model, self.tx, self.records, self.update, self._gather = model, tx, records, update, gather
        self.layout = layout = records.layout
        self.host: HostUpdate | None = None
        if update is not None and layout.config.update_on == "host":
            # `build_grads` returns means, so the kernels have nothing to divide by.
            self.host = HostUpdate(update, stashes=False, summed=1)
        self.plain_loss = plain_loss(model, layout)
        self.schedule = build_schedule(model.num_layers if isinstance(model, LayeredModel) else 1)

    def arrays(self) -> np.ndarray:
        """Return i32[] holding 1: the trips of loops that XLA must not unroll."""
        return np.asarray(1, np.int32)

    def step(
        self, state: TrainState, batch: Any, arrays: Array, scratch: dict[str, list[Any]]
    ) -> tuple[tuple[TrainState, dict[str, list[Any]]], dict[str, Array]]:
        """Run one step; `arrays` is i32[] holding 1, and there is no scratch."""
        value, grads = build_grads(self.model, self.layout, self.loss)(state, batch)
        after, metrics = self._update(arrays)(state, value, grads)
        return (after, scratch), metrics

    def _update(self, one: Array) -> Update:
        if self.host is not None:
            return update_on_host(self.host)
        return build_update(self.tx, self.layout) if self.update is None else update_by_record(self.update, one)

    def loss(self, params: Any, batch: Any, key: Any) -> Array:
        """Return the loss over parameters as stored, their gradients reduced to where the stage keeps them."""
        return self._gather(checked(self.plain_loss), params, batch, key)

    def eval(self, params: Any, batch: Any, arrays: Array) -> Array:
        """Return the loss of a batch, without keys."""
        del arrays
        return self.loss(params, batch, None).astype(jnp.float32)

    def abstract_scratch(self, abstract_batch: Any) -> dict[str, list[Any]]:
        """Return no stacks: gradients and activations stay on the device."""
        del abstract_batch
        return {}

    def records_written(self, abstract_batch: Any) -> Sequence[DiskRecords]:
        """Return no records: what rests on disk is state, and there before the step."""
        del abstract_batch
        return ()

    def moves(self) -> tuple[Move, ...]:
        """Return what a step reads from disk and writes to it: the leaves of the state, one after the other."""
        first, last = self.records.end_moves()
        return (*first, *last)

    def eval_moves(self) -> tuple[Move, ...]:
        """Return the same of an evaluation."""
        return self.records.end_moves()[0]


def plain_loss(model: Model | LayeredModel, layout: Layout) -> Loss:
    """Return the loss over whole parameters, before any gather is inserted."""
    remat = layout.config.activations == "remat"
    if isinstance(model, LayeredModel):
        return layered_loss(model, remat=remat, constrain=ActivationSpec(layout.mesh).constrain)
    return remat_by_segments(model.loss) if remat else model.loss


def build_grads(model: Model | LayeredModel, layout: Layout, loss: Loss) -> Callable[[TrainState, Any], tuple[Array, Any]]:
    """Return `grads(state, batch) -> (loss, gradients)`: the mean over microbatches, in float32, on the update's shards."""
    config, stage = layout.config, STAGES[layout.config.stage]
    grads_at = layout.param_shardings(stage.opt_state)

    def of_microbatch(state: TrainState, batch: Any, key: Any) -> tuple[Array, Any]:
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)

        # Scaled inside of the derivative: else small float16 cotangents would vanish. The loss is returned unscaled.
        def scaled(params: Any) -> tuple[Array, Array]:
            value = loss(join_frozen(params, state.frozen), batch, key).astype(jnp.float32)
            return value * scale, value

        grads, value = jax.grad(scaled, has_aux=True)(state.params)
        # On the shards of the update: XLA can then reduce by reduce_scatter, and keeps no whole gradients.
        return value, jax.lax.with_sharding_constraint(grads, grads_at)

    def grads(state: TrainState, batch: Any) -> tuple[Array, Any]:
        # Of (key, step) alone: a restored run draws the masks that it would have drawn.
        key = jax.random.fold_in(state.key, state.step) if model.stochastic else None
        if config.num_microbatches > 1:
            return accumulated(state, batch, key, config.num_microbatches)
        value, grads = of_microbatch(state, batch, key)
        return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def accumulated(state: TrainState, batch: Any, key: Any, count: int) -> tuple[Array, Any]:
        def body(total: tuple[Array, Any], one: tuple[Any, Array]) -> tuple[tuple[Array, Any], None]:
            microbatch, index = one
            microbatch = ActivationSpec(layout.mesh).constrain(microbatch)
            # The numbers that the streamed step folds in, so that both draw the same masks.
            value, grads = of_microbatch(state, microbatch, None if key is None else jax.random.fold_in(key, index))
            sums = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total[1], grads)
            return (total[0] + value, jax.lax.with_sharding_constraint(sums, grads_at)), None

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), layout.abstract_params)
        # What a scan carries has one sharding: unless its start is on shards, the sums may be held whole.
        zeros = jax.lax.with_sharding_constraint(zeros, grads_at)
        pieces = (split_microbatches(batch, count), jnp.arange(count))
        (value, grads), _ = jax.lax.scan(body, (jnp.float32(0), zeros), pieces)
        return value / count, jax.tree.map(lambda g: g / count, grads)

    return grads
