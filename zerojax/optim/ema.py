"""An exponential moving average of the weights, as the last part of an optimizer.

    tx = optax.chain(optax.adamw(3e-4), zj.Ema(0.9999))

    w'   = w + updates                        what the step is about to make
    ema' = ema + (1 - decay) (w' - ema)       ema_0 = w_0

The average is a state that mirrors the parameters element by element, as a moment does. So it is
sharded, streamed, saved and read again as moments are, in every stage and tier, and it costs what a
moment costs: 4 bytes a parameter at rest, and as many each way on the link of its tier.

It is written as a step towards w' and not as `decay ema + (1 - decay) w'`: the float32 next to
0.9999 is too small by 1.7e-8, which is 1.7e-4 of 1 - decay. Over 30 000 steps of such weights the
other form ended 1.6e-4 of the average beside it (mean over 2048 elements, against float64), this
one 3e-8.

With `moments="bfloat16"` it stays float32. Weights of 0.02 walked for 20 000 steps, and the average
with decay 0.9999 moved by 0.058. Rounded to nearest 99 % of that was lost, since a step of 1e-4 of
the distance is below half a unit of bfloat16. Rounded stochastically it was off by 0.0025; and with
decay 0.99 by 59 % of its distance from the weights, which is all that it is for.
"""

import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from zerojax.given import as_number
from zerojax.jaxprs import flatten
from zerojax.state import Layout, OptStateMap


class EmaState(NamedTuple):
    """State of an `Ema`.

    Attributes:
      ema_params: the average, like the parameters.
      step: i32[], updates so far, with `debias`, else None.
    """

    ema_params: Any
    step: jax.Array | None


class Ema(optax.GradientTransformationExtraArgs):
    """An exponential moving average of the weights, to be put last into an `optax.chain`; updates
    pass as they are.

    `program.ema_params` and `program.iter_params(state, ema=True)` read it,
    `zerojax.export_safetensors(..., ema=True)` exports it. A step that is skipped leaves it as it
    was. Inside of `optax.MultiSteps` it counts updates, and outside of it steps.
    """

    __slots__ = ()

    def __new__(cls, decay: float, debias: bool = False) -> Self:
        """Make the transformation.

        Args:
          decay: part of the average that a step keeps, at least 0 and below 1.
          debias: the average of t steps is sum_i decay^(t - i) w_i / sum_i decay^(t - i), i = 1 ..
            t, without the weights before the first step: as Adam corrects its moments
            (arXiv:1412.6980, section 3). Else it starts at these, and holds decay^t of them.

        Raises:
          ValueError: `decay` is no such number.
        """
        number = as_number(decay)
        if number is None or not 0 <= number < 1:
            raise ValueError(
                f"Ema(decay={decay!r}): a number of at least 0 and below 1 is needed, such as 0.999"
            )
        decay = number
        log_decay = math.log(decay) if decay else -math.inf

        def init(params: Any) -> Any:
            # Copies: a step donates parameters and state, and no buffer may be both.
            return EmaState(jax.tree.map(jnp.copy, params), jnp.int32(0) if debias else None)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            del extra
            if params is None:
                raise ValueError("Ema averages weights: call tx.update(grads, state, params)")
            rate, step = 1 - decay, None
            if debias:
                step = state.step + 1
                # The newest weight's part of the sum over i: all of it in the first step. 1 -
                # decay^step would cancel.
                rate = (decay - 1) / jnp.expm1(step.astype(jnp.float32) * log_decay)
            after = optax.apply_updates(params, updates)
            return updates, EmaState(
                jax.tree.map(lambda ema, w: ema + rate * (w - ema), state.ema_params, after), step
            )

        return super().__new__(cls, init, update)


def ema_leaves(opt_map: OptStateMap) -> dict[int, list[int]]:
    """Return {index of a parameter leaf: indices of the leaves of the optimizer's state that are
    its averages}.
    """
    tree = jax.tree.structure(opt_map.abstract)
    nodes = jax.tree.leaves(jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf=_is_ema)
    found: dict[int, list[int]] = {}
    for node in filter(_is_ema, nodes):
        for j in jax.tree.leaves(node.ema_params):
            found.setdefault(opt_map.owner(j), []).append(j)
    return found


def _is_ema(node: Any) -> bool:
    return isinstance(node, EmaState)


def check_ema(layout: Layout) -> None:
    """Raise ValueError if an average is not that of the weights that a step makes: if something
    changes updates after it.
    """
    averages = ema_leaves(layout.opt_map)
    if not averages:
        return
    program, count = (
        flatten(layout.update_jaxpr.jaxpr, layout.update_jaxpr.consts),
        len(layout.leaves),
    )
    maker = {out: i for i in program.instructions for out in i.outs}
    is_read = {slot for i in program.instructions for slot in i.reads}

    def is_averaged(ref: Any, ema: Any) -> bool:
        """Tell whether an update was added to a weight, for all that the trace shows."""
        if not isinstance(ref, int) or ref in is_read:
            return True
        i = maker.get(ref)
        if i is None:
            return False
        # What is not entered, such as the cond of optax.MultiSteps, makes both. A gate lets an
        # update pass, or nothing.
        return ema in i.outs or (
            i.eqn.primitive.name == "select_n" and any(is_averaged(r, ema) for r in i.ins[1:])
        )

    for index, leaves in averages.items():
        for j in leaves:
            if not is_averaged(program.outputs[index], program.outputs[count + j]):
                raise ValueError(
                    f"zerojax.Ema does not see the update that {layout.leaves[index].name} gets, because something changes it "
                    "afterwards: put Ema last, as in optax.chain(optax.adamw(3e-4), zerojax.Ema(0.999))"
                )


def ema_of_each(layout: Layout) -> list[int]:
    """Return for each parameter leaf the index of the leaf of the optimizer's state that is its
    average.

    Raises:
      ValueError: the optimizer has no `Ema`, or some leaf has none, or several.
    """
    averages = ema_leaves(layout.opt_map)
    last = "make it optax.chain(tx, zerojax.Ema(0.999))"
    if not averages:
        raise ValueError(f"this program's optimizer keeps no average of the weights: {last}")
    for index, leaf in enumerate(layout.leaves):
        if len(found := averages.get(index, [])) != 1:
            raise ValueError(
                f"the optimizer keeps {len(found)} averages of {leaf.name}, and one is needed: {last}"
            )
    return [averages[index][0] for index in range(len(layout.leaves))]
