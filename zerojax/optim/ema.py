"""Averages of the weights, as the last part of an optimizer: exponential, or schedule-free.

    tx = optax.chain(optax.adamw(3e-4), zj.Ema(0.9999))

    w'   = w + updates                        the weights that this step produces
    ema' = ema + (1 - decay) (w' - ema)       ema_0 = w_0

The average is a state that mirrors the parameters element by element, as a moment does. So it is
sharded, streamed, saved and restored like a moment, in every stage and tier. It also costs as much
as a moment: 4 bytes per parameter in storage, and 4 bytes per parameter in each direction on the
link of its tier.

It is written as a step towards w', not as `decay ema + (1 - decay) w'`: the float32 nearest to
0.9999 is too small by 1.7e-8, which is 1.7e-4 of 1 - decay. After 30 000 steps that form was off
by 1.6e-4 of the average (mean over 2048 elements, against float64), and the step by 3e-8.

With `moments="bfloat16"` the average stays float32. Over 20 000 steps in which weights of 0.02
walked, the average with decay 0.9999 moved by 0.058. Rounding to nearest lost 99 % of that, because
a step of 1e-4 of the distance is below half a unit of bfloat16. Stochastic rounding was off by
0.0025, and with decay 0.99 by 59 % of the average's distance from the weights, which is the
quantity that the average exists for.

Schedule-free AdamW (Defazio et al., arXiv:2405.15682) takes gradients at y, which is the program's
weights, and is evaluated at x, an average of y. With the update u of Adam without momentum, at z:

    z' = z + u            x' = x + c (z' - x)            y' = (1 - b1) z' + b1 x'

`c = r^2 / sum of r^2` weights each step by its learning rate r. Eliminating z gives

    y' - y = a u + (b1 c / (1 - b1)) (y - x)        with a = 1 - b1 + b1 c
    x' - x = (c / a) (y' - x)

so x is a moving average of the weights whose rate changes, and takes the place of Adam's first
moment. optax.contrib.schedule_free stores z instead, from which its x can only be computed next to
the weights. Here every reader of an `Ema` reads x.
"""

import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from zerojax.jaxprs import Instruction, Ref, flatten
from zerojax.state import Layout, OptStateMap
from zerojax.trees import Params
from zerojax.user_values import as_number


class EmaState(NamedTuple):
    """State of an `Ema`.

    Attributes:
      ema_params: the average, with the structure and shapes of the parameters.
      step: i32[], number of updates so far; None without `debias`.
    """

    ema_params: Any
    step: jax.Array | None


class Ema(optax.GradientTransformationExtraArgs):
    """An exponential moving average of the weights, to be put last into an `optax.chain`.

    Updates pass through unchanged. `program.ema_params` and `program.iter_params(state, ema=True)`
    read the average, and `zerojax.export_safetensors(..., ema=True)` exports it. A skipped step
    leaves it unchanged. Inside `optax.MultiSteps` it counts updates, and outside it counts steps.
    """

    __slots__ = ()

    def __new__(cls, decay: float, debias: bool = False) -> Self:
        """Create the transformation.

        Args:
          decay: fraction of the average that a step keeps, at least 0 and below 1.
          debias: whether to leave out the weights before the first step, as Adam corrects its
            moments (arXiv:1412.6980, section 3). The average of t steps is then sum_i decay^(t - i)
            w_i / sum_i decay^(t - i), i = 1 .. t. Without it the average starts at the initial
            weights, and keeps a fraction decay^t of them.

        Raises:
          ValueError: `decay` is not a number in [0, 1).
        """
        number = as_number(decay)
        if number is None or not 0 <= number < 1:
            raise ValueError(
                f"Ema(decay={decay!r}): decay must be at least 0 and below 1, such as 0.999"
            )
        decay = number
        log_decay = math.log(decay) if decay else -math.inf

        def init(params: Params) -> Any:
            # Copies: a step donates both parameters and state, so they must not share a buffer.
            return EmaState(jax.tree.map(jnp.copy, params), jnp.int32(0) if debias else None)

        def update(
            updates: Any, state: Any, params: Params = None, **extra: Any
        ) -> tuple[Any, Any]:
            del extra
            if params is None:
                raise ValueError(
                    "Ema averages the weights but was called without params: call "
                    "tx.update(grads, state, params)"
                )
            rate = 1 - decay
            step = None
            if debias:
                step = state.step + 1
                # The newest weight's share of the sum over i, which is 1 in the first step.
                # Computing 1 - decay^step directly would cancel.
                rate = (decay - 1) / jnp.expm1(step.astype(jnp.float32) * log_decay)
            after = optax.apply_updates(params, updates)
            ema_params = jax.tree.map(
                lambda ema, w: ema + rate * (w - ema), state.ema_params, after
            )
            return updates, EmaState(ema_params, step)

        return super().__new__(cls, init, update)


class _ScheduleFreeState(NamedTuple):
    """State of `schedule_free_adamw` besides Adam's second moment and the average.

    Attributes:
      step: i32[], number of updates so far.
      weight_sum: f32[], sum of the squared learning rates so far.
    """

    step: jax.Array
    weight_sum: jax.Array


