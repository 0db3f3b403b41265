"""The optimizer on sharded state: sharding of optax's state, the global norm, and the update.

    norm   = sqrt(sum over leaves and shards of g^2)     exact, over used gradients: XLA adds a psum
                                                         of one scalar
    g      = g * min(1, clip_norm / norm)
    master = master + updates(g, opt_state, master)      float32, each device its own shard
    params = all_gather(cast(master))                    stages 1 and 2; stage 3 gathers on use

Every optimizer state leaf that mirrors a parameter (same path, same shape) gets that parameter's
spec; a factored or extra leaf is split by its own shape. Any optax transformation works, because
each sees global arrays and XLA inserts the communication. An optimizer that combines elements of a
leaf sees a stack of layers layer by layer, and its work is divided among devices (`layer_wise`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from zerojax.config import ZeroConfig
from zerojax.metrics import step_metrics
from zerojax.optim.layer_wise import shared_out
from zerojax.optim.unused import unused_grads, used
from zerojax.precision import LossScaling, update_loss_scale
from zerojax.sharding import STAGES
from zerojax.state import Layout, Pending, TrainState, call_update
from zerojax.trees import Grads, OptState, Params

Values = TypeVar("Values")
"""A tree of arrays."""


def global_norm(grads: Grads) -> jax.Array:
    """Return the Euclidean norm over all leaves and shards: f32[]."""
    # In float32, whatever the dtype of the gradients: squares would overflow in float16, and sums
    # would lose terms in bfloat16.
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Return the factor that limits the global norm of gradients to `clip_norm`: f32[].

    Args:
      norm: f32[], global norm of the gradients.
      clip_norm: maximum norm after clipping; None does not clip.
    """
    # For a norm of 0 the factor is 1: the infinite quotient is not selected.
    if clip_norm is None:
        return jnp.float32(1)
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def update_if(
    finite: jax.Array, update: Callable[[Values], Values], before: Values, platform: str
) -> Values:
    """Return `update(before)` if `finite`, else `before`, bit for bit.

    Donated input is not copied.

    XLA for GPUs fuses a select into the update of each leaf, which then reads and writes in place.
    XLA for CPUs instead computes the moments a second time together with the weights, from a copy
    of the old moments, and the update takes 4 times as long. On CPUs a branch is used: it is
    compiled separately, so nothing is merged.

    Args:
      finite: bool[], whether to update.
      update: function from a tree of arrays to a tree of the same shapes.
      before: the values to update.
      platform: platform of the devices, such as "cpu".
    """
    if platform == "cpu":
        return jax.lax.cond(finite, update, lambda values: values, before)
    return jax.tree.map(partial(jnp.where, finite), update(before), before)


Update = Callable[[TrainState, jax.Array, Any], tuple[TrainState, dict[str, jax.Array]]]


