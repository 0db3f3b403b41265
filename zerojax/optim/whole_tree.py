"""The optimizer on sharded state: where optax's state lives, the global norm, and the update.

    norm   = sqrt(sum over leaves and shards of g^2)        exact: XLA adds a psum of one scalar; of gradients that are used
    g      = g * min(1, clip_norm / norm)
    master = master + updates(g, opt_state, master)          float32, each device its own shard
    params = all_gather(cast(master))                        stages 1 and 2; stage 3 gathers on use

Every leaf of the optimizer state that mirrors a parameter (same path, same shape) gets that parameter's spec; a factored or
extra leaf is split by its own shape. Any optax transformation works, since each sees whole arrays and XLA moves what crosses
shards. One that combines elements of a leaf sees a stack of layers layer by layer, its work shared out (`layer_wise`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import ZeroConfig
from zerojax.metrics import step_metrics
from zerojax.optim.layer_wise import shared_out
from zerojax.optim.unused import unused_grads, used
from zerojax.precision import LossScaling, update_loss_scale
from zerojax.sharding import STAGES
from zerojax.state import Layout, TrainState, call_update


def global_norm(grads: Any) -> jax.Array:
    """Return the Euclidean norm over all leaves and shards: f32[]."""
    # In float32, whatever the dtype of the gradients: squares would overflow in float16, and sums lose terms in bfloat16.
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Return what gradients of global norm `norm` are multiplied by, so that it is at most `clip_norm`: f32[]."""
    # The factor is 1 for a norm of 0: the quotient beside it, which is infinite, is not chosen.
    return jnp.float32(1) if clip_norm is None else jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def select(condition: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Choose between two trees by one boolean."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


Update = Callable[[TrainState, jax.Array, Any], tuple[TrainState, dict[str, jax.Array]]]


def build_update(tx: optax.GradientTransformation, layout: Layout) -> Update:
    """Return `update(state, loss, grads) -> (state, metrics)`: unscale, norm, clip, optimizer, cast; on whole trees."""
    config, stage, tx = layout.config, STAGES[layout.config.stage], shared_out(tx, layout)
    grads_at, unused = layout.param_shardings(stage.opt_state), unused_grads(layout.update_jaxpr, len(layout.leaves))

    def update(state: TrainState, value: jax.Array, grads: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, norm, finite = scale_grads(config, state, grads, unused)
        old = state.params if state.master is None else state.master
        # Parameters without masters are whole below stage 3: each device updates its own shard of them.
        old = jax.lax.with_sharding_constraint(old, grads_at)
        updates, opt_state = call_update(tx, grads, state.opt_state, old, value)
        # A gradient that is not finite leaves weights and optimizer state as they were.
        master = select(finite, optax.apply_updates(old, updates), old)
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, state.params)
        params = jax.lax.with_sharding_constraint(params, grads_at)  # the cast comes before the gather of stages 1 and 2
        return finish(
            state, params, None if state.master is None else master, select(finite, opt_state, state.opt_state),
            value, norm, finite, config.loss_scaling,
        )  # fmt: skip

    return update


def scale_grads(config: ZeroConfig, state: TrainState, grads: Any, unused: frozenset[int]) -> tuple[Any, jax.Array, jax.Array]:
    """Return gradients without the loss scale and clipped, their norm before clipping, and whether it is finite.

    Args:
      config: of the program.
      state: before the step.
      grads: float32.
      unused: indices of those that the optimizer never uses, which are no part of the norm.
    """
    # Unscale, take the norm, clip, in this order: `clip_norm` bounds the true gradient, and the metric shows it unclipped.
    if state.loss_scale is not None:
        scale = state.loss_scale.scale
        grads = jax.tree.map(lambda g: g / scale, grads)
    leaves = jax.tree.leaves(grads)
    norm = global_norm(used(leaves, range(len(leaves)), unused))
    if config.clip_norm is not None:
        factor = clip_factor(norm, config.clip_norm)
        grads = jax.tree.map(lambda g: g * factor, grads)
    return grads, norm, jnp.isfinite(norm)


def finish(
    state: TrainState,
    params: Any,
    master: Any,
    opt_state: Any,
    value: jax.Array,
    norm: jax.Array,
    finite: jax.Array,
    scaling: LossScaling,
    pending: Any = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after a step, its counters and loss scale moved on, and the step's metrics."""
    skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
    after = TrainState(
        step=state.step + 1,
        skipped=skipped,
        key=state.key,
        params=params,
        master=master,
        opt_state=opt_state,
        loss_scale=None if state.loss_scale is None else update_loss_scale(scaling, state.loss_scale, finite),
        pending=pending,
        frozen=state.frozen,
        model_state=state.model_state,
    )
    return after, step_metrics(value, norm, finite, skipped, state.loss_scale)
