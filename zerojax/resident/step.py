"""The equations of the resident step: a pure function of (state, batch), every array on the device.

    for each microbatch:                      a scan; one pass where there is one microbatch
        loss, g = value_and_grad(loss)(params)      parameters gathered on use (stage 3)
        g: reduce_scatter to its shard              where it is made (stages 1 to 3)
        sum += g                                    float32, sharded
    norm, clip, tx.update, apply               on shards
    params = cast(master)                      all_gather below stage 3

The stage is read from `zerojax.sharding.STAGES` and nowhere else.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.gather import Rule, gather_on_use
from zerojax.models import LayeredModel, Loss, Model, checked, layered_loss
from zerojax.optim import Update
from zerojax.resident.segments import remat_by_segments
from zerojax.sharding import FSDP, STAGES, constrain_batch, split_microbatches, stored_spec
from zerojax.state import Layout, TrainState, unit_bytes


def plain_loss(model: Model | LayeredModel, layout: Layout) -> Loss:
    """Return the loss over whole parameters, before any gather is inserted."""
    remat = layout.config.activations == "remat"
    if isinstance(model, LayeredModel):
        return layered_loss(model, remat=remat, constrain=lambda x: constrain_batch(layout.mesh, x))
    return remat_by_segments(model.loss) if remat else model.loss


def sharded_loss(model: Model | LayeredModel, layout: Layout, report: Callable[[str], None]) -> Loss:
    """Return the loss over parameters as stored: gathered on use, its gradients reduced to where the stage keeps them."""
    stage = STAGES[layout.config.stage]
    loss = plain_loss(model, layout)
    if not stage.opt_state or all(spec.sharded == spec.base for spec in layout.specs.values()):
        return checked(loss)
    rule = build_rule(layout, stage.params, report)

    def on_shards(params: Any, batch: Any, key: Any) -> jax.Array:
        return gather_on_use(
            checked(loss), params, batch, key,
            stored={path: stored_spec(spec, stage.params) for path, spec in layout.specs.items()},
            cotangents={path: spec.sharded for path, spec in layout.specs.items()},
            rule=rule,
        )  # fmt: skip

    return on_shards


def build_rule(layout: Layout, remat: bool, report: Callable[[str], None]) -> Rule:
    """Return how parameters are gathered: what neighbouring uses may share, and how large a layer may be."""
    leaves, layer = unit_bytes(layout)
    return Rule(mesh=layout.mesh, axis=FSDP, remat=remat, budget_bytes=max(leaves), region_bytes=layer, report=report)


def build_step(
    model: Model | LayeredModel, layout: Layout, loss: Loss, update: Update
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Return `step(state, batch) -> (state, metrics)`, to be jitted with `layout.shardings` as its output."""
    config, stage = layout.config, STAGES[layout.config.stage]
    grads_at = layout.param_shardings(stage.opt_state)

    def value_and_grads(state: TrainState, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)

        def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
            value = loss(params, batch, key).astype(jnp.float32)
            return value * scale, value

        grads, value = jax.grad(scaled, has_aux=True)(state.params)
        return value, jax.lax.with_sharding_constraint(grads, grads_at)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step) if model.stochastic else None
        if config.num_microbatches == 1:
            value, grads = value_and_grads(state, batch, key)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        else:
            value, grads = accumulate(state, batch, key, config.num_microbatches)
        return update(state, value, grads)

    def accumulate(state: TrainState, batch: Any, key: Any, count: int) -> tuple[jax.Array, Any]:
        def body(total: tuple[jax.Array, Any], one: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
            microbatch, index = one
            microbatch = constrain_batch(layout.mesh, microbatch)
            value, grads = value_and_grads(state, microbatch, None if key is None else jax.random.fold_in(key, index))
            summed = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total[1], grads)
            return (total[0] + value, jax.lax.with_sharding_constraint(summed, grads_at)), None

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), layout.abstract_params)
        zeros = jax.lax.with_sharding_constraint(zeros, grads_at)
        pieces = (split_microbatches(batch, count), jnp.arange(count))
        (value, grads), _ = jax.lax.scan(body, (jnp.float32(0), zeros), pieces)
        return value / count, jax.tree.map(lambda g: g / count, grads)

    return step