def build_update(
    tx: optax.GradientTransformation, layout: Layout
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Return `update(state, loss, grads, norm=None) -> (state, metrics)` on full trees.

    The update unscales the gradients, computes their norm if it is not given, clips, runs the
    optimizer, and casts.

    Args:
      tx: the optimizer.
      layout: layout of the program's state.
    """
    config = layout.config
    stage = STAGES[layout.config.stage]
    apply = _build_update(tx, layout)
    grad_shardings = layout.param_shardings(stage.opt_state)
    unused = unused_grads(layout.update_jaxpr, len(layout.leaves))

    def update(
        state: TrainState, loss: jax.Array, grads: Grads, norm: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        measured = measure_grads(config, state, grads, unused, norm)
        old = state.params if state.master is None else state.master
        # Parameters without masters are unsharded below stage 3: each device updates its own shard
        # of them.
        old = jax.lax.with_sharding_constraint(old, grad_shardings)

        def update_weights(before: tuple[Params, OptState]) -> tuple[Params, OptState]:
            weights, opt_state = before
            scaled = jax.tree.map(measured.scaled, grads)
            updates, opt_state = apply(scaled, opt_state, weights, loss)
            return optax.apply_updates(weights, updates), opt_state

        master, opt_state = update_if(
            measured.finite, update_weights, (old, state.opt_state), layout.platform
        )
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, state.params)
        # The cast comes before the gather of stages 1 and 2.
        params = jax.lax.with_sharding_constraint(params, grad_shardings)
        return finish(
            state,
            params,
            None if state.master is None else master,
            opt_state,
            loss,
            measured.norm,
            measured.finite,
            config.loss_scaling,
        )

    return update


def _build_update(
    tx: optax.GradientTransformation, layout: Layout
) -> Callable[..., tuple[Grads, OptState]]:
    """Return `apply(grads, opt_state, weights, loss) -> (updates, opt_state)`.

    The optimizer was traced over the same shapes when the layout was built. That trace is reused
    here, unless the work on full leaves is divided among devices.
    """
    tx = shared_out(tx, layout)
    if tx is not layout.tx:
        return partial(call_update, tx)
    run = jex.jaxpr_as_fun(layout.update_jaxpr)

    def apply(
        grads: Grads, opt_state: OptState, weights: Params, loss: jax.Array
    ) -> tuple[Grads, OptState]:
        leaves = run(*jax.tree.leaves((grads, opt_state, weights, loss)))
        tree = jax.tree.structure((grads, opt_state))
        return jax.tree.unflatten(tree, leaves)

    return apply


@dataclasses.dataclass(frozen=True)
class MeasuredGrads:
    """Gradient norm and scaling factors of a step, measured before the update.

    Attributes:
      norm: f32[], global norm without the loss scale and before clipping.
      finite: bool[], whether `norm` is finite.
      scale: f32[], the loss scale, or None.
      factor: f32[], the clipping factor, or None.
    """

    norm: jax.Array
    finite: jax.Array
    scale: jax.Array | None
    factor: jax.Array | None

    def scaled(self, grad: jax.Array) -> jax.Array:
        """Return a gradient, or elements of one, clipped and without the loss scale.

        Call it where the gradient is used: an array of all scaled gradients would have to be
        written and read again.
        """
        if self.scale is not None:
            grad = grad / self.scale
        if self.factor is not None:
            grad = grad * self.factor
        return grad


def measure_grads(
    config: ZeroConfig,
    state: TrainState,
    grads: Grads,
    unused: frozenset[int],
    norm: jax.Array | None = None,
) -> MeasuredGrads:
    """Return the norm of the gradients, and the factors that the update multiplies them by.

    Args:
      config: configuration of the program.
      state: the state before the step.
      grads: float32 gradients.
      unused: indices of the gradients that the optimizer never uses; the norm leaves them out.
      norm: f32[], global norm without the loss scale, if it is known; otherwise None.
    """
    # Unscale, compute the norm, clip, in this order: `clip_norm` bounds the true gradient, and the
    # metric shows the unclipped norm.
    all_leaves = jax.tree.leaves(grads)
    leaves = used(all_leaves, range(len(all_leaves)), unused)
    scale = None if state.loss_scale is None else state.loss_scale.scale
    if scale is not None:
        leaves = [g / scale for g in leaves]
    if norm is None:
        norm = global_norm(leaves)
    factor = None if config.clip_norm is None else clip_factor(norm, config.clip_norm)
    return MeasuredGrads(norm, jnp.isfinite(norm), scale, factor)


def finish(
    state: TrainState,
    params: Params,
    master: Params,
    opt_state: OptState,
    loss: jax.Array,
    norm: jax.Array,
    finite: jax.Array,
    scaling: LossScaling,
    pending: Pending | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after a step, with counters and loss scale advanced, and the step's metrics.

    Args:
      state: the state before the step.
      params: the parameters after the step.
      master: the float32 masters after the step, or None.
      opt_state: the optimizer state after the step.
      loss: f32[], the loss.
      norm: f32[], global norm of the gradients.
      finite: bool[], whether the step updated the weights.
      scaling: configuration of dynamic loss scaling.
      pending: pending gradients of a delayed update, or None.
    """
    skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
    step = state.step + 1
    loss_scale = state.loss_scale
    if loss_scale is not None:
        loss_scale = update_loss_scale(scaling, loss_scale, finite)
    after = TrainState(
        step=step,
        skipped=skipped,
        key=state.key,
        params=params,
        master=master,
        opt_state=opt_state,
        loss_scale=loss_scale,
        pending=pending,
        frozen=state.frozen,
        model_state=state.model_state,
    )
    return after, step_metrics(loss, norm, finite, skipped, state.loss_scale)
