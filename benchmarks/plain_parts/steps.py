"""Time steps, and updates alone, against plain programs on the same devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from problem import Problem
from problem_in_jax import gpt_config, optimizer

from plain_parts.gpts import Running, by_hand, first_batch, flax_loop, plain, zero
from plain_parts.rows import Row, in_turn

REPEATS = 8
BLOCKS, SCAN, HAND_2, HAND_3 = (
    "plain, separate blocks",
    "plain, a scan",
    "sharded by hand, as stage 2",
    "sharded by hand, as stage 3",
)
ONE_DEVICE = (
    Row("Flax's loop: nnx.Optimizer in nnx.jit", BLOCKS),
    Row("Model, stage 0", BLOCKS, 1.05),
    Row('Model, stage 0, activations="everything"', BLOCKS),
    Row('Model, stage 0, activations="remat"', BLOCKS),
    Row("LayeredModel, stage 0", SCAN, 1.05),
    Row('LayeredModel, stage 0, activations="everything"', SCAN),
    Row('LayeredModel, stage 0, activations="remat"', SCAN),
)
TWO_DEVICES = (
    Row("LayeredModel, stage 2", HAND_2, 1.05),
    Row("LayeredModel, stage 3", HAND_3, 1.05),
    Row('LayeredModel, stage 3, activations="everything"', HAND_3),
    Row("Model, stage 3: gathered on use", HAND_3),
)
UPDATE = (
    Row("the update of stage 0", "optax's update", 1.05),
    Row("the same, with a clipped norm", "optax's, clipped", 1.05),
)


def one_device(p: Problem) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the median seconds and the losses of steps on one device, by contender."""
    jax.config.update("jax_num_cpu_devices", 1)
    steps = {
        BLOCKS: plain(p, layered=False),
        SCAN: plain(p, layered=True),
        ONE_DEVICE[0].name: flax_loop(p),
    }
    for row in ONE_DEVICE[1:]:
        mode = row.name.split('"')[1] if '"' in row.name else "save"
        steps[row.name] = zero(p, row.name.startswith("Layered"), stage=0, activations=mode)
    return _run(steps, p)


def two_devices(p: Problem) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the median seconds and the losses of steps on two devices, by contender."""
    jax.config.update("jax_num_cpu_devices", 2)
    steps = {HAND_2: by_hand(p, 2, 2), HAND_3: by_hand(p, 3, 2)}
    for row in TWO_DEVICES:
        mode = row.name.split('"')[1] if '"' in row.name else "save"
        stage = int(row.name.split("stage ")[1][0])
        steps[row.name] = zero(
            p, row.name.startswith("Layered"), devices=2, stage=stage, activations=mode
        )
    return _run(steps, p)


def _run(steps: dict[str, Any], p: Problem) -> tuple[dict[str, float], dict[str, list[float]]]:
    batch = first_batch(p)
    running = {name: Running(step, state, batch) for name, (step, state) in steps.items()}
    seconds = in_turn(running, REPEATS)
    return seconds, {name: one.losses for name, one in running.items()}


def update(p: Problem) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the median seconds of the optimizer's update alone, and no losses.

    The update is `optimizer(p)`, without and with clipping by a global norm.
    """
    import gpt

    import zerojax as zj
    from zerojax.optim import build_update
    from zerojax.program import assemble

    jax.config.update("jax_num_cpu_devices", 1)
    mesh, model, tx = zj.make_mesh(fsdp=1), gpt.unrolled_gpt(gpt_config(p)), optimizer(p)
    calls: dict[str, Any] = {}
    for row, clip_norm in zip(UPDATE, (None, 1.0), strict=True):
        optax_tx = (
            tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)
        )
        config = zj.ZeroConfig(stage=0, clip_norm=clip_norm)
        state = zj.build_train_step(model, tx, config, mesh).init(jax.random.key(0))
        parts = assemble(model, tx, config, mesh)
        with jax.set_mesh(parts.records.layout.mesh):
            own = build_update(parts.tx, parts.records.layout)
        grads = jax.tree.map(lambda a: 1e-3 * jnp.ones_like(a), state.params)
        params = jax.tree.map(jnp.copy, state.params)

        def plain_update(state: Any, grads: Any, tx: Any = optax_tx) -> Any:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        ours = jax.jit(
            lambda state, grads, own=own: own(state, jnp.float32(1), grads)[0], donate_argnums=0
        )
        calls[row.base] = _Updating(
            jax.jit(plain_update, donate_argnums=0), (params, optax_tx.init(params)), grads
        )
        calls[row.name] = _Updating(ours, state, grads)
    return in_turn(calls, 2 * REPEATS), {}


class _Updating:
    """An optimizer update that each call runs once more, with the same gradients."""

    def __init__(self, update: Any, state: Any, grads: Any) -> None:
        self._update, self._state, self._grads = update, state, grads

    def __call__(self) -> None:
        self._state = jax.block_until_ready(self._update(self._state, self._grads))
