"""The equations of the resident step: a pure function of (state, batch), every array on the device.

    for each microbatch:                      a scan; one pass where there is one microbatch
        loss, g = value_and_grad(loss)(params)      parameters gathered on use (stage 3)
        g: reduce_scatter to its shard              where it is made (stages 1 to 3)
        sum += g                                    float32, sharded
    norm, clip, tx.update, apply               on shards
    params = cast(master)                      all_gather below stage 3

The stage is read from `zerojax.stages.STAGES` and nowhere else.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.layout import Layout, init_params, named
from zerojax.lazy import Rule
from zerojax.mesh import BATCH_AXES, FSDP, num_batch_shards
from zerojax.metrics import step_metrics
from zerojax.model import BLOCKS, LayeredModel, Model, layered_loss
from zerojax.on_use import gather_on_use
from zerojax.optim import call_update, clip_factor, global_norm, select, stored_spec
from zerojax.precision import PRECISIONS, LossScaling, init_loss_scale, update_loss_scale
from zerojax.remat import remat_by_segments
from zerojax.stages import STAGES
from zerojax.state import TrainState

Loss = Callable[[Any, Any, Any], jax.Array]
Update = Callable[[TrainState, jax.Array, Any], tuple[TrainState, dict[str, jax.Array]]]


def plain_loss(model: Model | LayeredModel, layout: Layout) -> Loss:
    """Return the loss over whole parameters, before any gather is inserted."""
    remat = layout.config.activations == "remat"
    if isinstance(model, LayeredModel):
        return layered_loss(model, remat=remat, constrain=lambda x: constrain_batch(layout.mesh, x))
    return remat_by_segments(model.loss) if remat else model.loss


def constrain_batch(mesh: Mesh, x: Any) -> Any:
    """Keep dim 0 of activations split as the batch is; other dims are left to the partitioner."""

    def constrain(a: jax.Array) -> jax.Array:
        if a.ndim == 0 or a.shape[0] % num_batch_shards(mesh):
            return a
        spec = PartitionSpec(BATCH_AXES, *(PartitionSpec.UNCONSTRAINED,) * (a.ndim - 1))
        return jax.lax.with_sharding_constraint(a, named(mesh, spec))

    return jax.tree.map(constrain, x)


def sharded_loss(model: Model | LayeredModel, layout: Layout, report: Callable[[str], None]) -> Loss:
    """Return the loss over parameters as stored: gathered on use, its gradients reduced to where the stage keeps them."""
    stage = STAGES[layout.config.stage]
    loss = plain_loss(model, layout)
    if not stage.opt_state or all(spec.sharded == spec.base for spec in layout.specs.values()):
        return checked(loss)
    rule = build_rule(model, layout, stage.params, report)

    def on_shards(params: Any, batch: Any, key: Any) -> jax.Array:
        return gather_on_use(
            checked(loss), params, batch, key,
            stored={path: stored_spec(spec, stage.params) for path, spec in layout.specs.items()},
            cotangents={path: spec.sharded for path, spec in layout.specs.items()},
            rule=rule,
        )  # fmt: skip

    return on_shards


def build_rule(model: Model | LayeredModel, layout: Layout, remat: bool, report: Callable[[str], None]) -> Rule:
    """Return how parameters are gathered: what neighbouring uses may share, and how large a layer may be."""
    leaves, layer = unit_bytes(model, layout)
    return Rule(
        mesh=layout.mesh,
        axis=FSDP,
        remat=remat,
        budget_bytes=max(leaves),
        region_bytes=layer,
        report=report,
    )


def unit_bytes(model: Model | LayeredModel, layout: Layout) -> tuple[list[int], int]:
    """Return the gathered bytes of each parameter leaf, and the most that may count as one layer.

    A stacked leaf of a LayeredModel counts as one layer's, and a layer is a block. A Model's layers are not known: half of
    the model is the most that may.
    """
    itemsize = jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize
    leaves, block = [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]:
        num_bytes = leaf.size * itemsize
        if isinstance(model, LayeredModel) and path[0] == jax.tree_util.DictKey(BLOCKS):
            num_bytes //= model.num_layers
            block += num_bytes
        leaves.append(num_bytes)
    return leaves, max(block or sum(leaves) // 2, max(leaves))


def checked(loss: Loss) -> Loss:
    """Return `loss`, refusing a result that is not a real scalar."""

    def checked_loss(params: Any, batch: Any, key: Any) -> jax.Array:
        out = loss(params, batch, key)
        leaves = jax.tree.leaves(out)
        if len(leaves) != 1 or leaves[0] is not out:
            raise ValueError(f"the loss must be one scalar, got {jax.tree.structure(out)}; return the mean loss alone")
        if not hasattr(out, "shape"):
            raise ValueError(f"the loss must be an array computed from the parameters, got {type(out).__name__} {out!r}")
        if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(f"the loss must be a floating scalar, got shape {out.shape} {out.dtype}; take its mean")
        return out

    return checked_loss


def build_init(
    model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout
) -> Callable[[jax.Array], TrainState]:
    """Return `init(key) -> state`, to be jitted with `layout.shardings` as its output."""
    precision, stage = PRECISIONS[layout.config.precision], STAGES[layout.config.stage]

    def init(key: jax.Array) -> TrainState:
        master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), init_params(model, key))
        master = jax.lax.with_sharding_constraint(master, layout.param_shardings(stage.opt_state))
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            key=jax.random.fold_in(key, 0x5EED),
            params=jax.tree.map(lambda p: p.astype(precision.compute_dtype), master),
            master=master if precision.has_master else None,
            opt_state=tx.init(master),
            loss_scale=init_loss_scale(layout.config.loss_scaling) if precision.scales_loss else None,
        )

    return init


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


def build_update(tx: optax.GradientTransformation, layout: Layout) -> Update:
    """Return `update(state, loss, grads) -> (state, metrics)`: unscale, norm, clip, optimizer, cast; on whole trees."""
    config, stage = layout.config, STAGES[layout.config.stage]
    grads_at = layout.param_shardings(stage.opt_state)

    def update(state: TrainState, value: jax.Array, grads: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, norm, finite = scale_grads(config, state, grads)
        old = state.params if state.master is None else state.master
        old = jax.lax.with_sharding_constraint(old, grads_at)
        updates, opt_state = call_update(tx, grads, state.opt_state, old, value)
        master = select(finite, optax.apply_updates(old, updates), old)
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, state.params)
        params = jax.lax.with_sharding_constraint(params, grads_at)  # the cast comes before the gather of stages 1 and 2
        return finish(
            state, params, None if state.master is None else master, select(finite, opt_state, state.opt_state),
            value, norm, finite, config.loss_scaling,
        )  # fmt: skip

    return update


def scale_grads(config: ZeroConfig, state: TrainState, grads: Any) -> tuple[Any, jax.Array, jax.Array]:
    """Return gradients without the loss scale and clipped, their norm before clipping, and whether it is finite."""
    if state.loss_scale is not None:
        scale = state.loss_scale.scale
        grads = jax.tree.map(lambda g: g / scale, grads)
    norm = global_norm(grads)
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
    )
    return after, step_metrics(value, norm, finite, skipped, state.loss_scale)


def split_microbatches(batch: Any, count: int) -> Any:
    """Return `batch` with a leading dim of `count` microbatches.

    Microbatch m takes the examples m, m + count, ...: every device splits its own part of the batch, so nothing moves.
    """

    def split(a: jax.Array) -> jax.Array:
        if a.ndim == 0:
            return jnp.broadcast_to(a, (count,))
        return jnp.moveaxis(a.reshape(a.shape[0] // count, count, *a.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)