def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Return schedule-free AdamW, which needs no decay of its learning rate.

    It computes what `optax.contrib.schedule_free_adamw` computes, up to rounding. Its state is
    Adam's second moment and the average x of the weights: 8 bytes per parameter, as for AdamW.
    Evaluate, export and generate with x, which is read like the average of a `zerojax.Ema`:
    `program.ema_params(state)`, `program.iter_params(state, ema=True)`, `export_hf(..., ema=True)`.
    Like `Ema` it must be last in a chain.

    Args:
      learning_rate: rate, or a schedule that only warms up.
      b1: fraction of x in the weights at which gradients are taken, between 0 and 1.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay of the weights, multiplied by the rate.

    Raises:
      ValueError: `b1` is not between 0 and 1.
    """
    number = as_number(b1)
    if number is None or not 0 < number < 1:
        raise ValueError(f"b1={b1!r} of schedule_free_adamw: between 0 and 1, such as 0.9")
    b1 = number
    adam = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay),
    )

    def init(params: Params) -> Any:
        state = _ScheduleFreeState(jnp.int32(0), jnp.float32(0))
        average = EmaState(jax.tree.map(jnp.copy, params), None)
        return adam.init(params), state, average

    def update(updates: Any, state: Any, params: Params = None, **extra: Any) -> tuple[Any, Any]:
        del extra
        if params is None:
            raise ValueError(
                "schedule_free_adamw was called without params: call tx.update(grads, state, "
                "params)"
            )
        adam_state, (step, weight_sum), average = state
        directions, adam_state = adam.update(updates, adam_state, params)
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        weight_sum = weight_sum + rate**2
        share = jnp.where(weight_sum > 0, rate**2 / weight_sum, 0.0)  # c: 1 in the first step
        factor = 1 - b1 + b1 * share  # a
        pull = b1 * share / (1 - b1)
        updates = jax.tree.map(
            lambda u, y, x: pull * (y - x) - factor * rate * u,
            directions,
            params,
            average.ema_params,
        )
        after = optax.apply_updates(params, updates)
        x = jax.tree.map(lambda x, y: x + (share / factor) * (y - x), average.ema_params, after)
        counted = _ScheduleFreeState(step + 1, weight_sum)
        return updates, (adam_state, counted, EmaState(x, None))

    return optax.GradientTransformationExtraArgs(init, update)


def ema_leaves(opt_map: OptStateMap) -> dict[int, list[int]]:
    """Return {index of a parameter leaf: indices of the optimizer state leaves that average it}."""
    tree = jax.tree.structure(opt_map.abstract)
    nodes = jax.tree.leaves(jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf=_is_ema)
    averages: dict[int, list[int]] = {}
    for node in filter(_is_ema, nodes):
        for j in jax.tree.leaves(node.ema_params):
            averages.setdefault(opt_map.owner(j), []).append(j)
    return averages


def _is_ema(node: Any) -> bool:
    return isinstance(node, EmaState)


def check_ema(layout: Layout) -> None:
    """Check that nothing in the optimizer changes the updates after an `Ema`.

    If something did, the average would not be of the weights that the step produces.

    Args:
      layout: layout of the program's state.

    Raises:
      ValueError: an update is changed after the average has seen it.
    """
    averages = ema_leaves(layout.opt_map)
    if not averages:
        return
    program = flatten(layout.update_jaxpr.jaxpr, layout.update_jaxpr.consts)
    updates = program.outputs[: len(layout.leaves)]
    states = program.outputs[len(layout.leaves) :]
    producers: dict[int, Instruction] = {}
    read_slots: set[int] = set()
    for i in program.instructions:
        producers |= dict.fromkeys(i.outs, i)
        read_slots.update(i.reads)

    def is_averaged(update: Ref, ema: Ref) -> bool:
        """Return whether an update was added to a weight, as far as the trace shows."""
        if not isinstance(update, int) or update in read_slots:
            return True
        i = producers.get(update)
        if i is None:
            return False
        # An equation that is not entered, such as the cond of optax.MultiSteps, makes both.
        if ema in i.outs:
            return True
        # A gate either passes an update or blocks it.
        is_gate = i.eqn.primitive.name == "select_n"
        return is_gate and any(is_averaged(case, ema) for case in i.ins[1:])

    for index, state_leaves in averages.items():
        for j in state_leaves:
            if not is_averaged(updates[index], states[j]):
                raise ValueError(
                    "zerojax.Ema does not see the final update of "
                    f"{layout.leaves[index].name}, because something changes the update "
                    "afterwards: put Ema last, as in "
                    "optax.chain(optax.adamw(3e-4), zerojax.Ema(0.999))"
                )


def ema_of_each(layout: Layout) -> list[int]:
    """Return for each parameter leaf the index of the optimizer state leaf that averages it.

    Args:
      layout: layout of the program's state.

    Raises:
      ValueError: the optimizer has no `Ema`, or some leaf has no average or more than one.
    """
    averages = ema_leaves(layout.opt_map)
    repair = "use optax.chain(tx, zerojax.Ema(0.999))"
    if not averages:
        raise ValueError(f"this program's optimizer keeps no average of the weights: {repair}")
    state_leaves = []
    for index, leaf in enumerate(layout.leaves):
        leaf_averages = averages.get(index, [])
        if len(leaf_averages) != 1:
            raise ValueError(
                f"the optimizer keeps {len(leaf_averages)} averages of {leaf.name} instead of one: "
                f"{repair}"
            )
        state_leaves += leaf_averages
    return state_leaves
